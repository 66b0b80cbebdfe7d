//! `--accept-catalog` with an object store that delays or withholds its responses.
//!
//! - The startup waits, reports its progress on `--http`, and has the same result as with a fast
//!   store.
//! - If the store never responds, the startup fails with an error, and the next start can accept
//!   the catalog.
//!
//! ```text
//!   fulmar start ── HTTP ──> Gate: closed, open with a delay, or open ── HTTP ──> S3 server
//! ```

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_workload::server::S3Server;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::common::gate::{Gate, State, address};
use crate::common::{SLOW_WORKER, client, wait_until, with_timeout};

const CATALOG: [&str; 3] = ["meta.db", "meta.db-wal", "meta.head"];
/// Delay of each chunk that the slow store sends.
const DELAY: Duration = Duration::from_millis(20);
/// Prefix of the store in its bucket.
const PREFIX: &str = "node";

/// A data directory with an old copy of the catalog, and its store.
struct Rig {
    s3: S3Server,
    directory: tempfile::TempDir,
    /// The revision that the error of a start offers to accept.
    revision: String,
}

impl Rig {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    /// Saves the data directory and the objects.
    fn save(&self) {
        copy(&self.path("data"), &self.path("saved-data"));
        copy(&self.s3.objects().join(PREFIX), &self.path("saved-objects"));
    }

    /// Restores the data directory and the objects.
    fn restore(&self) {
        copy(&self.path("saved-data"), &self.path("data"));
        copy(&self.path("saved-objects"), &self.s3.objects().join(PREFIX));
    }

    /// Returns the command of a node that connects to the store directly or through a gate.
    fn command(&self, gate: Option<&Gate>, flags: &[&str]) -> Command {
        let mut command = Node::command(&self.path("data"), flags);
        command.args(["--insecure", "--store", &self.s3.url(PREFIX)]).envs(self.s3.environment());
        if let Some(gate) = gate {
            command.env("AWS_ENDPOINT_URL", gate.url());
        }
        command
    }

    fn start(&self, gate: Option<&Gate>, flags: &[&str]) -> Result<Node, String> {
        start(self.command(gate, flags), &self.path("stderr"))
    }

    fn accept_flags(&self) -> [&str; 2] {
        ["--accept-catalog", &self.revision]
    }
}

fn copy(from: &Path, to: &Path) {
    if to.exists() {
        std::fs::remove_dir_all(to).unwrap();
    }
    let copied = Command::new("cp").args(["-a", "--sparse=always"]).args([from, to]).status().unwrap();
    assert!(copied.success());
}

async fn rig() -> Rig {
    let directory = tempfile::tempdir().unwrap();
    let mut rig = Rig { s3: S3Server::start().unwrap(), directory, revision: String::new() };
    let node = rig.start(None, &[]).unwrap();
    let system = client(&node, "fulmar").await;
    system.batch_execute("CREATE USER ada PASSWORD 'secret'; CREATE DATABASE kept").await.unwrap();
    let sql = "CREATE TABLE t(x); INSERT INTO t VALUES ('kept')";
    client(&node, "kept").await.batch_execute(sql).await.unwrap();
    drop(system);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    copy(&rig.path("data"), &rig.path("old"));
    let node = rig.start(None, &[]).unwrap();
    let system = client(&node, "fulmar").await;
    system.batch_execute("DROP USER ada; CREATE DATABASE late").await.unwrap();
    let sql = "CREATE TABLE t(x); INSERT INTO t VALUES ('late')";
    client(&node, "late").await.batch_execute(sql).await.unwrap();
    client(&node, "kept").await.batch_execute("INSERT INTO t VALUES ('newer')").await.unwrap();
    drop(system);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    for file in CATALOG {
        let (old, new) = (rig.path("old").join(file), rig.path("data").join(file));
        let _ = std::fs::remove_file(&new); // a file of a running node may be absent
        if old.exists() {
            std::fs::copy(old, new).unwrap();
        }
    }
    let error = rig.start(None, &[]).err().expect("a start with an old catalog must be refused");
    let (_, revision) = error.split_once("--accept-catalog ").unwrap_or_else(|| panic!("{error}"));
    rig.revision = revision.split_whitespace().next().unwrap().to_owned();
    rig.save();
    rig
}

/// Creates a database, and reads the databases, users and rows.
async fn contents(node: &Node) -> Vec<String> {
    let system = client(node, "fulmar").await;
    system.batch_execute("CREATE DATABASE fresh").await.unwrap();
    let mut found = column(&system, "SELECT datname FROM pg_database ORDER BY 1").await;
    found.extend(column(&system, "SELECT rolname FROM pg_roles ORDER BY 1").await);
    found.extend(column(&client(node, "kept").await, "SELECT x FROM t ORDER BY 1").await);
    let fresh = client(node, "fresh").await;
    found.extend(column(&fresh, "SELECT name FROM sqlite_schema").await);
    found
}

/// Returns the status code and the body of `/healthz`, if the node responds.
async fn health(http: &str) -> Option<(u16, String)> {
    let mut connection = TcpStream::connect(http).await.ok()?;
    let request = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";
    connection.write_all(request).await.ok()?;
    let mut response = String::new();
    connection.read_to_string(&mut response).await.ok()?;
    let (head, body) = response.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn accept_catalog_has_the_same_result_with_a_slow_store() {
    let rig = rig().await;
    let node = rig.start(None, &rig.accept_flags()).unwrap();
    let expected = contents(&node).await;
    assert_eq!(node.stop_with(Signal::KILL), None);
    assert!(expected.contains(&"ada".to_owned()) && !expected.contains(&"late".to_owned()), "{expected:?}");
    assert!(
        expected.contains(&"newer".to_owned()),
        "tenants in the accepted catalog must keep all rows: {expected:?}"
    );

    rig.restore();
    let gate = Gate::start(address(&rig.s3.environment()), State::Closed).await;
    let http = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let command = rig.command(Some(&gate), &rig.accept_flags());
    // Use a fixed HTTP port, so that it is known before the node is ready.
    let mut command_with_port = Command::new(command.get_program());
    let arguments: Vec<_> = command.get_args().collect();
    let index = arguments.iter().position(|argument| *argument == "--http").unwrap() + 1;
    command_with_port.args(&arguments[..index]).arg(&http).args(&arguments[index + 1..]);
    command_with_port.env_remove("RUST_LOG");
    command_with_port.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let log = rig.path("stderr");
    let starting = tokio::task::spawn_blocking(move || start(command_with_port, &log));
    wait_until("the start waits for the store", async || gate.requests.load(Ordering::Relaxed) > 0).await;
    wait_until(
        "the start reports its progress",
        async || matches!(health(&http).await, Some((503, body)) if body.starts_with("starting: ")),
    )
    .await;
    assert!(!starting.is_finished(), "the node must not be ready before the store has responded");
    gate.state.send_replace(State::Open(DELAY));
    let node = with_timeout("the start ends", starting).await.unwrap().unwrap();
    let mut last = None;
    wait_until("all workers respond", async || {
        last = health(&http).await;
        !last.as_ref().is_some_and(|(_, body)| body.contains(SLOW_WORKER))
    })
    .await;
    assert_eq!(last.map(|(status, _)| status), Some(200));
    assert_eq!(contents(&node).await, expected);
    gate.state.send_replace(State::Open(Duration::ZERO));
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    let node = rig.start(None, &[]).unwrap();
    assert_eq!(column(&client(&node, "kept").await, "SELECT x FROM t ORDER BY 1").await, ["kept", "newer"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn start_without_a_response_of_the_store_fails_and_can_be_repeated() {
    let rig = rig().await;
    let gate = Gate::start(address(&rig.s3.environment()), State::Closed).await;
    let (command, log) = (rig.command(Some(&gate), &rig.accept_flags()), rig.path("stderr"));
    let starting = tokio::task::spawn_blocking(move || start(command, &log));
    let result = with_timeout("the start ends", starting).await.unwrap();
    let error = result.err().expect("a start without a response of the store must fail");
    assert!(error.contains("store"), "{error}");
    // The failed start has not accepted the catalog, not even partially.
    let error = rig.start(None, &[]).err().expect("the catalog must not be accepted yet");
    assert!(error.contains(&format!("--accept-catalog {}", rig.revision)), "{error}");
    let node = rig.start(None, &rig.accept_flags()).unwrap();
    let found = contents(&node).await;
    assert!(found.contains(&"ada".to_owned()) && found.contains(&"newer".to_owned()), "{found:?}");
}

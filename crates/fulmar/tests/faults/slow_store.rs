//! `--accept-catalog` with an object store that holds or delays its answers: the start waits, reports that on `--http`, and has the same
//! result as with a fast store. If the store never answers, the start ends with an error, and the next one can accept the catalog.
//!
//! ```text
//!   fulmar start ── HTTP ──> Gate: closed, open with a delay, or open ── HTTP ──> S3 server
//! ```

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fulmar_workload::server::S3Server;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::*;
use crate::common::{client, until, within};

const CATALOG: [&str; 3] = ["meta.db", "meta.db-wal", "meta.head"];
/// Added to each piece that the slow store sends.
const DELAY: Duration = Duration::from_millis(20);
const NAME: &str = "node";

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Requests reach the store, and their answers wait.
    Closed,
    /// Answers pass with this delay.
    Open(Duration),
}

/// A proxy that holds the answers of a store.
struct Gate {
    address: SocketAddr,
    state: watch::Sender<State>,
    /// Pieces of requests that have come.
    requests: Arc<AtomicUsize>,
}

impl Gate {
    async fn before(store: String, state: State) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, requests) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let (state, _) = watch::channel(state);
        let gate = Gate { address, state: state.clone(), requests: requests.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&store).await else { continue };
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                let requests = requests.clone();
                tokio::spawn(pass(from_client, to_server, async move || {
                    requests.fetch_add(1, Ordering::Relaxed);
                }));
                let mut state = state.subscribe();
                tokio::spawn(pass(from_server, to_client, async move || {
                    let opened = state.wait_for(|state| *state != State::Closed).await.map(|state| *state);
                    if let Ok(State::Open(delay)) = opened {
                        tokio::time::sleep(delay).await;
                    }
                }));
            }
        });
        gate
    }
}

/// Passes on what comes, after `wait`, until one side ends.
async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut wait: impl AsyncFnMut(),
) {
    let mut piece = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut piece).await {
        wait().await;
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

/// A data directory whose catalog is an old copy, and its store.
struct Rig {
    s3: S3Server,
    directory: tempfile::TempDir,
    /// Offered by the refusal.
    revision: String,
}

impl Rig {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    /// Copies the data directory and the objects, from or to their places.
    fn save(&self) {
        copy(&self.path("data"), &self.path("saved-data"));
        copy(&self.s3.objects().join(NAME), &self.path("saved-objects"));
    }

    fn restore(&self) {
        copy(&self.path("saved-data"), &self.path("data"));
        copy(&self.path("saved-objects"), &self.s3.objects().join(NAME));
    }

    /// A node whose store is behind a gate, or is not.
    fn command(&self, gate: Option<&Gate>, flags: &[&str]) -> Command {
        let mut command = Node::command(&self.path("data"), flags);
        command.args(["--insecure", "--store", &self.s3.url(NAME)]).envs(self.s3.environment());
        if let Some(gate) = gate {
            command.env("AWS_ENDPOINT_URL", format!("http://localhost:{}", gate.address.port()));
        }
        command
    }

    fn start(&self, gate: Option<&Gate>, flags: &[&str]) -> Result<Node, String> {
        start(self.command(gate, flags), &self.path("stderr"))
    }

    /// Where the S3 server listens.
    fn store(&self) -> String {
        let environment = self.s3.environment();
        let (_, url) = environment.iter().find(|(name, _)| name == "AWS_ENDPOINT_URL").unwrap();
        url.trim_start_matches("http://").to_owned()
    }

    fn accept(&self) -> [&str; 2] {
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
    assert_eq!(node.end(Signal::TERM), Some(0));
    copy(&rig.path("data"), &rig.path("old"));
    let node = rig.start(None, &[]).unwrap();
    let system = client(&node, "fulmar").await;
    system.batch_execute("DROP USER ada; CREATE DATABASE late").await.unwrap();
    let sql = "CREATE TABLE t(x); INSERT INTO t VALUES ('late')";
    client(&node, "late").await.batch_execute(sql).await.unwrap();
    client(&node, "kept").await.batch_execute("INSERT INTO t VALUES ('newer')").await.unwrap();
    drop(system);
    assert_eq!(node.end(Signal::TERM), Some(0));
    for file in CATALOG {
        let (old, new) = (rig.path("old").join(file), rig.path("data").join(file));
        let _ = std::fs::remove_file(&new); // a file of a running node may be absent
        if old.exists() {
            std::fs::copy(old, new).unwrap();
        }
    }
    let refusal = rig.start(None, &[]).err().expect("a start with an old catalog is refused");
    let (_, revision) = refusal.split_once("--accept-catalog ").unwrap_or_else(|| panic!("{refusal}"));
    rig.revision = revision.split_whitespace().next().unwrap().to_owned();
    rig.save();
    rig
}

/// Databases, users and rows, before and after a database is created.
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

/// The status and the body of an answer of `/healthz`, if there is one.
async fn health(http: &str) -> Option<(u16, String)> {
    let mut connection = TcpStream::connect(http).await.ok()?;
    let request = b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n";
    connection.write_all(request).await.ok()?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_is_accepted_with_a_slow_store_as_with_a_fast_one() {
    let rig = rig().await;
    let node = rig.start(None, &rig.accept()).unwrap();
    let expected = contents(&node).await;
    assert_eq!(node.end(Signal::KILL), None);
    assert!(expected.contains(&"ada".to_owned()) && !expected.contains(&"late".to_owned()), "{expected:?}");
    assert!(expected.contains(&"newer".to_owned()), "rows of tenants that the catalog has: {expected:?}");

    rig.restore();
    let gate = Gate::before(rig.store(), State::Closed).await;
    let http = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let command = rig.command(Some(&gate), &rig.accept());
    // The port is known before the node is ready.
    let mut known = Command::new(command.get_program());
    let arguments: Vec<_> = command.get_args().collect();
    let place = arguments.iter().position(|argument| *argument == "--http").unwrap() + 1;
    known.args(&arguments[..place]).arg(&http).args(&arguments[place + 1..]);
    known.env_remove("RUST_LOG");
    known.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let log = rig.path("stderr");
    let starting = tokio::task::spawn_blocking(move || start(known, &log));
    until("the start waits for the store", async || gate.requests.load(Ordering::Relaxed) > 0).await;
    until(
        "the start reports its progress",
        async || matches!(health(&http).await, Some((503, body)) if body.starts_with("starting: ")),
    )
    .await;
    assert!(!starting.is_finished(), "it cannot be ready without an answer of the store");
    gate.state.send_replace(State::Open(DELAY));
    let node = within("the start ends", starting).await.unwrap().unwrap();
    assert_eq!(health(&http).await.map(|(status, _)| status), Some(200));
    assert_eq!(contents(&node).await, expected);
    gate.state.send_replace(State::Open(Duration::ZERO));
    assert_eq!(node.end(Signal::TERM), Some(0));
    let node = rig.start(None, &[]).unwrap();
    assert_eq!(column(&client(&node, "kept").await, "SELECT x FROM t ORDER BY 1").await, ["kept", "newer"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_store_does_not_answer_ends_and_accepts_the_catalog_later() {
    let rig = rig().await;
    let gate = Gate::before(rig.store(), State::Closed).await;
    let (command, log) = (rig.command(Some(&gate), &rig.accept()), rig.path("stderr"));
    let starting = tokio::task::spawn_blocking(move || start(command, &log));
    let refusal = within("the start ends", starting).await.unwrap().err().expect("there is no store");
    assert!(refusal.contains("store"), "{refusal}");
    // It has not half accepted the catalog.
    let refusal = rig.start(None, &[]).err().expect("not accepted yet");
    assert!(refusal.contains(&format!("--accept-catalog {}", rig.revision)), "{refusal}");
    let node = rig.start(None, &rig.accept()).unwrap();
    let found = contents(&node).await;
    assert!(found.contains(&"ada".to_owned()) && found.contains(&"newer".to_owned()), "{found:?}");
}

//! The system refuses new threads (`ulimit -u`, `pids.max`): workers run statements themselves that
//! they would otherwise move to the offload pool.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use tokio_postgres::SimpleQueryMessage;

use super::*;
use crate::common::{client, wait_until, with_timeout};

/// The id of an unprivileged user. The limit does not apply to root.
const NOBODY: u32 = 65_534;
/// Number of sessions that run large statements concurrently.
const SESSIONS: usize = 10;

/// Returns the command of a node that does not run as root.
fn unprivileged(directory: &Path) -> Command {
    let command = Node::command(&directory.join("data"), &["--insecure"]);
    // Copy the executable to a directory that the user can read.
    let program = directory.join("fulmar");
    std::fs::copy(command.get_program(), &program).unwrap();
    let mut unprivileged = Command::new(program);
    unprivileged.args(command.get_args()).env_remove("RUST_LOG");
    if as_nobody(&mut unprivileged) {
        chown(directory, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    unprivileged
}

/// Makes a command run without root privileges. Returns false if the test does not run as root.
fn as_nobody(command: &mut Command) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        command.uid(NOBODY).gid(NOBODY);
    }
    is_root
}

/// Limits the number of threads of a node's user. `None` restores the original limit.
fn limit_threads(node: &Node, limit: Option<u64>) {
    let original = rustix::process::getrlimit(rustix::process::Resource::Nproc).maximum;
    let limit = limit.or(original).map_or("unlimited".to_owned(), |limit| limit.to_string());
    let mut command = Command::new("prlimit");
    command.args(["--pid", &node.process.id().to_string(), &format!("--nproc={limit}:")]);
    // A process may change the limits of another process of the same user.
    as_nobody(&mut command);
    assert!(command.status().expect("this test requires prlimit of util-linux").success());
}

fn has_offload_threads(node: &Node) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", node.process.id())).unwrap();
    // A thread may exit between the two reads.
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.into_iter().any(|name| name.starts_with("fulmar-offload"))
}

/// Returns large statements with their results.
fn statements() -> Vec<(String, &'static str)> {
    vec![
        ("SELECT length(hex(zeroblob(1000000)))".to_owned(), "2000000"),
        (
            "SELECT json_array_length('[' || replace(hex(zeroblob(50000)), '00', '1,') || '1]')".to_owned(),
            "50001",
        ),
        (format!("SELECT length('{}')", "x".repeat(300_000)), "300000"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300)
             SELECT count(*) FROM (SELECT DISTINCT i || hex(zeroblob(50000)) FROM n)"
                .to_owned(),
            "300",
        ),
    ]
}

/// Runs a statement and returns its single value.
async fn value(client: &Client, sql: &str) -> String {
    let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
    let row = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    row.unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn large_statements_work_without_offload_threads() {
    let directory = tempfile::tempdir().unwrap();
    let log: PathBuf = directory.path().join("stderr");
    let node = start(unprivileged(directory.path()), &log).unwrap();
    let system = client(&node, "fulmar").await;
    system.batch_execute("CREATE DATABASE one; CREATE DATABASE two").await.unwrap();
    let (one, two) = (client(&node, "one").await, client(&node, "two").await);
    one.batch_execute("CREATE TABLE t(x)").await.unwrap();
    two.batch_execute("CREATE TABLE t(x)").await.unwrap();

    limit_threads(&node, Some(1));
    for (sql, expected) in statements() {
        assert_eq!(with_timeout(&sql, value(&one, &sql)).await, expected, "{sql}");
    }
    let insert = "INSERT INTO t SELECT hex(zeroblob(1000000))";
    with_timeout("a large commit", one.batch_execute(insert)).await.unwrap();
    let large = "x".repeat(200_000);
    let length = async { one.query_one("SELECT CAST(length($1) AS TEXT)", &[&large]).await };
    assert_eq!(with_timeout("a large parameter", length).await.unwrap().get::<_, String>(0), "200000");

    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        let one = client(&node, "one").await;
        sessions.push(tokio::spawn(async move {
            for (sql, expected) in statements() {
                assert_eq!(value(&one, &sql).await, expected, "{sql}");
            }
        }));
    }
    with_timeout("a small statement of another tenant", two.batch_execute("INSERT INTO t VALUES (1)"))
        .await
        .unwrap();
    for session in sessions {
        with_timeout("concurrent large statements", session).await.unwrap();
    }
    assert!(!has_offload_threads(&node), "the node has started threads despite the limit");

    // A cancel request takes effect where SQLite can interrupt the statement.
    let token = one.cancel_token();
    let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(length(hex(zeroblob(40000)))) FROM n";
    let mut statement = std::pin::pin!(one.batch_execute(endless));
    let error = with_timeout("a cancelled statement", async {
        loop {
            tokio::select! {
                result = &mut statement => return result.unwrap_err(),
                _ = token.cancel_query(tokio_postgres::NoTls) => {}
            }
        }
    })
    .await;
    assert_eq!(error.code().map(|code| code.code()), Some("57014"), "{error}");

    // The last cancel request may arrive after its statement has ended, and cancel a later one.
    wait_until("the cancelled session is usable again", async || match one.batch_execute("SELECT 1").await {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.code().map(|code| code.code()), Some("57014"), "{error}");
            false
        }
    })
    .await;
    let one = client(&node, "one").await;
    limit_threads(&node, None);
    wait_until("large statements run on offload threads again", async || {
        value(&one, &statements()[0].0).await;
        has_offload_threads(&node)
    })
    .await;
    assert_eq!(value(&one, "SELECT length(x) FROM t").await, "2000000");
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("could not start a thread of the offload pool"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

//! The event log and tokens: across restarts, on the command line, and without secrets in any file.

mod common;

use std::path::Path;

use common::{Node, client, fulmar, run, stderr_of_failure, stdout, wait, wait_until, with_timeout};
use rustix::process::Signal;
use serde_json::Value;

fn events(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let url = node.url();
    let printed = stdout(&run(&[&["events", "--server", &url, "-n", "1000", "--json"], arguments].concat()));
    printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// How many starts the files of a data directory record.
fn starts_on_disk(directory: &Path) -> usize {
    let files = std::fs::read_dir(directory.join("events")).unwrap();
    let starts = |file: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(file.unwrap().path()).unwrap().matches("node.started").count()
    };
    files.map(starts).sum()
}

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["kind"] == kind).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_shutdowns_and_crashes_are_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    stdout(&run(&["tenant", "--server", &node.url(), "create", "shop"]));
    let first = events(&node, &[]);
    let kinds: Vec<&str> = first.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["node.started", "database.created"]);
    assert_eq!(first[0]["details"]["after"], "nothing");
    client(&node, "shop").await.batch_execute("CREATE TABLE t(a); INSERT INTO t VALUES (1)").await.unwrap();
    // Events are written in the background. A clean shutdown waits until they are on disk.
    assert_eq!(node.stop_with(Signal::TERM), Some(0));

    let node = Node::start(directory.path(), &["--insecure"]);
    let second = events(&node, &[]);
    let started = of_kind(&second, "node.started");
    assert_eq!((started.len(), &started[1]["details"]["after"]), (2, &"a stop".into()));
    assert_eq!(of_kind(&second, "node.stopping")[0]["details"]["signal"], "SIGTERM");
    assert_eq!(of_kind(&second, "node.stopped").len(), 1);
    client(&node, "shop").await.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
    // A crash can only be recorded after a start that is on disk.
    wait_until("the start is on disk", async || starts_on_disk(directory.path()) == 2).await;
    assert_eq!(node.stop_with(Signal::KILL), None);

    let node = Node::start(directory.path(), &["--insecure", "--disk-reserve", "4000000TB"]);
    let disk_full = async {
        loop {
            let third = events(&node, &[]);
            if !of_kind(&third, "disk.full").is_empty() {
                break third;
            }
            tokio::task::yield_now().await;
        }
    };
    let third = with_timeout("the event disk.full is recorded", disk_full).await;
    let started = of_kind(&third, "node.started");
    assert_eq!(started.last().unwrap()["details"]["after"], "a crash");
    assert!(started.last().unwrap()["details"]["log_records"].as_u64() >= Some(1), "{started:?}");
    assert!(third.is_sorted_by_key(|event| event["id"].as_u64()));
    let of_shop = events(&node, &["--tenant", "shop"]);
    assert!(of_shop.len() == 1 && of_shop[0]["kind"] == "database.created", "{of_shop:?}");
    // All times have the length of "2026-01-02 03:04:05.678".
    assert!(third.iter().all(|event| event["time"].as_str().unwrap().len() == 23), "{third:?}");
    let unknown = run(&["events", "--server", &node.url(), "--tenant", "nobody"]);
    assert_eq!(stdout(&unknown), "");
    let stderr = String::from_utf8_lossy(&unknown.stderr);
    assert!(stderr.contains("no events for tenant \"nobody\""), "{unknown:?}");
    // disk.full may be recorded before node.started, or after it.
    let printed = stdout(&run(&["events", "--server", &node.url(), "-n", "2"]));
    assert!(printed.contains(" error   disk.full ") && printed.lines().count() == 2, "{printed}");
    assert_eq!(node.stop_with(Signal::INT), Some(0));
}

#[test]
fn follow_streams_new_events_until_interrupted() {
    use std::io::{BufRead, BufReader};
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    let url = node.url();
    let mut following = fulmar(&["events", "--server", &url, "--follow", "--json"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let mut next = || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    assert_eq!(next()["kind"], "node.started");
    stdout(&run(&["tenant", "--server", &url, "create", "shop"]));
    let created = next();
    assert_eq!((&created["kind"], &created["tenant"]), (&"database.created".into(), &"shop".into()));
    stdout(&run(&["tenant", "--server", &url, "rename", "shop", "store"]));
    assert_eq!(next()["details"]["from"], "shop");
    rustix::process::kill_process(rustix::process::Pid::from_child(&following), Signal::INT).unwrap();
    assert_eq!(wait(&mut following).code(), Some(0));
}

/// Appends the contents of all files below a directory.
fn all_bytes(directory: &Path, all: &mut Vec<u8>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all_bytes(&path, all);
        } else if path.file_name().is_some_and(|name| name != "superuser-password") {
            all.extend(std::fs::read(path).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_grant_access_and_secrets_are_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let (data, log) = (directory.path().join("data"), directory.path().join("log"));
    let log_file = std::fs::File::create(&log).unwrap();
    let node = Node::start_with(&data, &["--log-level", "trace", "--slow-statement", "1"], log_file.into());
    let superuser = std::fs::read_to_string(data.join("superuser-password")).unwrap().trim().to_owned();
    let password = data.join("superuser-password");
    let (url, password) = (node.url(), password.to_str().unwrap());
    let token = |arguments: &[&str]| {
        run(&[&["token", "--server", &url, "--password-file", password], arguments].concat())
    };
    stdout(&run(&["tenant", "--server", &url, "--password-file", password, "create", "shop"]));
    let all = stdout(&token(&["create", "all"])).trim().to_owned();
    let created: Value = serde_json::from_str(&stdout(&token(&[
        "create",
        "one",
        "--database",
        "shop",
        "--expires",
        "90d",
        "--json",
    ])))
    .unwrap();
    let one = created["token"].as_str().unwrap().to_owned();
    let listed: Value = serde_json::from_str(&stdout(&token(&["list", "--json"]))).unwrap();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["tenant"], &listed[0]["expires"]),
        (&"all".into(), &Value::Null, &Value::Null)
    );
    assert_eq!((&listed[1]["tenant"], listed[1]["expires"].is_string()), (&"shop".into(), true));
    assert!(stdout(&token(&["list"])).contains("never"));
    assert!(
        stderr_of_failure(&token(&["create", "two", "--expires", "soon"]), 1)
            .contains("is not a time interval")
    );
    assert!(
        stderr_of_failure(&token(&["create", "two", "--expires", "90"]), 1).contains("\"90\" has no unit")
    );

    let file = directory.path().join("token");
    let status = |token: &str| {
        std::fs::write(&file, format!("{token}\n")).unwrap();
        common::status(&["--json", "--http", &node.http, "--token-file", file.to_str().unwrap()])
    };
    let metrics = |output: String| serde_json::from_str::<Value>(&output).unwrap()["metrics"].to_string();
    assert!(metrics(stdout(&status(&all))).contains("fulmar_sessions_total"));
    let of_one = metrics(stdout(&status(&one)));
    assert!(of_one.contains("shop") && !of_one.contains("fulmar_sessions_total"), "{of_one}");
    // The health requires no token.
    let none = common::status(&["--http", &node.http]);
    assert!(String::from_utf8_lossy(&none.stderr).contains("fulmar token create"), "{none:?}");
    assert_eq!(stdout(&none).lines().count(), 1, "{none:?}");
    let none: Value =
        serde_json::from_str(&stdout(&common::status(&["--json", "--http", &node.http]))).unwrap();
    assert_eq!((&none["healthy"], &none["metrics"]), (&true.into(), &Value::Null));
    let guessed = status("fulmar_guessed-token");
    assert!(stderr_of_failure(&guessed, 1).contains("the token is invalid or has expired"));
    assert!(String::from_utf8_lossy(&guessed.stdout).contains("\"healthy\":true"));
    assert_eq!(stdout(&token(&["drop", "one"])), "dropped one\n");
    stderr_of_failure(&status(&one), 1);

    // Send passwords in every way that the protocol and the SQL dialect allow.
    let mut config: tokio_postgres::Config = format!("{url}/fulmar").parse().unwrap();
    let (root, connection) = config.password(&superuser).connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    root.batch_execute("CREATE USER anna PASSWORD 'hunter2-created'").await.unwrap();
    root.batch_execute("ALTER USER anna PASSWORD 'hunter2-altered'").await.unwrap();
    assert!(root.batch_execute("ALTER USER nobody PASSWORD 'hunter2-failed'").await.is_err());
    assert!(root.batch_execute("ALTER USER anna PASSWORD 'hunter2-syntax' AND MORE").await.is_err());
    assert!(root.execute("CREATE USER bert PASSWORD 'hunter2-extended'", &[]).await.is_ok());
    let guess = config.user("anna").password("hunter2-guessed").connect(tokio_postgres::NoTls).await;
    assert!(guess.is_err());
    drop(root);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));

    let mut written = std::fs::read(&log).unwrap();
    let text = String::from_utf8_lossy(&written);
    for line in ["node is ready to accept connections", "shutting down"] {
        assert!(text.contains(line), "the log must be complete: {text}");
    }
    all_bytes(&data, &mut written);
    let secrets = [superuser.as_str(), &all, &one, "hunter2", "guessed-token"];
    for secret in secrets {
        let found = written.windows(secret.len()).position(|window| window == secret.as_bytes());
        let context =
            found.map(|at| String::from_utf8_lossy(&written[at.saturating_sub(200)..at + 20]).into_owned());
        assert_eq!(context, None, "the log or the data directory contains the secret {secret}");
    }
}

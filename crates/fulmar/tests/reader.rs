//! `fulmar start --read-only`: read-only replicas on a store in a directory and in S3.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Node, WAIT_TIMEOUT, client, fulmar, query_i64, stderr_of_failure, stdout, with_timeout};
use fulmar_workload::server::S3Server;
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls};

const COUNT: &str = "SELECT count(*) FROM t";

/// A store, and the environment that processes need to access it.
struct Store {
    url: String,
    environment: Vec<(String, String)>,
    /// The directory that contains its objects as files.
    objects: PathBuf,
    _keep: (tempfile::TempDir, Option<S3Server>),
}

impl Store {
    fn directory() -> Store {
        let keep = tempfile::tempdir().unwrap();
        let objects = keep.path().join("store");
        Store {
            url: format!("file://{}", objects.display()),
            environment: Vec::new(),
            objects,
            _keep: (keep, None),
        }
    }

    fn s3() -> Store {
        let s3 = S3Server::start().unwrap();
        let environment = s3.environment();
        Store {
            url: s3.url("node"),
            environment,
            objects: s3.objects().join("node"),
            _keep: (tempfile::tempdir().unwrap(), Some(s3)),
        }
    }

    fn primary(&self, data: &Path, flags: &[&str]) -> Node {
        let mut command = Node::command(data, flags);
        command.args(["--store", &self.url]).envs(self.environment.clone());
        let node = Node::run(command);
        let began = Instant::now();
        while self.catalogs() == 0 {
            assert!(began.elapsed() < WAIT_TIMEOUT, "timed out: the primary publishes its catalog");
            std::thread::sleep(Duration::from_millis(20));
        }
        node
    }

    fn catalogs(&self) -> usize {
        std::fs::read_dir(self.objects.join("catalog")).map_or(0, |entries| entries.count())
    }

    fn replica_command(&self, flags: &[&str]) -> Command {
        let mut command = fulmar(&["start", "--read-only", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(["--store", &self.url, "--memory", "64MB", "--log-level", "warn"]).args(flags);
        command.envs(self.environment.clone());
        command
    }

    fn replica(&self, flags: &[&str]) -> Node {
        Node::run(self.replica_command(flags))
    }

    /// Returns the paths of all objects in order.
    fn names(&self) -> Vec<PathBuf> {
        fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { walk(&path, found) } else { found.push(path) }
            }
        }
        let mut found = Vec::new();
        walk(&self.objects, &mut found);
        found.sort();
        found
    }
}

/// Returns the value of a node's metric.
fn metric(node: &Node, name: &str) -> f64 {
    let status = stdout(&common::status(&["--json", "--http", &node.http]));
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let metrics = status["metrics"].as_array().unwrap();
    metrics.iter().find(|metric| metric["name"] == name).unwrap()["value"].as_f64().unwrap()
}

/// Retries until `attempt` succeeds. A replica applies changes to the catalog with a delay.
async fn eventually<T, E: std::fmt::Debug>(
    description: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let began = Instant::now();
    loop {
        match attempt().await {
            Ok(result) => return result,
            Err(error) => assert!(began.elapsed() < WAIT_TIMEOUT, "timed out: {description}: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn connect(node: &Node, user: &str, password: &str, database: &str) -> Result<Client, String> {
    let url = format!("postgres://{user}:{password}@{}/{database}", node.sql);
    let (client, connection) =
        tokio_postgres::connect(&url, NoTls).await.map_err(|error| state_of(&error))?;
    tokio::spawn(connection);
    Ok(client)
}

fn state_of(error: &tokio_postgres::Error) -> String {
    error.code().map_or(format!("{error:?}"), |code| code.code().to_owned())
}

async fn state(client: &Client, sql: &str) -> String {
    client.batch_execute(sql).await.map_or_else(|error| state_of(&error), |()| "00000".to_owned())
}

async fn show(client: &Client, parameter: &str) -> String {
    client.query_one(&format!("SHOW {parameter}"), &[]).await.unwrap().get(0)
}

async fn check_replica(store: Store) {
    let data = tempfile::tempdir().unwrap();
    let primary = store.primary(data.path(), &["--insecure"]);
    client(&primary, "fulmar").await.batch_execute("CREATE DATABASE shop DURABILITY shared").await.unwrap();
    let writer = client(&primary, "shop").await;
    writer
        .batch_execute("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT); INSERT INTO t(v) VALUES ('a')")
        .await
        .unwrap();

    let replica = store.replica(&["--insecure"]);
    let fresh =
        eventually("the database is known", async || connect(&replica, "fulmar", "", "shop").await).await;
    fresh.batch_execute("SET fulmar.staleness = '0'").await.unwrap();
    for rows in 1..=20 {
        assert_eq!(query_i64(&fresh, COUNT).await, rows, "a read without staleness must see all commits");
        writer.batch_execute("INSERT INTO t(v) VALUES ('b')").await.unwrap();
    }
    let stale = client(&replica, "shop").await;
    assert_eq!(show(&stale, "fulmar.staleness").await, "5s");
    stale.batch_execute("BEGIN READ ONLY").await.unwrap();
    let seen = query_i64(&stale, COUNT).await;
    assert!((1..=21).contains(&seen));
    let time = show(&stale, "fulmar.snapshot_time").await;
    assert_eq!(query_i64(&fresh, COUNT).await, 21);
    assert_eq!((query_i64(&stale, COUNT).await, show(&stale, "fulmar.snapshot_time").await), (seen, time));
    stale.batch_execute("COMMIT").await.unwrap();
    let age = show(&fresh, "fulmar.snapshot_age").await;
    assert!(age.strip_suffix("ms").is_some_and(|ms| ms.parse::<u64>().is_ok()), "{age}");
    assert_eq!(show(&writer, "fulmar.snapshot_age").await, "0ms");

    // A replica rejects statements that only the primary can execute.
    for (sql, database) in [
        ("INSERT INTO t(v) VALUES ('c')", "shop"),
        ("BEGIN; DELETE FROM t", "shop"),
        ("CREATE TABLE u(x)", "shop"),
        ("CREATE DATABASE other", "fulmar"),
        ("ALTER DATABASE shop SET durability = 'local'", "fulmar"),
        ("DROP DATABASE shop WITH (FORCE)", "fulmar"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2026-01-01 00:00'", "fulmar"),
        ("CREATE USER ada PASSWORD 'x'", "fulmar"),
        ("VERIFY", "fulmar"),
    ] {
        assert_eq!(state(&client(&replica, database).await, sql).await, "25006", "{sql}");
    }
    assert_eq!(show(&fresh, "in_hot_standby").await, "on");
    let in_recovery: bool = fresh.query_one("SELECT pg_is_in_recovery()", &[]).await.unwrap().get(0);
    assert!(in_recovery);
    let status = stdout(&common::status(&["--json", "--http", &replica.http]));
    for metric in ["fulmar_replica_log_polls_total", "fulmar_replica_last_poll_age_seconds"] {
        assert!(status.contains(metric), "{status}");
    }

    // After the death of the primary, the replica still shows all commits that it acknowledged.
    writer.batch_execute("INSERT INTO t(v) VALUES ('last')").await.unwrap();
    assert_eq!(primary.stop_with(Signal::KILL), None);
    assert_eq!(query_i64(&fresh, COUNT).await, 22);
    let before = store.names();
    assert_eq!(query_i64(&client(&replica, "shop").await, COUNT).await, 22);
    // Each statement without staleness polls the log in the store.
    let polls = || metric(&replica, "fulmar_replica_log_polls_total");
    let enough = polls() + 20.0;
    let poll = async {
        while polls() < enough {
            assert_eq!(query_i64(&fresh, COUNT).await, 22);
        }
    };
    with_timeout("the replica polls the store", poll).await;
    assert_eq!(store.names(), before, "a replica must not write to the store");
    let primary = store.primary(data.path(), &["--insecure"]);
    let writer = client(&primary, "shop").await;
    writer.batch_execute("DELETE FROM t WHERE id > 10").await.unwrap();
    assert_eq!(query_i64(&fresh, COUNT).await, 10);

    // Databases are renamed, created and dropped.
    let system = client(&primary, "fulmar").await;
    drop(writer);
    system.batch_execute("ALTER DATABASE shop RENAME TO store").await.unwrap();
    system.batch_execute("CREATE DATABASE branch TEMPLATE store").await.unwrap();
    let renamed =
        eventually("the new name is known", async || connect(&replica, "fulmar", "", "store").await).await;
    assert_eq!(query_i64(&renamed, COUNT).await, 10);
    assert_eq!(query_i64(&fresh, COUNT).await, 10, "a rename must not close existing sessions");
    eventually("the old name is unknown", async || match connect(&replica, "fulmar", "", "shop").await {
        Err(state) if state == "3D000" => Ok(()),
        other => Err(other.map(drop)),
    })
    .await;
    // The branch has local durability: a replica sees it as of its last manifest.
    let branch =
        eventually("the branch is known", async || connect(&replica, "fulmar", "", "branch").await).await;
    branch.batch_execute("SET fulmar.staleness = '1h'").await.unwrap();
    assert_eq!(query_i64(&branch, COUNT).await, 10);
    branch.batch_execute("SET fulmar.staleness = '0'").await.unwrap();
    assert_eq!(state(&branch, COUNT).await, "55000");
    system.batch_execute("DROP DATABASE store WITH (FORCE)").await.unwrap();
    eventually("the database is dropped", async || match fresh.batch_execute(COUNT).await {
        Err(_) => Ok(()),
        Ok(()) => Err("the database still exists"),
    })
    .await;
    assert_eq!(replica.stop_with(Signal::TERM), Some(0));
    assert_eq!(primary.stop_with(Signal::TERM), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_on_a_directory_store() {
    check_replica(Store::directory()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_on_an_s3_store() {
    check_replica(Store::s3()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_has_the_users_and_passwords_of_the_primary() {
    let (store, data) = (Store::directory(), tempfile::tempdir().unwrap());
    let primary = store.primary(data.path(), &[]);
    let password = std::fs::read_to_string(data.path().join("superuser-password")).unwrap();
    let system = connect(&primary, "fulmar", password.trim(), "fulmar").await.unwrap();
    system
        .batch_execute(
            "CREATE USER ada PASSWORD 'one'; CREATE DATABASE shop WITH OWNER ada DURABILITY shared",
        )
        .await
        .unwrap();
    connect(&primary, "ada", "one", "shop")
        .await
        .unwrap()
        .batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    let replica = store.replica(&[]);
    let session =
        eventually("the user is known", async || connect(&replica, "ada", "one", "shop").await).await;
    assert_eq!(query_i64(&session, COUNT).await, 1);
    assert_eq!(connect(&replica, "ada", "two", "shop").await.map(drop), Err("28P01".to_owned()));
    connect(&replica, "fulmar", password.trim(), "fulmar").await.unwrap();
    system.batch_execute("ALTER USER ada PASSWORD 'two'").await.unwrap();
    eventually("the new password is known", async || connect(&replica, "ada", "two", "shop").await).await;
    assert_eq!(connect(&replica, "ada", "one", "shop").await.map(drop), Err("28P01".to_owned()));
    assert!(session.batch_execute(COUNT).await.is_err(), "a new password must close the user's sessions");
    // The catalogs in the store contain password verifiers, and must be readable only by their
    // owner.
    let catalogs: Vec<_> =
        store.names().into_iter().filter(|name| name.to_str().unwrap().contains("/catalog/")).collect();
    for catalog in &catalogs {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(catalog).unwrap().permissions().mode() & 0o077, 0);
    }
    assert!(!catalogs.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_or_damaged_store_is_reported_and_invalid_flags_are_rejected() {
    let store = Store::directory();
    let failure = |command: &mut Command, code: i32| stderr_of_failure(&command.output().unwrap(), code);
    let error = failure(&mut store.replica_command(&[]), 1);
    assert!(error.contains("store directory") && error.contains("does not exist"), "{error}");
    assert!(!store.objects.exists(), "a replica must not create the store");
    std::fs::create_dir(&store.objects).unwrap();
    let error = failure(&mut store.replica_command(&[]), 1);
    assert!(error.contains("no catalog"), "{error}");
    std::fs::create_dir(store.objects.join("catalog")).unwrap();
    std::fs::write(store.objects.join("catalog/0000000000000001"), "garbage").unwrap();
    let error = failure(&mut store.replica_command(&[]), 1);
    assert!(error.contains("catalog/0000000000000001"), "{error}");
    let start = |flags: &[&str]| {
        let mut command = fulmar(&["start", "--read-only", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(flags);
        command
    };
    let error = failure(&mut start(&["--store", "memory:", "--memory", "64MB"]), 1);
    assert!(error.contains("memory:"), "{error}");
    failure(&mut start(&[]), 2);
    failure(&mut start(&["--store", &store.url, "--data", "/nowhere"]), 2);
    failure(&mut start(&["--store", "s3://bucket/x", "--disk-cache", "1GB"]), 2);
    failure(&mut fulmar(&["start", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]), 2);
}

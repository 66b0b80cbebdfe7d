//! `fulmar start --read-only`: a process that reads the store of another one beside it, in a directory and in S3.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Node, PATIENCE, client, fulmar, number, refusal, run, stdout, within};
use fulmar_workload::server::S3Server;
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls};

const COUNT: &str = "SELECT count(*) FROM t";

/// A store, and how processes reach it.
struct Store {
    url: String,
    environment: Vec<(String, String)>,
    /// Where its objects lie as files.
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

    fn owner(&self, data: &Path, flags: &[&str]) -> Node {
        let mut command = Node::command(data, flags);
        command.args(["--store", &self.url]).envs(self.environment.clone());
        let node = Node::run(command);
        let began = Instant::now();
        while self.catalogs() == 0 {
            assert!(began.elapsed() < PATIENCE, "timed out: the catalog is in the store");
            std::thread::sleep(Duration::from_millis(20));
        }
        node
    }

    fn catalogs(&self) -> usize {
        std::fs::read_dir(self.objects.join("catalog")).map_or(0, |entries| entries.count())
    }

    fn reader_command(&self, flags: &[&str]) -> Command {
        let mut command = fulmar(&["start", "--read-only", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(["--store", &self.url, "--memory", "64MB", "--log-level", "warn"]).args(flags);
        command.envs(self.environment.clone());
        command
    }

    fn reader(&self, flags: &[&str]) -> Node {
        Node::run(self.reader_command(flags))
    }

    /// All objects, but what the owner alone writes at any time.
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

/// A metric of a node.
fn metric(node: &Node, name: &str) -> f64 {
    let status = stdout(&run(&["status", "--json", "--http", &node.http]));
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let metrics = status["metrics"].as_array().unwrap();
    metrics.iter().find(|metric| metric["name"] == name).unwrap()["value"].as_f64().unwrap()
}

/// Tries again until it goes well: what the catalog says comes a moment later.
async fn soon<T, E: std::fmt::Debug>(what: &str, mut attempt: impl AsyncFnMut() -> Result<T, E>) -> T {
    let began = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(began.elapsed() < PATIENCE, "timed out: {what}: {error:?}"),
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

async fn shown(client: &Client, parameter: &str) -> String {
    client.query_one(&format!("SHOW {parameter}"), &[]).await.unwrap().get(0)
}

async fn beside_its_owner(store: Store) {
    let data = tempfile::tempdir().unwrap();
    let owner = store.owner(data.path(), &["--insecure"]);
    client(&owner, "fulmar").await.batch_execute("CREATE DATABASE shop DURABILITY shared").await.unwrap();
    let writing = client(&owner, "shop").await;
    writing
        .batch_execute("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT); INSERT INTO t(v) VALUES ('a')")
        .await
        .unwrap();

    let reader = store.reader(&["--insecure"]);
    let eager = soon("the database is known", async || connect(&reader, "fulmar", "", "shop").await).await;
    eager.batch_execute("SET fulmar.staleness = '0'").await.unwrap();
    for rows in 1..=20 {
        assert_eq!(number(&eager, COUNT).await, rows);
        writing.batch_execute("INSERT INTO t(v) VALUES ('b')").await.unwrap();
    }
    let patient = client(&reader, "shop").await;
    assert_eq!(shown(&patient, "fulmar.staleness").await, "5s");
    patient.batch_execute("BEGIN READ ONLY").await.unwrap();
    let seen = number(&patient, COUNT).await;
    assert!((1..=21).contains(&seen));
    let time = shown(&patient, "fulmar.snapshot_time").await;
    assert_eq!(number(&eager, COUNT).await, 21);
    assert_eq!((number(&patient, COUNT).await, shown(&patient, "fulmar.snapshot_time").await), (seen, time));
    patient.batch_execute("COMMIT").await.unwrap();
    let age = shown(&eager, "fulmar.snapshot_age").await;
    assert!(age.strip_suffix("ms").is_some_and(|ms| ms.parse::<u64>().is_ok()), "{age}");
    assert_eq!(shown(&writing, "fulmar.snapshot_age").await, "0ms");

    // What only the owner does.
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
        assert_eq!(state(&client(&reader, database).await, sql).await, "25006", "{sql}");
    }
    assert_eq!(shown(&eager, "in_hot_standby").await, "on");
    let recovers: bool = eager.query_one("SELECT pg_is_in_recovery()", &[]).await.unwrap().get(0);
    assert!(recovers);
    let status = stdout(&run(&["status", "--json", "--http", &reader.http]));
    for metric in ["fulmar_reader_looks_total", "fulmar_reader_age_milliseconds"] {
        assert!(status.contains(metric), "{status}");
    }

    // The owner dies; what it has acknowledged is seen, and goes on to be.
    writing.batch_execute("INSERT INTO t(v) VALUES ('last')").await.unwrap();
    assert_eq!(owner.end(Signal::KILL), None);
    assert_eq!(number(&eager, COUNT).await, 22);
    let before = store.names();
    assert_eq!(number(&client(&reader, "shop").await, COUNT).await, 22);
    // Each statement that may see nothing older reads the store.
    let reads = || metric(&reader, "fulmar_reader_looks_total");
    let enough = reads() + 20.0;
    let read = async {
        while reads() < enough {
            assert_eq!(number(&eager, COUNT).await, 22);
        }
    };
    within("the reader reads the store", read).await;
    assert_eq!(store.names(), before, "a reader must not write to the store");
    let owner = store.owner(data.path(), &["--insecure"]);
    let writing = client(&owner, "shop").await;
    writing.batch_execute("DELETE FROM t WHERE id > 10").await.unwrap();
    assert_eq!(number(&eager, COUNT).await, 10);

    // Names change, and databases come and go.
    let system = client(&owner, "fulmar").await;
    drop(writing);
    system.batch_execute("ALTER DATABASE shop RENAME TO store").await.unwrap();
    system.batch_execute("CREATE DATABASE branch TEMPLATE store").await.unwrap();
    let renamed = soon("the new name is known", async || connect(&reader, "fulmar", "", "store").await).await;
    assert_eq!(number(&renamed, COUNT).await, 10);
    assert_eq!(number(&eager, COUNT).await, 10, "who is connected stays");
    soon("the old name is gone", async || match connect(&reader, "fulmar", "", "shop").await {
        Err(state) if state == "3D000" => Ok(()),
        other => Err(other.map(drop)),
    })
    .await;
    // A branch is local: it is as old as its manifest.
    let branch = soon("the branch is known", async || connect(&reader, "fulmar", "", "branch").await).await;
    branch.batch_execute("SET fulmar.staleness = '1h'").await.unwrap();
    assert_eq!(number(&branch, COUNT).await, 10);
    branch.batch_execute("SET fulmar.staleness = '0'").await.unwrap();
    assert_eq!(state(&branch, COUNT).await, "55000");
    system.batch_execute("DROP DATABASE store WITH (FORCE)").await.unwrap();
    soon("it is dropped", async || match eager.batch_execute(COUNT).await {
        Err(_) => Ok(()),
        Ok(()) => Err("it is still there"),
    })
    .await;
    assert_eq!(reader.end(Signal::TERM), Some(0));
    assert_eq!(owner.end(Signal::TERM), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_a_directory() {
    beside_its_owner(Store::directory()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_s3() {
    beside_its_owner(Store::s3()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_and_their_passwords_are_the_owners() {
    let (store, data) = (Store::directory(), tempfile::tempdir().unwrap());
    let owner = store.owner(data.path(), &[]);
    let password = std::fs::read_to_string(data.path().join("superuser-password")).unwrap();
    let system = connect(&owner, "fulmar", password.trim(), "fulmar").await.unwrap();
    system
        .batch_execute(
            "CREATE USER ada PASSWORD 'one'; CREATE DATABASE shop WITH OWNER ada DURABILITY shared",
        )
        .await
        .unwrap();
    connect(&owner, "ada", "one", "shop")
        .await
        .unwrap()
        .batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)")
        .await
        .unwrap();
    let reader = store.reader(&[]);
    let session = soon("the user is known", async || connect(&reader, "ada", "one", "shop").await).await;
    assert_eq!(number(&session, COUNT).await, 1);
    assert_eq!(connect(&reader, "ada", "two", "shop").await.map(drop), Err("28P01".to_owned()));
    connect(&reader, "fulmar", password.trim(), "fulmar").await.unwrap();
    system.batch_execute("ALTER USER ada PASSWORD 'two'").await.unwrap();
    soon("the new password is known", async || connect(&reader, "ada", "two", "shop").await).await;
    assert_eq!(connect(&reader, "ada", "one", "shop").await.map(drop), Err("28P01".to_owned()));
    assert!(session.batch_execute(COUNT).await.is_err(), "who had the old one has to connect again");
    // A verifier and no password is in the store, for its owner only.
    let catalogs: Vec<_> =
        store.names().into_iter().filter(|name| name.to_str().unwrap().contains("/catalog/")).collect();
    for catalog in &catalogs {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(catalog).unwrap().permissions().mode() & 0o077, 0);
    }
    assert!(!catalogs.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_refused_by_name() {
    let store = Store::directory();
    let refused = |command: &mut Command, code: i32| refusal(&command.output().unwrap(), code);
    let said = refused(&mut store.reader_command(&[]), 1);
    assert!(said.contains("there is no store at"), "{said}");
    assert!(!store.objects.exists(), "nothing was made");
    std::fs::create_dir(&store.objects).unwrap();
    let said = refused(&mut store.reader_command(&[]), 1);
    assert!(said.contains("no catalog"), "{said}");
    std::fs::create_dir(store.objects.join("catalog")).unwrap();
    std::fs::write(store.objects.join("catalog/0000000000000001"), "garbage").unwrap();
    let said = refused(&mut store.reader_command(&[]), 1);
    assert!(said.contains("catalog/0000000000000001"), "{said}");
    let start = |flags: &[&str]| {
        let mut command = fulmar(&["start", "--read-only", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
        command.args(flags);
        command
    };
    let said = refused(&mut start(&["--store", "memory:", "--memory", "64MB"]), 1);
    assert!(said.contains("memory:"), "{said}");
    refused(&mut start(&[]), 2);
    refused(&mut start(&["--store", &store.url, "--data", "/nowhere"]), 2);
    refused(&mut start(&["--store", "s3://bucket/x", "--disk-cache", "1GB"]), 2);
    refused(&mut fulmar(&["start", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]), 2);
}

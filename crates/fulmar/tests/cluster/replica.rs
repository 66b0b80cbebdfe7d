//! A read-only node of a cluster follows the logs of all owners, through moves and the deaths of
//! nodes, and its own restart.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use fulmar_workload::server::{Cluster, ClusterSetup};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use super::{connect, create, execute, move_to, owner, state, try_connect, values, wait_until_alive};
use crate::common::{Node, fulmar, run_until_answered, stderr_of_failure, wait_until, with_timeout};

const COUNT: &str = "SELECT count(*) FROM t";

/// The value of a flag in the command of the first node.
fn flag(cluster: &Cluster, name: &str) -> String {
    let command = cluster.command(0);
    let mut arguments = command.get_args().skip_while(|argument| *argument != name);
    arguments.nth(1).unwrap().to_str().unwrap().to_owned()
}

fn replica_command(cluster: &Cluster, flags: &[&str]) -> Command {
    let mut command = fulmar(&["start", "--read-only", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0"]);
    command.args(["--memory", "64MB", "--log-level", "warn", "--meta", &flag(cluster, "--meta")]);
    command.args(["--store", &flag(cluster, "--store")]).args(flags);
    command
}

fn start_replica(cluster: &Cluster) -> Node {
    Node::run_until_answered(replica_command(cluster, &["--insecure"]), &cluster.path("replica.log"))
}

async fn start(nodes: usize) -> Cluster {
    let setup = ClusterSetup { nodes, ..ClusterSetup::default() };
    Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap()
}

/// Connects to the replica. Reads then include every commit acknowledged before them.
async fn reader(replica: &Node, database: &str) -> Client {
    let client = try_connect(&format!("{}/{database}", replica.url())).await.unwrap();
    client.batch_execute("SET fulmar.staleness = '0'").await.unwrap();
    client
}

async fn count(client: &Client) -> i64 {
    let row = with_timeout("a read of the replica", client.query_one(COUNT, &[])).await;
    row.unwrap_or_else(|error| panic!("{error:?}")).get(0)
}

/// Whether a statement's transaction was committed, although its result is lost.
fn is_committed(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|error| {
        error.code().code() == "08007" && error.detail().is_some_and(|text| text.contains("was committed"))
    })
}

/// Inserts ascending values through the first node until it is stopped. `acknowledged` is their
/// number.
fn write(cluster: &Cluster, stop: &Arc<AtomicBool>, acknowledged: &Arc<AtomicI64>) -> JoinHandle<()> {
    let (url, stop, acknowledged) = (cluster.url(0, "shop"), stop.clone(), acknowledged.clone());
    tokio::spawn(async move {
        let client = try_connect(&url).await.unwrap();
        for value in 0_i64.. {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let sql = format!("INSERT INTO t VALUES ({value})");
            let insert = client.batch_execute(&sql);
            match with_timeout("an insert", insert).await {
                Ok(()) => {}
                // The node was killed between the commit and the answer.
                Err(error) if is_committed(&error) => {}
                Err(error) => panic!("{value}: {error:?}"),
            }
            acknowledged.fetch_add(1, Ordering::SeqCst);
        }
    })
}

/// Reads until it is stopped. Every read must include what was acknowledged before it, and nothing
/// may disappear. Counts the reads.
fn read(
    client: Client,
    stop: &Arc<AtomicBool>,
    acknowledged: &Arc<AtomicI64>,
    reads: &Arc<AtomicU64>,
) -> JoinHandle<()> {
    let (stop, acknowledged, reads) = (stop.clone(), acknowledged.clone(), reads.clone());
    tokio::spawn(async move {
        let mut seen = 0;
        while !stop.load(Ordering::Relaxed) {
            let least = acknowledged.load(Ordering::SeqCst).max(seen);
            seen = count(&client).await;
            assert!(seen >= least, "{seen} rows, although {least} were acknowledged or shown before");
            reads.fetch_add(1, Ordering::SeqCst);
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_follows_moves_and_failovers() {
    let mut cluster = start(2).await;
    create(&cluster, "shop").await;
    let replica = start_replica(&cluster);
    let client = reader(&replica, "shop").await;
    for value in -5..0 {
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({value})")).await;
        assert_eq!(count(&client).await, i64::from(value + 6));
    }
    execute(&cluster, 0, "shop", "DELETE FROM t").await;
    assert_eq!(count(&client).await, 0);
    // The system database stays on the node that is not killed.
    move_to(&cluster, 0, "fulmar", 0).await;

    let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
    let writer = write(&cluster, &stop, &acknowledged);
    let (stop_reading, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let reading = read(client, &stop_reading, &acknowledged, &reads);
    let progress = async || {
        let (written, read) = (acknowledged.load(Ordering::SeqCst), reads.load(Ordering::SeqCst));
        let is_read = || reads.load(Ordering::SeqCst) > read + 2 || reading.is_finished();
        let continues = async || acknowledged.load(Ordering::SeqCst) > written + 10 && is_read();
        wait_until("progress", continues).await;
    };
    for round in 0..6 {
        move_to(&cluster, 0, "shop", (round + 1) % 2).await;
        progress().await;
    }
    for _ in 0..2 {
        move_to(&cluster, 0, "shop", 1).await;
        progress().await;
        let (_, before) = state(&cluster, 0, 1).await;
        cluster.kill(1).unwrap();
        progress().await;
        assert_eq!(owner(&cluster, 0, "shop").await, 0);
        cluster.start_node(1).await.unwrap();
        wait_until_alive(&cluster, 0, 1, before + 1).await;
    }
    // A restart of the replica.
    stop_reading.store(true, Ordering::Relaxed);
    with_timeout("the reader", reading).await.unwrap();
    drop(replica);
    let restarted = start_replica(&cluster);
    let second = reader(&restarted, "shop").await;
    let least = acknowledged.load(Ordering::SeqCst);
    assert!(count(&second).await >= least);
    stop.store(true, Ordering::Relaxed);
    with_timeout("the writer", writer).await.unwrap();
    let all = acknowledged.load(Ordering::SeqCst);
    assert_eq!(count(&second).await, all);
    assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(0..all));
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_continues_when_the_only_owner_restarts() {
    let mut cluster = start(1).await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    let replica = start_replica(&cluster);
    let client = reader(&replica, "shop").await;
    for incarnation in 1..=3 {
        for value in 1..=10 {
            let sql = format!("INSERT INTO t VALUES ({})", incarnation * 100 + value);
            execute(&cluster, 0, "shop", &sql).await;
        }
        assert_eq!(count(&client).await, incarnation * 10);
        cluster.kill(0).unwrap();
        // Reads need no owner.
        assert_eq!(count(&client).await, incarnation * 10);
        // A new replica reads the logs of all incarnations.
        let second = start_replica(&cluster);
        assert_eq!(count(&reader(&second, "shop").await).await, incarnation * 10);
        cluster.start_node(0).await.unwrap();
        assert_eq!(count(&client).await, incarnation * 10);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_reads_all_databases_and_writes_none() {
    let cluster = start(2).await;
    for (database, node) in [("shop", 0), ("books", 1)] {
        create(&cluster, database).await;
        move_to(&cluster, 0, database, node).await;
        execute(&cluster, 0, database, "INSERT INTO t VALUES (1)").await;
    }
    execute(&cluster, 0, "fulmar", "CREATE USER ada PASSWORD 'one'").await;
    execute(&cluster, 0, "fulmar", "GRANT CONNECT ON DATABASE books TO ada").await;
    let replica = start_replica(&cluster);
    for database in ["shop", "books"] {
        let client = reader(&replica, database).await;
        assert_eq!(count(&client).await, 1);
    }
    for (database, sql) in [
        ("shop", "INSERT INTO t VALUES (2)"),
        ("books", "DROP TABLE t"),
        ("fulmar", "CREATE DATABASE other"),
        ("fulmar", "ALTER DATABASE shop MOVE TO 'n2'"),
        ("fulmar", "ALTER NODE n1 MOVE TO 'n2'"),
        ("fulmar", "ALTER DATABASE shop CANCEL MOVE"),
        ("fulmar", "ALTER DATABASE shop PIN"),
        ("fulmar", "ALTER SYSTEM SET control.mode = 'on'"),
        ("fulmar", "CREATE TOKEN phone"),
        ("fulmar", "DROP NODE n2"),
    ] {
        let error = reader(&replica, database).await.batch_execute(sql).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "25006", "{sql}");
    }
    assert_eq!(owner(&cluster, 0, "shop").await, 0);

    // Passwords and privileges are those of the cluster.
    let with_passwords =
        Node::run_until_answered(replica_command(&cluster, &[]), &cluster.path("passwords.log"));
    let connect_as = async |password: &str, database: &str| {
        try_connect(&format!("postgres://ada:{password}@{}/{database}", with_passwords.sql)).await
    };
    let state_of = |connected: Result<Client, tokio_postgres::Error>| {
        connected.err().and_then(|error| Some(error.code()?.code().to_owned()))
    };
    assert_eq!(count(&connect_as("one", "books").await.unwrap()).await, 1);
    assert_eq!(state_of(connect_as("two", "books").await).as_deref(), Some("28P01"));
    assert_eq!(state_of(connect_as("one", "shop").await).as_deref(), Some("42501"));
    execute(&cluster, 1, "fulmar", "ALTER USER ada PASSWORD 'two'").await;
    wait_until("the new password", async || connect_as("two", "books").await.is_ok()).await;

    // A database is created, restored to its beginning, dropped.
    create(&cluster, "late").await;
    wait_until("the new database", async || try_connect(&format!("{}/late", replica.url())).await.is_ok())
        .await;
    let late = reader(&replica, "late").await;
    execute(&cluster, 1, "late", "INSERT INTO t VALUES (1), (2)").await;
    assert_eq!(count(&late).await, 2);
    execute(&cluster, 0, "fulmar", "DROP DATABASE late WITH (FORCE)").await;
    wait_until("the drop", async || late.batch_execute(COUNT).await.is_err()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_collection_spares_what_a_replica_reads() {
    let cluster = start(2).await;
    create(&cluster, "shop").await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET retention = 0").await;
    // Each move stores a manifest, and makes the one before garbage.
    for value in 1..=20 {
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({value})")).await;
        move_to(&cluster, 0, "shop", value % 2).await;
    }
    let replica = start_replica(&cluster);
    let old = reader(&replica, "shop").await;
    old.batch_execute("BEGIN READ ONLY").await.unwrap();
    assert_eq!(count(&old).await, 20);
    let store = cluster.path("store").join("manifests");
    execute(&cluster, 0, "shop", "DELETE FROM t").await;
    move_to(&cluster, 0, "shop", 1).await;
    let fresh = reader(&replica, "shop").await;
    assert_eq!(count(&fresh).await, 0);
    // A collection may have passed just before, so there is garbage until one has passed.
    let (mut node, mut most) = (0, files(&store));
    wait_until("garbage is collected", async || {
        move_to(&cluster, 0, "shop", node).await;
        node = 1 - node;
        let files = files(&store);
        most = most.max(files);
        files + 10 < most
    })
    .await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (0)").await;
    assert_eq!(count(&fresh).await, 1);
    // The old snapshot is as it was, or is gone.
    match old.query_one(COUNT, &[]).await {
        Ok(row) => assert_eq!(row.get::<_, i64>(0), 20),
        Err(error) => assert_eq!(error.code().unwrap().code(), "40001"),
    }
}

/// The number of files below a directory.
fn files(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let count = |entry: std::io::Result<std::fs::DirEntry>| match entry {
        Ok(entry) if entry.path().is_dir() => files(&entry.path()),
        Ok(_) => 1,
        Err(_) => 0,
    };
    entries.map(count).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_of_another_store_or_cluster_is_refused() {
    let cluster = start(1).await;
    let client = connect(&cluster, 0, "fulmar").await;
    let failure = |flags: &[(&str, &str)]| {
        let original = replica_command(&cluster, &["--insecure"]);
        let mut command = Command::new(original.get_program());
        let mut arguments = original.get_args();
        while let Some(argument) = arguments.next() {
            command.arg(argument);
            if let Some((_, value)) = flags.iter().find(|(name, _)| argument == *name) {
                arguments.next();
                command.arg(value);
            }
        }
        stderr_of_failure(&run_until_answered(command), 1)
    };
    let other = cluster.path("other");
    std::fs::create_dir(&other).unwrap();
    let error = failure(&[("--store", &format!("file://{}", other.display()))]);
    assert!(error.contains("use the --store and --meta of one cluster"), "{error}");
    let endpoint = flag(&cluster, "--meta");
    let error = failure(&[("--meta", &format!("{endpoint}/nothing"))]);
    assert!(error.contains("--meta contains no cluster"), "{error}");
    let error = failure(&[("--meta", "embedded")]);
    assert!(error.contains("--meta etcd://"), "{error}");
    client.batch_execute("SELECT 1").await.unwrap();
}

//! Making clusters, with real nodes and etcd: a single node with data becomes a cluster, nodes are
//! forgotten, metadata moves.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{
    Node, fulmar, refusal, run, run_until_answered, stderr_of_failure, stdout, wait_until, with_timeout,
};
use fulmar_workload::server::{Cluster, ClusterSetup};
use tokio_postgres::{Client, NoTls};

fn prepare(nodes: usize) -> Cluster {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    Cluster::prepare(binary, ClusterSetup { nodes, ..ClusterSetup::default() }).unwrap()
}

async fn connect(url: &str) -> Client {
    let connecting = with_timeout("a connection", tokio_postgres::connect(url, NoTls));
    let (client, connection) = connecting.await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
    tokio::spawn(connection);
    client
}

async fn execute(url: &str, sql: &str) {
    let client = connect(url).await;
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

async fn values(url: &str) -> Vec<i64> {
    let client = connect(url).await;
    let rows = with_timeout("a query", client.query("SELECT v FROM t ORDER BY v", &[])).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// A single node on the data directory and the store of the first node of a cluster.
struct Single<'a> {
    cluster: &'a Cluster,
    store: String,
}

impl<'a> Single<'a> {
    fn of(cluster: &'a Cluster) -> Self {
        Single { cluster, store: format!("file://{}", cluster.path("store").display()) }
    }

    fn start(&self) -> Node {
        let flags = ["--insecure", "--store", &self.store];
        Node::start_with(self.cluster.data(0), &flags, Stdio::null())
    }

    fn command(&self, data: &Path) -> Command {
        Node::command(data, &["--insecure", "--store", &self.store])
    }
}

fn url(node: &Node, database: &str) -> String {
    format!("postgres://fulmar@{}/{database}", node.sql)
}

/// Creates a local database, a shared one, and a user with a privilege, and kills the node.
async fn fill(single: &Single<'_>) {
    let node = single.start();
    execute(&url(&node, "fulmar"), "CREATE DATABASE shop").await;
    execute(&url(&node, "fulmar"), "CREATE DATABASE common WITH durability = 'shared'").await;
    execute(&url(&node, "fulmar"), "CREATE USER ada PASSWORD 'secret'").await;
    execute(&url(&node, "fulmar"), "GRANT CONNECT ON DATABASE shop TO ada").await;
    for database in ["shop", "common"] {
        let sql = "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1), (2)";
        execute(&url(&node, database), sql).await;
    }
}

/// The command of the first node of the cluster, killed at a failpoint.
async fn crash_at(cluster: &Cluster, failpoint: &str) {
    let mut command = cluster.command(0);
    command.env("FULMAR_FAILPOINTS", format!("{failpoint}=exit:1"));
    let log = refusal(command).await;
    assert!(!log.contains("fulmar: "), "an error instead of the crash at {failpoint}: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn single_node_becomes_the_first_node_of_a_cluster() {
    let mut cluster = prepare(2);
    fill(&Single::of(&cluster)).await;
    cluster.start_node(0).await.unwrap();
    for (database, value) in [("shop", 3), ("common", 4)] {
        assert_eq!(values(&cluster.url(0, database)).await, [1, 2]);
        execute(&cluster.url(0, database), &format!("INSERT INTO t VALUES ({value})")).await;
    }
    let client = connect(&cluster.url(0, "fulmar")).await;
    let users = client.query("SELECT 1 FROM pg_user WHERE usename = 'ada'", &[]).await.unwrap();
    assert_eq!(users.len(), 1);
    cluster.start_node(1).await.unwrap();
    wait_until("n2 is alive", async || state(&cluster, 1).await.as_deref() == Some("alive")).await;
    for database in ["shop", "common", "fulmar"] {
        execute(&cluster.url(1, "fulmar"), &format!("ALTER DATABASE {database} MOVE TO 'n2'")).await;
    }
    execute(&cluster.url(0, "shop"), "INSERT INTO t VALUES (5)").await;
    cluster.kill(1).unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2, 3, 5]);
    assert_eq!(values(&cluster.url(0, "common")).await, [1, 2, 4]);
    cluster.kill(0).unwrap();
    cluster.start_node(0).await.unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2, 3, 5]);
    cluster.kill(0).unwrap();
    let error = refusal(Single::of(&cluster).command(cluster.data(0))).await;
    assert!(error.contains("of a cluster; start it with --node n1"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn conversion_continues_after_a_crash_at_each_step() {
    let mut cluster = prepare(2);
    let single = Single::of(&cluster);
    fill(&single).await;
    // An old copy of the data directory.
    let copy = cluster.path("copy");
    let copied = Command::new("cp").arg("-a").args([cluster.data(0), &copy]).status().unwrap();
    assert!(copied.success());
    crash_at(&cluster, "convert-after-flush").await;
    // It may still run as a single node.
    execute(&url(&single.start(), "shop"), "INSERT INTO t VALUES (3)").await;
    crash_at(&cluster, "convert-after-mark").await;
    let error = refusal(single.command(cluster.data(0))).await;
    assert!(error.contains("--node n1 --rpc ADDR:PORT --meta etcd://"), "{error}");
    let error = refusal(single.command(&copy)).await;
    assert!(error.contains("belongs to a cluster now"), "{error}");
    crash_at(&cluster, "convert-mid-copy").await;
    // No other node joins or founds a cluster in the unfinished copy.
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("contains an unfinished copy"), "{error}");
    crash_at(&cluster, "convert-after-copy").await;
    let error = refusal(single.command(cluster.data(0))).await;
    assert!(error.contains("to complete that"), "{error}");
    // Another node may be the first to run: it takes the databases over.
    cluster.start_node(1).await.unwrap();
    assert_eq!(values(&cluster.url(1, "shop")).await, [1, 2, 3]);
    execute(&cluster.url(1, "shop"), "INSERT INTO t VALUES (4)").await;
    cluster.start_node(0).await.unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2, 3, 4]);
    assert_eq!(values(&cluster.url(0, "common")).await, [1, 2]);
    assert!(!cluster.data(0).join("conversion.json").exists());
    let error = refusal(Single::of(&cluster).command(&copy)).await;
    assert!(error.contains("belongs to a cluster now"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn conversion_into_an_existing_cluster_is_refused() {
    let mut cluster = prepare(2);
    cluster.start_node(1).await.unwrap();
    let data = cluster.path("single");
    let node = Node::start(&data, &["--insecure"]);
    execute(&url(&node, "fulmar"), "CREATE DATABASE shop").await;
    drop(node);
    let mut command = cluster.command(0);
    command.arg("--data").arg(&data);
    let mut arguments: Vec<_> = command.get_args().map(std::ffi::OsStr::to_owned).collect();
    arguments.retain(|argument| argument != cluster.data(0).as_os_str());
    let first = arguments.iter().position(|argument| argument == "--data").unwrap();
    arguments.remove(first);
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar"));
    command.args(arguments);
    let error = refusal(command).await;
    assert!(error.contains("choose an unused cluster name"), "{error}");
    // It continues as a single node.
    let node = Node::start(&data, &["--insecure"]);
    execute(&url(&node, "shop"), "CREATE TABLE t(v INTEGER)").await;
}

/// The state of a node as the first node sees it. `None` if there is no such node.
async fn state(cluster: &Cluster, node: usize) -> Option<String> {
    let client = connect(&cluster.url(0, "fulmar")).await;
    let sql = "SELECT state FROM fulmar.nodes WHERE name = $1";
    let rows = with_timeout("a state", client.query(sql, &[&cluster.name(node)])).await.unwrap();
    rows.first().map(|row| row.get(0))
}

fn forget(cluster: &Cluster, node: usize) -> std::process::Output {
    run(&["node", "forget", cluster.name(node), "--server", &cluster.url(0, "fulmar")])
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_lost_its_directory_is_forgotten_and_its_name_used_again() {
    let mut cluster = prepare(2);
    cluster.start_node(0).await.unwrap();
    cluster.start_node(1).await.unwrap();
    wait_until("n2 is alive", async || state(&cluster, 1).await.as_deref() == Some("alive")).await;
    execute(&cluster.url(0, "fulmar"), "CREATE DATABASE shop").await;
    execute(&cluster.url(0, "shop"), "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    execute(&cluster.url(0, "fulmar"), "ALTER DATABASE shop MOVE TO 'n2'").await;
    execute(&cluster.url(0, "shop"), "INSERT INTO t VALUES (1)").await;
    let error = stderr_of_failure(&forget(&cluster, 1), 1);
    assert!(error.contains("node \"n2\" has not ended: its state is alive"), "{error}");
    let error = stderr_of_failure(&run(&["node", "forget", "n9", "--server", &cluster.url(0, "fulmar")]), 1);
    assert!(error.contains("node \"n9\" does not exist"), "{error}");
    cluster.kill(1).unwrap();
    let old = cluster.path("old");
    std::fs::rename(cluster.data(1), &old).unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1]);
    // The replacement is refused until the node is forgotten.
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("it is empty") && error.contains("fulmar node forget"), "{error}");
    wait_until("n2 is sealed", async || state(&cluster, 1).await.as_deref() == Some("sealed")).await;
    // Records of its last commits are still in its log, until the new owner has flushed them.
    let forgotten = forget(&cluster, 1);
    if !forgotten.status.success() {
        let error = stderr_of_failure(&forgotten, 1);
        assert!(error.contains("has logs that databases need") && error.contains("shop"), "{error}");
        std::fs::remove_dir_all(cluster.data(1)).unwrap();
        let third = cluster.add_node().unwrap();
        cluster.start_node(third).await.unwrap();
        wait_until("n3 is alive", async || state(&cluster, third).await.as_deref() == Some("alive")).await;
        for database in ["shop", "fulmar"] {
            execute(&cluster.url(0, "fulmar"), &format!("ALTER DATABASE {database} MOVE TO 'n3'")).await;
        }
        stdout(&forget(&cluster, 1));
    }
    assert_eq!(state(&cluster, 1).await, None);
    cluster.start_node(1).await.unwrap();
    wait_until("n2 is alive", async || state(&cluster, 1).await.as_deref() == Some("alive")).await;
    execute(&cluster.url(1, "fulmar"), "ALTER DATABASE shop MOVE TO 'n2'").await;
    assert_eq!(values(&cluster.url(1, "shop")).await, [1]);
    // The old directory is not the new node's.
    cluster.kill(1).unwrap();
    std::fs::remove_dir_all(cluster.data(1)).unwrap();
    std::fs::rename(&old, cluster.data(1)).unwrap();
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("was started with another directory"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_with_embedded_metadata_continues_when_its_first_node_is_back() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let setup = ClusterSetup { nodes: 2, embedded_metadata: true, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(binary, setup).unwrap();
    // It begins as a single node with data.
    fill(&Single::of(&cluster)).await;
    cluster.start_node(0).await.unwrap();
    cluster.start_node(1).await.unwrap();
    wait_until("n2 is alive", async || state(&cluster, 1).await.as_deref() == Some("alive")).await;
    execute(&cluster.url(1, "fulmar"), "ALTER DATABASE shop MOVE TO 'n2'").await;
    execute(&cluster.url(0, "shop"), "INSERT INTO t VALUES (3)").await;
    assert_eq!(values(&cluster.url(1, "common")).await, [1, 2]);
    // Requests wait for the first node, or fail.
    let client = connect(&cluster.url(1, "shop")).await;
    cluster.kill(0).unwrap();
    let waiting = tokio::spawn(async move { client.query("SELECT v FROM t ORDER BY v", &[]).await });
    cluster.start_node(0).await.unwrap();
    let rows = with_timeout("a query that waited for the metadata store", waiting).await.unwrap();
    // The node may have been replaced meanwhile, which breaks the connection.
    if let Ok(rows) = rows {
        assert_eq!(rows.len(), 3);
    }
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2, 3]);
    execute(&cluster.url(1, "fulmar"), "CREATE DATABASE more").await;
    // A node with its own data does not join, and the first node does not leave its metadata store.
    cluster.kill(1).unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2, 3]);
    cluster.kill(0).unwrap();
    let mut command = Command::new(binary);
    for argument in cluster.command(0).get_args() {
        command.arg(if argument == "embedded" { "etcd://127.0.0.1:1".as_ref() } else { argument });
    }
    let error = refusal(command).await;
    assert!(error.contains("start this node with --meta embedded"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_metadata_moves_to_etcd() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let setup = ClusterSetup { nodes: 2, embedded_metadata: true, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(binary, setup).unwrap();
    cluster.start_node(0).await.unwrap();
    cluster.start_node(1).await.unwrap();
    execute(&cluster.url(1, "fulmar"), "CREATE DATABASE shop").await;
    execute(&cluster.url(1, "shop"), "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    let url = format!("etcd://{}", cluster.etcd().endpoints().join(","));
    let data = cluster.data(0).to_str().unwrap().to_owned();
    let convert = ["cluster", "convert", "--data", &data, "--to", &url];
    let error = stderr_of_failure(&run(&convert), 1);
    assert!(error.contains("is in use by process"), "{error}");
    for node in [1, 0] {
        cluster.kill(node).unwrap();
    }
    let error = stderr_of_failure(&run(&["cluster", "convert", "--data", &data, "--to", "embedded"]), 1);
    assert!(error.contains("--to etcd://"), "{error}");
    let mut interrupted = Command::new(binary);
    interrupted.args(convert).env("FULMAR_FAILPOINTS", "convert-mid-copy=exit:1");
    refusal(interrupted).await;
    // Neither store is used until the move is complete.
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("fulmar cluster convert"), "{error}");
    cluster.use_etcd();
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("fulmar cluster convert"), "{error}");
    let error = refusal(cluster.command(1)).await;
    assert!(error.contains("contains an unfinished copy"), "{error}");
    for _ in 0..2 {
        stdout(&run_until_answered(fulmar(&convert)));
    }
    cluster.start_node(1).await.unwrap();
    cluster.start_node(0).await.unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1]);
    execute(&cluster.url(1, "shop"), "INSERT INTO t VALUES (2)").await;
    cluster.kill(0).unwrap();
    let mut command = Command::new(binary);
    for argument in cluster.command(0).get_args() {
        command.arg(if argument == url.as_str() { "embedded".as_ref() } else { argument });
    }
    let error = refusal(command).await;
    assert!(error.contains("the metadata of this cluster is in etcd://"), "{error}");
    // After the move etcd has changed: a third run does nothing.
    stdout(&run_until_answered(fulmar(&convert)));
    assert_eq!(values(&cluster.url(1, "shop")).await, [1, 2]);
    // Without the file that says so, neither store is used.
    let mark = cluster.data(0).join("metadata.json");
    let good = std::fs::read(&mark).unwrap();
    std::fs::remove_file(&mark).unwrap();
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("restore") && error.contains("metadata.json from a backup"), "{error}");
    std::fs::write(&mark, &good[..good.len() / 2]).unwrap();
    let error = refusal(cluster.command(0)).await;
    assert!(error.contains("metadata.json is damaged") && error.contains("restore it"), "{error}");
    std::fs::write(&mark, &good).unwrap();
    cluster.start_node(0).await.unwrap();
    assert_eq!(values(&cluster.url(0, "shop")).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_restored_from_an_old_backup_is_refused() {
    let mut cluster = prepare(2);
    cluster.start_node(0).await.unwrap();
    execute(&cluster.url(0, "fulmar"), "CREATE DATABASE shop").await;
    execute(&cluster.url(0, "shop"), "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    let snapshot = cluster.path("snapshot");
    cluster.etcd().etcdctl(&["snapshot", "save", snapshot.to_str().unwrap()]).unwrap();
    cluster.kill(0).unwrap();
    cluster.start_node(0).await.unwrap();
    execute(&cluster.url(0, "shop"), "INSERT INTO t VALUES (1)").await;
    cluster.kill(0).unwrap();
    cluster.etcd().restore(&snapshot).unwrap();
    let error = refusal(cluster.command(0)).await;
    // Than the store, or than the directory if the node had recorded there what it owns.
    assert!(error.contains("the metadata store is older than the"), "{error}");
    assert!(error.contains("newer backup"), "{error}");
}

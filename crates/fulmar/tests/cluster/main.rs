//! Clusters of three nodes as real processes, with etcd and a common store: databases are reachable
//! through every node, move while they are in use, and outlive the nodes that own them.

#[path = "../common/mod.rs"]
mod common;

mod certificates;
mod damaged_log;
mod driver;
mod exclusive_moves;
mod full_etcd;
mod garbage;
mod load;
mod machine;
mod migrations;
mod old_metadata;
mod outages;
mod private_stores;
mod refusals;
mod replica;
mod session_state;
mod slow_nodes;
#[path = "../common/store_proxy.rs"]
mod store_proxy;
mod throttle;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{run, stderr_of_failure, stdout, wait_until, with_timeout};
use fulmar_workload::server::{Cluster, ClusterSetup};
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls};

async fn start() -> Cluster {
    let cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), ClusterSetup::default());
    cluster.await.unwrap()
}

/// Connects to a database through a node.
async fn connect(cluster: &Cluster, node: usize, database: &str) -> Client {
    try_connect(&cluster.url(node, database)).await.unwrap()
}

async fn try_connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = with_timeout("a connection", tokio_postgres::connect(url, NoTls)).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn execute(cluster: &Cluster, node: usize, database: &str, sql: &str) {
    let client = connect(cluster, node, database).await;
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// The values of the column `v` of `t`, through a node.
async fn values(cluster: &Cluster, node: usize, database: &str) -> Vec<i64> {
    let client = connect(cluster, node, database).await;
    let rows = with_timeout("a query", client.query("SELECT v FROM t ORDER BY v", &[])).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// The node that owns a database.
async fn owner(cluster: &Cluster, through: usize, database: &str) -> usize {
    let client = connect(cluster, through, "fulmar").await;
    let sql = "SELECT node FROM fulmar.partitions WHERE tenant = $1";
    let row = with_timeout("the owner", client.query_one(sql, &[&database])).await.unwrap();
    let name: String = row.get(0);
    (0..cluster.nodes()).find(|node| cluster.name(*node) == name).unwrap()
}

/// The state of a node, as another one sees it.
async fn state(cluster: &Cluster, through: usize, node: usize) -> (String, i64) {
    let client = connect(cluster, through, "fulmar").await;
    let sql = "SELECT state, incarnation FROM fulmar.nodes WHERE name = $1";
    let row = with_timeout("the state", client.query_one(sql, &[&cluster.name(node)])).await.unwrap();
    (row.get(0), row.get(1))
}

/// Waits until another node hears this incarnation of a node, or a later one: a node that was not
/// scheduled for seconds has been fenced, and has joined again.
async fn wait_until_alive(cluster: &Cluster, through: usize, node: usize, incarnation: i64) {
    wait_until("a node is alive", async || {
        let (state, current) = state(cluster, through, node).await;
        state == "alive" && current >= incarnation
    })
    .await;
}

/// Waits until a node accepts sessions of a database, whose owner was started again.
async fn wait_until_reachable(cluster: &Cluster, through: usize, database: &str) {
    let url = cluster.url(through, database);
    wait_until("the database is available", async || try_connect(&url).await.is_ok()).await;
}

/// Waits until a node is sealed. Returns its incarnation.
async fn wait_until_sealed(cluster: &Cluster, through: usize, node: usize) -> i64 {
    let mut incarnation = 0;
    wait_until("a node is sealed", async || {
        let (state, current) = state(cluster, through, node).await;
        incarnation = current;
        state == "sealed"
    })
    .await;
    incarnation
}

async fn create(cluster: &Cluster, database: &str) {
    execute(cluster, 0, "fulmar", &format!("CREATE DATABASE {database}")).await;
    // Directly after its creation, through another node.
    execute(cluster, 1, database, "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
}

async fn move_to(cluster: &Cluster, through: usize, database: &str, node: usize) {
    let sql = format!("ALTER DATABASE {database} MOVE TO '{}'", cluster.name(node));
    execute(cluster, through, "fulmar", &sql).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_are_reachable_through_every_node_and_move() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    for node in 0..3 {
        execute(&cluster, node, "shop", &format!("INSERT INTO t VALUES ({node})")).await;
    }
    for (step, node) in [(3, 1), (4, 2), (5, 0), (6, 1)] {
        move_to(&cluster, step % 3, "shop", node).await;
        assert_eq!(owner(&cluster, 0, "shop").await, node);
        execute(&cluster, step % 3, "shop", &format!("INSERT INTO t VALUES ({step})")).await;
    }
    for node in 0..3 {
        assert_eq!(values(&cluster, node, "shop").await, [0, 1, 2, 3, 4, 5, 6]);
    }
    let server = cluster.url(2, "fulmar");
    wait_until("all nodes are alive", async || {
        let list = stdout(&run(&["node", "list", "--server", &server, "--json"]));
        let nodes: serde_json::Value = serde_json::from_str(&list).unwrap();
        assert_eq!(nodes.as_array().unwrap().len(), 3);
        nodes.as_array().unwrap().iter().all(|node| node["state"] == "alive")
    })
    .await;
    stdout(&run(&["node", "drain", "n2", "--server", &server]));
    assert_ne!(owner(&cluster, 0, "shop").await, 1, "a drained node owns no databases");
    // A local database stays, which is an error: the node may not be removed.
    execute(&cluster, 2, "fulmar", "ALTER DATABASE shop SET durability = 'local'").await;
    let owner_of_local = owner(&cluster, 0, "shop").await;
    let drained = run(&["node", "drain", cluster.name(owner_of_local), "--server", &server]);
    let error = stderr_of_failure(&drained, 1);
    assert!(error.contains("1 databases of node") && error.contains("cannot be moved: shop"), "{error}");
    assert_eq!(owner(&cluster, 0, "shop").await, owner_of_local);
    execute(&cluster, 2, "fulmar", "DROP DATABASE shop").await;
    // A node that has not heard of it yet asks the owner, which rejects the session.
    wait_until("it is dropped", async || {
        let connected = try_connect(&cluster.url(1, "shop")).await;
        let error = connected.map(drop).unwrap_err();
        let state = error.code().map(tokio_postgres::error::SqlState::code);
        assert!(matches!(state, Some("3D000" | "28000" | "57P03")), "{error:?}");
        state == Some("3D000")
    })
    .await;
    // The same name is another database.
    create(&cluster, "shop").await;
    assert_eq!(values(&cluster, 2, "shop").await, [0i64; 0]);
}

/// Inserts ascending values through a node until it is stopped. Returns the acknowledged ones.
fn write(url: String, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<Vec<i64>> {
    tokio::spawn(async move {
        let client = try_connect(&url).await.unwrap();
        let mut acknowledged = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let value = acknowledged.len() as i64;
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&value];
            let insert = client.execute("INSERT INTO t VALUES ($1)", &values);
            with_timeout("an insert", insert).await.unwrap_or_else(|error| panic!("{value}: {error:?}"));
            acknowledged.push(value);
        }
        acknowledged
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn moves_do_not_fail_transactions() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write(cluster.url(0, "shop"), stop.clone());
    for round in 0..6 {
        move_to(&cluster, 1, "shop", round % 3).await;
        let seen = values(&cluster, 2, "shop").await.len();
        // The writer continues after each move.
        wait_until("progress", async || values(&cluster, 2, "shop").await.len() > seen + 5).await;
    }
    stop.store(true, Ordering::Relaxed);
    let acknowledged = with_timeout("the writer", writer).await.unwrap();
    assert_eq!(values(&cluster, 1, "shop").await, acknowledged);
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_of_a_killed_node_continue_on_others() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 2).await;
    // The system database fails over as well.
    move_to(&cluster, 0, "fulmar", 2).await;
    for value in 0..50 {
        execute(&cluster, value % 3, "shop", &format!("INSERT INTO t VALUES ({value})")).await;
    }
    cluster.kill(2).unwrap();
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (50)").await;
    assert_eq!(values(&cluster, 1, "shop").await, Vec::from_iter(0..=50));
    let before = wait_until_sealed(&cluster, 0, 2).await;
    assert_ne!(owner(&cluster, 0, "shop").await, 2);
    cluster.start_node(2).await.unwrap();
    wait_until_alive(&cluster, 0, 2, before + 1).await;
    move_to(&cluster, 2, "shop", 2).await;
    execute(&cluster, 2, "shop", "INSERT INTO t VALUES (51)").await;
    // Its second death is no different.
    cluster.kill(2).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(0..=51));
}

#[tokio::test(flavor = "multi_thread")]
async fn suspended_node_is_fenced_and_rejoins() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 2).await;
    move_to(&cluster, 0, "fulmar", 0).await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (1)").await;
    let (_, before) = state(&cluster, 0, 2).await;
    cluster.signal(2, Signal::STOP).unwrap();
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (2)").await;
    cluster.signal(2, Signal::CONT).unwrap();
    wait_until_alive(&cluster, 0, 2, before + 1).await;
    // It answers heartbeats before it accepts clients.
    wait_until("n3 accepts clients", async || try_connect(&cluster.url(2, "shop")).await.is_ok()).await;
    assert_eq!(values(&cluster, 2, "shop").await, [1, 2]);
    assert_ne!(owner(&cluster, 2, "shop").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_node_hands_its_databases_over() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 1).await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write(cluster.url(0, "shop"), stop.clone());
    wait_until("writes", async || values(&cluster, 2, "shop").await.len() > 5).await;
    assert!(cluster.stop(1).await.unwrap().success());
    let seen = values(&cluster, 2, "shop").await.len();
    wait_until("progress", async || values(&cluster, 2, "shop").await.len() > seen + 5).await;
    stop.store(true, Ordering::Relaxed);
    let acknowledged = with_timeout("the writer", writer).await.unwrap();
    assert_eq!(values(&cluster, 2, "shop").await, acknowledged);
    wait_until_sealed(&cluster, 0, 1).await;
    cluster.start_node(1).await.unwrap();
    assert_eq!(values(&cluster, 1, "shop").await, acknowledged);
}

//! Administration of databases in clusters of real processes, with etcd and a common store: through
//! every node, while their owners change or die.

#[path = "../common/mod.rs"]
mod common;

mod branches;
mod durability;
mod quarantine;

use std::path::Path;

use common::{wait_until, with_timeout};
use fulmar_workload::server::{Cluster, ClusterSetup};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

/// The variable that arms failpoints.
const FAILPOINTS: &str = "FULMAR_FAILPOINTS";

async fn start() -> Cluster {
    let cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), ClusterSetup::default());
    cluster.await.unwrap()
}

/// Connects to a database through a node.
async fn connect(cluster: &Cluster, node: usize, database: &str) -> Client {
    try_connect(cluster, node, database).await.unwrap()
}

async fn try_connect(
    cluster: &Cluster,
    node: usize,
    database: &str,
) -> Result<Client, tokio_postgres::Error> {
    let connecting = tokio_postgres::connect(&cluster.url(node, database), NoTls).await;
    connecting.map(|(client, connection)| {
        tokio::spawn(connection);
        client
    })
}

/// Runs statements through a node.
async fn execute(cluster: &Cluster, node: usize, database: &str, sql: &str) {
    try_execute(cluster, node, database, sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

async fn try_execute(
    cluster: &Cluster,
    node: usize,
    database: &str,
    sql: &str,
) -> Result<(), tokio_postgres::Error> {
    let run = async { try_connect(cluster, node, database).await?.batch_execute(sql).await };
    with_timeout(sql, run).await
}

/// The message, detail and hint of a statement that must fail with this SQLSTATE.
async fn failure(cluster: &Cluster, node: usize, database: &str, sql: &str, state: &str) -> [String; 3] {
    let error = try_execute(cluster, node, database, sql).await.expect_err(sql);
    texts(&error, state)
}

fn texts(error: &tokio_postgres::Error, state: &str) -> [String; 3] {
    let found = error.as_db_error().unwrap_or_else(|| panic!("no answer: {error:?}"));
    assert_eq!(found.code(), &SqlState::from_code(state), "{found:?}");
    [found.message(), found.detail().unwrap_or_default(), found.hint().unwrap_or_default()].map(str::to_owned)
}

/// The values of the column `v` of `t`, through a node.
async fn values(cluster: &Cluster, node: usize, database: &str) -> Vec<i64> {
    let client = connect(cluster, node, database).await;
    let rows = with_timeout("a query", client.query("SELECT v FROM t ORDER BY v", &[])).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// A column of the row of a database in `fulmar.partitions`.
async fn partition(cluster: &Cluster, through: usize, database: &str, column: &str) -> String {
    let client = connect(cluster, through, "fulmar").await;
    let sql = format!("SELECT CAST({column} AS TEXT) FROM fulmar.partitions WHERE tenant = $1");
    let row = with_timeout("the partition", client.query_one(&sql, &[&database])).await.unwrap();
    row.get(0)
}

/// The node that owns a database.
async fn owner(cluster: &Cluster, through: usize, database: &str) -> usize {
    let name = partition(cluster, through, database, "node").await;
    (0..cluster.nodes()).find(|node| cluster.name(*node) == name).unwrap()
}

async fn move_to(cluster: &Cluster, database: &str, node: usize) {
    let sql = format!("ALTER DATABASE {database} MOVE TO '{}'", cluster.name(node));
    execute(cluster, node, "fulmar", &sql).await;
}

/// Waits until a node sees another one in this state.
async fn wait_for_state(cluster: &Cluster, through: usize, node: usize, state: &str) {
    let sql = "SELECT state FROM fulmar.nodes WHERE name = $1";
    wait_until("the state of a node", async || {
        let client = connect(cluster, through, "fulmar").await;
        let row = with_timeout("the state", client.query_one(sql, &[&cluster.name(node)])).await.unwrap();
        row.get::<_, String>(0) == state
    })
    .await;
}

/// Kills a node, and starts it again with other environment variables.
async fn restart(cluster: &mut Cluster, node: usize, variables: &[(&str, &str)]) {
    if cluster.is_running(node) {
        cluster.kill(node).unwrap();
    }
    cluster.set_environment(node, variables);
    cluster.start_node(node).await.unwrap();
    let other = (0..cluster.nodes()).find(|other| *other != node && cluster.is_running(*other));
    wait_for_state(cluster, other.unwrap_or(node), node, "alive").await;
}

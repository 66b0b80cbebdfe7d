//! Load reports and statistics of statements of all nodes, through any node.

use super::*;

/// Waits until a query through each of the clients has returned these rows, in succession. The
/// report of a node that does not answer within 2 s is missing.
async fn wait_for_rows(clients: &[&Client], sql: &str, expected: &[&str]) {
    wait_until(&format!("{expected:?}: {sql}"), async || {
        for client in clients {
            let rows = with_timeout(sql, client.query(sql, &[])).await.unwrap();
            if rows.iter().map(|row| row.get::<_, &str>(0)).collect::<Vec<_>>() != expected {
                return false;
            }
        }
        true
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_node_shows_the_load_of_all_nodes() {
    let cluster = start().await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE t (k INTEGER PRIMARY KEY, v INTEGER)").await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (1, 0)").await;
    let owner = cluster.name(owner(&cluster, 0, "shop").await).to_owned();
    let client = connect(&cluster, 1, "shop").await;
    for through in 0..cluster.nodes() {
        let observer = connect(&cluster, through, "fulmar").await;
        let under_load =
            "SELECT node FROM fulmar.load WHERE tenant = 'shop' AND cpu > 0 AND writes_per_s > 0";
        wait_until("the load", async || {
            for _ in 0..20 {
                client.batch_execute("UPDATE t SET v = v + 1 WHERE k = 1").await.unwrap();
            }
            let rows = observer.query(under_load, &[]).await.unwrap();
            rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>() == [owner.clone()]
        })
        .await;
        let nodes = "SELECT node FROM fulmar.node_load WHERE capacity > 0 AND error IS NULL ORDER BY node";
        let names: Vec<&str> = (0..cluster.nodes()).map(|node| cluster.name(node)).collect();
        wait_for_rows(&[&observer], nodes, &names).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_node_shows_the_statements_of_all_nodes() {
    let arguments = ["--slow-statement", "1"].map(str::to_owned).to_vec();
    let setup = ClusterSetup { arguments, ..ClusterSetup::default() };
    let cluster = Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap();
    create(&cluster, "shop").await;
    for node in 0..3 {
        // At a new node each.
        move_to(&cluster, 0, "shop", node).await;
        for round in 0..=node {
            execute(&cluster, round, "shop", &format!("SELECT v FROM t WHERE v = {round}")).await;
        }
        let slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300000) \
                    SELECT count(*) FROM n WHERE i <> 4711";
        execute(&cluster, 2, "shop", slow).await;
    }
    let counted = "SELECT node || ' ' || calls FROM fulmar.statements \
                   WHERE tenant = 'shop' AND statement = 'SELECT v FROM t WHERE v = ?' ORDER BY node";
    let slow = "SELECT node || ' ' || count(*) FROM fulmar.slow_statements \
                WHERE tenant = 'shop' AND statement LIKE '%FROM n WHERE i <> ?' GROUP BY node \
                ORDER BY node";
    for through in 0..3 {
        let system = connect(&cluster, through, "fulmar").await;
        let shop = connect(&cluster, through, "shop").await;
        for (sql, expected) in [(counted, ["n1 1", "n2 2", "n3 3"]), (slow, ["n1 1", "n2 1", "n3 1"])] {
            // Queries in the database are slow statements themselves, which replace older ones:
            // they are not polled before all nodes answer.
            wait_for_rows(&[&system, &shop], sql, &expected).await;
        }
    }
}

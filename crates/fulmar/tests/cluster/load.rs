//! Load reports of all nodes, through any node.

use super::*;

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
        let rows = observer.query(nodes, &[]).await.unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(names, (0..cluster.nodes()).map(|node| cluster.name(node)).collect::<Vec<_>>());
    }
}

//! A damaged object in the log of a dead node: its databases wait, the others go on, and nothing is
//! lost when the object is restored.

use std::path::PathBuf;

use fulmar_workload::server::Cluster;
use rustix::process::Signal;

use super::{connect, create, execute, move_to, start, values};
use crate::common::wait_until;

/// The last object of the log of the third node's first incarnation.
fn last_log_object(cluster: &Cluster) -> PathBuf {
    let logs = cluster.path("store").join("logs");
    let mut nodes: Vec<PathBuf> =
        std::fs::read_dir(logs).unwrap().map(|entry| entry.unwrap().path()).collect();
    // Logs are named by the cluster's id plus the node's number.
    nodes.sort();
    let log = nodes[2].join(format!("{:016x}", 1));
    std::fs::read_dir(log).unwrap().map(|entry| entry.unwrap().path()).max().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_log_of_a_dead_node_is_reported_and_loses_nothing_when_restored() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    create(&cluster, "books").await;
    move_to(&cluster, 0, "shop", 2).await;
    move_to(&cluster, 0, "books", 1).await;
    // The event log of the node with the system database is shown.
    move_to(&cluster, 0, "fulmar", 0).await;
    for value in 0..10 {
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({value})")).await;
    }
    cluster.signal(2, Signal::STOP).unwrap();
    let object = last_log_object(&cluster);
    let whole = std::fs::read(&object).unwrap();
    std::fs::write(&object, &whole[..whole.len() / 2]).unwrap();
    cluster.kill(2).unwrap();

    let name = object.file_name().unwrap().to_str().unwrap();
    wait_until("the damage is reported", async || {
        let client = connect(&cluster, 0, "fulmar").await;
        let sql =
            "SELECT CAST(details ->> 'error' AS TEXT) FROM fulmar.events WHERE kind = 'node.log_damaged'";
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter().any(|row| row.get::<_, String>(0).contains(name))
    })
    .await;
    execute(&cluster, 0, "books", "INSERT INTO t VALUES (1)").await;
    assert_eq!(values(&cluster, 1, "books").await, [1]);

    std::fs::write(&object, &whole).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(0..10));
    cluster.start_node(2).await.unwrap();
    execute(&cluster, 2, "shop", "INSERT INTO t VALUES (10)").await;
}

//! A node whose store is many times slower than that of the others is reported, and can be drained.

use std::path::Path;
use std::time::Duration;

use fulmar_workload::server::{Cluster, ClusterSetup, ClusterStore};

use super::{connect, create, execute, move_to, owner, values};
use crate::common::gate::{Gate, State};
use crate::common::{run, stdout, wait_until};

/// Delay of the responses of one node's store: far above the minimum, and the latency of the others.
const DELAY: Duration = Duration::from_millis(700);

/// The nodes and resources in the events of a kind.
async fn events(cluster: &Cluster, kind: &str) -> Vec<(String, Option<String>)> {
    let client = connect(cluster, 0, "fulmar").await;
    let sql = "SELECT CAST(details ->> 'node' AS TEXT), CAST(details ->> 'resource' AS TEXT) \
               FROM fulmar.events WHERE kind = $1";
    let rows = client.query(sql, &[&kind]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_a_slow_store_is_reported_and_can_be_drained() {
    let binary = Path::new(env!("CARGO_BIN_EXE_fulmar"));
    let setup = ClusterSetup { store: ClusterStore::S3, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(binary, setup).unwrap();
    let gate = Gate::start_for_node(&mut cluster, 2).await;
    for node in 0..3 {
        cluster.start_node(node).await.unwrap();
    }
    cluster.wait_until_alive(3).await.unwrap();
    create(&cluster, "shop").await;
    move_to(&cluster, 0, "shop", 2).await;
    // Each node has an event log of its own; that of the system database is shown.
    move_to(&cluster, 0, "fulmar", 1).await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (1)").await;

    gate.state.send_replace(State::Open(DELAY));
    let is_reported = |events: Vec<(String, Option<String>)>| {
        events.iter().any(|(node, resource)| node == "n3" && resource.as_deref() == Some("store reads"))
    };
    wait_until("n3 is slow", async || is_reported(events(&cluster, "node.slow").await)).await;
    let server = cluster.url(0, "fulmar");
    let list = stdout(&run(&["node", "list", "--server", &server, "--json"]));
    let nodes: serde_json::Value = serde_json::from_str(&list).unwrap();
    let slow: Vec<bool> = nodes.as_array().unwrap().iter().map(|node| node["slow"].is_string()).collect();
    assert_eq!(slow, [false, false, true], "{list}");
    let list = stdout(&run(&["node", "list", "--server", &server]));
    assert!(list.contains("others"), "{list}");

    stdout(&run(&["node", "drain", "n3", "--server", &server]));
    assert_ne!(owner(&cluster, 0, "shop").await, 2);
    assert_eq!(values(&cluster, 0, "shop").await, [1]);
    for database in 0..4 {
        // New databases avoid the slow node, although it has the fewest.
        let name = format!("new{database}");
        execute(&cluster, 0, "fulmar", &format!("CREATE DATABASE {name}")).await;
        assert_ne!(owner(&cluster, 0, &name).await, 2);
    }

    gate.state.send_replace(State::Open(Duration::ZERO));
    wait_until("n3 is normal again", async || {
        events(&cluster, "node.not_slow").await.iter().any(|(node, _)| node == "n3")
    })
    .await;
    let others = events(&cluster, "node.slow").await.into_iter().filter(|(node, _)| node != "n3").count();
    assert_eq!(others, 0, "the other nodes are not slow");
}

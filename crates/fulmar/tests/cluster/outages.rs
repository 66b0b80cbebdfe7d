//! A store or etcd that is away, and nodes that start.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use fulmar_workload::server::{Cluster, ClusterSetup, ClusterStore};
use tokio_postgres::error::SqlState;

use super::store_proxy::{Proxy, Treatment};
use super::{connect, create, execute, move_to, owner, start, try_connect, values};
use crate::common::{wait_until, with_timeout};

/// How long the store is away.
const OUTAGE: Duration = Duration::from_secs(20);

/// The flush before the move fails, and so does the first attempt to take the database back.
#[tokio::test(flavor = "multi_thread")]
async fn database_whose_move_has_failed_is_served_when_the_store_is_back() {
    let setup = ClusterSetup { nodes: 2, store: ClusterStore::S3, ..ClusterSetup::default() };
    let mut cluster = Cluster::prepare(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).unwrap();
    let proxy = Proxy::start(&mut cluster, 0, Ipv4Addr::LOCALHOST).await;
    for node in 0..2 {
        cluster.start_node(node).await.unwrap();
    }
    cluster.wait_until_alive(2).await.unwrap();
    create(&cluster, "shop").await;
    move_to(&cluster, 1, "shop", 0).await;
    execute(&cluster, 1, "shop", "INSERT INTO t VALUES (1)").await;
    let admin = connect(&cluster, 1, "fulmar").await;
    proxy.set(Treatment::Refuse);
    let mut moving =
        tokio::spawn(async move { admin.batch_execute("ALTER DATABASE shop MOVE TO 'n2'").await });
    wait_until("the store refuses a request", async || proxy.refused() > 0).await;
    // Usually long enough for the move to fail, and to be undone in vain.
    if let Ok(moved) = tokio::time::timeout(OUTAGE, &mut moving).await {
        moved.unwrap().expect_err("a database must not move while its records cannot be flushed");
    }
    proxy.set(Treatment::Pass);
    let client = connect(&cluster, 1, "shop").await;
    wait_until("an insert", async || {
        let inserted = with_timeout("an insert", client.batch_execute("INSERT INTO t VALUES (2)")).await;
        // Until the node has noticed that the store is back.
        inserted.map_err(|error| assert_eq!(error.code(), Some(&SqlState::IO_ERROR), "{error:?}")).is_ok()
    })
    .await;
    assert_eq!(values(&cluster, 0, "shop").await, [1, 2]);
    if !moving.is_finished() {
        let _ = with_timeout("the move", moving).await; // it may succeed now
    }
    move_to(&cluster, 0, "shop", 1).await;
    assert_eq!(owner(&cluster, 0, "shop").await, 1);
    assert_eq!(values(&cluster, 0, "shop").await, [1, 2]);
}

/// A node that was declared dead restarts itself, and etcd may not answer at that moment.
#[tokio::test(flavor = "multi_thread")]
async fn node_that_has_joined_before_waits_for_etcd_at_its_start() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    cluster.kill(2).unwrap();
    cluster.etcd().kill(0).unwrap();
    cluster.spawn_node(2).unwrap();
    let log = cluster.log(2).to_owned();
    let waits = async || {
        let log = std::fs::read_to_string(&log).unwrap();
        log.contains("the metadata store does not answer; will retry")
    };
    wait_until("the node waits", waits).await;
    cluster.etcd().start_again(0).unwrap();
    cluster.wait_for_node(2).await.unwrap();
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(!log.lines().any(|line| line.starts_with("fulmar: ")), "the process has ended: {log}");
    execute(&cluster, 2, "shop", "INSERT INTO t VALUES (1)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_node_is_listed_as_alive_when_it_accepts_clients() {
    let mut cluster = start().await;
    let observer = connect(&cluster, 0, "fulmar").await;
    let mut last = 1_i64;
    for _ in 0..3 {
        cluster.kill(1).unwrap();
        cluster.spawn_node(1).unwrap();
        let sql =
            "SELECT incarnation FROM fulmar.nodes WHERE name = 'n2' AND state = 'alive' AND incarnation > $1";
        let listed = async {
            loop {
                if let Some(row) = observer.query_opt(sql, &[&last]).await.unwrap() {
                    return row.get(0);
                }
                cluster.check_start(1).unwrap();
            }
        };
        last = with_timeout("the node is listed", listed).await;
        let client =
            try_connect(&cluster.url(1, "fulmar")).await.expect("a node that is alive accepts clients");
        client.batch_execute("SELECT 1").await.unwrap();
    }
}

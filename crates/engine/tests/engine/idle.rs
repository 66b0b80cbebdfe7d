//! Unused partitions are closed. A partition with an idle session stays open.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, MEMORY, wait_until};
use fulmar_engine::{Config, Engine};
use fulmar_pages::PartitionId;

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// Waits for a round of the flusher, which closes a partition that is no longer used.
async fn flusher_round(engine: &Arc<Engine>) {
    let mut visitor = client(engine, 2);
    visitor.run("CREATE TABLE IF NOT EXISTS t(v); INSERT INTO t VALUES (1)").await.unwrap();
    visitor.close().await;
    let is_closed = async || engine.partition_statistics(PartitionId(2)).unwrap().memory_bytes.is_none();
    wait_until("the unused partition is closed", is_closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_session_keeps_its_partition_open() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        idle_after: Duration::ZERO,
        manifest_interval: Duration::ZERO,
        ..Config::new(directory.path(), MEMORY)
    };
    let engine = Engine::start(config).await.unwrap();
    let mut idle = client(&engine, 1);
    idle.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v); INSERT INTO t(v) VALUES (1)").await.unwrap();
    for _ in 0..3 {
        flusher_round(&engine).await;
    }
    let mut other = client(&engine, 1);
    other.run("INSERT INTO t(v) VALUES (2)").await.unwrap();
    idle.run("INSERT INTO t(v) VALUES (3)").await.unwrap();
    for client in [&mut idle, &mut other] {
        assert_eq!(
            client.int("SELECT count(*) FROM t").await,
            3,
            "all sessions must use the same open partition"
        );
    }
    engine.shutdown().await.unwrap();
}

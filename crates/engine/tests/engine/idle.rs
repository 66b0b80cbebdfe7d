//! Partitions that nobody uses are closed; one that a silent session still has is not.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, MEMORY, until};
use fulmar_engine::{Config, Engine};
use fulmar_pages::PartitionId;

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// Waits for a round of the flusher: a partition that was used is closed.
async fn flusher_round(engine: &Arc<Engine>) {
    let mut visitor = client(engine, 2);
    visitor.run("CREATE TABLE IF NOT EXISTS t(v); INSERT INTO t VALUES (1)").await.unwrap();
    visitor.close().await;
    let is_closed = async || engine.partition_statistics(PartitionId(2)).unwrap().memory_bytes.is_none();
    until("the unused partition is closed", is_closed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_session_keeps_its_partition_open() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config {
        idle_after: Duration::ZERO,
        manifest_interval: Duration::ZERO,
        ..Config::new(directory.path(), MEMORY)
    };
    let engine = Engine::start(config).await.unwrap();
    let mut silent = client(&engine, 1);
    silent.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v); INSERT INTO t(v) VALUES (1)").await.unwrap();
    for _ in 0..3 {
        flusher_round(&engine).await;
    }
    let mut other = client(&engine, 1);
    other.run("INSERT INTO t(v) VALUES (2)").await.unwrap();
    silent.run("INSERT INTO t(v) VALUES (3)").await.unwrap();
    for client in [&mut silent, &mut other] {
        assert_eq!(client.int("SELECT count(*) FROM t").await, 3, "all have the same partition");
    }
    engine.shutdown().await.unwrap();
}

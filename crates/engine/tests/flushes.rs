//! Flushes against a store that fails or is slow, with a crash after it: the log gives up nothing that is not elsewhere.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::objects::{Objects, Writes};
use common::{Client, start_when_free};
use fulmar_engine::{Config, Engine, Value};
use fulmar_pages::PartitionId;
use object_store::memory::InMemory;

struct Node {
    engine: Arc<Engine>,
    objects: Arc<Objects>,
    directory: tempfile::TempDir,
}

impl Node {
    async fn start() -> Node {
        let directory = tempfile::tempdir().unwrap();
        let objects = Arc::new(Objects::new(Arc::new(InMemory::new())));
        let engine = start(&directory, &objects).await;
        Node { engine, objects, directory }
    }

    /// As a kill does: nothing is closed or flushed.
    async fn crash(self) -> Node {
        let Node { engine, objects, directory } = self;
        drop(engine);
        let engine = start(&directory, &objects).await;
        Node { engine, objects, directory }
    }

    fn client(&self, partition: u64) -> Client {
        Client { session: self.engine.session(PartitionId(partition)) }
    }

    /// Asserts that both tables hold as many rows, once more after a crash.
    async fn holds(self, rows: i64) -> Node {
        let mut node = self;
        for _ in 0..2 {
            for partition in [1, 2] {
                let mut client = node.client(partition);
                assert_eq!(client.int("SELECT count(*) FROM t").await, rows, "partition {partition}");
                assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
                client.close().await;
            }
            node = node.crash().await;
        }
        node
    }

    async fn insert(&self) {
        for partition in [1, 2] {
            let mut client = self.client(partition);
            client.run("INSERT INTO t(v) VALUES (zeroblob(2000))").await.unwrap();
            client.close().await;
        }
    }
}

async fn start(directory: &tempfile::TempDir, objects: &Arc<Objects>) -> Arc<Engine> {
    let config = || Config {
        objects: Some(objects.clone()),
        // Only the test flushes.
        manifest_interval: Duration::from_secs(3600),
        ..Config::new(directory.path(), 1 << 30)
    };
    start_when_free(config).await
}

async fn two_tables() -> Node {
    let node = Node::start().await;
    for partition in [1, 2] {
        let mut client = node.client(partition);
        client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
        client.close().await;
    }
    node
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_costs_no_commit() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.objects.set_writes(Writes::Fail);
    node.insert().await;
    node.engine.flush().await.unwrap_err();
    node.insert().await; // commits need the log only
    node.engine.flush().await.unwrap_err();
    let node = node.holds(3).await;

    node.objects.set_writes(Writes::Pass);
    node.engine.flush().await.unwrap();
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.holds(4).await;
}

/// What is committed while a flush is under way belongs to the next one, and stays in the log until then.
#[tokio::test(flavor = "multi_thread")]
async fn commits_during_a_flush_stay_in_the_log() {
    let node = two_tables().await;
    node.insert().await;
    node.objects.set_writes(Writes::Wait);
    let flush = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.flush().await }
    });
    node.objects.write_waits().await;
    node.insert().await;
    node.objects.set_writes(Writes::Pass);
    flush.await.unwrap().unwrap();
    node.holds(2).await;
}

/// A copy's flush takes what is dirty just like the flusher's. If it fails, that is dirty still, and neither the next
/// flush nor the log may have forgotten it.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_fails_leaves_its_source_dirty() {
    let node = two_tables().await;
    node.insert().await;
    node.objects.set_writes(Writes::Wait);
    let copy = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.create_partition(PartitionId(3), Some(PartitionId(1))).await }
    });
    node.objects.write_waits().await;
    let flush = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.flush().await }
    });
    node.insert().await;
    node.objects.set_writes(Writes::Fail);
    copy.await.unwrap().unwrap_err();
    flush.await.unwrap().unwrap_err();
    node.objects.set_writes(Writes::Pass);
    node.engine.flush().await.unwrap();
    node.holds(2).await;
}

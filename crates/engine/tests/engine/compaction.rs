//! Compaction: it never changes the contents of a partition, also with concurrent writes and
//! failures of the store.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::common::crashing::CrashingNode;
use crate::common::wait_until;
use fulmar_engine::Value;
use fulmar_pages::PartitionId;
use fulmar_store::{FailureKind, Store, StoreFault, StoreOperation};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SHOP: PartitionId = PartitionId(7);
const STORE_FAILURE: StoreFault = StoreFault::Fail(FailureKind::Other);

/// A node with one table, and the expected contents of the table.
struct Node {
    node: CrashingNode,
    rows: BTreeMap<i64, i64>,
    random: StdRng,
}

impl Deref for Node {
    type Target = CrashingNode;

    fn deref(&self) -> &CrashingNode {
        &self.node
    }
}

impl Node {
    async fn start() -> Node {
        let node = CrashingNode::start(1 << 30, |config| {
            config.retention = Arc::new(|_| Duration::ZERO);
            // Only the test starts flushes.
            config.manifest_interval = Duration::from_secs(3600);
        });
        let node = Node { node: node.await, rows: BTreeMap::new(), random: StdRng::seed_from_u64(5) };
        node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER, v BLOB)").await;
        node
    }

    async fn crash(self) -> Node {
        Node { node: self.node.crash().await, ..self }
    }

    async fn run(&self, sql: &str) {
        let mut client = self.client(SHOP.0);
        client.run(sql).await.unwrap();
        client.close().await;
    }

    /// Changes some rows.
    async fn change(&mut self) {
        let mut sql = String::from("BEGIN;");
        for _ in 0..self.random.random_range(1..40) {
            let (id, n) = (self.random.random_range(1..600), self.random.random_range(0..1000));
            sql += &format!("INSERT OR REPLACE INTO t VALUES ({id}, {n}, randomblob(1500));");
            self.rows.insert(id, n);
        }
        if self.random.random_bool(0.1) {
            let least = self.random.random_range(1..600);
            sql += &format!("DELETE FROM t WHERE id > {least};");
            self.rows.retain(|id, _| *id <= least);
        }
        self.run(&(sql + "COMMIT")).await;
    }

    async fn check(&self) {
        let mut client = self.client(SHOP.0);
        let found = client.run("SELECT id, n FROM t ORDER BY id").await.unwrap();
        let found: BTreeMap<i64, i64> = found
            .into_iter()
            .map(|row| match row[..] {
                [Value::Integer(id), Value::Integer(n)] => (id, n),
                _ => panic!("{row:?}"),
            })
            .collect();
        assert_eq!(found, self.rows);
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        client.close().await;
    }

    /// All manifests. Anchors are excluded, because their existence depends on the contents of the
    /// log when the partition was last examined.
    async fn manifests(&self) -> Vec<String> {
        let mut names = self.objects("manifests").await;
        names.retain(|name| !name.contains("anchor-"));
        names
    }

    async fn objects(&self, directory: &str) -> Vec<String> {
        let listing = self.store.list(directory, None).await.unwrap();
        assert!(!listing.more);
        listing.names
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_bounds_segments_and_keeps_the_contents() {
    let mut node = Node::start().await;
    for flush in 1..=120 {
        node.change().await;
        node.engine.flush().await.unwrap();
        if flush % 7 == 0 {
            node.engine.compact_all().await.unwrap();
        }
        if flush % 30 == 0 {
            node = node.crash().await;
            node.check().await;
            node.engine.collect().await.unwrap();
        }
    }
    node.engine.compact_all().await.unwrap();
    // After the crash, no open partition uses the merged segments.
    node = node.crash().await;
    node.engine.collect().await.unwrap();
    let segments = node.objects("segments").await.len();
    assert!(segments <= 12, "{segments} segments after 120 flushes");
    let manifests = node.manifests().await;
    assert_eq!(manifests.len(), 1, "{manifests:?}");
    node.check().await;
    node.run("DELETE FROM t; VACUUM").await;
    node.rows.clear();
    node.engine.flush().await.unwrap();
    node.engine.compact_all().await.unwrap();
    node.crash().await.check().await;
}

/// Pages that were not in memory when their segments were merged are read from the merged segment.
/// The old segments can then be deleted, although the partition stays open.
#[tokio::test(flavor = "multi_thread")]
async fn merged_segments_of_an_open_partition_are_deleted() {
    let mut node = Node::start().await;
    for first in (1..=600).step_by(20) {
        let rows: Vec<String> =
            (first..first + 20).map(|id| format!("({id}, {id}, randomblob(1500))")).collect();
        node.run(&format!("INSERT INTO t VALUES {}", rows.join(", "))).await;
        node.rows.extend((first..first + 20).map(|id| (id, id)));
        node.engine.flush().await.unwrap();
    }
    node = node.crash().await;
    // Listed before the partition is opened, because it may be compacted at any time afterwards.
    node.engine.collect().await.unwrap();
    let before = node.objects("segments").await;
    let mut session = node.engine.session(SHOP);
    session.prepare("SELECT n FROM t").await.unwrap();
    // Each round overwrites three quarters of the rows. After two rounds, dead pages outweigh live
    // ones, so all segments are merged, including the pages of the last quarter, which were never
    // read.
    for _ in 0..4 {
        node.run("UPDATE t SET v = randomblob(1500) WHERE id <= 450").await;
        node.engine.flush().await.unwrap();
        node.engine.compact_all().await.unwrap();
    }
    // Pages replaced by the last commits are kept until the flusher's next round.
    let are_deleted = async || {
        node.engine.collect().await.unwrap();
        let now = node.objects("segments").await;
        before.iter().all(|segment| !now.contains(segment))
    };
    wait_until("the replaced segments are deleted", are_deleted).await;
    node.check().await;
    session.close().await;
}

/// Commits and flushes run while a compaction reads its segments.
#[tokio::test(flavor = "multi_thread")]
async fn flushes_during_a_compaction_are_not_lost() {
    let mut node = Node::start().await;
    for _ in 0..12 {
        node.store.hold(StoreOperation::Get, true);
        node.change().await;
        node.engine.flush().await.unwrap();
        node.change().await;
        node.engine.flush().await.unwrap();
        node.store.hold(StoreOperation::Get, false);
        node.change().await;
        node.engine.flush().await.unwrap();
    }
    node.engine.compact_all().await.unwrap();
    node.change().await;
    node.check().await;
    let node = node.crash().await;
    node.check().await;
}

/// A round of a copy to another node sends what has changed, not what a compaction has moved.
#[tokio::test(flavor = "multi_thread")]
async fn pages_of_a_copy_are_not_moved_meanwhile() {
    let mut node = Node::start().await;
    for first in (1..=600).step_by(200) {
        let rows: Vec<String> =
            (first..first + 200).map(|id| format!("({id}, {id}, randomblob(1500))")).collect();
        node.run(&format!("INSERT INTO t VALUES {}", rows.join(", "))).await;
        node.rows.extend((first..first + 200).map(|id| (id, id)));
        node.engine.flush().await.unwrap();
    }
    let mut copy = node.engine.copy_out(SHOP);
    let all = copy.begin_round().await.unwrap();
    assert!(all.pages > 200, "{all:?}");
    // Dead pages outweigh live ones, so all segments are to be merged.
    for _ in 0..4 {
        node.run("UPDATE t SET v = randomblob(1500) WHERE id <= 450").await;
        node.engine.flush().await.unwrap();
    }
    let before = copy.begin_round().await.unwrap();
    assert!(before.pages > 100, "{before:?}");
    node.engine.compact_all().await.unwrap();
    assert_eq!(copy.begin_round().await.unwrap().pages, 0, "only a compaction has moved pages");
    drop(copy);
    let flushed = node.objects("segments").await.len();
    node.engine.compact_all().await.unwrap();
    assert_eq!(node.objects("segments").await.len(), flushed + 1, "the segments were merged afterwards");
    node.check().await;
}

/// Whichever request the store rejects, no data is lost, and garbage is deleted by the next
/// collection.
#[tokio::test(flavor = "multi_thread")]
async fn failed_compaction_loses_nothing() {
    use StoreOperation::{Delete, Get, List, Put};
    const OPERATIONS: [StoreOperation; 4] = [Put, Get, List, Delete];
    let mut node = Node::start().await;
    // The number of reached failures of each operation.
    let mut failed = [0; OPERATIONS.len()];
    for place in 0..10 {
        for (operation, failed) in OPERATIONS.into_iter().zip(&mut failed) {
            for _ in 0..5 {
                node.change().await;
                node.engine.flush().await.unwrap();
            }
            for _ in 0..place {
                node.store.next(operation, StoreFault::Delay(Duration::ZERO));
            }
            node.store.next(operation, STORE_FAILURE);
            // The failure is reached by any of them, by a task in the background, or not at all.
            let _ = node.engine.compact_all().await;
            let _ = node.engine.collect().await;
            node.change().await;
            let _ = node.engine.flush().await;
            *failed += i32::from(!node.store.forget(operation));
            node.check().await;
        }
        node = node.crash().await;
        node.check().await;
    }
    for (operation, failed) in OPERATIONS.into_iter().zip(failed) {
        assert!(failed > 0, "no {operation:?} has failed");
    }
    node.engine.flush().await.unwrap();
    node.engine.compact_all().await.unwrap();
    node = node.crash().await;
    node.engine.collect().await.unwrap();
    let segments = node.objects("segments").await.len();
    assert!(segments <= 12, "{segments} segments are left");
    let manifests = node.manifests().await;
    assert_eq!(manifests.len(), 1, "{manifests:?}");
    node.check().await;
}

//! Flushes against a store that fails or is slow, with a crash after it: the log gives up nothing that is not elsewhere.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::crashing::CrashingNode as Node;
use crate::common::until;
use fulmar_engine::Value;
use fulmar_pages::PartitionId;
use fulmar_store::{FailureKind, Store, StoreFault, StoreOperation, Uploads};

const NO_SPACE: Option<StoreFault> = Some(StoreFault::Fail(FailureKind::Other));

impl Node {
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

    /// The names of all segments that are stored.
    async fn segments(&self) -> BTreeSet<String> {
        self.store.list("segments", None).await.unwrap().names.into_iter().collect()
    }

    /// How many manifests both partitions have.
    async fn points(&self) -> usize {
        let [one, two] = [1, 2].map(|partition| self.engine.history(PartitionId(partition)));
        one.await.unwrap().len() + two.await.unwrap().len()
    }

    async fn insert(&self) {
        for partition in [1, 2] {
            let mut client = self.client(partition);
            client.run("INSERT INTO t(v) VALUES (zeroblob(2000))").await.unwrap();
            client.close().await;
        }
    }
}

async fn two_tables() -> Node {
    // Only the test flushes.
    let node = Node::start(1 << 30, |config| config.manifest_interval = Duration::from_secs(3600)).await;
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
    node.store.always(StoreOperation::Put, NO_SPACE);
    node.insert().await;
    node.engine.flush().await.unwrap_err();
    node.insert().await; // commits need the log only
    node.engine.flush().await.unwrap_err();
    let node = node.holds(3).await;

    node.store.always(StoreOperation::Put, None);
    node.engine.flush().await.unwrap();
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.holds(4).await;
}

/// Of a flush whose upload fails in the middle nothing stays under way in the store, however often it is tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_that_fails_aborts_its_upload() {
    let node = two_tables().await;
    let mut client = node.client(1);
    // Each too small to be a segment of its own; together more than a part.
    for _ in 0..4 {
        client.run("INSERT INTO t(v) VALUES (randomblob(3000000))").await.unwrap();
    }
    client.close().await;
    // It is begun, a part is sent, then the rest, and it is completed.
    for place in 0..4 {
        for _ in 0..place {
            node.store.next(StoreOperation::Upload, StoreFault::Delay(Duration::ZERO));
        }
        node.store.next(StoreOperation::Upload, StoreFault::Fail(FailureKind::Other));
        node.engine.flush().await.unwrap_err();
        node.store.uploads_have_ended().await;
    }
    assert!(node.segments().await.is_empty());
    node.engine.flush().await.unwrap();
    assert_eq!(node.store.uploads(), Uploads { begun: 4, completed: 1, aborted: 3 });
    let node = node.crash().await;
    assert_eq!(node.client(1).int("SELECT sum(length(v)) FROM t").await, 12_000_000);
}

/// What is committed while a flush is under way belongs to the next one, and stays in the log until then.
#[tokio::test(flavor = "multi_thread")]
async fn commits_during_a_flush_stay_in_the_log() {
    let node = two_tables().await;
    node.insert().await;
    node.store.hold(StoreOperation::Put, true);
    let flush = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.flush().await }
    });
    node.store.is_holding().await;
    node.insert().await;
    node.store.hold(StoreOperation::Put, false);
    flush.await.unwrap().unwrap();
    node.holds(2).await;
}

/// A copy's flush takes what is dirty just like the flusher's. If it fails, that is dirty still, and neither the next
/// flush nor the log may have forgotten it.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_fails_leaves_its_source_dirty() {
    let node = two_tables().await;
    node.insert().await;
    node.store.hold(StoreOperation::Put, true);
    let copy = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.create_partition(PartitionId(3), Some((PartitionId(1), None))).await }
    });
    node.store.is_holding().await;
    let flush = tokio::spawn({
        let engine = node.engine.clone();
        async move { engine.flush().await }
    });
    node.insert().await;
    node.store.always(StoreOperation::Put, NO_SPACE);
    node.store.hold(StoreOperation::Put, false);
    copy.await.unwrap().unwrap_err();
    flush.await.unwrap().unwrap_err();
    node.store.always(StoreOperation::Put, None);
    node.engine.flush().await.unwrap();
    node.holds(2).await;
}

/// The answers to its puts are lost, and then nobody can tell what is stored: what is stored is stored, and the next flush of
/// the same version, whose manifest has the same name and is not the same, goes on from there.
#[tokio::test(flavor = "multi_thread")]
async fn a_flush_that_stumbles_over_its_own_manifest_goes_on() {
    let node = two_tables().await;
    node.insert().await;
    for _ in 0..3 {
        node.store.next(StoreOperation::Put, StoreFault::LoseAnswer);
    }
    node.engine.flush().await.unwrap();
    node.insert().await;
    // The segment is stored, and then the manifests are, which cannot be read back.
    node.store.next(StoreOperation::Put, StoreFault::Delay(Duration::ZERO));
    for _ in 0..2 {
        node.store.next(StoreOperation::Put, StoreFault::LoseAnswer);
    }
    node.store.always(StoreOperation::Get, NO_SPACE);
    node.engine.flush().await.unwrap_err();
    node.store.always(StoreOperation::Get, None);
    node.engine.flush().await.unwrap();
    // The manifest that it found says where the pages lie: nothing is kept in memory for want of a place. (What was
    // replaced is freed when the flusher comes by.)
    let is_written = async || node.engine.statistics().memory_unwritten_bytes == 0;
    until("every page is written", is_written).await;
    let node = node.holds(2).await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.holds(3).await;
}

/// A manifest that could not be stored may yet appear, as far as anybody knows. What it names is not collected, and the next
/// flush stores it before its own, so that what appears is never a surprise.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_unsure_manifest_names_is_kept() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.engine.collect().await.unwrap();
    let points = node.points().await;
    node.insert().await;
    // The segment is stored, and then the first manifest is not; after that the second one is not even tried.
    node.store.next(StoreOperation::Put, StoreFault::Delay(Duration::ZERO));
    node.store.always(StoreOperation::Put, NO_SPACE);
    node.engine.flush().await.unwrap_err();
    let stored = node.segments().await;
    node.engine.collect().await.unwrap();
    assert_eq!(node.segments().await, stored);

    node.store.always(StoreOperation::Put, None);
    node.insert().await;
    node.engine.flush().await.unwrap();
    assert!(node.points().await >= points + 3, "both, and the one that was unsure");
    node.engine.collect().await.unwrap();
    assert!(stored.is_subset(&node.segments().await));
    node.holds(3).await;
}

/// One whose newest manifest is damaged cannot be opened, so it cannot be flushed. That is no reason not to flush the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_cannot_be_opened_keeps_nobody_from_being_flushed() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.insert().await;
    let manifests = node.store.list("manifests", None).await.unwrap().names;
    let damaged = manifests.iter().rfind(|name| name.starts_with("manifests/0000000000000001/")).unwrap();
    node.store.delete(damaged).await.unwrap();
    node.store.put(damaged, "no manifest".into()).await.unwrap();
    let node = node.crash().await;
    let mut other = node.client(2);
    other.run("INSERT INTO t(v) VALUES (zeroblob(2000))").await.unwrap();
    other.close().await;
    let points = node.engine.history(PartitionId(2)).await.unwrap().len();
    node.engine.flush().await.unwrap_err();
    assert_eq!(node.engine.history(PartitionId(2)).await.unwrap().len(), points + 1);
}

/// Something else stands where a manifest is to be stored, and cannot be read: the next one gets another name.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_object_in_the_place_of_a_manifest_is_passed_over() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    let newest = node.engine.history(PartitionId(1)).await.unwrap().pop().unwrap();
    let name = format!("manifests/{}/{:08x}/{:016x}", PartitionId(1), 1, newest.version + 1);
    node.store.put(&name, (&b"no manifest"[..]).into()).await.unwrap();
    node.insert().await;
    let error = node.engine.flush().await.unwrap_err();
    assert!(error.message().contains(&name), "{error:?}");
    assert_eq!(node.engine.history(PartitionId(2)).await.unwrap().len(), 2, "others are flushed");
    node.insert().await;
    node.engine.flush().await.unwrap();
    assert_eq!(node.engine.history(PartitionId(2)).await.unwrap().len(), 3);
    node.holds(3).await;
}

/// The store refuses the manifests of one partition, as long as its directory cannot be written.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_manifest_is_refused_does_not_keep_others_from_being_flushed() {
    let node = crate::common::Node::start().await;
    let run = async |sql: &str| {
        for partition in [1, 2] {
            let mut client = node.client(partition);
            client.run(sql).await.unwrap();
            client.close().await;
        }
    };
    run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    // Both are open now.
    let place = node.directory.path().join("store/manifests").join(PartitionId(1).to_string());
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    std::fs::write(&place, b"no directory").unwrap();
    for rounds in 1..=3 {
        run("INSERT INTO t(v) VALUES (randomblob(2000))").await;
        node.engine.flush().await.unwrap_err();
        let points = node.engine.history(PartitionId(2)).await.unwrap().len();
        assert!(points >= rounds, "the other one is flushed");
    }
    std::fs::remove_file(&place).unwrap();
    node.engine.flush().await.unwrap();
    let node = node.restart().await;
    for partition in [1, 2] {
        assert_eq!(node.client(partition).int("SELECT count(*) FROM t").await, 3);
    }
}

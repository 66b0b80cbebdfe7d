//! Flushes to a failing or slow store, followed by a crash: the log is truncated only below changes
//! that are stored elsewhere.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::crashing::CrashingNode as Node;
use crate::common::wait_until;
use fulmar_engine::Value;
use fulmar_pages::PartitionId;
use fulmar_store::{FailureKind, Store, StoreFault, StoreOperation, UploadCounts};

const NO_SPACE: Option<StoreFault> = Some(StoreFault::Fail(FailureKind::Other));

impl Node {
    /// Asserts that both tables hold `rows` rows, before and after a crash.
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

    /// The names of all stored segments.
    async fn segments(&self) -> BTreeSet<String> {
        self.store.list("segments", None).await.unwrap().names.into_iter().collect()
    }

    /// The number of manifests of both partitions.
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
async fn failing_store_loses_no_commit() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.store.always(StoreOperation::Put, NO_SPACE);
    node.insert().await;
    node.engine.flush().await.unwrap_err();
    node.insert().await; // Commits need only the log.
    node.engine.flush().await.unwrap_err();
    let node = node.holds(3).await;

    node.store.always(StoreOperation::Put, None);
    node.engine.flush().await.unwrap();
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.holds(4).await;
}

/// A flush whose upload fails leaves no unfinished upload in the store, even after several
/// attempts.
#[tokio::test(flavor = "multi_thread")]
async fn failed_flush_aborts_its_upload() {
    let node = two_tables().await;
    let mut client = node.client(1);
    // Each commit is too small for its own segment; together they exceed one upload part.
    for _ in 0..4 {
        client.run("INSERT INTO t(v) VALUES (randomblob(3000000))").await.unwrap();
    }
    client.close().await;
    // The steps are: begin the upload, send a part, send the rest, complete the upload.
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
    assert_eq!(node.store.uploads(), UploadCounts { started: 4, completed: 1, aborted: 3 });
    let node = node.crash().await;
    assert_eq!(node.client(1).int("SELECT sum(length(v)) FROM t").await, 12_000_000);
}

/// Commits during a flush belong to the next flush, and stay in the log until then.
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

/// The flush of a copy takes the dirty pages, as the flusher does. If it fails, the pages stay
/// dirty, and neither the next flush nor the log may forget them.
#[tokio::test(flavor = "multi_thread")]
async fn failed_copy_leaves_its_source_dirty() {
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

/// The answers to the puts of a flush are lost, and reads fail, so their outcome is unknown. The
/// next flush of the same version finds a manifest of the same name with other contents, and
/// continues from it.
#[tokio::test(flavor = "multi_thread")]
async fn flush_continues_after_finding_its_own_manifest() {
    let node = two_tables().await;
    node.insert().await;
    for _ in 0..3 {
        node.store.next(StoreOperation::Put, StoreFault::LoseResponse);
    }
    node.engine.flush().await.unwrap();
    node.insert().await;
    // The segment and the manifests are stored, but the manifests cannot be read back.
    node.store.next(StoreOperation::Put, StoreFault::Delay(Duration::ZERO));
    for _ in 0..2 {
        node.store.next(StoreOperation::Put, StoreFault::LoseResponse);
    }
    node.store.always(StoreOperation::Get, NO_SPACE);
    node.engine.flush().await.unwrap_err();
    node.store.always(StoreOperation::Get, None);
    node.engine.flush().await.unwrap();
    // The manifest that it finds contains the locations of the pages, so no page is kept in memory.
    // (Replaced pages are freed by the flusher's next round.)
    let is_written = async || node.engine.statistics().memory_unwritten_bytes == 0;
    wait_until("every page is written", is_written).await;
    let node = node.holds(2).await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.holds(3).await;
}

/// A manifest whose put failed may still appear. The segments that it names are not collected, and
/// the next flush stores it before its own.
#[tokio::test(flavor = "multi_thread")]
async fn segments_of_an_uncertain_manifest_are_kept() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    node.engine.collect().await.unwrap();
    let points = node.points().await;
    node.insert().await;
    // The segment is stored, the put of the first manifest fails, and the second one is not
    // attempted.
    node.store.next(StoreOperation::Put, StoreFault::Delay(Duration::ZERO));
    node.store.always(StoreOperation::Put, NO_SPACE);
    node.engine.flush().await.unwrap_err();
    let stored = node.segments().await;
    node.engine.collect().await.unwrap();
    assert_eq!(node.segments().await, stored);

    node.store.always(StoreOperation::Put, None);
    node.insert().await;
    node.engine.flush().await.unwrap();
    assert!(node.points().await >= points + 3, "the uncertain manifest must be stored too");
    node.engine.collect().await.unwrap();
    assert!(stored.is_subset(&node.segments().await));
    node.holds(3).await;
}

/// A partition with a damaged newest manifest cannot be opened, and so cannot be flushed. Other
/// partitions must be flushed.
#[tokio::test(flavor = "multi_thread")]
async fn unopenable_partition_does_not_block_flushes_of_others() {
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

/// An unreadable object has the name of the next manifest. The flush after that uses another name.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_object_in_place_of_a_manifest_is_skipped() {
    let node = two_tables().await;
    node.insert().await;
    node.engine.flush().await.unwrap();
    let newest = node.engine.history(PartitionId(1)).await.unwrap().pop().unwrap();
    let name = format!("manifests/{}/{:08x}/{:016x}", PartitionId(1), 1, newest.version + 1);
    node.store.put(&name, (&b"no manifest"[..]).into()).await.unwrap();
    node.insert().await;
    let error = node.engine.flush().await.unwrap_err();
    assert!(error.message().contains(&name), "{error:?}");
    assert_eq!(
        node.engine.history(PartitionId(2)).await.unwrap().len(),
        2,
        "the other partition must be flushed"
    );
    node.insert().await;
    node.engine.flush().await.unwrap();
    assert_eq!(node.engine.history(PartitionId(2)).await.unwrap().len(), 3);
    node.holds(3).await;
}

/// The store rejects the manifests of one partition while its directory cannot be written.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_manifest_does_not_block_flushes_of_others() {
    let node = crate::common::Node::start().await;
    let run = async |sql: &str| {
        for partition in [1, 2] {
            let mut client = node.client(partition);
            client.run(sql).await.unwrap();
            client.close().await;
        }
    };
    run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    // Both partitions are open now.
    let place = node.directory.path().join("store/manifests").join(PartitionId(1).to_string());
    std::fs::create_dir_all(place.parent().unwrap()).unwrap();
    std::fs::write(&place, b"no directory").unwrap();
    for rounds in 1..=3 {
        run("INSERT INTO t(v) VALUES (randomblob(2000))").await;
        node.engine.flush().await.unwrap_err();
        let points = node.engine.history(PartitionId(2)).await.unwrap().len();
        assert!(points >= rounds, "the other partition must be flushed");
    }
    std::fs::remove_file(&place).unwrap();
    node.engine.flush().await.unwrap();
    let node = node.restart().await;
    for partition in [1, 2] {
        assert_eq!(node.client(partition).int("SELECT count(*) FROM t").await, 3);
    }
}

//! Partitions with `shared` durability, whose commits are logged in the object store. Acknowledged
//! commits survive a crash, also on another machine that has only the store, and a fenced process
//! acknowledges no commit.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, start_when_free, wait_until, with_timeout};
use fulmar_engine::{Config, DurabilityChangeError, Engine, Error, sqlstate};
use fulmar_pages::{Durability, PartitionId};
use fulmar_store::{
    Backend, FailureKind, FaultyStore, RecoveryProgress, SharedLogOptions, Span, Store, StoreFault,
    StoreOperation,
};

const LOCAL: u64 = 1;
const SHARED: u64 = 2;
const OTHER: u64 = 3;

struct Rig {
    directory: tempfile::TempDir,
    objects: Backend,
    store: FaultyStore,
}

fn rig() -> Rig {
    let objects = Backend::memory();
    let store = FaultyStore::new(Arc::new(objects.clone()));
    Rig { directory: tempfile::tempdir().unwrap(), objects, store }
}

impl Rig {
    fn config(&self, directory: &tempfile::TempDir, shared: &[u64]) -> Config {
        Config {
            store: Some(Arc::new(self.store.clone())),
            // Only the test flushes.
            manifest_interval: Duration::from_secs(3600),
            node_id: 7,
            shared: shared.iter().map(|id| PartitionId(*id)).collect::<HashSet<_>>(),
            ..Config::new(directory.path(), 1 << 30)
        }
    }

    async fn start(&self, shared: &[u64]) -> Arc<Engine> {
        start_when_free(|| self.config(&self.directory, shared)).await
    }

    /// Starts an engine with a bound on the objects of its shared log. Also returns the number of
    /// objects that the start read.
    async fn start_bounded(&self, backlog_objects: usize) -> (Arc<Engine>, u64) {
        let progress: Arc<RecoveryProgress> = Arc::default();
        let config = || {
            let config = self.config(&self.directory, &[SHARED, OTHER]);
            let options =
                SharedLogOptions { backlog_objects, progress: progress.clone(), ..config.shared_log.clone() };
            Config { shared_log: options, ..config }
        };
        (start_when_free(config).await, progress.read())
    }

    /// The manifests, anchors and other objects of the shared partition, except for segments.
    async fn manifests(&self) -> Vec<String> {
        self.objects.list(&format!("manifests/{}", PartitionId(SHARED)), None).await.unwrap().names
    }

    async fn lose_newest_manifest(&self) -> (String, Vec<u8>) {
        let mut manifests = self.manifests().await;
        manifests.retain(|name| !name.contains("anchor-"));
        assert!(manifests.len() >= 2, "an older manifest must exist: {manifests:?}");
        let newest = manifests.into_iter().max().unwrap();
        let bytes = self.objects.get(&newest, Span::Whole).await.unwrap().bytes.to_vec();
        self.objects.delete(&newest).await.unwrap();
        (newest, bytes)
    }

    async fn log_objects(&self) -> Vec<String> {
        self.objects.list("logs", None).await.unwrap().names
    }
}

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

async fn set(engine: &Arc<Engine>, durability: Durability) -> Result<(), Error> {
    engine.set_durability(PartitionId(SHARED), durability, async { Ok(()) }).await
}

/// Appends a row to both partitions, and returns their numbers of rows.
async fn write(engine: &Arc<Engine>) -> [i64; 2] {
    let mut counts = [0; 2];
    for (count, partition) in counts.iter_mut().zip([LOCAL, SHARED]) {
        let mut client = client(engine, partition);
        client.run("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
        client.run("INSERT INTO t(v) VALUES (randomblob(3000))").await.unwrap();
        *count = client.int("SELECT count(*) FROM t").await;
        client.close().await;
    }
    counts
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_in_the_shared_log_survive_crashes() {
    let rig = rig();
    for round in 1..=4 {
        let engine = rig.start(&[SHARED]).await;
        rig.store.next(StoreOperation::Put, StoreFault::LoseResponse);
        assert_eq!(write(&engine).await, [2 * round - 1; 2]);
        if round == 2 {
            engine.flush().await.unwrap();
        }
        assert_eq!(write(&engine).await, [2 * round; 2]);
        let statistics = engine.statistics();
        assert!(statistics.shared_log_puts > 0 && statistics.log_bytes > 0, "{statistics:?}");
        // Simulates a kill: nothing is closed or flushed.
        drop(engine);
    }
    let engine = rig.start(&[SHARED]).await;
    assert_eq!(write(&engine).await, [9; 2]);
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = rig.start(&[SHARED]).await;
    assert_eq!(engine.statistics().shared_log_size_bytes, 0, "a clean stop must flush everything");
    assert_eq!(write(&engine).await, [10; 2]);
    // Only seals and recent objects of the logs are left.
    assert!(rig.log_objects().await.len() <= 12, "{:?}", rig.log_objects().await);
}

/// The store contains everything that another machine needs. The process on the first machine gets
/// an error.
#[tokio::test(flavor = "multi_thread")]
async fn another_machine_takes_over_and_the_first_one_is_fenced() {
    let rig = rig();
    let first = rig.start(&[SHARED]).await;
    write(&first).await;
    let elsewhere = tempfile::tempdir().unwrap();
    let second = Engine::start(rig.config(&elsewhere, &[SHARED])).await.unwrap();
    let mut there = client(&second, SHARED);
    assert_eq!(there.int("SELECT count(*) FROM t").await, 1);
    let mut here = client(&first, SHARED);
    for sql in ["INSERT INTO t(v) VALUES ('lost')", "INSERT INTO t(v) VALUES ('refused')"] {
        let error = here.run(sql).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::IO_ERROR);
        assert!(error.message().contains("another process has taken over"), "{error:?}");
    }
    let health = first.health();
    assert!(
        !health.shared_log.works && health.shared_log.failures == 1 && first.accepts_commits(),
        "{health:?}"
    );
    there.run("INSERT INTO t(v) VALUES ('kept')").await.unwrap();
    assert_eq!(there.int("SELECT count(*) FROM t").await, 2);
    let error = here.run("SELECT count(*) FROM t").await.unwrap_err();
    assert!(
        error.message().contains("another process has taken over"),
        "a fenced process must reject reads: {error:?}"
    );
}

/// It is unknown whose commits a damaged log has lost. Partitions that commit to it must wait for
/// its repair, others must not.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_shared_log_affects_only_its_partitions() {
    let rig = rig();
    let engine = rig.start(&[SHARED]).await;
    write(&engine).await;
    drop(engine);
    // The first object is a claim, and the last one has no later object that proves its existence.
    let damaged = rig.log_objects().await.remove(1);
    let whole = rig.objects.get(&damaged, Span::Whole).await.unwrap().bytes;
    rig.objects.delete(&damaged).await.unwrap();
    rig.objects.put(&damaged, whole.slice(..whole.len() / 2)).await.unwrap();

    let engine = rig.start(&[SHARED]).await;
    let mut local = client(&engine, LOCAL);
    assert_eq!(local.int("SELECT count(*) FROM t").await, 1);
    local.run("INSERT INTO t(v) VALUES ('more')").await.unwrap();
    let refused = client(&engine, SHARED).run("SELECT count(*) FROM t").await.unwrap_err();
    assert_eq!(refused.state(), sqlstate::DATA_CORRUPTED);
    assert_eq!(set(&engine, Durability::Local).await.unwrap_err().state(), sqlstate::DATA_CORRUPTED);
    let other = PartitionId(OTHER);
    let moved = engine.set_durability(other, Durability::Shared, async { Ok(()) }).await;
    assert_eq!(moved.unwrap_err().state(), sqlstate::DATA_CORRUPTED);
    engine.flush().await.unwrap();
    local.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);

    rig.objects.delete(&damaged).await.unwrap();
    rig.objects.put(&damaged, whole).await.unwrap();
    let engine = rig.start(&[SHARED]).await;
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t").await, 1);
    assert_eq!(client(&engine, LOCAL).int("SELECT count(*) FROM t").await, 2);
}

/// The damaged object can be restored later. Until then, no segment may be deleted that only the
/// log names, and no partition may be copied without its changes in the log.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_shared_log_loses_no_segment_and_no_commit() {
    const ROWS: i64 = 3000;
    let rig = rig();
    let start = async || {
        // With `is_exclusive`, the collector does not wait for other processes.
        start_when_free(|| Config { is_exclusive: true, ..rig.config(&rig.directory, &[SHARED]) }).await
    };
    let engine = start().await;
    let mut shop = client(&engine, SHARED);
    shop.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    engine.flush().await.unwrap();
    // Large enough to be stored as a segment, which only the log's record names.
    shop.run(&format!(
        "INSERT INTO t(v) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})
        SELECT randomblob(3900) FROM n"
    ))
    .await
    .unwrap();
    shop.close().await;
    drop(engine);
    let damaged = rig.log_objects().await.pop().unwrap();
    let whole = rig.objects.get(&damaged, Span::Whole).await.unwrap().bytes;
    rig.objects.delete(&damaged).await.unwrap();
    rig.objects.put(&damaged, whole.slice(..whole.len() / 2)).await.unwrap();

    let engine = start().await;
    engine.collect().await.unwrap();
    let branched = engine.create_partition(PartitionId(OTHER), Some((PartitionId(SHARED), None))).await;
    assert_eq!(branched.unwrap_err().state(), sqlstate::DATA_CORRUPTED);
    let exported = engine.export(PartitionId(SHARED), None).await.map(drop);
    assert_eq!(exported.unwrap_err().state(), sqlstate::DATA_CORRUPTED);
    engine.shutdown().await.unwrap();
    drop(engine);

    rig.objects.delete(&damaged).await.unwrap();
    rig.objects.put(&damaged, whole).await.unwrap();
    let engine = start().await;
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t WHERE length(v) = 3900").await, ROWS);
    engine.flush().await.unwrap();
    engine.collect().await.unwrap();
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t WHERE length(v) = 3900").await, ROWS);
}

/// The log's records apply to the version of the newest manifest. If that manifest is missing, they
/// must not be applied to another version.
#[tokio::test(flavor = "multi_thread")]
async fn missing_newest_manifest_is_detected() {
    let rig = rig();
    let engine = rig.start(&[SHARED]).await;
    for _ in 0..2 {
        write(&engine).await;
        engine.flush().await.unwrap();
    }
    assert_eq!(write(&engine).await, [3; 2]);
    drop(engine);
    let (newest, bytes) = rig.lose_newest_manifest().await;
    let engine = rig.start(&[SHARED]).await;
    let error = client(&engine, SHARED).run("SELECT count(*) FROM t").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::DATA_CORRUPTED);
    assert!(error.message().contains(&newest), "{error:?} does not name {newest}");
    assert_eq!(
        client(&engine, LOCAL).int("SELECT count(*) FROM t").await,
        3,
        "other partitions must be available"
    );
    rig.objects.put(&newest, bytes.into()).await.unwrap();
    // A statement gets the error of an opening, such as the flusher's, that began before.
    wait_until("the restored manifest is used", async || {
        client(&engine, SHARED).run("SELECT count(*) FROM t").await.is_ok()
    })
    .await;
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t").await, 3);

    // A closed partition has no records in the log. An anchor, which was written when it was
    // closed, names its newest manifest.
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = rig.start(&[SHARED]).await;
    let (newest, bytes) = rig.lose_newest_manifest().await;
    let error = client(&engine, SHARED).run("SELECT count(*) FROM t").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::IO_ERROR);
    assert!(error.message().contains(&newest), "{error:?} does not name {newest}");
    rig.objects.put(&newest, bytes.into()).await.unwrap();
    assert_eq!(
        client(&engine, SHARED).int("SELECT count(*) FROM t").await,
        3,
        "the restored manifest must be used"
    );
    engine.drop_partition(PartitionId(SHARED)).await.unwrap();
    assert_eq!(rig.manifests().await, [""; 0], "a drop must delete the anchors");
}

/// A partition that cannot be opened does not block commits of others: its records are relocated to
/// the end of the log, which is truncated behind them.
#[tokio::test(flavor = "multi_thread")]
async fn records_of_an_unopenable_partition_do_not_fill_the_log() {
    // With this memory budget, the log counts as long above 32 MiB.
    let start = async |rig: &Rig| {
        start_when_free(|| Config { memory_bytes: 64 << 20, ..rig.config(&rig.directory, &[SHARED, OTHER]) })
            .await
    };
    let rig = rig();
    let engine = start(&rig).await;
    for _ in 0..2 {
        write(&engine).await;
        engine.flush().await.unwrap();
    }
    for rows in 3..=6 {
        assert_eq!(write(&engine).await, [rows; 2]);
    }
    drop(engine);
    let (newest, bytes) = rig.lose_newest_manifest().await;
    let engine = start(&rig).await;
    let mut other = client(&engine, OTHER);
    other.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    for row in 1..=72 {
        other.run("INSERT INTO t(v) VALUES (randomblob(1048576))").await.unwrap();
        if row % 8 == 0 {
            let error = engine.flush().await.unwrap_err();
            assert!(error.message().contains(&newest), "{error:?} does not name {newest}");
            let bytes = engine.statistics().shared_log_size_bytes;
            assert!(bytes < 48 << 20, "{bytes} bytes after {row} rows");
        }
    }
    other.close().await;
    drop(engine);
    rig.objects.put(&newest, bytes.into()).await.unwrap();
    let engine = start(&rig).await;
    assert_eq!(write(&engine).await, [7; 2]);
    assert_eq!(client(&engine, OTHER).int("SELECT count(*) FROM t").await, 72);
}

/// Inserts rows into one partition, one log object per row. Returns the number of rows in the
/// table.
async fn insert(engine: &Arc<Engine>, partition: u64, rows: u32) -> i64 {
    let mut client = client(engine, partition);
    client.run("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    for _ in 0..rows {
        client.run("INSERT INTO t(v) VALUES (randomblob(500))").await.unwrap();
    }
    let count = client.int("SELECT count(*) FROM t").await;
    client.close().await;
    count
}

/// No flush is due because of age. Each process flushes the records that it recovers, so the next
/// one reads only added ones.
#[tokio::test(flavor = "multi_thread")]
async fn shared_log_does_not_grow_over_kills() {
    const ROWS: u32 = 40;
    let rig = rig();
    for life in 1..=6 {
        let (engine, read) = rig.start_bounded(4000).await;
        // A claim, a mark and a seal are also read.
        let max = if life == 1 { 0 } else { 2 * ROWS + 2 + 10 };
        assert!(read <= u64::from(max), "start {life} read {read} objects");
        // One partition is opened by a client, the other by the flusher.
        let mut early = client(&engine, SHARED);
        if life > 1 {
            assert_eq!(early.int("SELECT count(*) FROM t").await, i64::from((life - 1) * ROWS));
        }
        wait_until("recovered records are flushed", async || {
            engine.statistics().shared_log_backlog_objects <= 2
        })
        .await;
        early.close().await;
        for partition in [SHARED, OTHER] {
            assert_eq!(insert(&engine, partition, ROWS).await, i64::from(life * ROWS));
        }
        drop(engine);
    }
}

/// A single process. No flush is due because of age.
#[tokio::test(flavor = "multi_thread")]
async fn number_of_log_objects_is_bounded() {
    const BOUND: u64 = 64;
    let rig = rig();
    let (engine, _) = rig.start_bounded(BOUND as usize).await;
    let (began, in_flight) = (std::time::Instant::now(), SharedLogOptions::default().in_flight as u64);
    for _ in 0..50 {
        insert(&engine, SHARED, 10).await;
        let objects = engine.statistics().shared_log_backlog_objects;
        // Above the bound, one object is written every 100 ms, however slow a flush is.
        let max = BOUND + in_flight + began.elapsed().as_millis() as u64 / 100;
        assert!(objects <= max, "{objects} objects");
    }
    assert!(engine.statistics().shared_log_puts >= 500);
    // Covered objects are deleted when a later object states that they are covered.
    let left = async || rig.log_objects().await.len() as u64;
    wait_until("the backlog is at most half of the bound", async || left().await <= BOUND / 2 + 2).await;
    drop(engine);
    let (engine, read) = rig.start_bounded(BOUND as usize).await;
    assert!(read <= BOUND + in_flight, "{read} objects");
    assert_eq!(insert(&engine, SHARED, 0).await, 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn clean_stop_leaves_only_a_seal() {
    let rig = rig();
    for start in 1..=3 {
        let (engine, read) = rig.start_bounded(4000).await;
        assert_eq!(read, u64::from(start > 1), "only the last seal is read");
        assert_eq!(engine.recovery().records, 0);
        assert_eq!(insert(&engine, SHARED, 30).await, 30 * start);
        engine.shutdown().await.unwrap();
        assert_eq!(rig.log_objects().await.len() as i64, start, "one seal per start");
    }
}

/// The manifest of one partition is missing. Recovered records of other partitions must be flushed.
#[tokio::test(flavor = "multi_thread")]
async fn unopenable_partition_does_not_block_the_flush_of_recovered_records() {
    let rig = rig();
    let (engine, _) = rig.start_bounded(4000).await;
    for _ in 0..2 {
        insert(&engine, SHARED, 2).await;
        engine.flush().await.unwrap();
    }
    insert(&engine, OTHER, 20).await;
    insert(&engine, SHARED, 1).await;
    drop(engine);
    let (newest, bytes) = rig.lose_newest_manifest().await;
    let (engine, _) = rig.start_bounded(4000).await;
    // The other partition is flushed, and its log objects are deleted.
    wait_until("the other partition is flushed", async || rig.log_objects().await.len() <= 8).await;
    assert_eq!(client(&engine, SHARED).state("SELECT 1 FROM t").await, sqlstate::DATA_CORRUPTED);
    drop(engine);
    rig.objects.put(&newest, bytes.into()).await.unwrap();
    let (engine, read) = rig.start_bounded(4000).await;
    assert!(read <= 10, "{read} objects");
    assert_eq!([insert(&engine, SHARED, 0).await, insert(&engine, OTHER, 0).await], [5, 20]);
}

#[tokio::test(flavor = "multi_thread")]
async fn durability_can_be_changed_repeatedly() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    assert_eq!(write(&engine).await, [1; 2]);
    assert!(rig.log_objects().await.is_empty(), "no partition uses the shared log yet");
    set(&engine, Durability::Shared).await.unwrap();
    assert_eq!(write(&engine).await, [2; 2]);
    assert_eq!(rig.log_objects().await.len(), 2, "a claim and a commit");
    drop(engine);
    let engine = rig.start(&[SHARED]).await;
    assert_eq!(write(&engine).await, [3; 2]);
    set(&engine, Durability::Local).await.unwrap();
    assert_eq!(write(&engine).await, [4; 2]);
    set(&engine, Durability::Shared).await.unwrap();
    assert_eq!(write(&engine).await, [5; 2]);
    set(&engine, Durability::Local).await.unwrap();
    assert_eq!(write(&engine).await, [6; 2]);
    drop(engine);
    let engine = rig.start(&[]).await;
    assert_eq!(write(&engine).await, [7; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn durability_change_requires_no_sessions_and_a_known_outcome() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    write(&engine).await;
    let mut user = client(&engine, SHARED);
    assert_eq!(user.int("SELECT count(*) FROM t").await, 1);
    assert_eq!(set(&engine, Durability::Shared).await.unwrap_err().state(), sqlstate::OBJECT_IN_USE);
    user.run("INSERT INTO t(v) VALUES (1)").await.unwrap();
    user.close().await;
    // The catalog's answer is uncertain, so it is unknown which log the next commit belongs to.
    let silent = async { Err(DurabilityChangeError::InDoubt(Error::new(sqlstate::IO_ERROR, "no answer"))) };
    engine.set_durability(PartitionId(SHARED), Durability::Shared, silent).await.unwrap_err();
    assert_eq!(client(&engine, SHARED).state("SELECT 1 FROM t").await, sqlstate::IO_ERROR);
    // The caller abandons the change.
    let (ask, is_asked) = tokio::sync::oneshot::channel();
    let never = engine.set_durability(PartitionId(SHARED), Durability::Shared, async {
        ask.send(()).unwrap();
        std::future::pending().await
    });
    tokio::select! {
        _ = never => panic!("the change completed without an answer of the catalog"),
        asked = with_timeout("the catalog is asked", is_asked) => asked.unwrap(),
    }
    assert_eq!(client(&engine, SHARED).state("SELECT 1 FROM t").await, sqlstate::IO_ERROR);
    set(&engine, Durability::Shared).await.unwrap();
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t").await, 2);
    engine.drop_partition(PartitionId(SHARED)).await.unwrap();
}

/// The partition continues to commit to its old log.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_change_of_durability_changes_nothing() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    write(&engine).await;
    let refused = async {
        Err(DurabilityChangeError::Refused(Error::new(sqlstate::INVALID_CATALOG_NAME, "it is gone")))
    };
    engine.set_durability(PartitionId(SHARED), Durability::Shared, refused).await.unwrap_err();
    assert_eq!(write(&engine).await, [2; 2]);
    assert_eq!(rig.log_objects().await.len(), 1, "the claim");
    drop(engine);
    assert_eq!(write(&rig.start(&[]).await).await, [3; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn session_waits_for_a_running_change_of_durability() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    write(&engine).await;
    let (asked, is_asked) = tokio::sync::oneshot::channel();
    let (answer, is_answered) = tokio::sync::oneshot::channel();
    let changing = engine.clone();
    let change = tokio::spawn(async move {
        let catalog = async {
            asked.send(()).unwrap();
            is_answered.await.unwrap()
        };
        changing.set_durability(PartitionId(SHARED), Durability::Shared, catalog).await
    });
    is_asked.await.unwrap();
    let mut user = client(&engine, SHARED);
    let mut coming = Box::pin(user.run("INSERT INTO t(v) VALUES (1)"));
    assert!(futures::poll!(&mut coming).is_pending());
    answer.send(Ok(())).unwrap();
    change.await.unwrap().unwrap();
    coming.await.unwrap();
    assert_eq!(rig.log_objects().await.len(), 2, "a claim and its commit");
}

/// The session that triggered the opening of the log is dropped. The log is opened once, and no
/// second opening seals it.
#[tokio::test(flavor = "multi_thread")]
async fn shared_log_is_opened_once() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    write(&engine).await;
    rig.store.hold(StoreOperation::Put, true);
    let mut abandoned = Box::pin(set(&engine, Durability::Shared));
    assert!(futures::poll!(&mut abandoned).is_pending());
    rig.store.is_holding().await;
    drop(abandoned);
    let mut change = Box::pin(set(&engine, Durability::Shared));
    assert!(futures::poll!(&mut change).is_pending());
    rig.store.hold(StoreOperation::Put, false);
    change.await.unwrap();
    assert_eq!(write(&engine).await, [2; 2]);
    assert_eq!(rig.log_objects().await.len(), 2, "a claim and a commit");
}

/// A partition that is dropped during the change stays dropped.
#[tokio::test(flavor = "multi_thread")]
async fn partition_dropped_during_a_change_of_durability_stays_dropped() {
    let rig = rig();
    let engine = rig.start(&[]).await;
    write(&engine).await;
    let dropped = async {
        engine.drop_partition(PartitionId(SHARED)).await.unwrap();
        Ok(())
    };
    engine.set_durability(PartitionId(SHARED), Durability::Shared, dropped).await.unwrap();
    assert_eq!(engine.statistics().open_partitions, 1, "only the other partition may be open");
    assert_eq!(client(&engine, SHARED).state("SELECT 1").await, sqlstate::DATABASE_DROPPED);
    assert_eq!(set(&engine, Durability::Local).await.unwrap_err().state(), sqlstate::DATABASE_DROPPED);
    engine.compact_all().await.unwrap();
    assert_eq!(rig.objects.list("manifests", None).await.unwrap().names, Vec::<String>::new());
}

/// Commits to the shared log wait for the store; others do not.
#[tokio::test(flavor = "multi_thread")]
async fn unresponsive_store_blocks_only_shared_commits() {
    let rig = rig();
    let engine = rig.start(&[SHARED, OTHER]).await;
    write(&engine).await;
    let mut other = client(&engine, OTHER);
    other.run("CREATE TABLE t(v)").await.unwrap();
    rig.store.hold(StoreOperation::Put, true);
    let mut waiting = client(&engine, SHARED);
    let commit = tokio::spawn(async move { waiting.run("INSERT INTO t(v) VALUES (1)").await });
    rig.store.is_holding().await;
    let mut local = client(&engine, LOCAL);
    local.run("INSERT INTO t(v) VALUES (1)").await.unwrap();
    assert!(!commit.is_finished());
    rig.store.hold(StoreOperation::Put, false);
    commit.await.unwrap().unwrap();
    // The store rejects all puts: later commits are rejected.
    rig.store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
    let mut doubtful = client(&engine, SHARED);
    let uncertain = tokio::spawn(async move { doubtful.run("INSERT INTO t(v) VALUES (2)").await });
    wait_until("the log is reported as failing", async || !engine.health().shared_log.works).await;
    assert!(engine.accepts_commits(), "commits to the local log must be accepted");
    assert_eq!(engine.statistics().shared_log_available, 0);
    assert_eq!(other.state("INSERT INTO t(v) VALUES (1)").await, sqlstate::IO_ERROR);
    local.run("INSERT INTO t(v) VALUES (1)").await.unwrap();
    assert!(!uncertain.is_finished(), "a commit with unknown outcome must not be answered");
    rig.store.always(StoreOperation::Put, None);
    uncertain.await.unwrap().unwrap();
    other.run("INSERT INTO t(v) VALUES (1)").await.unwrap();
    assert_eq!(client(&engine, SHARED).int("SELECT count(*) FROM t").await, 3);
}

/// Commits to a store that does not answer cannot be flushed. The node must stop nevertheless,
/// within a bounded time.
#[tokio::test(flavor = "multi_thread")]
async fn node_stops_while_its_store_does_not_answer() {
    let rig = rig();
    let engine = rig.start(&[SHARED]).await;
    write(&engine).await;
    engine.flush().await.unwrap();
    rig.store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Unavailable)));
    let mut user = client(&engine, SHARED);
    let commit = tokio::spawn(async move { user.run("INSERT INTO t(v) VALUES ('in doubt')").await });
    wait_until("the log is reported as failing", async || !engine.health().shared_log.works).await;
    let stopped = with_timeout("the node stops", engine.shutdown()).await;
    assert_eq!(stopped.unwrap_err().state(), sqlstate::IO_ERROR);
    // The store may have its record: it must not be reported as discarded.
    let error = commit.await.unwrap().unwrap_err();
    assert!(error.message().contains("could not confirm that the result is durable"), "{error}");
}

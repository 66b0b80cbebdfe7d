//! A partition with a damaged newest manifest cannot be opened. This must affect only that
//! partition: its log records are relocated to the end of the log, the log is truncated behind
//! them, and commits of other partitions are accepted. After the manifest is restored, all data is
//! there.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, start_when_free, with_timeout};
use fulmar_engine::{Config, Engine, Error, Value, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_store::{
    Backend, CommitLog, FailureKind, Fault, FaultyFiles, FaultyStore, LogOptions, Operation, Span, Store,
    StoreFault, StoreOperation,
};

const DAMAGED: u64 = 1;
const OTHER: u64 = 2;

/// Capacity of the log. Above half of it, the log counts as long.
const CAPACITY: u64 = 4 << 20;
/// Rows of the damaged partition whose records, of about 5 KiB each, are only in the log.
const ROWS: i64 = 30;

struct Rig {
    directory: tempfile::TempDir,
    store: Backend,
    /// The same store with injected faults, as used by the engine.
    faulty_store: FaultyStore,
    files: FaultyFiles,
    engine: Arc<Engine>,
    /// The newest manifest of the damaged partition: its name and its original contents.
    manifest: (String, Vec<u8>),
    /// The number of log records of that partition at the last start.
    found: i64,
}

async fn start(
    directory: &tempfile::TempDir,
    store: &(impl Store + Clone + 'static),
    files: &FaultyFiles,
) -> Arc<Engine> {
    start_when_free(|| Config {
        files: Some(Arc::new(files.clone())),
        store: Some(Arc::new(store.clone())),
        log: LogOptions { file_bytes: 128 << 10, capacity_bytes: CAPACITY, ..LogOptions::default() },
        // Flushes are started only by the test, and by commits when the log is long.
        manifest_interval: Duration::from_secs(3600),
        ..Config::new(directory.path(), 1 << 30)
    })
    .await
}

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

impl Rig {
    /// The log begins with the records of a partition that cannot be opened.
    async fn damaged() -> Rig {
        let (directory, store) = (tempfile::tempdir().unwrap(), Backend::memory());
        let (files, faulty_store) = (FaultyFiles::new(), FaultyStore::new(Arc::new(store.clone())));
        let engine = start(&directory, &faulty_store, &files).await;
        for partition in [DAMAGED, OTHER] {
            let mut client = client(&engine, partition);
            client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
            client.close().await;
        }
        engine.flush().await.unwrap();
        let mut damaged_client = client(&engine, DAMAGED);
        for _ in 0..ROWS {
            damaged_client.run("INSERT INTO t(v) VALUES (randomblob(5000))").await.unwrap();
        }
        damaged_client.close().await;
        let manifests = store.list(&format!("manifests/{}", PartitionId(DAMAGED)), None).await.unwrap().names;
        let newest = manifests.into_iter().filter(|name| !name.contains("anchor-")).max().unwrap();
        let whole = store.get(&newest, Span::Whole).await.unwrap().bytes;
        store.delete(&newest).await.unwrap();
        store.put(&newest, "no manifest".into()).await.unwrap();
        let manifest = (newest, whole.to_vec());
        Rig { directory, store, faulty_store, files, engine, manifest, found: 0 }.kill().await
    }

    /// Simulates a kill: nothing is closed or flushed.
    async fn kill(self) -> Rig {
        let after = self.files.process_kill();
        self.restart(after).await
    }

    async fn restart(self, files: FaultyFiles) -> Rig {
        let Rig { directory, store, faulty_store, engine, manifest, .. } = self;
        drop(engine);
        // Counted before the new engine writes to the log.
        let found = records(&files);
        let engine = start(&directory, &faulty_store, &files).await;
        Rig { directory, store, faulty_store, files, engine, manifest, found }
    }

    /// Commits to the other partition until the log is long.
    async fn fill(&self) -> Result<(), Error> {
        let mut other = client(&self.engine, OTHER);
        while self.engine.statistics().log_size_bytes <= CAPACITY / 2 {
            other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await?;
        }
        other.close().await;
        Ok(())
    }

    /// Commits three times the capacity of the log to the other partition. No commit may be
    /// rejected.
    async fn overwhelm(&self) {
        let mut other = client(&self.engine, OTHER);
        for row in 0..3 * CAPACITY / 50_000 {
            other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await.unwrap();
            if row % 8 == 7 {
                let error = self.engine.flush().await.unwrap_err();
                assert!(error.message().contains(&self.manifest.0), "{error:?}");
            }
        }
        other.close().await;
    }

    async fn restore(&self) {
        let (name, bytes) = &self.manifest;
        self.store.delete(name).await.unwrap();
        self.store.put(name, bytes.clone().into()).await.unwrap();
    }

    /// Asserts that the restored partition has all acknowledged rows, and `more` additional ones.
    async fn assert_has_all(&self, more: i64) {
        let mut damaged_client = client(&self.engine, DAMAGED);
        assert_eq!(damaged_client.int("SELECT count(*) FROM t WHERE length(v) = 5000").await, ROWS + more);
        assert_eq!(damaged_client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        damaged_client.close().await;
    }
}

/// The number of log records of the damaged partition.
fn records(files: &FaultyFiles) -> i64 {
    let mut records = 0;
    let mut count = |_, record: &fulmar_pages::Record<'_>| {
        records += i64::from(record.header.partition == PartitionId(DAMAGED));
        Ok(())
    };
    CommitLog::verify(files, &mut count).unwrap();
    records
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_partitions_commit_while_unflushable_records_fill_the_log() {
    let rig = Rig::damaged().await;
    rig.overwhelm().await;
    // Repeated after a restart, with the relocated records.
    let rig = rig.kill().await;
    client(&rig.engine, DAMAGED).run("SELECT count(*) FROM t").await.unwrap_err();
    rig.overwhelm().await;

    // The partition is opened from the records in memory, and after a start from the log.
    rig.restore().await;
    rig.assert_has_all(0).await;
    let rig = rig.kill().await;
    rig.assert_has_all(0).await;
    let mut damaged_client = client(&rig.engine, DAMAGED);
    damaged_client.run("INSERT INTO t(v) VALUES (randomblob(5000))").await.unwrap();
    damaged_client.close().await;
    let rig = rig.kill().await;
    rig.assert_has_all(1).await;
    rig.engine.flush().await.unwrap();
    let rig = rig.kill().await;
    rig.assert_has_all(1).await;
}

/// The store was unavailable, so the records that can be flushed are behind those that cannot, and
/// the log is full. The relocation that makes space must be accepted nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_log_is_emptied_despite_unflushable_records() {
    let rig = Rig::damaged().await;
    for _ in 0..2 {
        rig.faulty_store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
        let mut other = client(&rig.engine, OTHER);
        let refused = loop {
            if let Err(error) = other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await {
                break error;
            }
        };
        assert_eq!(refused.state(), sqlstate::DISK_FULL, "{refused:?}");
        rig.faulty_store.always(StoreOperation::Put, None);
        let empty = async {
            while other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await.is_err() {
                rig.engine.flush().await.unwrap_err();
            }
        };
        with_timeout("the log has space again", empty).await;
        other.close().await;
        rig.overwhelm().await;
    }
    let rig = rig.kill().await;
    rig.restore().await;
    rig.assert_has_all(0).await;
}

/// A crash after the relocated copies are durable, before the originals are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_before_truncation_does_not_duplicate_records() {
    let rig = Rig::damaged().await;
    // No log file can be recycled, so no new one may be created. The log may already be long.
    for operation in [Operation::Remove, Operation::Rename] {
        rig.files.fail_while(operation, Some(Fault::Io));
    }
    let _ = rig.fill().await;
    rig.engine.flush().await.unwrap_err();
    let rig = rig.kill().await;
    assert!(
        rig.found >= 2 * ROWS,
        "originals and copies must both be in the log: {} records of {ROWS} rows",
        rig.found
    );
    // Duplicate records are relocated once, and truncated.
    rig.overwhelm().await;
    let rig = rig.kill().await;
    rig.restore().await;
    rig.assert_has_all(0).await;
}

/// Power is cut at random times, including during relocation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn power_cut_during_relocation_loses_no_record() {
    let mut rig = Rig::damaged().await;
    for round in 0..12 {
        rig.fill().await.unwrap();
        let engine = rig.engine.clone();
        let flush = tokio::spawn(async move { engine.flush().await });
        tokio::time::sleep(Duration::from_millis(round % 6)).await;
        let after = rig.files.power_cut(round);
        flush.abort();
        let _ = flush.await;
        rig = rig.restart(after).await;
        assert!(rig.found >= ROWS, "round {round}: records are lost: {} left", rig.found);
    }
    rig.restore().await;
    rig.assert_has_all(0).await;
}

/// A page of a large commit's segment is damaged before a manifest names the segment. The log is
/// still truncated behind the commit, and only reads of that page fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_page_of_a_large_commit_does_not_block_truncation() {
    const ROWS: i64 = 3000;
    let (directory, store, files) = (tempfile::tempdir().unwrap(), Backend::memory(), FaultyFiles::new());
    let engine = start(&directory, &store, &files).await;
    let mut damaged_client = client(&engine, DAMAGED);
    damaged_client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    damaged_client
        .run(&format!(
        "INSERT INTO t(v) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})
        SELECT randomblob(3900) FROM n"
    ))
        .await
        .unwrap();
    damaged_client.close().await;
    let after = files.process_kill();
    drop(engine);
    let segments = store.list("segments", None).await.unwrap().names;
    assert_eq!(segments.len(), 1, "only the segment of the commit exists");
    let segment = &segments[0];
    let whole = store.get(segment, Span::Whole).await.unwrap().bytes;
    let put = async |bytes: Vec<u8>| {
        store.delete(segment).await.unwrap();
        store.put(segment, bytes.into()).await.unwrap();
    };
    let mut damaged = whole.to_vec();
    damaged[whole.len() / 2] ^= 4;
    put(damaged).await;

    let engine = start(&directory, &store, &after).await;
    let mut other = client(&engine, OTHER);
    other.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    for row in 0..3 * CAPACITY / 50_000 {
        other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await.unwrap();
        if row % 8 == 7 {
            engine.flush().await.unwrap();
        }
    }
    other.close().await;
    assert_eq!(records(&after), 0, "the log must be truncated");
    let mut damaged_client = client(&engine, DAMAGED);
    let error = damaged_client.run("SELECT sum(length(v)) FROM t").await.unwrap_err();
    assert!(error.message().contains(segment), "{error:?}");
    damaged_client.run("INSERT INTO t(v) VALUES (randomblob(3900))").await.unwrap();
    damaged_client.close().await;
    put(whole.to_vec()).await;
    let files = after.process_kill();
    drop(engine);
    let engine = start(&directory, &store, &files).await;
    let mut damaged_client = client(&engine, DAMAGED);
    assert_eq!(damaged_client.int("SELECT count(*) FROM t WHERE length(v) = 3900").await, ROWS + 1);
    assert_eq!(damaged_client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    damaged_client.close().await;
}

//! A partition that cannot be opened, since its newest manifest is damaged, is its own tenant's trouble: its records are carried to the
//! end of the log, which is cut behind them, and nobody else is refused a commit. When the manifest is restored all is there.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, start_when_free, within};
use fulmar_engine::{Config, Engine, Error, Value, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_store::{
    Backend, CommitLog, FailureKind, Fault, FaultyFiles, FaultyStore, LogOptions, Operation, Span, Store,
    StoreFault, StoreOperation,
};

const HURT: u64 = 1;
const OTHER: u64 = 2;

/// What the log may take; it is long beyond half of it.
const CAPACITY: u64 = 4 << 20;
/// Rows of the damaged partition whose records are in the log only, some 5 KiB each.
const ROWS: i64 = 30;

struct Rig {
    directory: tempfile::TempDir,
    store: Backend,
    /// The engine's way to it.
    way: FaultyStore,
    files: FaultyFiles,
    engine: Arc<Engine>,
    /// The newest manifest of the damaged partition, as it was.
    manifest: (String, Vec<u8>),
    /// How many records of that partition the start has found.
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
        // Only the test flushes, and who finds the log long.
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
        let (files, way) = (FaultyFiles::new(), FaultyStore::new(Arc::new(store.clone())));
        let engine = start(&directory, &way, &files).await;
        for partition in [HURT, OTHER] {
            let mut client = client(&engine, partition);
            client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
            client.close().await;
        }
        engine.flush().await.unwrap();
        let mut hurt = client(&engine, HURT);
        for _ in 0..ROWS {
            hurt.run("INSERT INTO t(v) VALUES (randomblob(5000))").await.unwrap();
        }
        hurt.close().await;
        let manifests = store.list(&format!("manifests/{}", PartitionId(HURT)), None).await.unwrap().names;
        let newest = manifests.into_iter().filter(|name| !name.contains("anchor-")).max().unwrap();
        let whole = store.get(&newest, Span::Whole).await.unwrap().bytes;
        store.delete(&newest).await.unwrap();
        store.put(&newest, "no manifest".into()).await.unwrap();
        let manifest = (newest, whole.to_vec());
        Rig { directory, store, way, files, engine, manifest, found: 0 }.kill().await
    }

    /// Nothing is closed or flushed.
    async fn kill(self) -> Rig {
        let after = self.files.process_kill();
        self.go_on(after).await
    }

    async fn go_on(self, files: FaultyFiles) -> Rig {
        let Rig { directory, store, way, engine, manifest, .. } = self;
        drop(engine);
        // Before anybody writes there.
        let found = records(&files);
        let engine = start(&directory, &way, &files).await;
        Rig { directory, store, way, files, engine, manifest, found }
    }

    /// Commits of the other partition, until the log is long.
    async fn fill(&self) -> Result<(), Error> {
        let mut other = client(&self.engine, OTHER);
        while self.engine.statistics().log_size_bytes <= CAPACITY / 2 {
            other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await?;
        }
        other.close().await;
        Ok(())
    }

    /// Several times what the log may take. None is refused.
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

    /// The damaged partition, which is whole again, has all that was acknowledged, and so many rows more.
    async fn has_all(&self, more: i64) {
        let mut hurt = client(&self.engine, HURT);
        assert_eq!(hurt.int("SELECT count(*) FROM t WHERE length(v) = 5000").await, ROWS + more);
        assert_eq!(hurt.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        hurt.close().await;
    }
}

/// How many records of the damaged partition a log holds.
fn records(files: &FaultyFiles) -> i64 {
    let mut records = 0;
    let mut count = |_, record: &fulmar_pages::Record<'_>| {
        records += i64::from(record.header.partition == PartitionId(HURT));
        Ok(())
    };
    CommitLog::verify(files, &mut count).unwrap();
    records
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_go_on_when_the_log_is_full_of_what_cannot_be_flushed() {
    let rig = Rig::damaged().await;
    rig.overwhelm().await;
    // Once more after a restart: from the copies.
    let rig = rig.kill().await;
    client(&rig.engine, HURT).run("SELECT count(*) FROM t").await.unwrap_err();
    rig.overwhelm().await;

    // It is opened with what has been in memory all along, or by a start.
    rig.restore().await;
    rig.has_all(0).await;
    let rig = rig.kill().await;
    rig.has_all(0).await;
    let mut hurt = client(&rig.engine, HURT);
    hurt.run("INSERT INTO t(v) VALUES (randomblob(5000))").await.unwrap();
    hurt.close().await;
    let rig = rig.kill().await;
    rig.has_all(1).await;
    rig.engine.flush().await.unwrap();
    let rig = rig.kill().await;
    rig.has_all(1).await;
}

/// The store was away, and so all that has been committed meanwhile stands behind what cannot be flushed: the log is full by then, and takes
/// what makes room all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_has_become_full_is_emptied() {
    let rig = Rig::damaged().await;
    for _ in 0..2 {
        rig.way.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
        let mut other = client(&rig.engine, OTHER);
        let refused = loop {
            if let Err(error) = other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await {
                break error;
            }
        };
        assert_eq!(refused.state(), sqlstate::DISK_FULL, "{refused:?}");
        rig.way.always(StoreOperation::Put, None);
        let empty = async {
            while other.run("INSERT INTO t(v) VALUES (randomblob(50000))").await.is_err() {
                rig.engine.flush().await.unwrap_err();
            }
        };
        within("the log has room again", empty).await;
        other.close().await;
        rig.overwhelm().await;
    }
    let rig = rig.kill().await;
    rig.restore().await;
    rig.has_all(0).await;
}

/// The copies are durable, and the older ones still there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_before_the_cut_leaves_each_record_once() {
    let rig = Rig::damaged().await;
    // No file is given back, and so there may be no further one: whoever finds the log long may have been here before.
    for operation in [Operation::Remove, Operation::Rename] {
        rig.files.fail_while(operation, Some(Fault::Io));
    }
    let _ = rig.fill().await;
    rig.engine.flush().await.unwrap_err();
    let rig = rig.kill().await;
    assert!(rig.found >= 2 * ROWS, "{} records of {ROWS} rows", rig.found);
    // What is there twice is carried once, and cut.
    rig.overwhelm().await;
    let rig = rig.kill().await;
    rig.restore().await;
    rig.has_all(0).await;
}

/// The power goes off at any time, while records are carried too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_while_records_are_carried_loses_none() {
    let mut rig = Rig::damaged().await;
    for round in 0..12 {
        rig.fill().await.unwrap();
        let engine = rig.engine.clone();
        let flush = tokio::spawn(async move { engine.flush().await });
        tokio::time::sleep(Duration::from_millis(round % 6)).await;
        let after = rig.files.power_cut(round);
        flush.abort();
        let _ = flush.await;
        rig = rig.go_on(after).await;
        assert!(rig.found >= ROWS, "round {round}: {}", rig.found);
    }
    rig.restore().await;
    rig.has_all(0).await;
}

/// A page of a large commit's segment is damaged before any manifest names it: the log is cut behind the commit all the same, and only who
/// wants that page is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_page_of_a_large_commit_keeps_no_log() {
    const ROWS: i64 = 3000;
    let (directory, store, files) = (tempfile::tempdir().unwrap(), Backend::memory(), FaultyFiles::new());
    let engine = start(&directory, &store, &files).await;
    let mut hurt = client(&engine, HURT);
    hurt.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    hurt.run(&format!(
        "INSERT INTO t(v) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})
        SELECT randomblob(3900) FROM n"
    ))
    .await
    .unwrap();
    hurt.close().await;
    let after = files.process_kill();
    drop(engine);
    let segments = store.list("segments", None).await.unwrap().names;
    assert_eq!(segments.len(), 1, "that of the commit: nothing was flushed");
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
    assert_eq!(records(&after), 0, "the log is cut");
    let mut hurt = client(&engine, HURT);
    let error = hurt.run("SELECT sum(length(v)) FROM t").await.unwrap_err();
    assert!(error.message().contains(segment), "{error:?}");
    hurt.run("INSERT INTO t(v) VALUES (randomblob(3900))").await.unwrap();
    hurt.close().await;
    put(whole.to_vec()).await;
    let files = after.process_kill();
    drop(engine);
    let engine = start(&directory, &store, &files).await;
    let mut hurt = client(&engine, HURT);
    assert_eq!(hurt.int("SELECT count(*) FROM t WHERE length(v) = 3900").await, ROWS + 1);
    assert_eq!(hurt.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    hurt.close().await;
}

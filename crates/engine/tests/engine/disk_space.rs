//! Full disk: writes are rejected while disk space is short, and accepted again afterwards.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{Client, MEMORY, wait_until};
use fulmar_engine::*;
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FailureKind, FaultyStore, LogOptions, StoreFault, StoreOperation};

const RESERVE: u64 = 80 << 20;

/// Waits until the engine has polled the free space.
async fn wait_for_level(engine: &Engine, level: u64) {
    wait_until("the engine has read the free space", async || engine.statistics().disk_level == level).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_are_rejected_below_the_reserve_and_accepted_again() {
    let directory = tempfile::tempdir().unwrap();
    let available = Arc::new(AtomicU64::new(u64::MAX));
    let mut config = Config::new(directory.path(), MEMORY);
    config.disk_reserve_bytes = Some(RESERVE);
    let source = available.clone();
    config.space = Some(Arc::new(move || {
        Ok(Space { available_bytes: source.load(Ordering::Relaxed), total_bytes: u64::MAX })
    }));
    let engine = Engine::start(config).await.unwrap();
    let client = |id| Client { session: engine.session(PartitionId(id)) };
    let mut shop = client(7);
    shop.run("CREATE TABLE t(id INTEGER PRIMARY KEY, x); INSERT INTO t VALUES (1, zeroblob(100000))")
        .await
        .unwrap();
    assert_eq!(engine.statistics().disk_level, 0);
    let grow = "INSERT INTO t(x) VALUES (zeroblob(1000000))";
    let large =
        "UPDATE t SET x = (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9)
        SELECT hex(zeroblob(100)) FROM n LIMIT 1)";

    // Less than the reserve: statements that need no space are accepted.
    available.store(RESERVE - 1, Ordering::Relaxed);
    wait_for_level(&engine, 1).await;
    let error = shop.run(grow).await.unwrap_err();
    assert_eq!(error.state(), "53100");
    assert!(error.get_detail().unwrap().contains("79 MiB are available; 80 MiB are reserved"), "{error:?}");
    assert!(error.get_hint().unwrap().contains("resume automatically"), "{error:?}");
    assert_eq!(engine.create_partition(PartitionId(8), None).await.unwrap_err().state(), "53100");
    assert_eq!(engine.import(PartitionId(9)).await.err().unwrap().state(), "53100");
    assert_eq!(shop.int("SELECT count(*) FROM t").await, 1);
    shop.run(large).await.unwrap();
    shop.run("DELETE FROM t").await.unwrap();
    shop.run("INSERT INTO t VALUES (2, zeroblob(50000))").await.unwrap(); // Reuses freed pages.
    assert!(engine.accepts_commits());

    // Less than half of the reserve: only reads and drops are accepted.
    available.store(RESERVE / 2 - 1, Ordering::Relaxed);
    wait_for_level(&engine, 2).await;
    assert_eq!(shop.state("DELETE FROM t").await, "53100");
    assert_eq!(shop.state("BEGIN; UPDATE t SET x = 1; COMMIT").await, "53100");
    shop.run("ROLLBACK").await.unwrap();
    assert_eq!(shop.int("SELECT count(*) FROM t").await, 1);
    // A sort in memory succeeds, a sort that needs a temporary file fails. A transaction that could
    // not commit must not grow either.
    let sort = |rows| {
        format!(
            "SELECT length(max(x)) FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             SELECT hex(randomblob(500)) AS x FROM n ORDER BY 1 LIMIT -1 OFFSET 1)"
        )
    };
    assert_eq!(shop.int(&sort(1000)).await, 1000);
    let error = shop.run(&sort(20000)).await.unwrap_err();
    assert_eq!(error.state(), "53100");
    assert!(error.get_hint().unwrap().contains("resume automatically"), "{error:?}");
    shop.run("BEGIN").await.unwrap();
    assert_eq!(shop.state("INSERT INTO t(x) VALUES (zeroblob(20000000))").await, "53100");
    shop.run("ROLLBACK").await.unwrap();
    assert_eq!(shop.int("SELECT count(*) FROM t").await, 1);
    assert!(!engine.accepts_commits());
    engine.drop_partition(PartitionId(10)).await.unwrap();

    // Space is free again.
    available.store(2 * RESERVE, Ordering::Relaxed);
    wait_for_level(&engine, 0).await;
    shop.run(grow).await.unwrap();
    engine.create_partition(PartitionId(8), None).await.unwrap();
    shop.close().await;
    engine.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_data_is_deleted_immediately_when_space_is_short() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::new(directory.path(), MEMORY);
    config.disk_reserve_bytes = Some(RESERVE);
    let available = Arc::new(AtomicU64::new(u64::MAX));
    let source = available.clone();
    config.space = Some(Arc::new(move || {
        Ok(Space { available_bytes: source.load(Ordering::Relaxed), total_bytes: u64::MAX })
    }));
    let engine = Engine::start(config).await.unwrap();
    let mut shop = Client { session: engine.session(PartitionId(7)) };
    shop.run("CREATE TABLE t(x); INSERT INTO t VALUES (randomblob(1000000))").await.unwrap();
    shop.close().await;
    engine.flush().await.unwrap();
    let segments = directory.path().join("store/segments");
    let count = || std::fs::read_dir(&segments).unwrap().count();
    assert_eq!(count(), 1);
    available.store(0, Ordering::Relaxed);
    wait_for_level(&engine, 2).await;
    engine.drop_partition(PartitionId(7)).await.unwrap();
    wait_until("the segment is deleted", async || count() == 0).await;
    engine.shutdown().await.unwrap();
}

/// The log is reported as full when commits are rejected, not when its last byte is written.
#[tokio::test(flavor = "multi_thread")]
async fn full_log_is_reported_until_it_has_space() {
    let directory = tempfile::tempdir().unwrap();
    let store = FaultyStore::new(Arc::new(Backend::memory()));
    let mut config = Config::new(directory.path(), MEMORY);
    config.log = LogOptions { file_bytes: 64 << 10, capacity_bytes: 256 << 10, ..LogOptions::default() };
    config.store = Some(Arc::new(store.clone()));
    let engine = Engine::start(config).await.unwrap();
    let mut shop = Client { session: engine.session(PartitionId(7)) };
    shop.run("CREATE TABLE t(x)").await.unwrap();
    store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Other)));
    let refused = loop {
        assert!(engine.accepts_commits());
        if let Err(error) = shop.run("INSERT INTO t VALUES (randomblob(3000))").await {
            break error;
        }
    };
    assert_eq!(refused.state(), "53100");
    assert!(refused.message().contains("flushes to the store are behind"), "{refused:?}");
    assert!(!engine.accepts_commits());
    assert!(engine.health().log.full && engine.health().log.works);
    store.always(StoreOperation::Put, None);
    engine.flush().await.unwrap();
    wait_until("the log has space", async || engine.accepts_commits()).await;
    shop.run("INSERT INTO t VALUES (randomblob(3000))").await.unwrap();
    shop.close().await;
    engine.shutdown().await.unwrap();
}

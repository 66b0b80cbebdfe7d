//! Disk cache in front of a store that counts requests: evicted pages, and all pages after a
//! restart, are read from the disk cache. Damage to its files never changes a result.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, start_when_free, wait_until};
use fulmar_engine::{Config, Engine, Space, Value};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, DiskCacheStatistics, Store, StoreOperation};
use tempfile::TempDir;

const ROWS: i64 = 10_000;

fn config(directory: &TempDir, store: &Backend, memory_bytes: u64) -> Config {
    Config {
        store: Some(Arc::new(store.clone()) as Arc<dyn Store>),
        disk_cache_bytes: 256 << 20,
        disk_reserve_bytes: Some(0),
        // Only the test flushes.
        manifest_interval: Duration::from_secs(3600),
        ..Config::new(directory.path(), memory_bytes)
    }
}

async fn start(directory: &TempDir, store: &Backend, memory_bytes: u64) -> Arc<Engine> {
    start_when_free(|| config(directory, store, memory_bytes)).await
}

fn client(engine: &Arc<Engine>) -> Client {
    Client { session: engine.session(PartitionId(1)) }
}

fn gets(engine: &Engine) -> u64 {
    let of = engine.store_statistics().into_iter().find(|one| one.operation == StoreOperation::Get);
    of.map_or(0, |one| one.attempts)
}

fn statistics(engine: &Engine) -> DiskCacheStatistics {
    engine.statistics().disk_cache.unwrap()
}

/// Writes about 40 MiB in one large transaction. Its pages are not kept in memory.
async fn fill(client: &mut Client) {
    client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER, v BLOB)").await.unwrap();
    let rows = format!(
        "INSERT INTO t WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i WHERE k < {ROWS}) \
         SELECT k, 0, randomblob(4000) FROM i"
    );
    client.run(&rows).await.unwrap();
}

/// A digest of the table's contents.
async fn digest(client: &mut Client) -> Value {
    client.value("SELECT sum(n) || ' ' || sum(length(v)) || ' ' || max(hex(substr(v, 3000, 4))) FROM t").await
}

async fn checked_digest(client: &mut Client) -> Value {
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    digest(client).await
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_pages_are_read_from_the_disk_cache_also_after_a_restart() {
    let (directory, store) = (tempfile::tempdir().unwrap(), Backend::memory());
    let engine = start(&directory, &store, 16 << 20).await;
    let mut a = client(&engine);
    fill(&mut a).await;
    engine.flush().await.unwrap();
    let before = digest(&mut a).await;
    let mut requests = gets(&engine);
    // A full queue to the cache drops pages. The next scan reads them from the store again.
    wait_until("a scan reads nothing from the store", async || {
        assert_eq!(digest(&mut a).await, before);
        let now = gets(&engine);
        std::mem::replace(&mut requests, now) == now
    })
    .await;
    let hits = statistics(&engine).hits;
    assert_eq!(
        (digest(&mut a).await, gets(&engine)),
        (before.clone(), requests),
        "a scan must not read from the store"
    );
    let counts = statistics(&engine);
    assert!(counts.hits >= hits + ROWS as u64 / 2, "the table must not fit into memory: {counts:?}");
    assert!(counts.failures == 0 && engine.statistics().pages_evicted > ROWS as u64, "{counts:?}");

    // Changed pages are cached when they are flushed.
    a.run("UPDATE t SET n = n + 1 WHERE id % 7 = 0").await.unwrap();
    engine.flush().await.unwrap();
    let before = digest(&mut a).await;
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = start(&directory, &store, 16 << 20).await;
    wait_until("the cache files are loaded", async || statistics(&engine).entries >= counts.entries).await;
    let mut a = client(&engine);
    assert_eq!(checked_digest(&mut a).await, before);
    let counts = statistics(&engine);
    assert!(
        counts.hits > ROWS as u64 && gets(&engine) * 20 < counts.hits,
        "{} reads from the store, {counts:?}",
        gets(&engine)
    );
    a.close().await;
    engine.shutdown().await.unwrap();
}

/// Segments are merged and collected, and cache files are damaged. Results must not change.
#[tokio::test(flavor = "multi_thread")]
async fn compaction_collection_and_damaged_cache_files_change_no_result() {
    let (directory, store) = (tempfile::tempdir().unwrap(), Backend::memory());
    let mut expected = None;
    for round in 0..6_u64 {
        let engine = start(&directory, &store, 16 << 20).await;
        let mut a = client(&engine);
        match &expected {
            None => fill(&mut a).await,
            Some(expected) => assert_eq!(checked_digest(&mut a).await, *expected, "round {round}"),
        }
        for step in 0..4 {
            let change =
                format!("UPDATE t SET n = n + 1, v = randomblob(4000) WHERE id % 16 = {}", round + step);
            a.run(&change).await.unwrap();
            engine.flush().await.unwrap();
        }
        expected = Some(digest(&mut a).await);
        assert_eq!(checked_digest(&mut a).await, *expected.as_ref().unwrap());
        a.close().await;
        match round % 2 {
            0 => engine.shutdown().await.unwrap(),
            // Simulates a kill.
            _ => drop(engine),
        }
        for path in files(&directory) {
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            let place = file.metadata().unwrap().len() * (round + 1) / 7;
            match round % 3 {
                0 => file.set_len(place).unwrap(),
                1 => std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 5000], place).unwrap(),
                _ => {}
            }
        }
    }
}

fn files(directory: &TempDir) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory.path().join("cache")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// The cache frees disk space before commits are rejected. Without the setting, its files are
/// deleted.
#[tokio::test(flavor = "multi_thread")]
async fn cache_frees_space_before_commits_are_rejected() {
    let (directory, store) = (tempfile::tempdir().unwrap(), Backend::memory());
    let others = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let cache = directory.path().join("cache");
    let space = {
        let (others, cache) = (others.clone(), cache.clone());
        move || {
            let files = std::fs::read_dir(&cache).into_iter().flatten().flatten();
            let used: u64 = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
            let taken = used + others.load(std::sync::atomic::Ordering::Relaxed);
            Ok(Space { available_bytes: (1_u64 << 30).saturating_sub(taken), total_bytes: 1 << 30 })
        }
    };
    let with_disk = |cache_bytes| Config {
        space: Some(Arc::new(space.clone())),
        disk_reserve_bytes: Some(80 << 20),
        disk_cache_bytes: cache_bytes,
        ..config(&directory, &store, 16 << 20)
    };
    let engine = start_when_free(|| with_disk(256 << 20)).await;
    let mut a = client(&engine);
    fill(&mut a).await;
    engine.flush().await.unwrap();
    for _ in 0..50 {
        digest(&mut a).await;
        if statistics(&engine).bytes > 20 << 20 {
            break;
        }
    }
    assert!(statistics(&engine).bytes > 20 << 20, "{:?}", statistics(&engine));
    // Other files take so much space that 90 MiB would be free without the cache; 100 MiB must be.
    others.store((1 << 30) - (90 << 20), std::sync::atomic::Ordering::Relaxed);
    wait_until("the cache is empty", async || statistics(&engine).bytes == 0).await;
    wait_until("writes are accepted", async || engine.statistics().disk_level == 0).await;
    a.run("UPDATE t SET n = 1 WHERE id = 1").await.unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);
    assert!(cache.exists());
    let engine = start_when_free(|| with_disk(0)).await;
    assert!(!cache.exists() && engine.statistics().disk_cache.is_none());
    engine.shutdown().await.unwrap();
}

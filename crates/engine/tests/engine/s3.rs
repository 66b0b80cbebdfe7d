//! The engine on an S3 server: commits survive crashes, and opening a partition takes few requests.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Client, start_when_free};
use fulmar_engine::{Config, Engine, Value};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FaultyStore, Store, StoreFault, StoreOperation};
use fulmar_workload::server::S3Server;

fn config(directory: &tempfile::TempDir, store: Arc<dyn Store>) -> Config {
    Config {
        store: Some(store),
        // Only the test flushes.
        manifest_interval: Duration::from_secs(3600),
        ..Config::new(directory.path(), 1 << 30)
    }
}

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// The number of requests to the store since the engine started, by operation.
fn tries(engine: &Engine) -> Vec<(StoreOperation, u64)> {
    let statistics = engine.store_statistics().into_iter();
    statistics.filter(|one| one.attempts > 0).map(|one| (one.operation, one.attempts)).collect()
}

/// Small and large transactions, with flushes and lost answers in between. The contents are checked
/// after each crash.
#[tokio::test(flavor = "multi_thread")]
async fn commits_survive_crashes() {
    let server = S3Server::start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let s3 = Backend::s3(server.bucket(), "crashes", server.environment()).unwrap();
    let store = FaultyStore::new(Arc::new(s3));
    let mut expected = 0;
    for round in 0..3 {
        let engine = start_when_free(|| config(&directory, Arc::new(store.clone()))).await;
        let mut a = client(&engine, 1);
        a.run("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
        assert_eq!(a.int("SELECT count(*) FROM t").await, expected, "round {round}");
        assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        for _ in 0..20 {
            a.run("INSERT INTO t(v) VALUES (randomblob(3000))").await.unwrap();
        }
        store.next(StoreOperation::Put, StoreFault::LoseResponse);
        engine.flush().await.unwrap();
        // The pages of a large transaction are stored before its record is logged.
        let large = "INSERT INTO t(v) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 700) \
                     SELECT randomblob(12000) FROM n";
        a.run(large).await.unwrap();
        a.run("UPDATE t SET v = randomblob(100) WHERE id % 7 = 0; DELETE FROM t WHERE id % 50 > 10")
            .await
            .unwrap();
        expected = a.int("SELECT count(*) FROM t").await;
        if round % 2 == 0 {
            store.next(StoreOperation::Get, StoreFault::LoseResponse);
            engine.flush().await.unwrap();
        }
        a.run("INSERT INTO t(v) VALUES ('after the flush')").await.unwrap();
        expected += 1;
        a.close().await;
        // Simulates a kill: nothing is closed or flushed.
        drop(engine);
    }
}

/// Opening reads a listing, a manifest, the segments' indexes and page 1. Each further page takes
/// one read.
#[tokio::test(flavor = "multi_thread")]
async fn opening_a_partition_takes_few_reads() {
    let server = S3Server::start().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let store = || Arc::new(Backend::s3(server.bucket(), "cold", server.environment()).unwrap());
    let engine = start_when_free(|| config(&directory, store())).await;
    let mut a = client(&engine, 1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    let rows = "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) \
                SELECT i, randomblob(1000) FROM n";
    a.run(rows).await.unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);

    let engine = start_when_free(|| config(&directory, store())).await;
    use StoreOperation::{Delete, Get, List, Put};
    let begins = [(Put, 1), (Get, 1), (List, 2), (Delete, 2)];
    assert_eq!(tries(&engine), begins, "a start must only begin its term");
    let mut a = client(&engine, 1);
    assert_eq!(a.int("PRAGMA user_version").await, 0);
    // Two segments: the one of the large transaction, and the one of the last flush.
    assert_eq!(tries(&engine), [(Put, 1), (Get, 5), (List, 3), (Delete, 2)]);
    assert_eq!(a.int("SELECT length(v) FROM t WHERE id = 12345").await, 1000);
    let Some((_, gets)) = tries(&engine).into_iter().find(|(operation, _)| *operation == StoreOperation::Get)
    else {
        panic!("reads must be counted");
    };
    assert!(
        (7..=9).contains(&gets),
        "a lookup reads the root, perhaps an inner page, and a leaf: {gets} reads"
    );
    a.close().await;
    engine.shutdown().await.unwrap();
}

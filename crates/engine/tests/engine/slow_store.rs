//! A slow store: statements that wait for pages hold no thread, and nobody else waits with them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Client, start_when_free};
use fulmar_engine::{Config, Engine};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FailureKind, FaultyStore, Store, StoreFault, StoreOperation};

const STATEMENTS: usize = 2000;
const DELAY: Duration = Duration::from_millis(50);

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// The same objects, but each read takes so long.
fn slow(store: &Backend, delay: Duration) -> Arc<dyn Store> {
    let slow = FaultyStore::new(Arc::new(store.clone()));
    slow.always(StoreOperation::Get, Some(StoreFault::Delay(delay)));
    Arc::new(slow)
}

/// On ONE thread: a statement that blocked it would stop all others, and the time would be the sum.
#[test]
fn two_thousand_statements_wait_on_one_thread() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let memory = Backend::memory();
        let config = |delay| Config {
            store: Some(slow(&memory, delay)),
            ..Config::new(directory.path(), 1 << 30)
        };
        let engine = start_when_free(|| config(Duration::ZERO)).await;
        let mut cold = client(&engine, 1);
        cold.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
        cold.run("INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000) SELECT i, zeroblob(1000) FROM n").await.unwrap();
        cold.close().await;
        engine.shutdown().await.unwrap();
        drop(engine);

        let engine = start_when_free(|| config(DELAY)).await;
        let mut warm = client(&engine, 2);
        warm.run("CREATE TABLE t(id INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await.unwrap();
        warm.run("SELECT * FROM t").await.unwrap();

        let started = Instant::now();
        let waiting: Vec<_> = (0..STATEMENTS)
            .map(|i| {
                let mut client = client(&engine, 1);
                tokio::spawn(async move { client.int(&format!("SELECT length(v) FROM t WHERE id = {}", i * 3 + 1)).await })
            })
            .collect();
        // Meanwhile another tenant's statements are answered: many of them in the time of one page.
        let mut answered_meanwhile = 0;
        while waiting.iter().any(|task| !task.is_finished()) {
            warm.run("SELECT * FROM t").await.unwrap();
            answered_meanwhile += 1;
            tokio::task::yield_now().await;
        }
        for task in waiting {
            assert_eq!(task.await.unwrap(), 1000);
        }
        // Each statement needs at least two cold pages in a row; one after the other they would take 200 s.
        let one_by_one = DELAY * 2 * STATEMENTS as u32;
        assert!(started.elapsed() < one_by_one / 10, "{:?}", started.elapsed());
        assert!(answered_meanwhile > 100, "{answered_meanwhile}");
    });
}

#[tokio::test]
async fn a_cancelled_statement_stops_waiting_for_its_page() {
    const SLOW: Duration = Duration::from_secs(1);
    let directory = tempfile::tempdir().unwrap();
    let memory = Backend::memory();
    let config =
        |delay| Config { store: Some(slow(&memory, delay)), ..Config::new(directory.path(), 1 << 30) };
    let engine = start_when_free(|| config(Duration::ZERO)).await;
    let mut a = client(&engine, 1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB); INSERT INTO t VALUES (1, zeroblob(9000)), (2, zeroblob(9000))").await.unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = start_when_free(|| config(SLOW)).await;
    let mut a = client(&engine, 1);
    a.run("PRAGMA user_version").await.unwrap();
    let canceller = a.session.canceller();
    let running = tokio::spawn(async move {
        let started = Instant::now();
        let state = a.state("SELECT sum(length(v)) FROM t").await;
        (a, state, started.elapsed())
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    canceller.cancel(fulmar_engine::CancelReason::User);
    let (mut a, state, elapsed) = running.await.unwrap();
    assert_eq!(state, fulmar_engine::sqlstate::QUERY_CANCELED);
    assert!(elapsed < SLOW, "{elapsed:?}");
    assert_eq!(a.int("SELECT sum(length(v)) FROM t").await, 18000);
}

/// A tenant that is not open yet: its store does not answer, and who asked for it need not wait for that.
#[tokio::test]
async fn a_cancelled_statement_stops_waiting_for_its_partition() {
    let directory = tempfile::tempdir().unwrap();
    let store = FaultyStore::new(Arc::new(Backend::memory()));
    let config = || Config { store: Some(Arc::new(store.clone())), ..Config::new(directory.path(), 1 << 30) };
    let engine = start_when_free(config).await;
    store.hold(StoreOperation::List, true);
    let mut a = client(&engine, 1);
    let canceller = a.session.canceller();
    let running = tokio::spawn(async move {
        let state = a.state("SELECT 1").await;
        (a, state)
    });
    store.is_holding().await;
    canceller.cancel(fulmar_engine::CancelReason::User);
    let (mut a, state) = running.await.unwrap();
    assert_eq!(state, fulmar_engine::sqlstate::QUERY_CANCELED);
    store.hold(StoreOperation::List, false);
    assert_eq!(a.int("SELECT 1").await, 1);
}

/// A store that refuses, after a while, what many wait for: all of them are told then, not one after the other.
#[tokio::test]
async fn who_waits_for_the_same_fails_together() {
    const SESSIONS: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    let store = FaultyStore::new(Arc::new(Backend::memory()));
    let config = || Config { store: Some(Arc::new(store.clone())), ..Config::new(directory.path(), 1 << 30) };
    let engine = start_when_free(config).await;
    let mut a = client(&engine, 1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v); INSERT INTO t VALUES (1, zeroblob(9000))")
        .await
        .unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);

    let engine = start_when_free(config).await;
    // Its manifests are listed; the last one is read, and then its segment's index.
    for (operation, let_through) in [(StoreOperation::List, 0), (StoreOperation::Get, 1)] {
        let tries = || {
            let counted = engine.store_statistics().into_iter().find(|of| of.operation == operation);
            counted.unwrap().tries
        };
        (0..let_through).for_each(|_| store.next(operation, StoreFault::Delay(Duration::ZERO)));
        store.always(operation, Some(StoreFault::Fail(FailureKind::Refused)));
        store.hold(operation, true);
        let before = tries();
        let waiting: Vec<_> = (0..SESSIONS)
            .map(|_| {
                let mut client = client(&engine, 1);
                tokio::spawn(async move { client.run("SELECT length(v) FROM t").await.unwrap_err() })
            })
            .collect();
        // On this one thread: when one is held, the others have come as far with the next turn.
        store.is_holding().await;
        tokio::task::yield_now().await;
        store.hold(operation, false);
        for task in waiting {
            let error = task.await.unwrap();
            assert_eq!(error.state(), "58030");
            // Where the store is, and what it has said, is not the tenant's.
            let told = format!("{error:?}");
            assert!(told.contains("refused") && !told.contains("memory:"), "{told}");
            assert!(!told.contains("a fault of the test's"), "{told}");
        }
        assert_eq!(tries() - before, let_through + 1, "{operation:?}");
        store.always(operation, None);
    }
    assert_eq!(client(&engine, 1).int("SELECT length(v) FROM t").await, 9000);
}

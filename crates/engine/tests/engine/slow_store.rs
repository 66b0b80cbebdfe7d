//! Slow store: a statement that waits for a page blocks neither a thread nor another session. The
//! store holds its answers until the test releases them, so no result depends on time.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::common::{Client, WAIT_TIMEOUT, start_when_free, wait_until, with_timeout};
use fulmar_engine::{Config, Engine};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FailureKind, FaultyStore, StoreFault, StoreOperation};

const STATEMENTS: usize = 2000;

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// An engine on a store whose page reads can be held. It reads no page before a statement needs it.
struct Rig {
    engine: Arc<Engine>,
    store: FaultyStore,
    _directory: tempfile::TempDir,
}

impl Rig {
    /// Fills partition 1 with `sql`. None of its pages is in memory afterwards.
    async fn with_cold_pages(sql: &str) -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let store = FaultyStore::new(Arc::new(Backend::memory()));
        let config =
            || Config { store: Some(Arc::new(store.clone())), ..Config::new(directory.path(), 1 << 30) };
        let engine = start_when_free(config).await;
        let mut cold = client(&engine, 1);
        cold.run(sql).await.unwrap();
        cold.close().await;
        engine.shutdown().await.unwrap();
        drop(engine);
        let engine = start_when_free(config).await;
        store.hold_under(StoreOperation::Get, "manifests/0000000000000001/hot-");
        let mut cold = client(&engine, 1);
        cold.run("PRAGMA user_version").await.unwrap();
        cold.close().await;
        Rig { engine, store, _directory: directory }
    }

    fn hold_pages(&self) {
        self.store.hold_under(StoreOperation::Get, "segments/");
    }

    fn release(&self) {
        self.store.hold(StoreOperation::Get, false);
    }
}

/// Runs on one thread. A statement that blocks it would block all others, and the test.
async fn wait_for_pages() {
    let rig = Rig::with_cold_pages(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB); INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000) SELECT i, zeroblob(1000) FROM n",
    )
    .await;
    let mut warm = client(&rig.engine, 2);
    warm.run("CREATE TABLE t(id INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await.unwrap();
    rig.hold_pages();
    let waiting = Arc::new(AtomicUsize::new(0));
    let statements: Vec<_> = (0..STATEMENTS)
        .map(|i| {
            let (mut client, waiting) = (client(&rig.engine, 1), waiting.clone());
            tokio::spawn(async move {
                let sql = format!("SELECT length(v) FROM t WHERE id = {}", i * 3 + 1);
                let mut length = pin!(client.int(&sql));
                assert!(futures::poll!(length.as_mut()).is_pending(), "its page cannot have been read");
                waiting.fetch_add(1, Ordering::Relaxed);
                length.await
            })
        })
        .collect();
    wait_until("all statements wait", async || waiting.load(Ordering::Relaxed) == STATEMENTS).await;
    for _ in 0..100 {
        warm.run("SELECT * FROM t").await.unwrap();
        assert!(statements.iter().all(|statement| !statement.is_finished()));
    }
    rig.release();
    for statement in statements {
        assert_eq!(statement.await.unwrap(), 1000);
    }
}

#[test]
fn two_thousand_statements_wait_for_pages_on_one_thread() {
    let (done, is_done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(wait_for_pages());
        done.send(()).unwrap();
    });
    let waited = is_done.recv_timeout(WAIT_TIMEOUT);
    assert_ne!(waited, Err(mpsc::RecvTimeoutError::Timeout), "a waiting statement must not block its thread");
    thread.join().unwrap();
}

#[tokio::test]
async fn cancelled_statement_stops_waiting_for_its_page() {
    let rig = Rig::with_cold_pages(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB); INSERT INTO t VALUES (1, zeroblob(9000)), (2, zeroblob(9000))",
    )
    .await;
    let mut a = client(&rig.engine, 1);
    rig.hold_pages();
    let canceller = a.session.canceller();
    {
        let mut running = pin!(a.state("SELECT sum(length(v)) FROM t"));
        assert!(futures::poll!(running.as_mut()).is_pending());
        canceller.cancel(fulmar_engine::CancelReason::User);
        // The store still holds the read of the page.
        let state = with_timeout("the statement is cancelled", running).await;
        assert_eq!(state, fulmar_engine::sqlstate::QUERY_CANCELED);
    }
    rig.release();
    assert_eq!(a.int("SELECT sum(length(v)) FROM t").await, 18000);
}

/// The store does not answer while a partition is being opened. A cancel must end the wait.
#[tokio::test]
async fn cancelled_statement_stops_waiting_for_its_partition() {
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

/// A store rejects a request that many sessions wait for: all of them fail together, after one
/// request.
#[tokio::test]
async fn sessions_waiting_for_one_request_fail_together() {
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
    // Opening lists the manifests, reads the last one, and then the index of its segment.
    for (operation, let_through) in [(StoreOperation::List, 0), (StoreOperation::Get, 1)] {
        let tries = || {
            let counted = engine.store_statistics().into_iter().find(|of| of.operation == operation);
            counted.unwrap().attempts
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
        // Runs on one thread: when one request is held, the other sessions also wait after the next
        // yield.
        store.is_holding().await;
        tokio::task::yield_now().await;
        store.hold(operation, false);
        for task in waiting {
            let error = task.await.unwrap();
            assert_eq!(error.state(), "58030");
            // The location of the store and its error message must not be shown to the tenant.
            let shown = format!("{error:?}");
            assert!(shown.contains("refused") && !shown.contains("memory:"), "{shown}");
            assert!(!shown.contains("injected fault"), "{shown}");
        }
        assert_eq!(tries() - before, let_through + 1, "{operation:?}");
        store.always(operation, None);
    }
    assert_eq!(client(&engine, 1).int("SELECT length(v) FROM t").await, 9000);
}

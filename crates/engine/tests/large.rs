//! Transactions larger than the memory budget: spilling to temporary files and segments.

mod common;

use std::sync::Arc;

use common::{Client, Node};
use fulmar_engine::{CancelReason, Config, Value, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FailureKind, FaultyStore, StoreFault, StoreOperation};

/// Resident memory of this process, in bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

const ROWS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 15000) SELECT i, randomblob(3500) FROM n";

const FEWER_ROWS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT i, randomblob(3500) FROM n";

#[tokio::test]
async fn transaction_of_a_gigabyte_runs_within_256_mib() {
    let directory = tempfile::tempdir().unwrap();
    let memory = 256 << 20;
    let start = || common::start_when_free(|| Config::new(directory.path(), memory));
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 0)").await.unwrap();
    a.run(&format!("INSERT INTO t(id, v) {ROWS}")).await.unwrap();
    let before = resident_bytes();
    a.run("BEGIN").await.unwrap();
    let mut peak_bytes = 0;
    for round in 0..18 {
        a.run(&format!("UPDATE t SET v = randomblob(3500), n = {round}")).await.unwrap();
        peak_bytes = peak_bytes.max(resident_bytes());
    }
    a.run("COMMIT").await.unwrap();
    peak_bytes = peak_bytes.max(resident_bytes());
    assert!(
        peak_bytes < before.max(memory) + (64 << 20),
        "resident memory must stay within the budget: {} MiB, {} MiB before",
        peak_bytes >> 20,
        before >> 20
    );
    assert!(engine.statistics().temporary_files > 0);
    assert_eq!(a.int("SELECT count(*) FROM t WHERE n = 17 AND length(v) = 3500").await, 15000);
    a.run("UPDATE t SET n = -1 WHERE id = 5").await.unwrap();
    a.close().await;
    // Without a clean stop, the large commit is recovered from the log's record and its segment.
    drop(engine);
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT count(*) FROM t WHERE n = 17").await, 14999);
    assert_eq!(a.int("SELECT n FROM t WHERE id = 5").await, -1);
    engine.flush().await.unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 14999 * 17 - 1);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test]
async fn rollback_of_a_large_transaction_leaves_no_pages() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    a.run(&format!("BEGIN; INSERT INTO t {ROWS}; ROLLBACK")).await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    assert_eq!(a.int("PRAGMA page_count").await, 2);
}

/// Aggregates of the table that change with every change of its rows.
const SUMS: &str = "SELECT count(*) || ' ' || sum(id) || ' ' || sum(n) || ' ' || sum(id * length(v)) FROM t";

#[tokio::test]
async fn spilled_pages_can_be_read_changed_and_rolled_back() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 1); CREATE INDEX i ON t(n, id)")
        .await
        .unwrap();
    a.run(&format!("BEGIN; INSERT INTO t(id, v) {FEWER_ROWS}")).await.unwrap();
    assert_eq!(a.int("SELECT sum(length(v)) FROM t WHERE id % 7 = 0").await, 714 * 3500);
    // Changes some pages again, once and twice, then all of them, and rolls back.
    a.run("UPDATE t SET n = 2 WHERE id % 50 = 0; UPDATE t SET n = 3 WHERE id % 100 = 0").await.unwrap();
    let sums = a.value(SUMS).await;
    a.run("SAVEPOINT s; UPDATE t SET v = randomblob(3400), n = 4; DELETE FROM t WHERE id > 3000")
        .await
        .unwrap();
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 3000 * 4);
    a.run("ROLLBACK TO s").await.unwrap();
    assert_eq!(a.value(SUMS).await, sums);
    a.run("DELETE FROM t WHERE id BETWEEN 1000 AND 1999; COMMIT").await.unwrap();
    let check = async |a: &mut Client| {
        assert_eq!(a.int("SELECT count(*) FROM t").await, 4000);
        assert_eq!(a.int("SELECT count(*) FROM t WHERE n = 3").await, 40);
        assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        let verified = a.session.verify().await.unwrap();
        assert!(verified.damage.is_empty() && verified.pages > 4000, "{verified:?}");
    };
    check(&mut a).await;
    node.engine.flush().await.unwrap();
    check(&mut a).await;
    a.close().await;
    let node = node.restart().await;
    check(&mut node.client(1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_large_transaction_is_rolled_back() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 1)").await.unwrap();
    a.run(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await.unwrap();
    let sums = a.value(SUMS).await;
    for spilled in 1..=3 {
        // Cancels in the middle of the writes: when the statement has created `spilled` more files.
        let engine = node.engine.clone();
        let before = engine.statistics().temporary_files;
        let canceller = a.session.canceller();
        let cancelling = tokio::spawn(async move {
            while engine.statistics().temporary_files < before + spilled {
                tokio::task::yield_now().await;
            }
            canceller.cancel(CancelReason::User);
        });
        let endless = "BEGIN; UPDATE t SET v = randomblob(3500); UPDATE t SET n = 2; UPDATE t SET n = (WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i) SELECT max(k) FROM i)";
        assert_eq!(a.state(endless).await, sqlstate::QUERY_CANCELED);
        cancelling.await.unwrap();
        a.run("ROLLBACK").await.unwrap();
        assert_eq!(a.value(SUMS).await, sums);
    }
    a.run("UPDATE t SET n = 2").await.unwrap();
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 10000);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

/// A large commit is uploaded to a store that is not a local directory. If the store rejects it,
/// the commit fails without a change.
#[tokio::test]
async fn large_commit_is_uploaded_or_fails_atomically() {
    let directory = tempfile::tempdir().unwrap();
    let store = FaultyStore::new(Arc::new(Backend::memory()));
    let config =
        || Config { store: Some(Arc::new(store.clone())), ..Config::new(directory.path(), common::MEMORY) };
    let refuse = |fault| {
        for operation in [StoreOperation::Put, StoreOperation::Upload] {
            store.always(operation, fault);
        }
    };
    let engine = common::start_when_free(config).await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 1)").await.unwrap();
    refuse(Some(StoreFault::Fail(FailureKind::Other)));
    assert_eq!(a.state(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await, sqlstate::IO_ERROR);
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    refuse(None);
    a.run(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await.unwrap();
    let sums = a.value(SUMS).await;
    a.close().await;
    drop(engine);
    let engine = common::start_when_free(config).await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.value(SUMS).await, sums);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test]
async fn large_transaction_on_a_failing_disk_is_rolled_back() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 1)").await.unwrap();
    let temporary_directory = node.directory.path().join("tmp");
    std::fs::remove_dir(&temporary_directory).unwrap();
    let error = a.run(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::IO_ERROR, "{error}");
    assert!(error.message().contains("temporary file"), "{error}");
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    std::fs::create_dir(&temporary_directory).unwrap();
    // The store cannot create the segment: a file is in the place of its directory.
    let segments = node.directory.path().join("store/segments");
    std::fs::write(&segments, "").unwrap();
    assert_eq!(a.state(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await, sqlstate::IO_ERROR);
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    std::fs::remove_file(&segments).unwrap();
    a.run(&format!("INSERT INTO t(id, v) {FEWER_ROWS}")).await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 5000);
}

/// Transactions that are too large to be replayed wait for a log that is busy with other tenants.
/// The wait is not a conflict.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn large_transactions_wait_for_a_busy_log() {
    const TENANTS: u64 = 8;
    let node = Node::start().await;
    let tenants = (1..=TENANTS).map(|partition| {
        let mut client = node.client(partition);
        tokio::spawn(async move {
            client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)").await.unwrap();
            let value = Value::Text("x".repeat(60_000));
            for _ in 0..4 {
                client.run("BEGIN").await.unwrap();
                for _ in 0..40 {
                    client.with("INSERT INTO t(v) VALUES ($1)", std::slice::from_ref(&value)).await.unwrap();
                }
                client.run("COMMIT").await.unwrap();
            }
            assert_eq!(client.int("SELECT count(*) FROM t").await, 160);
            client.close().await;
        })
    });
    futures::future::try_join_all(tenants).await.unwrap();
}

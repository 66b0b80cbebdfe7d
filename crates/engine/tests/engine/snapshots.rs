//! Snapshot expiry: a session releases a snapshot that is too old, and its transaction is replayed
//! on a new one if nothing that it read has changed.

use std::time::Duration;

use crate::common::{Client, MEMORY, WAIT_TIMEOUT, wait_until};
use fulmar_engine::*;
use fulmar_pages::PartitionId;

struct Case {
    engine: std::sync::Arc<Engine>,
    holder: Client,
    writer: Client,
    _directory: tempfile::TempDir,
}

/// Two clients on a table with two rows on separate pages. The bounds are zero, so a snapshot
/// expires as soon as a page is replaced.
async fn case() -> Case {
    let directory = tempfile::tempdir().unwrap();
    let snapshots = SnapshotBounds { bytes: 0, age: Duration::ZERO, age_if_large: Duration::ZERO };
    let engine = Engine::start(Config { snapshots, ..Config::new(directory.path(), MEMORY) }).await.unwrap();
    let client = || Client { session: engine.session(PartitionId(7)) };
    let (holder, mut writer) = (client(), client());
    writer
        .run("CREATE TABLE t(k INTEGER PRIMARY KEY, n, filler); INSERT INTO t VALUES (1, 10, zeroblob(3500)), (2, 20, zeroblob(3500))")
        .await
        .unwrap();
    Case { holder, writer, engine, _directory: directory }
}

impl Case {
    /// The writer replaces the second row until the holder is asked to release its snapshot. Then
    /// the holder releases it.
    async fn expire(&mut self) {
        for n in 0..10 {
            self.writer.run(&format!("UPDATE t SET n = 100 + {n} WHERE k = 2")).await.unwrap();
        }
        let expired = self.holder.session.snapshot_expired();
        tokio::time::timeout(WAIT_TIMEOUT, expired).await.expect("the snapshot must expire");
        assert!(self.holder.session.holds_snapshot());
        self.holder.session.release_snapshot().await.unwrap();
        assert!(!self.holder.session.holds_snapshot());
    }

    async fn numbers(&mut self) -> Vec<Vec<Value>> {
        self.writer.run("SELECT n FROM t ORDER BY k").await.unwrap()
    }
}

fn integers(numbers: &[i64]) -> Vec<Vec<Value>> {
    numbers.iter().map(|n| vec![Value::Integer(*n)]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_snapshot_frees_memory_and_the_transaction_continues() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t WHERE k = 1").await.unwrap(), integers(&[10]));
    let before = case.engine.statistics().memory_bytes;
    case.expire().await;
    // The next round of the flusher frees the pages.
    let is_freed = async || case.engine.statistics().memory_bytes <= before + 2 * 4096;
    wait_until("the replaced pages are freed", is_freed).await;
    case.holder.run("UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[11, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn earlier_writes_are_replayed() {
    let mut case = case().await;
    case.holder.run("BEGIN; UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[11, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_read_a_changed_row_gets_40001() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t WHERE k = 2").await.unwrap(), integers(&[20]));
    case.expire().await;
    let error = case.holder.run("SELECT n FROM t WHERE k = 1").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE);
    case.holder.run("ROLLBACK").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_transaction_commits_after_its_snapshot_expired() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t ORDER BY k").await.unwrap(), integers(&[10, 20]));
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[10, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_can_be_rolled_back_after_its_snapshot_expired() {
    let mut case = case().await;
    case.holder.run("BEGIN; UPDATE t SET n = 0 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("ROLLBACK").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[10, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn savepoint_survives_snapshot_expiry() {
    let mut case = case().await;
    case.holder.run("BEGIN; SAVEPOINT s; UPDATE t SET n = 0 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("ROLLBACK TO s; UPDATE t SET n = n + 5 WHERE k = 1; COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[15, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_statement_gets_40001_when_its_snapshot_expires() {
    let mut case = case().await;
    let long = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT max(i) FROM c, t";
    for begin in ["", "BEGIN; SELECT n FROM t WHERE k = 1;"] {
        let mut session = Client { session: case.engine.session(PartitionId(7)) };
        let running = tokio::spawn(async move { session.run(&format!("{begin}{long}")).await.unwrap_err() });
        let writing = async {
            while !running.is_finished() {
                case.writer.run("UPDATE t SET n = n + 1 WHERE k = 2").await.unwrap();
            }
        };
        tokio::time::timeout(WAIT_TIMEOUT, writing).await.expect("the statement must be cancelled");
        let error = running.await.unwrap();
        assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE);
    }
}

/// A replay with a different result stops halfway. The transaction cannot continue from there, by
/// any savepoint name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_replay_cannot_continue_from_a_savepoint() {
    let mut case = case().await;
    case.holder.run("BEGIN; SAVEPOINT s").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t WHERE k = 2").await.unwrap(), integers(&[20]));
    case.holder.run("UPDATE t SET n = n + 1 WHERE k = 1; SAVEPOINT s").await.unwrap();
    case.expire().await;
    for sql in ["SELECT 1", "ROLLBACK TO s"] {
        let error = case.holder.run(sql).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "{sql}");
    }
    let (_, completion) = case.holder.with("COMMIT", &[]).await.unwrap();
    assert_eq!(completion.tag, CommandTag::Plain("ROLLBACK"));
    assert_eq!(case.numbers().await, integers(&[10, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn temporary_tables_are_recreated() {
    let mut case = case().await;
    case.holder.run("BEGIN; CREATE TEMP TABLE c AS SELECT n FROM t WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM c").await.unwrap(), integers(&[10]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statement_prepared_after_expiry_sees_tables_of_its_transaction() {
    let mut case = case().await;
    case.holder.run("BEGIN; CREATE TABLE x(n); SELECT n FROM t WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("INSERT INTO x VALUES (7)").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.writer.run("SELECT n FROM x").await.unwrap(), integers(&[7]));
}

/// A session may hold a row lock for any time. The snapshots of sessions that wait for the row
/// expire.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_waiting_for_a_row_releases_its_snapshot() {
    let mut case = case().await;
    case.holder
        .run("BEGIN; SELECT n FROM t WHERE k = 1 FOR UPDATE; UPDATE t SET n = 50 WHERE k = 1")
        .await
        .unwrap();
    let mut waiter = Client { session: case.engine.session(PartitionId(7)) };
    waiter.run("BEGIN; SELECT 1 FROM t WHERE k = 3").await.unwrap();
    let waiting = tokio::spawn(async move {
        let rows = waiter.run("SELECT n FROM t WHERE k = 1 FOR UPDATE").await.unwrap();
        waiter.run("UPDATE t SET n = n + 1 WHERE k = 1; COMMIT").await.unwrap();
        rows
    });
    let before = case.engine.statistics().memory_bytes;
    case.expire().await;
    let is_freed = async || case.engine.statistics().memory_bytes <= before + 4 * 4096;
    wait_until("the replaced pages are freed", is_freed).await;
    assert!(!waiting.is_finished());
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), integers(&[50]));
    assert_eq!(case.numbers().await, integers(&[51, 109]));
}

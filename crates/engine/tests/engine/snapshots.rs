//! Snapshots are bounded: who holds one for too long lets go of it, and goes on if nothing that it saw has changed.

use std::time::Duration;

use crate::common::{Client, MEMORY, PATIENCE, until};
use fulmar_engine::*;
use fulmar_pages::PartitionId;

struct Case {
    engine: std::sync::Arc<Engine>,
    holder: Client,
    writer: Client,
    _directory: tempfile::TempDir,
}

/// Two clients on a table of two rows on pages of their own, where a snapshot is old as soon as anything was replaced.
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
    /// The writer replaces the second row until the holder is asked to let go; then it does.
    async fn expire(&mut self) {
        for n in 0..10 {
            self.writer.run(&format!("UPDATE t SET n = 100 + {n} WHERE k = 2")).await.unwrap();
        }
        tokio::time::timeout(PATIENCE, self.holder.session.snapshot_expired()).await.expect("never asked");
        assert!(self.holder.session.holds_snapshot());
        self.holder.session.let_snapshot_go().await.unwrap();
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
async fn who_lets_go_frees_memory_and_goes_on_unseen() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t WHERE k = 1").await.unwrap(), integers(&[10]));
    let before = case.engine.statistics().memory_bytes;
    case.expire().await;
    // The flusher's next look frees what was held.
    let is_freed = async || case.engine.statistics().memory_bytes <= before + 2 * 4096;
    until("the replaced pages are freed", is_freed).await;
    case.holder.run("UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[11, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_before_is_written_again() {
    let mut case = case().await;
    case.holder.run("BEGIN; UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[11, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_saw_what_has_changed_gets_40001() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t WHERE k = 2").await.unwrap(), integers(&[20]));
    case.expire().await;
    let error = case.holder.run("SELECT n FROM t WHERE k = 1").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE);
    case.holder.run("ROLLBACK").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_only_read_commits_what_it_saw_at_its_snapshot() {
    let mut case = case().await;
    case.holder.run("BEGIN").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM t ORDER BY k").await.unwrap(), integers(&[10, 20]));
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[10, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolled_back_after_letting_go_is_rolled_back() {
    let mut case = case().await;
    case.holder.run("BEGIN; UPDATE t SET n = 0 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("ROLLBACK").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[10, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_savepoint_is_there_after_letting_go() {
    let mut case = case().await;
    case.holder.run("BEGIN; SAVEPOINT s; UPDATE t SET n = 0 WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("ROLLBACK TO s; UPDATE t SET n = n + 5 WHERE k = 1; COMMIT").await.unwrap();
    assert_eq!(case.numbers().await, integers(&[15, 109]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_runs_for_too_long_gets_40001() {
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
        tokio::time::timeout(PATIENCE, writing).await.expect("it runs for ever");
        let error = running.await.unwrap();
        assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE);
    }
}

/// A replay that differs stops in the middle: nobody may go on from there, by whatever name a savepoint has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_replay_is_not_revived_by_a_savepoint() {
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
async fn temporary_tables_are_made_again() {
    let mut case = case().await;
    case.holder.run("BEGIN; CREATE TEMP TABLE c AS SELECT n FROM t WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.holder.run("SELECT n FROM c").await.unwrap(), integers(&[10]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_prepared_next_knows_the_tables_that_the_transaction_made() {
    let mut case = case().await;
    case.holder.run("BEGIN; CREATE TABLE x(n); SELECT n FROM t WHERE k = 1").await.unwrap();
    case.expire().await;
    case.holder.run("INSERT INTO x VALUES (7)").await.unwrap();
    case.expire().await;
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(case.writer.run("SELECT n FROM x").await.unwrap(), integers(&[7]));
}

/// A row may be held for as long as its holder's client likes; the snapshots of those who wait for it are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_a_row_lets_go_too() {
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
    until("the replaced pages are freed", is_freed).await;
    assert!(!waiting.is_finished());
    case.holder.run("COMMIT").await.unwrap();
    assert_eq!(waiting.await.unwrap(), integers(&[50]));
    assert_eq!(case.numbers().await, integers(&[51, 109]));
}

//! Runs a session against a local partition, through the interface only.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use fulmar_engine::{Config, Engine, Error, Row, ValueRef, sqlstate};
use fulmar_pages::{PAGE_SIZE, PartitionId};
use fulmar_service::{
    Cancel, CancelReason, ExportStream, LocalPartition, PartitionService, RowSink, Scope, StatementContext,
    TransactionStatus, Value,
};

const PARTITION: PartitionId = PartitionId(7);

async fn start() -> (tempfile::TempDir, Arc<Engine>) {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 256 << 20)).await.unwrap();
    engine.create_partition(PARTITION, None).await.unwrap();
    (directory, engine)
}

#[derive(Default)]
struct Rows(Vec<Vec<Value>>);

impl RowSink for Rows {
    fn row(&mut self, row: &dyn Row) -> Result<(), Error> {
        self.0.push((0..row.len()).map(|index| ValueRef::to_owned(row.get(index))).collect());
        Ok(())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

/// Runs one statement as a session does: without knowledge of the implementation.
async fn run(partition: &mut impl PartitionService, sql: &str) -> Result<Vec<Vec<Value>>, Error> {
    let (statement, _) = partition.prepare(sql, StatementContext::default()).await?;
    let mut rows = Rows::default();
    partition.execute(&statement, &[], Scope::Auto, &mut rows).await?;
    Ok(rows.0)
}

#[tokio::test]
async fn transactions_commit_roll_back_and_fail() {
    let (_directory, engine) = start().await;
    let partition = &mut LocalPartition::new(engine, PARTITION);
    run(partition, "CREATE TABLE t (n INTEGER)").await.unwrap();
    run(partition, "BEGIN").await.unwrap();
    assert_eq!(partition.status(), TransactionStatus::InTransaction);
    run(partition, "INSERT INTO t VALUES (1)").await.unwrap();
    run(partition, "COMMIT").await.unwrap();
    run(partition, "BEGIN").await.unwrap();
    run(partition, "INSERT INTO t VALUES (2)").await.unwrap();
    run(partition, "ROLLBACK").await.unwrap();
    assert_eq!(partition.status(), TransactionStatus::Idle);
    assert_eq!(run(partition, "SELECT n FROM t").await.unwrap(), [[Value::Integer(1)]]);
    run(partition, "BEGIN").await.unwrap();
    partition.fail();
    assert_eq!(partition.status(), TransactionStatus::Failed);
    let error = run(partition, "SELECT 1").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::IN_FAILED_TRANSACTION);
    partition.close().await;
    assert_eq!(partition.status(), TransactionStatus::Idle);
}

#[tokio::test]
async fn implicit_transaction_commits_its_statements_together() {
    let (_directory, engine) = start().await;
    let partition = &mut LocalPartition::new(engine, PARTITION);
    run(partition, "CREATE TABLE t (n INTEGER)").await.unwrap();
    let sql = "INSERT INTO t VALUES (1)";
    let (insert, rest) = partition.prepare(sql, StatementContext::default()).await.unwrap();
    assert!(rest.is_empty() && insert.columns.is_empty());
    for _ in 0..2 {
        partition.execute(&insert, &[], Scope::Implicit, &mut Rows::default()).await.unwrap();
    }
    partition.commit_implicit().await.unwrap();
    assert_eq!(run(partition, "SELECT count(*) FROM t").await.unwrap(), [[Value::Integer(2)]]);
}

/// Cancels until `stopped`. A request before the statement runs has no effect.
fn cancel_until(stopped: &mpsc::Receiver<()>, canceller: &impl Cancel) {
    while stopped.recv_timeout(Duration::from_millis(5)).is_err() {
        canceller.cancel(CancelReason::User);
    }
}

#[tokio::test]
async fn canceller_ends_a_statement_from_another_thread() {
    let (_directory, engine) = start().await;
    let partition = &mut LocalPartition::new(engine, PARTITION);
    let canceller = partition.canceller();
    let endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c";
    let (statement, _) = partition.prepare(endless, StatementContext::default()).await.unwrap();
    let (stop, stopped) = mpsc::channel();
    let thread = std::thread::spawn(move || cancel_until(&stopped, &canceller));
    let error = partition.execute(&statement, &[], Scope::Auto, &mut Rows::default()).await.unwrap_err();
    stop.send(()).unwrap();
    thread.join().unwrap();
    assert_eq!(error.state(), sqlstate::QUERY_CANCELED);
}

#[tokio::test]
async fn export_returns_all_pages_of_one_version() {
    let (_directory, engine) = start().await;
    let partition = &mut LocalPartition::new(engine, PARTITION);
    run(partition, "CREATE TABLE t (n INTEGER)").await.unwrap();
    let pages = run(partition, "SELECT page_count FROM pragma_page_count").await.unwrap();
    let mut export = partition.export(None).await.unwrap();
    run(partition, "CREATE TABLE u (n INTEGER)").await.unwrap();
    let mut bytes = Vec::new();
    while export.next_pages(&mut bytes).await.unwrap() {}
    assert_eq!(pages, [[Value::Integer((bytes.len() / PAGE_SIZE) as i64)]]);
}

//! Cancellation in the queue of the offload pool: a queued statement that is cancelled does not
//! run. It is queued because another statement of its tenant occupies a thread.
//!
//! A statement with a large parameter leaves its worker. Here the first one stays in an
//! uninterruptible call: a sink that blocks its thread until the test releases it, so no result
//! depends on time.

use std::sync::mpsc;

use crate::common::{Client, Node, Rows, wait_until, with_timeout};
use fulmar_engine::{CancelReason, Canceller, Result, Row, RowSink, Scope, Value, sqlstate};
use tokio::task::JoinHandle;

/// Partitions that no other test of this program uses, because the pool is shared by the process.
const FIRST_PARTITION: u64 = 7_001;
/// Larger than the parameters that a worker handles itself.
const LARGE_BYTES: usize = 100 << 10;
/// Number of queued statements of one tenant.
const QUEUED: usize = 20;

/// Blocks the thread that runs the statement.
struct Blocking {
    is_running: Option<tokio::sync::oneshot::Sender<()>>,
    release: mpsc::Receiver<()>,
}

impl RowSink for Blocking {
    fn row(&mut self, _row: &dyn Row) -> Result<()> {
        if let Some(is_running) = self.is_running.take() {
            is_running.send(()).unwrap();
        }
        // Fails if the test has ended.
        let _ = self.release.recv();
        Ok(())
    }

    fn reset(&mut self) {}
}

fn large() -> Value {
    Value::Text("x".repeat(LARGE_BYTES))
}

/// A statement that occupies a thread of the pool.
struct Blocker {
    release: mpsc::Sender<()>,
    statement: JoinHandle<Client>,
}

impl Blocker {
    async fn start(node: &Node, partition: u64) -> Blocker {
        let (mut client, (release, released)) = (node.client(partition), mpsc::channel());
        let (running, is_running) = tokio::sync::oneshot::channel();
        let statement = tokio::spawn(async move {
            let mut sink = Blocking { is_running: Some(running), release: released };
            execute(&mut client, "SELECT length($1)", &mut sink).await.unwrap();
            client
        });
        with_timeout("the statement occupies a thread", is_running).await.unwrap();
        Blocker { release, statement }
    }

    async fn end(self) {
        self.release.send(()).unwrap();
        with_timeout("the statement ends", self.statement).await.unwrap().close().await;
    }
}

async fn execute(client: &mut Client, sql: &str, sink: &mut dyn RowSink) -> Result<()> {
    let (statement, _) = client.session.prepare(sql).await?;
    client.session.execute(&statement, &[large()], Scope::Auto, sink).await.map(drop)
}

/// A queued statement. Its task returns the session, the result and the rows.
struct Queued {
    canceller: Canceller,
    statement: JoinHandle<(Client, Result<()>, Rows)>,
}

impl Queued {
    async fn start(node: &Node, partition: u64, sql: &'static str) -> Queued {
        let mut client = node.client(partition);
        let canceller = client.session.canceller();
        let statement = tokio::spawn(async move {
            let mut rows = Rows::default();
            let result = execute(&mut client, sql, &mut rows).await;
            (client, result, rows)
        });
        wait_until("the statement leaves its worker", async || canceller.is_offloaded()).await;
        Queued { canceller, statement }
    }

    /// Asserts that the statement was cancelled without running, and that its session is usable.
    async fn assert_cancelled_without_running(self) {
        let (mut client, result, rows) = with_timeout("the statement ends", self.statement).await.unwrap();
        let error = result.expect_err("a cancelled statement must not succeed");
        assert_eq!(error.state(), sqlstate::QUERY_CANCELED, "{error}");
        assert!(error.message().contains("statement timeout"), "the error must name the reason: {error}");
        assert!(rows.0.is_empty(), "a statement cancelled in the queue must not run");
        assert_eq!(
            client.int("SELECT count(*) FROM t").await,
            0,
            "a statement cancelled in the queue must not write"
        );
        client.close().await;
    }
}

/// `RETURNING` shows whether the statement has run.
const INSERT: &str = "INSERT INTO t VALUES (length($1)) RETURNING x";
const SELECT: &str = "SELECT length($1)";

async fn table(node: &Node, partition: u64) {
    let mut client = node.client(partition);
    client.run("CREATE TABLE t(x)").await.unwrap();
    client.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statement_cancelled_in_the_queue_does_not_run() {
    let node = Node::start().await;
    let tenant = FIRST_PARTITION;
    table(&node, tenant).await;
    let blocker = Blocker::start(&node, tenant).await;
    let mut queued = Vec::new();
    for number in 0..QUEUED {
        let sql = if number % 2 == 0 { INSERT } else { SELECT };
        queued.push(Queued::start(&node, tenant, sql).await);
    }
    queued.iter().for_each(|queued| queued.canceller.cancel(CancelReason::Timeout));
    // Another tenant gets a thread, and a small statement needs none.
    let mut neighbour = node.client(tenant + 1);
    let parameters = [large()];
    let length = neighbour.with(SELECT, &parameters);
    assert_eq!(
        with_timeout("a neighbour", length).await.unwrap().0[0][0],
        Value::Integer(LARGE_BYTES as i64)
    );
    let mut small = node.client(tenant);
    assert_eq!(with_timeout("a small statement", small.int("SELECT count(*) FROM t")).await, 0);
    blocker.end().await;
    for queued in queued {
        queued.assert_cancelled_without_running().await;
    }
    small.close().await;
    neighbour.close().await;
}

/// The statement is dropped, as at the shutdown of a runtime.
#[tokio::test(flavor = "multi_thread")]
async fn statement_dropped_in_the_queue_does_not_run() {
    let node = Node::start().await;
    let tenant = FIRST_PARTITION + 2;
    table(&node, tenant).await;
    let blocker = Blocker::start(&node, tenant).await;
    let queued = Queued::start(&node, tenant, INSERT).await;
    queued.statement.abort();
    assert!(with_timeout("the queued statement is dropped", queued.statement).await.is_err());
    blocker.end().await;
    let mut client = node.client(tenant);
    client.run("INSERT INTO t VALUES ('next')").await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, 1, "the dropped statement must not commit");
    client.close().await;
}

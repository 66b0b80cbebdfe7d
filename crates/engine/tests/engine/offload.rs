//! Statements in the queue of the offload pool, because another one of their tenant has a thread: one that is cancelled there is not
//! run.
//!
//! A statement with a large parameter leaves its worker. Here the first one stays in a call that cannot be interrupted, which is a
//! sink that blocks its thread until the test releases it, so no result depends on time.

use std::sync::mpsc;

use crate::common::{Client, Node, Rows, until, within};
use fulmar_engine::{CancelReason, Canceller, Result, Row, RowSink, Scope, Value, sqlstate};
use tokio::task::JoinHandle;

/// Partitions that no other test of this program uses: the pool is the process's.
const FIRST_PARTITION: u64 = 7_001;
/// More than a worker handles.
const LARGE_BYTES: usize = 100 << 10;
/// Statements in the queue of one tenant.
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
        // An error means that the test has ended.
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
        within("the statement occupies a thread", is_running).await.unwrap();
        Blocker { release, statement }
    }

    async fn end(self) {
        self.release.send(()).unwrap();
        within("the statement ends", self.statement).await.unwrap().close().await;
    }
}

async fn execute(client: &mut Client, sql: &str, sink: &mut dyn RowSink) -> Result<()> {
    let (statement, _) = client.session.prepare(sql).await?;
    client.session.execute(&statement, &[large()], Scope::Auto, sink).await.map(drop)
}

/// A statement in the queue of the pool; answers its session, its result and its rows.
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
        until("the statement leaves its worker", async || canceller.is_offloaded()).await;
        Queued { canceller, statement }
    }

    /// Its session can be used afterwards.
    async fn was_cancelled_without_running(self) {
        let (mut client, result, rows) = within("the statement ends", self.statement).await.unwrap();
        let error = result.expect_err("a cancelled statement must not succeed");
        assert_eq!(error.state(), sqlstate::QUERY_CANCELED, "{error}");
        assert!(error.message().contains("statement timeout"), "it names the reason: {error}");
        assert!(rows.0.is_empty(), "it was cancelled before it had a thread, and has run all the same");
        assert_eq!(client.int("SELECT count(*) FROM t").await, 0, "it must have written nothing");
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
async fn a_statement_cancelled_while_its_tenant_has_a_thread_is_not_run() {
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
    // Another tenant has a thread, and a small statement needs none.
    let mut neighbour = node.client(tenant + 1);
    let parameters = [large()];
    let length = neighbour.with(SELECT, &parameters);
    assert_eq!(within("a neighbour", length).await.unwrap().0[0][0], Value::Integer(LARGE_BYTES as i64));
    let mut small = node.client(tenant);
    assert_eq!(within("a small statement", small.int("SELECT count(*) FROM t")).await, 0);
    blocker.end().await;
    for queued in queued {
        queued.was_cancelled_without_running().await;
    }
    small.close().await;
    neighbour.close().await;
}

/// As at the end of a runtime.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_dropped_in_the_queue_is_taken_back() {
    let node = Node::start().await;
    let tenant = FIRST_PARTITION + 2;
    table(&node, tenant).await;
    let blocker = Blocker::start(&node, tenant).await;
    let queued = Queued::start(&node, tenant, INSERT).await;
    queued.statement.abort();
    assert!(within("it is dropped while the thread is taken", queued.statement).await.is_err());
    blocker.end().await;
    let mut client = node.client(tenant);
    client.run("INSERT INTO t VALUES ('next')").await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, 1, "the dropped statement must not commit");
    client.close().await;
}

//! The anomalies that weaker isolation levels permit, each with its interleaving.
//!
//! A conflict can be reported by any statement of the later transaction, or by its COMMIT. The
//! tests require that not all of the transactions commit, or that one was replayed and has seen the
//! other.

use fulmar_engine::{Result, Row, RowSink, Scope, TransactionStatus, Value, sqlstate};
use fulmar_pages::PartitionId;
use tokio::runtime::Handle;

use crate::common::{Client, Node, Rows, with_timeout};

/// Runs the rest of a transaction. Returns true if it committed. The only permitted error is 40001.
async fn committed(client: &mut Client, rest: &str) -> bool {
    let result = client.run(&format!("{rest}; COMMIT")).await;
    if let Err(error) = &result {
        assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "{rest}: {error}");
        client.run("ROLLBACK").await.unwrap();
    }
    assert_eq!(client.session.status(), TransactionStatus::Idle);
    result.is_ok()
}

async fn two_accounts(node: &Node) {
    let mut client = node.client(1);
    client.run("CREATE TABLE accounts(id INTEGER PRIMARY KEY, n INTEGER)").await.unwrap();
    client.run("INSERT INTO accounts VALUES (1, 0), (2, 0)").await.unwrap();
}

#[tokio::test]
async fn lost_update_is_prevented() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    for client in [&mut a, &mut b] {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int("SELECT n FROM accounts WHERE id = 1").await, 0);
    }
    assert!(committed(&mut a, "UPDATE accounts SET n = 1 WHERE id = 1").await);
    assert!(!committed(&mut b, "UPDATE accounts SET n = 1 WHERE id = 1").await);
    // The retry takes the write turn first, so it succeeds regardless of concurrent transactions.
    b.run("BEGIN").await.unwrap();
    assert_eq!(b.int("SELECT n FROM accounts WHERE id = 1").await, 1);
    assert!(committed(&mut b, "UPDATE accounts SET n = 2 WHERE id = 1").await);
    assert_eq!(a.int("SELECT n FROM accounts WHERE id = 1").await, 2);
}

#[tokio::test]
async fn write_skew_on_one_page_is_prevented() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE doctors(name TEXT PRIMARY KEY, on_call INTEGER) WITHOUT ROWID").await.unwrap();
    a.run("INSERT INTO doctors VALUES ('alice', 1), ('bob', 1)").await.unwrap();
    for client in [&mut a, &mut b] {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int("SELECT count(*) FROM doctors WHERE on_call").await, 2);
    }
    let one = committed(&mut a, "UPDATE doctors SET on_call = 0 WHERE name = 'alice'").await;
    let other = committed(&mut b, "UPDATE doctors SET on_call = 0 WHERE name = 'bob'").await;
    assert!(one && !other);
    assert_eq!(a.int("SELECT count(*) FROM doctors WHERE on_call").await, 1);
}

/// Write skew with two rows on distant pages, and no page written by both transactions.
#[tokio::test]
async fn write_skew_across_pages_is_prevented() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE wide(id INTEGER PRIMARY KEY, n INTEGER, pad TEXT)").await.unwrap();
    let numbers = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 20)";
    a.run(&format!("INSERT INTO wide {numbers} SELECT n, 1, hex(zeroblob(1500)) FROM i")).await.unwrap();
    a.run("BEGIN; SELECT n FROM wide WHERE id = 1").await.unwrap();
    b.run("BEGIN; SELECT n FROM wide WHERE id = 20").await.unwrap();
    let one = committed(&mut a, "UPDATE wide SET n = 0 WHERE id = 20").await;
    let other = committed(&mut b, "UPDATE wide SET n = 0 WHERE id = 1").await;
    assert!(one && !other);
}

#[tokio::test]
async fn phantoms_in_a_range_are_prevented() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE bookings(id INTEGER PRIMARY KEY, room INTEGER, hour INTEGER)").await.unwrap();
    a.run("CREATE INDEX by_room ON bookings(room, hour)").await.unwrap();
    // An empty table, and a range at the end of an index with several pages.
    for filled in [false, true] {
        for client in [&mut a, &mut b] {
            client.run("BEGIN").await.unwrap();
            let sql = "SELECT count(*) FROM bookings WHERE room = 1000 AND hour BETWEEN 9 AND 11";
            assert_eq!(client.int(sql).await, 0, "filled: {filled}");
        }
        let book = "INSERT INTO bookings(room, hour) VALUES (1000, 10)";
        let (one, other) = (committed(&mut a, book).await, committed(&mut b, book).await);
        assert!(one && !other, "filled: {filled}");
        assert_eq!(a.int("SELECT count(*) FROM bookings WHERE room = 1000").await, 1);
        let numbers = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 3000)";
        a.run("DELETE FROM bookings").await.unwrap();
        a.run(&format!("INSERT INTO bookings(room, hour) {numbers} SELECT n % 900, n FROM i")).await.unwrap();
    }
}

/// A transaction sees the same sum until it ends, whatever is inserted meanwhile.
#[tokio::test]
async fn reader_sees_one_snapshot() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("BEGIN").await.unwrap();
    assert_eq!(a.int("SELECT n FROM accounts WHERE id = 1").await, 0);
    b.run("BEGIN; UPDATE accounts SET n = n - 5 WHERE id = 1; UPDATE accounts SET n = n + 5 WHERE id = 2; COMMIT").await.unwrap();
    b.run("INSERT INTO accounts VALUES (3, 7)").await.unwrap();
    assert_eq!(a.int("SELECT n FROM accounts WHERE id = 2").await, 0);
    assert_eq!(a.int("SELECT count(*) FROM accounts").await, 2);
    assert!(committed(&mut a, "SELECT 1").await);
    assert_eq!(a.int("SELECT sum(n) FROM accounts").await, 7);
}

/// The read-only transaction anomaly (Fekete, O'Neil, O'Neil): a withdrawal reads before a deposit
/// commits, and a report in between sees the deposit but not the withdrawal. Any two of them are
/// serializable; all three are not, unless the withdrawal is rejected.
#[tokio::test]
async fn read_only_transaction_anomaly_is_prevented() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut withdrawal, mut deposit, mut report) = (node.client(1), node.client(1), node.client(1));
    withdrawal.run("BEGIN").await.unwrap();
    assert_eq!(withdrawal.int("SELECT sum(n) FROM accounts").await, 0);
    assert!(committed(&mut deposit, "BEGIN; UPDATE accounts SET n = n + 20 WHERE id = 2").await);
    report.run("BEGIN").await.unwrap();
    let balances = report.run("SELECT n FROM accounts ORDER BY id").await.unwrap();
    assert_eq!(balances, [[Value::Integer(0)], [Value::Integer(20)]]);
    assert!(committed(&mut report, "SELECT 1").await);
    // It has read a sum of 0, so the overdraft costs a fee of 1. After the deposit there would be
    // no fee.
    assert!(!committed(&mut withdrawal, "UPDATE accounts SET n = n - 10 - 1 WHERE id = 1").await);
    assert_eq!(report.int("SELECT sum(n) FROM accounts").await, 20);
}

/// Three transactions, each of which reads the table that the next one writes.
#[tokio::test]
async fn cycle_of_three_transactions_is_prevented() {
    let node = Node::start().await;
    let mut clients = [node.client(1), node.client(1), node.client(1)];
    for table in 0..3 {
        clients[0]
            .run(&format!("CREATE TABLE t{table}(n INTEGER); INSERT INTO t{table} VALUES (0)"))
            .await
            .unwrap();
    }
    for (i, client) in clients.iter_mut().enumerate() {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int(&format!("SELECT n FROM t{i}")).await, 0);
    }
    let mut commits = 0;
    for (i, client) in clients.iter_mut().enumerate() {
        let next = (i + 1) % 3;
        commits += u32::from(committed(client, &format!("UPDATE t{next} SET n = 1")).await);
    }
    assert_eq!(commits, 2);
}

/// A lookup without a result is also a read.
#[tokio::test]
async fn lookup_of_a_missing_table_is_a_read() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(n INTEGER)").await.unwrap();
    a.run("BEGIN").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM sqlite_schema WHERE name = 'u'").await, 0);
    b.run("CREATE TABLE u(n INTEGER)").await.unwrap();
    assert!(!committed(&mut a, "INSERT INTO t VALUES (1)").await);
}

/// Different rows on one page: the later transaction is replayed transparently.
#[tokio::test]
async fn updates_of_different_rows_on_one_page_both_commit() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    for (client, id) in [(&mut a, 1), (&mut b, 2)] {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int(&format!("SELECT n FROM accounts WHERE id = {id}")).await, 0);
    }
    assert!(committed(&mut a, "UPDATE accounts SET n = 1 WHERE id = 1").await);
    let replays = node.engine.statistics().replays;
    assert!(committed(&mut b, "UPDATE accounts SET n = 2 WHERE id = 2").await);
    assert!(node.engine.statistics().replays > replays);
    assert_eq!(a.int("SELECT sum(n) FROM accounts").await, 3);
}

/// A sink that runs a function before it takes the first row.
struct InterruptingSink<F> {
    first: Option<F>,
    rows: Rows,
}

impl<F: FnOnce() + Send> RowSink for InterruptingSink<F> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if let Some(first) = self.first.take() {
            first();
        }
        self.rows.row(row)
    }

    fn reset(&mut self) {
        self.rows.reset();
    }
}

/// An autocommitted statement that conflicts is replayed with the write turn, transparently, and
/// counted like other replays.
#[tokio::test(flavor = "multi_thread")]
async fn conflicting_autocommit_statement_is_replayed_and_counted() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    let counts = || {
        let counted = node.engine.partition_statistics(PartitionId(1)).unwrap();
        [counted.conflicts, counted.replays, counted.turns]
    };
    let before = counts();
    let runtime = Handle::current();
    let overtake = || {
        // Runs on another thread, because this one is executing a statement.
        std::thread::scope(|scope| {
            let update = || runtime.block_on(b.run("UPDATE accounts SET n = 5 WHERE id = 2"));
            scope.spawn(update).join().unwrap().unwrap();
        });
    };
    let mut sink = InterruptingSink { first: Some(overtake), rows: Rows::default() };
    let sql = "UPDATE accounts SET n = (SELECT sum(n) + 1 FROM accounts) WHERE id = 1 RETURNING n";
    let (update, _) = a.session.prepare(sql).await.unwrap();
    a.session.execute(&update, &[], Scope::Auto, &mut sink).await.unwrap();
    assert_eq!(sink.rows.0, [[Value::Integer(6)]]);
    assert_eq!(counts(), before.map(|count| count + 1));
    // Without a concurrent transaction, nothing is counted.
    assert_eq!(a.int(sql).await, 12);
    assert_eq!(counts(), before.map(|count| count + 1));
}

/// One transaction holds a row lock and needs the write turn to commit; the other one holds the
/// turn and needs the row.
#[tokio::test]
async fn write_turn_and_row_lock_do_not_deadlock() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut row, mut turn) = (node.client(1), node.client(1));
    row.run("BEGIN; SELECT n FROM accounts WHERE id = 1 FOR UPDATE").await.unwrap();
    turn.run("BEGIN IMMEDIATE; SELECT 1").await.unwrap();
    let waiting = tokio::spawn(async move {
        turn.run("SELECT n FROM accounts WHERE id = 1 FOR UPDATE").await.unwrap();
        committed(&mut turn, "UPDATE accounts SET n = n + 1 WHERE id = 1").await
    });
    tokio::task::yield_now().await;
    let both = async {
        (committed(&mut row, "UPDATE accounts SET n = n + 1 WHERE id = 1").await, waiting.await.unwrap())
    };
    assert_eq!(with_timeout("turn and row are released", both).await, (true, true));
    assert_eq!(row.int("SELECT n FROM accounts WHERE id = 1").await, 2);
}

/// The same with a lock of all rows by the holder of one row lock.
#[tokio::test]
async fn for_update_of_one_row_and_of_many_do_not_deadlock() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut one, mut many) = (node.client(1), node.client(1));
    one.run("BEGIN; SELECT n FROM accounts WHERE id = 1 FOR UPDATE").await.unwrap();
    many.run("BEGIN; SELECT n FROM accounts WHERE id > 0 FOR UPDATE").await.unwrap();
    let waiting =
        tokio::spawn(async move { committed(&mut many, "UPDATE accounts SET n = n + 1 WHERE id = 1").await });
    tokio::task::yield_now().await;
    let both = async {
        let sum = one.run("SELECT sum(n) FROM accounts WHERE id > 0 FOR UPDATE").await;
        (
            sum.is_ok(),
            committed(&mut one, "UPDATE accounts SET n = n + 1 WHERE id = 1").await,
            waiting.await.unwrap(),
        )
    };
    let (read, first, second) = with_timeout("the rows are released", both).await;
    assert!(read && (first || second));
    let sum = i64::from(first) + i64::from(second);
    assert_eq!(one.int("SELECT n FROM accounts WHERE id = 1").await, sum);
}

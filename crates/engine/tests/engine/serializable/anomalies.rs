//! The anomalies that weaker levels of isolation let through, each with its interleaving written out.
//!
//! A conflict may show at any statement of the later transaction, or at its COMMIT; what counts is that not all of the
//! transactions commit, or that one was replayed and has seen the other.

use fulmar_engine::{Result, Row, RowSink, Scope, TransactionStatus, Value, sqlstate};
use fulmar_pages::PartitionId;
use tokio::runtime::Handle;

use crate::common::{Client, Node, Rows, within};

/// Runs the rest of a transaction. Answers whether it committed; the only error that may come is 40001.
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
async fn an_update_of_what_was_read_is_not_lost() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    for client in [&mut a, &mut b] {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int("SELECT n FROM accounts WHERE id = 1").await, 0);
    }
    assert!(committed(&mut a, "UPDATE accounts SET n = 1 WHERE id = 1").await);
    assert!(!committed(&mut b, "UPDATE accounts SET n = 1 WHERE id = 1").await);
    // The next try takes its turn first, and succeeds whatever others do.
    b.run("BEGIN").await.unwrap();
    assert_eq!(b.int("SELECT n FROM accounts WHERE id = 1").await, 1);
    assert!(committed(&mut b, "UPDATE accounts SET n = 2 WHERE id = 1").await);
    assert_eq!(a.int("SELECT n FROM accounts WHERE id = 1").await, 2);
}

#[tokio::test]
async fn doctors_do_not_both_leave() {
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

/// Write skew where the two rows lie on pages far apart, and no page is written by both.
#[tokio::test]
async fn write_skew_across_pages_is_refused() {
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
async fn a_range_that_was_counted_gets_no_phantoms() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE bookings(id INTEGER PRIMARY KEY, room INTEGER, hour INTEGER)").await.unwrap();
    a.run("CREATE INDEX by_room ON bookings(room, hour)").await.unwrap();
    // An empty range, and one at the end of an index that has pages of its own.
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

/// A sum that was read stays the sum until the transaction ends, whatever is inserted meanwhile.
#[tokio::test]
async fn a_reader_sees_one_snapshot() {
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

/// Fekete, O'Neil, O'Neil: a withdrawal that read before a deposit, and a report between them that saw the deposit and not
/// the withdrawal. Each pair alone is serializable; the three are not, unless the withdrawal is refused.
#[tokio::test]
async fn a_report_does_not_tell_of_an_order_that_never_was() {
    let node = Node::start().await;
    two_accounts(&node).await;
    let (mut withdrawal, mut deposit, mut report) = (node.client(1), node.client(1), node.client(1));
    withdrawal.run("BEGIN").await.unwrap();
    assert_eq!(withdrawal.int("SELECT sum(n) FROM accounts").await, 0);
    assert!(committed(&mut deposit, "BEGIN; UPDATE accounts SET n = n + 20 WHERE id = 2").await);
    report.run("BEGIN").await.unwrap();
    let told = report.run("SELECT n FROM accounts ORDER BY id").await.unwrap();
    assert_eq!(told, [[Value::Integer(0)], [Value::Integer(20)]]);
    assert!(committed(&mut report, "SELECT 1").await);
    // It saw a sum of 0, so the overdraft costs a fee of 1; after the deposit it would not.
    assert!(!committed(&mut withdrawal, "UPDATE accounts SET n = n - 10 - 1 WHERE id = 1").await);
    assert_eq!(report.int("SELECT sum(n) FROM accounts").await, 20);
}

/// Three transactions, each reads what the next one writes.
#[tokio::test]
async fn a_ring_of_three_is_broken() {
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

/// What a statement did not find is as much a read as what it found.
#[tokio::test]
async fn a_missing_table_that_was_asked_for_is_a_read() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(n INTEGER)").await.unwrap();
    a.run("BEGIN").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM sqlite_schema WHERE name = 'u'").await, 0);
    b.run("CREATE TABLE u(n INTEGER)").await.unwrap();
    assert!(!committed(&mut a, "INSERT INTO t VALUES (1)").await);
}

/// Rows that differ, on one page: the later transaction is replayed, and its client sees no difference.
#[tokio::test]
async fn neighbours_on_a_page_do_not_disturb_each_other() {
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

/// Takes rows, and does something before it takes the first one.
struct Meanwhile<F> {
    first: Option<F>,
    rows: Rows,
}

impl<F: FnOnce() + Send> RowSink for Meanwhile<F> {
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

/// A lone statement that is overtaken before it has committed is run again in a turn, unseen, and counted as any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_lone_statement_that_is_overtaken_is_run_again_and_counted() {
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
        // Another thread: this one is in the middle of a statement.
        std::thread::scope(|scope| {
            let update = || runtime.block_on(b.run("UPDATE accounts SET n = 5 WHERE id = 2"));
            scope.spawn(update).join().unwrap().unwrap();
        });
    };
    let mut sink = Meanwhile { first: Some(overtake), rows: Rows::default() };
    let sql = "UPDATE accounts SET n = (SELECT sum(n) + 1 FROM accounts) WHERE id = 1 RETURNING n";
    let (update, _) = a.session.prepare(sql).await.unwrap();
    a.session.execute(&update, &[], Scope::Auto, &mut sink).await.unwrap();
    assert_eq!(sink.rows.0, [[Value::Integer(6)]]);
    assert_eq!(counts(), before.map(|count| count + 1));
    // The same beside nobody counts nothing.
    assert_eq!(a.int(sql).await, 12);
    assert_eq!(counts(), before.map(|count| count + 1));
}

/// One holds a row and wants its turn to commit; the other holds the turn and wants the row.
#[tokio::test]
async fn a_turn_and_a_row_do_not_wait_for_each_other() {
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
    assert_eq!(within("turn and row are released", both).await, (true, true));
    assert_eq!(row.int("SELECT n FROM accounts WHERE id = 1").await, 2);
}

/// The same with a whole table asked for by the one who holds a row.
#[tokio::test]
async fn for_update_of_many_rows_and_of_one_do_not_wait_for_each_other() {
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
    let (read, first, second) = within("the rows are released", both).await;
    assert!(read && (first || second));
    let sum = i64::from(first) + i64::from(second);
    assert_eq!(one.int("SELECT n FROM accounts WHERE id = 1").await, sum);
}

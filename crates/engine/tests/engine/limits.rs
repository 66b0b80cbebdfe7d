//! Resource limits of transactions: a statement that exceeds a limit is rejected and rolled back,
//! and the session continues.

use crate::common::{Client, Node, wait_until};
use fulmar_engine::{Config, Engine, MAX_STATEMENT_BYTES, TransactionLimits, Value, sqlstate};

const TABLE: &str = "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)";

fn rows(count: u32) -> String {
    format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) \
         SELECT i, randomblob(3000) FROM n"
    )
}

fn holding(megabytes: u64) -> TransactionLimits {
    TransactionLimits { held_bytes: megabytes << 20, ..TransactionLimits::default() }
}

fn sized(megabytes: u64) -> TransactionLimits {
    TransactionLimits { database_bytes: megabytes << 20, ..TransactionLimits::default() }
}

async fn is_intact(client: &mut Client) -> bool {
    client.value("PRAGMA integrity_check").await == Value::Text("ok".into())
}

#[tokio::test]
async fn statement_above_transaction_memory_is_rolled_back() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.run(&format!("INSERT INTO t {}", rows(3000))).await.unwrap();
    a.session.set_limits(holding(4));
    // Changed pages (which move from SQLite's cache to the overlay), the journal, a sort, a
    // temporary table.
    for large in [
        "UPDATE t SET v = randomblob(3000)".to_owned(),
        format!("INSERT INTO t SELECT id + 10000, v FROM ({}) JOIN t USING (id)", "SELECT id FROM t"),
        "SELECT id FROM t ORDER BY hex(v)".to_owned(),
        "CREATE TEMPORARY TABLE copy AS SELECT * FROM t".to_owned(),
    ] {
        let error = a.run(&large).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::CONFIGURATION_LIMIT, "{large}: {error}");
        assert!(error.message().contains("transaction_memory of 4096kB"), "{error}");
        assert_eq!(a.int("SELECT count(*) FROM t").await, 3000, "{large}");
        a.run("UPDATE t SET v = randomblob(3000) WHERE id < 100").await.unwrap();
    }
    // Nothing of the failed statements is charged to later ones.
    for _ in 0..10 {
        a.run("UPDATE t SET v = randomblob(3000) WHERE id < 300").await.unwrap();
    }
    assert!(is_intact(&mut a).await);
    a.session.set_limits(TransactionLimits::default());
    a.run("UPDATE t SET v = randomblob(3000)").await.unwrap();
    a.close().await;
}

#[tokio::test]
async fn transaction_above_transaction_memory_fails() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.run(&format!("INSERT INTO t {}", rows(3000))).await.unwrap();
    a.session.set_limits(holding(4));
    a.run("BEGIN; INSERT INTO t VALUES (-1, 'kept'); SAVEPOINT s").await.unwrap();
    assert_eq!(a.state("UPDATE t SET v = randomblob(3000)").await, sqlstate::CONFIGURATION_LIMIT);
    assert_eq!(a.state("SELECT 1").await, sqlstate::IN_FAILED_TRANSACTION);
    // Changes before the savepoint are kept.
    a.run("ROLLBACK TO s; INSERT INTO t VALUES (-2, 'kept'); COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t WHERE v = 'kept'").await, 2);

    // A COMMIT can exceed the limit too, because SQLite caches the changed pages until then.
    a.run("BEGIN; UPDATE t SET v = randomblob(3000) WHERE id BETWEEN 1 AND 300").await.unwrap();
    a.session.set_limits(holding(1));
    assert_eq!(a.state("COMMIT").await, sqlstate::CONFIGURATION_LIMIT);
    a.run("INSERT INTO t VALUES (-3, 'kept')").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 3003);
    assert!(is_intact(&mut a).await);
    a.close().await;
}

#[tokio::test]
async fn database_does_not_grow_beyond_max_size() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.session.set_limits(sized(2));
    assert_eq!(a.state(&format!("INSERT INTO t {}", rows(1000))).await, sqlstate::DISK_FULL);
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    a.run(&format!("INSERT INTO t {}", rows(400))).await.unwrap();
    let error = a.run(&format!("INSERT INTO t SELECT id + 1000, v FROM ({})", "SELECT * FROM t")).await;
    let error = error.unwrap_err();
    assert_eq!(error.state(), sqlstate::DISK_FULL);
    assert!(error.message().contains("max_size of 2048kB"), "{error}");

    // The limit is lowered below the current size. The database can be read, changed and shrunk,
    // and its free pages can be used.
    a.session.set_limits(sized(1));
    let pages = a.int("PRAGMA page_count").await;
    a.run("UPDATE t SET v = randomblob(3000)").await.unwrap();
    a.run("DELETE FROM t WHERE id > 300").await.unwrap();
    a.run("INSERT INTO t SELECT id + 1000, v FROM t WHERE id <= 80").await.unwrap();
    assert_eq!(a.int("PRAGMA page_count").await, pages);
    assert_eq!(a.state("INSERT INTO t SELECT id + 2000, v FROM t").await, sqlstate::DISK_FULL);
    a.run("DELETE FROM t WHERE id > 100; VACUUM").await.unwrap();
    assert!(a.int("PRAGMA page_count").await < 256);
    a.run("INSERT INTO t SELECT id + 2000, v FROM t").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 200);
    assert!(is_intact(&mut a).await);
    a.close().await;
}

/// Pages that are allocated and freed at the end of the file are never written, but count as
/// growth.
#[tokio::test]
async fn growth_by_unwritten_pages_counts() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.session.set_limits(sized(1));
    let grown = a.state(&format!("BEGIN; INSERT INTO t {}; DELETE FROM t; COMMIT", rows(400))).await;
    assert_eq!(grown, sqlstate::DISK_FULL);
    a.run("ROLLBACK").await.unwrap();
    assert_eq!(a.int("PRAGMA page_count").await, 2);
    a.close().await;
}

/// The limit was lowered after the statements ran. Their replay fails with the error of that limit.
#[tokio::test]
async fn replay_above_transaction_memory_reports_the_limit() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.run(&format!("INSERT INTO t {}", rows(1000))).await.unwrap();
    a.run("BEGIN; UPDATE t SET v = randomblob(3000)").await.unwrap();
    a.session.release_snapshot().await.unwrap();
    a.session.set_limits(holding(1));
    assert_eq!(a.state("COMMIT").await, sqlstate::CONFIGURATION_LIMIT);
    a.run("INSERT INTO t VALUES (-1, 'kept')").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 1001);
    assert!(is_intact(&mut a).await);
    a.close().await;
}

/// A statement with `count` values of 20 MB in memory.
fn values(count: u32) -> String {
    let values: Vec<_> = (0..count).map(|more| format!("hex(zeroblob({}))", 10_000_000 + more)).collect();
    format!("SELECT length(max({}))", values.join(", "))
}

#[tokio::test]
async fn statement_text_is_limited() {
    let node = Node::with(|config| config.max_statement_bytes = MAX_STATEMENT_BYTES).await;
    let mut a = node.client(1);
    let long = "x".repeat(2 << 20);
    a.run(&format!("CREATE VIEW v AS SELECT length('{long}') AS n")).await.unwrap();
    assert_eq!(a.int("SELECT n FROM v").await, 2 << 20);
    a.close().await;
    // The default limit of 1 MiB does not apply to texts in the schema.
    let node = node.restart().await;
    let mut a = node.client(1);
    assert_eq!(a.int("SELECT n FROM v").await, 2 << 20);
    let error = a.run(&format!("SELECT length('{long}')")).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::PROGRAM_LIMIT);
    assert!(error.message().contains("1048576 bytes"), "{error}");
    assert_eq!(a.int(&format!("SELECT length('{}')", &long[..1_000_000])).await, 1_000_000);
    a.close().await;
}

#[tokio::test]
async fn statement_above_the_memory_budget_is_rejected() {
    let node = Node::with(|config| config.max_statement_bytes = MAX_STATEMENT_BYTES).await;
    let (mut a, mut other) = (node.client(1), node.client(2));
    a.run(TABLE).await.unwrap();
    assert_eq!(a.int(&values(1)).await, 20_000_000);
    for round in 0..2 {
        let error = a.run(&values(30)).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY, "{error}");
        // Many small allocations: five million expressions.
        let list = format!("SELECT 1 IN ({}1)", "1,".repeat(5_000_000));
        let error = a.run(&list).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY, "{error}");
        // All of it is freed, so smaller statements succeed.
        assert_eq!(a.int(&values(1)).await, 20_000_000);
        a.run(&format!("INSERT INTO t VALUES ({round}, zeroblob(1000))")).await.unwrap();
        assert_eq!(other.int(&values(1)).await, 20_000_000);
    }
    // Inside a transaction, the error fails the transaction, which can continue from a savepoint.
    a.run("BEGIN").await.unwrap();
    a.run("INSERT INTO t VALUES (10, 'a')").await.unwrap();
    a.run("SAVEPOINT s").await.unwrap();
    let update = format!("UPDATE t SET v = ({})", values(30));
    assert_eq!(a.run(&update).await.unwrap_err().state(), sqlstate::OUT_OF_MEMORY);
    a.run("ROLLBACK TO s").await.unwrap();
    a.run("INSERT INTO t VALUES (11, 'b')").await.unwrap();
    a.run("COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t WHERE length(v) IN (1, 1000)").await, 4);
    assert!(is_intact(&mut a).await);
    a.close().await;
    other.close().await;
}

/// A node with the smallest useful memory budget: all statements together may use 96 MiB.
async fn small_node() -> Node {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 256 << 20)).await.unwrap();
    Node { engine, directory }
}

#[tokio::test]
async fn value_size_is_limited_by_memory_and_by_setting() {
    let node = small_node().await;
    let mut a = node.client(1);
    assert_eq!(a.int("SELECT length(hex(zeroblob(6000000)))").await, 12_000_000);
    let error = a.run("SELECT length(hex(zeroblob(7000000)))").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::PROGRAM_LIMIT);
    assert!(error.get_hint().unwrap().contains("up to 12288 kB"), "{error}");
    assert_eq!(a.state("SELECT randomblob(14000000)").await, sqlstate::PROGRAM_LIMIT);
    let large = Value::Blob(vec![0; 13 << 20]);
    let error = a.with("SELECT length($1)", &[large]).await.unwrap_err();
    assert_eq!((error.state(), error.message()), (sqlstate::PROGRAM_LIMIT, "parameter $1 is too large"));

    a.session.set_limits(TransactionLimits { value_bytes: 1 << 20, ..TransactionLimits::default() });
    assert_eq!(a.state("SELECT zeroblob(2000000)").await, sqlstate::PROGRAM_LIMIT);
    a.run("BEGIN; SELECT zeroblob(1000000)").await.unwrap();
    a.session.set_limits(TransactionLimits::default());
    a.run("SELECT zeroblob(2000000); COMMIT").await.unwrap();
    a.session.set_limits(TransactionLimits {
        pattern_bytes: 5,
        parameters: 1,
        ..TransactionLimits::default()
    });
    assert_eq!(a.int("SELECT 'abc' LIKE '%abc%'").await, 1);
    assert_eq!(a.state("SELECT 'abc' LIKE '%aabbc%'").await, sqlstate::PROGRAM_LIMIT);
    assert_eq!(a.state("SELECT $1, $2").await, sqlstate::PROGRAM_LIMIT);
    a.close().await;
}

/// Open transactions are charged for their changed pages, the pages that they have read, and their
/// connection.
#[tokio::test]
async fn open_transactions_stay_within_the_statement_memory() {
    let node = small_node().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    let limit = node.engine.statistics().statement_limit_bytes;
    assert_eq!(limit, 96 << 20);
    let mut open = Vec::new();
    let refused = loop {
        let mut client = node.client(1);
        client.run("BEGIN").await.unwrap();
        let inserted = client.run("INSERT INTO t(v) VALUES (zeroblob(600000))").await;
        assert!(node.engine.statistics().statement_bytes <= limit);
        if let Err(error) = inserted {
            break error;
        }
        open.push(client);
        assert!(open.len() < 500, "a transaction must be rejected");
    };
    assert_eq!(refused.state(), sqlstate::OUT_OF_MEMORY, "{refused}");
    // Half of the node's statement memory is reserved for other tenants.
    let mut other = node.client(2);
    other.run(TABLE).await.unwrap();
    other.run("BEGIN; INSERT INTO t(v) VALUES (zeroblob(600000)); COMMIT").await.unwrap();
    for client in open {
        client.close().await;
    }
    a.run("INSERT INTO t(v) VALUES (zeroblob(600000))").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 1);
    assert!(is_intact(&mut a).await);
}

/// The texts of statements are charged too. A transaction of long statements keeps none of them,
/// and takes the write turn instead.
#[tokio::test]
async fn transaction_of_long_statements_does_not_keep_their_texts() {
    let node = small_node().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run(TABLE).await.unwrap();
    a.run("BEGIN").await.unwrap();
    let before = node.engine.statistics().statement_bytes;
    for number in 0..40 {
        let text = "x".repeat(400_000);
        a.run(&format!("INSERT INTO t VALUES ({number}, length('{text}'))")).await.unwrap();
        let held = node.engine.statistics().statement_bytes.saturating_sub(before);
        assert!(held < 8 << 20, "{held} bytes after {number} statements");
    }
    let mut commit = Box::pin(b.run("INSERT INTO t VALUES (100, 'b')"));
    assert!(futures::poll!(&mut commit).is_pending(), "a concurrent commit must wait for the write turn");
    a.run("COMMIT").await.unwrap();
    commit.await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 41);
    a.close().await;
}

/// Statement memory is released at the end of each statement.
#[tokio::test]
async fn statement_memory_is_released() {
    let node = small_node().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    for round in 0..30 {
        a.run(&format!("INSERT INTO t {}", rows(2000))).await.unwrap();
        a.run("BEGIN; UPDATE t SET v = randomblob(3000); SELECT count(*) FROM t; ROLLBACK").await.unwrap();
        a.run("SELECT id FROM t ORDER BY hex(v) DESC LIMIT 1").await.unwrap();
        a.run("DELETE FROM t").await.unwrap();
        assert_eq!(a.state(&values(10)).await, sqlstate::PROGRAM_LIMIT);
        let statistics = node.engine.statistics();
        assert!(statistics.statement_bytes < 8 << 20, "{} in round {round}", statistics.statement_bytes);
    }
    a.close().await;
    wait_until("the temporary files are closed", async || node.engine.statistics().temporary_bytes == 0)
        .await;
}

/// A procedure that catches an error of a limit is still subject to the limit.
#[tokio::test]
async fn procedure_that_catches_a_limit_error_is_still_limited() {
    /// Sorts 10 MB in temporary files. It reads no table, so SQLite rolls nothing back when it
    /// fails.
    const SORT: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) \
        SELECT count(*) FROM (SELECT hex(zeroblob(1000)) || i AS v FROM n GROUP BY v)";
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run(TABLE).await.unwrap();
    a.run(fulmar_engine::CREATE_PROCEDURES).await.unwrap();
    let grow = format!("INSERT INTO t {}", rows(1000));
    // The changes of the last one are in SQLite's cache until the commit.
    for (name, statements) in [
        ("grows", format!("refuse() db.exec([[{grow}]]) db.abort('not refused')")),
        ("grows_at_the_end", format!("db.exec([[{}]]) refuse()", grow.replace("1000", "500"))),
    ] {
        let source = format!(
            "local function refuse() local ok, e = pcall(db.query, [[{SORT}]]) \
             assert(not ok and string.find(tostring(e), 'transaction_memory'), tostring(e)) end {statements}"
        );
        let (parameters, returns) = (Vec::new(), Vec::new());
        let definition = fulmar_engine::Definition { name: name.into(), parameters, returns, source };
        let sql = "INSERT INTO fulmar_procedures VALUES ($1, $2, $3, $4)";
        a.with(sql, &definition.values()).await.unwrap();
    }
    let limits = TransactionLimits { held_bytes: 4 << 20, ..sized(1) };
    a.session.set_limits(limits);
    for call in ["CALL grows()", "CALL grows_at_the_end()"] {
        let error = a.run(call).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::DISK_FULL, "{call}: {error}");
        assert!(error.message().contains("max_size of 1024kB"), "{call}: {error}");
        assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    }
    // The same with a rollback to a savepoint.
    a.run(&format!("BEGIN; INSERT INTO t {}; SAVEPOINT s", rows(500))).await.unwrap();
    assert_eq!(a.state(SORT).await, sqlstate::CONFIGURATION_LIMIT);
    assert_eq!(a.state("ROLLBACK TO s; COMMIT").await, sqlstate::DISK_FULL);
    a.session.close().await;
}

//! SQL through sessions, as a client sees it.

use crate::common::Node;
use fulmar_engine::{CommandTag, Config, Error, Row, RowSink, Scope, TransactionStatus, Value, sqlstate};

#[tokio::test]
async fn data_survives_a_restart() {
    let node = Node::start().await;
    let mut a = node.client(7);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT)").await.unwrap();
    let (_, completion) = a
        .with("INSERT INTO t(name) VALUES ($1), ($2)", &[Value::Text("x".into()), Value::Null])
        .await
        .unwrap();
    assert_eq!(completion.tag, CommandTag::Insert(2));
    assert_eq!(a.int("SELECT count(*) FROM t").await, 2);
    assert_eq!(a.int("SELECT last_insert_rowid()").await, 2);
    assert_eq!(a.int("SELECT changes()").await, 2);
    let mut b = node.client(8);
    assert_eq!(b.state("SELECT * FROM t").await, sqlstate::UNDEFINED_TABLE);
    a.close().await;
    b.close().await;
    let node = node.restart().await;
    let mut a = node.client(7);
    assert_eq!(a.value("SELECT name FROM t WHERE id = 1").await, Value::Text("x".into()));
    a.run("UPDATE t SET name = 'y'").await.unwrap();
    a.close().await;
    let node = node.restart().await;
    let mut a = node.client(7);
    assert_eq!(a.int("SELECT count(*) FROM t WHERE name = 'y'").await, 2);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test]
async fn transactions_see_their_snapshot_and_their_own_changes() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER); INSERT INTO t VALUES (1, 0), (2, 0)")
        .await
        .unwrap();
    a.run("BEGIN; UPDATE t SET n = 5 WHERE id = 1").await.unwrap();
    assert_eq!(a.session.status(), TransactionStatus::InTransaction);
    assert_eq!(a.int("SELECT n FROM t WHERE id = 1").await, 5);
    assert_eq!(b.int("SELECT n FROM t WHERE id = 1").await, 0);
    b.run("UPDATE t SET n = 7 WHERE id = 2").await.unwrap();
    a.run("COMMIT").await.unwrap();
    assert_eq!(
        b.run("SELECT n FROM t ORDER BY id").await.unwrap(),
        [[Value::Integer(5)], [Value::Integer(7)]]
    );
}

#[tokio::test]
async fn blind_updates_of_one_row_are_replayed() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER); INSERT INTO t VALUES (1, 0)").await.unwrap();
    a.run("BEGIN; UPDATE t SET n = n + 1 WHERE id = 1").await.unwrap();
    b.run("BEGIN; UPDATE t SET n = n + 10 WHERE id = 1; COMMIT").await.unwrap();
    a.run("COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT n FROM t").await, 11);
}

#[tokio::test]
async fn write_skew_is_refused() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE d(id INTEGER PRIMARY KEY, on_call INTEGER); INSERT INTO d VALUES (1, 1), (2, 1)")
        .await
        .unwrap();
    for client in [&mut a, &mut b] {
        client.run("BEGIN").await.unwrap();
        assert_eq!(client.int("SELECT sum(on_call) FROM d").await, 2);
    }
    a.run("UPDATE d SET on_call = 0 WHERE id = 1; COMMIT").await.unwrap();
    let update = "UPDATE d SET on_call = 0 WHERE id = 2";
    assert_eq!(b.state(update).await, sqlstate::SERIALIZATION_FAILURE);
    b.run("ROLLBACK").await.unwrap();
    assert_eq!(b.session.status(), TransactionStatus::Idle);
    assert_eq!(b.int("SELECT sum(on_call) FROM d").await, 1);
}

#[tokio::test]
async fn transactions_that_grow_the_file_do_not_conflict() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(a TEXT); CREATE TABLE u(a TEXT)").await.unwrap();
    a.run("BEGIN; INSERT INTO t SELECT hex(zeroblob(3000)) FROM json_each('[1,2,3,4,5,6,7,8,9]')")
        .await
        .unwrap();
    b.run("BEGIN; INSERT INTO u SELECT hex(zeroblob(3000)) FROM json_each('[1,2,3,4,5,6,7,8,9]')")
        .await
        .unwrap();
    a.run("COMMIT").await.unwrap();
    b.run("COMMIT").await.unwrap();
    a.run("BEGIN; DELETE FROM t").await.unwrap();
    b.run("BEGIN; DELETE FROM u").await.unwrap();
    a.run("COMMIT").await.unwrap();
    b.run("COMMIT").await.unwrap();
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    assert_eq!(a.int("SELECT (SELECT count(*) FROM t) + (SELECT count(*) FROM u)").await, 0);
    a.run("VACUUM").await.unwrap();
    assert_eq!(a.int("PRAGMA page_count").await, 3);
}

#[tokio::test]
async fn error_fails_the_transaction_until_rollback_to_a_savepoint() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY)").await.unwrap();
    a.run("BEGIN; INSERT INTO t VALUES (1); SAVEPOINT s; INSERT INTO t VALUES (2)").await.unwrap();
    assert_eq!(a.state("INSERT INTO t VALUES (1)").await, sqlstate::UNIQUE_VIOLATION);
    assert_eq!(a.session.status(), TransactionStatus::Failed);
    assert_eq!(a.state("SELECT 1").await, sqlstate::IN_FAILED_TRANSACTION);
    a.run("ROLLBACK TO s").await.unwrap();
    a.run("INSERT INTO t VALUES (3); COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT sum(id) FROM t").await, 4);
    a.run("BEGIN; INSERT INTO t VALUES (9)").await.unwrap();
    assert_eq!(a.state("SELECT missing").await, sqlstate::UNDEFINED_COLUMN);
    assert_eq!(a.with("COMMIT", &[]).await.unwrap().1.tag, CommandTag::Plain("ROLLBACK"));
    assert_eq!(a.int("SELECT count(*) FROM t WHERE id = 9").await, 0);
    assert_eq!(a.with("ROLLBACK", &[]).await.unwrap().1.notices.len(), 1);
    assert_eq!(a.state("SAVEPOINT x").await, sqlstate::NO_ACTIVE_TRANSACTION);
    assert_eq!(a.state("BEGIN READ ONLY; INSERT INTO t VALUES (5)").await, sqlstate::READ_ONLY_TRANSACTION);
    a.run("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn select_for_update_waits_and_sees_the_committed_row() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER); INSERT INTO t VALUES (1, 0), (2, 0)")
        .await
        .unwrap();
    a.run("BEGIN").await.unwrap();
    assert_eq!(a.int("SELECT n FROM t WHERE id = 1 FOR UPDATE").await, 0);
    let waiting = tokio::spawn(async move {
        b.run("BEGIN; SELECT n FROM t WHERE id = 2").await.unwrap();
        let n = b.int("SELECT n FROM t WHERE id = 1 FOR UPDATE").await;
        b.run(&format!("UPDATE t SET n = {} WHERE id = 1; COMMIT", n + 1)).await.unwrap();
        b
    });
    a.run("UPDATE t SET n = 41 WHERE id = 1; COMMIT").await.unwrap();
    waiting.await.unwrap();
    assert_eq!(a.int("SELECT n FROM t WHERE id = 1").await, 42);
}

#[tokio::test]
async fn asking_for_an_outcome_decides_it() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(n INTEGER)").await.unwrap();
    a.run("BEGIN").await.unwrap();
    let id = a.int("SELECT pg_current_xact_id()").await;
    a.run("INSERT INTO t VALUES (1); COMMIT").await.unwrap();
    assert_eq!(b.value(&format!("SELECT pg_xact_status({id})")).await, Value::Text("committed".into()));
    a.run("BEGIN").await.unwrap();
    let undecided = a.int("SELECT pg_current_xact_id()").await;
    a.run("INSERT INTO t VALUES (2)").await.unwrap();
    assert_eq!(
        a.value(&format!("SELECT pg_xact_status({undecided})")).await,
        Value::Text("in progress".into())
    );
    assert_eq!(b.value(&format!("SELECT pg_xact_status({undecided})")).await, Value::Text("aborted".into()));
    assert!(a.run("COMMIT").await.is_err());
    assert_eq!(b.int("SELECT count(*) FROM t").await, 1);
    a.close().await;
    b.close().await;
    let node = node.restart().await;
    let mut b = node.client(1);
    assert_eq!(b.value(&format!("SELECT pg_xact_status({id})")).await, Value::Text("committed".into()));
    assert_eq!(b.value(&format!("SELECT pg_xact_status({undecided})")).await, Value::Text("aborted".into()));
    assert_eq!(
        b.state("SELECT pg_xact_status(9000000000000000000)").await,
        sqlstate::INVALID_PARAMETER_VALUE
    );
}

#[tokio::test]
async fn sqlite_features_work() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE VIRTUAL TABLE f USING fts5(body); INSERT INTO f VALUES ('the quick brown fox')")
        .await
        .unwrap();
    assert_eq!(a.int("SELECT count(*) FROM f WHERE f MATCH 'quick'").await, 1);
    a.run("CREATE VIRTUAL TABLE r USING rtree(id, x0, x1); INSERT INTO r VALUES (1, 0, 10)").await.unwrap();
    assert_eq!(a.int("SELECT id FROM r WHERE x0 < 5 AND x1 > 5").await, 1);
    assert_eq!(a.int("SELECT json_extract('{\"a\":[1,2]}', '$.a[1]')").await, 2);
    a.run("CREATE TABLE p(id INTEGER PRIMARY KEY); CREATE TABLE c(p INTEGER REFERENCES p(id))")
        .await
        .unwrap();
    assert_eq!(a.state("INSERT INTO c VALUES (1)").await, sqlstate::FOREIGN_KEY_VIOLATION);
    a.run("CREATE TABLE log(x); CREATE TRIGGER tr AFTER INSERT ON p BEGIN INSERT INTO log VALUES (new.id); INSERT INTO log VALUES (1); END; INSERT INTO p VALUES (5)").await.unwrap();
    assert_eq!(a.int("SELECT sum(x) FROM log").await, 6);
    a.run("CREATE VIEW v AS SELECT id * 2 AS d FROM p").await.unwrap();
    assert_eq!(a.int("SELECT d FROM v").await, 10);
    a.run("CREATE TEMP TABLE tt(x); INSERT INTO tt VALUES (3)").await.unwrap();
    assert_eq!(a.int("SELECT x FROM tt").await, 3);
    let mut b = node.client(1);
    assert_eq!(b.state("SELECT x FROM tt").await, sqlstate::UNDEFINED_TABLE);
    assert_eq!(a.state("SELECT x FROM").await, sqlstate::SYNTAX_ERROR);
    a.run("ALTER TABLE p ADD COLUMN extra TEXT DEFAULT 'e'; CREATE INDEX pi ON p(extra); ANALYZE; REINDEX; DROP TABLE c").await.unwrap();
    assert_eq!(b.value("SELECT extra FROM p").await, Value::Text("e".into()));
    let constraint = "ALTER TABLE p ADD CONSTRAINT positive CHECK (id > 0)";
    assert_eq!(a.session.prepare(constraint).await.unwrap().0.columns, [], "the statement returns no rows");
    a.run(constraint).await.unwrap();
    assert_eq!(a.state(constraint).await, sqlstate::DUPLICATE_OBJECT);
}

#[tokio::test]
async fn statements_outside_the_database_are_rejected() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(a)").await.unwrap();
    for attempt in [
        "ATTACH '/etc/passwd' AS x",
        "ATTACH '' AS x",
        "ATTACH ':memory:' AS x",
        "ATTACH 'file:x?mode=memory' AS x",
        "DETACH main",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd')",
        "SELECT writefile('/tmp/x', 'y')",
        "VACUUM INTO '/tmp/stolen'",
        "PRAGMA journal_mode=WAL",
        "PRAGMA synchronous=FULL",
        "PRAGMA locking_mode=EXCLUSIVE",
        "PRAGMA page_size=512",
        "PRAGMA auto_vacuum=1",
        "PRAGMA writable_schema=1",
        "PRAGMA temp_store_directory='/tmp'",
        "PRAGMA mmap_size=0",
        "PRAGMA cache_size=1000000",
        "PRAGMA hard_heap_limit=1",
        "PRAGMA wal_checkpoint",
        "PRAGMA foreign_keys=OFF",
        "PRAGMA encoding='UTF-16'",
        "PRAGMA trusted_schema=1",
        "PRAGMA query_only=1",
        "PRAGMA cell_size_check=1",
        "CREATE VIRTUAL TABLE x USING csv(filename='/etc/passwd')",
        "UPDATE sqlite_schema SET sql = ''",
        "SELECT fts3_tokenizer('simple', x'00')",
    ] {
        let state = a.state(attempt).await;
        assert_ne!(state, "00000", "{attempt}");
    }
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test]
async fn integrity_check_uses_current_full_text_indexes() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    a.run("CREATE VIRTUAL TABLE words USING fts5(body); INSERT INTO words VALUES ('here')").await.unwrap();
    for check in [
        "PRAGMA integrity_check",
        "PRAGMA main.quick_check",
        "BEGIN; PRAGMA integrity_check",
        "SELECT * FROM pragma_integrity_check",
    ] {
        // One connection reads and caches the index. Then another one changes it.
        a.run("BEGIN; SELECT count(*) FROM words WHERE words MATCH 'here'").await.unwrap();
        b.run("INSERT INTO words VALUES ('there')").await.unwrap();
        // Returned to the pool last, so that it is taken next.
        a.run("ROLLBACK").await.unwrap();
        assert_eq!(a.value(check).await, Value::Text("ok".into()), "{check}");
        a.run("ROLLBACK").await.unwrap();
    }
    // Only a reading statement is treated as a check, not one that writes a column of that name.
    a.run("CREATE TABLE t(integrity_check); INSERT INTO t(integrity_check) VALUES (1)").await.unwrap();
    assert_eq!(b.int("SELECT count(integrity_check) FROM t").await, 1);
}

#[tokio::test]
async fn truncated_page_has_no_old_contents_when_it_is_reused() {
    const FILL: &str = "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < 100) \
        INSERT INTO t SELECT x, printf('%03000d', x) FROM i";
    let node = Node::start().await;
    let (mut a, mut old) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, pad TEXT)").await.unwrap();
    a.run(FILL).await.unwrap();
    // A reader keeps the page versions from before the truncation in memory.
    assert_eq!(old.int("BEGIN; SELECT count(*) FROM t").await, 100);
    a.run("DELETE FROM t").await.unwrap();
    a.run("VACUUM").await.unwrap();
    node.engine.flush().await.unwrap();
    // The file grows, but SQLite does not write pages that the same transaction has freed.
    a.run(&format!("BEGIN; {FILL}; DELETE FROM t; COMMIT")).await.unwrap();
    assert!(a.int("PRAGMA freelist_count").await > 50);
    a.run(FILL).await.unwrap();
    old.run("ROLLBACK").await.unwrap();
    a.close().await;
    old.close().await;
    // Recovers from the manifest and the log, as after a crash.
    let Node { engine, directory } = node;
    drop(engine);
    let engine =
        crate::common::start_when_free(|| Config::new(directory.path(), crate::common::MEMORY)).await;
    let mut a = crate::common::Client { session: engine.session(fulmar_pages::PartitionId(1)) };
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    assert_eq!(a.int("SELECT count(*) FROM t WHERE pad = printf('%03000d', id)").await, 100);
}

/// A sink that rejects every row, as if a value had another type than announced.
struct RejectAll;

impl RowSink for RejectAll {
    fn row(&mut self, _: &dyn Row) -> fulmar_engine::Result<()> {
        Err(Error::new(sqlstate::DATATYPE_MISMATCH, "rejected"))
    }

    fn reset(&mut self) {}
}

#[tokio::test]
async fn statement_whose_rows_are_rejected_changes_nothing() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(n INTEGER); INSERT INTO t VALUES (1)").await.unwrap();
    let sql = "INSERT INTO t VALUES (2), (3) RETURNING n";
    let (insert, _) = a.session.prepare(sql).await.unwrap();
    let refused = a.session.execute(&insert, &[], Scope::Auto, &mut RejectAll).await.unwrap_err();
    assert_eq!(refused.state(), sqlstate::DATATYPE_MISMATCH);
    assert_eq!(a.int("SELECT count(*) FROM t").await, 1);

    a.run("BEGIN; INSERT INTO t VALUES (4)").await.unwrap();
    let refused = a.session.execute(&insert, &[], Scope::Auto, &mut RejectAll).await.unwrap_err();
    assert_eq!(refused.state(), sqlstate::DATATYPE_MISMATCH);
    assert_eq!(a.session.status(), TransactionStatus::Failed);
    a.run("COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 1);
    a.run(sql).await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 3);
}

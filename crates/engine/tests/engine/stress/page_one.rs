//! Page 1 contains the size of the file and the head of its free list, so any two transactions that
//! grow the file or free pages conflict on it. Tests all pairs of ways to do so, one inside the
//! other, with and without free pages before.

use fulmar_engine::Value;

use crate::common::{Client, Node};

const ROWS: &str = "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < 20) \
    SELECT hex(zeroblob(1500)) FROM i";

/// How a transaction changes its table, which has twenty rows before.
#[derive(Clone, Copy, Debug)]
enum Way {
    Grow,
    Free,
    /// Grows, rolls back to a savepoint, and frees.
    GrowUndoFree,
    /// Frees, rolls back to a savepoint, and grows.
    FreeUndoGrow,
    /// Grows beyond SQLite's cache, so that pages reach the VFS before the rollback to the
    /// savepoint.
    SpillAndUndo,
    /// Grows beyond SQLite's cache, and rolls back all of it.
    SpillAndRollBack,
    /// Frees all pages of a table and its entry in the schema.
    Replace,
}

const WAYS: [Way; 7] = [
    Way::Grow,
    Way::Free,
    Way::GrowUndoFree,
    Way::FreeUndoGrow,
    Way::SpillAndUndo,
    Way::SpillAndRollBack,
    Way::Replace,
];

impl Way {
    /// The statements between BEGIN and COMMIT, and the number of rows afterwards.
    fn sql(self, table: &str) -> (String, i64) {
        let grow = format!("INSERT INTO {table} {ROWS}");
        let free = format!("DELETE FROM {table}");
        let spill = format!("INSERT INTO {table} SELECT a.v FROM {table} a, {table} b, {table} c LIMIT 1500");
        match self {
            Way::Grow => (grow, 40),
            Way::Free => (free, 0),
            Way::GrowUndoFree => (format!("SAVEPOINT s; {grow}; ROLLBACK TO s; {free}"), 0),
            Way::FreeUndoGrow => (format!("SAVEPOINT s; {free}; ROLLBACK TO s; {grow}"), 40),
            Way::SpillAndUndo => (format!("SAVEPOINT s; {spill}; ROLLBACK TO s"), 20),
            Way::SpillAndRollBack => (format!("{spill}; ROLLBACK; BEGIN"), 20),
            Way::Replace => (format!("DROP TABLE {table}; CREATE TABLE {table}(v TEXT); {grow}"), 20),
        }
    }
}

async fn prepare(client: &mut Client, free_pages: bool) {
    client.run("DROP TABLE IF EXISTS a; DROP TABLE IF EXISTS b; DROP TABLE IF EXISTS c").await.unwrap();
    client.run("CREATE TABLE a(v TEXT); CREATE TABLE b(v TEXT); CREATE TABLE c(v TEXT)").await.unwrap();
    for table in ["a", "b", "c"] {
        client.run(&format!("INSERT INTO {table} {ROWS}")).await.unwrap();
    }
    if free_pages {
        client.run("DELETE FROM c").await.unwrap();
    } else {
        client.run("VACUUM").await.unwrap();
        assert_eq!(client.int("PRAGMA freelist_count").await, 0);
    }
}

#[tokio::test]
async fn concurrent_changes_of_the_file_size_keep_the_file_intact() {
    let node = Node::start().await;
    let (mut outer, mut inner, mut check) = (node.client(1), node.client(1), node.client(1));
    let pairs = WAYS.iter().flat_map(|one| WAYS.iter().map(move |other| (*one, *other)));
    for (one, other) in pairs {
        for free_pages in [false, true] {
            prepare(&mut check, free_pages).await;
            let ((first, first_rows), (second, second_rows)) = (one.sql("a"), other.sql("b"));
            let context = format!("{one:?} around {other:?}, free pages before: {free_pages}");
            outer.run(&format!("BEGIN; {first}")).await.unwrap_or_else(|e| panic!("{context}: {e}"));
            inner.run(&format!("BEGIN; {second}; COMMIT")).await.unwrap_or_else(|e| panic!("{context}: {e}"));
            outer.run("COMMIT").await.unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_eq!(check.value("PRAGMA integrity_check").await, Value::Text("ok".into()), "{context}");
            assert_eq!(check.int("SELECT count(*) FROM a").await, first_rows, "{context}");
            assert_eq!(check.int("SELECT count(*) FROM b").await, second_rows, "{context}");
        }
    }
}

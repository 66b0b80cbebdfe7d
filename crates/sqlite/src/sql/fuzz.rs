//! Fuzz target for the SQL scanner: no input panics, and the first statement ends where SQLite ends
//! it.

use std::ffi::c_int;

use fulmar_fuzz::Target;
use rusqlite::{Connection, ffi};

use super::*;

const SEEDS: [&str; 22] = [
    "SELECT a, b AS \"x;y\" FROM t WHERE a = $1 AND b = 'it''s' ORDER BY 1 FOR UPDATE; SELECT 2",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3) SELECT i FROM n /* ; */",
    "INSERT INTO t(a, b) VALUES ($1, ?2), (@a, :b) ON CONFLICT(a) DO UPDATE SET b = excluded.b RETURNING [a], `b`",
    "UPDATE OR IGNORE main.t SET b = $2 WHERE a = 7 -- ; the end",
    "DELETE FROM t WHERE a == x'00ff' LIMIT 1",
    "REPLACE INTO t SELECT 1.5e-3, .5, 0x1F, 1_000 FROM t JOIN u USING (a)",
    "CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; SELECT 1; END; SELECT 3",
    "CREATE TABLE \"odd;name\"(a INTEGER PRIMARY KEY, b TEXT) STRICT",
    "CREATE UNIQUE INDEX IF NOT EXISTS i ON t(a, lower(b)) WHERE b <> ''",
    "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY; COMMIT",
    "START TRANSACTION READ WRITE",
    "BEGIN IMMEDIATE",
    "SAVEPOINT s; ROLLBACK TO s; RELEASE s",
    "SELECT a FROM t WHERE a = 1 FOR NO KEY UPDATE OF t SKIP LOCKED",
    "EXPLAIN QUERY PLAN SELECT * FROM t WHERE b LIKE '%' ESCAPE '!'",
    "PRAGMA table_info(t)",
    "VALUES (1, NULL), (2, 'x' || 'y' -> '$.z' ->> 1)",
    ";;; SELECT 'unfinished",
    "SELECT /*/ ; */ 1; SELECT \"a",
    "VACUUM",
    "DROP TABLE IF EXISTS t",
    "SELECT 1 << 2 >> 3 <= 4 >= 5 <> 6 != 7 == 8 | 9 & ~1",
];

const WORDS: &[&str] = &[
    ";",
    "'",
    "''",
    "\"",
    "[",
    "]",
    "`",
    "--",
    "\n",
    "/*",
    "*/",
    "/*/",
    "$1",
    "?",
    "?9",
    ":a",
    "@a",
    "(",
    ")",
    ",",
    "x'",
    "E'",
    "\\",
    "$$",
    "\0",
    "\u{e9}",
    "\u{1f600}",
    "SELECT ",
    " FROM t",
    " WHERE a = ",
    " AND b = ",
    " FOR UPDATE",
    " FOR SHARE",
    "INSERT INTO t ",
    "VALUES ",
    "UPDATE t SET a = ",
    "DELETE ",
    "WITH x AS (",
    "CREATE ",
    "TRIGGER ",
    "TEMP ",
    "BEGIN",
    "END",
    "COMMIT",
    "ROLLBACK",
    " TO ",
    "OR ",
    "RETURNING ",
    "NULL",
    "1",
    "0x",
    "1e",
    ".",
    "..",
    " ",
];

/// Returns how many bytes SQLite consumes for the first statement, if SQLite accepts it.
fn bytes_consumed_by_sqlite(connection: &Connection, sql: &str) -> Option<usize> {
    let start = sql.as_ptr().cast();
    let (mut statement, mut tail) = (std::ptr::null_mut(), std::ptr::null());
    // SAFETY: the connection is open, the text comes with its length, the statement is finalized,
    // and the tail points into the text.
    unsafe {
        let length = sql.len() as c_int;
        let code = ffi::sqlite3_prepare_v2(connection.handle(), start, length, &mut statement, &mut tail);
        ffi::sqlite3_finalize(statement);
        (code == ffi::SQLITE_OK && !statement.is_null()).then(|| tail.offset_from(start) as usize)
    }
}

#[test]
fn fuzz_classifier() {
    let connection = Connection::open_in_memory().unwrap();
    connection.execute_batch("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT); CREATE TABLE u(a, c)").unwrap();
    Target::new("classifier", env!("CARGO_MANIFEST_DIR")).seeds(SEEDS).words(WORDS).run(|input| {
        let sql = String::from_utf8_lossy(input);
        let mut end = 0;
        for token in tokens(&sql) {
            assert!(token.start >= end && !token.text.is_empty(), "{token:?}");
            assert_eq!(&sql[token.start..token.end()], token.text);
            end = token.end();
            token.name();
        }
        let first = first_statement(&sql, usize::MAX).unwrap();
        let (kind, _) = classify(&first.tokens);
        let shape = shape(kind, &first.tokens);
        assert!(shape.for_update.is_none_or(|start| sql.is_char_boundary(start)));
        // SQLite stops at a zero byte. For a trigger only SQLite finds the end.
        if first.trigger || sql.contains('\0') || sql.trim_start().starts_with(';') {
            return;
        }
        if let Some(taken) = bytes_consumed_by_sqlite(&connection, &sql) {
            let ours = sql.len() - first.rest.len();
            assert_eq!(&sql[..ours], &sql[..taken], "statement end differs from SQLite in {sql:?}");
        }
    });
}

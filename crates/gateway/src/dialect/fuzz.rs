//! Any text through the dialect's front: no panic, and a statement ends where SQLite has its end.

use fulmar_fuzz::Target;
use rusqlite::{Connection, ffi};

use super::token::Kind;
use super::*;

const CONTEXT: Context<'_> = Context { database: "shop", user: "o'neill", pid: 7 };

const SEEDS: [&str; 40] = [
    "SELECT version(), now(), current_user, pg_catalog.current_database() FROM t; SELECT 2",
    "SELECT 1 AS \"a;b\", [c;d], `e;f`, 'g;h' /* ; */ -- ;\n, pg_backend_pid(); x",
    "INSERT INTO t VALUES (now(), current_schema())",
    "SET LOCAL statement_timeout = '5s'; SELECT 1",
    "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "SET a.b TO 1, 'x', DEFAULT",
    "SET TIME ZONE 'UTC'",
    "SHOW ALL",
    "RESET ALL",
    "DISCARD PLANS",
    "DEALLOCATE ALL",
    "COPY t (a, \"b\") FROM STDIN WITH (FORMAT csv, HEADER MATCH, DELIMITER ';', NULL 'x', QUOTE '''', FORCE_NULL (a))",
    "COPY (SELECT ';' FROM t) TO STDOUT CSV HEADER FORCE QUOTE *",
    "COPY public.t TO STDOUT (DELIMITER E'\\t', ESCAPE '\\', ENCODING 'UTF8', FREEZE)",
    "CREATE OR REPLACE PROCEDURE p(a INTEGER, b TEXT) RETURNS TABLE (x TEXT) LANGUAGE lua AS $x$ return ';' $x$; y",
    "DROP PROCEDURE IF EXISTS p",
    "CREATE UNLOGGED TABLE t (a INTEGER) WITH (fillfactor=100)",
    "CREATE TABLE t (a INTEGER) WITH (oids = false) TABLESPACE x",
    "DROP TABLE IF EXISTS a, public.b CASCADE",
    "TRUNCATE TABLE a, b RESTART IDENTITY",
    "ALTER TABLE ONLY t ADD CONSTRAINT c PRIMARY KEY (a, b)",
    "VACUUM (ANALYZE, VERBOSE) t",
    "CREATE DATABASE a WITH OWNER = b TEMPLATE c",
    "DROP DATABASE IF EXISTS a WITH (FORCE)",
    "ALTER DATABASE a RENAME TO b",
    "CREATE USER a WITH SUPERUSER PASSWORD 'x'",
    "ALTER USER a PASSWORD NULL",
    "DROP ROLE IF EXISTS a, b",
    "GRANT CONNECT ON DATABASE a, b TO c, d",
    "REVOKE CONNECT ON DATABASE a FROM c",
    "SELECT datname FROM pg_database ORDER BY 1",
    "SELECT d.datname as \"Name\", pg_catalog.pg_get_userbyid(d.datdba) FROM pg_catalog.pg_database d",
    "SELECT c.oid, n.nspname, c.relname FROM pg_catalog.pg_class c WHERE c.relname OPERATOR(pg_catalog.~) '^(t)$'",
    "WITH x AS (SELECT now ()) SELECT * FROM x",
    "VALUES (current_role), (E'a\\'b\\n')",
    "SELECT /*/ ; */ version()",
    "SELECT $1, $$ a; b $$, $tag$ $$ $tag$, version()",
    "UPDATE t SET a = now() WHERE b = session_user",
    "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT version(); END; SELECT 1",
    "",
];

const WORDS: &[&str] = &[
    ";",
    "'",
    "''",
    "\"",
    "\"\"",
    "[",
    "]",
    "`",
    "--",
    "\n",
    "/*",
    "*/",
    "/*/",
    "$1",
    "$$",
    "$a$",
    "E'",
    "\\",
    "(",
    ")",
    ",",
    ".",
    "*",
    "=",
    "\0",
    "\u{e9}",
    "\u{1f600}",
    "SELECT ",
    "version()",
    "now()",
    "current_user",
    " AS ",
    "FROM ",
    "pg_catalog.",
    "pg_class",
    "public.",
    "SET ",
    "SHOW ",
    "LOCAL ",
    "TO ",
    "DEFAULT",
    "COPY ",
    "STDIN",
    "STDOUT",
    "WITH ",
    "FORMAT csv",
    "HEADER",
    "DELIMITER ",
    "NULL ",
    "QUOTE ",
    "FORCE_QUOTE ",
    "CREATE ",
    "DROP ",
    "ALTER ",
    "TABLE ",
    "DATABASE ",
    "USER ",
    "PROCEDURE ",
    "IF EXISTS ",
    "PASSWORD ",
    "GRANT CONNECT ON ",
    "LANGUAGE lua ",
    "RETURNS TABLE ",
    "TRUNCATE ",
    "VACUUM ",
    "ADD ",
    "PRIMARY KEY ",
    "CASCADE",
    "1",
    "1e+",
    "0x",
];

/// How many bytes SQLite takes for the first statement, if it takes it.
fn taken_by_sqlite(connection: &Connection, sql: &str) -> Option<usize> {
    let start = sql.as_ptr().cast();
    let (mut statement, mut tail) = (std::ptr::null_mut(), std::ptr::null());
    // SAFETY: an open connection, a text with its length, and a statement that is finalized; the tail lies in the text.
    unsafe {
        let length = sql.len() as std::ffi::c_int;
        let code = ffi::sqlite3_prepare_v2(connection.handle(), start, length, &mut statement, &mut tail);
        ffi::sqlite3_finalize(statement);
        (code == ffi::SQLITE_OK && !statement.is_null()).then(|| tail.offset_from(start) as usize)
    }
}

#[test]
fn fuzz_dialect() {
    let connection = Connection::open_in_memory().unwrap();
    connection
        .execute_batch("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT); CREATE TABLE [o;d](a, c)")
        .unwrap();
    Target::new("dialect", env!("CARGO_MANIFEST_DIR")).seeds(SEEDS).words(WORDS).run(|input| {
        let sql = String::from_utf8_lossy(input);
        if let Ok(Front::Rewritten(_, rest) | Front::Command(_, rest)) = front(&sql, &CONTEXT) {
            assert!(sql.ends_with(rest));
        }
        let (tokens, rest) = first_statement(&sql);
        for token in &tokens {
            assert!(!token.text.is_empty() && sql[token.start..].starts_with(token.text));
            token.name();
            token.string();
        }
        // Where Postgres's SQL differs on purpose: `E''` and `$$`; where SQLite's own end counts: triggers, zero bytes.
        let differs = tokens.iter().any(|token| token.kind == Kind::String && !token.text.starts_with('\''))
            || tokens.iter().any(|token| token.is("trigger"))
            || sql.contains('\0')
            || sql.trim_start().starts_with(';');
        if !differs && let Some(taken) = taken_by_sqlite(&connection, &sql) {
            assert_eq!(&sql[..sql.len() - rest.len()], &sql[..taken], "the statement's end in {sql:?}");
        }
    });
}

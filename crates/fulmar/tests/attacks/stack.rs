//! Attacks on the stack: a statement that needs too much stack gets an error and does not crash the
//! process, even with the smallest configurable stack.
//!
//! Each entry of a table is an attack: its name, the allowed SQLSTATEs, its SQL.

use crate::test_bench::{OWNER, READER, TestBench, with_smallest_stack};

/// The statement needs more than the smallest stack.
const TOO_DEEP: &[&str] = &["54001"];
/// The statement may fit, or exceed another limit. FTS and JSON report theirs as syntax errors.
const DEEP: &[&str] = &["00000", "54001", "54000", "42601", "22P02"];

const SCHEMA: &[&str] = &[
    "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)",
    "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
    "CREATE VIRTUAL TABLE words3 USING fts3(text)",
    "INSERT INTO words3 VALUES ('a b c')",
    "CREATE VIRTUAL TABLE words5 USING fts5(text)",
    "INSERT INTO words5 VALUES ('a b c')",
];

#[tokio::test(flavor = "multi_thread")]
async fn deep_statements_are_rejected_without_a_crash() {
    let mut arena = TestBench::new("stack", SCHEMA).await.configured(with_smallest_stack);
    for (name, expected, sql) in [
        ("250 generated columns, each of the one before", DEEP, generated_columns("g250", 250)),
        ("400 generated columns, each of the one before", TOO_DEEP, generated_columns("g400", 400)),
        ("1,900 generated columns, each of the one before", TOO_DEEP, generated_columns("g1900", 1900)),
        ("300 views, each adding 150 times", DEEP, view_chain("added", 300, &sum("a", 150))),
        ("1,000 views of views", DEEP, view_chain("nothing", 1000, "a")),
        ("a chain of triggers", DEEP, trigger_chain(300)),
        (
            "a partial index with a deep condition",
            DEEP,
            format!("CREATE INDEX i ON t(b) WHERE {}", sum("a", 20_000)),
        ),
        (
            "CHECK with a deep condition",
            DEEP,
            format!("CREATE TABLE c(a CHECK ({}))", nested("(", "a", ")", 20_000)),
        ),
    ] {
        arena.statement(name, expected, OWNER, &sql).await;
    }
    for (name, expected, sql) in [
        ("a sum of 40 in 40 subqueries", DEEP, nested_sums(40, 40)),
        ("a sum of 150 in 300 subqueries", TOO_DEEP, nested_sums(300, 150)),
        ("joins in parentheses, 1,000 deep", TOO_DEEP, nested_joins(1000)),
        ("joins in parentheses, 100,000 deep", DEEP, nested_joins(100_000)),
        ("json_set, a path of 900", DEEP, json("json_set", 900, ",1")),
        ("jsonb_insert, a path of 999", DEEP, json("jsonb_insert", 999, ",1")),
        ("json_array_insert, a path of 999", DEEP, json("json_array_insert", 999, ",1")),
        ("json_extract, a path of 999", DEEP, json("json_extract", 999, "")),
        ("jsonb_remove, a path of 999", DEEP, json("jsonb_remove", 999, "")),
        ("jsonb_replace, a path of 999", DEEP, json("jsonb_replace", 999, ",1")),
        ("json_set, a path of 100,000", DEEP, json("json_set", 100_000, ",1")),
        (
            "json, 100,000 arrays in each other",
            &["00000", "54001", "54000", "22P02"],
            json_text("json", 100_000),
        ),
        ("json_patch, 999 objects in each other", DEEP, json_patch(999)),
        ("FTS3: MATCH with 1,000 parentheses", DEEP, match_parentheses("words3", 1000)),
        ("FTS3: MATCH with 400,000 parentheses", DEEP, match_parentheses("words3", 400_000)),
        ("FTS5: MATCH with 400,000 parentheses", DEEP, match_parentheses("words5", 400_000)),
        ("FTS3: 100,000 OR", DEEP, match_operators("words3", "OR", 100_000)),
        ("FTS5: 100,000 NOT", DEEP, match_operators("words5", "NOT", 100_000)),
        (
            "CASE, 40,000 deep",
            DEEP,
            format!("SELECT {} FROM t", nested("CASE WHEN a THEN ", "a", " END", 40_000)),
        ),
        (
            "calls in each other, 100,000 deep",
            DEEP,
            format!("SELECT {} FROM t", nested("abs(", "a", ")", 100_000)),
        ),
        ("NOT, 100,000 times", DEEP, format!("SELECT {} a FROM t", "NOT ".repeat(100_000))),
        ("scalar subqueries, 3,000 deep", DEEP, format!("SELECT {}", nested("(SELECT ", "1", ")", 3000))),
        (
            "EXISTS, 3,000 deep",
            DEEP,
            format!("SELECT {}", nested("EXISTS (SELECT a FROM t WHERE ", "a", ")", 3000)),
        ),
        (
            "common table expressions, 3,000 deep",
            DEEP,
            nested("WITH x AS (", "SELECT 1", ") SELECT * FROM x", 3000),
        ),
        ("a chain of 3,000 common table expressions", DEEP, common_table_expressions(3000)),
        ("UNION ALL, 30,000 times", DEEP, vec!["SELECT 1"; 30_000].join(" UNION ALL ")),
        ("LIKE with 249 wildcards", DEEP, wildcards("LIKE", "%a", 249)),
        ("LIKE with 25,000 wildcards", DEEP, wildcards("LIKE", "%a", 25_000)),
        ("GLOB with 25,000 wildcards", DEEP, wildcards("GLOB", "*a", 25_000)),
        (
            "row values in each other, 3,000 deep",
            &["54001", "54000", "42601"],
            format!("SELECT {} = 1", nested("(1, ", "1", ")", 3000)),
        ),
        (
            "window functions in each other",
            DEEP,
            nested("SELECT sum(a) OVER (ORDER BY a) AS a FROM (", "SELECT a FROM t", ")", 500),
        ),
    ] {
        arena.statement(name, expected, READER, &sql).await;
    }
    arena.assert_no_failures();
}

fn nested(before: &str, inner: &str, after: &str, depth: usize) -> String {
    format!("{}{inner}{}", before.repeat(depth), after.repeat(depth))
}

/// `a+1+1...`
fn sum(column: &str, terms: usize) -> String {
    format!("{column}{}", "+1".repeat(terms))
}

fn generated_columns(table: &str, count: usize) -> String {
    let columns: String = (1..=count).map(|n| format!(", c{n} AS (c{}+1)", n - 1)).collect();
    format!(
        "CREATE TABLE {table}(c0 INTEGER{columns}); INSERT INTO {table} VALUES (1); SELECT c{count} FROM {table}"
    )
}

/// A chain of views, the first one on `t`, and a query of the last one.
fn view_chain(prefix: &str, length: usize, column: &str) -> String {
    let views: String = (1..=length)
        .map(|n| format!("CREATE VIEW {prefix}{n} AS SELECT {column} AS a FROM {prefix}{};", n - 1))
        .collect();
    format!("CREATE VIEW {prefix}0 AS SELECT a FROM t;{views} SELECT a FROM {prefix}{length}")
}

/// A chain of tables, each with a trigger that inserts into the next one.
fn trigger_chain(length: usize) -> String {
    let tables: String = (0..=length).map(|n| format!("CREATE TABLE tr{n}(a);")).collect();
    let trigger = |n| {
        format!(
            "CREATE TRIGGER on{n} AFTER INSERT ON tr{n} BEGIN INSERT INTO tr{} VALUES (new.a + 1); END;",
            n + 1
        )
    };
    let triggers: String = (0..length).map(trigger).collect();
    format!("{tables}{triggers} INSERT INTO tr0 VALUES (1)")
}

fn nested_sums(depth: usize, terms: usize) -> String {
    nested(&format!("SELECT {} AS a FROM (", sum("a", terms)), "SELECT a FROM t", ")", depth)
}

fn nested_joins(depth: usize) -> String {
    format!("SELECT * FROM {}", nested("(t JOIN ", "t", ")", depth))
}

fn json(function: &str, depth: usize, value: &str) -> String {
    format!("SELECT {function}('{{}}', '$'||replace(hex(zeroblob({depth})),'00','.a'){value})")
}

fn json_text(function: &str, depth: usize) -> String {
    format!(
        "SELECT {function}(replace(hex(zeroblob({depth})),'00','[')||replace(hex(zeroblob({depth})),'00',']'))"
    )
}

fn json_patch(depth: usize) -> String {
    let object = format!(
        "replace(hex(zeroblob({depth})),'00','{{\"a\":')||'1'||replace(hex(zeroblob({depth})),'00','}}')"
    );
    format!("SELECT json_patch({object}, {object})")
}

fn match_parentheses(table: &str, depth: usize) -> String {
    let side = |c| format!("replace(hex(zeroblob({depth})),'00','{c}')");
    format!("SELECT count(*) FROM {table} WHERE {table} MATCH {}||'a'||{}", side('('), side(')'))
}

fn match_operators(table: &str, operator: &str, count: usize) -> String {
    format!(
        "SELECT count(*) FROM {table} WHERE {table} MATCH replace(hex(zeroblob({count})),'00','a {operator} ')||'a'"
    )
}

fn common_table_expressions(length: usize) -> String {
    let expressions: Vec<String> =
        (1..=length).map(|n| format!("x{n} AS (SELECT a + 1 AS a FROM x{})", n - 1)).collect();
    format!("WITH x0 AS (SELECT 1 AS a), {} SELECT a FROM x{length}", expressions.join(", "))
}

fn wildcards(operator: &str, unit: &str, count: usize) -> String {
    let text = format!("replace(hex(zeroblob({count})),'00','a')");
    format!("SELECT {text} {operator} replace(hex(zeroblob({count})),'00','{unit}')")
}

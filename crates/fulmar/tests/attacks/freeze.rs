//! Attacks with calls that SQLite cannot interrupt: they block their own session and one thread,
//! but no other tenant.
//!
//! Each attack gets a new node, because a call may continue after the response to its client.

use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

use crate::client::{self, Response};
use crate::common::wait_until;
use crate::test_bench::{OWNER, READER, Target, TestBench};

/// Sets the `statement_timeout` of the attacking sessions.
const SET_TIMEOUT: &str = "SET statement_timeout = 500";
/// Deadline of the response to an attack, from the statement or its interruption on. A limit of the
/// tests, not of the product.
const RESPONSE_DEADLINE: Duration = Duration::from_secs(10);

/// The statement timed out, or was rejected as too large.
const STOPPED: &[&str] = &["57014", "54000", "53200", "53400"];
/// On a fast machine, or with a better plan, the statement may also succeed in time.
const BOUNDED: &[&str] = &["00000", "57014", "54001", "54000", "53200", "53400"];

/// Number of columns of the table `wide`, and of terms in the widest lists.
const COLUMNS: usize = 1900;

fn schema() -> Vec<String> {
    let columns = list(COLUMNS, ",", |n| format!("c{n}"));
    vec![
        "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)".to_owned(),
        "INSERT INTO t VALUES (1, 'one'), (2, 'two')".to_owned(),
        format!("CREATE TABLE wide({columns})"),
        "INSERT INTO wide(c0) VALUES (1)".to_owned(),
        "CREATE VIRTUAL TABLE docs USING fts5(text)".to_owned(),
        "INSERT INTO docs VALUES (replace(hex(zeroblob(100000)), '00', 'ab '))".to_owned(),
        "CREATE VIRTUAL TABLE long_docs USING fts5(text)".to_owned(),
        "INSERT INTO long_docs VALUES (replace(hex(zeroblob(1000000)), '00', 'ab '))".to_owned(),
        "CREATE VIRTUAL TABLE docs3 USING fts3(text)".to_owned(),
        "INSERT INTO docs3 VALUES (replace(hex(zeroblob(1000000)), '00', 'ab '))".to_owned(),
    ]
}

/// Returns attacks that are one statement of the read-only user.
fn statements() -> Vec<(&'static str, &'static [&'static str], String)> {
    vec![
        // Functions on large values.
        ("json_patch of 60,000 keys", STOPPED, json_patch(60_000)),
        ("json_patch of 300,000 keys", STOPPED, json_patch(300_000)),
        ("json_extract, 900 paths from the end of 4 MB", STOPPED, json_extract(900)),
        ("LIKE of 490 characters in 20 MB", STOPPED, like("LIKE", '%', 490, 20_000_000)),
        ("GLOB of 490 characters in 20 MB", STOPPED, like("GLOB", '*', 490, 20_000_000)),
        ("LIKE of 240 characters in 20 MB", STOPPED, like("LIKE", '%', 240, 20_000_000)),
        ("LIKE of 240 characters in 3 MB", BOUNDED, like("LIKE", '%', 240, 3_000_000)),
        (
            "json_valid of 60 MB",
            BOUNDED,
            "SELECT json_valid(replace(hex(zeroblob(60000000)), '00', '1'))".to_owned(),
        ),
        (
            "strftime with a format of 40 MB",
            BOUNDED,
            "SELECT length(strftime(replace(hex(zeroblob(8000000)), '00', '%Y-%m'), 'now'))".to_owned(),
        ),
        // Full text.
        ("FTS5 snippet", STOPPED, full_text("docs", "snippet(docs, 0, '<', '>', '...', 64)")),
        ("FTS5 highlight of 300 KB", BOUNDED, full_text("docs", "highlight(docs, 0, '<', '>')")),
        ("FTS5 highlight of 3 MB", STOPPED, full_text("long_docs", "highlight(long_docs, 0, '<', '>')")),
        ("FTS5: 77,000 phrases", BOUNDED, phrases("docs", 77_000)),
        ("FTS5: a phrase of 5,000 words", BOUNDED, phrase("docs", 5000)),
        ("FTS3: a phrase of 5,000 words", BOUNDED, phrase("docs3", 5000)),
        ("FTS3 snippet", BOUNDED, full_text("docs3", "snippet(docs3)")),
        ("FTS3 offsets", BOUNDED, full_text("docs3", "offsets(docs3)")),
        // Statements that take long to prepare, most of them with less than 64 KiB of SQL.
        ("1,900 windows", BOUNDED, windows(COLUMNS)),
        ("1,500 named windows", BOUNDED, named_windows(1500)),
        ("190 common table expressions of 1,900 columns", BOUNDED, wide_expressions(190)),
        ("150 subqueries of 1,900 columns", BOUNDED, wide_subqueries(150)),
        ("60 joins USING 1,900 columns", BOUNDED, wide_joins(60)),
        ("an expression that doubles 24 times", BOUNDED, doubled(24)),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn uninterruptible_calls_block_only_their_own_session() {
    let schema = schema();
    let mut arena = TestBench::new("freeze", &schema.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for (name, expected, sql) in statements() {
        arena.attack(name, expected, async |target| timed(target, READER, &sql).await).await;
        arena.end_node();
    }
    let sql = doubled_columns(24);
    arena
        .attack("a generated column that doubles 24 times", BOUNDED, async |target| {
            timed(target, OWNER, &sql).await
        })
        .await;
    arena.end_node();
    for repeated in [120_000, 400_000] {
        let (name, sql) =
            (format!("{repeated} repeated parameters in a prepared IN"), many_parameters(repeated));
        arena
            .attack(&name, STOPPED, async |target| match timed_session(target, READER).await {
                Ok(session) => in_time(client::answer(session.prepare(&sql))).await,
                Err(answer) => answer,
            })
            .await;
        arena.end_node();
    }
    let sql = json_patch(60_000);
    arena.attack("json_patch, cancelled", STOPPED, async |target| cancelled(target, &sql).await).await;
    arena.end_node();
    arena
        .attack("json_patch, terminated", &["57P01", "closed"], async |target| terminated(target, &sql).await)
        .await;
    // A node with more memory allows larger statements, which take longer to prepare.
    arena.set_memory("4GiB", 1 << 30);
    let sql = doubled(30);
    arena
        .attack("an expression that doubles 30 times, with more memory", BOUNDED, async |target| {
            timed(target, READER, &sql).await
        })
        .await;
    arena.assert_no_failures();
}

/// Opens a session with a statement timeout.
async fn timed_session(target: &Target, user: &str) -> Result<tokio_postgres::Client, Response> {
    let mut session = None;
    let opened = client::answer(async {
        let client = target.log_in(user).await?;
        client.batch_execute(SET_TIMEOUT).await?;
        session = Some(client);
        Ok(())
    })
    .await;
    session.ok_or(opened)
}

/// Runs a statement with a timeout in a new session. The deadline begins with the statement.
async fn timed(target: &Target, user: &str, sql: &str) -> Response {
    match timed_session(target, user).await {
        Ok(session) => in_time(client::answer(session.batch_execute(sql))).await,
        Err(answer) => answer,
    }
}

/// Replaces a response after the deadline by [`Response::Late`].
async fn in_time(answer: impl Future<Output = Response>) -> Response {
    let began = Instant::now();
    let answer = answer.await;
    if began.elapsed() <= RESPONSE_DEADLINE { answer } else { Response::Late(began.elapsed()) }
}

/// Returns the process id of a session's backend.
async fn process_id(session: &tokio_postgres::Client) -> i64 {
    session.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}

/// Waits until a session runs a statement that starts with WITH.
async fn wait_until_running(observer: &tokio_postgres::Client, process: i64) {
    let sql = format!(
        "SELECT 1 FROM pg_stat_activity WHERE pid = {process} AND state = 'active' AND query LIKE 'WITH%'"
    );
    wait_until("the statement runs", async || observer.query_opt(&sql, &[]).await.unwrap().is_some()).await;
}

/// Runs a statement and interrupts it. The response may arrive before the interruption. The
/// deadline begins with the interruption.
async fn interrupted(
    session: &tokio_postgres::Client,
    sql: &str,
    interrupt: impl Future<Output = ()>,
) -> Response {
    let statement = client::answer(session.batch_execute(sql));
    tokio::pin!(statement);
    tokio::select! {
        answer = &mut statement => return answer,
        () = interrupt => {}
    }
    in_time(statement).await
}

async fn cancelled(target: &Target, sql: &str) -> Response {
    let (session, observer) = (target.log_in(READER).await.unwrap(), target.log_in(OWNER).await.unwrap());
    let (token, process) = (session.cancel_token(), process_id(&session).await);
    let cancel = async {
        wait_until_running(&observer, process).await;
        token.cancel_query(NoTls).await.unwrap();
    };
    interrupted(&session, sql, cancel).await
}

async fn terminated(target: &Target, sql: &str) -> Response {
    let (session, other) = (target.log_in(READER).await.unwrap(), target.log_in(READER).await.unwrap());
    let process = process_id(&session).await;
    let terminate = async {
        wait_until_running(&other, process).await;
        other.batch_execute(&format!("SELECT pg_terminate_backend({process})")).await.unwrap();
    };
    interrupted(&session, sql, terminate).await
}

fn json_patch(keys: usize) -> String {
    let object = |prefix| format!("(SELECT json_group_object('{prefix}'||i, i) FROM n)");
    format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {keys})
         SELECT length(json_patch({}, {}))",
        object('a'),
        object('b')
    )
}

fn json_extract(paths: usize) -> String {
    format!(
        "WITH doc(d) AS MATERIALIZED (SELECT '[' || replace(hex(zeroblob(2000000)), '00', '1,') || '1]')
         SELECT length(json_extract(d{})) FROM doc",
        ", '$[#-1]'".repeat(paths)
    )
}

fn like(operator: &str, wildcard: char, length: usize, bytes: usize) -> String {
    format!(
        "SELECT replace(hex(zeroblob({})), '00', 'aa') {operator} '{wildcard}{}b'",
        bytes / 2,
        "a".repeat(length)
    )
}

fn full_text(table: &str, function: &str) -> String {
    format!("SELECT length({function}) FROM {table} WHERE {table} MATCH 'ab'")
}

fn list(count: usize, separator: &str, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(separator)
}

fn phrases(table: &str, count: usize) -> String {
    format!(
        "SELECT count(*) FROM {table} WHERE {table} MATCH replace(hex(zeroblob({count})), '00', '\"a b\" ')"
    )
}

fn phrase(table: &str, words: usize) -> String {
    format!("SELECT count(*) FROM {table} WHERE {table} MATCH '\"{}\"'", "ab ".repeat(words))
}

fn windows(count: usize) -> String {
    format!("SELECT {} FROM t", list(count, ",", |n| format!("sum(a) OVER (ORDER BY a+{n})")))
}

fn named_windows(count: usize) -> String {
    let (sums, windows) = (
        list(count, ",", |n| format!("sum(a) OVER w{n}")),
        list(count, ",", |n| format!("w{n} AS (ORDER BY a+{n})")),
    );
    format!("SELECT {sums} FROM t WINDOW {windows}")
}

fn wide_expressions(count: usize) -> String {
    let expressions = list(count, ", ", |n| match n {
        0 => "x0 AS (SELECT * FROM wide)".to_owned(),
        n => format!("x{n} AS (SELECT * FROM x{})", n - 1),
    });
    let last = count - 1;
    format!("WITH {expressions} SELECT count(*) FROM x{last} AS a, x{last} AS b, x{last} AS c")
}

fn wide_subqueries(depth: usize) -> String {
    let nested = format!("{}wide{}", "(SELECT * FROM ".repeat(depth), ")".repeat(depth));
    format!("SELECT count(*) FROM {nested} AS a, {nested} AS b, {nested} AS c")
}

/// 600 KB of SQL.
fn wide_joins(count: usize) -> String {
    let columns = list(COLUMNS, ",", |n| format!("c{n}"));
    format!(
        "SELECT * FROM wide w0 {}",
        list(count, " ", |n| format!("JOIN wide w{} USING ({columns})", n + 1))
    )
}

fn doubled(times: usize) -> String {
    let expressions = list(times, ", ", |n| match n {
        0 => "x0(a) AS (SELECT a||a FROM t)".to_owned(),
        n => format!("x{n}(a) AS (SELECT a||a FROM x{})", n - 1),
    });
    format!("WITH {expressions} SELECT count(a) FROM x{}", times - 1)
}

fn doubled_columns(times: usize) -> String {
    let columns = list(times, ", ", |n| format!("c{} AS (c{n}||c{n})", n + 1));
    format!("CREATE TABLE doubled(c0 TEXT, {columns}); SELECT count(c{times}) FROM doubled")
}

/// Up to 3 MB of SQL.
fn many_parameters(repeated: usize) -> String {
    let distinct: Vec<String> = (1..=30_000).map(|n| format!("${n}")).collect();
    format!("SELECT 1 IN ({}{})", distinct.join(","), ",$30000".repeat(repeated))
}

//! Calls that SQLite does not interrupt: they cost their own session and one thread, and no other tenant.
//!
//! Each attack has a node to itself, so that one that still runs after its client was answered does not stand in the way of the next.

use std::time::{Duration, Instant};

use tokio_postgres::NoTls;

use crate::arena::{Arena, OWNER, READER, Target};
use crate::client::{self, Answer};

/// The `statement_timeout` of the sessions that attack.
const TIMEOUT: &str = "SET statement_timeout = 500";
/// How long after `statement_timeout` or a cancel request the client has its answer at the latest. The tests' bound, not the product's.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// The statement ran out of time, or was refused as too large, and in a part of the cases is fast.
const STOPPED: &[&str] = &["57014", "54000", "53200", "53400"];

const SCHEMA: &[&str] = &[
    "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)",
    "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
    "CREATE VIRTUAL TABLE docs USING fts5(text)",
    "INSERT INTO docs VALUES (replace(hex(zeroblob(100000)), '00', 'ab '))",
    "CREATE VIRTUAL TABLE docs3 USING fts3(text)",
    "INSERT INTO docs3 VALUES (replace(hex(zeroblob(100000)), '00', 'ab '))",
];

/// Attacks by one statement.
fn statements() -> Vec<(&'static str, String)> {
    vec![
        ("json_patch of 60,000 keys", json_patch(60_000)),
        ("json_patch of 300,000 keys", json_patch(300_000)),
        ("json_extract, 900 paths from the end of 4 MB", json_extract(900)),
        ("LIKE of 490 characters in 20 MB", like("LIKE", '%', 490, 20_000_000)),
        ("GLOB of 490 characters in 20 MB", like("GLOB", '*', 490, 20_000_000)),
        ("FTS5 snippet", full_text("docs", "snippet(docs, 0, '<', '>', '...', 64)")),
        ("FTS5 highlight", full_text("docs", "highlight(docs, 0, '<', '>')")),
        ("FTS3 snippet", full_text("docs3", "snippet(docs3)")),
        ("FTS3 offsets", full_text("docs3", "offsets(docs3)")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn uninterruptible_calls_cost_their_own_session_only() {
    let mut arena = Arena::new("freeze", SCHEMA).await;
    for (name, sql) in statements() {
        let statements = [TIMEOUT, &sql];
        arena.attack(name, STOPPED, async |target| in_time(target.run(READER, &statements)).await).await;
        arena.end_node();
    }
    for repeated in [120_000, 400_000] {
        let (name, sql) =
            (format!("{repeated} repeated parameters in a prepared IN"), many_parameters(repeated));
        arena
            .attack(&name, STOPPED, async |target| {
                in_time(client::answer(async {
                    let session = target.log_in(READER).await?;
                    session.batch_execute(TIMEOUT).await?;
                    session.prepare(&sql).await.map(drop)
                }))
                .await
            })
            .await;
        arena.end_node();
    }
    let sql = json_patch(300_000);
    arena.attack("json_patch, cancelled", STOPPED, async |target| cancelled(target, &sql).await).await;
    arena.end_node();
    arena
        .attack("json_patch, terminated", &["57P01", "closed"], async |target| terminated(target, &sql).await)
        .await;
    arena.judge();
}

/// An answer that comes in time; else none.
async fn in_time(answer: impl Future<Output = Answer>) -> Answer {
    let began = Instant::now();
    let answer = answer.await;
    if began.elapsed() <= ANSWERED_WITHIN { answer } else { Answer::Late(began.elapsed()) }
}

/// The process id of a session's backend.
async fn process_id(session: &tokio_postgres::Client) -> i64 {
    session.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0)
}

/// Waits until a statement of a session is seen to run.
async fn is_running(observer: &tokio_postgres::Client, process: i64) -> Result<(), tokio_postgres::Error> {
    let sql = "SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND state = 'active'";
    while observer.query_opt(sql, &[&process]).await?.is_none() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn cancelled(target: &Target, sql: &str) -> Answer {
    let (session, observer) = (target.log_in(READER).await.unwrap(), target.log_in(OWNER).await.unwrap());
    let (token, process) = (session.cancel_token(), process_id(&session).await);
    let (answer, _) = tokio::join!(client::answer(session.batch_execute(sql)), async {
        is_running(&observer, process).await?;
        token.cancel_query(NoTls).await
    });
    answer
}

async fn terminated(target: &Target, sql: &str) -> Answer {
    let (session, other) = (target.log_in(READER).await.unwrap(), target.log_in(READER).await.unwrap());
    let process = process_id(&session).await;
    let (answer, _) = tokio::join!(client::answer(session.batch_execute(sql)), async {
        is_running(&other, process).await?;
        other.query_one("SELECT pg_terminate_backend($1)", &[&process]).await.map(drop)
    });
    answer
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

/// Up to 3 MB of SQL.
fn many_parameters(repeated: usize) -> String {
    let different: Vec<String> = (1..=30_000).map(|n| format!("${n}")).collect();
    format!("SELECT 1 IN ({}{})", different.join(","), ",$30000".repeat(repeated))
}

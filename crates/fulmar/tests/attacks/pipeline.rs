//! What a client has sent behind a statement that does not notice a cancel, and statements whose client leaves while they wait for a
//! thread.
//!
//! ```text
//!   client    json_patch, INSERT | cancel              FATAL 57014, end of the connection
//!   session   json_patch ..............| 1 s grace ....| ......... the call returns: nothing else is run
//! ```

use tokio_postgres::Client;

use crate::arena::{Arena, OWNER, READER, Target};
use crate::client::{Answer, bind, parse, query};
use crate::common::until;

/// Keys of two objects. Patching one with the other is a single call, quadratic in their number: it takes seconds.
const KEYS: [u64; 3] = [20_000, 40_000, 80_000];
/// A cancel may come before the call has begun. So often it is tried again.
const ATTEMPTS: usize = 10;
/// More than a worker handles: the statement needs the tenant's thread of the pool.
const NEEDS_A_THREAD: &str = "SELECT length(hex(zeroblob(100000)))";

/// Clients that leave, and the size of the parameter that each has sent.
const LEAVING: usize = 20;
const PARAMETER_BYTES: usize = 400_000;
/// An Execute of the unnamed portal, and a Sync.
const EXECUTE_AND_SYNC: [u8; 15] = [b'E', 0, 0, 0, 9, 0, 0, 0, 0, 0, b'S', 0, 0, 0, 4];
/// What other sessions may have more than before of the memory for sessions.
const OTHERS_BYTES: u64 = 1 << 20;

fn schema() -> Vec<String> {
    let mut schema = vec![
        "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)".to_owned(),
        "CREATE TABLE docs(keys INTEGER PRIMARY KEY, a TEXT, b TEXT)".to_owned(),
    ];
    schema.extend(KEYS.map(|keys| {
        format!(
            "INSERT INTO docs WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {keys})
             SELECT {keys}, json_group_object('a'||i, i), json_group_object('b'||i, i) FROM n"
        )
    }));
    schema
}

/// A statement that is in a call that cannot be interrupted as soon as it has read its row.
fn slow(keys: u64) -> String {
    format!("{SLOW} FROM docs WHERE keys = {keys}")
}

const SLOW: &str = "SELECT length(json_patch(a, b))";
/// Reads the pages of the objects.
const WARM: &str = "SELECT count(*) FROM docs WHERE a > b";

async fn arena() -> Arena {
    let schema = schema();
    Arena::new("pipeline", &schema.iter().map(String::as_str).collect::<Vec<_>>()).await
}

type Form = fn(&str, &str) -> Vec<u8>;

/// Ways to send a statement and an INSERT behind it.
const FORMS: [(&str, Form); 3] = [
    ("an INSERT", |slow, insert| [query(slow), query(insert)].concat()),
    ("an INSERT and COMMIT", |slow, insert| ["BEGIN", slow, insert, "COMMIT"].map(query).concat()),
    ("an INSERT in the same message", |slow, insert| query(&format!("{slow}; {insert}"))),
];

fn insert(id: u64) -> String {
    format!("INSERT INTO t VALUES ({id}, 'pipelined')")
}

async fn rows(observer: &Client, id: u64) -> i64 {
    let sql = format!("SELECT count(*) FROM t WHERE a = {id}");
    observer.query_one(&sql, &[]).await.unwrap().get(0)
}

/// The process ids of sessions that run a statement that starts like this.
async fn running(observer: &Client, start: &str) -> Vec<i32> {
    let sql = format!(
        "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query LIKE '{start}%' ORDER BY pid"
    );
    observer.query(&sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn are_gone(observer: &Client, sessions: &[i32]) -> bool {
    let found = observer.query("SELECT pid FROM pg_stat_activity", &[]).await.unwrap();
    !found.iter().any(|row| sessions.contains(&row.get(0)))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_behind_a_cancelled_statement_is_run() {
    let mut arena = arena().await;
    for ((name, form), id) in FORMS.into_iter().zip(1..) {
        let target = arena.target().await;
        uncancelled(&target, form, id).await;
        let name = format!("{name} behind json_patch, cancelled");
        arena.attack(&name, &["57014"], async |target| cancelled(target, form, 100 * id).await).await;
        arena.end_node();
    }
    arena.judge();
}

/// Behind a statement that is not cancelled the INSERT is run.
async fn uncancelled(target: &Target, form: Form, id: u64) {
    let mut raw = target.log_in_raw(OWNER).await.unwrap();
    raw.send(&form("SELECT 1", &insert(id))).await.unwrap();
    let observer = target.log_in(OWNER).await.unwrap();
    until("the row is there", async || rows(&observer, id).await == 1).await;
}

async fn cancelled(target: &Target, form: Form, id: u64) -> Answer {
    for (attempt, keys) in (0..).zip(KEYS.into_iter().flat_map(|keys| [keys; ATTEMPTS])) {
        if let Some(answer) = given_up(target, form, id + attempt, keys).await {
            return answer;
        }
    }
    Answer::Wrong("every call has ended before the grace period".to_owned())
}

/// `None` if the call has ended before the connection was closed.
async fn given_up(target: &Target, form: Form, id: u64, keys: u64) -> Option<Answer> {
    let observer = target.log_in(OWNER).await.unwrap();
    observer.batch_execute(WARM).await.unwrap();
    let mut raw = target.log_in_raw(OWNER).await.unwrap();
    raw.send(&form(&slow(keys), &insert(id))).await.unwrap();
    let mut sessions = Vec::new();
    until("the statement runs", async || {
        sessions = running(&observer, SLOW).await;
        !sessions.is_empty() || rows(&observer, id).await > 0
    })
    .await;
    raw.cancel().await.unwrap();
    // All messages, until an error or the end.
    let answer = raw.read_until(b'Z', usize::MAX).await;
    if !matches!(raw.read_until(b'Z', 1).await, Answer::Closed(_)) {
        return None;
    }
    // The tenant's thread is free when the call has returned.
    until("the call returns", async || observer.batch_execute(NEEDS_A_THREAD).await.is_ok()).await;
    until("the session ends", async || are_gone(&observer, &sessions).await).await;
    match rows(&observer, id).await {
        0 => Some(answer),
        _ => Some(Answer::Wrong(format!("the row is there, though the client got {answer}"))),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_of_clients_that_left_are_not_run() {
    let mut arena = arena().await.configured(|command| {
        command.arg("--public-metrics");
    });
    arena.attack("clients leave the queue for a thread", &["00000"], async |target| left(target).await).await;
    arena.judge();
}

async fn left(target: &Target) -> Answer {
    for keys in KEYS {
        if let Some(answer) = left_during(target, keys).await {
            return answer;
        }
    }
    Answer::Wrong("every call has ended before all statements waited".to_owned())
}

/// One session has the tenant's thread. Clients whose statements wait for it disconnect. `None` if the thread was free before.
async fn left_during(target: &Target, keys: u64) -> Option<Answer> {
    let observer = target.log_in(OWNER).await.unwrap();
    observer.batch_execute("DELETE FROM t").await.unwrap();
    observer.batch_execute(WARM).await.unwrap();
    let mut first = target.log_in_raw(READER).await.unwrap();
    let mut leaving = Vec::new();
    for _ in 0..LEAVING {
        leaving.push(target.log_in_raw(OWNER).await.unwrap());
    }
    let memory = || target.metric("fulmar_session_memory_bytes");
    let before = memory();
    first.send(&query(&slow(keys))).await.unwrap();
    until("the first statement runs", async || !running(&observer, SLOW).await.is_empty()).await;
    let parameter = vec![b'x'; PARAMETER_BYTES];
    for (id, raw) in leaving.iter_mut().enumerate() {
        let sql = format!("INSERT INTO t VALUES ({id}, $1)");
        raw.send(&[&parse(&sql), &bind("", &parameter)[..], &EXECUTE_AND_SYNC].concat()).await.unwrap();
    }
    let mut sessions = Vec::new();
    until("all statements wait, or the first has ended", async || {
        sessions = running(&observer, "INSERT").await;
        sessions.len() == LEAVING || running(&observer, SLOW).await.is_empty()
    })
    .await;
    if sessions.len() < LEAVING {
        return None;
    }
    assert!(memory() >= before + (LEAVING * PARAMETER_BYTES) as u64, "their statements are held");
    drop(leaving);
    until("their sessions end", async || are_gone(&observer, &sessions).await).await;
    let answer = first.read_until(b'Z', 1).await;
    let count: i64 = observer.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0);
    if count != 0 {
        return Some(Answer::Wrong(format!("{count} statements of clients that had left were run")));
    }
    until("their memory is released", async || memory() <= before + OTHERS_BYTES).await;
    Some(answer)
}

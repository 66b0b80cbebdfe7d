//! Pending statements must not run after their session was cancelled or closed.
//!
//! - Statements pipelined behind a call that cannot be interrupted, when that call is cancelled.
//! - Statements that wait for a thread, when their client disconnects.
//!
//! ```text
//!   client    json_patch, INSERT | cancel              FATAL 57014, connection closed
//!   session   json_patch ..............| 1 s grace ....| .. the call returns: nothing else is run
//! ```

use std::time::Duration;

use tokio_postgres::Client;

use crate::client::{RESPONSE_TIMEOUT, Response, bind, parse, query};
use crate::common::{wait_until, wait_up_to};
use crate::test_bench::{OWNER, READER, Target, TestBench};

/// Numbers of keys of two objects. `json_patch` of the two is a single call that takes seconds: its
/// time is quadratic in this number.
const KEYS: [u64; 3] = [20_000, 40_000, 80_000];
/// Number of attempts for each number of keys, because a cancel may arrive after the call.
const ATTEMPTS: usize = 10;
/// CPU time after which a statement is inside the call: what precedes it takes a few milliseconds.
const IN_CALL: Duration = Duration::from_millis(50);
/// A statement too large for a worker. It runs on the tenant's thread of the pool.
const NEEDS_A_THREAD: &str = "SELECT length(hex(zeroblob(100000)))";

/// Number of clients that disconnect.
const LEAVING: usize = 20;
/// Size of the parameter that each of them sends.
const PARAMETER_BYTES: usize = 400_000;
/// An Execute of the unnamed portal, and a Sync.
const EXECUTE_AND_SYNC: [u8; 15] = [b'E', 0, 0, 0, 9, 0, 0, 0, 0, 0, b'S', 0, 0, 0, 4];
/// Tolerated growth of the session memory of other sessions.
const TOLERANCE_BYTES: u64 = 1 << 20;

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

/// Returns a statement that enters an uninterruptible call once it has read its row.
fn slow(keys: u64) -> String {
    format!("{SLOW} FROM docs WHERE keys = {keys}")
}

const SLOW: &str = "SELECT length(json_patch(a, b))";
/// Reads the pages of the objects into the cache.
const WARM: &str = "SELECT count(*) FROM docs WHERE a > b";

async fn arena() -> TestBench {
    let schema = schema();
    TestBench::new("pipeline", &schema.iter().map(String::as_str).collect::<Vec<_>>()).await
}

type Form = fn(&str, &str) -> Vec<u8>;

/// Ways to send a statement followed by an INSERT.
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

/// Returns the process ids of sessions that run a statement with this prefix.
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
async fn statements_behind_a_cancelled_one_are_not_run() {
    let mut arena = arena().await;
    for ((name, form), id) in FORMS.into_iter().zip(1..) {
        let target = arena.target().await;
        uncancelled(&target, form, id).await;
        let name = format!("{name} behind json_patch, cancelled");
        arena.attack(&name, &["57014"], async |target| cancelled(target, form, 100 * id).await).await;
        arena.end_node();
    }
    arena.assert_no_failures();
}

/// Checks that the INSERT runs if the statement before it is not cancelled.
async fn uncancelled(target: &Target, form: Form, id: u64) {
    let mut raw = target.log_in_raw(OWNER).await.unwrap();
    raw.send(&form("SELECT 1", &insert(id))).await.unwrap();
    let observer = target.log_in(OWNER).await.unwrap();
    wait_until("the row is inserted", async || rows(&observer, id).await == 1).await;
}

async fn cancelled(target: &Target, form: Form, id: u64) -> Response {
    for (attempt, keys) in (0..).zip(KEYS.into_iter().flat_map(|keys| [keys; ATTEMPTS])) {
        if let Some(answer) = cancel_during_call(target, form, id + attempt, keys).await {
            return answer;
        }
    }
    Response::Wrong("every call has returned within the grace period".to_owned())
}

/// Cancels a call. Returns `None` if it has returned before the node closed the connection.
async fn cancel_during_call(target: &Target, form: Form, id: u64, keys: u64) -> Option<Response> {
    let observer = target.log_in(OWNER).await.unwrap();
    observer.batch_execute(WARM).await.unwrap();
    let mut raw = target.log_in_raw(OWNER).await.unwrap();
    let before = target.offload_cpu();
    raw.send(&form(&slow(keys), &insert(id))).await.unwrap();
    let mut sessions = Vec::new();
    wait_until("the statement is in the call", async || {
        sessions = running(&observer, SLOW).await;
        let is_in_call = !sessions.is_empty() && target.offload_cpu() >= before + IN_CALL;
        is_in_call || rows(&observer, id).await > 0
    })
    .await;
    raw.cancel().await.unwrap();
    // Read all messages until an error or the end of the connection.
    let answer = raw.read_until(b'Z', usize::MAX).await;
    if !matches!(raw.read_until(b'Z', 1).await, Response::Closed(_)) {
        return None;
    }
    // The tenant's thread becomes available when the call has returned.
    let returns = async || observer.batch_execute(NEEDS_A_THREAD).await.is_ok();
    wait_up_to(RESPONSE_TIMEOUT, "the call returns", returns).await;
    wait_until("the session ends", async || are_gone(&observer, &sessions).await).await;
    match rows(&observer, id).await {
        0 => Some(answer),
        _ => Some(Response::Wrong(format!("the row was inserted, but the client received {answer}"))),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_of_disconnected_clients_are_not_run() {
    let mut arena = arena().await.configured(|command| {
        command.arg("--public-metrics");
    });
    arena
        .attack("clients disconnect while they wait for a thread", &["00000"], async |target| {
            disconnected(target).await
        })
        .await;
    arena.assert_no_failures();
}

async fn disconnected(target: &Target) -> Response {
    for keys in KEYS {
        if let Some(answer) = disconnect_during_call(target, keys).await {
            return answer;
        }
    }
    Response::Wrong("every call has returned before all statements were waiting".to_owned())
}

/// Disconnects clients with statements that wait for the tenant's thread, which one session
/// occupies. Returns `None` if the thread became available before all of them waited.
async fn disconnect_during_call(target: &Target, keys: u64) -> Option<Response> {
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
    wait_until("the first statement runs", async || !running(&observer, SLOW).await.is_empty()).await;
    let parameter = vec![b'x'; PARAMETER_BYTES];
    for (id, raw) in leaving.iter_mut().enumerate() {
        let sql = format!("INSERT INTO t VALUES ({id}, $1)");
        raw.send(&[&parse(&sql), &bind("", &parameter)[..], &EXECUTE_AND_SYNC].concat()).await.unwrap();
    }
    let mut sessions = Vec::new();
    wait_up_to(RESPONSE_TIMEOUT, "all statements wait, or the first one has ended", async || {
        sessions = running(&observer, "INSERT").await;
        sessions.len() == LEAVING || running(&observer, SLOW).await.is_empty()
    })
    .await;
    if sessions.len() < LEAVING {
        return None;
    }
    assert!(
        memory() >= before + (LEAVING * PARAMETER_BYTES) as u64,
        "waiting statements must be counted as session memory"
    );
    drop(leaving);
    wait_until("the sessions of the disconnected clients end", async || are_gone(&observer, &sessions).await)
        .await;
    let answer = first.read_until(b'Z', 1).await;
    let count: i64 = observer.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0);
    if count != 0 {
        return Some(Response::Wrong(format!("{count} statements of disconnected clients were run")));
    }
    wait_until("their memory is released", async || memory() <= before + TOLERANCE_BYTES).await;
    Some(answer)
}

//! Attacks on memory: the memory that sessions use is bounded per tenant and per node.

use std::io;
use std::ops::Range;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::timeout;

use crate::client::{self, FLUSH, RESPONSE_TIMEOUT, Raw, Response, bind, message, parse};
use crate::test_bench::{OWNER, READER, Target, TestBench};

/// Rejected for its size, before or after it was received.
const REJECTED: &[&str] = &["54000", "53200", "53400"];
/// Rejected, or executed within the node's memory.
const BOUNDED: &[&str] = &["00000", "54000", "53200", "53400", "57014", "53300"];

/// Executed, or stopped by `statement_timeout`.
const RUN: &[&str] = &["00000", "57014"];

const MB: usize = 1 << 20;

/// Deadline of an attack in one session. An attack that takes longer is a hang.
const ATTACK_TIMEOUT: Duration = RESPONSE_TIMEOUT;
/// Interval of the check whether the node has stopped reading because memory is used up.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Session memory from which on the node may stop reading: half of a database's limit, which is 32
/// MiB with `--memory 256MiB`.
const MIN_USED_BYTES: u64 = 16 << 20;

/// Tables of 1,900 columns. Three sessions can read the schema of the few; that of the many may
/// exceed the memory of statements.
const FEW_TABLES: Range<usize> = 0..50;
const MANY_TABLES: Range<usize> = 50..1800;
/// Number of tables that one transaction creates.
const TABLE_BATCH: usize = 50;

const SCHEMA: &[&str] = &[
    "CREATE TABLE t(a INTEGER PRIMARY KEY, b INTEGER)",
    "INSERT INTO t VALUES (1, 1)",
    "CREATE TABLE thousand(a INTEGER PRIMARY KEY)",
    "INSERT INTO thousand WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000) SELECT i FROM n",
];

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "a list of attacks, which share one node")]
async fn memory_is_bounded() {
    let mut arena = TestBench::new("memory", SCHEMA).await.configured(|command| {
        command.arg("--public-metrics");
    });
    let list = "1,".repeat(30 * MB);
    for (name, sql) in [
        ("60 MB of = ANY (ARRAY[...])", format!("SELECT count(*) FROM t WHERE b = any(ARRAY[{list}1])")),
        ("60 MB of IN (...)", format!("SELECT count(*) FROM t WHERE b IN ({list}1)")),
        ("60 MB of VALUES", format!("SELECT count(*) FROM (VALUES {}(1))", "(1),".repeat(15 * MB))),
        ("60 MB of one literal", format!("SELECT length('{}')", "x".repeat(60 * MB))),
        ("60 MB of statements", format!("SELECT length('{}');", "x".repeat(60_000)).repeat(1000)),
        (
            "0.9 MB of = ANY (ARRAY[...])",
            format!("SELECT count(*) FROM t WHERE b = any(ARRAY[{}1])", "1,".repeat(450_000)),
        ),
        ("0.9 MB of VALUES", format!("SELECT count(*) FROM (VALUES {}(1))", "(1),".repeat(225_000))),
        ("60 MB of comments", format!("SELECT 1 {}", "/*x*/ ".repeat(10 * MB))),
    ] {
        let expected = if name.contains("(...)") { REJECTED } else { BOUNDED };
        arena.statement(name, expected, READER, &sql).await;
    }
    drop(list);
    for megabytes in [60, 7] {
        let value = vec![b'x'; megabytes * MB];
        let name = format!("4 Binds of {megabytes} MB without Execute in 16 sessions");
        arena
            .attack(&name, BOUNDED, async |target| {
                let binds: Vec<_> = (0..4).map(|n| bind(&format!("p{n}"), &value)).collect();
                in_sessions(target, 16, async |raw: &mut Raw| {
                    raw.send(&parse("SELECT $1")).await?;
                    for bind in &binds {
                        raw.send(bind).await?;
                    }
                    raw.send(&FLUSH).await?;
                    Ok(raw.read_until(b'2', binds.len()).await)
                })
                .await
            })
            .await;
    }
    let half = &client::query(&"x".repeat(63 * MB))[..60 * MB];
    arena
        .attack(
            "30 queries of 63 MB, sent in part",
            &["00000", "53200", "54000", "53300", "closed"],
            async |target| {
                in_sessions(target, 30, async |raw: &mut Raw| {
                    raw.send(half).await.map(|()| Response::Success)
                })
                .await
            },
        )
        .await;
    arena
        .attack("200 prepared statements of 0.9 MB in 8 sessions", BOUNDED, async |target| {
            let text = format!("SELECT length('{}')\0", "x".repeat(900_000));
            in_sessions(target, 8, async |raw: &mut Raw| {
                for n in 0..200 {
                    let name = format!("s{n}\0");
                    raw.send(&message(b'P', &[name.as_bytes(), text.as_bytes(), &[0, 0]])).await?;
                }
                raw.send(&FLUSH).await?;
                Ok(raw.read_until(b'1', 200).await)
            })
            .await
        })
        .await;
    arena
        .attack("2,000 Describes of 65,535 parameters in 4 sessions", BOUNDED, async |target| {
            let types = [0, 0, 0, 25].repeat(65_535);
            let parse = message(b'P', &[b"\0SELECT 1\0\xff\xff", &types]);
            let describes = message(b'D', &[b"S\0"]).repeat(2000);
            in_sessions(target, 4, async |raw: &mut Raw| {
                raw.send(&parse).await?;
                raw.send(&describes).await?;
                Ok(raw.read_until(b't', 100).await)
            })
            .await
        })
        .await;
    for bytes in [2 * MB, 900_000] {
        let name = format!("600 statements of {bytes} bytes in a transaction");
        arena
            .attack(&name, BOUNDED, async |target| {
                let sql = format!("UPDATE t SET b = length('{}')", "x".repeat(bytes));
                let statements = [vec!["BEGIN"], vec![sql.as_str(); 600], vec!["COMMIT"]].concat();
                target.run(OWNER, &statements).await
            })
            .await;
    }
    arena
        .attack("600 savepoints with names of 0.9 MB", BOUNDED, async |target| {
            let name = "x".repeat(900_000);
            let statements: Vec<String> = (0..600).map(|n| format!("SAVEPOINT s{n}{name}")).collect();
            let statements: Vec<&str> =
                ["BEGIN"].into_iter().chain(statements.iter().map(String::as_str)).collect();
            target.run(OWNER, &statements).await
        })
        .await;
    arena
        .attack("100 parameters with names of 4 MB", REJECTED, async |target| {
            let set = "SELECT set_config('app.' || hex(zeroblob(2000000)) || a, 'x', false) FROM thousand LIMIT 100";
            target.run(READER, &["BEGIN", set]).await
        })
        .await;
    arena
        .attack("columns of 50 tables of 1,900 columns", RUN, async |target| {
            match create_tables(target, FEW_TABLES).await {
                Response::Success => count_columns(target).await,
                error => Response::Wrong(format!("could not create the tables: {error}")),
            }
        })
        .await;
    arena
        .attack("columns of up to 1,800 tables of 1,900 columns", BOUNDED, async |target| {
            for first in MANY_TABLES.step_by(TABLE_BATCH) {
                let created = create_tables(target, first..first + TABLE_BATCH).await;
                if !BOUNDED.contains(&created.state()) {
                    return created;
                }
                if created != Response::Success {
                    break;
                }
            }
            // Those that could be created.
            count_columns(target).await
        })
        .await;
    arena
        .attack("COPY of values of 120 MB in 2 sessions", BOUNDED, async |target| {
            in_sessions(target, 2, async |raw: &mut Raw| {
                raw.send(&client::query(
                    "COPY (SELECT hex(zeroblob(60000000)) FROM thousand LIMIT 2) TO STDOUT",
                ))
                .await?;
                Ok(raw.read_until(b'C', 1).await)
            })
            .await
        })
        .await;
    for (name, sql) in [
        (
            "group_concat of 1 GB",
            "SELECT length(group_concat(b)) FROM (SELECT zeroblob(1000000) AS b FROM thousand)",
        ),
        ("hex of 240 MB", "SELECT length(hex(hex(zeroblob(60000000))))"),
        ("printf of 200 MB", "SELECT length(printf('%200000000d', 1))"),
        (
            "json_group_array of 1 GB",
            "SELECT length(json_group_array(b)) FROM (SELECT hex(zeroblob(500000)) AS b FROM thousand)",
        ),
        (
            "4 values of 100 MB in a row",
            "SELECT length(a || b || c || d) FROM (SELECT hex(zeroblob(50000000)) AS a, hex(zeroblob(50000000)) AS b, hex(zeroblob(50000000)) AS c, hex(zeroblob(50000000)) AS d)",
        ),
    ] {
        arena.statement(name, BOUNDED, READER, sql).await;
    }
    let join = "SELECT current_schemas(true), array_to_string('{NULL' || replace(hex(zeroblob(200000)), '00', ',NULL') || '}', ',', hex(zeroblob(1000000)))";
    arena.statement("array_to_string of 400 GB", REJECTED, READER, join).await;
    arena.assert_no_failures();
}

/// Runs an attack in several raw sessions. Returns the first error, or success. All sessions stay
/// open until the last one has ended.
///
/// The node may stop reading from a session while its database has used up its session memory. Such
/// a session counts as successful.
async fn in_sessions(
    target: &Target,
    sessions: usize,
    attack: impl AsyncFn(&mut Raw) -> io::Result<Response>,
) -> Response {
    let attack = &attack;
    let sessions = (0..sessions).map(|_| async move {
        let mut raw = match target.log_in_raw(READER).await {
            Ok(raw) => raw,
            Err(error) => return (None, Response::Closed(error.to_string())),
        };
        let answer = tokio::select! {
            answer = timeout(ATTACK_TIMEOUT, attack(&mut raw)) => {
                answer.unwrap_or(Ok(Response::Timeout(ATTACK_TIMEOUT)))
            }
            () = memory_is_used_up(target) => Ok(Response::Success),
        };
        let answer = answer.unwrap_or_else(|error| Response::Closed(error.to_string()));
        (Some(raw), answer)
    });
    let answers = join_all(sessions).await;
    answers
        .into_iter()
        .map(|(_, answer)| answer)
        .find(|answer| *answer != Response::Success)
        .unwrap_or(Response::Success)
}

/// Waits until the node's sessions use so much memory that a database may have reached its limit.
async fn memory_is_used_up(target: &Target) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if target.metric("fulmar_session_memory_bytes") >= MIN_USED_BYTES {
            return;
        }
    }
}

/// Creates tables of 1,900 columns in one transaction.
async fn create_tables(target: &Target, tables: Range<usize>) -> Response {
    let columns: Vec<String> = (0..1900).map(|n| format!("c{n}")).collect();
    let columns = columns.join(",");
    let tables: String = tables.map(|n| format!("CREATE TABLE wide{n}({columns});")).collect();
    target.run(OWNER, &["BEGIN", &tables, "COMMIT"]).await
}

/// Reads `information_schema.columns` in three sessions.
async fn count_columns(target: &Target) -> Response {
    let count = ["SET statement_timeout = 5000", "SELECT count(*) FROM information_schema.columns"];
    let counts = join_all((0..3).map(async |_| target.run(READER, &count).await)).await;
    counts.into_iter().find(|answer| *answer != Response::Success).unwrap_or(Response::Success)
}

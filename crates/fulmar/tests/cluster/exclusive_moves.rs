//! `bulk` and `sql`: moves that copy everything while the partition is frozen, after open transactions
//! have ended.

use super::migrations::{ROWS, fill, final_report, message, rows, start_slow_move, step, wait_for_step};
use super::private_stores::{start_private, text};
use super::*;

const MECHANISMS: [&str; 2] = ["bulk", "sql"];

/// The error of a move if a transaction takes longer.
const TOO_LONG: &str = "a transaction in the database did not end for 10 s";

type Move = tokio::task::JoinHandle<Result<(), String>>;

fn start_move(cluster: &Cluster, to: usize, mechanism: &str) -> Move {
    let (url, sql) = (
        cluster.url(to, "fulmar"),
        format!("ALTER DATABASE shop MOVE TO '{}' USING {mechanism}", cluster.name(to)),
    );
    tokio::spawn(async move {
        let client = try_connect(&url).await.map_err(|error| message(&error))?;
        client.batch_execute(&sql).await.map_err(|error| message(&error))
    })
}

/// Waits until a move has begun, or has failed.
async fn wait_until_copying(cluster: &Cluster, moving: &Move) {
    let is_copying = async || step(cluster, 0, "shop").await.as_deref() == Some("copying");
    wait_until("the move has begun", async || moving.is_finished() || is_copying().await).await;
}

async fn run(client: &Client, sql: &str) {
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn database_is_copied_as_rows_and_loses_nothing() {
    let mut cluster = start_private().await;
    fill(&cluster, "shop").await;
    let objects = "CREATE TABLE item(id INTEGER PRIMARY KEY AUTOINCREMENT, name VARCHAR(20) NOT NULL UNIQUE, \
                     size INT CHECK (size > 0), twice INT GENERATED ALWAYS AS (size * 2) STORED); \
                   INSERT INTO item(name, size) VALUES ('one', 1), ('two', 2), ('three', 3); \
                   DELETE FROM item WHERE name = 'three'; \
                   CREATE TABLE part(item INT REFERENCES item ON DELETE CASCADE, what BYTEA); \
                   INSERT INTO part VALUES (1, '\\x00ff'), (2, NULL); \
                   CREATE INDEX by_text ON big(text); \
                   CREATE VIEW small AS SELECT name FROM item WHERE size < 2; \
                   CREATE VIRTUAL TABLE words USING fts5(body); \
                   INSERT INTO words VALUES ('some words'), ('others')";
    execute(&cluster, 0, "shop", objects).await;
    let queries = [
        "SELECT group_concat(type || name || coalesce(sql, ''), ';' ORDER BY type, name) FROM sqlite_schema",
        "SELECT group_concat(id || name || twice) || (SELECT seq FROM sqlite_sequence) FROM item",
        "SELECT group_concat(item || coalesce(hex(what), '-')) FROM part",
        "SELECT count(*) || min(text) || max(text) || sum(id) FROM big",
        "SELECT name FROM small",
        "SELECT group_concat(rowid || body) FROM words WHERE words MATCH 'words'",
        "PRAGMA integrity_check",
    ];
    let mut expected = Vec::new();
    for sql in queries {
        expected.push(text(&cluster, 0, sql).await);
    }
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = write(cluster.url(source, "shop"), stop.clone());
    with_timeout("the move", start_move(&cluster, to, "sql")).await.unwrap().unwrap();
    let seen = values(&cluster, 0, "shop").await.len();
    wait_until("progress", async || values(&cluster, 0, "shop").await.len() > seen + 5).await;
    stop.store(true, Ordering::Relaxed);
    let written = with_timeout("the writer", writer).await.unwrap();
    assert_eq!(owner(&cluster, 0, "shop").await, to);
    let report = final_report(&cluster, 0, "shop", 1).await;
    assert_eq!((&report["mechanism"], &report["failed"]), (&"sql".into(), &0.into()), "{report}");
    assert!(report["bytes"].as_u64().unwrap() > ROWS as u64 * 1000, "{report}");

    // It is durable at the destination, and moves back.
    cluster.kill(to).unwrap();
    cluster.start_node(to).await.unwrap();
    wait_until_reachable(&cluster, 0, "shop").await;
    for back in [false, true] {
        if back {
            with_timeout("the move back", start_move(&cluster, source, "sql")).await.unwrap().unwrap();
        }
        for (sql, expected) in queries.iter().zip(&expected) {
            assert_eq!(&text(&cluster, 0, sql).await, expected, "{sql}");
        }
        assert_eq!(values(&cluster, 0, "shop").await, written);
    }
    execute(
        &cluster,
        0,
        "shop",
        "INSERT INTO item(name, size) VALUES ('four', 4); DELETE FROM item WHERE id = 1",
    )
    .await;
    let sql = "SELECT group_concat(id ORDER BY id) || (SELECT count(*) FROM part) FROM item";
    assert_eq!(text(&cluster, 0, sql).await, "2,41");
}

/// Moves the database while a transaction is open. Returns false if the move has failed, because
/// the transaction has taken more than 10 s.
async fn move_with_open_transaction(cluster: &Cluster, open: &Client, mechanism: &str, to: usize) -> bool {
    let source = owner(cluster, 0, "shop").await;
    let other = connect(cluster, to, "shop").await;
    run(open, "DELETE FROM t").await;
    run(open, "BEGIN; INSERT INTO t VALUES (1)").await;
    let moving = start_move(cluster, to, mechanism);
    wait_until_copying(cluster, &moving).await;
    let next = tokio::spawn(async move {
        let sql = "BEGIN; INSERT INTO t VALUES (3); COMMIT";
        with_timeout(sql, other.batch_execute(sql)).await
    });
    run(open, "INSERT INTO t VALUES (2)").await;
    assert_eq!(owner(cluster, 0, "shop").await, source, "{mechanism}: the transaction is open");
    run(open, "COMMIT").await;
    let moved = with_timeout("the move", moving).await.unwrap();
    next.await.unwrap().unwrap();
    assert_eq!(values(cluster, 0, "shop").await, [1, 2, 3], "{mechanism}");
    if let Err(error) = &moved {
        assert!(error.contains(TOO_LONG), "{mechanism}: {error}");
    }
    moved.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn move_waits_for_open_transactions_and_new_ones_wait_for_the_move() {
    let cluster = start_private().await;
    fill(&cluster, "shop").await;
    for mechanism in MECHANISMS {
        let source = owner(&cluster, 0, "shop").await;
        let to = (source + 1) % 3;
        let open = connect(&cluster, source, "shop").await;
        wait_until("a move", async || move_with_open_transaction(&cluster, &open, mechanism, to).await).await;
        assert_eq!(owner(&cluster, 0, "shop").await, to);
    }
}

/// Cancels a move that waits for a transaction. Returns false if it has failed before, because more
/// than 10 s had passed.
async fn cancel_move(cluster: &Cluster, moving: Move) -> bool {
    wait_until_copying(cluster, &moving).await;
    let client = connect(cluster, 0, "fulmar").await;
    let sql = "ALTER DATABASE shop CANCEL MOVE";
    let cancelled = with_timeout(sql, client.batch_execute(sql)).await;
    let error = with_timeout("the move", moving).await.unwrap().unwrap_err();
    if error.contains(TOO_LONG) {
        return false;
    }
    cancelled.unwrap();
    assert!(error.contains("cancelled by an administrator"), "{error}");
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn move_is_undone_if_a_transaction_stays_open_or_it_is_cancelled() {
    let cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    for (mechanism, value) in MECHANISMS.into_iter().zip(1i64..) {
        let open = connect(&cluster, to, "shop").await;
        run(&open, &format!("BEGIN; INSERT INTO t VALUES ({value})")).await;
        if mechanism == "bulk" {
            let cancelled = async || cancel_move(&cluster, start_move(&cluster, to, mechanism)).await;
            wait_until("a cancelled move", cancelled).await;
        } else {
            let moving = start_move(&cluster, to, mechanism);
            let error = with_timeout("the move", moving).await.unwrap().unwrap_err();
            assert!(error.contains(TOO_LONG), "{error}");
        }
        assert_eq!(owner(&cluster, 0, "shop").await, source);
        run(&open, "COMMIT").await;
        assert_eq!(values(&cluster, 0, "shop").await, Vec::from_iter(1..=value), "{mechanism}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn database_is_at_its_node_after_either_end_of_a_copy_as_rows_has_died() {
    let mut cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    for victim in [to, source] {
        let moving = start_slow_move(&cluster, other, to, "sql");
        wait_for_step(&cluster, other, "shop", "handing over").await;
        cluster.kill(victim).unwrap();
        if victim == to {
            with_timeout("the move", moving).await.unwrap().unwrap_err();
        }
        cluster.start_node(victim).await.unwrap();
        wait_for_step(&cluster, other, "shop", "undone").await;
        assert_eq!(owner(&cluster, other, "shop").await, source);
        wait_until_reachable(&cluster, other, "shop").await;
        assert_eq!(rows(&cluster, other, "shop").await, ROWS);
    }
    with_timeout("the move", start_move(&cluster, to, "sql")).await.unwrap().unwrap();
    assert_eq!(rows(&cluster, source, "shop").await, ROWS);
}

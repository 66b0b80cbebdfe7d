//! What moves with a session besides its open transaction, and what a move waits for: temporary
//! tables, COPY.

use std::pin::Pin;

use bytes::Bytes;
use futures::SinkExt;
use tokio_postgres::CopyInSink;

use super::migrations::{fill, final_report, message, wait_for_step};
use super::*;

/// Lines of a COPY that the client's node cannot repeat.
const LINES: i64 = 200_000;

async fn run_on(client: &Client, sql: &str) {
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

async fn number(client: &Client, sql: &str) -> i64 {
    let row = with_timeout(sql, client.query_one(sql, &[])).await;
    row.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
}

fn start_move(
    cluster: &Cluster,
    through: usize,
    to: usize,
) -> tokio::task::JoinHandle<Result<(), tokio_postgres::Error>> {
    let url = cluster.url(through, "fulmar");
    let sql = format!("ALTER DATABASE shop MOVE TO '{}'", cluster.name(to));
    tokio::spawn(async move { try_connect(&url).await?.batch_execute(&sql).await })
}

/// Waits until a move is refused. Returns the reason.
async fn refusal(moving: tokio::task::JoinHandle<Result<(), tokio_postgres::Error>>) -> String {
    let error = with_timeout("the move", moving).await.unwrap().unwrap_err();
    format!("{}, {:?}", message(&error), error.as_db_error().and_then(|error| error.detail()))
}

#[tokio::test(flavor = "multi_thread")]
async fn temporary_tables_move_with_their_session() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let mut clients = Vec::new();
    for node in 0..3 {
        let client = connect(&cluster, node, "shop").await;
        run_on(&client, "CREATE TEMP TABLE mine AS SELECT * FROM big WHERE id <= 500; CREATE INDEX temp.texts ON mine(text)")
            .await;
        let insert = client.prepare("INSERT INTO mine VALUES ($1, 'new')").await.unwrap();
        clients.push((client, insert));
    }
    let idle = connect(&cluster, source, "shop").await;
    run_on(&idle, "CREATE TEMP TABLE mine(id INTEGER); INSERT INTO mine VALUES (7)").await;
    let count = "SELECT count(*) FROM mine LEFT JOIN big USING (id)";
    for (moved, to) in [(source + 1) % 3, (source + 2) % 3, source].into_iter().enumerate() {
        let moved = moved as i64;
        for (client, insert) in &clients {
            run_on(client, "BEGIN").await;
            with_timeout("an insert", client.execute(insert, &[&(10_000 + moved)])).await.unwrap();
            assert_eq!(number(client, count).await, 500 + moved + 1);
        }
        move_to(&cluster, (to + 1) % 3, "shop", to).await;
        assert_eq!(owner(&cluster, 0, "shop").await, to);
        for (client, insert) in &clients {
            // The transaction is repeated on the tables as they were before it.
            assert_eq!(number(client, count).await, 500 + moved + 1, "move {moved}");
            run_on(client, "ROLLBACK").await;
            assert_eq!(number(client, count).await, 500 + moved, "move {moved}");
            with_timeout("an insert", client.execute(insert, &[&(10_000 + moved)])).await.unwrap();
        }
    }
    assert_eq!(number(&idle, "SELECT id FROM mine").await, 7);
    run_on(&idle, "DROP TABLE mine").await;
    move_to(&cluster, 0, "shop", (source + 1) % 3).await;
    assert_eq!(number(&idle, "SELECT count(*) FROM sqlite_temp_schema").await, 0);
    assert_eq!(final_report(&cluster, 0, "shop", 4).await["failed"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn session_whose_temporary_tables_are_lost_ends() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let client = connect(&cluster, (source + 1) % 3, "shop").await;
    run_on(&client, "CREATE TEMP TABLE t(v)").await;
    cluster.kill(source).unwrap();
    // Without its temporary table the statement would change the other one.
    let failed = with_timeout("an insert", client.batch_execute("INSERT INTO t VALUES (1)")).await;
    let error = failed.unwrap_err();
    assert!(error.as_db_error().is_none_or(|error| error.code().code() == "57P01"), "{error:?}");
    assert_eq!(values(&cluster, (source + 1) % 3, "shop").await, [0i64; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn move_is_rolled_back_while_temporary_tables_are_too_large() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    let client = connect(&cluster, to, "shop").await;
    let large = "CREATE TEMP TABLE large AS WITH RECURSIVE n(i) AS \
                 (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1200) SELECT i, zeroblob(60000) FROM n";
    run_on(&client, large).await;
    let reason = refusal(start_move(&cluster, source, to)).await;
    assert!(reason.contains("temporary tables of more than 64 MiB"), "{reason}");
    assert_eq!(owner(&cluster, 0, "shop").await, source);
    assert_eq!(number(&client, "SELECT count(*) FROM large").await, 1200);
    run_on(&client, "DISCARD ALL").await;
    with_timeout("the move", start_move(&cluster, source, to)).await.unwrap().unwrap();
    assert_eq!(owner(&cluster, 0, "shop").await, to);
}

async fn send_lines(sink: &mut Pin<Box<CopyInSink<Bytes>>>, first: i64) {
    for start in (first..first + LINES).step_by(1000) {
        let lines: String = (start..start + 1000).map(|line| format!("{line}\n")).collect();
        with_timeout("lines", sink.send(Bytes::from(lines))).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_ends_before_its_database_moves_and_at_a_bound_the_move_is_rolled_back() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    let client = connect(&cluster, (source + 2) % 3, "shop").await;
    let sink = with_timeout("a copy", client.copy_in("COPY t FROM STDIN")).await.unwrap();
    let mut sink = Box::pin(sink);
    send_lines(&mut sink, 0).await;
    let reason = refusal(start_move(&cluster, source, to)).await;
    assert!(reason.contains("a COPY in the database did not end"), "{reason}");
    assert_eq!(owner(&cluster, 0, "shop").await, source);

    let moving = start_move(&cluster, source, to);
    wait_for_step(&cluster, 0, "shop", "handing over").await;
    send_lines(&mut sink, LINES).await;
    assert_eq!(with_timeout("the copy", sink.as_mut().finish()).await.unwrap(), 2 * LINES as u64);
    with_timeout("the move", moving).await.unwrap().unwrap();
    assert_eq!(owner(&cluster, 0, "shop").await, to);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2 * LINES);
}

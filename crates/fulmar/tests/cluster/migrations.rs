//! Migrations: their reports, cancellation, refusals, and the death of either end.

use std::time::Duration;

use serde_json::Value;

use super::*;

/// Slower than any test takes to copy a few pages.
const SLOWLY: &str = "LIMIT '1kB'";
pub(super) const ROWS: i64 = 2000;

/// The newest report of a database's migrations, as `fulmar moves` prints it.
pub(super) fn newest_report(cluster: &Cluster, through: usize, database: &str) -> Option<Value> {
    let server = cluster.url(through, "fulmar");
    let reports = stdout(&run(&["moves", database, "--server", &server, "--json"]));
    let reports: Vec<Value> = serde_json::from_str(&reports).unwrap();
    reports.into_iter().next()
}

/// The report of the database's move of this number, when it contains the waits of the clients:
/// their nodes are asked shortly after the end.
pub(super) async fn final_report(cluster: &Cluster, through: usize, database: &str, number: u64) -> Value {
    let mut newest = None;
    let is_final = |report: &Value| {
        report["number"] == number && report["outcome"] == "moved" && report["knows_waits"] == true
    };
    wait_until(&format!("the report of move {number}"), async || {
        newest = newest_report(cluster, through, database);
        newest.as_ref().is_some_and(is_final)
    })
    .await;
    newest.unwrap()
}

/// Fills a table with rows of a kilobyte, so that some hundred pages are cached.
pub(super) async fn fill(cluster: &Cluster, database: &str) {
    create(cluster, database).await;
    let sql = format!(
        "CREATE TABLE big(id INTEGER PRIMARY KEY, text TEXT); \
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) \
         INSERT INTO big SELECT i, hex(randomblob(500)) FROM n"
    );
    execute(cluster, 0, database, &sql).await;
    assert_eq!(rows(cluster, 0, database).await, ROWS);
}

/// Reads all rows.
pub(super) async fn rows(cluster: &Cluster, through: usize, database: &str) -> i64 {
    let client = connect(cluster, through, database).await;
    let sql = "SELECT count(*) FROM big WHERE length(text) = 1000";
    with_timeout(sql, client.query_one(sql, &[])).await.unwrap().get(0)
}

/// The step of the database's newest migration.
pub(super) async fn step(cluster: &Cluster, through: usize, database: &str) -> Option<String> {
    let client = connect(cluster, through, "fulmar").await;
    let sql = "SELECT step FROM fulmar.migrations WHERE tenant = $1 ORDER BY started DESC LIMIT 1";
    let row = with_timeout("the step", client.query_opt(sql, &[&database])).await.unwrap();
    row.map(|row| row.get(0))
}

pub(super) async fn wait_for_step(cluster: &Cluster, through: usize, database: &str, expected: &str) {
    let what = format!("migration is {expected}");
    wait_until(&what, async || step(cluster, through, database).await.as_deref() == Some(expected)).await;
}

/// Starts a move that copies slowly, through a node that is neither its source nor its destination if
/// that is possible. Returns its result.
pub(super) fn start_slow_move(
    cluster: &Cluster,
    through: usize,
    to: usize,
    mechanism: &str,
) -> tokio::task::JoinHandle<Result<(), tokio_postgres::Error>> {
    let (url, sql) = (
        cluster.url(through, "fulmar"),
        format!("ALTER DATABASE shop MOVE TO '{}' USING {mechanism} {SLOWLY}", cluster.name(to)),
    );
    tokio::spawn(async move { try_connect(&url).await?.batch_execute(&sql).await })
}

/// Moves the database while transactions are open. They continue at their snapshots, although others
/// change what they have read, before the move and after it.
pub(super) async fn move_with_open_transactions(cluster: &Cluster, mechanism: &str, to: usize) {
    let rows = "DELETE FROM pair; INSERT INTO pair VALUES (1, 'old'), (2, 'old'), (3, 'old')";
    let create = "CREATE TABLE IF NOT EXISTS pair(id INTEGER PRIMARY KEY, v TEXT)";
    execute(cluster, 0, "shop", &format!("{create}; {rows}")).await;
    let mut clients = Vec::new();
    for node in 0..3 {
        clients.push(connect(cluster, node, "shop").await);
    }
    let value = async |client: usize, sql: &str| {
        let row = with_timeout(sql, clients[client].query_one(sql, &[])).await;
        row.unwrap_or_else(|error| panic!("{mechanism}, client {client}, {sql}: {error:?}"))
            .get::<_, String>(0)
    };
    let run = async |client: usize, sql: &str| {
        with_timeout(sql, clients[client].batch_execute(sql)).await.map_err(|error| {
            let code = error.code().map(|code| code.code().to_owned());
            code.unwrap_or_else(|| panic!("{mechanism}, client {client}, {sql}: {error:?}"))
        })
    };
    let v = |id: usize| format!("SELECT v FROM pair WHERE id = {id}");
    let (now, random) = ("SELECT now()::TEXT", "SELECT random()::TEXT");
    let mut times = Vec::new();
    for client in 0..3 {
        run(client, "BEGIN").await.unwrap();
        assert_eq!(value(client, &v(1)).await, "old");
        value(client, random).await;
        times.push(value(client, now).await);
    }
    execute(cluster, 0, "shop", "UPDATE pair SET v = 'new'").await;
    let sql = format!("ALTER DATABASE shop MOVE TO '{}' USING '{mechanism}'", cluster.name(to));
    execute(cluster, (to + 1) % 3, "fulmar", &sql).await;
    assert_eq!(owner(cluster, 0, "shop").await, to);
    execute(cluster, 0, "shop", "UPDATE pair SET v = 'newer'").await;
    for (client, time) in times.iter().enumerate() {
        assert_eq!(value(client, &v(2)).await, "old", "{mechanism}, client {client}");
        assert_eq!(value(client, now).await, *time, "{mechanism}, client {client}");
        assert_eq!(value(client, &v(1)).await, "old", "{mechanism}, client {client}");
    }
    run(0, "COMMIT").await.unwrap();
    assert_eq!(value(0, &v(1)).await, "newer");
    // It would overwrite what it has not seen.
    assert_eq!(run(1, "UPDATE pair SET v = 'mine' WHERE id = 1").await, Err("40001".to_owned()));
    run(1, "ROLLBACK").await.unwrap();
    run(2, "ROLLBACK").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn open_transactions_continue_at_their_snapshots() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    for to in [(source + 1) % 3, (source + 2) % 3] {
        move_with_open_transactions(&cluster, "albatross", to).await;
    }
    let failed = final_report(&cluster, 0, "shop", 2).await["failed"].clone();
    assert_eq!(failed, 0, "no transaction may fail because of a move");
}

pub(super) fn message(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn report_says_what_was_copied_and_the_destination_is_warm() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    let server = cluster.url((source + 2) % 3, "fulmar");
    let moved = stdout(&run(&["move", "shop", "--to", cluster.name(to), "--server", &server]));
    assert!(moved.starts_with(&format!("moved shop to {}", cluster.name(to))), "{moved}");
    assert_eq!(owner(&cluster, 0, "shop").await, to);
    let again = stdout(&run(&["move", "shop", "--to", cluster.name(to), "--server", &server]));
    assert_eq!(again.trim(), format!("shop is at {}", cluster.name(to)));
    let report = final_report(&cluster, 0, "shop", 1).await;
    assert_eq!((&report["mechanism"], &report["failed"]), (&"albatross".into(), &0.into()), "{report}");
    assert_eq!(report["source"], cluster.name(source));
    // The rows alone fill 500 pages.
    let bytes = report["bytes"].as_u64().unwrap();
    assert!(bytes > 400 * 4096, "{report}");
    assert_eq!(report["rounds"].as_array().unwrap()[0]["bytes"].as_u64().unwrap(), bytes, "{report}");

    // The pages were in memory when the destination became the owner.
    assert_eq!(rows(&cluster, to, "shop").await, ROWS);
    let client = connect(&cluster, to, "shop").await;
    let sql = "SELECT page_misses FROM fulmar.tenant_stats WHERE tenant = 'shop'";
    let misses: i64 = with_timeout(sql, client.query_one(sql, &[])).await.unwrap().get(0);
    assert!(misses < 50, "{misses} pages were read after the move");

    // With an empty cache. A move to the owner does nothing.
    for to in [source, source] {
        execute(
            &cluster,
            0,
            "fulmar",
            &format!("ALTER DATABASE shop MOVE TO '{}' USING flush", cluster.name(to)),
        )
        .await;
    }
    let report = final_report(&cluster, 1, "shop", 2).await;
    assert_eq!((&report["mechanism"], &report["bytes"]), (&"flush".into(), &0.into()), "{report}");
    assert_eq!(rows(&cluster, 0, "shop").await, ROWS);

    // The command shows the report if that is known within 5 s.
    let mut others = [to, source].into_iter().cycle();
    wait_until("a move with a report", async || {
        let to = cluster.name(others.next().unwrap());
        let moved = stdout(&run(&["move", "shop", "--to", to, "--server", &server]));
        moved.starts_with(&format!("moved shop to {to}: ")) && moved.contains("frozen for")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn baselines_abort_open_transactions_and_no_others() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE log (n INTEGER)").await;
    let [idle, committing, preparing, outside] = [0, 1, 2, 2].map(|node| connect(&cluster, node, "shop"));
    let (idle, committing, preparing, outside) = tokio::join!(idle, committing, preparing, outside);
    let commit = with_timeout("a statement", preparing.prepare("COMMIT")).await.unwrap();
    for (mechanism, to) in [("stop", (source + 1) % 3), ("flush", source)] {
        for (client, value) in [(&idle, 1), (&committing, 2), (&preparing, 4)] {
            let sql = format!("BEGIN; INSERT INTO log VALUES ({value})");
            with_timeout(&sql, client.batch_execute(&sql)).await.unwrap();
        }
        let sql = format!("ALTER DATABASE shop MOVE TO '{}' USING {mechanism}", cluster.name(to));
        execute(&cluster, 0, "fulmar", &sql).await;
        assert_eq!(owner(&cluster, 0, "shop").await, to);
        let failed = [
            with_timeout("a statement", idle.batch_execute("SELECT count(*) FROM log")).await,
            with_timeout("a commit", committing.batch_execute("COMMIT")).await,
            with_timeout("a prepared commit", preparing.execute(&commit, &[])).await.map(drop),
        ];
        for failed in failed {
            let error = failed.unwrap_err();
            assert_eq!(error.code().unwrap().code(), "40001", "{error:?}");
            assert!(message(&error).contains("was aborted, because the database was moved"), "{error:?}");
        }
        // A COMMIT that fails ends the transaction.
        with_timeout("a rollback", idle.batch_execute("ROLLBACK")).await.unwrap();
        for client in [&idle, &committing, &preparing, &outside] {
            let sql = "INSERT INTO log VALUES (3)";
            with_timeout(sql, client.batch_execute(sql)).await.unwrap();
        }
    }
    let sql = "SELECT count(*) FROM log WHERE n = 3";
    let kept: i64 = with_timeout(sql, outside.query_one(sql, &[])).await.unwrap().get(0);
    let all: i64 =
        with_timeout("all", outside.query_one("SELECT count(*) FROM log", &[])).await.unwrap().get(0);
    assert_eq!((kept, all), (8, 8));
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_that_fails_because_its_transaction_cannot_be_repeated_ends_it() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let through = (source + 1) % 3;
    let client = connect(&cluster, through, "shop").await;
    // The random number is another one without the context of the transaction, which dies with the
    // node.
    let begin = "BEGIN; INSERT INTO t VALUES (1); SELECT random()";
    with_timeout(begin, client.batch_execute(begin)).await.unwrap();
    cluster.kill(source).unwrap();
    let error = with_timeout("the commit", client.batch_execute("COMMIT")).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "40001", "{error:?}");
    assert!(message(&error).contains("could not repeat the transaction"), "{error:?}");
    with_timeout("a statement", client.batch_execute("INSERT INTO t VALUES (2)")).await.unwrap();
    assert_eq!(values(&cluster, through, "shop").await, [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn move_can_be_cancelled_until_the_handover() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let moving = start_slow_move(&cluster, 0, (source + 1) % 3, "albatross");
    wait_for_step(&cluster, 1, "shop", "copying").await;
    let client = connect(&cluster, 1, "fulmar").await;
    let again = format!("ALTER DATABASE shop MOVE TO '{}'", cluster.name((source + 2) % 3));
    let error = with_timeout("a second move", client.batch_execute(&again)).await.unwrap_err();
    assert!(message(&error).contains("is already being moved"), "{error:?}");
    stdout(&run(&["move", "shop", "--cancel", "--server", &cluster.url(2, "fulmar")]));
    let error = with_timeout("the cancelled move", moving).await.unwrap().unwrap_err();
    assert!(message(&error).contains("cancelled by an administrator"), "{error:?}");
    assert_eq!(owner(&cluster, 0, "shop").await, source);
    let error = with_timeout("a cancel", client.batch_execute("ALTER DATABASE shop CANCEL MOVE")).await;
    assert!(message(&error.unwrap_err()).contains("no migration that can be cancelled"));
    move_to(&cluster, 0, "shop", (source + 2) % 3).await;
    assert_eq!(rows(&cluster, 0, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn source_that_dies_while_copying_is_failed_over_and_the_move_is_undone() {
    let mut cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    let moving = start_slow_move(&cluster, other, to, "albatross");
    wait_for_step(&cluster, other, "shop", "copying").await;
    cluster.kill(source).unwrap();
    let moved = with_timeout("the move", moving).await.unwrap();
    assert_eq!(rows(&cluster, other, "shop").await, ROWS);
    wait_until("another owner is known", async || owner(&cluster, other, "shop").await != source).await;
    let now = owner(&cluster, other, "shop").await;
    // The failover may have chosen the destination.
    match moved {
        Ok(()) => assert_eq!(now, to),
        Err(error) => assert!(now == other && message(&error).contains("was not moved"), "{error:?}"),
    }
    let next = if now == to { other } else { to };
    move_to(&cluster, to, "shop", next).await;
    assert_eq!((owner(&cluster, to, "shop").await, rows(&cluster, to, "shop").await), (next, ROWS));
}

#[tokio::test(flavor = "multi_thread")]
async fn destination_that_dies_while_pages_are_copied_leaves_the_database_at_its_node() {
    let mut cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    let moving = start_slow_move(&cluster, other, to, "albatross");
    wait_for_step(&cluster, other, "shop", "copying").await;
    cluster.kill(to).unwrap();
    with_timeout("the move", moving).await.unwrap().unwrap_err();
    assert_eq!(owner(&cluster, other, "shop").await, source);
    assert_eq!(rows(&cluster, other, "shop").await, ROWS);
    move_to(&cluster, other, "shop", other).await;
    assert_eq!(rows(&cluster, source, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_moves_are_refused_before_anything_happens() {
    let cluster = start().await;
    create(&cluster, "shop").await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE here WITH DURABILITY local").await;
    let client = connect(&cluster, 0, "fulmar").await;
    for (sql, state, expected) in [
        ("ALTER DATABASE shop MOVE TO 'n9'", "22023", "node \"n9\" does not exist"),
        ("ALTER DATABASE shop MOVE TO 'n2' USING magic", "22023", "\"magic\" does not exist"),
        ("ALTER DATABASE shop MOVE TO 'n2' LIMIT 'fast'", "22023", "invalid rate"),
        ("ALTER DATABASE nothing MOVE TO 'n2'", "3D000", "does not exist"),
        ("ALTER DATABASE shop CANCEL MOVE", "55000", "no migration that can be cancelled"),
    ] {
        let error = with_timeout(sql, client.batch_execute(sql)).await.unwrap_err();
        assert_eq!(error.code().map(tokio_postgres::error::SqlState::code), Some(state), "{sql}");
        assert!(message(&error).contains(expected), "{sql}: {error:?}");
    }
    let source = owner(&cluster, 0, "shop").await;
    for (mechanism, database) in [("live", "shop"), ("albatross", "here")] {
        let to = (owner(&cluster, 0, database).await + 1) % 3;
        let sql = format!("ALTER DATABASE {database} MOVE TO '{}' USING {mechanism}", cluster.name(to));
        let error = with_timeout(&sql, client.batch_execute(&sql)).await.unwrap_err();
        assert_eq!(error.code().map(tokio_postgres::error::SqlState::code), Some("0A000"), "{error:?}");
    }
    assert_eq!(owner(&cluster, 0, "shop").await, source);
    assert_eq!(step(&cluster, 0, "shop").await, None);
    let output = run(&["move", "shop", "--server", &cluster.url(0, "fulmar")]);
    assert!(!output.status.success(), "a move needs a destination");
    tokio::time::timeout(Duration::from_secs(60), async { values(&cluster, 0, "shop").await }).await.unwrap();
}

/// Waits until a move fails. Returns its SQLSTATE and its detail.
async fn failure(moving: tokio::task::JoinHandle<Result<(), tokio_postgres::Error>>) -> (String, String) {
    let error = with_timeout("the move", moving).await.unwrap().unwrap_err();
    let error = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
    (error.code().code().to_owned(), error.detail().unwrap_or_default().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_request_and_timeout_cancel_a_move_but_a_disconnect_does_not() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    let sql = format!("ALTER DATABASE shop MOVE TO '{}' {SLOWLY}", cluster.name(to));
    let cancelled = "The move was cancelled. The database stays where it was.";

    let client = connect(&cluster, other, "fulmar").await;
    let (token, statement) = (client.cancel_token(), sql.clone());
    let moving = tokio::spawn(async move { client.batch_execute(&statement).await });
    wait_for_step(&cluster, other, "shop", "copying").await;
    with_timeout("a cancel request", token.cancel_query(NoTls)).await.unwrap();
    assert_eq!(failure(moving).await, ("57014".to_owned(), cancelled.to_owned()));
    wait_for_step(&cluster, other, "shop", "undone").await;

    // The timeout may pass before the move has begun.
    let mut timeout = Duration::from_millis(500);
    loop {
        let (client, statement) = (connect(&cluster, source, "fulmar").await, sql.clone());
        let set = format!("SET statement_timeout = '{}ms'", timeout.as_millis());
        with_timeout(&set, client.batch_execute(&set)).await.unwrap();
        let moving = tokio::spawn(async move { client.batch_execute(&statement).await });
        let (state, detail) = failure(moving).await;
        assert_eq!(state, "57014", "{detail}");
        wait_for_step(&cluster, other, "shop", "undone").await;
        if detail == cancelled {
            break;
        }
        assert!(timeout < Duration::from_secs(30), "a move was not cancelled: {detail:?}");
        timeout *= 2;
    }
    assert_eq!(owner(&cluster, 0, "shop").await, source);

    let (client, connection) = tokio_postgres::connect(&cluster.url(to, "fulmar"), NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let moving = tokio::spawn(async move { client.batch_execute(&sql).await });
    wait_for_step(&cluster, other, "shop", "copying").await;
    connection.abort();
    moving.await.unwrap().unwrap_err();
    let client = connect(&cluster, other, "fulmar").await;
    wait_until("the end of the session", async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'ALTER%' AND state = 'active'";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    assert_eq!(step(&cluster, other, "shop").await.as_deref(), Some("copying"));
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop CANCEL MOVE").await;
    wait_for_step(&cluster, other, "shop", "undone").await;
    assert_eq!(rows(&cluster, other, "shop").await, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn move_of_a_dropped_database_ends() {
    let cluster = start().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let moving = start_slow_move(&cluster, (source + 2) % 3, (source + 1) % 3, "albatross");
    wait_for_step(&cluster, 0, "shop", "copying").await;
    execute(&cluster, 0, "fulmar", "DROP DATABASE shop WITH (FORCE)").await;
    assert_eq!(failure(moving).await.0, "3D000");
}

#[tokio::test(flavor = "multi_thread")]
async fn move_that_waits_for_others_can_be_cancelled() {
    let cluster = start().await;
    // A node copies four databases at a time.
    let names: Vec<String> = (0..5).map(|number| format!("shop{number}")).collect();
    for name in &names {
        fill(&cluster, name).await;
        move_to(&cluster, 0, name, 1).await;
    }
    let start = |name: &str| {
        let sql = format!("ALTER DATABASE {name} MOVE TO '{}' {SLOWLY}", cluster.name(2));
        let url = cluster.url(0, "fulmar");
        tokio::spawn(async move { try_connect(&url).await?.batch_execute(&sql).await })
    };
    let mut moves = Vec::new();
    for name in &names {
        moves.push(start(name));
        wait_for_step(&cluster, 0, name, "copying").await;
    }
    for name in names.iter().rev() {
        execute(&cluster, 0, "fulmar", &format!("ALTER DATABASE {name} CANCEL MOVE")).await;
        let error = with_timeout("the cancelled move", moves.pop().unwrap()).await.unwrap().unwrap_err();
        assert!(message(&error).contains("cancelled by an administrator"), "{error:?}");
    }
}

//! The wire protocol, used by a client library.

use std::time::Duration;

use crate::common::{Node, connect, state};
use futures::{SinkExt, StreamExt, TryStreamExt, pin_mut};
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, SimpleQueryMessage};

#[tokio::test(flavor = "multi_thread")]
async fn values_round_trip() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client
        .batch_execute(
            "CREATE TABLE v (i INTEGER, s SMALLINT, r REAL, t TEXT, b BLOB, o BOOLEAN, d DATE, m TIMESTAMP, \
             z TIMESTAMPTZ, u UUID, j JSON, c VARCHAR(10))",
        )
        .await
        .unwrap();
    let insert =
        client.prepare("INSERT INTO v (i, s, r, t, b, o) VALUES ($1, $2, $3, $4, $5, $6)").await.unwrap();
    let expected = [Type::INT8, Type::INT2, Type::FLOAT8, Type::TEXT, Type::BYTEA, Type::BOOL];
    assert_eq!(insert.params(), expected);
    let blob: &[u8] = &[0, 255];
    let inserted =
        client.execute(&insert, &[&i64::MAX, &-7i16, &0.1f64, &"h\u{e9}", &blob, &true]).await.unwrap();
    assert_eq!(inserted, 1);
    client
        .execute(
            &insert,
            &[&None::<i64>, &None::<i16>, &None::<f64>, &None::<&str>, &None::<&[u8]>, &None::<bool>],
        )
        .await
        .unwrap();

    let rows = client.query("SELECT i, s, r, t, b, o FROM v ORDER BY i IS NULL", &[]).await.unwrap();
    assert_eq!(rows[0].get::<_, i64>(0), i64::MAX);
    assert_eq!(rows[0].get::<_, i16>(1), -7);
    assert_eq!(rows[0].get::<_, f64>(2), 0.1);
    assert_eq!(rows[0].get::<_, &str>(3), "h\u{e9}");
    assert_eq!(rows[0].get::<_, &[u8]>(4), blob);
    assert!(rows[0].get::<_, bool>(5));
    assert_eq!(rows[1].get::<_, Option<i64>>(0), None);

    let count = client.query_one("SELECT count(*) FROM v WHERE i = $1", &[&i64::MAX]).await.unwrap();
    assert_eq!(count.get::<_, i64>(0), 1);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn first_row_determines_expression_types_in_simple_queries() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    let messages = client.simple_query("SELECT 1 AS a, 'x' AS b; SELECT 2").await.unwrap();
    let rows: Vec<_> = messages
        .iter()
        .filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => {
                Some((row.columns()[0].name().to_owned(), row.get(0).map(String::from)))
            }
            _ => None,
        })
        .collect();
    assert_eq!(rows[0], ("a".into(), Some("1".into())));
    assert_eq!(rows[1].1, Some("2".into()));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn query_messages_may_contain_many_statements() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    let count = async |text: String| {
        let messages = client.simple_query(&text).await.unwrap();
        messages.iter().filter(|message| matches!(message, SimpleQueryMessage::Row(_))).count()
    };
    assert_eq!(count(";".repeat(1 << 20) + "SELECT 1").await, 1);
    assert_eq!(count("SELECT 1;; ".repeat(5000)).await, 5000);
    let trigger = "CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END";
    assert_eq!(count(format!("CREATE TABLE t(a);; {trigger};; SELECT 1")).await, 1);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_postgres_sqlstates() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT NOT NULL)").await.unwrap();
    client.batch_execute("INSERT INTO t VALUES (1, 'x')").await.unwrap();
    assert_eq!(state(client.batch_execute("SELEC 1").await), "42601");
    assert_eq!(state(client.batch_execute("SELECT * FROM missing").await), "42P01");
    assert_eq!(state(client.execute("INSERT INTO t VALUES (1, 'y')", &[]).await), "23505");
    assert_eq!(state(client.execute("INSERT INTO t VALUES (2, NULL)", &[]).await), "23502");
    assert_eq!(state(client.batch_execute("SET nothing = 1").await), "42704");
    assert_eq!(state(client.query("SELECT 1; SELECT 2", &[]).await), "42601");
    assert_eq!(state(connect(&node.config("nowhere", "anna")).await.map(|_| ())), "3D000");
    // The session remains usable after each error.
    assert_eq!(client.query_one("SELECT b FROM t", &[]).await.unwrap().get::<_, &str>(0), "x");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_transactions_are_rolled_back() {
    let node = Node::insecure().await;
    let mut client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    let count = async |client: &tokio_postgres::Client| {
        client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0)
    };

    let transaction = client.transaction().await.unwrap();
    transaction.execute("INSERT INTO t VALUES (1)", &[]).await.unwrap();
    assert_eq!(state(transaction.execute("SELECT missing", &[]).await), "42703");
    assert_eq!(state(transaction.execute("SELECT 1", &[]).await), "25P02");
    transaction.rollback().await.unwrap();
    assert_eq!(count(&client).await, 0);

    // An error of the gateway fails the transaction like one of the engine.
    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(state(client.batch_execute("COPY t FROM STDIN (FORMAT binary)").await), "0A000");
    assert_eq!(state(client.batch_execute("INSERT INTO t VALUES (1)").await), "25P02");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(count(&client).await, 0);

    // The statements of one query message are one transaction.
    let failed = client.batch_execute("INSERT INTO t VALUES (1); INSERT INTO nowhere VALUES (2)").await;
    assert_eq!(state(failed), "42P01");
    assert_eq!(count(&client).await, 0);
    client.batch_execute("INSERT INTO t VALUES (1); INSERT INTO t VALUES (2);").await.unwrap();
    assert_eq!(count(&client).await, 2);

    // Unless they contain BEGIN and COMMIT themselves.
    let failed = client
        .batch_execute("BEGIN; INSERT INTO t VALUES (3); COMMIT; INSERT INTO t VALUES (4); SELECT missing")
        .await;
    assert_eq!(state(failed), "42703");
    assert_eq!(count(&client).await, 3);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_statements_are_answered_in_order() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)").await.unwrap();
    let insert = client.prepare("INSERT INTO t VALUES ($1, $2)").await.unwrap();
    let select = client.prepare("SELECT b FROM t WHERE a = $1").await.unwrap();
    let inserts = (0..200i64).map(|key| {
        let (client, insert) = (&client, &insert);
        async move { client.execute(insert, &[&key, &format!("row {key}")]).await.unwrap() }
    });
    futures::future::join_all(inserts).await;
    let selects = (0..200i64).map(|key| {
        let (client, select) = (&client, &select);
        async move { client.query_one(select, &[&key]).await.unwrap().get::<_, String>(0) }
    });
    let found = futures::future::join_all(selects).await;
    assert!(found.iter().enumerate().all(|(key, text)| *text == format!("row {key}")));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn portals_return_rows_in_batches() {
    let node = Node::insecure().await;
    let mut client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    let numbers: Vec<String> = (0..2500).map(|number| format!("({number})")).collect();
    client.batch_execute(&format!("INSERT INTO t VALUES {}", numbers.join(","))).await.unwrap();
    let transaction = client.transaction().await.unwrap();
    let portal = transaction.bind("SELECT a FROM t ORDER BY a", &[]).await.unwrap();
    let mut portions = Vec::new();
    let mut next = 0i64;
    loop {
        let rows = transaction.query_portal(&portal, 1000).await.unwrap();
        for row in &rows {
            assert_eq!(row.get::<_, i64>(0), next);
            next += 1;
        }
        portions.push(rows.len());
        if rows.len() < 1000 {
            break;
        }
    }
    assert_eq!(portions, [1000, 1000, 500]);
    transaction.commit().await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_results_are_spilled_to_a_file() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    // 40 MB: far more than is buffered in memory.
    let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000) \
               SELECT i, printf('%1000d', i) FROM n";
    let stream = client.query_raw(sql, std::iter::empty::<&i64>()).await.unwrap();
    pin_mut!(stream);
    let mut count = 0;
    while let Some(row) = stream.try_next().await.unwrap() {
        count += 1;
        assert_eq!(row.get::<_, &str>(1).trim(), count.to_string());
    }
    assert_eq!(count, 40_000);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_in_inserts_rows() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT, c BOOLEAN)").await.unwrap();
    let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
    pin_mut!(sink);
    for number in 0..1000 {
        // Lines are split between messages.
        sink.send(bytes::Bytes::from(format!("{number}\ttext\\t"))).await.unwrap();
        sink.send(bytes::Bytes::from(format!("{number}\t{}\n", if number % 2 == 0 { "t" } else { "\\N" })))
            .await
            .unwrap();
    }
    assert_eq!(sink.finish().await.unwrap(), 1000);
    let row = client.query_one("SELECT count(*), count(c), max(b) FROM t", &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (1000, 500));
    assert_eq!(row.get::<_, &str>(2), "text\t999");

    // A single invalid line rolls back the whole COPY.
    let sink = client.copy_in("COPY t (a, b) FROM STDIN").await.unwrap();
    pin_mut!(sink);
    sink.send(bytes::Bytes::from_static(b"2000\tx\n2001\n")).await.unwrap();
    assert_eq!(state(sink.finish().await), "22P04");
    let sink = client.copy_in("COPY t (a, b) FROM STDIN").await.unwrap();
    pin_mut!(sink);
    sink.send(bytes::Bytes::from_static(b"2000\tx\n1\ty\n")).await.unwrap();
    assert_eq!(state(sink.finish().await), "23505");
    assert_eq!(client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0), 1000);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_are_transactional() {
    let node = Node::insecure().await;
    let mut config = node.config("fulmar", "anna");
    config.application_name("tests").options("-c statement_timeout=1min");
    let (client, mut connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    let messages = futures::stream::poll_fn(move |cx| connection.poll_message(cx));
    let _driver = tokio::spawn(messages.for_each(|message| {
        assert!(matches!(message, Ok(AsyncMessage::Notice(_)) | Ok(_)));
        futures::future::ready(())
    }));
    let show =
        async |name: &str| client.query_one(&format!("SHOW {name}"), &[]).await.unwrap().get::<_, String>(0);
    assert_eq!(show("application_name").await, "tests");
    assert_eq!(show("statement_timeout").await, "1min");
    assert!(show("server_version").await.starts_with("15.0"));
    client.batch_execute("BEGIN; SET statement_timeout = '5min'; ROLLBACK").await.unwrap();
    assert_eq!(show("statement_timeout").await, "1min");
    client.batch_execute("BEGIN; SET LOCAL statement_timeout = '5min'; COMMIT").await.unwrap();
    assert_eq!(show("statement_timeout").await, "1min");
    // Resets to the connection options, as in PostgreSQL.
    client.batch_execute("SET app.x = 'y'; SET statement_timeout = 0; RESET ALL").await.unwrap();
    assert_eq!(show("statement_timeout").await, "1min");
    assert_eq!(state(client.query("SHOW app.x", &[]).await), "42704");
    node.stop().await;
}

const ENDLESS: &str =
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn statements_are_cancelled_on_request_and_by_timeout() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("BEGIN; SET LOCAL statement_timeout = '100ms'").await.unwrap();
    assert_eq!(state(client.batch_execute(ENDLESS).await), "57014");
    client.batch_execute("ROLLBACK").await.unwrap();

    let token = client.cancel_token();
    let running = client.batch_execute(ENDLESS);
    pin_mut!(running);
    // A cancel request that arrives before the statement runs has no effect, so it is repeated.
    let outcome = loop {
        tokio::select! {
            outcome = &mut running => break outcome,
            _ = tokio::time::sleep(Duration::from_millis(20)) => token.cancel_query(tokio_postgres::NoTls).await.unwrap(),
        }
    };
    assert_eq!(state(outcome), "57014");
    // A request that the gateway has not processed yet may cancel later statements.
    while let Err(error) = client.batch_execute("SELECT 1").await {
        assert_eq!(state(Err::<(), _>(error)), "57014");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_notifies_clients() {
    let node = Node::start(|config| {
        config.insecure = true;
        config.shutdown_grace = Duration::from_millis(100);
    })
    .await;
    let client = node.database("t1").await;
    // The first result is too large to be buffered until the end of the query message. Receiving it
    // shows that the message is being executed.
    let text = format!("SELECT printf('%100000d', 1); {ENDLESS}");
    let running = client.simple_query_raw(&text).await.unwrap();
    pin_mut!(running);
    while !matches!(running.try_next().await.unwrap(), Some(SimpleQueryMessage::Row(_))) {}
    let (idle, mut connection) = node.config("t1", "anna").connect(tokio_postgres::NoTls).await.unwrap();
    node.stop().await;
    assert_eq!(state(running.try_collect::<Vec<_>>().await), "57P01");
    let notification =
        futures::future::poll_fn(|cx| connection.poll_message(cx)).await.expect("the server sent no error");
    assert_eq!(state(notification.map(|_| ())), "57P01");
    drop(idle);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_metrics() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a)").await.unwrap();
    assert!(node.health().await.starts_with("HTTP/1.1 200"));
    let metrics = node.get("/metrics", "").await;
    assert!(metrics.contains("fulmar_statement_seconds_count 2"), "{metrics}");
    let pages = metrics.lines().find_map(|line| line.strip_prefix("fulmar_log_pages_total ")).unwrap();
    assert!(pages.parse::<u64>().unwrap() > 0);
    node.stop().await;
}

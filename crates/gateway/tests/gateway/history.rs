//! Point-in-time recovery in SQL: restore points, branches, restores, historical sessions.

use std::time::{Duration, SystemTime};

use crate::common::{Node, connect, ends, state, wait_until};
use tokio_postgres::Client;

async fn texts(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap();
    let rows = messages.into_iter().filter_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    rows.collect()
}

async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn databases_can_be_branched_and_restored() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    assert_eq!(texts(&shop, "SELECT time FROM fulmar.history").await, [""; 0]);
    for a in 1..=3 {
        shop.batch_execute(&format!("INSERT INTO t VALUES ({a})")).await.unwrap();
        node.engine.flush().await.unwrap();
        // Restore points are named by milliseconds, so each needs a different millisecond.
        let flushed = SystemTime::now();
        let is_later = || flushed.elapsed().is_ok_and(|elapsed| elapsed >= Duration::from_millis(2));
        wait_until("another millisecond", async || is_later()).await;
    }
    let times = texts(&shop, "SELECT time FROM fulmar.history ORDER BY version").await;
    assert_eq!(times.len(), 3);
    let sizes = "SELECT count(*) FROM fulmar.history WHERE size_bytes >= 8192 AND length(lineage) = 16";
    assert_eq!(number(&shop, sizes).await, 3);
    shop.batch_execute("INSERT INTO t VALUES (4)").await.unwrap();

    let branch = format!("CREATE DATABASE early BRANCH OF shop AT TIMESTAMP '{}' OWNER fulmar", times[1]);
    admin.batch_execute(&branch).await.unwrap();
    admin.batch_execute("CREATE DATABASE late BRANCH OF shop").await.unwrap();
    for (database, rows) in [("early", 2), ("late", 4)] {
        assert_eq!(
            number(&node.client(database).await, "SELECT count(*) FROM t").await,
            rows,
            "{database} {times:?}"
        );
    }

    let waiting = node.client("shop").await;
    waiting.batch_execute("BEGIN; INSERT INTO t VALUES (5)").await.unwrap();
    admin.batch_execute(&format!("ALTER DATABASE shop RESTORE TO TIMESTAMP '{}'", times[0])).await.unwrap();
    for client in [&shop, &waiting] {
        assert!(client.batch_execute("SELECT 1 FROM t").await.is_err());
    }
    assert!(ends(&shop).await && ends(&waiting).await);
    let shop = node.client("shop").await;
    assert_eq!(number(&shop, "SELECT count(*) FROM t").await, 1);
    assert_eq!(number(&shop, "SELECT count(DISTINCT lineage) FROM fulmar.history").await, 2);
    let event = "SELECT count(*) FROM fulmar.events WHERE kind = 'database.restored' AND database = 'shop'";
    assert_eq!(number(&admin, event).await, 1);

    // A restore can be undone.
    let before = "SELECT time FROM fulmar.history WHERE lineage = (SELECT lineage FROM fulmar.history ORDER BY time \
                  LIMIT 1) ORDER BY time DESC LIMIT 1";
    let before = texts(&shop, before).await;
    admin.batch_execute(&format!("ALTER DATABASE shop RESTORE TO TIMESTAMP '{}'", before[0])).await.unwrap();
    let shop = node.client("shop").await;
    assert_eq!(number(&shop, "SELECT count(*) FROM t").await, 4);
    shop.batch_execute("INSERT INTO t VALUES (5)").await.unwrap();
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_restores_are_rejected() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    node.engine.flush().await.unwrap();
    for (sql, expected) in [
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2020-01-01'", "22023"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2999-01-01'", "22023"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP 'noon'", "22007"),
        ("ALTER DATABASE missing RESTORE TO TIMESTAMP '2020-01-01'", "3D000"),
        ("CREATE DATABASE copy BRANCH OF shop AT TIMESTAMP '2020-01-01'", "22023"),
        ("CREATE DATABASE copy BRANCH OF missing", "3D000"),
        ("ALTER DATABASE fulmar RESTORE TO TIMESTAMP '2020-01-01'", "55006"),
        ("ALTER DATABASE shop SET retention = '367d'", "22023"),
    ] {
        assert_eq!(state(admin.batch_execute(sql).await), expected, "{sql}");
    }
    let refused = shop.batch_execute("ALTER DATABASE shop RESTORE TO TIMESTAMP '2020-01-01'").await;
    assert_eq!(state(refused), "0A000", "must fail outside the database fulmar");
    // The failed statements created nothing and disturbed no session.
    shop.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
    admin.batch_execute("CREATE DATABASE copy BRANCH OF shop").await.unwrap();
    admin
        .batch_execute("ALTER DATABASE shop SET retention = '7d'; ALTER DATABASE copy SET retention = 0")
        .await
        .unwrap();
    let kept = "SELECT tenant || ' ' || value || ' ' || \"default\" FROM fulmar.limits WHERE name = 'retention' ORDER BY 1";
    assert_eq!(texts(&admin, kept).await, ["copy 0 1d", "fulmar 1d 1d", "shop 7d 1d"]);
    assert!(connect(&node.config("copy", "anna")).await.is_ok());
    node.stop().await;
}

/// A client, and the notices that it receives.
async fn client_with_notices(
    node: &Node,
    database: &str,
) -> (Client, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let (client, mut connection) =
        node.config(database, "anna").connect(tokio_postgres::NoTls).await.unwrap();
    let (sender, notices) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let tokio_postgres::AsyncMessage::Notice(notice) = message {
                let _ = sender.send(notice.message().to_owned());
            }
        }
    });
    (client, notices)
}

#[tokio::test(flavor = "multi_thread")]
async fn as_of_shows_the_database_at_a_restore_point() {
    const COUNT: &str = "SELECT count(*) FROM t";
    let node = Node::insecure().await;
    let writer = node.database("shop").await;
    writer.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    for a in 1..=3 {
        writer.batch_execute(&format!("INSERT INTO t VALUES ({a})")).await.unwrap();
        node.engine.flush().await.unwrap();
    }
    let times = texts(&writer, "SELECT time FROM fulmar.history ORDER BY version").await;
    writer.batch_execute("INSERT INTO t VALUES (4); CREATE TABLE later (a INTEGER)").await.unwrap();
    let (client, mut notices) = client_with_notices(&node, "shop").await;
    let prepared = client.prepare(COUNT).await.unwrap();
    let count = async || client.query_one(&prepared, &[]).await.unwrap().get::<_, i64>(0);

    assert_eq!(texts(&client, "SHOW fulmar.snapshot_time").await, [""]);
    for (time, rows) in times.iter().zip(1..) {
        client.batch_execute(&format!("SET fulmar.as_of = '{time}'")).await.unwrap();
        let notice = notices.recv().await.unwrap();
        assert_eq!(notice, format!("showing the database as of {time}"));
        assert_eq!(texts(&client, "SHOW fulmar.snapshot_time").await, [time.as_str()]);
        assert_eq!(texts(&client, "SELECT current_setting('fulmar.snapshot_time')").await, [time.as_str()]);
        assert_eq!(count().await, rows);
        assert_eq!(texts(&client, "SELECT relname FROM pg_class WHERE relkind = 'r'").await, ["t"]);
    }
    client.batch_execute(&format!("SET fulmar.as_of TO '{}'", times[0])).await.unwrap();
    for sql in [
        "INSERT INTO t VALUES (1)",
        "BEGIN READ WRITE; DELETE FROM t",
        "CREATE TABLE u (a)",
        "CREATE PROCEDURE p() LANGUAGE lua AS 'return 1'",
    ] {
        let refused = client.batch_execute(sql).await;
        let hint = refused.as_ref().unwrap_err().as_db_error().unwrap().hint().unwrap_or_default().to_owned();
        assert_eq!((state(refused), hint.contains("RESET fulmar.as_of")), ("25006".into(), true), "{sql}");
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    let out = client.copy_out("COPY DATABASE TO STDOUT (FORMAT sqlite)").await.unwrap();
    let file: Vec<bytes::Bytes> = futures::TryStreamExt::try_collect(out).await.unwrap();
    let exported = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(exported.path(), file.concat()).unwrap();
    let stock = rusqlite::Connection::open(exported.path()).unwrap();
    assert_eq!(stock.query_row(COUNT, [], |row| row.get::<_, i64>(0)).unwrap(), 1);

    // Statements that return to the current data.
    for off in [
        "RESET fulmar.as_of",
        "SET fulmar.as_of = ''",
        "SET fulmar.as_of TO DEFAULT",
        "RESET ALL",
        "DISCARD ALL",
    ] {
        client.batch_execute(&format!("SET fulmar.as_of = '{}'", times[1])).await.unwrap();
        assert_eq!(number(&client, COUNT).await, 2);
        client.batch_execute(off).await.unwrap();
        assert_eq!(number(&client, COUNT).await, 4, "{off}");
    }
    client.batch_execute("INSERT INTO t VALUES (5); DELETE FROM t WHERE a = 5").await.unwrap();

    // For a single transaction.
    let begin = format!("BEGIN READ ONLY; SET LOCAL fulmar.as_of = '{}'", times[1]);
    for end in ["COMMIT", "ROLLBACK"] {
        client.batch_execute(&begin).await.unwrap();
        assert_eq!(number(&client, COUNT).await, 2);
        let refused = client.batch_execute("RESET fulmar.as_of").await;
        assert_eq!(state(refused), "25001", "cannot change as_of after the transaction's first query");
        client.batch_execute("ROLLBACK").await.unwrap();
        client.batch_execute(&begin).await.unwrap();
        assert_eq!(number(&client, COUNT).await, 2);
        client.batch_execute(end).await.unwrap();
        assert_eq!(number(&client, COUNT).await, 4, "{end}");
    }

    for (sql, expected) in [
        ("SET fulmar.as_of = 'noon'", "22007"),
        ("SET fulmar.as_of = '2020-01-01'", "22023"),
        ("SET fulmar.as_of = '2999-01-01'", "22023"),
        ("SELECT set_config('fulmar.as_of', '2020-01-01', false)", "22023"),
        ("SET fulmar.snapshot_time = '2020-01-01'", "55P02"),
        ("SET fulmar.asof = '2020-01-01'", "42704"),
    ] {
        assert_eq!(state(client.batch_execute(sql).await), expected, "{sql}");
        assert_eq!(number(&client, COUNT).await, 4, "{sql}");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn as_of_can_be_a_connection_option() {
    let node = Node::insecure().await;
    let writer = node.database("shop").await;
    writer.batch_execute("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1)").await.unwrap();
    node.engine.flush().await.unwrap();
    let time = texts(&writer, "SELECT time FROM fulmar.history").await.remove(0);
    writer.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
    let at = |time: &str| {
        let mut config = node.config("shop", "anna");
        config.options(format!("-c fulmar.as_of={}", time.replace(' ', "T")));
        config
    };
    let client = connect(&at(&time)).await.unwrap();
    assert_eq!(texts(&client, "SHOW fulmar.snapshot_time").await, [time.as_str()]);
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 1);
    assert_eq!(state(client.batch_execute("DELETE FROM t").await), "25006");
    let client = connect(&at("2020-01-01")).await.unwrap();
    assert_eq!(state(client.batch_execute("SELECT count(*) FROM t").await), "22023");
    // RESET returns to the value of the connection's options. Returning to the current data
    // requires an empty value.
    client.batch_execute("RESET fulmar.as_of").await.unwrap();
    assert_eq!(state(client.batch_execute("SELECT count(*) FROM t").await), "22023");
    client.batch_execute("SET fulmar.as_of = ''").await.unwrap();
    assert_eq!(number(&client, "SELECT count(*) FROM t").await, 2);
    node.stop().await;
}

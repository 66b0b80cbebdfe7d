//! Databases of the past, in SQL: what there is, branches, restores.

mod common;

use common::{Node, connect, state};
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
async fn a_database_is_branched_and_restored_in_sql() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    assert_eq!(texts(&shop, "SELECT time FROM fulmar.history").await, [""; 0]);
    for a in 1..=3 {
        shop.batch_execute(&format!("INSERT INTO t VALUES ({a})")).await.unwrap();
        node.engine.flush().await.unwrap();
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
        assert_eq!(number(&node.client(database).await, "SELECT count(*) FROM t").await, rows, "{database}");
    }

    let waiting = node.client("shop").await;
    waiting.batch_execute("BEGIN; INSERT INTO t VALUES (5)").await.unwrap();
    admin.batch_execute(&format!("ALTER DATABASE shop RESTORE TO TIMESTAMP '{}'", times[0])).await.unwrap();
    for client in [&shop, &waiting] {
        assert!(client.batch_execute("SELECT 1 FROM t").await.is_err());
    }
    assert!(shop.is_closed() && waiting.is_closed());
    let shop = node.client("shop").await;
    assert_eq!(number(&shop, "SELECT count(*) FROM t").await, 1);
    assert_eq!(number(&shop, "SELECT count(DISTINCT lineage) FROM fulmar.history").await, 2);
    let event = "SELECT count(*) FROM fulmar.events WHERE kind = 'database.restored' AND database = 'shop'";
    assert_eq!(number(&admin, event).await, 1);

    // It can be taken back.
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
async fn what_cannot_be_restored_is_said() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    node.engine.flush().await.unwrap();
    for (sql, expected) in [
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2020-01-01'", "22023"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP '2999-01-01'", "22023"),
        ("ALTER DATABASE shop RESTORE TO TIMESTAMP 'noon'", "22007"),
        ("ALTER DATABASE nobody RESTORE TO TIMESTAMP '2020-01-01'", "3D000"),
        ("CREATE DATABASE copy BRANCH OF shop AT TIMESTAMP '2020-01-01'", "22023"),
        ("CREATE DATABASE copy BRANCH OF nobody", "3D000"),
        ("ALTER DATABASE fulmar RESTORE TO TIMESTAMP '2020-01-01'", "55006"),
        ("ALTER DATABASE shop SET retention = '367d'", "22023"),
    ] {
        assert_eq!(state(admin.batch_execute(sql).await), expected, "{sql}");
    }
    let refused = shop.batch_execute("ALTER DATABASE shop RESTORE TO TIMESTAMP '2020-01-01'").await;
    assert_eq!(state(refused), "0A000", "not from here");
    // Nothing of it was made, and nobody was disturbed.
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

//! `fulmar.statements` and `fulmar.slow_statements`.

use std::time::Duration;

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::common::{Node, connect, state};

/// The rows of a query as text, columns separated by `|`.
async fn rows(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap();
    let text = |message: SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|column| row.get(column).unwrap_or("-")).collect::<Vec<_>>().join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(text).collect()
}

/// A node whose statements all count as slow.
async fn node(insecure: bool) -> Node {
    Node::start(|config| {
        config.insecure = insecure;
        config.slow_statement = Some(Duration::ZERO);
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_are_counted_by_text_without_constants() {
    let node = node(true).await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    shop.batch_execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v TEXT)").await.unwrap();
    for id in 1..=20 {
        shop.batch_execute(&format!("INSERT INTO t VALUES ({id}, 'secret{id}') -- secret")).await.unwrap();
    }
    let repeated = "INSERT INTO t VALUES (7, 'secret')";
    assert_eq!(state(shop.batch_execute(repeated).await), "23505");
    // Prepared, and with constants in the text: one statement.
    let prepared = shop.prepare("SELECT v FROM t WHERE id > $1").await.unwrap();
    for _ in 0..3 {
        assert_eq!(shop.query(&prepared, &[&10i64]).await.unwrap().len(), 10);
    }
    shop.batch_execute("SELECT v FROM t WHERE id > 18").await.unwrap();
    shop.batch_execute("SET statement_timeout = '59s'").await.unwrap();
    admin.batch_execute("CREATE USER anna PASSWORD 'secret'").await.unwrap();

    let counts = "SELECT node, calls, rows, errors, max_ms <= total_ms AND mean_ms <= max_ms \
                  FROM fulmar.statements WHERE tenant = 'shop' AND statement =";
    for (statement, expected) in [
        ("INSERT INTO t VALUES (?, ...)", "local|21|0|1|t"),
        ("SELECT v FROM t WHERE id > ?", "local|4|32|0|t"),
        ("SET statement_timeout = ?", "local|1|0|0|t"),
    ] {
        assert_eq!(rows(&admin, &format!("{counts} '{statement}'")).await, [expected], "{statement}");
    }
    let time = "SELECT total_ms > 0 FROM fulmar.statements WHERE statement = 'INSERT INTO t VALUES (?, ...)'";
    assert_eq!(rows(&admin, time).await, ["t"]);
    let secrets = "SELECT statement FROM fulmar.statements WHERE statement LIKE '%' || 'secret' || '%' \
                   UNION ALL SELECT statement FROM fulmar.slow_statements \
                   WHERE statement LIKE '%' || 'secret' || '%'";
    assert_eq!(rows(&admin, secrets).await, [""; 0]);
    let created = "SELECT count(*) FROM fulmar.statements WHERE statement = 'CREATE USER anna PASSWORD ?'";
    assert_eq!(rows(&admin, created).await, ["1"]);

    // Both views name a statement equally.
    let failed = "SELECT tenant, \"user\", s.rows, s.statement = t.statement, ms > 0 \
                  FROM fulmar.slow_statements s JOIN fulmar.statements t USING (node, tenant, fingerprint) \
                  WHERE sqlstate = '23505'";
    assert_eq!(rows(&admin, failed).await, ["shop|anna|0|t|t"]);
    let kept = rows(&admin, "SELECT count(*) FROM fulmar.slow_statements WHERE tenant = 'shop'").await;
    assert!(kept[0].parse::<u64>().unwrap() <= 50, "{kept:?}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statements_of_a_dropped_database_are_forgotten() {
    let node = node(true).await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    shop.batch_execute("CREATE TABLE t (a)").await.unwrap();
    drop(shop);
    admin.batch_execute("DROP DATABASE shop WITH (FORCE)").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop").await.unwrap();
    for view in ["statements", "slow_statements"] {
        let sql = format!("SELECT count(*) FROM fulmar.{view} WHERE tenant = 'shop'");
        assert_eq!(rows(&admin, &sql).await, ["0"], "{view}");
    }
    node.stop().await;
}

/// A node whose users have passwords. That of the superuser `fulmar` is `x`.
async fn secure_node() -> Node {
    let node = node(false).await;
    node.catalog.alter_user_password("fulmar", Some(fulmar_gateway::scram_verifier("x"))).await.unwrap();
    node
}

/// A session of a user with the password `x`.
async fn log_in(node: &Node, database: &str, user: &str, application: &str) -> Client {
    let mut config = node.config(database, user);
    config.password("x").application_name(application);
    connect(&config).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_console_is_not_counted() {
    let node = secure_node().await;
    let admin = log_in(&node, "fulmar", "fulmar", "psql").await;
    admin.batch_execute("CREATE USER anna PASSWORD 'x'").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop OWNER anna").await.unwrap();
    let counted = "SELECT statements > 0, reads > 0, errors, time_ms > 0 \
                   FROM fulmar.tenant_stats WHERE tenant = 'shop'";
    for (user, column, expected) in
        [("fulmar", "of_the_console", "f|f|0|f"), ("anna", "of_a_client", "t|t|1|t")]
    {
        let client = log_in(&node, "shop", user, "fulmar console (name)").await;
        client.batch_execute(&format!("SELECT 1 AS {column}")).await.unwrap();
        assert_eq!(state(client.batch_execute("SELECT * FROM missing").await), "42P01");
        assert_eq!(rows(&admin, counted).await, [expected], "{column}");
    }
    for view in ["statements", "slow_statements"] {
        let sql = format!("SELECT DISTINCT statement FROM fulmar.{view} WHERE tenant = 'shop'");
        assert_eq!(rows(&admin, &sql).await, ["SELECT ? AS of_a_client"], "{view}");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_see_the_statements_of_their_databases_only() {
    let node = secure_node().await;
    let log_in = async |database: &str, user: &str| log_in(&node, database, user, "psql").await;
    let admin = log_in("fulmar", "fulmar").await;
    for user in ["anna", "bert", "carl"] {
        admin.batch_execute(&format!("CREATE USER {user} PASSWORD 'x'")).await.unwrap();
    }
    for user in ["anna", "bert"] {
        admin.batch_execute(&format!("CREATE DATABASE of_{user} OWNER {user}")).await.unwrap();
    }
    admin.batch_execute("GRANT CONNECT ON DATABASE of_anna TO carl").await.unwrap();
    let (anna, bert) = (log_in("of_anna", "anna").await, log_in("of_bert", "bert").await);
    let carl = log_in("of_anna", "carl").await;
    for client in [&anna, &bert] {
        client.batch_execute("CREATE TABLE t (a BIGINT)").await.unwrap();
    }
    for view in ["statements", "slow_statements"] {
        let sql = format!("SELECT DISTINCT tenant FROM fulmar.{view} WHERE tenant LIKE 'of%' ORDER BY 1");
        assert_eq!(rows(&admin, &sql).await, ["of_anna", "of_bert"], "{view}");
        assert_eq!(rows(&anna, &sql).await, ["of_anna"], "{view}");
        assert_eq!(rows(&bert, &sql).await, ["of_bert"], "{view}");
        assert_eq!(rows(&carl, &sql).await, [""; 0], "{view}: a guest does not see others' statements");
    }
    node.stop().await;
}

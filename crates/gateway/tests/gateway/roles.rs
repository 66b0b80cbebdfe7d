//! Privileges on a database: read-write or read-only access, and how changes affect open sessions.

use crate::common::{Node, connect, ends, state, wait_until};
use futures::SinkExt;
use tokio_postgres::{Client, Error};

async fn log_in(node: &Node, user: &str) -> Result<Client, Error> {
    let mut config = node.config("shop", user);
    config.password(user);
    connect(&config).await
}

/// A node with password authentication, a session of its superuser, and a database `shop` with a
/// table, owned by `anna`.
async fn node_with_a_shop() -> (Node, Client, Client) {
    let node = Node::start(|_| {}).await;
    let verifier = fulmar_gateway::scram_verifier("top secret");
    node.catalog.alter_user_password("fulmar", Some(verifier)).await.unwrap();
    let mut config = node.config("fulmar", "fulmar");
    config.password("top secret");
    let admin = connect(&config).await.unwrap();
    for statement in [
        "CREATE USER anna PASSWORD 'anna'",
        "CREATE USER bert PASSWORD 'bert'",
        "CREATE DATABASE shop OWNER anna",
    ] {
        admin.batch_execute(statement).await.unwrap();
    }
    let anna = log_in(&node, "anna").await.unwrap();
    anna.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)").await.unwrap();
    anna.batch_execute("CREATE INDEX i ON t (b); INSERT INTO t VALUES (1, 'x')").await.unwrap();
    anna.batch_execute("CREATE PROCEDURE add() LANGUAGE lua AS $$ db.exec('INSERT INTO t VALUES (9, 9)') $$")
        .await
        .unwrap();
    (node, admin, anna)
}

async fn count(client: &Client) -> i64 {
    client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn read_only_users_cannot_write() {
    let (node, admin, anna) = node_with_a_shop().await;
    assert_eq!(state(log_in(&node, "bert").await), "42501");
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    assert_eq!(count(&bert).await, 1);
    bert.batch_execute("BEGIN; SAVEPOINT s; SELECT * FROM t; ROLLBACK TO s; RELEASE s; COMMIT")
        .await
        .unwrap();
    bert.batch_execute("BEGIN READ ONLY; SELECT * FROM t; COMMIT; EXPLAIN DELETE FROM t").await.unwrap();

    for write in [
        "INSERT INTO t VALUES (2, 'y')",
        "WITH n AS (SELECT 2) DELETE FROM t",
        "CREATE TABLE u (a)",
        "CREATE TEMPORARY TABLE u (a)",
        "DROP TABLE t",
        "TRUNCATE t",
        "ANALYZE",
        "VACUUM",
        "REINDEX",
        "PRAGMA user_version = 7",
        "CALL add()",
        "DROP PROCEDURE add",
        "CREATE PROCEDURE p() LANGUAGE lua AS $$ return 1 $$",
        "SELECT pg_current_xact_id()",
        "SELECT a FROM t WHERE a = 1 FOR UPDATE",
    ] {
        assert_eq!(state(bert.batch_execute(write).await), "25006", "{write}");
        for begin in ["BEGIN", "BEGIN IMMEDIATE", "START TRANSACTION ISOLATION LEVEL SERIALIZABLE"] {
            if write != "VACUUM" {
                let text = format!("{begin}; SELECT 1; {write}");
                assert_eq!(state(bert.batch_execute(&text).await), "25006", "{text}");
                bert.batch_execute("ROLLBACK").await.unwrap();
            }
        }
        let pipeline = format!("SELECT 1; {write}");
        if write != "VACUUM" {
            assert_eq!(state(bert.batch_execute(&pipeline).await), "25006", "{pipeline}");
        }
    }
    let copied = async {
        let mut sink = std::pin::pin!(bert.copy_in("COPY t FROM STDIN").await?);
        sink.send(bytes::Bytes::from_static(b"5\tz\n")).await?;
        sink.finish().await
    };
    assert_eq!(state(copied.await), "25006");
    // SQLite's implicit writes are forbidden too.
    const ANALYZE_ALL: &str = "PRAGMA optimize(0x10002)";
    bert.batch_execute(ANALYZE_ALL).await.unwrap_or_default();
    let statistics = "SELECT count(*) FROM sqlite_schema WHERE name = 'sqlite_stat1'";
    assert_eq!(anna.query_one(statistics, &[]).await.unwrap().get::<_, i64>(0), 0);
    anna.batch_execute(ANALYZE_ALL).await.unwrap();
    assert_eq!(anna.query_one(statistics, &[]).await.unwrap().get::<_, i64>(0), 1);

    for escalation in [
        "BEGIN READ WRITE",
        "START TRANSACTION READ WRITE",
        "SELECT 1; BEGIN READ WRITE",
        "SET default_transaction_read_only = off",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE",
        "SET TRANSACTION READ WRITE",
    ] {
        assert_eq!(state(bert.batch_execute(escalation).await), "42501", "{escalation}");
    }
    for reset in ["RESET default_transaction_read_only", "RESET ALL", "DISCARD ALL"] {
        bert.batch_execute(reset).await.unwrap();
        assert_eq!(state(bert.batch_execute("DELETE FROM t").await), "25006", "{reset}");
    }
    let shown = bert.query_one("SHOW default_transaction_read_only", &[]).await.unwrap();
    assert_eq!(shown.get::<_, &str>(0), "on");
    let mut config = node.config("shop", "bert");
    config.password("bert").options("-c default_transaction_read_only=off");
    assert_eq!(state(connect(&config).await), "42501");
    assert_eq!(count(&anna).await, 1);
    drop((admin, anna, bert));
    node.stop().await;
}

/// Querying the status of a transaction decides it, which requires write access.
#[tokio::test(flavor = "multi_thread")]
async fn read_only_users_do_not_decide_transactions() {
    let (node, admin, anna) = node_with_a_shop().await;
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    let own_id = async || text(&anna, "SELECT pg_current_xact_id()").await;
    let status =
        async |client: &Client, id: &str| text(client, &format!("SELECT pg_xact_status({id})")).await;
    for committed in ["committed", "aborted"] {
        anna.batch_execute("BEGIN; INSERT INTO t SELECT max(a) + 1, 'y' FROM t").await.unwrap();
        let id = own_id().await;
        assert_eq!(status(&bert, &id).await, "in progress");
        if committed == "aborted" {
            assert_eq!(status(&log_in(&node, "anna").await.unwrap(), &id).await, "aborted");
        }
        assert_eq!(anna.batch_execute("COMMIT").await.is_ok(), committed == "committed");
        anna.batch_execute("ROLLBACK").await.unwrap_or_default();
        assert_eq!(status(&bert, &id).await, committed);
    }
    // Also in a transaction that began with more privileges.
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    bert.batch_execute("BEGIN; SELECT 1").await.unwrap();
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    anna.batch_execute("BEGIN; DELETE FROM t WHERE a = 1").await.unwrap();
    let id = own_id().await;
    assert_eq!(status(&bert, &id).await, "in progress");
    anna.batch_execute("COMMIT").await.unwrap();
    drop((admin, anna, bert));
    node.stop().await;
}

/// The first value of the first row.
async fn text(client: &Client, sql: &str) -> String {
    let messages = client.simple_query(sql).await.unwrap();
    let first = messages.iter().find_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    first.unwrap()
}

/// A read-only user does not block writers.
#[tokio::test(flavor = "multi_thread")]
async fn read_only_transactions_do_not_block_writers() {
    let (node, admin, anna) = node_with_a_shop().await;
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    bert.batch_execute("BEGIN IMMEDIATE; SELECT * FROM t").await.unwrap();
    anna.batch_execute("BEGIN IMMEDIATE; UPDATE t SET b = 'y'; COMMIT").await.unwrap();
    bert.batch_execute("COMMIT").await.unwrap();
    drop((admin, anna, bert));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_grant_is_effective() {
    let (node, admin, anna) = node_with_a_shop().await;
    let may_write = async || {
        let bert = log_in(&node, "bert").await?;
        let deleted = bert.batch_execute("DELETE FROM t WHERE a = -1").await;
        if let Err(error) = &deleted {
            assert_eq!(error.code().map(|code| code.code()), Some("25006"), "{error}");
        }
        Ok::<bool, Error>(deleted.is_ok())
    };
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    assert!(!may_write().await.unwrap());
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    assert!(may_write().await.unwrap());
    admin.batch_execute("REVOKE SELECT ON DATABASE shop FROM bert").await.unwrap();
    assert!(may_write().await.unwrap(), "revoking SELECT must not revoke CONNECT");
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    assert!(!may_write().await.unwrap());
    admin.batch_execute("REVOKE SELECT ON DATABASE shop FROM bert").await.unwrap();
    assert_eq!(state(may_write().await), "42501");
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert, anna").await.unwrap();
    admin.batch_execute("REVOKE CONNECT ON DATABASE shop FROM bert").await.unwrap();
    assert_eq!(state(may_write().await), "42501");

    // Owners and superusers are not restricted by grants.
    let anna_again = log_in(&node, "anna").await.unwrap();
    anna_again.batch_execute("DELETE FROM t").await.unwrap();
    assert_eq!(state(anna_again.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await), "42501");
    drop((admin, anna, anna_again));
    node.stop().await;
}

/// Expects a fatal error, and that the connection is closed.
async fn expect_termination(client: &Client, statement: &str, expected: &str, reason: &str) {
    let error = client.batch_execute(statement).await.unwrap_err();
    let database_error = error.as_db_error().unwrap_or_else(|| panic!("{reason}: {error}"));
    assert_eq!(
        (database_error.code().code(), database_error.severity()),
        (expected, "FATAL"),
        "{database_error}"
    );
    assert!(database_error.message().contains(reason), "{database_error}");
    assert!(client.batch_execute("SELECT 1").await.is_err() && ends(client).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn privilege_changes_apply_to_the_next_statement() {
    let (node, admin, anna) = node_with_a_shop().await;
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    let insert = bert.prepare("INSERT INTO t (b) VALUES ('y')").await.unwrap();
    bert.execute(&insert, &[]).await.unwrap();

    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    assert_eq!(state(bert.execute(&insert, &[]).await), "25006");
    assert_eq!(state(bert.batch_execute("BEGIN READ WRITE").await), "42501");
    assert_eq!(count(&bert).await, 2);
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    bert.execute(&insert, &[]).await.unwrap();

    // Earlier changes of the transaction can be committed, and no further changes are possible.
    bert.batch_execute("BEGIN; INSERT INTO t (b) VALUES ('z'); SAVEPOINT s").await.unwrap();
    admin.batch_execute("GRANT SELECT ON DATABASE shop TO bert").await.unwrap();
    assert_eq!(state(bert.batch_execute("INSERT INTO t (b) VALUES ('z')").await), "25006");
    bert.batch_execute("ROLLBACK TO s; COMMIT").await.unwrap();
    assert_eq!(count(&anna).await, 4);

    // The transaction of a terminated session is rolled back.
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    bert.batch_execute("BEGIN; DELETE FROM t").await.unwrap();
    admin.batch_execute("REVOKE CONNECT ON DATABASE shop FROM bert").await.unwrap();
    expect_termination(&bert, "COMMIT", "57P01", "access to database").await;
    assert_eq!(count(&anna).await, 4);
    drop((admin, anna, bert));
    node.stop().await;
}

/// A change applies to the remaining statements of a query message.
#[tokio::test(flavor = "multi_thread")]
async fn privilege_changes_apply_within_a_query_message() {
    let (node, admin, anna) = node_with_a_shop().await;
    let locked = "SELECT b FROM t WHERE a = 1 FOR UPDATE";
    for (change, expected) in [
        ("GRANT SELECT ON DATABASE shop TO bert", "25006"),
        ("REVOKE CONNECT ON DATABASE shop FROM bert", "57P01"),
    ] {
        admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
        let bert = log_in(&node, "bert").await.unwrap();
        anna.batch_execute(&format!("BEGIN; {locked}")).await.unwrap();
        let query = format!("{locked}; INSERT INTO t VALUES (2, 'of bert')");
        let running = tokio::spawn(async move { bert.batch_execute(&query).await });
        // The statement waits for the row.
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'bert' AND state = 'active'";
        let is_active = async || admin.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) > 0;
        wait_until("the statement runs", is_active).await;
        admin.batch_execute(change).await.unwrap();
        anna.batch_execute("COMMIT").await.unwrap();
        assert_eq!(state(running.await.unwrap()), expected, "{change}");
        assert_eq!(count(&anna).await, 1, "{change}");
    }
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_end_when_their_user_is_dropped_or_changed() {
    let (node, admin, anna) = node_with_a_shop().await;
    admin.batch_execute("GRANT CONNECT ON DATABASE shop TO bert").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    admin.batch_execute("ALTER USER bert PASSWORD 'other'; ").await.unwrap();
    expect_termination(&bert, "SELECT 1", "28000", "the password").await;
    admin.batch_execute("ALTER USER bert PASSWORD 'bert'").await.unwrap();
    let bert = log_in(&node, "bert").await.unwrap();
    admin.batch_execute("DROP USER bert").await.unwrap();
    expect_termination(&bert, "SELECT 1", "28000", "was dropped").await;
    // A COPY is terminated too, and rolled back.
    let sink = anna.copy_in("COPY t (b) FROM STDIN").await.unwrap();
    let mut sink = std::pin::pin!(sink);
    sink.send(bytes::Bytes::from_static(b"one\n")).await.unwrap();
    admin.batch_execute("ALTER USER anna PASSWORD 'anna'").await.unwrap();
    assert_eq!(state(sink.finish().await), "28000");
    assert_eq!(count(&log_in(&node, "anna").await.unwrap()).await, 1);
    // A session that changes its own user's password stays open. Other sessions of that user are
    // closed.
    let mut config = node.config("fulmar", "fulmar");
    config.password("top secret");
    let other = connect(&config).await.unwrap();
    admin.batch_execute("ALTER USER fulmar PASSWORD 'new'").await.unwrap();
    admin.batch_execute("CREATE USER carl").await.unwrap();
    expect_termination(&other, "SELECT 1", "28000", "the password").await;
    drop((admin, anna, bert, other));
    node.stop().await;
}

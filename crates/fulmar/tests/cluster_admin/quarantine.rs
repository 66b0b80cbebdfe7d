//! Statements that kill nodes.

use fulmar_workload::server::Cluster;

use super::{
    FAILPOINTS, connect, execute, failure, move_to, owner, partition, restart, start, texts, try_execute,
    values, wait_for_state, wait_until, with_timeout,
};

/// Creates a database with the value 1, whose owner is the last node. Clients use the first one.
async fn create(cluster: &Cluster) {
    execute(cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    let create = "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)";
    execute(cluster, 0, "shop", create).await;
    move_to(cluster, "fulmar", 0).await;
    move_to(cluster, "shop", 2).await;
}

/// The statement aborts two nodes: it fails, and its database is quarantined until it is resumed.
#[tokio::test(flavor = "multi_thread")]
async fn statement_that_kills_two_nodes_quarantines_its_database() {
    let mut cluster = start().await;
    create(&cluster).await;
    let failpoint = format!("statement=abort:{}", partition(&cluster, 0, "shop", "partition").await);
    for node in [1, 2] {
        restart(&mut cluster, node, &[(FAILPOINTS, &failpoint)]).await;
    }
    move_to(&cluster, "fulmar", 0).await;
    move_to(&cluster, "shop", 2).await;
    let client = connect(&cluster, 0, "shop").await;
    let error = with_timeout("the failure", client.simple_query("SELECT v FROM t")).await.unwrap_err();
    texts(&error, "57P02");
    for node in [1, 2] {
        assert!(!cluster.wait_for_exit(node).await.unwrap().success(), "node {node} aborts");
    }
    // No death is reported yet. The session continues at the third owner.
    assert_eq!(owner(&cluster, 0, "shop").await, 0);
    with_timeout("a query", client.simple_query("SELECT v FROM t")).await.unwrap();
    // One death is reported.
    restart(&mut cluster, 1, &[]).await;
    assert_eq!(values(&cluster, 1, "shop").await, [1]);
    // Both deaths are reported.
    restart(&mut cluster, 2, &[]).await;
    wait_until("quarantine", async || try_execute(&cluster, 0, "shop", "SELECT 1").await.is_err()).await;
    for node in 0..3 {
        wait_until("quarantine", async || try_execute(&cluster, node, "shop", "SELECT 1").await.is_err())
            .await;
        let [message, detail, hint] = failure(&cluster, node, "shop", "SELECT 1", "55000").await;
        assert_eq!(message, "the database is quarantined");
        assert_eq!(detail, "Its statements have killed two nodes within ten minutes.");
        assert_eq!(hint, "Find the statement, then run ALTER DATABASE ... RESUME.");
    }
    // The owner closes what it had open.
    wait_until("the session ends", async || client.simple_query("SELECT v FROM t").await.is_err()).await;
    let events = "SELECT count(*) FROM fulmar.events WHERE kind = 'database.quarantined'";
    let admin = connect(&cluster, 0, "fulmar").await;
    wait_until("the event", async || admin.query_one(events, &[]).await.unwrap().get::<_, i64>(0) == 1).await;
    execute(&cluster, 1, "fulmar", "ALTER DATABASE shop RESUME").await;
    for node in 0..3 {
        wait_until("the end", async || try_execute(&cluster, node, "shop", "SELECT 1").await.is_ok()).await;
        assert_eq!(values(&cluster, node, "shop").await, [1]);
    }
    let error = failure(&cluster, 1, "fulmar", "ALTER DATABASE shop RESUME", "55000").await;
    assert_eq!(error[0], "the database is not quarantined");
    // Its deaths before that do not count, even if their nodes report them again.
    move_to(&cluster, "shop", 1).await;
    execute(&cluster, 0, "shop", "INSERT INTO t VALUES (2)").await;
}

/// `kill -9` while a statement runs: the statement is repeated once, and then fails. Nothing is
/// quarantined.
#[tokio::test(flavor = "multi_thread")]
async fn killed_nodes_quarantine_nothing() {
    let mut cluster = start().await;
    create(&cluster).await;
    let client = connect(&cluster, 0, "shop").await;
    let endless = "WITH RECURSIVE endless(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM endless) \
                   SELECT count(*) FROM endless WHERE i < 0";
    let running = tokio::spawn(async move { client.simple_query(endless).await });
    let is_running = async |cluster: &Cluster, node: usize| {
        wait_until("the statement runs", async || {
            if owner(cluster, 0, "shop").await != node {
                return false;
            }
            let client = connect(cluster, 0, "shop").await;
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' \
                       AND query LIKE 'WITH RECURSIVE%'";
            let row = with_timeout("the sessions", client.query_one(sql, &[])).await.unwrap();
            row.get::<_, i64>(0) == 1
        })
        .await;
    };
    for node in [2, 1] {
        is_running(&cluster, node).await;
        cluster.kill(node).unwrap();
    }
    let error = with_timeout("the failure", running).await.unwrap().unwrap_err();
    texts(&error, "57P02");
    for node in [1, 2] {
        restart(&mut cluster, node, &[]).await;
        wait_for_state(&cluster, 0, node, "alive").await;
    }
    for node in 0..3 {
        move_to(&cluster, "shop", node).await;
        assert_eq!(values(&cluster, (node + 1) % 3, "shop").await, [1]);
    }
}

//! Branches, restores, imports and drops.

use std::time::SystemTime;

use bytes::Bytes;
use futures::SinkExt;

use super::{
    FAILPOINTS, connect, execute, failure, move_to, owner, partition, restart, start, texts, try_execute,
    values, wait_for_state, wait_until, with_timeout,
};
use fulmar_workload::server::Cluster;

/// The time of the newest restore point of a database, through a node.
async fn newest_point(cluster: &Cluster, node: usize, database: &str) -> String {
    let client = connect(cluster, node, database).await;
    let sql = "SELECT CAST(time AS TEXT) FROM fulmar.history ORDER BY version DESC LIMIT 1";
    with_timeout("the history", client.query_one(sql, &[])).await.unwrap().get(0)
}

/// Creates a database with the values 1 and, after a restore point, 2. Returns the restore point.
async fn create_with_history(cluster: &Cluster, database: &str) -> String {
    execute(cluster, 0, "fulmar", &format!("CREATE DATABASE {database}")).await;
    execute(cluster, 1, database, "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    // A branch makes a restore point of its source.
    execute(cluster, 2, "fulmar", &format!("CREATE DATABASE {database}_flush BRANCH OF {database}")).await;
    let point = newest_point(cluster, 0, database).await;
    // A later version is as of a later millisecond.
    let read = SystemTime::now();
    let passed = || SystemTime::now().duration_since(read).is_ok_and(|passed| passed.as_millis() > 1);
    wait_until("the next millisecond", async || passed()).await;
    execute(cluster, 2, database, "INSERT INTO t VALUES (2)").await;
    point
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_and_restores_work_through_every_node_and_outlive_owners() {
    let mut cluster = start().await;
    let point = create_with_history(&cluster, "shop").await;
    move_to(&cluster, "shop", 2).await;
    move_to(&cluster, "fulmar", 0).await;
    for node in 0..3 {
        let now = format!("CREATE DATABASE now{node} BRANCH OF shop");
        execute(&cluster, node, "fulmar", &now).await;
        let past = format!("CREATE DATABASE past{node} BRANCH OF shop AT TIMESTAMP '{point}'");
        execute(&cluster, node, "fulmar", &past).await;
        assert_eq!(values(&cluster, (node + 1) % 3, &format!("now{node}")).await, [1, 2]);
        assert_eq!(values(&cluster, (node + 2) % 3, &format!("past{node}")).await, [1]);
    }
    // A branch is independent.
    execute(&cluster, 1, "now0", "INSERT INTO t VALUES (3)").await;
    // The past is readable at every owner.
    let past = format!("SET fulmar.as_of = '{point}'; SELECT v FROM t");
    for node in [2, 1, 0] {
        move_to(&cluster, "shop", node).await;
        let client = connect(&cluster, 1, "shop").await;
        let rows = with_timeout("the past", client.simple_query(&past)).await.unwrap();
        let is_row = |message: &&_| matches!(message, tokio_postgres::SimpleQueryMessage::Row(_));
        assert_eq!(rows.iter().filter(is_row).count(), 1);
    }
    // A session ends with the restore, whichever node it is connected to.
    let sessions = [connect(&cluster, 0, "shop").await, connect(&cluster, 1, "shop").await];
    for session in &sessions {
        with_timeout("a session", session.batch_execute("SELECT 1")).await.unwrap();
    }
    let epoch = partition(&cluster, 0, "shop", "epoch").await;
    let restore = format!("ALTER DATABASE shop RESTORE TO TIMESTAMP '{point}'");
    execute(&cluster, 1, "fulmar", &restore).await;
    assert_ne!(partition(&cluster, 0, "shop", "epoch").await, epoch, "a restore begins an epoch");
    for session in &sessions {
        wait_until("the session ends", async || session.is_closed()).await;
    }
    for node in 0..3 {
        assert_eq!(values(&cluster, node, "shop").await, [1]);
    }
    execute(&cluster, 2, "shop", "INSERT INTO t VALUES (4)").await;
    // The next owner has the restored database, with its commits since.
    move_to(&cluster, "shop", 1).await;
    assert_eq!(values(&cluster, 0, "shop").await, [1, 4]);
    cluster.kill(1).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, [1, 4]);
    assert_eq!(values(&cluster, 2, "now0").await, [1, 2, 3]);
}

/// The owner dies in the middle of a restore or a branch. The request continues at the next owner.
#[tokio::test(flavor = "multi_thread")]
async fn owner_dies_during_restore_or_branch() {
    let mut cluster = start().await;
    let point = create_with_history(&cluster, "shop").await;
    let restore = format!("ALTER DATABASE shop RESTORE TO TIMESTAMP '{point}'");
    for (step, failpoint) in ["restore-after-manifest", "restore-after-catalog"].into_iter().enumerate() {
        restart(&mut cluster, 2, &[(FAILPOINTS, &format!("{failpoint}=exit:1"))]).await;
        move_to(&cluster, "fulmar", 0).await;
        move_to(&cluster, "shop", 2).await;
        execute(&cluster, 0, "fulmar", &restore).await;
        assert!(!cluster.wait_for_exit(2).await.unwrap().success(), "{failpoint}");
        assert_eq!(values(&cluster, 1, "shop").await, [1], "{failpoint}");
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({})", 10 + step)).await;
        assert_eq!(values(&cluster, 1, "shop").await, [1, 10 + step as i64], "{failpoint}");
    }
    restart(&mut cluster, 2, &[(FAILPOINTS, "branch-after-manifest=exit:1")]).await;
    move_to(&cluster, "fulmar", 0).await;
    move_to(&cluster, "shop", 2).await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE branch BRANCH OF shop").await;
    assert!(!cluster.wait_for_exit(2).await.unwrap().success());
    assert_eq!(values(&cluster, 1, "branch").await, [1, 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_are_known_to_later_owners() {
    let mut cluster = start().await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    move_to(&cluster, "shop", 2).await;
    let mut ids: Vec<(i64, &str)> = Vec::new();
    let client = connect(&cluster, 0, "shop").await;
    for (value, end, outcome) in [(1, "COMMIT", "committed"), (2, "ROLLBACK", "aborted")] {
        client.batch_execute(&format!("BEGIN; INSERT INTO t VALUES ({value})")).await.unwrap();
        let sql = "SELECT CAST(pg_current_xact_id() AS BIGINT)";
        ids.push((client.query_one(sql, &[]).await.unwrap().get(0), outcome));
        client.batch_execute(end).await.unwrap();
    }
    let check = async |cluster: &Cluster, node: usize| {
        let client = connect(cluster, node, "shop").await;
        for (id, outcome) in &ids {
            let sql = format!("SELECT pg_xact_status({id})");
            let row = with_timeout("an outcome", client.query_one(&sql, &[])).await.unwrap();
            assert_eq!(row.get::<_, &str>(0), *outcome);
        }
    };
    check(&cluster, 1).await;
    move_to(&cluster, "shop", 1).await;
    check(&cluster, 0).await;
    cluster.kill(1).unwrap();
    check(&cluster, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn imports_and_drops_work_through_every_node() {
    let mut cluster = start().await;
    let file = cluster.path("import.db");
    let source = rusqlite::Connection::open(&file).unwrap();
    source.execute_batch("CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (7), (8)").unwrap();
    drop(source);
    let file = Bytes::from(std::fs::read(file).unwrap());
    for node in 0..3 {
        let client = connect(&cluster, node, "fulmar").await;
        let sql = format!("COPY DATABASE import{node} FROM STDIN (FORMAT sqlite)");
        let sink = with_timeout("an import", client.copy_in::<_, Bytes>(&sql)).await.unwrap();
        let mut sink = std::pin::pin!(sink);
        sink.send(file.clone()).await.unwrap();
        with_timeout("the end of an import", sink.finish()).await.unwrap();
        assert_eq!(values(&cluster, (node + 1) % 3, &format!("import{node}")).await, [7, 8]);
        execute(&cluster, node, &format!("import{node}"), "INSERT INTO t VALUES (9)").await;
    }
    // A damaged file leaves nothing.
    let client = connect(&cluster, 1, "fulmar").await;
    let sink = client.copy_in::<_, Bytes>("COPY DATABASE broken FROM STDIN (FORMAT sqlite)").await.unwrap();
    let mut sink = std::pin::pin!(sink);
    sink.send(file.slice(..5000)).await.unwrap();
    texts(&sink.finish().await.unwrap_err(), "22P04");
    execute(&cluster, 0, "fulmar", "CREATE DATABASE broken").await;
    // Imported databases fail over.
    let dead = owner(&cluster, 0, "import1").await;
    cluster.kill(dead).unwrap();
    let through = (dead + 1) % 3;
    assert_eq!(values(&cluster, through, "import1").await, [7, 8, 9]);
    cluster.start_node(dead).await.unwrap();
    wait_for_state(&cluster, through, dead, "alive").await;

    // DROP DATABASE sees clients of all nodes, wherever their sessions run.
    let client = connect(&cluster, 2, "import0").await;
    with_timeout("a session", client.batch_execute("SELECT 1")).await.unwrap();
    let [_, detail, _] = failure(&cluster, 0, "fulmar", "DROP DATABASE import0", "55006").await;
    assert_eq!(detail, "There are 1 other sessions using the database.");
    drop(client);
    wait_until("the drop", async || {
        try_execute(&cluster, 1, "fulmar", "DROP DATABASE import0").await.is_ok()
    })
    .await;
    let client = connect(&cluster, 2, "import1").await;
    execute(&cluster, 0, "fulmar", "DROP DATABASE import1 WITH (FORCE)").await;
    wait_until("the session ends", async || client.is_closed()).await;
    assert_eq!(values(&cluster, 0, "import2").await, [7, 8, 9]);
}

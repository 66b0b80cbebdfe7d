//! Local durability in a cluster, and changes of durability.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fulmar_workload::server::Cluster;

use super::{
    FAILPOINTS, connect, execute, failure, move_to, owner, partition, restart, start, texts, try_execute,
    values, wait_for_state, wait_until, with_timeout,
};

/// A database with local durability waits for its node, and has its commits when that is back.
#[tokio::test(flavor = "multi_thread")]
async fn local_database_waits_for_its_node() {
    let mut cluster = start().await;
    execute(&cluster, 1, "fulmar", "CREATE DATABASE ledger DURABILITY local").await;
    let home = owner(&cluster, 0, "ledger").await;
    let other = (home + 1) % 3;
    assert_eq!(partition(&cluster, other, "ledger", "durability").await, "local");
    let create = "CREATE TABLE t(v INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)";
    execute(&cluster, other, "ledger", create).await;
    let sql = format!("ALTER DATABASE ledger MOVE TO '{}'", cluster.name(other));
    failure(&cluster, other, "fulmar", &sql, "0A000").await;
    for value in [2, 3] {
        execute(&cluster, other, "ledger", &format!("INSERT INTO t VALUES ({value})")).await;
        cluster.kill(home).unwrap();
        wait_for_state(&cluster, other, home, "sealed").await;
        let [message, _, hint] = failure(&cluster, other, "ledger", "SELECT 1", "57P03").await;
        let name = cluster.name(home);
        assert_eq!(message, format!("the database is not available while node \"{name}\" is down"));
        assert_eq!(hint, format!("Start node \"{name}\" with its own data directory."));
        failure(&cluster, other, "fulmar", "ALTER DATABASE ledger SET durability = shared", "57P03").await;
        restart(&mut cluster, home, &[]).await;
        assert_eq!(owner(&cluster, other, "ledger").await, home);
        assert_eq!(values(&cluster, other, "ledger").await, Vec::from_iter(1..=value));
    }
    // With shared durability any node can take it over.
    execute(&cluster, other, "fulmar", "ALTER DATABASE ledger SET durability = shared").await;
    assert_eq!(partition(&cluster, other, "ledger", "durability").await, "shared");
    execute(&cluster, other, "ledger", "INSERT INTO t VALUES (4)").await;
    cluster.kill(home).unwrap();
    assert_eq!(values(&cluster, other, "ledger").await, [1, 2, 3, 4]);
}

/// The owner dies in the middle of a change of durability. A shared database continues at the next
/// owner, a local one with its node.
#[tokio::test(flavor = "multi_thread")]
async fn owner_dies_during_change_of_durability() {
    let mut cluster = start().await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    for (value, from, to, failpoint, is_shared) in [
        (1, "shared", "local", "durability-after-flush", true),
        (2, "shared", "local", "durability-after-record", false),
        (3, "local", "shared", "durability-after-flush", false),
        (4, "local", "shared", "durability-after-record", true),
    ] {
        // Node 2 owns the database, with the durability `from`.
        execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET durability = shared").await;
        restart(&mut cluster, 2, &[]).await;
        move_to(&cluster, "shop", 2).await;
        execute(&cluster, 0, "fulmar", &format!("ALTER DATABASE shop SET durability = {from}")).await;
        restart_owner(&mut cluster, from, &[(FAILPOINTS, &format!("{failpoint}=exit:1"))]).await;
        move_to(&cluster, "fulmar", 0).await;
        execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({value})")).await;

        let sql = format!("ALTER DATABASE shop SET durability = {to}");
        let changed = try_execute(&cluster, 0, "fulmar", &sql).await;
        assert!(!cluster.wait_for_exit(2).await.unwrap().success(), "{failpoint}");
        match is_shared {
            // The next owner completes the change.
            true => changed.unwrap(),
            false => {
                texts(&changed.unwrap_err(), "57P03");
                restart(&mut cluster, 2, &[]).await;
                assert_eq!(owner(&cluster, 0, "shop").await, 2);
                assert_eq!(partition(&cluster, 0, "shop", "durability").await, "local");
            }
        }
        assert_eq!(values(&cluster, 1, "shop").await, Vec::from_iter(1..=value), "{from} {to} {failpoint}");
        execute(&cluster, 0, "fulmar", &sql).await;
        assert_eq!(partition(&cluster, 0, "shop", "durability").await, to);
        assert_eq!(values(&cluster, 1, "shop").await, Vec::from_iter(1..=value), "{from} {to} {failpoint}");
    }
}

/// Restarts the third node with other environment variables. It owns the database afterwards.
async fn restart_owner(cluster: &mut Cluster, durability: &str, variables: &[(&str, &str)]) {
    restart(cluster, 2, variables).await;
    if durability == "shared" {
        move_to(cluster, "shop", 2).await;
    }
}

/// The data directory of a node with local databases is replaced by an old copy.
#[tokio::test(flavor = "multi_thread")]
async fn old_copy_of_a_data_directory_is_refused() {
    let mut cluster = start().await;
    cluster.stop(2).await.unwrap();
    let (data, copy) = (cluster.data(2).to_owned(), cluster.path("copy"));
    let copied = Command::new("cp").arg("-r").arg(&data).arg(&copy).status().unwrap();
    assert!(copied.success());
    cluster.start_node(2).await.unwrap();
    cluster.stop(2).await.unwrap();
    std::fs::rename(&data, cluster.path("newest")).unwrap();
    std::fs::rename(&copy, &data).unwrap();
    let error = cluster.start_node(2).await.unwrap_err().to_string();
    assert!(error.contains("was started with another directory since"), "{error}");
    std::fs::remove_dir_all(&data).unwrap();
    let error = cluster.start_node(2).await.unwrap_err().to_string();
    assert!(error.contains("it is empty, but the node has started before"), "{error}");
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(cluster.path("newest"), &data).unwrap();
    cluster.start_node(2).await.unwrap();
}

/// Sessions neither end nor fail while the durability changes, and no commit is lost.
#[tokio::test(flavor = "multi_thread")]
async fn durability_changes_while_sessions_write() {
    let mut cluster = start().await;
    execute(&cluster, 0, "fulmar", "CREATE DATABASE shop").await;
    execute(&cluster, 0, "shop", "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    move_to(&cluster, "fulmar", 0).await;
    move_to(&cluster, "shop", 2).await;
    let stop = Arc::new(AtomicBool::new(false));
    let writers = [0, 1, 2].map(|node| {
        let (url, stop) = (cluster.url(node, "shop"), stop.clone());
        tokio::spawn(async move {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let mut acknowledged = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let value = (3 * acknowledged.len() + node) as i64;
                let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&value];
                let insert = client.execute("INSERT INTO t VALUES ($1)", &parameters);
                with_timeout("an insert", insert).await.unwrap();
                acknowledged.push(value);
            }
            acknowledged
        })
    });
    let waiting = connect(&cluster, 1, "shop").await;
    with_timeout("begin", waiting.batch_execute("BEGIN; SELECT count(*) FROM t")).await.unwrap();
    for durability in ["local", "shared", "local", "shared"] {
        let sql = format!("ALTER DATABASE shop SET durability = {durability}");
        execute(&cluster, 1, "fulmar", &sql).await;
        assert_eq!(partition(&cluster, 0, "shop", "durability").await, durability);
        let seen = values(&cluster, 0, "shop").await.len();
        wait_until("progress", async || values(&cluster, 0, "shop").await.len() > seen + 5).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = Vec::new();
    for writer in writers {
        acknowledged.extend(with_timeout("a writer", writer).await.unwrap());
    }
    acknowledged.sort_unstable();
    // Nothing is missing, in memory and after a failover.
    assert_eq!(values(&cluster, 0, "shop").await, acknowledged);
    cluster.kill(2).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, acknowledged);
    // The default of a cluster.
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET durability = local").await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop RESET durability").await;
    assert_eq!(partition(&cluster, 0, "shop", "durability").await, "shared");
    assert_eq!(values(&cluster, 1, "shop").await, acknowledged);
}

//! Limits of temporary files, per tenant and per node.

use std::sync::{Arc, OnceLock, Weak};

use crate::common::{Client, Node, wait_until};
use fulmar_engine::{Config, Engine, Space, TransactionLimits, Value, sqlstate};

const MIB: u64 = 1 << 20;

/// A node whose disk has `free_bytes` above the reserve, minus its temporary files.
async fn node_with_space(free_bytes: u64) -> Node {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::new(directory.path(), 1 << 30);
    config.disk_reserve_bytes = Some(10 * MIB);
    let started: Arc<OnceLock<Weak<Engine>>> = Arc::default();
    let engine = started.clone();
    config.space = Some(Arc::new(move || {
        let engine = engine.get().and_then(Weak::upgrade);
        let used_bytes = engine.map_or(0, |engine| engine.statistics().temporary_bytes);
        Ok(Space { available_bytes: free_bytes + 10 * MIB - used_bytes, total_bytes: u64::MAX })
    }));
    let engine = Engine::start(config).await.unwrap();
    started.set(Arc::downgrade(&engine)).unwrap();
    Node { engine, directory }
}

fn limited(megabytes: u64) -> TransactionLimits {
    TransactionLimits { temporary_bytes: megabytes * MIB, ..TransactionLimits::default() }
}

async fn fill(client: &mut Client, rows: u32) {
    client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    client
        .run(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows}) \
             INSERT INTO t SELECT i, randomblob(3000) FROM n"
        ))
        .await
        .unwrap();
}

async fn is_intact(client: &mut Client) -> bool {
    client.value("PRAGMA integrity_check").await == Value::Text("ok".into())
}

/// Statements that need at least 20 MiB of temporary files: changed pages and their journal, a
/// sort, a temporary table, a copy of the database.
const LARGE: [&str; 4] = [
    "UPDATE t SET v = randomblob(3000)",
    "SELECT id FROM t ORDER BY hex(v)",
    "CREATE TEMPORARY TABLE copy AS SELECT * FROM t",
    "VACUUM",
];

#[tokio::test]
async fn temp_file_limit_is_enforced_per_tenant() {
    let node = node_with_space(10_000 * MIB).await;
    let (mut a, mut other) = (node.client(1), node.client(1));
    fill(&mut a, 5000).await;
    a.session.set_limits(limited(8));
    for large in LARGE {
        let error = a.run(large).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::CONFIGURATION_LIMIT, "{large}: {error}");
        assert_eq!(error.message(), "temporary file size exceeds temp_file_limit (8192kB)", "{large}");
        assert!(error.get_hint().unwrap().contains("SET temp_file_limit"), "{error}");
        // The statement was rolled back, and smaller ones succeed.
        assert_eq!(a.int("SELECT count(*) FROM t").await, 5000);
        a.run("UPDATE t SET v = randomblob(3000) WHERE id < 100").await.unwrap();
    }
    // A failed transaction continues from its savepoint.
    a.run("BEGIN; INSERT INTO t VALUES (-1, 'kept'); SAVEPOINT s").await.unwrap();
    assert_eq!(a.state(LARGE[0]).await, sqlstate::CONFIGURATION_LIMIT);
    a.run("ROLLBACK TO s; INSERT INTO t VALUES (-2, 'kept'); COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t WHERE v = 'kept'").await, 2);
    assert!(is_intact(&mut a).await);
    // All sessions of the tenant share the limit.
    a.session.set_limits(limited(60));
    a.run("BEGIN; UPDATE t SET v = randomblob(3000)").await.unwrap();
    other.session.set_limits(limited(30));
    let error = other.run(LARGE[1]).await.unwrap_err();
    assert_eq!(error.message(), "temporary file size exceeds temp_file_limit (30720kB)");
    a.run("ROLLBACK").await.unwrap();
    wait_until("the temporary files are closed", async || node.engine.statistics().temporary_bytes == 0)
        .await;
    other.run(LARGE[1]).await.unwrap();
    a.close().await;
    other.close().await;
}

#[tokio::test]
async fn temporary_files_leave_disk_space_for_commits_of_others() {
    let node = node_with_space(64 * MIB).await;
    let mut clients: Vec<Client> = (1..=3).map(|id| node.client(id)).collect();
    for client in &mut clients {
        fill(client, 3000).await;
    }
    // The limit is half of the free space, once the files of earlier statements are closed and the
    // disk was polled.
    wait_until("the limit is half of the free space", async || {
        node.engine.statistics().temporary_limit_bytes == 32 * MIB
    })
    .await;
    // A tenant gets half of that, even if its own limit is higher.
    let error =
        clients[0].run("CREATE TEMPORARY TABLE copies AS SELECT t.* FROM t, t AS u").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::CONFIGURATION_LIMIT);
    let share = "temporary file size exceeds the database's share of the disk (";
    assert!(error.message().starts_with(share), "{error}");
    // The files of the statement that failed are closed by another thread.
    wait_until("its temporary files are closed", async || node.engine.statistics().temporary_bytes == 0)
        .await;
    // Two tenants use nearly their whole shares. The third one has none left, but can commit.
    let copy = "CREATE TEMPORARY TABLE copy AS SELECT * FROM t";
    for client in &mut clients[..2] {
        client.run(copy).await.unwrap();
        client.run("CREATE TEMPORARY TABLE more(v)").await.unwrap();
        while client.run("INSERT INTO more SELECT v FROM t LIMIT 300").await.is_ok() {}
        let used = node.engine.statistics().temporary_bytes;
        // Bytes charged between two polls of the disk may be counted twice, once.
        assert!(used <= 48 * MIB, "{used}");
    }
    assert_eq!(clients[2].state(copy).await, sqlstate::CONFIGURATION_LIMIT);
    clients[2].run("UPDATE t SET v = randomblob(3000) WHERE id < 500").await.unwrap();
    assert!(is_intact(&mut clients[2]).await);
    for client in clients {
        client.close().await;
    }
}

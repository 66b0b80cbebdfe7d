//! Transactions larger than memory allows, and data that is.

mod common;

use common::{Client, Node};
use fulmar_engine::{Config, Engine, Value, sqlstate};
use fulmar_pages::PartitionId;

/// Resident memory of this process, bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

const ROWS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 15000) SELECT i, randomblob(3500) FROM n";

#[tokio::test]
async fn a_gigabyte_of_changes_fits_into_256_megabytes() {
    let directory = tempfile::tempdir().unwrap();
    let memory = 256 << 20;
    let start = || common::start_when_free(|| Config::new(directory.path(), memory));
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 0)").await.unwrap();
    a.run(&format!("INSERT INTO t(id, v) {ROWS}")).await.unwrap();
    let before = resident_bytes();
    a.run("BEGIN").await.unwrap();
    let mut most = 0;
    for round in 0..18 {
        a.run(&format!("UPDATE t SET v = randomblob(3500), n = {round}")).await.unwrap();
        most = most.max(resident_bytes());
    }
    a.run("COMMIT").await.unwrap();
    most = most.max(resident_bytes());
    assert!(most < before.max(memory) + (64 << 20), "{} MiB resident, {} before", most >> 20, before >> 20);
    assert!(engine.statistics().temporary_files > 0);
    assert_eq!(a.int("SELECT count(*) FROM t WHERE n = 17 AND length(v) = 3500").await, 15000);
    a.run("UPDATE t SET n = -1 WHERE id = 5").await.unwrap();
    a.close().await;
    // Without a clean stop the large commit comes back from the log's record and its segment.
    drop(engine);
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT count(*) FROM t WHERE n = 17").await, 14999);
    assert_eq!(a.int("SELECT n FROM t WHERE id = 5").await, -1);
    engine.flush().await.unwrap();
    a.close().await;
    engine.shutdown().await.unwrap();
    drop(engine);
    let engine = start().await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 14999 * 17 - 1);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test]
async fn data_beyond_the_budget_is_refused_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 4 << 20)).await.unwrap();
    let mut a = Client { session: engine.session(PartitionId(1)) };
    a.run("CREATE TABLE t(v BLOB); INSERT INTO t VALUES (zeroblob(1000000))").await.unwrap();
    let mut state = "";
    for _ in 0..10 {
        state = a.state("INSERT INTO t VALUES (randomblob(1000000))").await;
        if state != "00000" {
            break;
        }
    }
    assert_eq!(state, sqlstate::OUT_OF_MEMORY);
    let kept = a.int("SELECT count(*) FROM t").await;
    assert!(kept >= 2);
    a.run("DELETE FROM t; VACUUM").await.unwrap();
    a.run("INSERT INTO t VALUES (randomblob(1000000))").await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 1);
}

#[tokio::test]
async fn a_rolled_back_large_transaction_leaves_nothing() {
    let node = Node::start().await;
    let mut a = node.client(1);
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    a.run(&format!("BEGIN; INSERT INTO t {ROWS}; ROLLBACK")).await.unwrap();
    assert_eq!(a.int("SELECT count(*) FROM t").await, 0);
    assert_eq!(a.int("PRAGMA page_count").await, 2);
}

/// Transactions that are too large to be replayed wait for a log that is busy with others: that is no conflict.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_busy_log_costs_large_transactions_no_error() {
    const TENANTS: u64 = 8;
    let node = Node::start().await;
    let tenants = (1..=TENANTS).map(|partition| {
        let mut client = node.client(partition);
        tokio::spawn(async move {
            client.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)").await.unwrap();
            let value = Value::Text("x".repeat(60_000));
            for _ in 0..4 {
                client.run("BEGIN").await.unwrap();
                for _ in 0..40 {
                    client.with("INSERT INTO t(v) VALUES ($1)", std::slice::from_ref(&value)).await.unwrap();
                }
                client.run("COMMIT").await.unwrap();
            }
            assert_eq!(client.int("SELECT count(*) FROM t").await, 160);
            client.close().await;
        })
    });
    futures::future::try_join_all(tenants).await.unwrap();
}

//! Clients that say nothing for a while.

mod common;

use std::time::Duration;

use common::Node;
use fulmar_engine::SnapshotBounds;

/// A client that is silent inside a transaction does not hold others' old versions in memory for long, and does not
/// notice that its own snapshot was replaced.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_transaction_lets_its_snapshot_go() {
    let snapshots = SnapshotBounds { bytes: 0, age: Duration::ZERO, age_if_large: Duration::ZERO };
    let node = Node::on_engine(|config| config.insecure = true, |config| config.snapshots = snapshots).await;
    let mut silent = node.database("t1").await;
    let writer = node.client("t1").await;
    silent
        .batch_execute(
            "CREATE TABLE t(k INTEGER PRIMARY KEY, n INTEGER, filler);
             INSERT INTO t VALUES (1, 10, zeroblob(3500)), (2, 20, zeroblob(3500))",
        )
        .await
        .unwrap();
    let transaction = silent.transaction().await.unwrap();
    let n: i64 = transaction.query_one("SELECT n FROM t WHERE k = 1", &[]).await.unwrap().get(0);
    assert_eq!(n, 10);
    let before = node.engine.statistics().memory_bytes;
    // Until much is held: the engine may look, and have it freed, while we write.
    while node.engine.statistics().memory_bytes < before + 10 * 4096 {
        writer.batch_execute("UPDATE t SET n = n + 1 WHERE k = 2").await.unwrap();
    }
    let freed = async {
        while node.engine.statistics().memory_bytes > before + 4096 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), freed).await.expect("memory is still held");
    transaction.batch_execute("UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    transaction.commit().await.unwrap();
    let n: i64 = writer.query_one("SELECT n FROM t WHERE k = 1", &[]).await.unwrap().get(0);
    assert_eq!(n, 11);
    drop((silent, writer));
    node.stop().await;
}

//! Clients that say nothing for a while.

use std::time::Duration;

use crate::common::{Node, within};
use fulmar_engine::SnapshotBounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Client;

const BOUND_BYTES: u64 = 10 * 4096;

/// A snapshot expires when it retains more than the bound, however young it is.
const STRICT: SnapshotBounds =
    SnapshotBounds { bytes: BOUND_BYTES, age: Duration::from_secs(3600), age_if_large: Duration::ZERO };

/// A client that is silent inside a transaction does not hold others' old versions in memory for long, and does not
/// notice that its own snapshot was replaced.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_transaction_lets_its_snapshot_go() {
    let node = Node::on_engine(|config| config.insecure = true, |config| config.snapshots = STRICT).await;
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
    held_and_freed(&node, &writer).await;
    transaction.batch_execute("UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    transaction.commit().await.unwrap();
    let n: i64 = writer.query_one("SELECT n FROM t WHERE k = 1", &[]).await.unwrap().get(0);
    assert_eq!(n, 11);
    drop((silent, writer));
    node.stop().await;
}

/// Nor does one that does not read what it asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_lets_its_snapshot_go() {
    const QUESTION: &str = "BEGIN; SELECT n FROM t; SELECT hex(zeroblob(20000000))";
    let node = Node::on_engine(|config| config.insecure = true, |config| config.snapshots = STRICT).await;
    let writer = node.database("t1").await;
    writer
        .batch_execute(
            "CREATE TABLE t(k INTEGER PRIMARY KEY, n INTEGER, filler);
             INSERT INTO t VALUES (2, 20, zeroblob(3500))",
        )
        .await
        .unwrap();
    let mut deaf = TcpStream::connect(("127.0.0.1", node.port())).await.unwrap();
    deaf.write_all(&message(None, b"\0\x03\0\0user\0anna\0database\0t1\0\0")).await.unwrap();
    deaf.write_all(&message(Some(b'Q'), &[QUESTION.as_bytes(), b"\0"].concat())).await.unwrap();
    // It has begun to answer; the rest does not fit in what the kernel takes.
    let mut heard = vec![0; 100_000];
    deaf.read_exact(&mut heard).await.unwrap();
    held_and_freed(&node, &writer).await;
    // The answer is whole all the same.
    while !heard.ends_with(b"Z\0\0\0\x05T") {
        assert!(deaf.read_buf(&mut heard).await.unwrap() > 0, "the server has hung up");
    }
    assert!(heard.len() > 40_000_000);
    drop((deaf, writer));
    node.stop().await;
}

/// A message of the protocol: its kind, if it has one, and its body.
fn message(kind: Option<u8>, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32 + 4).to_be_bytes();
    kind.into_iter().chain(length).chain(body.iter().copied()).collect()
}

/// Writes until a snapshot has retained old versions up to its bound, and they are free again.
async fn held_and_freed(node: &Node, writer: &Client) {
    let before = node.engine.statistics().memory_bytes;
    let write = async {
        let mut most = 0;
        loop {
            writer.batch_execute("UPDATE t SET n = n + 1 WHERE k = 2").await.unwrap();
            let held = node.engine.statistics().memory_bytes.saturating_sub(before);
            most = held.max(most);
            if most >= BOUND_BYTES / 2 && held <= 4096 {
                break;
            }
        }
    };
    within("the snapshot's pages are freed", write).await;
}

//! Clients that are idle, or do not read, inside a transaction.

use std::time::Duration;

use crate::common::{Node, with_timeout};
use fulmar_engine::SnapshotBounds;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Client;

const BOUND_BYTES: u64 = 10 * 4096;

/// A snapshot expires when it retains more than the bound, however young it is.
const STRICT: SnapshotBounds =
    SnapshotBounds { bytes: BOUND_BYTES, age: Duration::from_secs(3600), age_if_large: Duration::ZERO };

/// A client that is idle in a transaction does not keep old versions in memory for long. It does
/// not notice that its snapshot was replaced.
#[tokio::test(flavor = "multi_thread")]
async fn idle_transaction_releases_its_snapshot() {
    let node = Node::on_engine(|config| config.insecure = true, |config| config.snapshots = STRICT).await;
    let mut idle = node.database("t1").await;
    let writer = node.client("t1").await;
    idle.batch_execute(
        "CREATE TABLE t(k INTEGER PRIMARY KEY, n INTEGER, filler);
             INSERT INTO t VALUES (1, 10, zeroblob(3500)), (2, 20, zeroblob(3500))",
    )
    .await
    .unwrap();
    let transaction = idle.transaction().await.unwrap();
    let n: i64 = transaction.query_one("SELECT n FROM t WHERE k = 1", &[]).await.unwrap().get(0);
    assert_eq!(n, 10);
    pages_are_freed(&node, &writer).await;
    transaction.batch_execute("UPDATE t SET n = n + 1 WHERE k = 1").await.unwrap();
    transaction.commit().await.unwrap();
    let n: i64 = writer.query_one("SELECT n FROM t WHERE k = 1", &[]).await.unwrap().get(0);
    assert_eq!(n, 11);
    drop((idle, writer));
    node.stop().await;
}

/// The same for a client that does not read the result.
#[tokio::test(flavor = "multi_thread")]
async fn client_that_does_not_read_releases_its_snapshot() {
    const SCRIPT: &str = "BEGIN; SELECT n FROM t; SELECT hex(zeroblob(20000000))";
    let node = Node::on_engine(|config| config.insecure = true, |config| config.snapshots = STRICT).await;
    let writer = node.database("t1").await;
    writer
        .batch_execute(
            "CREATE TABLE t(k INTEGER PRIMARY KEY, n INTEGER, filler);
             INSERT INTO t VALUES (2, 20, zeroblob(3500))",
        )
        .await
        .unwrap();
    let mut stalled = TcpStream::connect(("127.0.0.1", node.port())).await.unwrap();
    stalled.write_all(&message(None, b"\0\x03\0\0user\0anna\0database\0t1\0\0")).await.unwrap();
    stalled.write_all(&message(Some(b'Q'), &[SCRIPT.as_bytes(), b"\0"].concat())).await.unwrap();
    // The server has begun to respond. The rest does not fit the socket buffers.
    let mut received = vec![0; 100_000];
    stalled.read_exact(&mut received).await.unwrap();
    pages_are_freed(&node, &writer).await;
    // The result is complete nevertheless.
    while !received.ends_with(b"Z\0\0\0\x05T") {
        assert!(stalled.read_buf(&mut received).await.unwrap() > 0, "the server closed the connection");
    }
    assert!(received.len() > 40_000_000);
    drop((stalled, writer));
    node.stop().await;
}

/// A message of the protocol. The startup message has no kind.
fn message(kind: Option<u8>, body: &[u8]) -> Vec<u8> {
    let length = (body.len() as u32 + 4).to_be_bytes();
    kind.into_iter().chain(length).chain(body.iter().copied()).collect()
}

/// Writes until a snapshot has retained old versions up to its bound, and they are free again.
async fn pages_are_freed(node: &Node, writer: &Client) {
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
    with_timeout("the snapshot's pages are freed", write).await;
}

//! A session does not keep its thread for long, however much it has to do at once.

use std::future::{Future, poll_fn};
use std::pin::pin;

use crate::common::{Client, MEMORY};
use fulmar_engine::*;
use fulmar_pages::PartitionId;

/// How often something is polled until it is done.
async fn polls<T>(work: impl Future<Output = Result<T>>) -> usize {
    let mut polls = 0;
    let mut work = pin!(work);
    let counted = poll_fn(|cx| {
        polls += 1;
        work.as_mut().poll(cx)
    });
    counted.await.unwrap();
    polls
}

/// A replay is one run of many statements, each of which is over long before its time is.
#[tokio::test]
async fn a_long_replay_gives_way() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), MEMORY)).await.unwrap();
    let client = || Client { session: engine.session(PartitionId(7)) };
    let (mut long, mut other) = (client(), client());
    other.run("CREATE TABLE t(k INTEGER PRIMARY KEY, n); INSERT INTO t VALUES (1, 0)").await.unwrap();
    long.run("BEGIN").await.unwrap();
    long.run(&"UPDATE t SET n = n + 1;".repeat(15_000)).await.unwrap();
    other.run("UPDATE t SET n = n + 1").await.unwrap();
    assert!(polls(long.run("COMMIT")).await > 5);
    assert_eq!(other.run("SELECT n FROM t").await.unwrap(), [[Value::Integer(15_001)]]);
}

/// That pages are in memory is no reason to keep the thread: also not where it is one step of SQLite's that goes through all of them.
#[tokio::test]
async fn who_goes_through_a_table_gives_way() {
    const ROWS: &str = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 4096)";
    const COUNT: &str = "SELECT count(*) FROM t";
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 256 << 20)).await.unwrap();
    let mut client = Client { session: engine.session(PartitionId(7)) };
    client.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)").await.unwrap();
    for _ in 0..8 {
        client.run(&format!("INSERT INTO t(v) {ROWS} SELECT randomblob(2000) FROM i")).await.unwrap();
    }
    // So large a transaction is in the store alone.
    client.run(COUNT).await.unwrap();
    let misses = || engine.partition_statistics(PartitionId(7)).unwrap().page_misses;
    let before = misses();
    // Once and twice if nothing makes it give way.
    let counting = polls(client.run(COUNT)).await;
    assert!(counting > 2, "{counting}");
    // What it is asked meanwhile it heeds.
    let canceller = client.session.canceller();
    {
        let mut dropping = pin!(client.run("DROP TABLE t"));
        assert!(futures::poll!(dropping.as_mut()).is_pending());
        canceller.cancel(CancelReason::User);
        assert_eq!(dropping.await.unwrap_err().state(), sqlstate::QUERY_CANCELED);
    }
    let dropping = polls(client.run("DROP TABLE t")).await;
    assert!(dropping > 2, "{dropping}");
    assert_eq!(misses(), before);
    // Likewise in what a transaction has changed.
    client.run("BEGIN; CREATE TABLE t(k INTEGER PRIMARY KEY, v)").await.unwrap();
    client.run(&format!("INSERT INTO t(v) {ROWS} SELECT randomblob(2000) FROM i")).await.unwrap();
    let counting = polls(client.run(COUNT)).await;
    assert!(counting > 2, "{counting}");
}

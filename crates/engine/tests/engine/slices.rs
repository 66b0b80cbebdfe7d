//! Cooperative scheduling: a statement yields its thread after each time slice. The engine runs
//! with zero slices, so that every second check yields, and with unlimited ones. The number of
//! yields then depends on the work, not on the speed of the machine.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::common::Client;
use fulmar_engine::*;
use fulmar_pages::PartitionId;

const SHOP: PartitionId = PartitionId(7);

async fn start(directory: &tempfile::TempDir, time_slice: Duration) -> Arc<Engine> {
    Engine::start(Config { time_slice, ..Config::new(directory.path(), 256 << 20) }).await.unwrap()
}

/// Polls `work` until it is ready, and returns the number of polls.
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

/// Returns the number of polls of a replay: one call that runs many statements, each much shorter
/// than a time slice.
async fn polls_of_a_replay(time_slice: Duration, statements: usize) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let engine = start(&directory, time_slice).await;
    let client = || Client { session: engine.session(SHOP) };
    let (mut long, mut other) = (client(), client());
    other.run("CREATE TABLE t(k INTEGER PRIMARY KEY, n); INSERT INTO t VALUES (1, 0)").await.unwrap();
    long.run("BEGIN").await.unwrap();
    long.run(&"UPDATE t SET n = n + 1;".repeat(statements)).await.unwrap();
    other.run("UPDATE t SET n = n + 1").await.unwrap();
    let polls = polls(long.run("COMMIT")).await;
    assert_eq!(other.run("SELECT n FROM t").await.unwrap(), [[Value::Integer(statements as i64 + 1)]]);
    polls
}

#[tokio::test]
async fn long_replay_yields_after_each_time_slice() {
    let unlimited = polls_of_a_replay(Duration::MAX, 2000).await;
    let sliced = polls_of_a_replay(Duration::ZERO, 2000).await;
    assert!(
        sliced >= unlimited + 100,
        "polls: {sliced} with slices of zero length, {unlimited} with unlimited ones"
    );
}

const ROWS: &str = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 4096)";
const COUNT: &str = "SELECT count(*) FROM t";

/// A table of 8,192 rows on more than 4,096 pages, all of them in memory.
async fn table_in_memory(client: &mut Client) {
    client.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)").await.unwrap();
    for _ in 0..2 {
        client.run(&format!("INSERT INTO t(v) {ROWS} SELECT randomblob(2000) FROM i")).await.unwrap();
    }
    // Large transactions are written to the store only, so the scan reads the pages into memory.
    client.run(COUNT).await.unwrap();
}

/// Returns the polls of a scan, of a DROP TABLE, and of a scan of uncommitted rows. Each is a
/// single step of SQLite's virtual machine.
async fn polls_of_scans(time_slice: Duration) -> [usize; 3] {
    let directory = tempfile::tempdir().unwrap();
    let engine = start(&directory, time_slice).await;
    let mut client = Client { session: engine.session(SHOP) };
    table_in_memory(&mut client).await;
    let misses = || engine.partition_statistics(SHOP).unwrap().page_misses;
    let before = misses();
    let scan = polls(client.run(COUNT)).await;
    let drop = polls(client.run("DROP TABLE t")).await;
    assert_eq!(misses(), before, "every page was in memory, so no poll may be a wait for the store");
    client.run("BEGIN; CREATE TABLE t(k INTEGER PRIMARY KEY, v)").await.unwrap();
    client.run(&format!("INSERT INTO t(v) {ROWS} SELECT randomblob(2000) FROM i")).await.unwrap();
    [scan, drop, polls(client.run(COUNT)).await]
}

#[tokio::test]
async fn single_step_over_many_pages_yields_after_each_time_slice() {
    let unlimited = polls_of_scans(Duration::MAX).await;
    let sliced = polls_of_scans(Duration::ZERO).await;
    for (sliced, unlimited) in sliced.into_iter().zip(unlimited) {
        assert!(
            sliced >= unlimited + 10,
            "polls: {sliced} with slices of zero length, {unlimited} with unlimited ones"
        );
    }
}

#[tokio::test]
async fn single_step_over_many_pages_can_be_cancelled_between_time_slices() {
    let directory = tempfile::tempdir().unwrap();
    let engine = start(&directory, Duration::ZERO).await;
    let mut client = Client { session: engine.session(SHOP) };
    table_in_memory(&mut client).await;
    let canceller = client.session.canceller();
    {
        let mut dropping = pin!(client.run("DROP TABLE t"));
        assert!(futures::poll!(dropping.as_mut()).is_pending());
        canceller.cancel(CancelReason::User);
        assert_eq!(dropping.await.unwrap_err().state(), sqlstate::QUERY_CANCELED);
    }
    assert_eq!(client.int(COUNT).await, 8192, "a cancelled DROP TABLE must leave the table as it was");
}

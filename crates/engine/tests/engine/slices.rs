//! A session does not keep its thread for long, however much it has to do at once.

use std::future::{Future, poll_fn};
use std::pin::pin;

use crate::common::{Client, MEMORY};
use fulmar_engine::*;
use fulmar_pages::PartitionId;

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
    let mut polls = 0;
    {
        let mut commit = pin!(long.run("COMMIT"));
        let counted = poll_fn(|cx| {
            polls += 1;
            commit.as_mut().poll(cx)
        });
        counted.await.unwrap();
    }
    assert!(polls > 5, "{polls}");
    assert_eq!(other.run("SELECT n FROM t").await.unwrap(), [[Value::Integer(15_001)]]);
}

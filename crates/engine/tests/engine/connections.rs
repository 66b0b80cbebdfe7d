//! State of a session's connection after a failed statement.

use std::pin::pin;

use crate::common::{Client, MEMORY};
use fulmar_engine::*;
use fulmar_pages::PartitionId;

#[tokio::test]
async fn cancelled_wait_for_a_row_keeps_temporary_tables() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), MEMORY)).await.unwrap();
    let client = || Client { session: engine.session(PartitionId(7)) };
    let (mut waiting, mut holder) = (client(), client());
    holder.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n); INSERT INTO t VALUES (1, 0)").await.unwrap();
    waiting.run("CREATE TEMP TABLE kept(a); INSERT INTO kept VALUES (5)").await.unwrap();
    holder.run("BEGIN; SELECT n FROM t WHERE id = 1 FOR UPDATE").await.unwrap();

    let canceller = waiting.session.canceller();
    {
        let mut update = pin!(waiting.run("UPDATE t SET n = 1 WHERE id = 1"));
        assert!(futures::poll!(update.as_mut()).is_pending(), "the row must be locked");
        canceller.cancel(CancelReason::Timeout);
        assert_eq!(update.await.unwrap_err().state(), sqlstate::QUERY_CANCELED);
    }
    assert_eq!(waiting.run("SELECT a FROM kept").await.unwrap(), [[Value::Integer(5)]]);
    holder.run("ROLLBACK").await.unwrap();
    waiting.run("UPDATE t SET n = 1 WHERE id = 1").await.unwrap();
}

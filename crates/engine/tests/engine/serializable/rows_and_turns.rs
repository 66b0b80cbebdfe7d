//! Deadlock between row locks and write turns: they are acquired by different rules, so a
//! transaction that waits for a row lock must not hold the write turn.

use std::sync::Arc;

use fulmar_engine::sqlstate;

use crate::common::{Client, Node, with_timeout};
use crate::seeds;

const SESSIONS: u64 = 6;
const TRANSACTIONS: u64 = 3000;

/// Holds the write turn, then locks the row.
const TURN_FIRST: [&str; 3] = [
    "BEGIN IMMEDIATE",
    "SELECT n FROM t WHERE id = 1 FOR UPDATE",
    "UPDATE t SET n = n + 1 WHERE id = 1; COMMIT",
];
/// Holds the row lock, then takes the write turn.
const ROW_FIRST: [&str; 3] =
    ["BEGIN", "SELECT n FROM t WHERE id = 1 FOR UPDATE", "SELECT n FROM t FOR UPDATE; COMMIT"];

/// Repeats a transaction, because a deadlock requires a specific interleaving of two threads.
async fn repeat(mut client: Client, transaction: [&str; 3]) {
    for _ in 0..TRANSACTIONS {
        for statements in transaction {
            if let Err(error) = client.run(statements).await {
                assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "{statements}: {error}");
                client.run("ROLLBACK").await.unwrap();
                break;
            }
        }
    }
    client.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn row_locks_and_write_turns_do_not_deadlock() {
    let node = Arc::new(Node::start().await);
    for round in 0..seeds::rounds(1) {
        let mut client = node.client(1 + round);
        client
            .run("CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER); INSERT INTO t VALUES (1, 0)")
            .await
            .unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for session in 0..SESSIONS {
            let transaction = if session % 2 == 0 { TURN_FIRST } else { ROW_FIRST };
            tasks.spawn(repeat(node.client(1 + round), transaction));
        }
        with_timeout("the transactions complete without a deadlock", tasks.join_all()).await;
        assert!(client.int("SELECT n FROM t").await > 0);
        client.close().await;
    }
}

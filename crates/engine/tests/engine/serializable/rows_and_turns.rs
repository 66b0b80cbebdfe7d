//! Rows and turns are waited for by different rules, and must not be waited for in a circle: whoever waits for a row holds no turn.

use std::sync::Arc;

use fulmar_engine::sqlstate;

use crate::common::{Client, Node, within};
use crate::seeds;

const SESSIONS: u64 = 6;
const TRANSACTIONS: u64 = 3000;

/// Has the turn, and asks for the row.
const TURN_FIRST: [&str; 3] = [
    "BEGIN IMMEDIATE",
    "SELECT n FROM t WHERE id = 1 FOR UPDATE",
    "UPDATE t SET n = n + 1 WHERE id = 1; COMMIT",
];
/// Has the row, and asks for the turn.
const ROW_FIRST: [&str; 3] =
    ["BEGIN", "SELECT n FROM t WHERE id = 1 FOR UPDATE", "SELECT n FROM t FOR UPDATE; COMMIT"];

/// Again and again, since a circle takes two threads that come between each other's steps.
async fn again_and_again(mut client: Client, transaction: [&str; 3]) {
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
async fn who_waits_for_a_row_holds_no_turn() {
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
            tasks.spawn(again_and_again(node.client(1 + round), transaction));
        }
        within("no two transactions wait for each other", tasks.join_all()).await;
        assert!(client.int("SELECT n FROM t").await > 0);
        client.close().await;
    }
}

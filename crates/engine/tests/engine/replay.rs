//! Replay: a transaction is replayed transparently only if the replay returns exactly the same
//! results and errors.

use crate::common::{Client, Node};
use fulmar_engine::sqlstate;

/// Fails in another line, and therefore with another DETAIL, if the value in the first row is not
/// 0.
const PROCEDURE: &str = "local rows = db.query('SELECT n FROM t WHERE id = 1')
if rows[1].n ~= 0 then
    error('no', 0)
end
error('no', 0)";

async fn prepare(node: &Node) -> (Client, Client) {
    let (mut a, b) = (node.client(1), node.client(1));
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, n); INSERT INTO t VALUES (1, 0), (2, 0)").await.unwrap();
    a.run(fulmar_engine::CREATE_PROCEDURES).await.unwrap();
    let definition = fulmar_engine::Definition {
        name: "fails".into(),
        parameters: Vec::new(),
        returns: Vec::new(),
        source: PROCEDURE.into(),
    };
    a.with("INSERT INTO fulmar_procedures VALUES ($1, $2, $3, $4)", &definition.values()).await.unwrap();
    (a, b)
}

/// Begins a transaction that has received an error and has changed a row. Returns the error's
/// DETAIL.
async fn begin(a: &mut Client) -> String {
    a.run("BEGIN; SAVEPOINT s").await.unwrap();
    let error = a.run("CALL fails()").await.unwrap_err();
    assert_eq!(error.message(), "no", "{error:?}");
    a.run("ROLLBACK TO s; INSERT INTO t VALUES (10, 0)").await.unwrap();
    error.get_detail().unwrap().to_owned()
}

#[tokio::test]
async fn replay_with_another_error_detail_fails() {
    let node = Node::start().await;
    let (mut a, mut b) = prepare(&node).await;
    let before = begin(&mut a).await;
    b.run("UPDATE t SET n = 1 WHERE id = 1").await.unwrap();
    assert_eq!(a.state("COMMIT").await, sqlstate::SERIALIZATION_FAILURE);
    let after = begin(&mut a).await;
    assert_ne!(before, after);
    a.run("COMMIT").await.unwrap();
    a.close().await;
    b.close().await;
}

#[tokio::test]
async fn replay_with_the_same_error_succeeds() {
    let node = Node::start().await;
    let (mut a, mut b) = prepare(&node).await;
    begin(&mut a).await;
    b.run("UPDATE t SET n = 1 WHERE id = 2").await.unwrap();
    a.run("COMMIT").await.unwrap();
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 1);
    a.close().await;
    b.close().await;
}

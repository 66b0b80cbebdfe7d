//! Connections of sessions: cancellation, memory.

use fulmar_mvcc::Attachment;
use fulmar_pages::PartitionId;
use fulmar_sqlite::{DiscardRows, HeapAccount};

use crate::idle::Idle;
use crate::{CREATE_PROCEDURES, Config, Definition, Engine, Scope, Value, sqlstate};

#[tokio::test]
async fn closing_a_pooled_connection_does_not_affect_its_last_session() {
    let data = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(data.path(), 64 << 20)).await.unwrap();
    let partition = engine.partitions().partition(PartitionId(1)).await.unwrap();
    let mut session = engine.session(PartitionId(1));
    session.run("CREATE TABLE t(x); SELECT count(*) FROM t").await;
    let canceller = session.canceller();
    // Its next statement is offloaded, on another connection.
    session.flag().note_offloaded();
    assert!(partition.attachment::<Idle>().references() > 0);
    partition.close_idle();
    assert!(canceller.is_offloaded());
    session.close().await;
    drop(partition);
    engine.shutdown().await.unwrap();
}

#[tokio::test]
async fn procedure_call_respects_the_tenants_memory_limit() {
    const STEP: u64 = 64 << 10;
    let data = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(data.path(), 64 << 20)).await.unwrap();
    let partition = engine.partitions().partition(PartitionId(1)).await.unwrap();
    let mut session = engine.session(PartitionId(1));
    session.run(CREATE_PROCEDURES).await;
    let definition = Definition {
        name: "fills".into(),
        parameters: vec![("n".into(), "INTEGER".into())],
        returns: Vec::new(),
        source: "local t = {}; for i = 1, n do t[i] = { i } end".into(),
    };
    let sql = "INSERT INTO fulmar_procedures VALUES ($1, $2, $3, $4)";
    let (insert, _) = session.prepare(sql).await.unwrap();
    session.execute(&insert, &definition.values(), Scope::Auto, &mut DiscardRows).await.unwrap();
    let (call, _) = session.prepare("CALL fills($1)").await.unwrap();
    let mut state_of = async |rows: i64| {
        let called = session.execute(&call, &[Value::Integer(rows)], Scope::Auto, &mut DiscardRows).await;
        called.map_or_else(|error| error.state(), |_| sqlstate::SUCCESSFUL_COMPLETION)
    };
    // About 1 MiB.
    const LARGE_CALL_ROWS: i64 = 8000;
    assert_eq!(state_of(LARGE_CALL_ROWS).await, sqlstate::SUCCESSFUL_COMPLETION);
    let heap = partition.heap();
    let mut others = Vec::new();
    while heap.used_bytes() + 4 * STEP <= heap.limit_bytes() {
        let held = HeapAccount::default();
        assert!(held.take(STEP, heap));
        others.push(held);
    }
    assert_eq!(state_of(1).await, sqlstate::SUCCESSFUL_COMPLETION);
    assert_eq!(state_of(LARGE_CALL_ROWS).await, sqlstate::OUT_OF_MEMORY);
    others.iter().for_each(|held| held.give_all(heap));
    assert_eq!(state_of(LARGE_CALL_ROWS).await, sqlstate::SUCCESSFUL_COMPLETION);
    session.close().await;
    drop(partition);
    engine.shutdown().await.unwrap();
}

//! Exports of databases with rows.

use std::sync::Arc;

use fulmar_mvcc::{Frame, Reservation};
use fulmar_pages::{PAGE_SIZE, PageNo, PartitionId};
use fulmar_sqlite::sqlstate;

use crate::{Config, Engine};

/// Memory per page of an export's index.
const INDEX_ENTRY_BYTES: u64 = size_of::<(PageNo, Frame)>() as u64;

async fn run(engine: &Arc<Engine>, id: PartitionId, sql: &str) {
    let mut session = engine.session(id);
    session.run(sql).await;
    session.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn export_fails_if_its_index_does_not_fit_into_memory() {
    const ID: PartitionId = PartitionId(7);
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
    run(&engine, ID, "CREATE TABLE t(x); INSERT INTO t VALUES (zeroblob(100000))").await;
    engine.flush().await.unwrap();
    // So that no memory is freed during the export.
    engine.partitions().partition(ID).await.unwrap().sweep();
    let memory = &engine.node().memory;
    let used_bytes = memory.used_bytes();
    let export = engine.export(ID, None).await.unwrap();
    let index_bytes = export.bytes() / PAGE_SIZE as u64 * INDEX_ENTRY_BYTES;
    assert!(index_bytes > 0);
    assert_eq!(memory.used_bytes(), used_bytes + index_bytes, "the index must be charged");
    drop(export);
    assert_eq!(memory.used_bytes(), used_bytes);

    let all = Reservation::unconditional(memory.clone(), memory.limit_bytes()).into_long_term();
    let refused = engine.export(ID, None).await.map(drop).unwrap_err();
    assert_eq!(refused.state(), sqlstate::OUT_OF_MEMORY);
    drop(all);
    assert!(engine.export(ID, None).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn segments_of_a_running_export_are_not_collected() {
    const ID: PartitionId = PartitionId(7);
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
    run(
        &engine,
        ID,
        "CREATE TABLE t(x); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) \
         INSERT INTO t SELECT hex(randomblob(300)) FROM n",
    )
    .await;
    let mut export = engine.export(ID, None).await.unwrap();
    let mut file = Vec::new();
    assert!(export.next(&mut file).await.unwrap());
    engine.drop_partition(ID).await.unwrap();
    engine.collect().await.unwrap();
    while export.next(&mut file).await.unwrap() {}
    assert_eq!(file.len() as u64, export.bytes());
    assert!(file.starts_with(b"SQLite format 3\0"));

    // After the export the segments are garbage.
    drop(export);
    engine.collect().await.unwrap();
    assert_eq!(engine.node().store.list_segments().await.unwrap(), []);
}

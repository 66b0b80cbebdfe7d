//! Data larger than memory: pages are evicted and read again, transparently.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::crashing::CrashingNode as Node;
use fulmar_engine::{CancelReason, Engine, EngineStatistics, Value, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_store::{FailureKind, StoreFault, StoreOperation};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const MEMORY: u64 = 8 << 20;
/// About 32 MiB: four times the memory.
const ROWS: i64 = 16_000;

const TABLE: &str = "CREATE TABLE t(id INTEGER PRIMARY KEY, n INTEGER DEFAULT 0, v BLOB)";

fn rows(from: i64, count: i64) -> String {
    format!(
        "INSERT INTO t(id, v) WITH RECURSIVE i(k) AS (SELECT {from} UNION ALL SELECT k + 1 FROM i WHERE k + 1 < {from} + {count}) \
         SELECT k, randomblob(1900) FROM i"
    )
}

impl Node {
    async fn start_small() -> Node {
        Node::start(MEMORY, |_| ()).await
    }

    fn statistics(&self) -> EngineStatistics {
        self.engine.statistics()
    }

    /// Creates a table of `count` rows, all flushed to the store.
    async fn fill(&self, partition: u64, count: i64) {
        let mut client = self.client(partition);
        client.run(TABLE).await.unwrap();
        for from in (0..count).step_by(1000) {
            client.run(&rows(from, 1000.min(count - from))).await.unwrap();
        }
        client.close().await;
        self.engine.flush().await.unwrap();
    }

    async fn is_sound(&self, partition: u64) {
        let mut client = self.client(partition);
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        client.close().await;
    }
}

/// Polls the memory use until `done`. Returns its maximum in bytes.
fn watch(engine: &Arc<Engine>, done: &Arc<AtomicBool>) -> std::thread::JoinHandle<u64> {
    let (engine, done) = (Arc::downgrade(engine), done.clone());
    std::thread::spawn(move || {
        let mut max_bytes = 0;
        while !done.load(Ordering::Relaxed) {
            max_bytes = max_bytes.max(engine.upgrade().map_or(0, |engine| engine.statistics().memory_bytes));
            std::thread::sleep(Duration::from_millis(1));
        }
        max_bytes
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_of_four_times_the_memory_is_loaded_read_and_updated() {
    const SESSIONS: i64 = 4;
    let node = Node::start_small().await;
    let done = Arc::new(AtomicBool::new(false));
    let watching = watch(&node.engine, &done);
    node.fill(1, ROWS).await;
    // Each session owns the rows whose number modulo the number of sessions is its own, and has a
    // model of them.
    let working = (0..SESSIONS).map(|own| {
        let mut client = node.client(1);
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(own as u64);
            let mut model = vec![0; (ROWS / SESSIONS) as usize];
            for _ in 0..700 {
                let at = random.random_range(0..model.len());
                let id = at as i64 * SESSIONS + own;
                match random.random_range(0..3) {
                    0 => {
                        client
                            .run(&format!("UPDATE t SET n = n + 1, v = randomblob(1900) WHERE id = {id}"))
                            .await
                            .unwrap();
                        model[at] += 1;
                    }
                    _ => assert_eq!(
                        client.int(&format!("SELECT n FROM t WHERE id = {id} AND length(v) = 1900")).await,
                        model[at]
                    ),
                }
            }
            client.close().await;
            model
        })
    });
    let models = futures::future::try_join_all(working.collect::<Vec<_>>()).await.unwrap();
    done.store(true, Ordering::Relaxed);
    let max_bytes = watching.join().unwrap();
    // Page tables may exceed the budget, and replacements of pages may exceed it by one eighth.
    assert!(max_bytes <= MEMORY + MEMORY / 8, "memory must stay within the budget: {max_bytes} bytes");
    let statistics = node.statistics();
    assert!(statistics.pages_evicted > 8000 && statistics.page_misses > 1000, "{statistics:?}");

    let node = node.crash().await;
    let mut client = node.client(1);
    for (own, model) in models.iter().enumerate() {
        let sum: i64 = model.iter().sum();
        assert_eq!(client.int(&format!("SELECT sum(n) FROM t WHERE id % {SESSIONS} = {own}")).await, sum);
    }
    assert_eq!(client.int("SELECT count(*) FROM t WHERE length(v) = 1900").await, ROWS);
    client.close().await;
    node.is_sound(1).await;
}

/// A reader keeps its snapshot while all pages that it reads are replaced, flushed, evicted and
/// read again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_survives_eviction_of_its_pages() {
    let node = Node::start_small().await;
    node.fill(1, 3000).await;
    node.fill(2, 6000).await;
    let mut reader = node.client(1);
    reader.run("BEGIN READ ONLY").await.unwrap();
    const SUM: &str = "SELECT sum(id * 7 + n) || ' ' || count(*) FROM t WHERE length(v) = 1900";
    let before = reader.value(SUM).await;
    let (mut writer, mut other) = (node.client(1), node.client(2));
    for round in 1..4 {
        writer.run(&format!("UPDATE t SET n = {round} WHERE id % 10 = {round}")).await.unwrap();
        node.engine.flush().await.unwrap();
        assert_eq!(other.int("SELECT count(*) FROM t WHERE length(v) = 1900").await, 6000);
        assert_eq!(reader.value(SUM).await, before);
    }
    reader.run("COMMIT").await.unwrap();
    assert_eq!(writer.int("SELECT sum(n) FROM t").await, 300 * (1 + 2 + 3));
    for client in [reader, writer, other] {
        client.close().await;
    }
    node.is_sound(1).await;
}

/// A scan of a tenant of four times the memory does not evict the pages of another tenant that is
/// in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scan_does_not_evict_the_working_set_of_others() {
    let node = Node::start_small().await;
    node.fill(1, 500).await;
    node.fill(2, ROWS).await;
    let read = |id| {
        let statistics = node.engine.partition_statistics(PartitionId(id)).unwrap();
        statistics.page_misses + statistics.pages_read_ahead
    };
    let (mut small, mut scanning) = (node.client(1), node.client(2));
    let mut before = (0, 0);
    // The first round evicts the pages left by loading.
    for round in 0..2 {
        before = (read(1), read(2));
        for part in (0..ROWS).step_by(1000) {
            let range = format!("id BETWEEN {part} AND {part} + 999");
            let some = format!("SELECT count(*) FROM t WHERE {range} AND length(v) = 1900");
            assert_eq!(scanning.int(&some).await, 1000, "{round}");
            // Simulates a working tenant.
            for _ in 0..2 {
                assert_eq!(small.int("SELECT count(*) FROM t WHERE length(v) = 1900").await, 500);
            }
        }
    }
    let (small, scanned) = (read(1) - before.0, read(2) - before.1);
    assert!(scanned > 7000, "the scan read {scanned} pages");
    assert!(small < 25, "{small} of 250 pages were evicted");
}

/// If memory is full of dirty pages, commits wait for the store without blocking a thread. A cancel
/// ends the wait. When the store answers, they continue.
#[tokio::test]
async fn writers_wait_for_the_store_when_memory_is_dirty() {
    let node = Node::start_small().await;
    let (mut client, mut other) = (node.client(1), node.client(2));
    client.run(TABLE).await.unwrap();
    other.run("CREATE TABLE t(n); INSERT INTO t VALUES (0)").await.unwrap();
    node.store.hold(StoreOperation::Put, true);
    // Fills the available memory: a hundred rows take about 50 pages.
    let mut written = 0;
    while node.statistics().memory_unwritten_bytes + 250_000 < MEMORY / 4 * 3 {
        client.run(&rows(written * 100, 100)).await.unwrap();
        written += 1;
    }
    node.store.is_holding().await;
    let canceller = client.session.canceller();
    let waiting = tokio::spawn(async move {
        let state = client.state(&rows(written * 100, 300)).await;
        (client, state)
    });
    // Other statements that do not grow the dirty pages succeed, a hundred times.
    for _ in 0..100 {
        other.run("UPDATE t SET n = n + 1").await.unwrap();
    }
    assert!(!waiting.is_finished(), "the statement must wait");
    canceller.cancel(CancelReason::User);
    let (mut client, state) = waiting.await.unwrap();
    assert_eq!(state, sqlstate::QUERY_CANCELED);
    assert_eq!(client.int("SELECT count(*) FROM t").await, written * 100);
    // The same without a cancel, until four times the memory is written.
    let writing = tokio::spawn(async move {
        while written * 200_000 < 4 * MEMORY as i64 {
            client.run(&rows(written * 100, 100)).await.unwrap();
            written += 1;
        }
        (client, written)
    });
    for _ in 0..10 {
        other.run("UPDATE t SET n = n + 1").await.unwrap();
    }
    assert!(!writing.is_finished());
    node.store.hold(StoreOperation::Put, false);
    let (mut client, written) = writing.await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, written * 100);
    for client in [client, other] {
        client.close().await;
    }
    node.is_sound(1).await;
}

/// The store rejects all puts: when no memory can be freed, statements are rejected. Nothing is
/// lost, and the partition recovers when the store works again.
#[tokio::test]
async fn writes_are_rejected_when_no_memory_can_be_freed() {
    let node = Node::start_small().await;
    let mut client = node.client(1);
    client.run(TABLE).await.unwrap();
    let rejection = Some(StoreFault::Fail(FailureKind::Other));
    node.store.always(StoreOperation::Put, rejection);
    let mut written = 0;
    let state = loop {
        match client.state(&rows(written * 100, 100)).await {
            "00000" => written += 1,
            state => break state,
        }
        assert!(written * 200_000 < 2 * MEMORY as i64, "{written}");
    };
    assert_eq!(state, sqlstate::OUT_OF_MEMORY);
    assert_eq!(client.int("SELECT count(*) FROM t").await, written * 100);
    // Statements that do not grow the database may use one eighth more.
    client.run("DELETE FROM t WHERE id < 100").await.unwrap();
    node.store.always(StoreOperation::Put, None);
    client.run(&rows(written * 100, 1000)).await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, written * 100 + 900);
    client.close().await;
    node.is_sound(1).await;
}

/// More statements than there is memory for their pages wait for a slow store on one thread. Others
/// are served.
#[test]
fn slow_store_and_little_memory_do_not_block_other_partitions() {
    const STATEMENTS: i64 = 500;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let node = Node::start_small().await;
        node.fill(1, ROWS).await;
        let mut warm = node.client(2);
        warm.run("CREATE TABLE t(id INTEGER PRIMARY KEY); INSERT INTO t VALUES (1)").await.unwrap();
        node.engine.flush().await.unwrap();
        node.store.always(StoreOperation::Get, Some(StoreFault::Delay(Duration::from_millis(20))));
        let waiting: Vec<_> = (0..STATEMENTS)
            .map(|i| {
                let mut client = node.client(1);
                let range = format!("{0} AND {0} + 20", i * 31);
                tokio::spawn(async move {
                    client
                        .int(&format!("SELECT count(*) FROM t WHERE id BETWEEN {range} AND length(v) = 1900"))
                        .await
                })
            })
            .collect();
        let mut answered_meanwhile = 0;
        while waiting.iter().any(|task| !task.is_finished()) {
            assert_eq!(warm.int("SELECT count(*) FROM t").await, 1);
            answered_meanwhile += 1;
            tokio::task::yield_now().await;
        }
        for task in waiting {
            assert_eq!(task.await.unwrap(), 21);
        }
        assert!(
            answered_meanwhile >= 10,
            "another partition must be served: {answered_meanwhile} statements"
        );
    });
}

/// A tenant is exported, and the file is imported as another one and checked by SQLite, with data
/// larger than memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_larger_than_memory_is_exported_imported_and_checked() {
    let node = Node::start_small().await;
    node.fill(1, ROWS).await;
    let mut export = node.engine.export(PartitionId(1), None).await.unwrap();
    assert!(export.bytes() > 3 * MEMORY);
    let mut import = node.engine.import(PartitionId(2)).await.unwrap();
    let mut piece = Vec::new();
    while export.next(&mut piece).await.unwrap() {
        import.write(&piece).await.unwrap();
        piece.clear();
    }
    import.finish().await.unwrap();
    drop(export);
    node.is_sound(2).await;
    let mut client = node.client(2);
    assert_eq!(client.int("SELECT count(*) FROM t WHERE length(v) = 1900").await, ROWS);
    // Statements that rewrite the whole database.
    client.run("VACUUM; ALTER TABLE t ADD COLUMN w DEFAULT 5; UPDATE t SET w = 6").await.unwrap();
    assert_eq!(client.int("SELECT sum(w) FROM t").await, 6 * ROWS);
    client.close().await;
    let node = node.crash().await;
    node.is_sound(2).await;
}

fn reads(node: &Node) -> u64 {
    let operations = node.engine.store_statistics();
    operations.iter().filter(|one| one.operation == StoreOperation::Get).map(|one| one.attempts).sum()
}

/// A scan reads many pages per request. A lookup of one row reads only the pages that it needs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scan_reads_ahead_and_lookup_does_not() {
    let node = Node::start_small().await;
    node.fill(1, 8000).await;
    let node = node.crash().await;
    let mut client = node.client(1);
    client.int("SELECT id FROM t WHERE id = 1").await;
    let before = (reads(&node), node.statistics());
    assert_eq!(client.int("SELECT count(*) FROM t WHERE length(v) = 1900").await, 8000);
    let (requests, after) = (reads(&node) - before.0, node.statistics());
    let ahead = after.pages_read_ahead - before.1.pages_read_ahead;
    assert!(requests < 400 && ahead > 3500, "{requests} requests for 4000 pages, {ahead} ahead");

    let before = (reads(&node), node.statistics());
    let mut random = StdRng::seed_from_u64(1);
    for _ in 0..300 {
        client.int(&format!("SELECT length(v) FROM t WHERE id = {}", random.random_range(0..8000))).await;
    }
    let (requests, after) = (reads(&node) - before.0, node.statistics());
    let ahead = after.pages_read_ahead - before.1.pages_read_ahead;
    assert!((100..700).contains(&requests) && ahead < 30, "{requests} requests, {ahead} ahead");
    client.close().await;
}

/// A tenant with a cache floor keeps its pages in memory while another tenant is scanned; a tenant
/// without one loses them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_keeps_its_cache_floor() {
    let node = Node::start_small().await;
    for partition in [1, 2] {
        node.fill(partition, 500).await;
    }
    node.fill(3, ROWS).await;
    let all = "SELECT count(*) FROM t WHERE length(v) = 1900";
    let (mut with, mut without, mut large) = (node.client(1), node.client(2), node.client(3));
    with.session.set_cache_floor(2 << 20);
    for client in [&mut with, &mut without] {
        assert_eq!(client.int(all).await, 500);
    }
    let read = |node: &Node, id| {
        let statistics = node.engine.partition_statistics(PartitionId(id)).unwrap();
        statistics.page_misses + statistics.pages_read_ahead
    };
    let before = (read(&node, 1), read(&node, 2));
    for _ in 0..3 {
        assert_eq!(large.int(all).await, ROWS);
    }
    for client in [&mut with, &mut without] {
        assert_eq!(client.int(all).await, 500);
    }
    assert!(read(&node, 1) - before.0 < 10, "{}", read(&node, 1) - before.0);
    assert!(read(&node, 2) - before.1 > 200, "{}", read(&node, 2) - before.1);
    // Floors above the total memory do not block other tenants.
    for client in [&with, &without, &large] {
        client.session.set_cache_floor(1 << 30);
    }
    for client in [&mut large, &mut with, &mut without] {
        client.int(all).await;
    }
}

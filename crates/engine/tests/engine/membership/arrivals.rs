//! Pages that the destination of a move reads before it owns the partition.

use std::future::poll_fn;
use std::task::Poll;

use fulmar_pages::PageNo;

use super::*;

const SEVEN: PartitionId = PartitionId(7);
const ROWS: i64 = 2000;

/// The pages that a member has in memory.
async fn cached(member: &Member) -> Vec<PageNo> {
    let cached = member.engine.flush_and_list(SEVEN).await.unwrap();
    assert!(cached.stored > 0);
    cached.pages.iter().map(|cached| cached.page).collect()
}

async fn fill(member: &Member) {
    member.client(7).run("CREATE TABLE big(id INTEGER PRIMARY KEY, text TEXT)").await.unwrap();
    let sql = format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) \
         INSERT INTO big SELECT i, hex(randomblob(500)) FROM n"
    );
    member.client(7).run(&sql).await.unwrap();
}

/// Reads all rows. Returns their number, and how many pages were not in memory.
async fn scan(member: &Member) -> (Value, u64) {
    let misses = || member.engine.partition_statistics(SEVEN).map_or(0, |counted| counted.page_misses);
    let before = misses();
    let rows = member.client(7).run("SELECT count(*) FROM big WHERE length(text) >= 1000").await.unwrap();
    (rows[0][0].clone(), misses() - before)
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_that_have_not_changed_are_in_memory_after_the_move() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    fill(&a).await;
    let pages = cached(&a).await;
    assert!(pages.len() > 400, "{} pages", pages.len());
    let timeline = Timeline::first(SEVEN);
    let read = b.engine.warm(SEVEN, timeline, &pages).await.unwrap();
    assert!(read as usize >= pages.len() - 1, "all but page 1, which is always loaded: {read}");
    assert_eq!(b.engine.warm(SEVEN, timeline, &pages).await.unwrap(), 0, "they are in memory");

    // Some pages change. The next call opens the newer version, and keeps the others.
    a.client(7).run("UPDATE big SET text = text || 'x' WHERE id <= 40").await.unwrap();
    let pages = cached(&a).await;
    let read = b.engine.warm(SEVEN, timeline, &pages).await.unwrap();
    assert!((1..100).contains(&read), "{read} pages were read again");

    // Changes after the last call are read after the move, and are not hidden by old pages.
    a.client(7).run("UPDATE big SET text = '' WHERE id = 1999").await.unwrap();
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    let (rows, misses) = scan(&b).await;
    assert_eq!(rows, Value::Integer(ROWS - 1));
    assert!(misses < 20, "{misses} pages were not in memory");
    b.client(7).run("DELETE FROM big WHERE id = 1").await.unwrap();
    assert_eq!(scan(&b).await.0, Value::Integer(ROWS - 2));
    let check = b.client(7).run("PRAGMA integrity_check").await.unwrap();
    assert_eq!(check[0][0], Value::Text("ok".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_arrival_leaves_no_pages_and_its_memory_is_released() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    fill(&a).await;
    let used = || b.engine.statistics().memory_bytes;
    let before = used();
    let pages = cached(&a).await;
    // The second time shows that no page was left of the first.
    for _ in 0..2 {
        let read = b.engine.warm(SEVEN, Timeline::first(SEVEN), &pages).await.unwrap();
        assert!(read as usize >= pages.len() - 1, "{read} of {} pages", pages.len());
        assert!(used() > before + 400 * 4096);
        b.engine.forget_arrival(SEVEN);
        wait_until("the memory is released", async || used() < before + 100 * 4096).await;
    }
    // The list of hot pages may be read before the scan, so its misses are not counted.
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    assert_eq!(scan(&b).await.0, Value::Integer(ROWS));
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_partition_has_no_pages_to_read() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    let cached = a.engine.flush_and_list(SEVEN).await.unwrap();
    assert!(cached.pages.is_empty());
    assert_eq!(b.engine.warm(SEVEN, Timeline::first(SEVEN), &[]).await.unwrap(), 0);
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    fill(&b).await;
    assert_eq!(scan(&b).await.0, Value::Integer(ROWS));
}

/// A migration is cancelled, or its destination dies, while the source flushes. Each flush is
/// dropped one wait later than the flush before it, until one completes; then again from the first
/// wait on.
#[tokio::test(flavor = "multi_thread")]
async fn flush_that_is_dropped_at_any_point_loses_no_page() {
    const ROUNDS: u32 = 30;
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7]).await;
    let delay = Some(StoreFault::Delay(std::time::Duration::from_millis(4)));
    a.store.always(StoreOperation::Put, delay);
    a.store.always(StoreOperation::Upload, delay);
    let (mut last_wait, mut dropped) = (0, 0);
    for round in 0..ROUNDS {
        // A page that no later round changes.
        a.client(7).run(&format!("CREATE TABLE t{round}(id INTEGER PRIMARY KEY)")).await.unwrap();
        a.client(7).run(&format!("INSERT INTO t{round} VALUES (1)")).await.unwrap();
        let mut flushing = Box::pin(a.engine.flush_and_list(SEVEN));
        let mut waits = 0;
        let is_complete = poll_fn(|cx| match flushing.as_mut().poll(cx) {
            Poll::Ready(flushed) => {
                flushed.unwrap();
                Poll::Ready(true)
            }
            Poll::Pending if waits == last_wait => Poll::Ready(false),
            Poll::Pending => {
                waits += 1;
                Poll::Pending
            }
        })
        .await;
        drop(flushing);
        last_wait = if is_complete { 0 } else { last_wait + 1 };
        dropped += u32::from(!is_complete);
    }
    assert!(dropped > 0, "no flush was dropped before its end");
    assert!(rig.hand_over(7, &a, b.node).await.unwrap());
    for round in 0..ROUNDS {
        let rows = b.client(7).run(&format!("SELECT id FROM t{round}")).await.unwrap();
        assert_eq!(rows, [[Value::Integer(1)]], "round {round}");
    }
}

//! Prewarming: when a partition opens, the pages that it used before it was closed are read into
//! memory, without delaying statements.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::crashing::CrashingNode;
use crate::common::{Client, Node, history, wait_until, with_timeout};
use fulmar_engine::{Config, Engine, PartitionStatistics};
use fulmar_pages::{HotPages, PartitionId};
use fulmar_store::{Store, StoreOperation};

const SHOP: PartitionId = PartitionId(7);
const OTHER: PartitionId = PartitionId(8);

/// Prefix of the lists of hot pages of [`SHOP`] in the store.
const LISTS: &str = "manifests/0000000000000007/hot-";

const TABLE: &str = "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)";

/// A query on some rows, which are on one tenth of the pages.
const SOME_ROWS: &str = "SELECT sum(length(v)) FROM t WHERE id BETWEEN 500 AND 699";

fn rows(count: u32) -> String {
    format!(
        "INSERT INTO t(v) WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i WHERE k < {count}) \
         SELECT randomblob(1900) FROM i"
    )
}

async fn run(mut client: Client, sql: &[&str]) {
    for sql in sql {
        client.run(sql).await.unwrap();
    }
    client.close().await;
}

fn statistics(engine: &Engine, id: PartitionId) -> PartitionStatistics {
    engine.partition_statistics(id).unwrap()
}

/// Opens a partition without reading a page of its tables. Returns a client that keeps it open.
async fn open(mut client: Client) -> Client {
    client.run("PRAGMA user_version").await.unwrap();
    client
}

impl Node {
    /// The files of a partition's lists of hot pages.
    fn lists(&self, id: PartitionId) -> Vec<PathBuf> {
        let Ok(files) = std::fs::read_dir(self.directory.path().join("store/manifests").join(id.to_string()))
        else {
            return Vec::new();
        };
        let mut lists: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        lists.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with("hot-"));
        lists.sort();
        lists
    }

    /// The only list of a partition.
    fn list(&self, id: PartitionId) -> HotPages {
        let lists = self.lists(id);
        assert_eq!(lists.len(), 1, "{lists:?}");
        HotPages::decode(&std::fs::read(&lists[0]).unwrap()).unwrap()
    }

    fn warmed(&self, id: PartitionId) -> u64 {
        statistics(&self.engine, id).pages_warmed
    }
}

/// A partition of about 1,000 pages, closed by a restart of the node.
async fn filled() -> Node {
    let node = Node::start().await;
    run(node.client(SHOP.0), &[TABLE, &rows(2000)]).await;
    node.restart().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_in_use_are_prewarmed_when_the_partition_opens() {
    let node = filled().await;
    let written = node.list(SHOP).pages.len() as u64;
    assert!(written > 900, "{written}");
    let client = open(node.client(SHOP.0)).await;
    wait_until("all pages are prewarmed", async || node.warmed(SHOP) == written).await;
    // Only some pages are used now. The next opening prewarms only those.
    run(client, &[SOME_ROWS, SOME_ROWS]).await;
    assert_eq!(statistics(&node.engine, SHOP).page_misses, 0);
    let node = node.restart().await;
    let used = node.list(SHOP).pages.len() as u64;
    assert!((50..written / 2).contains(&used), "{used} of {written}");
    let client = open(node.client(SHOP.0)).await;
    wait_until("the used pages are prewarmed", async || node.warmed(SHOP) == used).await;
    run(client, &[SOME_ROWS]).await;
    assert_eq!(statistics(&node.engine, SHOP).page_misses, 0);
    // If the same pages are used again, no new list is written.
    let list = node.list(SHOP);
    let node = node.restart().await;
    assert_eq!(node.list(SHOP), list);
    run(node.client(SHOP.0), &["SELECT count(*) FROM t WHERE length(v) = 1900"]).await;
    let node = node.restart().await;
    assert!(node.list(SHOP).timestamp > list.timestamp);
}

/// A partition that is closed because it is idle also writes its list. A node that is killed leaves
/// the previous list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_partition_writes_its_list() {
    let directory = tempfile::tempdir().unwrap();
    let config = || Config {
        idle_after: Duration::ZERO,
        manifest_interval: Duration::ZERO,
        ..Config::new(directory.path(), crate::common::MEMORY)
    };
    let engine = Engine::start(config()).await.unwrap();
    let node = Node { engine, directory: tempfile::tempdir().unwrap() };
    let lists = || {
        let files = std::fs::read_dir(directory.path().join("store/manifests").join(SHOP.to_string()));
        let names = files.into_iter().flatten().map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("hot-") && !name.contains('#')).collect::<Vec<_>>()
    };
    run(node.client(SHOP.0), &[TABLE, &rows(500)]).await;
    wait_until("the partition is closed and has a list", async || lists().len() == 1).await;
    let client = open(node.client(SHOP.0)).await;
    wait_until("its pages are prewarmed", async || node.warmed(SHOP) > 200).await;
    let before = lists();
    drop((client, node));
    let engine = crate::common::start_when_free(config).await;
    assert_eq!(lists(), before);
    let node = Node { engine, directory: tempfile::tempdir().unwrap() };
    let _client = open(node.client(SHOP.0)).await;
    wait_until("its pages are prewarmed again", async || node.warmed(SHOP) > 200).await;
}

/// While a partition's hot pages are being read, a statement waits for the pages that it needs
/// itself and for no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statements_do_not_wait_for_hot_pages() {
    const ROW: &str = "SELECT length(v) FROM t WHERE id = 900";
    let node = CrashingNode::start(1 << 30, |_| ()).await;
    run(node.client(SHOP.0), &[TABLE, &rows(1000)]).await;
    node.engine.flush().await.unwrap();
    run(node.client(SHOP.0), &["SELECT count(*) FROM t WHERE length(v) = 1900"]).await;
    let node = node.restart().await;
    // The list of hot pages does not arrive, so none of them is read.
    node.store.hold_under(StoreOperation::Get, LISTS);
    let mut client = open(node.client(SHOP.0)).await;
    with_timeout("the read of the list is held", node.store.is_holding()).await;
    assert_eq!(with_timeout("the statement reads its own pages", client.int(ROW)).await, 1900);
    assert_eq!(statistics(&node.engine, SHOP).pages_warmed, 0);
    node.store.hold(StoreOperation::Get, false);
    wait_until("the hot pages are in memory", async || statistics(&node.engine, SHOP).pages_warmed > 450)
        .await;
    let misses = statistics(&node.engine, SHOP).page_misses;
    client.run("SELECT length(v) FROM t WHERE id = 100").await.unwrap();
    assert_eq!(statistics(&node.engine, SHOP).page_misses, misses, "a hot page must be in memory");
    client.close().await;
}

/// The hot pages of a partition are still being read when the node stops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_hot_pages() {
    let node = CrashingNode::start(1 << 30, |_| ()).await;
    run(node.client(SHOP.0), &[TABLE, &rows(1000)]).await;
    let node = node.restart().await;
    node.store.hold_under(StoreOperation::Get, LISTS);
    open(node.client(SHOP.0)).await.close().await;
    with_timeout("the read of the list is held", node.store.is_holding()).await;
    with_timeout("the node stops", node.engine.shutdown()).await.unwrap();
}

/// A list that is damaged, of another partition, or of pages that do not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_list_is_ignored() {
    let node = filled().await;
    let list = node.list(SHOP);
    let file = node.lists(SHOP).remove(0);
    let sound = list.encode();
    let mut damaged = sound.clone();
    damaged[35] ^= 1;
    let of_another = HotPages { partition: OTHER, ..list.clone() }.encode();
    let mut node = node;
    for bytes in [damaged, of_another, b"?".to_vec()] {
        // The list is read only when the partition opens.
        std::fs::write(&file, bytes).unwrap();
        let mut client = open(node.client(SHOP.0)).await;
        wait_until("the warm-up ends", async || statistics(&node.engine, SHOP).warmups_ended == 1).await;
        assert_eq!((client.int("SELECT count(*) FROM t").await, node.warmed(SHOP)), (2000, 0));
        assert!(
            client.session.verify().await.unwrap().damage.is_empty(),
            "a bad list must not be reported as damaged data"
        );
        client.close().await;
        // As in a crash: no other list is written.
        let Node { engine, directory } = node;
        drop(engine);
        let config = || Config::new(directory.path(), crate::common::MEMORY);
        node = Node { engine: crate::common::start_when_free(config).await, directory };
    }
    // Nonexistent pages, duplicates, and one page that is in memory anyway.
    let pages = vec![1, 5, 6, u32::MAX, 5, 6, 100_000, 7];
    std::fs::write(&file, HotPages { pages, ..list }.encode()).unwrap();
    let mut client = open(node.client(SHOP.0)).await;
    wait_until("the existing pages are prewarmed", async || node.warmed(SHOP) == 3).await;
    assert_eq!(client.int("SELECT count(*) FROM t").await, 2000);
    client.close().await;
}

/// A drop deletes the partition's list. The collector deletes exactly the lists that no partition
/// will use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drop_and_collection_delete_lists() {
    let node = filled().await;
    run(node.client(OTHER.0), &[TABLE, &rows(100)]).await;
    let node = node.restart().await;
    let (shop, other) = (node.list(SHOP), node.list(OTHER));
    let file = node.lists(SHOP).remove(0);
    // An older list left by a crash, and one that was put after its partition was dropped.
    let older = HotPages { timestamp: 1, ..shop.clone() };
    std::fs::write(file.with_file_name("hot-00000001-0000000000000001"), older.encode()).unwrap();
    assert_eq!(node.lists(SHOP).len(), 2);
    let gone = PartitionId(99);
    let late = file.parent().unwrap().with_file_name(gone.to_string());
    std::fs::create_dir(&late).unwrap();
    std::fs::copy(&file, late.join(file.file_name().unwrap())).unwrap();
    let client = open(node.client(SHOP.0)).await;
    wait_until("the newest list is used", async || node.warmed(SHOP) == shop.pages.len() as u64).await;
    client.close().await;
    node.engine.collect().await.unwrap();
    assert_eq!((node.list(SHOP), node.list(OTHER), node.lists(gone)), (shop, other, Vec::new()));
    node.engine.drop_partition(SHOP).await.unwrap();
    assert_eq!((node.lists(SHOP).len(), node.lists(OTHER).len()), (0, 1));
    node.engine.shutdown().await.unwrap();
    assert_eq!(node.lists(SHOP).len(), 0);
}

/// After a restore other pages may be hot: the list from before is ignored and deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_discards_the_list_of_hot_pages() {
    const LARGE: &str = "CREATE TABLE large(v); INSERT INTO large WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL \
        SELECT k + 1 FROM i WHERE k < 100) SELECT randomblob(1900) FROM i";
    let (mut node, times) = history::five_minutes(Duration::from_secs(3600)).await;
    let large: Vec<&str> = LARGE.split("; ").collect();
    run(node.client(history::SHOP), &large).await;
    node.engine.shutdown().await.unwrap();
    node = node.crash().await;
    let manifests = node.objects("manifests");
    node.restore(times[2]).await.unwrap();
    assert_eq!(node.objects("manifests"), manifests + 1, "the manifest of the new epoch");
    node.engine.collect().await.unwrap();
    assert_eq!(node.objects("manifests"), manifests, "the list must be deleted and the anchor replaced");
    // The restore opened the partition, which was prewarmed until it was closed.
    let warmed = |node: &history::Node| statistics(&node.engine, history::SHOP).pages_warmed;
    let before = warmed(&node);
    assert_eq!(node.rows(history::SHOP).await, 3);
    assert_eq!(warmed(&node), before);
    run(node.client(history::SHOP), &large).await;
    node.engine.shutdown().await.unwrap();
    node = node.crash().await;
    let _client = open(node.client(history::SHOP)).await;
    wait_until("the list of the new epoch is used", async || warmed(&node) > 0).await;
}

/// If memory is full, no pages are evicted for prewarming.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_pages_evict_nothing_when_memory_is_full() {
    const MEMORY: u64 = 8 << 20;
    const ALL: &str = "SELECT count(*) FROM t WHERE length(v) = 1900";
    let node = CrashingNode::start(MEMORY, |_| ()).await;
    for (id, thousands) in [(SHOP, 1), (OTHER, 8)] {
        run(node.client(id.0), &[TABLE]).await;
        for _ in 0..thousands {
            run(node.client(id.0), &[&rows(1000)]).await;
        }
    }
    node.engine.flush().await.unwrap();
    run(node.client(SHOP.0), &[ALL, ALL]).await;
    let node = node.restart().await;
    let lists = node.store.list("manifests", None).await.unwrap().names;
    assert!(lists.iter().any(|name| name.contains(&format!("{SHOP}/hot-"))), "{lists:?}");
    let mut other = node.client(OTHER.0);
    other.run(ALL).await.unwrap();
    let evicted = |id| statistics(&node.engine, id).pages_evicted;
    // The sweeper evicts until 1/32 of the memory is free.
    let is_swept = async || node.engine.statistics().memory_bytes <= MEMORY - MEMORY / 32;
    wait_until("the sweeper has freed its share", is_swept).await;
    let before = evicted(OTHER);
    let mut shop = open(node.client(SHOP.0)).await;
    wait_until("the warm-up ends", async || statistics(&node.engine, SHOP).warmups_ended == 1).await;
    wait_until("the sweeper has freed its share", is_swept).await;
    let warmed = statistics(&node.engine, SHOP).pages_warmed;
    assert!(warmed < 100, "{warmed} of about 500 pages were prewarmed");
    // The page table of the opening partition may evict some pages.
    assert!(evicted(OTHER) - before < 50, "{} pages were evicted", evicted(OTHER) - before);
    for client in [&mut shop, &mut other] {
        client.run(ALL).await.unwrap();
    }
}

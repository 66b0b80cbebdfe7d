//! Fencing: several processes open the same store, and only the last one owns it. None of its
//! acknowledged changes is lost, duplicated or reverted, whatever the earlier processes still
//! commit, flush, compact, collect and restore, and however late their requests arrive. These are
//! individual cases; [`crate::owners_at_random`] is the random test.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Client, wait_until, with_timeout};
use fulmar_engine::{Config, Engine, SystemTime, TimeSource, Timeline, Value, sqlstate};
use fulmar_pages::{Manifest, PartitionId, SegmentId};
use fulmar_store::{Backend, FaultyStore, PageStore, StoreOperation};
use hashbrown::HashMap;

pub const SHOP: PartitionId = PartitionId(7);

/// The shared store and the contents of the catalog.
pub struct World {
    objects: Backend,
    retention: Duration,
    pub eras: HashMap<PartitionId, Timeline>,
    clock: Arc<Clock>,
}

/// The system clock plus an offset.
#[derive(Default)]
pub struct Clock {
    system: SystemTime,
    ahead_ms: AtomicU64,
}

impl TimeSource for Clock {
    fn unix_ms(&self) -> u64 {
        self.system.unix_ms() + self.ahead_ms.load(Ordering::Relaxed)
    }

    fn monotonic_ms(&self) -> u64 {
        self.system.monotonic_ms() + self.ahead_ms.load(Ordering::Relaxed)
    }
}

/// A process that has opened the store.
pub struct Process {
    pub engine: Arc<Engine>,
    pub store: FaultyStore,
    _directory: tempfile::TempDir,
}

impl World {
    pub fn new(retention: Duration) -> World {
        World { objects: Backend::memory(), retention, eras: HashMap::new(), clock: Arc::default() }
    }

    pub fn advance(&self, by: Duration) {
        self.clock.ahead_ms.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }

    pub async fn start(&self) -> Process {
        let directory = tempfile::tempdir().unwrap();
        let store = FaultyStore::new(Arc::new(self.objects.clone()));
        let retention = self.retention;
        let config = Config {
            store: Some(Arc::new(store.clone())),
            // Only the test starts flushes and collections.
            manifest_interval: Duration::from_secs(3600),
            retention: Arc::new(move |_| retention),
            node_id: 7,
            shared: [SHOP].into(),
            timelines: self.eras.clone(),
            time: self.clock.clone(),
            ..Config::new(directory.path(), 64 << 20)
        };
        Process { engine: Engine::start(config).await.unwrap(), store, _directory: directory }
    }
}

impl Process {
    pub fn client(&self, id: PartitionId) -> Client {
        Client { session: self.engine.session(id) }
    }

    pub async fn run(&self, sql: &str) -> Result<(), fulmar_engine::Error> {
        let mut client = self.client(SHOP);
        let ran = client.run(sql).await;
        client.close().await;
        ran.map(drop)
    }

    async fn rows(&self, id: PartitionId) -> BTreeSet<i64> {
        let mut client = self.client(id);
        let rows = client.run("SELECT id FROM t").await.unwrap();
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        client.close().await;
        let found: BTreeSet<i64> = rows
            .iter()
            .map(|row| match row[0] {
                Value::Integer(id) => id,
                ref other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(found.len(), rows.len(), "rows are duplicated");
        found
    }

    fn pages(&self) -> PageStore {
        self.engine.store()
    }

    async fn newest(&self) -> Manifest {
        self.pages().latest_manifest(SHOP, u32::MAX, None).await.unwrap().unwrap()
    }
}

/// Starts the first owner of a store, and creates a table with one row.
pub async fn shop(world: &World) -> Process {
    let first = world.start().await;
    first.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    first.run("INSERT INTO t VALUES (1, randomblob(3000))").await.unwrap();
    first.engine.flush().await.unwrap();
    first
}

/// A compaction stores a manifest under the number after the newest commit. Here it arrives after
/// the next owner has used that number for a commit.
#[tokio::test(flavor = "multi_thread")]
async fn late_manifest_hides_no_commit() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    let mut late = zombie.newest().await;
    let second = world.start().await;
    second.run("INSERT INTO t VALUES (2, randomblob(3000))").await.unwrap();
    late.version.number += 1;
    zombie.pages().put_manifest(&late).await.unwrap();
    drop(second);
    let third = world.start().await;
    assert_eq!(third.rows(SHOP).await, [1, 2].into());
    drop(third);
    drop(zombie);
}

/// Otherwise it would commit under its successor's version numbers.
#[tokio::test(flavor = "multi_thread")]
async fn zombie_does_not_continue_from_manifests_of_its_successor() {
    let world = World::new(Duration::ZERO);
    // A clean stop leaves nothing to flush, so the next process does not open a partition at start.
    shop(&world).await.engine.shutdown().await.unwrap();
    let zombie = world.start().await;
    let owner = world.start().await;
    owner.run("INSERT INTO t VALUES (2, randomblob(3000))").await.unwrap();
    owner.engine.flush().await.unwrap();
    owner.run("INSERT INTO t VALUES (3, randomblob(3000))").await.unwrap();
    let error = zombie.run("SELECT count(*) FROM t").await.unwrap_err();
    assert!(error.message().contains("another process has taken over"), "{error:?}");
    drop(owner);
    assert_eq!(world.start().await.rows(SHOP).await, [1, 2, 3].into());
    drop(zombie);
}

/// Manifests of an earlier owner may still name its segments for one hour. A clean stop records how
/// much of that hour is left.
#[tokio::test(flavor = "multi_thread")]
async fn garbage_of_earlier_owners_is_collected_after_an_hour() {
    let world = World::new(Duration::ZERO);
    let put_garbage = |process: &Process| {
        let pages = process.pages();
        async move { pages.put_segment((&b"unreferenced"[..]).into()).await.unwrap() }
    };
    let exists = |process: &Process, id: SegmentId| {
        let pages = process.pages();
        async move { pages.list_segments().await.unwrap().contains(&id) }
    };
    let first = shop(&world).await;
    let of_first = put_garbage(&first).await;
    drop(first);
    let second = world.start().await;
    let of_second = put_garbage(&second).await;
    second.engine.collect().await.unwrap();
    assert!(exists(&second, of_first).await && !exists(&second, of_second).await);
    world.advance(Duration::from_millis(2_400_000));
    second.engine.collect().await.unwrap();
    assert!(exists(&second, of_first).await);
    second.engine.shutdown().await.unwrap();
    let third = world.start().await;
    world.advance(Duration::from_millis(1_100_000));
    third.engine.collect().await.unwrap();
    assert!(exists(&third, of_first).await);
    world.advance(Duration::from_millis(200_000));
    third.engine.collect().await.unwrap();
    assert!(!exists(&third, of_first).await);
    let of_third = put_garbage(&third).await;
    third.engine.shutdown().await.unwrap();
    let fourth = world.start().await;
    fourth.engine.collect().await.unwrap();
    assert!(!exists(&fourth, of_third).await, "no earlier process is left");
    assert_eq!(fourth.rows(SHOP).await, [1].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn fenced_process_deletes_nothing() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    let owner = world.start().await;
    owner.run("INSERT INTO t VALUES (2, randomblob(11000000))").await.unwrap();
    let before = owner.pages().list_segments().await.unwrap().len();
    zombie.engine.collect().await.unwrap_err();
    let error = zombie.run("SELECT count(*) FROM t").await.unwrap_err();
    assert!(
        error.message().contains("another process has taken over"),
        "a fenced process must reject reads: {error:?}"
    );
    for refused in [zombie.engine.collect().await, zombie.engine.drop_partition(SHOP).await] {
        let error = refused.unwrap_err();
        assert_eq!(error.state(), sqlstate::IO_ERROR);
        assert!(error.message().contains("another process has taken over"), "{error:?}");
    }
    assert_eq!(
        owner.pages().list_segments().await.unwrap().len(),
        before,
        "a segment named only by the log must be kept"
    );
    assert_eq!(owner.rows(SHOP).await, [1, 2].into());
}

/// An earlier owner has stored the segment of a flush when the next owner collects. Its manifest is
/// stored afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn segment_whose_manifest_is_not_stored_yet_is_not_collected() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    zombie.run("INSERT INTO t VALUES (2, randomblob(3000))").await.unwrap();
    zombie.store.hold_under(StoreOperation::Put, "manifests/");
    let engine = zombie.engine.clone();
    let flushing = tokio::spawn(async move { engine.flush().await });
    // The zombie has checked its ownership and stored the segment.
    with_timeout("the put of the manifest is held", zombie.store.is_holding()).await;
    let owner = world.start().await;
    owner.engine.collect().await.unwrap();
    zombie.store.hold(StoreOperation::Put, false);
    // The owner flushes the recovered row at its start. Both processes store the same version under
    // one name, and the first one succeeds. The zombie's flush therefore succeeds, fails on the
    // name, or fails on the check of ownership that follows.
    if let Err(error) = flushing.await.unwrap() {
        let expected =
            ["exists in the store with other contents", "another process has taken over the store"];
        assert!(expected.iter().any(|message| error.message().contains(message)), "{error:?}");
    }
    owner.engine.collect().await.unwrap();
    assert_eq!(owner.rows(SHOP).await, [1, 2].into());
    drop((owner, zombie));
    assert_eq!(world.start().await.rows(SHOP).await, [1, 2].into());
}

/// The second owner branches a manifest that the first one is about to delete. If it is pinned
/// first, it is kept. If it is condemned first, the branch fails.
#[tokio::test(flavor = "multi_thread")]
async fn branched_manifest_is_kept_and_condemned_manifest_cannot_be_branched() {
    let world = World::new(Duration::from_secs(3600));
    let zombie = shop(&world).await;
    let time_ms = zombie.engine.history(SHOP).await.unwrap()[0].time_unix_ms;
    let name = zombie.pages().list_manifests(None).await.unwrap()[0];
    // History has a resolution of one millisecond.
    world.advance(Duration::from_millis(1));
    zombie.run("INSERT OR REPLACE INTO t VALUES (1, randomblob(3000))").await.unwrap();
    zombie.engine.flush().await.unwrap();
    let owner = world.start().await;
    let branch = PartitionId(8);
    owner.engine.create_partition(branch, Some((SHOP, Some(time_ms)))).await.unwrap();
    assert!(!zombie.pages().condemn(name, &[], time_ms).await.unwrap());
    assert_eq!(owner.rows(branch).await, [1].into());
    assert!(
        zombie.pages().condemn(name, &[], time_ms + 10 * 3_600_000).await.unwrap(),
        "the pin has expired"
    );
    assert_eq!(owner.rows(branch).await, [1].into(), "the branch has its own manifest");
    let error = owner.engine.create_partition(PartitionId(9), Some((SHOP, Some(time_ms)))).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE, "{error:?}");
    let error = owner.engine.create_partition(branch, None).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE, "the id is used by another process");
}

/// A collection has checked its ownership and is held before it deletes. The objects that it has
/// listed are garbage, whatever its successor does meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn delayed_collection_deletes_nothing_of_the_next_owner() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    for _ in 0..4 {
        zombie.run("UPDATE t SET v = randomblob(3000)").await.unwrap();
        zombie.engine.flush().await.unwrap();
    }
    zombie.store.hold(StoreOperation::Delete, true);
    let engine = zombie.engine.clone();
    let collecting = tokio::spawn(async move { engine.collect().await });
    // A condemned manifest shows that the collection has checked its ownership.
    let is_condemned = async || !zombie.pages().list_partitions(None).await.unwrap().holds.is_empty();
    wait_until("a manifest is condemned", is_condemned).await;
    with_timeout("the deletion is held", zombie.store.is_holding()).await;
    let owner = world.start().await;
    let manifests = owner.pages().list_manifests(None).await.unwrap().len();
    assert!(manifests > 1, "the zombie must have something to delete");
    for id in 2..6 {
        owner.run(&format!("INSERT INTO t VALUES ({id}, randomblob(3000))")).await.unwrap();
        owner.engine.flush().await.unwrap();
    }
    owner.run("INSERT INTO t VALUES (6, randomblob(10000000))").await.unwrap();
    owner.engine.compact_all().await.unwrap();
    owner.run("DELETE FROM t WHERE id = 2").await.unwrap();
    zombie.store.hold(StoreOperation::Delete, false);
    collecting.await.unwrap().unwrap();
    assert_eq!(owner.rows(SHOP).await, [1, 3, 4, 5, 6].into());
    owner.engine.collect().await.unwrap();
    drop(owner);
    let next = world.start().await;
    assert_eq!(next.rows(SHOP).await, [1, 3, 4, 5, 6].into());
    drop((next, zombie));
}

/// Exports a partition as an SQLite file.
async fn exported(process: &Process, id: PartitionId) -> Vec<u8> {
    let mut export = process.engine.export(id, None).await.unwrap();
    let mut file = Vec::new();
    while export.next(&mut file).await.unwrap() {}
    file
}

/// Both catalogs assign the same next id.
#[tokio::test(flavor = "multi_thread")]
async fn import_of_a_fenced_process_fails() {
    const NEW: PartitionId = PartitionId(57);
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    let file = exported(&zombie, SHOP).await;
    let mut import = zombie.engine.import(NEW).await.unwrap();
    import.write(&file).await.unwrap();
    let owner = world.start().await;
    let error = import.finish().await.unwrap_err();
    assert!(error.message().contains("another process has taken over"), "{error:?}");
    assert!(zombie.engine.import(PartitionId(58)).await.is_err(), "the process must know that it is fenced");
    assert_eq!(owner.pages().list_manifests(Some(NEW)).await.unwrap(), []);
    let mut client = owner.client(NEW);
    client.run("CREATE TABLE t(id INTEGER PRIMARY KEY)").await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    owner.engine.flush().await.unwrap();
    zombie.engine.undo_creation(NEW).await.unwrap();
    assert_eq!(owner.pages().list_manifests(Some(NEW)).await.unwrap().len(), 1);
    client.close().await;
}

/// A partition whose id was rejected in a creation belongs to another process.
#[tokio::test(flavor = "multi_thread")]
async fn undo_of_a_rejected_creation_deletes_nothing() {
    const NEW: PartitionId = PartitionId(57);
    let world = World::new(Duration::ZERO);
    let process = shop(&world).await;
    let error = process.engine.create_partition(SHOP, None).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE);
    process.engine.undo_creation(SHOP).await.unwrap();
    assert_eq!(process.rows(SHOP).await, [1].into());
    let error = process.engine.import(SHOP).await.map(drop).unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE);

    // A concurrent import with the same id finishes first.
    let file = exported(&process, SHOP).await;
    let mut late = process.engine.import(NEW).await.unwrap();
    late.write(&file).await.unwrap();
    let mut import = process.engine.import(NEW).await.unwrap();
    import.write(&file).await.unwrap();
    import.finish().await.unwrap();
    assert_eq!(late.finish().await.unwrap_err().state(), sqlstate::OBJECT_IN_USE);
    process.engine.undo_creation(NEW).await.unwrap();
    assert_eq!(process.rows(NEW).await, [1].into());

    // The process can undo its own creation.
    let other = PartitionId(58);
    process.engine.create_partition(other, Some((SHOP, None))).await.unwrap();
    process.engine.undo_creation(other).await.unwrap();
    assert_eq!(process.pages().list_manifests(Some(other)).await.unwrap(), []);
}

//! Processes that all believe to own one store. The last one does: of what it has acknowledged nothing is lost, doubled or
//! revived, whatever the others go on to commit, flush, compact, collect and restore, and however late that arrives. Case by case; at random in
//! [`crate::owners_at_random`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Client, until, within};
use fulmar_engine::{Config, Engine, Era, SystemTime, TimeSource, Value, sqlstate};
use fulmar_pages::{Manifest, PartitionId, SegmentId};
use fulmar_store::{Backend, FaultyStore, PageStore, StoreOperation};
use hashbrown::HashMap;

pub const SHOP: PartitionId = PartitionId(7);

/// The store, as all of them see it, and what the catalog says.
pub struct World {
    objects: Backend,
    retention: Duration,
    pub eras: HashMap<PartitionId, Era>,
    clock: Arc<Clock>,
}

/// The system's, some time ahead.
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

/// One that believes to own it.
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
            // Only the test flushes and collects.
            manifest_interval: Duration::from_secs(3600),
            retention: Arc::new(move |_| retention),
            node_id: 7,
            shared: [SHOP].into(),
            eras: self.eras.clone(),
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
        assert_eq!(found.len(), rows.len(), "doubled");
        found
    }

    fn pages(&self) -> PageStore {
        self.engine.store()
    }

    async fn newest(&self) -> Manifest {
        self.pages().latest_manifest(SHOP, u32::MAX, None).await.unwrap().unwrap()
    }
}

/// The first owner of a store, and a table with a row.
pub async fn shop(world: &World) -> Process {
    let first = world.start().await;
    first.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    first.run("INSERT INTO t VALUES (1, randomblob(3000))").await.unwrap();
    first.engine.flush().await.unwrap();
    first
}

/// What a compaction stores has the number after the newest commit's. It arrives when the next owner has given that to a commit.
#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_comes_late_hides_no_commit() {
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

/// Else it would commit under its successor's numbers.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_goes_on_from_what_a_later_owner_has_stored() {
    let world = World::new(Duration::ZERO);
    // A clean stop leaves nothing to flush, so the next process opens no partition by itself.
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

/// Segments of an earlier owner may still be named for a while; then nothing comes any more. How much of that is left a clean stop says.
#[tokio::test(flavor = "multi_thread")]
async fn what_earlier_owners_have_left_goes_in_an_hour() {
    let world = World::new(Duration::ZERO);
    let left = |process: &Process| {
        let pages = process.pages();
        async move { pages.put_segment((&b"named by nobody"[..]).into()).await.unwrap() }
    };
    let is_there = |process: &Process, id: SegmentId| {
        let pages = process.pages();
        async move { pages.list_segments().await.unwrap().contains(&id) }
    };
    let first = shop(&world).await;
    let of_first = left(&first).await;
    drop(first);
    let second = world.start().await;
    let of_second = left(&second).await;
    second.engine.collect().await.unwrap();
    assert!(is_there(&second, of_first).await && !is_there(&second, of_second).await);
    world.advance(Duration::from_millis(2_400_000));
    second.engine.collect().await.unwrap();
    assert!(is_there(&second, of_first).await);
    second.engine.shutdown().await.unwrap();
    let third = world.start().await;
    world.advance(Duration::from_millis(1_100_000));
    third.engine.collect().await.unwrap();
    assert!(is_there(&third, of_first).await);
    world.advance(Duration::from_millis(200_000));
    third.engine.collect().await.unwrap();
    assert!(!is_there(&third, of_first).await);
    let of_third = left(&third).await;
    third.engine.shutdown().await.unwrap();
    let fourth = world.start().await;
    fourth.engine.collect().await.unwrap();
    assert!(!is_there(&fourth, of_third).await, "nobody is left");
    assert_eq!(fourth.rows(SHOP).await, [1].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_own_the_store_any_more_deletes_nothing() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    let owner = world.start().await;
    owner.run("INSERT INTO t VALUES (2, randomblob(11000000))").await.unwrap();
    let before = owner.pages().list_segments().await.unwrap().len();
    zombie.engine.collect().await.unwrap_err();
    let error = zombie.run("SELECT count(*) FROM t").await.unwrap_err();
    assert!(error.message().contains("another process has taken over"), "reads would be outdated: {error:?}");
    for refused in [zombie.engine.collect().await, zombie.engine.drop_partition(SHOP).await] {
        let error = refused.unwrap_err();
        assert_eq!(error.state(), sqlstate::IO_ERROR);
        assert!(error.message().contains("another process has taken over"), "{error:?}");
    }
    assert_eq!(owner.pages().list_segments().await.unwrap().len(), before, "one that only a log names");
    assert_eq!(owner.rows(SHOP).await, [1, 2].into());
}

/// A flush of an earlier owner has stored its segment when the next one collects, and its manifest comes after that.
#[tokio::test(flavor = "multi_thread")]
async fn segment_whose_manifest_is_not_stored_yet_is_not_collected() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    zombie.run("INSERT INTO t VALUES (2, randomblob(3000))").await.unwrap();
    zombie.store.hold_under(StoreOperation::Put, "manifests/");
    let engine = zombie.engine.clone();
    let flushing = tokio::spawn(async move { engine.flush().await });
    // The zombie has checked that it owns the store, and stored the segment.
    within("the put of the manifest is held", zombie.store.is_holding()).await;
    let owner = world.start().await;
    owner.engine.collect().await.unwrap();
    zombie.store.hold(StoreOperation::Put, false);
    // The owner flushes the recovered row at its start. Both processes store the same version under
    // one name, and the first one wins. If that is the first process, its flush ends without an
    // error, or with the check of ownership that follows.
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

/// What the first owner was about to delete the second one makes a branch of: it is pinned, and stays; or it is condemned, and no
/// branch is made of it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_branched_from_stays_and_what_is_condemned_is_not_branched_from() {
    let world = World::new(Duration::from_secs(3600));
    let zombie = shop(&world).await;
    let time_ms = zombie.engine.history(SHOP).await.unwrap()[0].time_unix_ms;
    let name = zombie.pages().list_manifests(None).await.unwrap()[0];
    // History has a resolution of a millisecond.
    world.advance(Duration::from_millis(1));
    zombie.run("INSERT OR REPLACE INTO t VALUES (1, randomblob(3000))").await.unwrap();
    zombie.engine.flush().await.unwrap();
    let owner = world.start().await;
    let branch = PartitionId(8);
    owner.engine.create_partition(branch, Some((SHOP, Some(time_ms)))).await.unwrap();
    assert!(!zombie.pages().condemn(name, &[], time_ms).await.unwrap());
    assert_eq!(owner.rows(branch).await, [1].into());
    assert!(zombie.pages().condemn(name, &[], time_ms + 10 * 3_600_000).await.unwrap(), "its time is over");
    assert_eq!(owner.rows(branch).await, [1].into(), "the branch names it all itself");
    let error = owner.engine.create_partition(PartitionId(9), Some((SHOP, Some(time_ms)))).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE, "{error:?}");
    let error = owner.engine.create_partition(branch, None).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE, "somebody else has given the id away");
}

/// The collection of a process that has looked whose the store is, and is held before it deletes: what it has listed is garbage for
/// ever, whatever its successor does meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_collection_that_is_held_takes_nothing_from_the_next_owner() {
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    for _ in 0..4 {
        zombie.run("UPDATE t SET v = randomblob(3000)").await.unwrap();
        zombie.engine.flush().await.unwrap();
    }
    zombie.store.hold(StoreOperation::Delete, true);
    let engine = zombie.engine.clone();
    let collecting = tokio::spawn(async move { engine.collect().await });
    // The first one is condemned: it has looked whose the store is.
    let is_condemned = async || !zombie.pages().list_partitions(None).await.unwrap().fates.is_empty();
    until("a manifest is condemned", is_condemned).await;
    within("the deletion is held", zombie.store.is_holding()).await;
    let owner = world.start().await;
    let manifests = owner.pages().list_manifests(None).await.unwrap().len();
    assert!(manifests > 1, "something is to be deleted");
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

/// The file of a database.
async fn exported(process: &Process, id: PartitionId) -> Vec<u8> {
    let mut export = process.engine.export(id, None).await.unwrap();
    let mut file = Vec::new();
    while export.next(&mut file).await.unwrap() {}
    file
}

/// Both catalogs give out the same next id.
#[tokio::test(flavor = "multi_thread")]
async fn an_import_does_not_become_a_database_of_the_next_owner() {
    const NEW: PartitionId = PartitionId(57);
    let world = World::new(Duration::ZERO);
    let zombie = shop(&world).await;
    let file = exported(&zombie, SHOP).await;
    let mut import = zombie.engine.import(NEW).await.unwrap();
    import.write(&file).await.unwrap();
    let owner = world.start().await;
    let error = import.finish().await.unwrap_err();
    assert!(error.message().contains("another process has taken over"), "{error:?}");
    assert!(zombie.engine.import(PartitionId(58)).await.is_err(), "it is known to be over");
    assert_eq!(owner.pages().list_manifests(Some(NEW)).await.unwrap(), []);
    let mut client = owner.client(NEW);
    client.run("CREATE TABLE t(id INTEGER PRIMARY KEY)").await.unwrap();
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    owner.engine.flush().await.unwrap();
    zombie.engine.undo_creation(NEW).await.unwrap();
    assert_eq!(owner.pages().list_manifests(Some(NEW)).await.unwrap().len(), 1);
    client.close().await;
}

/// A partition whose id was refused to a creation belongs to another process.
#[tokio::test(flavor = "multi_thread")]
async fn a_creation_that_is_refused_deletes_nothing() {
    const NEW: PartitionId = PartitionId(57);
    let world = World::new(Duration::ZERO);
    let process = shop(&world).await;
    let error = process.engine.create_partition(SHOP, None).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE);
    process.engine.undo_creation(SHOP).await.unwrap();
    assert_eq!(process.rows(SHOP).await, [1].into());
    let error = process.engine.import(SHOP).await.map(drop).unwrap_err();
    assert_eq!(error.state(), sqlstate::OBJECT_IN_USE);

    // The other one was faster.
    let file = exported(&process, SHOP).await;
    let mut late = process.engine.import(NEW).await.unwrap();
    late.write(&file).await.unwrap();
    let mut import = process.engine.import(NEW).await.unwrap();
    import.write(&file).await.unwrap();
    import.finish().await.unwrap();
    assert_eq!(late.finish().await.unwrap_err().state(), sqlstate::OBJECT_IN_USE);
    process.engine.undo_creation(NEW).await.unwrap();
    assert_eq!(process.rows(NEW).await, [1].into());

    // Its own creation is deleted.
    let other = PartitionId(58);
    process.engine.create_partition(other, Some((SHOP, None))).await.unwrap();
    process.engine.undo_creation(other).await.unwrap();
    assert_eq!(process.pages().list_manifests(Some(other)).await.unwrap(), []);
}

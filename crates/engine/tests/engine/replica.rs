//! Read replica: an engine that follows the primary sees its commits, only complete ones, within
//! the requested staleness.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Client, ManualClock, start_when_free, wait_until, with_timeout};
use fulmar_engine::{
    CatalogState, Config, Engine, Primary, SystemTime, TimeSource, Timeline, Value, sqlstate,
};
use fulmar_pages::{Durability, PartitionId};
use fulmar_store::{
    Backend, FailureKind, FaultyStore, HoldName, ReadOnlyStore, Store, StoreFault, StoreOperation,
};
use parking_lot::Mutex;

const NODE: u128 = 7;
const LOCAL: u64 = 1;
const SHARED: u64 = 2;
const OTHER: u64 = 3;
const COUNT: &str = "SELECT count(*) FROM t";

type Catalog = Arc<Mutex<HashMap<PartitionId, CatalogState>>>;

struct Rig {
    directory: tempfile::TempDir,
    scratch: tempfile::TempDir,
    objects: Backend,
    /// The same objects with injected faults, as used by the replica.
    store: FaultyStore,
    catalog: Catalog,
    /// The number of the replica's reads of the catalog.
    lookups: Arc<AtomicU64>,
    /// The clock of primary and replica.
    clock: Arc<dyn TimeSource>,
}

fn rig() -> Rig {
    rig_with_clock(Arc::new(SystemTime::default()))
}

fn rig_with_clock(clock: Arc<dyn TimeSource>) -> Rig {
    let objects = Backend::memory();
    let store = FaultyStore::new(Arc::new(objects.clone()));
    let catalog_state = |id, durability| {
        let timeline = Timeline { lineage: id, epoch: 1 };
        (PartitionId(id), CatalogState { timeline, durability })
    };
    let all = [
        catalog_state(LOCAL, Durability::Local),
        catalog_state(SHARED, Durability::Shared),
        catalog_state(OTHER, Durability::Shared),
    ];
    let (directory, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Rig {
        directory,
        scratch,
        objects,
        store,
        catalog: Arc::new(Mutex::new(all.into())),
        lookups: Arc::default(),
        clock,
    }
}

impl Rig {
    async fn owner(&self) -> Arc<Engine> {
        let shared = || {
            self.catalog
                .lock()
                .iter()
                .filter(|(_, of)| of.durability == Durability::Shared)
                .map(|(id, _)| *id)
                .collect::<HashSet<_>>()
        };
        let eras = || self.catalog.lock().iter().map(|(id, of)| (*id, of.timeline)).collect();
        let config = || Config {
            store: Some(Arc::new(self.objects.clone())),
            // Only the test starts flushes.
            manifest_interval: Duration::from_secs(3600),
            node_id: NODE,
            time: self.clock.clone(),
            shared: shared(),
            timelines: eras(),
            // History would keep segments.
            retention: Arc::new(|_| Duration::ZERO),
            ..Config::new(self.directory.path(), 1 << 30)
        };
        start_when_free(config).await
    }

    async fn reader(&self) -> Arc<Engine> {
        self.reader_with(1 << 30).await
    }

    async fn reader_with(&self, memory_bytes: u64) -> Arc<Engine> {
        let (catalog, lookups) = (self.catalog.clone(), self.lookups.clone());
        let catalog_state = Arc::new(move |id| {
            lookups.fetch_add(1, Ordering::Relaxed);
            catalog.lock().get(&id).copied()
        });
        let config = Config {
            store: Some(Arc::new(ReadOnlyStore::new(Arc::new(self.store.clone()), HoldName::is_valid))),
            replica_of: Some(Primary { node_id: NODE, catalog_state, ownerships: None }),
            time: self.clock.clone(),
            ..Config::new(self.scratch.path(), memory_bytes)
        };
        Engine::start(config).await.unwrap()
    }
}

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// A client with staleness 0: it sees every commit acknowledged before its statement.
fn eager(engine: &Arc<Engine>, partition: u64) -> Client {
    let mut client = client(engine, partition);
    client.session.set_staleness(Some(Duration::ZERO));
    client
}

async fn insert(owner: &Arc<Engine>, partition: u64, rows: u32) {
    let mut writer = client(owner, partition);
    writer.run("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, v BLOB)").await.unwrap();
    for _ in 0..rows {
        writer.run("INSERT INTO t(v) VALUES (randomblob(500))").await.unwrap();
    }
    writer.close().await;
}

/// Overwrites all values several times, then compacts.
async fn overwrite_and_compact(owner: &Arc<Engine>, value_bytes: u32) {
    let update = format!("UPDATE t SET v = randomblob({value_bytes})");
    for _ in 0..4 {
        client(owner, SHARED).run(&update).await.unwrap();
        owner.flush().await.unwrap();
    }
    owner.compact_all().await.unwrap();
}

async fn assert_integrity(reader: &mut Client) {
    assert_eq!(reader.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_sees_all_commits_acknowledged_before_a_read() {
    let rig = rig();
    let owner = rig.owner().await;
    let reader = rig.reader().await;
    insert(&owner, SHARED, 1).await;
    let mut replica_client = eager(&reader, SHARED);
    for rows in 1..=20 {
        assert_eq!(replica_client.int(COUNT).await, rows);
        insert(&owner, SHARED, 1).await;
        if rows % 5 == 0 {
            owner.flush().await.unwrap();
        }
    }
    assert_eq!(replica_client.int(COUNT).await, 21);
    assert_integrity(&mut replica_client).await;
    // Another partition that was not open before, with all changes in a manifest or in the log.
    insert(&owner, OTHER, 3).await;
    assert_eq!(eager(&reader, OTHER).int(COUNT).await, 3);
    owner.flush().await.unwrap();
    insert(&owner, OTHER, 1).await;
    assert_eq!(eager(&reader, OTHER).int(COUNT).await, 4);
    let statistics = reader.replica_statistics().unwrap();
    assert!(statistics.log_polls > 20 && !statistics.is_failing, "{statistics:?}");
    // The schema changes while sessions are open.
    client(&owner, SHARED)
        .run("ALTER TABLE t ADD COLUMN w; UPDATE t SET w = id; CREATE INDEX i ON t(w)")
        .await
        .unwrap();
    assert_eq!(replica_client.int("SELECT sum(w) FROM t").await, 231);
    client(&owner, SHARED).run("DELETE FROM t WHERE id > 2; VACUUM").await.unwrap();
    assert_eq!(replica_client.int(COUNT).await, 2);
    assert_integrity(&mut replica_client).await;
    client(&owner, SHARED).run("DROP TABLE t").await.unwrap();
    assert_eq!(replica_client.state(COUNT).await, "42P01");
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshot_is_stable_and_reports_its_age() {
    let clock = Arc::new(ManualClock::default());
    let rig = rig_with_clock(clock.clone());
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut old = client(&reader, SHARED);
    old.session.set_staleness(Some(Duration::from_secs(3600)));
    old.run("BEGIN READ ONLY").await.unwrap();
    assert_eq!(old.int(COUNT).await, 1);
    let seen = old.session.snapshot_time().unwrap();
    insert(&owner, SHARED, 2).await;
    // Another session advances the partition.
    let mut eager = eager(&reader, SHARED);
    assert_eq!(eager.int(COUNT).await, 3);
    assert!(eager.session.snapshot_time().unwrap() >= seen);
    assert_eq!((old.int(COUNT).await, old.session.snapshot_time()), (1, Some(seen)));
    old.run("COMMIT").await.unwrap();
    assert_eq!(old.int(COUNT).await, 3, "the open version is newer than required");
    clock.advance(Duration::from_secs(2));
    assert_eq!(eager.int(COUNT).await, 3);
    assert_eq!(
        eager.session.snapshot_age(),
        Duration::ZERO,
        "a snapshot is as young as the check that found no newer commit"
    );
    assert_eq!(client(&owner, SHARED).session.snapshot_age(), Duration::ZERO);
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_reads_do_not_poll_the_log() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut stale = client(&reader, SHARED);
    stale.session.set_staleness(Some(Duration::from_secs(3600)));
    assert_eq!(stale.int(COUNT).await, 1);
    rig.store.always(StoreOperation::List, Some(StoreFault::Fail(FailureKind::Refused)));
    for _ in 0..3 {
        assert_eq!(stale.int(COUNT).await, 1);
    }
    let error = eager(&reader, SHARED).run(COUNT).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::IO_ERROR, "{error:?}");
    assert!(reader.replica_statistics().unwrap().is_failing && !reader.accepts_commits());
    rig.store.always(StoreOperation::List, None);
    assert_eq!(eager(&reader, SHARED).int(COUNT).await, 1);
    assert!(reader.accepts_commits());
    // A cancel ends the wait for the log.
    rig.store.hold(StoreOperation::List, true);
    let mut waiting = eager(&reader, SHARED);
    let canceller = waiting.session.canceller();
    let cancelled = tokio::spawn(async move { waiting.state(COUNT).await });
    rig.store.is_holding().await;
    canceller.cancel(fulmar_engine::CancelReason::User);
    assert_eq!(cancelled.await.unwrap(), sqlstate::QUERY_CANCELED);
    rig.store.hold(StoreOperation::List, false);
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_rejects_writes() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut client = eager(&reader, SHARED);
    for sql in [
        "INSERT INTO t(v) VALUES (1)",
        "CREATE TEMP TABLE mine(x)",
        "BEGIN; INSERT INTO t(v) VALUES (1)",
        "BEGIN READ WRITE; DELETE FROM t",
        "SELECT * FROM t WHERE id = 1 FOR UPDATE",
        "SELECT pg_current_xact_id()",
        "SELECT pg_xact_status(1 << 40)",
        "PRAGMA user_version = 3",
        "VACUUM",
    ] {
        let error = client.run(sql).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::READ_ONLY_TRANSACTION, "{sql}: {error:?}");
        assert!(format!("{error:?}").contains("primary node"), "{sql}: {error:?}");
        let _ = client.run("ROLLBACK").await;
    }
    let id = PartitionId(SHARED);
    assert_eq!(reader.create_partition(PartitionId(9), None).await.unwrap_err().state(), "25006");
    assert_eq!(reader.drop_partition(id).await.unwrap_err().state(), "25006");
    let durability = reader.set_durability(id, Durability::Local, async { Ok(()) }).await;
    assert_eq!(durability.unwrap_err().state(), "25006");
    assert!(reader.export(id, None).await.is_err());
    client.close().await;
    reader.shutdown().await.unwrap();
    insert(&owner, SHARED, 1).await;
    owner.shutdown().await.unwrap();
}

/// Clients ask for the outcome after they have lost their connection to the primary.
#[tokio::test(flavor = "multi_thread")]
async fn replica_knows_transaction_outcomes() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut writer = client(&owner, SHARED);
    writer.run("BEGIN").await.unwrap();
    let id = writer.int("SELECT pg_current_xact_id()").await;
    writer.run("INSERT INTO t(v) VALUES (1); COMMIT").await.unwrap();
    let status = format!("SELECT pg_xact_status({id})");
    assert_eq!(eager(&reader, SHARED).value(&status).await, Value::Text("committed".into()));
}

/// The primary flushes and deletes log objects that the replica has read, and ones that it has not
/// read yet.
#[tokio::test(flavor = "multi_thread")]
async fn replica_survives_truncation_of_the_log() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut replica_client = eager(&reader, SHARED);
    replica_client.run("BEGIN READ ONLY").await.unwrap();
    assert_eq!(replica_client.int(COUNT).await, 1);
    for _ in 0..3 {
        insert(&owner, SHARED, 5).await;
        owner.flush().await.unwrap();
        // The next object states that earlier ones are not needed.
        insert(&owner, OTHER, 3).await;
    }
    let logs = || async { rig.objects.list("logs", None).await.unwrap().names.len() };
    wait_until("the log is truncated", async || logs().await <= 8).await;
    assert_eq!(eager(&reader, SHARED).int(COUNT).await, 16);
    assert_eq!(replica_client.int(COUNT).await, 1, "an open transaction must keep its snapshot");
    replica_client.run("COMMIT").await.unwrap();
    assert_eq!(replica_client.int(COUNT).await, 16);
    assert_integrity(&mut replica_client).await;
    assert!(reader.replica_statistics().unwrap().resyncs > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_survives_restarts_of_the_primary() {
    let rig = rig();
    let reader = rig.reader().await;
    let mut replica_client = None;
    let mut rows = 0;
    for round in 0..4 {
        let owner = rig.owner().await;
        insert(&owner, SHARED, 3).await;
        rows += 3;
        let replica_client = replica_client.get_or_insert_with(|| eager(&reader, SHARED));
        assert_eq!(replica_client.int(COUNT).await, rows);
        if round == 1 {
            owner.flush().await.unwrap();
            insert(&owner, SHARED, 1).await;
            rows += 1;
        }
        // Simulates a kill: nothing is closed or flushed.
        drop(owner);
        assert_eq!(replica_client.int(COUNT).await, rows, "the replica must be readable without a primary");
    }
    assert_integrity(&mut replica_client.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_commits_are_read_from_segments() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    let mut replica_client = eager(&reader, SHARED);
    assert_eq!(replica_client.int(COUNT).await, 1);
    let many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 6000) INSERT INTO t(v) SELECT randomblob(3000) FROM n";
    client(&owner, SHARED).run(many).await.unwrap();
    insert(&owner, SHARED, 1).await;
    assert_eq!(replica_client.int(COUNT).await, 6002);
    assert_integrity(&mut replica_client).await;
    client(&owner, SHARED)
        .run("UPDATE t SET v = randomblob(3000); DELETE FROM t WHERE id % 2 = 0")
        .await
        .unwrap();
    assert_eq!(replica_client.int(COUNT).await, 3001);
    assert_integrity(&mut replica_client).await;
}

/// The primary collects expired data except for manifests that the replica has pinned. Without
/// permission to write pins, the data is collected.
#[tokio::test(flavor = "multi_thread")]
async fn pinned_version_is_kept_beyond_the_retention() {
    for may_pin in [true, false] {
        let rig = rig();
        let (owner, reader) = (rig.owner().await, rig.reader().await);
        insert(&owner, SHARED, 200).await;
        owner.flush().await.unwrap();
        let mut replica_client = eager(&reader, SHARED);
        if !may_pin {
            rig.store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
        }
        replica_client.run("BEGIN READ ONLY").await.unwrap();
        assert_eq!(replica_client.int("SELECT count(*) FROM sqlite_schema").await, 1);
        overwrite_and_compact(&owner, 501).await;
        owner.collect().await.unwrap();
        let sum = replica_client.run("SELECT sum(length(v)) FROM t").await;
        assert_eq!(sum.is_ok(), may_pin, "{sum:?}");
        replica_client.run("ROLLBACK").await.unwrap();
        assert_eq!(replica_client.int("SELECT sum(length(v)) FROM t").await, 200 * 501);
    }
}

/// The same for a historical session on the replica, although the primary has a newer version and
/// no history.
#[tokio::test(flavor = "multi_thread")]
async fn pinned_historical_version_is_kept() {
    for may_pin in [true, false] {
        let rig = rig();
        let (owner, reader) = (rig.owner().await, rig.reader().await);
        insert(&owner, SHARED, 200).await;
        owner.flush().await.unwrap();
        if !may_pin {
            rig.store.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
        }
        let mut replica_client = client(&reader, SHARED);
        replica_client.session.set_as_of(Some(rig.clock.unix_ms()));
        assert_eq!(replica_client.int("SELECT count(*) FROM sqlite_schema").await, 1);
        let manifests = rig.objects.list("manifests", None).await.unwrap().names;
        let pins = manifests.iter().filter(|name| HoldName::is_valid(name)).count();
        assert_eq!(pins, usize::from(may_pin));
        overwrite_and_compact(&owner, 501).await;
        owner.collect().await.unwrap();
        // These pages have not been read before.
        let sum = replica_client.run("SELECT sum(length(v)) FROM t").await;
        assert_eq!(sum.is_ok(), may_pin, "{sum:?}");
        if let Ok(sum) = sum {
            assert_eq!(sum, [[Value::Integer(200 * 500)]]);
        }
        replica_client.session.set_as_of(None);
        replica_client.session.set_staleness(Some(Duration::ZERO));
        assert_eq!(replica_client.int("SELECT sum(length(v)) FROM t").await, 200 * 501);
        replica_client.close().await;
    }
}

/// The version is chosen, and collected before it is pinned.
#[tokio::test(flavor = "multi_thread")]
async fn collected_version_is_not_opened() {
    let clock = Arc::new(ManualClock::default());
    let rig = rig_with_clock(clock.clone());
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 1).await;
    owner.flush().await.unwrap();
    let then_ms = rig.clock.unix_ms();
    rig.store.hold(StoreOperation::Put, true);
    let mut late = client(&reader, SHARED);
    late.session.set_as_of(Some(then_ms));
    let opening = tokio::spawn(async move {
        let opened = late.run(COUNT).await;
        (late, opened)
    });
    rig.store.is_holding().await;
    clock.advance(Duration::from_millis(1));
    insert(&owner, SHARED, 1).await;
    owner.flush().await.unwrap();
    owner.collect().await.unwrap();
    rig.store.hold(StoreOperation::Put, false);
    let (mut late, opened) = opening.await.unwrap();
    let error = opened.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE, "{error:?}");
    assert!(error.message().contains("was deleted after its retention period"), "{error:?}");
    let error = late.run(COUNT).await.unwrap_err();
    assert!(error.message().contains("no restore point at or before"), "{error:?}");
    late.session.set_as_of(Some(rig.clock.unix_ms()));
    assert_eq!(late.int(COUNT).await, 2);
    late.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn read_of_a_collected_segment_gets_40001() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 200).await;
    owner.flush().await.unwrap();
    let segments = || async { rig.objects.list("segments", None).await.unwrap().names };
    let old = segments().await;
    let mut replica_client = eager(&reader, SHARED);
    replica_client.run("BEGIN READ ONLY").await.unwrap();
    assert_eq!(replica_client.int("SELECT count(*) FROM sqlite_schema").await, 1);
    overwrite_and_compact(&owner, 500).await;
    // Deletes the segments, as the collector does when the retention is over.
    for segment in old {
        rig.objects.delete(&segment).await.unwrap();
    }
    let error = replica_client.run("SELECT sum(length(v)) FROM t").await.unwrap_err();
    assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "{error:?}");
    replica_client.run("ROLLBACK").await.unwrap();
    assert_eq!(replica_client.int("SELECT sum(length(v)) FROM t").await, 200 * 500);
    assert_integrity(&mut replica_client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_waits_for_the_catalog_after_a_restore_and_detects_a_drop() {
    let rig = rig();
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, SHARED, 2).await;
    owner.flush().await.unwrap();
    let then_ms = rig.clock.unix_ms();
    insert(&owner, SHARED, 2).await;
    let mut replica_client = eager(&reader, SHARED);
    assert_eq!(replica_client.int(COUNT).await, 4);
    // The partition is restored and written to: the log shows that before the catalog does.
    let (era_sender, era_receiver) = tokio::sync::oneshot::channel();
    let id = PartitionId(SHARED);
    owner
        .restore_partition(id, then_ms, async |timeline| {
            era_sender.send(timeline).unwrap();
            Ok(())
        })
        .await
        .unwrap();
    let timeline = era_receiver.await.unwrap();
    insert(&owner, SHARED, 1).await;
    let before = rig.lookups.load(Ordering::Relaxed);
    let waiting = tokio::spawn(async move {
        let rows = replica_client.int(COUNT).await;
        (replica_client, rows)
    });
    wait_until("the replica polls the catalog", async || rig.lookups.load(Ordering::Relaxed) >= before + 10)
        .await;
    assert!(!waiting.is_finished(), "data from before the restore must not be returned");
    rig.catalog.lock().insert(id, CatalogState { timeline, durability: Durability::Shared });
    let (mut replica_client, rows) = waiting.await.unwrap();
    assert_eq!(rows, 3);
    // The partition is dropped.
    rig.catalog.lock().remove(&id);
    assert_eq!(replica_client.state(COUNT).await, sqlstate::DATABASE_DROPPED);
}

#[tokio::test(flavor = "multi_thread")]
async fn local_partition_is_as_old_as_its_manifest() {
    let clock = Arc::new(ManualClock::default());
    let rig = rig_with_clock(clock.clone());
    let (owner, reader) = (rig.owner().await, rig.reader().await);
    insert(&owner, LOCAL, 2).await;
    let mut replica_client = client(&reader, LOCAL);
    replica_client.session.set_staleness(Some(Duration::from_secs(60)));
    let error = replica_client.run(COUNT).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::NOT_IN_PREREQUISITE_STATE, "{error:?}");
    assert!(format!("{error:?}").contains("Increase fulmar.staleness"));
    owner.flush().await.unwrap();
    assert_eq!(
        replica_client.state(COUNT).await,
        sqlstate::NOT_IN_PREREQUISITE_STATE,
        "the store is checked for a newer manifest at most once a second"
    );
    clock.advance(Duration::from_millis(1100));
    assert_eq!(replica_client.int(COUNT).await, 2);
    assert_eq!(replica_client.session.snapshot_age(), Duration::from_millis(1100));
    assert_eq!(eager(&reader, LOCAL).state(COUNT).await, sqlstate::NOT_IN_PREREQUISITE_STATE);
    insert(&owner, LOCAL, 1).await;
    owner.flush().await.unwrap();
    assert_eq!(replica_client.int(COUNT).await, 2, "an open version within the staleness bound is used");
    clock.advance(Duration::from_millis(1100));
    replica_client.session.set_staleness(Some(Duration::from_millis(1000)));
    assert_eq!(
        replica_client.state(COUNT).await,
        sqlstate::NOT_IN_PREREQUISITE_STATE,
        "a version beyond the staleness bound must be refused, even if it is the newest"
    );
    replica_client.session.set_staleness(None);
    assert_eq!(replica_client.int(COUNT).await, 3, "the check must have opened the newest manifest");
    // From here on, commits are in the shared log.
    owner.set_durability(PartitionId(LOCAL), Durability::Shared, async { Ok(()) }).await.unwrap();
    rig.catalog.lock().get_mut(&PartitionId(LOCAL)).unwrap().durability = Durability::Shared;
    insert(&owner, LOCAL, 1).await;
    assert_eq!(eager(&reader, LOCAL).int(COUNT).await, 4);
}

/// Transfers between accounts: no snapshot may show half of a transfer, whatever is flushed,
/// compacted and collected meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn snapshots_are_consistent_under_load() {
    const ACCOUNTS: i64 = 200;
    const SNAPSHOTS: usize = 30;
    const TRANSFERS: u64 = 200;
    let rig = rig();
    // The memory is small enough that pages must be evicted.
    let (owner, reader) = (rig.owner().await, rig.reader_with(32 << 20).await);
    let mut setup = client(&owner, SHARED);
    setup.run("CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER, pad BLOB)").await.unwrap();
    let fill = format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ACCOUNTS}) INSERT INTO account SELECT i, 100, zeroblob(2000) FROM n"
    );
    setup.run(&fill).await.unwrap();
    setup.close().await;
    let over = Arc::new(AtomicBool::new(false));
    let committed = Arc::new(AtomicU64::new(0));
    let mut writers = Vec::new();
    for number in 0..3i64 {
        let (owner, over, committed) = (owner.clone(), over.clone(), committed.clone());
        writers.push(tokio::spawn(async move {
            let mut client = client(&owner, SHARED);
            let mut transfers = 0i64;
            while !over.load(Ordering::Relaxed) {
                let (from, to) = ((transfers * 7 + number) % ACCOUNTS + 1, (transfers * 13 + 5 * number) % ACCOUNTS + 1);
                let sql = format!(
                    "BEGIN; UPDATE account SET balance = balance - 1, pad = randomblob(2000) WHERE id = {from}; \
                     UPDATE account SET balance = balance + 1 WHERE id = {to}; COMMIT"
                );
                match client.run(&sql).await {
                    Ok(_) => {
                        transfers += 1;
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(_) => drop(client.run("ROLLBACK").await),
                }
            }
            client.close().await;
        }));
    }
    let flushing = {
        let (owner, over) = (owner.clone(), over.clone());
        tokio::spawn(async move {
            while !over.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(150)).await;
                owner.flush().await.unwrap();
                owner.compact_all().await.unwrap();
                owner.collect().await.unwrap();
            }
        })
    };
    let mut readers = Vec::new();
    for number in 0..3u64 {
        let reader = reader.clone();
        readers.push(tokio::spawn(async move {
            let mut client = client(&reader, SHARED);
            client.session.set_staleness(Some(Duration::from_millis(number * 100)));
            let (mut consistent, mut newest) = (0, 0);
            while consistent < SNAPSHOTS {
                let read_twice = async {
                    client.run("BEGIN READ ONLY").await?;
                    let sums = client.run("SELECT sum(balance), count(*) FROM account").await?;
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    let again = client.run("SELECT sum(balance), count(*) FROM account").await?;
                    client.run("COMMIT").await?;
                    Ok::<_, fulmar_engine::Error>((sums, again))
                };
                match read_twice.await {
                    Ok((sums, again)) => {
                        let expected = vec![vec![Value::Integer(100 * ACCOUNTS), Value::Integer(ACCOUNTS)]];
                        assert_eq!((&sums, &again), (&expected, &expected));
                        consistent += 1;
                    }
                    Err(error) => {
                        // Segments of its snapshot were collected.
                        assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "{error:?}");
                        client.run("ROLLBACK").await.unwrap();
                    }
                }
                let seen = client.session.snapshot_time().unwrap_or_default();
                assert!(seen >= newest, "snapshot times must not go back");
                newest = seen;
            }
            let checked = client.value("PRAGMA integrity_check").await;
            assert_eq!(checked, Value::Text("ok".into()));
            client.close().await;
        }));
    }
    for task in readers {
        with_timeout("a reader gets its snapshots", task).await.unwrap();
    }
    wait_until("the writers commit", async || committed.load(Ordering::Relaxed) >= TRANSFERS).await;
    over.store(true, Ordering::Relaxed);
    flushing.await.unwrap();
    for writer in writers {
        writer.await.unwrap();
    }
    // Primary and replica have the same contents.
    let hash = "SELECT hex(group_concat(id || ':' || balance || ':' || hex(pad), ',')) FROM (SELECT * FROM account ORDER BY id)";
    assert_eq!(eager(&reader, SHARED).value(hash).await, client(&owner, SHARED).value(hash).await);
}

//! A cluster of engines in one process, which run the ownership protocol on an embedded metadata
//! store and one object store in memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use fulmar_cluster::directory::{CrashReport, DataDirectory, Stamp};
use fulmar_cluster::environment::{Environment, LogObjects, Slot, Uncertain};
use fulmar_cluster::handover::{Outcome, Release, Transfer, hand_over};
use fulmar_cluster::incarnation::{Begun, begin};
use fulmar_cluster::truncation::{self, Covered};
use fulmar_cluster::{
    LogId, LogKind, ManifestName, NodeId, PartitionRecord, Position, Rules, failover, metadata, records,
    restore,
};
use fulmar_engine::*;
use fulmar_meta::{Embedded, MetadataStore, Transaction};
use fulmar_pages::{Durability, PartitionId};
use fulmar_store::{
    Backend, Failure, FaultyStore, Limits, Listing, LogPosition, LogSlot, LogSlots, PageStore, Piece,
    Reliable, Span, Store, Upload,
};
use tokio::time::Instant;

use crate::common::{Client, with_timeout};

const CLUSTER: u128 = 0xC1;

pub(super) fn log_node(node: NodeId) -> u128 {
    CLUSTER + u128::from(node.0) - 1
}

/// The store, which counts reads of log objects.
#[derive(Clone, Debug)]
pub(super) struct CountingStore {
    pub(super) backend: Backend,
    pub(super) log_reads: Arc<AtomicUsize>,
}

impl fmt::Display for CountingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.backend.fmt(f)
    }
}

#[async_trait]
impl Store for CountingStore {
    async fn put(&self, name: &str, bytes: Bytes) -> std::result::Result<(), Failure> {
        self.backend.put(name, bytes).await
    }

    async fn upload(&self, name: &str) -> std::result::Result<Box<dyn Upload>, Failure> {
        self.backend.upload(name).await
    }

    async fn get(&self, name: &str, span: Span) -> std::result::Result<Piece, Failure> {
        if name.starts_with("logs/") {
            self.log_reads.fetch_add(1, Ordering::Relaxed);
        }
        self.backend.get(name, span).await
    }

    async fn list(&self, directory: &str, after: Option<&str>) -> std::result::Result<Listing, Failure> {
        self.backend.list(directory, after).await
    }

    async fn delete(&self, name: &str) -> std::result::Result<(), Failure> {
        self.backend.delete(name).await
    }
}

struct Parts {
    metadata: Embedded,
    logs: LogParts,
    rules: Rules,
    started: Instant,
    terms: AtomicU32,
    _directory: tempfile::TempDir,
}

/// The environment of the protocol. Shared by all nodes, because it has no state of a node.
#[derive(Clone)]
pub(super) struct Env(Arc<Parts>);

#[async_trait]
impl LogObjects for LogParts {
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> std::result::Result<bool, Uncertain> {
        assert_eq!(contents, Slot::Seal, "the protocol writes only seals");
        self.0.create_seal(log_node(log.node), log.incarnation, slot).await.map_err(|_| Uncertain)
    }

    async fn read(&self, log: LogId, slot: u64) -> std::result::Result<Option<Slot>, Uncertain> {
        let found = self.0.read(log_node(log.node), log.incarnation, slot).await.map_err(|_| Uncertain)?;
        Ok(found.map(|slot| match slot {
            LogSlot::Seal => Slot::Seal,
            LogSlot::Records { needed } => Slot::Records {
                kept_from: Position { incarnation: needed.incarnation(), slot: needed.sequence() },
                body: Vec::new(),
            },
        }))
    }

    async fn list(&self, log: LogId) -> std::result::Result<Vec<u64>, Uncertain> {
        self.0.list(log_node(log.node), log.incarnation).await.map_err(|_| Uncertain)
    }

    async fn create_end_mark(&self, log: LogId, slot: u64) -> std::result::Result<bool, Uncertain> {
        self.0.create_end_mark(log_node(log.node), log.incarnation, slot).await.map_err(|_| Uncertain)
    }

    async fn delete(&self, log: LogId, slot: u64) -> std::result::Result<(), Uncertain> {
        self.0.delete(log_node(log.node), log.incarnation, slot).await.map_err(|_| Uncertain)
    }
}

/// [`LogSlots`] as the protocol sees them.
struct LogParts(LogSlots);

/// A data directory that is not matched.
struct NoDirectory;

#[async_trait]
impl DataDirectory for NoDirectory {
    async fn stamp(&self) -> std::result::Result<Option<Stamp>, fulmar_cluster::Error> {
        Ok(None)
    }

    async fn set_stamp(&self, _stamp: Stamp) -> std::result::Result<(), fulmar_cluster::Error> {
        Ok(())
    }

    async fn crash_report(&self) -> std::result::Result<Option<CrashReport>, fulmar_cluster::Error> {
        Ok(None)
    }

    async fn clear_crash_report(&self) -> std::result::Result<(), fulmar_cluster::Error> {
        Ok(())
    }
}

impl Environment for Env {
    fn now(&self) -> Duration {
        self.0.started.elapsed()
    }

    fn unix_time(&self) -> Duration {
        Duration::ZERO
    }

    async fn sleep(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }

    fn jitter(&self, _max: Duration) -> Duration {
        Duration::ZERO
    }

    fn metadata(&self) -> &dyn MetadataStore {
        &self.0.metadata
    }

    fn logs(&self) -> &dyn LogObjects {
        &self.0.logs
    }

    fn directory(&self) -> &dyn DataDirectory {
        &NoDirectory
    }

    fn rules(&self) -> &Rules {
        &self.0.rules
    }
}

/// A cluster.
pub(super) struct Rig {
    pub(super) env: Env,
    pub(super) store: CountingStore,
    /// Members drop the ranges of earlier owners and incarnations.
    pub(super) covers: bool,
}

/// A running engine of a cluster.
pub(super) struct Member {
    pub(super) node: NodeId,
    pub(super) begun: Begun,
    pub(super) engine: Arc<Engine>,
    /// The store as this engine reaches it.
    pub(super) store: FaultyStore,
    _directory: tempfile::TempDir,
}

/// The assignments of a node's incarnation.
struct Owned {
    env: Env,
    node: NodeId,
    incarnation: u64,
    /// Ranges of earlier owners and incarnations are dropped.
    covers: bool,
}

pub(super) fn moved() -> Error {
    Error::new(sqlstate::PARTITION_MOVED, "another node owns it")
}

/// The key of a partition's timeline, which stands for the catalog.
fn timeline_key(id: PartitionId) -> String {
    format!("test-timeline/{id}")
}

/// The timeline of a partition, and a transaction that requires that it is still the same.
async fn timeline(env: &Env, id: PartitionId) -> (Timeline, Transaction) {
    let key = timeline_key(id);
    let Some(entry) = env.metadata().get(&key).await.unwrap() else {
        return (Timeline::first(id), Transaction::new().absent(key));
    };
    let text = String::from_utf8(entry.value).unwrap();
    let (lineage, epoch) = text.split_once(' ').unwrap();
    let timeline = Timeline { lineage: lineage.parse().unwrap(), epoch: epoch.parse().unwrap() };
    (timeline, Transaction::new().unchanged(key, entry.modified))
}

fn position(position: Position) -> LogPosition {
    LogPosition::new(position.incarnation, position.slot)
}

#[async_trait]
impl Assignments for Owned {
    async fn assignment(&self, id: PartitionId) -> Result<Assignment> {
        let read = metadata::partition(&self.env, id).await.unwrap().ok_or_else(moved)?;
        if read.record.owner != self.node {
            return Err(moved());
        }
        let own = Position { incarnation: self.incarnation, slot: 0 };
        let range = |range: &fulmar_cluster::Range| ReplayRange {
            log_node: log_node(range.node),
            from: position(range.from),
            to: position(range.to.unwrap_or(own)),
        };
        Ok(Assignment {
            epoch: read.record.epoch,
            timeline: timeline(&self.env, id).await.0,
            durability: Durability::Shared,
            ranges: read.record.ranges.iter().map(range).collect(),
        })
    }

    async fn inherited_from(&self) -> Result<Option<LogPosition>> {
        let partitions = metadata::partitions(&self.env).await.unwrap();
        let own = partitions.iter().filter(|(_, read)| read.record.owner == self.node);
        Ok(own.filter_map(|(_, read)| Some(position(read.record.ranges.last()?.from))).min())
    }

    async fn uncovered(&self) -> Vec<PartitionId> {
        if !self.covers {
            return Vec::new();
        }
        let partitions = metadata::partitions(&self.env).await.unwrap();
        let is_uncovered =
            |record: &PartitionRecord| record.owner == self.node && !record.is_covered(self.incarnation);
        partitions.iter().filter(|(_, read)| is_uncovered(&read.record)).map(|(id, _)| *id).collect()
    }

    async fn drop_ranges(&self, covered: Vec<(PartitionId, u32)>) -> Result<()> {
        let from = Position { incarnation: self.incarnation, slot: 0 };
        let of = |(partition, epoch): (PartitionId, u32)| Covered { partition, epoch, base: None, from };
        let covered: Vec<_> = covered.into_iter().map(of).collect();
        let node = metadata::node(&self.env, self.node).await.unwrap().unwrap();
        if node.record.incarnation == self.incarnation {
            truncation::drop_ranges(&self.env, (self.node, &node), &covered).await.unwrap();
        }
        Ok(())
    }
}

impl Rig {
    pub(super) fn new() -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let store = CountingStore { backend: Backend::memory(), log_reads: Arc::default() };
        let reliable = Reliable::new(Arc::new(store.clone()), Limits::default());
        let parts = Parts {
            metadata: Embedded::open(&directory.path().join("meta.db")).unwrap(),
            logs: LogParts(LogSlots::new(reliable)),
            // No lease is kept, and directories differ.
            rules: Rules { match_directory: false, wait_out_lease: false, ..Rules::ALL },
            started: Instant::now(),
            terms: AtomicU32::new(1),
            _directory: directory,
        };
        Rig { env: Env(Arc::new(parts)), store, covers: false }
    }

    /// Starts the next incarnation of a node.
    pub(super) async fn start(&self, node: u32) -> Member {
        self.start_with(node, |_| ()).await
    }

    pub(super) async fn start_with(&self, node: u32, adjust: impl FnOnce(&mut Config)) -> Member {
        let node = NodeId(node);
        let begun = with_timeout("the incarnation begins", begin(&self.env, node, rand::random())).await;
        let begun = begun.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let store = FaultyStore::new(Arc::new(self.store.clone()));
        let assignments =
            Owned { env: self.env.clone(), node, incarnation: begun.incarnation, covers: self.covers };
        let mut config = Config {
            store: Some(Arc::new(store.clone())),
            membership: Some(Membership {
                has_common_store: true,
                log_node: log_node(node),
                incarnation: begun.incarnation,
                term: self.env.0.terms.fetch_add(1, Ordering::Relaxed),
                node: node.0,
                ids: Arc::default(),
                assignments: Arc::new(assignments),
            }),
            // Only the tests flush.
            manifest_interval: Duration::from_secs(3600),
            idle_after: Duration::from_secs(3600),
            ..Config::new(directory.path(), 1 << 30)
        };
        adjust(&mut config);
        let engine = Engine::start(config).await.unwrap();
        Member { node, begun, engine, store, _directory: directory }
    }

    /// Creates partitions that a node owns.
    pub(super) async fn create(&self, owner: &Member, ids: impl IntoIterator<Item = u64>) {
        let from = Position { incarnation: owner.begun.incarnation, slot: 0 };
        for id in ids {
            let record = PartitionRecord::new(owner.node, LogKind::Shared, from);
            let (key, value) = (records::owner_key(PartitionId(id)), records::encode(&record).unwrap());
            let created = Transaction::new().absent(&key).put(&key, value);
            self.env.0.metadata.transact(created).await.unwrap();
        }
    }

    /// The names of a partition's manifests.
    pub(super) async fn manifests(&self, id: u64) -> Vec<String> {
        let names = PageStore::open(Arc::new(self.store.clone())).list_manifests(Some(PartitionId(id))).await;
        names.unwrap().into_iter().map(|name| format!("/{:08x}/{:016x}", name.epoch, name.number)).collect()
    }

    pub(super) async fn record(&self, id: u64) -> PartitionRecord {
        metadata::partition(&self.env, PartitionId(id)).await.unwrap().unwrap().record
    }

    /// Hands a partition over from its owner to a node. Returns false if the owner has kept it.
    pub(super) async fn hand_over(&self, id: u64, source: &Member, destination: NodeId) -> Result<bool> {
        let partition = PartitionId(id);
        let position =
            with_timeout("the release", source.engine.release(partition, Closing::Prepared)).await?.end;
        let position = Position { incarnation: position.incarnation(), slot: position.sequence() };
        let release = Release {
            partition,
            read: metadata::partition(&self.env, partition).await.unwrap().unwrap(),
            slot: Position { slot: position.slot - 1, ..position },
            kept_from: position,
            transfer: Transfer::Store,
        };
        match hand_over(&self.env, source.node, &source.begun.read, destination, &release).await.unwrap() {
            Outcome::HandedOver => {
                source.engine.give_up(partition);
                Ok(true)
            }
            Outcome::Kept(_) => {
                source.engine.take_back(partition).await?;
                Ok(false)
            }
        }
    }

    /// Restores a partition at its owner to a time. `gate` completes before that takes effect.
    pub(super) async fn restore(
        &self,
        owner: &Member,
        id: u64,
        at_unix_ms: u64,
        gate: impl Future<Output = ()> + Send,
    ) -> Result<()> {
        let partition = PartitionId(id);
        let read = metadata::partition(&self.env, partition).await.unwrap().unwrap();
        let lineage = owner.engine.new_lineage();
        let (env, read) = (&self.env, &read);
        let decide = |next: Timeline| {
            let decide = async move {
                let (_, unchanged) = timeline(env, partition).await;
                gate.await;
                let at = owner.engine.log_position();
                let start = Position { incarnation: at.incarnation(), slot: at.sequence() };
                let draft = ManifestName {
                    epoch: read.record.epoch + 1,
                    incarnation: start.incarnation,
                    covered: start.slot,
                    node: owner.node,
                    is_draft: true,
                };
                let catalog = |mut change: Transaction| {
                    change.compares.extend(unchanged.compares.clone());
                    Ok(change.put(timeline_key(partition), format!("{} {}", next.lineage, next.epoch)))
                };
                let node = (owner.node, &owner.begun.read);
                let start = (LogKind::Shared, start);
                let changed = restore::change(env, partition, read, node, draft, start, catalog);
                changed.await.map(drop).map_err(|_| DecisionError::InDoubt(moved()))
            };
            futures::FutureExt::boxed(decide)
        };
        with_timeout("the restore", owner.engine.restore_assigned(partition, at_unix_ms, lineage, decide))
            .await
    }

    /// Declares an incarnation dead, and assigns its partitions to a node.
    pub(super) async fn fail_over(&self, dead: &Member, to: NodeId) {
        let failing = failover::fail_over(&self.env, dead.node, dead.begun.incarnation, |_| Some(to));
        with_timeout("the failover", failing).await.unwrap();
    }

    /// Ends an engine as a kill does: nothing is flushed or closed.
    pub(super) fn kill(&self, member: Member) {
        drop(member);
    }
}

impl Member {
    pub(super) fn client(&self, partition: u64) -> Client {
        Client { session: self.engine.session(PartitionId(partition)) }
    }
}

impl Member {
    /// Fails the engine over to another node, and returns it.
    pub(super) async fn into_dead(self, rig: &Rig, to: NodeId) -> Member {
        rig.fail_over(&self, to).await;
        self
    }
}

impl CountingStore {
    /// Number of log objects of a node.
    pub(super) async fn log_objects(&self, node: NodeId) -> usize {
        self.backend.list(&format!("logs/{:032x}", log_node(node)), None).await.unwrap().names.len()
    }
}

//! The engine of one node: its partitions, opened on first use and closed when nobody uses them.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fulmar_pages::{PAGE_SIZE, PartitionId, SegmentId, record};
use fulmar_store::{
    CommitLog, DiskCache, DiskCacheOptions, DiskCacheStatistics, LogFiles, LogOptions, Lsn,
    OperationStatistics, PageStore, SingleFlight, StdFiles, Store,
};
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::{OnceCell, RwLock};

use crate::beside::{self, Beside, Owner};
use crate::branch::Era;
use crate::cache::{self, Cache};
use crate::clock::{Clock, SystemTime, TimeSource};
use crate::disk::{self, Disk, SpaceSource};
use crate::flush;
use crate::health::{LogHealth, Recovery};
use crate::heap::Heap;
use crate::history::{self, RetentionSource};
use crate::hot::HotLists;
use crate::maintenance::{self, Maintenance};
use crate::memory::MemoryBudget;
use crate::node::{Buffers, Naming, Node, NodeStats};
use crate::partition::{Partition, PartitionStats, Replay, SnapshotBounds, dropped_error, store_error};
use crate::past::Past;
use crate::places::Places;
use crate::spill::SpillArea;
use crate::{Error, Result, Session, sqlstate};

/// Bytes that one transaction's journal, or its changed pages, may hold in memory before they go to a file.
const SPILL_BYTES: usize = 4 << 20;

/// How an engine is set up. [`Config::new`] gives what a node on a machine of its own wants; the rest is for tests.
pub struct Config {
    /// Where log, store and temporary files live.
    pub data: PathBuf,
    /// The budget for the pages of all partitions together.
    pub memory_bytes: u64,
    /// Whether it is one for all that the process takes: pages get what others leave of it, at least half.
    pub whole_process: bool,
    /// The partitions that exist, as the catalog has them; what the log holds of others is passed over. `None`: all.
    pub live: Option<HashSet<PartitionId>>,
    /// Of those that were restored: where they stand since.
    pub eras: HashMap<PartitionId, Era>,
    /// How long history is kept.
    pub retention: RetentionSource,
    /// Sizes of the log.
    pub log: LogOptions,
    /// How long a partition may be changed without a manifest that says so.
    pub manifest_interval: Duration,
    /// How long a partition that nobody uses stays open.
    pub idle_after: Duration,
    /// How long snapshots are held.
    pub snapshots: SnapshotBounds,
    /// Bytes of the data directory's file system that are kept free; 0 for none. `None`: 1 GiB, or 5 % if that is less.
    pub disk_reserve_bytes: Option<u64>,
    /// What of it may hold pieces of segments, for a store that is farther away; 0 for none.
    pub disk_cache_bytes: u64,
    /// Tells the space of that file system, if it shall not be asked itself.
    pub space: Option<SpaceSource>,
    /// Clocks.
    pub time: Arc<dyn TimeSource>,
    /// The log's files, if they shall not lie in `data`.
    pub files: Option<Arc<dyn LogFiles>>,
    /// The store, if it shall not lie in `data`.
    pub store: Option<Arc<dyn Store>>,
    /// Names the node's log in the store.
    pub node_id: u128,
    /// The partitions whose commits are made durable in the store, as the catalog has them.
    pub shared: HashSet<PartitionId>,
    /// Who owns the partitions that the store holds, if they are only to be read: then there is no log, and `data` is for
    /// temporary files.
    pub beside: Option<Owner>,
}

/// What may wait in memory to be written to the log; as much again may be on its way. A sixteenth of the memory for pages:
/// `--memory` is said of a node's memory, so what it takes beside its pages is in proportion to them.
fn pending_bytes(memory_bytes: u64) -> usize {
    const LEAST: u64 = 8 << 20;
    const MOST: u64 = 64 << 20;
    (memory_bytes / 16).clamp(LEAST, MOST) as usize
}

impl Config {
    /// An engine on a directory.
    pub fn new(data: impl Into<PathBuf>, memory_bytes: u64) -> Self {
        Config {
            data: data.into(),
            memory_bytes,
            whole_process: false,
            live: None,
            eras: HashMap::new(),
            retention: history::a_day(),
            log: LogOptions { pending_bytes: pending_bytes(memory_bytes), ..LogOptions::default() },
            manifest_interval: Duration::from_secs(60),
            idle_after: Duration::from_secs(20),
            snapshots: SnapshotBounds::default(),
            disk_reserve_bytes: None,
            disk_cache_bytes: 0,
            space: None,
            time: Arc::new(SystemTime::default()),
            files: None,
            store: None,
            node_id: 0,
            shared: HashSet::new(),
            beside: None,
        }
    }
}

pub(crate) type Slot = Arc<OnceCell<Arc<Partition>>>;

/// All partitions of one node, their log and their memory.
pub struct Engine {
    node: Arc<Node>,
    partitions: Mutex<HashMap<PartitionId, Slot>>,
    /// Versions of the past that somebody looks at.
    pub(crate) past: Past,
    /// Partitions that are being opened.
    opening: SingleFlight<PartitionId, Result<Arc<Partition>>>,
    /// Of every partition that has been open.
    counted: Mutex<HashMap<PartitionId, Arc<PartitionStats>>>,
    /// What the log held of partitions that have not been opened since the start.
    replays: Mutex<HashMap<PartitionId, Arc<Replay>>>,
    /// Of partitions that were restored.
    eras: Mutex<HashMap<PartitionId, Era>>,
    pub(crate) retention: RetentionSource,
    /// Partitions that were dropped since the start; their ids are never used again.
    dropped: Mutex<HashSet<PartitionId>>,
    pub(crate) places: Places,
    /// The other node, whose partitions these are.
    pub(crate) beside: Option<Arc<Beside>>,
    recovery: Recovery,
    tickets: AtomicU64,
    seeds: AtomicU64,
    pub(crate) flusher: flush::Flusher,
    pub(crate) maintenance: Maintenance,
    pub(crate) hot: HotLists,
}

/// Counters of a node, for metrics. All are totals since the start unless they say otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStatistics {
    /// Bytes of commit records.
    pub record_bytes: u64,
    /// Commit records.
    pub records: u64,
    /// Changed pages in commit records.
    pub record_pages: u64,
    /// Bytes written to the log, frames included.
    pub log_bytes: u64,
    /// Syncs of the log.
    pub log_syncs: u64,
    /// Bytes of the log's files, now.
    pub log_size_bytes: u64,
    /// Smoothed time of a sync, microseconds, now.
    pub log_sync_us: u64,
    /// Log failures.
    pub log_failures: u64,
    /// Bytes of objects put into the log in the store.
    pub shared_log_bytes: u64,
    /// Those objects.
    pub shared_log_puts: u64,
    /// Bytes of the objects that are needed, now.
    pub shared_log_size_bytes: u64,
    /// Smoothed time until one is known to be there, microseconds, now.
    pub shared_log_put_us: u64,
    /// Times that another process has closed that log.
    pub shared_log_failures: u64,
    /// 1 while it takes no commits, now.
    pub shared_log_refuses: u64,
    /// Bytes of pages in memory, now.
    pub memory_bytes: u64,
    /// Those of them that no segment of the store holds yet, now.
    pub memory_unwritten_bytes: u64,
    /// The budget for them.
    pub memory_limit_bytes: u64,
    /// What the data directory's file system still has, now.
    pub disk_available_bytes: u64,
    /// What of it is kept free.
    pub disk_reserve_bytes: u64,
    /// 0: enough is left; 1: commits that need more space are refused; 2: all are.
    pub disk_level: u64,
    /// What is counted of the disk cache, if there is one.
    pub disk_cache: Option<DiskCacheStatistics>,
    /// Open partitions, now.
    pub open_partitions: u64,
    /// Commits.
    pub commits: u64,
    /// Conflicts at commits.
    pub conflicts: u64,
    /// Replays.
    pub replays: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that they had to read from the store.
    pub page_misses: u64,
    /// Pages that were read with others, before they were asked for.
    pub pages_read_ahead: u64,
    /// Pages that were read when their partition opened, since its last life had used them.
    pub pages_warmed: u64,
    /// Pages that left memory for others.
    pub pages_evicted: u64,
    /// Flushes.
    pub flushes: u64,
    /// Temporary files made by large transactions and sorts.
    pub temporary_files: u64,
}

/// What is counted of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionStatistics {
    /// Commits.
    pub commits: u64,
    /// Transactions that met a newer version of what they had read.
    pub conflicts: u64,
    /// Transactions that were run again.
    pub replays: u64,
    /// Turns that transactions have taken.
    pub turns: u64,
    /// Bytes of its commit records.
    pub log_bytes: u64,
    /// Changed pages in them.
    pub log_pages: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that they had to read from the store.
    pub page_misses: u64,
    /// Pages that were read with others, before they were asked for.
    pub pages_read_ahead: u64,
    /// Pages that were read when it opened, since its last life had used them.
    pub pages_warmed: u64,
    /// Pages that left memory for others.
    pub pages_evicted: u64,
    /// Bytes of its pages in memory, now; `None` while it is closed.
    pub memory_bytes: Option<u64>,
    /// Bytes of the database, now; `None` while it is closed.
    pub size_bytes: Option<u64>,
}

impl Engine {
    /// Opens the data directory, recovers what the log holds, and starts the log's and the flush tasks. Must be called
    /// inside a tokio runtime, which is to outlive the engine.
    pub async fn start(config: Config) -> Result<Arc<Engine>> {
        let temporary = config.data.join("tmp");
        make(&temporary)?;
        let store = match config.store {
            Some(store) => PageStore::open(store),
            None => {
                let directory = config.data.join("store");
                make(&directory)?;
                PageStore::open_directory(&directory).map_err(store_error)?
            }
        };
        let clock = Clock::new(config.time);
        let begun = Instant::now();
        let (live, shared) = (config.live, config.shared);
        let places = Places::new(config.node_id, &shared);
        let is_local = move |id: &PartitionId| {
            live.as_ref().is_none_or(|live| live.contains(id)) && !shared.contains(id)
        };
        let (log, mut replays, clock) = match &config.beside {
            Some(_) => (CommitLog::read_only(), HashMap::new(), clock),
            None => recover(config.log, log_files(config.files, &config.data)?, is_local, clock).await?,
        };
        // Whoever has the log has the directory.
        let cache = config.data.join("cache");
        let store = with_disk_cache(store, cache, config.disk_cache_bytes, config.memory_bytes).await?;
        let mut shared_log = None;
        if !places.all_local() {
            let (log, found) = places.open_log(&store, &clock).await?;
            replays.extend(found);
            shared_log = Some(log);
        }
        let recovery = Recovery::of(&replays, begun.elapsed());
        let node = Arc::new(Node {
            log,
            shared_log: OnceCell::new_with(shared_log),
            store: Arc::new(store),
            spill: SpillArea::new(&temporary, SPILL_BYTES),
            memory: MemoryBudget::new(config.memory_bytes),
            whole_process: config.whole_process,
            heap: Heap::of_node(config.memory_bytes),
            cache: Cache::default(),
            disk: Disk::new(
                config.space.unwrap_or_else(|| disk::space_of(config.data)),
                config.disk_reserve_bytes,
            ),
            clock,
            buffers: Buffers::default(),
            machines: Arc::default(),
            stats: NodeStats::default(),
            naming: Naming::default(),
            past: RwLock::default(),
            exported: Mutex::default(),
        });
        let seed = node.clock.unix_ms() ^ std::process::id() as u64;
        let engine = Arc::new(Engine {
            node: node.clone(),
            partitions: Mutex::default(),
            past: Past::default(),
            opening: SingleFlight::default(),
            counted: Mutex::default(),
            replays: Mutex::new(replays),
            places,
            beside: config.beside.map(|owner| Beside::new(owner, &node)),
            recovery,
            eras: Mutex::new(config.eras),
            retention: config.retention,
            dropped: Mutex::default(),
            tickets: AtomicU64::new(1),
            seeds: AtomicU64::new(seed.wrapping_mul(0x2545_F491_4F6C_DD1D)),
            flusher: flush::Flusher::new(
                config.manifest_interval,
                config.idle_after,
                config.snapshots,
                node.memory.limit_bytes(),
                node.memory.flush_due(),
            ),
            maintenance: Maintenance::new(),
            hot: HotLists::new(node.store.clone()),
        });
        for log in node.logs() {
            engine.discard_what_is_lost_by(log);
        }
        disk::look(&engine.node);
        disk::spawn(&engine);
        cache::spawn(&engine.node);
        if engine.reads_beside() {
            engine.flusher.task.spawn(&engine, beside::round);
        } else {
            engine.flusher.task.spawn(&engine, flush::round);
            engine.maintenance.task.spawn(&engine, maintenance::round);
        }
        Ok(engine)
    }

    /// A session on a partition. The partition is opened when the first statement needs it.
    pub fn session(self: &Arc<Self>, partition: PartitionId) -> Session {
        Session::new(self.clone(), partition)
    }

    /// Forgets a partition: whoever uses it gets 57P04, and its manifests are deleted; segments that nobody else names
    /// are collected later. Calling it again, or for what was never made, does no harm.
    pub async fn drop_partition(&self, id: PartitionId) -> Result<()> {
        self.check_owner()?;
        self.dropped.lock().insert(id);
        self.places.forget(id);
        self.counted.lock().remove(&id);
        self.eras.lock().remove(&id);
        let slot = self.partitions.lock().remove(&id);
        self.replays.lock().remove(&id);
        self.past.drop_partition(id);
        if let Some(partition) = slot.as_ref().and_then(|slot| slot.get()) {
            partition.close();
            partition.pool.clear();
        }
        flush::delete(self, id).await
    }

    /// Flushes what has changed, seals the log and stops. Sessions must have been closed.
    pub async fn shutdown(&self) -> Result<()> {
        self.hot.stop_reading();
        if self.reads_beside() {
            self.flusher.task.stop().await;
            return Ok(());
        }
        self.maintenance.task.stop().await;
        self.flusher.task.stop().await;
        let flushed = flush::flush_all(self).await;
        let logs: Vec<_> = self.node.logs().cloned().collect();
        // All of them, whatever becomes of the first.
        let close = move || {
            let closed: Vec<_> = logs.iter().map(|log| log.close()).collect();
            closed.into_iter().find(|closed| closed.is_err()).unwrap_or(Ok(()))
        };
        let closed = tokio::task::spawn_blocking(close).await;
        self.hot.node_ends(self.open_partitions()).await;
        let store = self.node.store.clone();
        // What it does not write now the next start does without.
        let _ = tokio::task::spawn_blocking(move || store.disk_cache().map(DiskCache::close)).await;
        match closed {
            Ok(closed) => flushed.and(closed.map_err(crate::partition::log_error)),
            Err(e) => Err(Error::new(sqlstate::INTERNAL, format!("closing a log panicked: {e}"))),
        }
    }

    /// Counters for metrics.
    pub fn statistics(&self) -> EngineStatistics {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let log = self.node.log.statistics();
        let mut statistics = EngineStatistics {
            record_bytes: load(&self.node.stats.record_bytes),
            records: load(&self.node.stats.records),
            record_pages: load(&self.node.stats.record_pages),
            log_bytes: load(&log.bytes),
            log_syncs: load(&log.syncs),
            log_size_bytes: self.node.log.size_bytes(),
            log_sync_us: load(&log.sync_nanos) / 1000,
            log_failures: load(&log.failures),
            memory_bytes: self.node.memory.used_bytes(),
            memory_unwritten_bytes: self.node.memory.unwritten_bytes(),
            memory_limit_bytes: self.node.memory.limit_bytes(),
            disk_available_bytes: self.node.disk.available_bytes(),
            disk_reserve_bytes: self.node.disk.reserve_bytes(),
            disk_level: self.node.disk.level(),
            disk_cache: self.node.store.disk_cache().map(DiskCache::statistics),
            flushes: self.flusher.flushes(),
            temporary_files: self.node.spill.files(),
            ..EngineStatistics::default()
        };
        if let Some(log) = self.node.shared_log.get() {
            let counted = log.statistics();
            statistics.shared_log_bytes = load(&counted.bytes);
            statistics.shared_log_puts = load(&counted.syncs);
            statistics.shared_log_size_bytes = log.size_bytes();
            statistics.shared_log_put_us = load(&counted.sync_nanos) / 1000;
            statistics.shared_log_failures = load(&counted.failures);
            statistics.shared_log_refuses = u64::from(!LogHealth::of(log).accepts());
        }
        let open = self.open_partitions();
        statistics.open_partitions = open.len() as u64;
        statistics.page_hits = open.iter().map(|partition| partition.residence.hits()).sum();
        for stats in self.counted.lock().values() {
            statistics.commits += load(&stats.commits);
            statistics.conflicts += load(&stats.conflicts);
            statistics.replays += load(&stats.replays);
            statistics.page_hits += load(&stats.page_hits);
            statistics.page_misses += load(&stats.page_misses);
            statistics.pages_read_ahead += load(&stats.pages_read_ahead);
            statistics.pages_warmed += load(&stats.pages_warmed);
            statistics.pages_evicted += load(&stats.pages_evicted);
        }
        statistics
    }

    /// The store, for what else is kept in it.
    pub fn store(&self) -> PageStore {
        PageStore::clone(&self.node.store)
    }

    /// What is counted of the store, by operation.
    pub fn store_statistics(&self) -> Vec<OperationStatistics> {
        self.node.store.statistics()
    }

    /// What is counted of one partition since the node started; `None` if nobody has used it.
    pub fn partition_statistics(&self, id: PartitionId) -> Option<PartitionStatistics> {
        let stats = self.counted.lock().get(&id)?.clone();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let open = self.partitions.lock().get(&id).and_then(|slot| slot.get().cloned());
        let turns = open.as_ref().map_or(0, |partition| partition.turns.taken());
        let hits = open.as_ref().map_or(0, |partition| partition.residence.hits());
        Some(PartitionStatistics {
            commits: load(&stats.commits),
            conflicts: load(&stats.conflicts),
            replays: load(&stats.replays),
            turns: load(&stats.turns) + turns,
            log_bytes: load(&stats.log_bytes),
            log_pages: load(&stats.log_pages),
            page_hits: load(&stats.page_hits) + hits,
            page_misses: load(&stats.page_misses),
            pages_read_ahead: load(&stats.pages_read_ahead),
            pages_warmed: load(&stats.pages_warmed),
            pages_evicted: load(&stats.pages_evicted),
            memory_bytes: open.as_ref().map(|partition| partition.resident_bytes()),
            size_bytes: open.map(|partition| u64::from(partition.current().page_count) * PAGE_SIZE as u64),
        })
    }

    /// Of so many bytes of its pages in memory others take nothing from a partition, unless all floors together leave
    /// them too little.
    pub(crate) fn set_cache_floor(&self, id: PartitionId, bytes: u64) {
        self.counted(id).cache_floor_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Writes segments and manifests for everything that has changed. For tests and tools; the engine does it by
    /// itself.
    pub async fn flush(&self) -> Result<()> {
        self.check_owner()?;
        flush::flush_all(self).await
    }

    /// What the start has read.
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// A number that was not given before.
    pub(crate) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// A seed for a transaction's random functions.
    pub(crate) fn seed(&self) -> u64 {
        self.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed)
    }

    /// A partition, opened if it is not.
    pub(crate) async fn partition(&self, id: PartitionId) -> Result<Arc<Partition>> {
        let slot = self.partitions.lock().entry(id).or_default().clone();
        let partition = match slot.get() {
            Some(partition) => partition.clone(),
            // Boxed: opening has kilobytes of state, which every session's future would have to have room for.
            None => {
                let open = async {
                    let opened = slot.get_or_try_init(|| self.open_partition(id)).await?;
                    // Not before: who looks for what a log names, or wants to cut it, must find it here or there.
                    self.replays.lock().remove(&id);
                    // What another node owns that one compacts.
                    if !self.reads_beside() {
                        self.maintenance.opened(opened);
                    }
                    Ok(opened.clone())
                };
                Box::pin(self.opening.run(id, open)).await?
            }
        };
        // Asked for after the opening: a drop that came before is seen here, one that comes later finds the partition.
        if self.dropped.lock().contains(&id) {
            partition.close();
            self.partitions.lock().remove(&id);
        }
        partition.used_ms.store(self.node.clock.monotonic_ms(), Ordering::Relaxed);
        if partition.is_closed() {
            return Err(partition.closed_error());
        }
        Ok(partition)
    }

    async fn open_partition(&self, id: PartitionId) -> Result<Arc<Partition>> {
        if let Some(beside) = &self.beside {
            return self.open_beside(beside, id).await;
        }
        self.places.settled(id).await;
        let replay = self.replays.lock().get(&id).cloned();
        let stats = self.counted(id);
        let log = self.log_of(id)?;
        let (node, era) = (self.node.clone(), self.era(id));
        let (manifest, hot_pages) = node.store.latest(id, era.epoch).await.map_err(store_error)?;
        let opened = Partition::open(node, log, stats, id, era, manifest.as_ref(), replay.as_deref()).await?;
        if let Some(list) = hot_pages {
            self.hot.warm(&opened, list);
        }
        Ok(opened)
    }

    /// What is counted of a partition.
    pub(crate) fn counted(&self, id: PartitionId) -> Arc<PartitionStats> {
        self.counted.lock().entry(id).or_default().clone()
    }

    /// Where a partition stands.
    pub(crate) fn era(&self, id: PartitionId) -> Era {
        let known = match &self.beside {
            Some(beside) => beside.standing(id).map(|standing| standing.era),
            None => self.eras.lock().get(&id).copied(),
        };
        known.unwrap_or(Era::first(id))
    }

    /// A partition was restored.
    pub(crate) fn enter(&self, id: PartitionId, era: Era) {
        self.eras.lock().insert(id, era);
    }

    /// Refuses a partition that was dropped.
    pub(crate) fn check_not_dropped(&self, id: PartitionId) -> Result<()> {
        let is_gone = match &self.beside {
            Some(beside) => beside.standing(id).is_none(),
            None => self.dropped.lock().contains(&id),
        };
        if is_gone { Err(dropped_error()) } else { Ok(()) }
    }

    /// Whether something of a partition may not be in its newest manifest.
    pub(crate) fn may_be_dirty(&self, id: PartitionId) -> bool {
        self.replays.lock().contains_key(&id) || self.partitions.lock().contains_key(&id)
    }

    pub(crate) fn open_partitions(&self) -> Vec<Arc<Partition>> {
        self.partitions.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// Partitions whose records in their log have not been applied yet, with where those begin.
    pub(crate) fn unopened(&self) -> Vec<(PartitionId, Arc<CommitLog>, Lsn)> {
        let replays = self.replays.lock();
        let unopened =
            replays.iter().filter_map(|(id, replay)| Some((*id, self.log_of(*id).ok()?, replay.since?)));
        unopened.collect()
    }

    /// Segments that records name which have not been applied yet.
    pub(crate) fn unopened_segments(&self) -> Vec<SegmentId> {
        let replays = self.replays.lock();
        let records = replays.values().flat_map(|replay| replay.records.iter());
        records
            .filter_map(|(_, body)| record::decode(body).ok())
            .flat_map(|r| r.segments().collect::<Vec<_>>())
            .collect()
    }

    /// Closes a partition that nobody uses and that is flushed. Answers it, if it was open and is closed now.
    pub(crate) fn close_if_unused(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.close_if_unused_and(id, || ())
    }

    /// The same; `then` is done before anybody can open it again.
    pub(crate) fn close_if_unused_and(&self, id: PartitionId, then: impl FnOnce()) -> Option<Arc<Partition>> {
        let mut partitions = self.partitions.lock();
        let old = partitions.get(&id).cloned();
        if let Some(slot) = &old {
            let is_idle = |partition: &Arc<Partition>| partition.is_unused(1) && partition.is_settled();
            // Both counts are ours alone: nobody holds the partition but its slot, and nobody is about to.
            let unused = Arc::strong_count(slot) == 2 && slot.get().is_none_or(is_idle);
            if !unused {
                return None;
            }
        }
        partitions.remove(&id);
        then();
        drop(partitions);
        let closed = old.and_then(|slot| slot.get().cloned())?;
        closed.let_go();
        Some(closed)
    }

    /// A partition, if it is open.
    pub(crate) fn open_one(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.partitions.lock().get(&id).and_then(|slot| slot.get().cloned())
    }

    /// Takes a partition away, if it is open and `which` says so: who asks for it next opens it anew.
    pub(crate) fn take_open(
        &self,
        id: PartitionId,
        which: impl FnOnce(&Partition) -> bool,
    ) -> Option<Arc<Partition>> {
        let mut partitions = self.partitions.lock();
        let open = partitions.get(&id).and_then(|slot| slot.get().cloned()).filter(|open| which(open))?;
        partitions.remove(&id);
        Some(open)
    }

    /// Forgets a partition that is closed for good: who asks for it next opens it anew.
    pub(crate) fn forget_open(&self, partition: &Arc<Partition>) {
        let mut partitions = self.partitions.lock();
        let is_it = |slot: &Slot| slot.get().is_some_and(|open| Arc::ptr_eq(open, partition));
        if partitions.get(&partition.id).is_some_and(is_it) {
            partitions.remove(&partition.id);
        }
        drop(partitions);
        partition.let_go();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Waiting connections and their partition hold each other.
        for partition in self.open_partitions().into_iter().chain(self.past.open()) {
            partition.pool.clear();
        }
    }
}

/// Puts a cache in a directory before the store, or removes the one that an earlier start has had.
async fn with_disk_cache(
    store: PageStore,
    directory: PathBuf,
    bytes: u64,
    memory_bytes: u64,
) -> Result<PageStore> {
    let opened = tokio::task::spawn_blocking(move || {
        if bytes > 0 {
            let opened = DiskCache::open(&directory, DiskCacheOptions { bytes, memory_bytes });
            return opened.map(Some).map_err(|e| cannot("open", &directory, &e));
        }
        if let Err(error) = DiskCache::remove(&directory) {
            tracing::warn!(directory = %directory.display(), %error, "an old disk cache cannot be removed");
        }
        Ok(None)
    });
    match opened.await {
        Ok(opened) => Ok(match opened? {
            Some(cache) => store.with_disk_cache(cache),
            None => store,
        }),
        Err(e) => Err(Error::new(sqlstate::INTERNAL, format!("opening the disk cache panicked: {e}"))),
    }
}

/// The files of the log: below the data directory, unless others were given.
fn log_files(files: Option<Arc<dyn LogFiles>>, data: &Path) -> Result<Arc<dyn LogFiles>> {
    if let Some(files) = files {
        return Ok(files);
    }
    let directory = data.join("log");
    Ok(Arc::new(StdFiles::open(&directory).map_err(|e| cannot("open", &directory, &e))?))
}

/// Opens the log and sorts what it holds by partition.
async fn recover(
    options: LogOptions,
    files: Arc<dyn LogFiles>,
    counts: impl Fn(&PartitionId) -> bool + Send + 'static,
    clock: Clock,
) -> Result<(Arc<CommitLog>, HashMap<PartitionId, Arc<Replay>>, Clock)> {
    let opened = tokio::task::spawn_blocking(move || {
        let mut replays: HashMap<PartitionId, Replay> = HashMap::new();
        let log = CommitLog::open(options, files, &mut |end, record| {
            let header = &record.header;
            clock.observe(header.timestamp);
            clock.observe_id(header.transaction);
            if counts(&header.partition) {
                replays.entry(header.partition).or_default().push(end, record.body());
            }
            Ok(())
        })?;
        let replays = replays.into_iter().map(|(id, replay)| (id, Arc::new(replay))).collect();
        Ok((log, replays, clock))
    });
    match opened.await {
        Ok(result) => result.map_err(crate::partition::log_error),
        Err(e) => Err(Error::new(sqlstate::INTERNAL, format!("reading the log panicked: {e}"))),
    }
}

fn make(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(|e| cannot("create", directory, &e))
}

fn cannot(verb: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::new(sqlstate::IO_ERROR, format!("cannot {verb} {}: {error}", path.display()))
        .hint("check that the directory exists and belongs to the user that runs the node")
}

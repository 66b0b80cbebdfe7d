//! The engine of one node: opens partitions on first use and closes idle ones.

mod config;
mod start;
mod statistics;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::{PartitionId, SegmentId, record};
use fulmar_store::{CommitLog, DiskCache, PageStore, SingleFlight};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

pub use config::{
    CatalogPartitions, Config, DEFAULT_STATEMENT_BYTES, MAX_STATEMENT_BYTES, MIN_STATEMENT_BYTES,
};
pub use statistics::{EngineStatistics, PartitionStatistics};

use crate::beside::Beside;
use crate::branch::Era;
use crate::flush;
use crate::health::Recovery;
use crate::history::RetentionSource;
use crate::hot::HotLists;
use crate::maintenance::Maintenance;
use crate::node::Node;
use crate::partition::{Partition, PartitionStats, Replay, dropped_error, opening, store_error};
use crate::past::Past;
use crate::places::Places;
use crate::{Error, Result, Session, sqlstate};

pub(crate) type Slot = Arc<OnceCell<Arc<Partition>>>;

/// All partitions of a node, with their logs and memory.
pub struct Engine {
    node: Arc<Node>,
    partitions: Mutex<HashMap<PartitionId, Slot>>,
    /// The open historical versions.
    pub(crate) past: Past,
    /// Partitions that are being opened.
    opening: SingleFlight<PartitionId, Result<Arc<Partition>>>,
    /// Statistics of every partition that has been open.
    counted: Mutex<HashMap<PartitionId, Arc<PartitionStats>>>,
    /// Log records of partitions that have not been opened since the start.
    replays: Mutex<HashMap<PartitionId, Arc<Replay>>>,
    /// The eras of restored partitions.
    eras: Mutex<HashMap<PartitionId, Era>>,
    /// Partitions with a restore of unknown outcome in the catalog. They are not opened, and all
    /// their possible manifests are kept.
    pub(crate) undecided: Mutex<HashSet<PartitionId>>,
    pub(crate) retention: RetentionSource,
    /// Ids whose creation failed since the start because another process has created a partition
    /// with the same id.
    pub(crate) foreign: Mutex<HashSet<PartitionId>>,
    /// Partitions dropped since the start. Their ids are never reused.
    dropped: Mutex<HashSet<PartitionId>>,
    pub(crate) places: Places,
    /// Set on a replica: the state of following the primary.
    pub(crate) beside: Option<Arc<Beside>>,
    recovery: Recovery,
    tickets: AtomicU64,
    seeds: AtomicU64,
    pub(crate) flusher: flush::Flusher,
    pub(crate) maintenance: Maintenance,
    pub(crate) hot: HotLists,
}

/// A partition that has records in its log and has not been opened since the start.
pub(crate) struct Unopened {
    pub id: PartitionId,
    pub log: Arc<CommitLog>,
    pub replay: Arc<Replay>,
}

impl Engine {
    /// Creates a session on a partition, which is opened when the first statement needs it.
    pub fn session(self: &Arc<Self>, partition: PartitionId) -> Session {
        Session::new(self.clone(), partition)
    }

    /// Drops a partition: its sessions get 57P04, its manifests are deleted, and its segments are
    /// collected later unless other partitions reference them. Idempotent; does nothing for a
    /// partition that never existed.
    pub async fn drop_partition(&self, id: PartitionId) -> Result<()> {
        self.check_owner()?;
        self.dropped.lock().insert(id);
        self.places.forget(id);
        self.counted.lock().remove(&id);
        self.eras.lock().remove(&id);
        self.undecided.lock().remove(&id);
        let slot = self.partitions.lock().remove(&id);
        self.replays.lock().remove(&id);
        self.past.drop_partition(id);
        if let Some(partition) = slot.as_ref().and_then(|slot| slot.get()) {
            partition.close();
            partition.pool.clear();
        }
        flush::delete(self, id).await
    }

    /// Flushes all changes, seals the logs and stops. All sessions must have been closed.
    pub fn shutdown(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            self.hot.stop_reading();
            if self.reads_beside() {
                self.flusher.task.stop().await;
                return Ok(());
            }
            self.maintenance.task.stop().await;
            self.flusher.task.stop().await;
            let flushed = flush::flush_all(self).await;
            let logs: Vec<_> = self.node.logs().cloned().collect();
            // Close every log, even if closing one fails.
            let close = move || {
                let closed: Vec<_> = logs.iter().map(|log| log.close()).collect();
                closed.into_iter().find(|closed| closed.is_err()).unwrap_or(Ok(()))
            };
            let closed = tokio::task::spawn_blocking(close).await;
            self.hot.node_ends(self.open_partitions()).await;
            let store = self.node.store.clone();
            // Unwritten contents of the disk cache are not needed after a restart.
            let _ = tokio::task::spawn_blocking(move || store.disk_cache().map(DiskCache::close)).await;
            match closed {
                Ok(closed) => flushed.and(closed.map_err(crate::partition::log_error))?,
                Err(e) => {
                    return Err(Error::new(sqlstate::INTERNAL, format!("panic while closing a log: {e}")));
                }
            }
            self.end_term().await
        }
        .boxed()
    }

    /// The store, for other data that is kept in it.
    pub fn store(&self) -> PageStore {
        PageStore::clone(&self.node.store)
    }

    /// Sets how much page memory a partition keeps under pressure. The floor is ignored if all
    /// floors together leave too little for the others.
    pub(crate) fn set_cache_floor(&self, id: PartitionId, bytes: u64) {
        self.counted(id).cache_floor_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Flushes all changed partitions. For tests and tools; the engine does so by itself.
    pub async fn flush(&self) -> Result<()> {
        self.check_owner()?;
        flush::flush_all(self).await
    }

    /// Statistics of the recovery at the start.
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Maximum length of one statement's SQL text in bytes.
    pub fn max_statement_bytes(&self) -> usize {
        self.node.max_statement_bytes
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Returns a new unique number.
    pub(crate) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a seed for a transaction's random functions.
    pub(crate) fn seed(&self) -> u64 {
        self.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed)
    }

    /// Returns a partition, and opens it if necessary.
    pub(crate) async fn partition(&self, id: PartitionId) -> Result<Arc<Partition>> {
        let slot = self.partitions.lock().entry(id).or_default().clone();
        let partition = match slot.get() {
            Some(partition) => partition.clone(),
            None => self.opening.run(id, self.open_in(&slot, id)).await?,
        };
        // Checked after the opening: an earlier drop is seen here, a later one finds the partition.
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

    /// Boxed: opening has kilobytes of state, which would enlarge every session's future.
    fn open_in<'a>(&'a self, slot: &'a Slot, id: PartitionId) -> BoxFuture<'a, Result<Arc<Partition>>> {
        async move {
            let opened = slot.get_or_try_init(|| self.open_partition(id)).await?;
            // Only now: flushes and the collector must find the partition's records in one of the
            // two maps.
            self.replays.lock().remove(&id);
            // A replica does not compact.
            if !self.reads_beside() {
                self.maintenance.opened(opened);
            }
            Ok(opened.clone())
        }
        .boxed()
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
        let (manifest, hot_pages) = node.store.latest(id, era.epoch, None).await.map_err(store_error)?;
        if let (Some(tenure), Some(manifest)) = (&node.tenure, &manifest) {
            tenure.check_number(manifest.version.number)?;
        }
        let open = Partition::open(node, log, stats, id, era, manifest.as_ref(), replay.as_deref());
        let opened = opening(id, open).await?;
        if let Some(list) = hot_pages {
            self.hot.warm(&opened, list);
        }
        Ok(opened)
    }

    /// Returns a partition's statistics.
    pub(crate) fn counted(&self, id: PartitionId) -> Arc<PartitionStats> {
        self.counted.lock().entry(id).or_default().clone()
    }

    /// Returns a partition's era.
    pub(crate) fn era(&self, id: PartitionId) -> Era {
        let known = match &self.beside {
            Some(beside) => beside.standing(id).map(|standing| standing.era),
            None => self.eras.lock().get(&id).copied(),
        };
        known.unwrap_or(Era::first(id))
    }

    /// The eras of all restored partitions.
    pub(crate) fn eras(&self) -> HashMap<PartitionId, Era> {
        self.eras.lock().clone()
    }

    /// Whether a restore of the partition has an unknown outcome.
    pub(crate) fn is_undecided(&self, id: PartitionId) -> bool {
        self.undecided.lock().contains(&id)
    }

    /// Records the new era of a restored partition.
    pub(crate) fn enter(&self, id: PartitionId, era: Era) {
        self.eras.lock().insert(id, era);
    }

    /// Fails if the partition was dropped.
    pub(crate) fn check_not_dropped(&self, id: PartitionId) -> Result<()> {
        let is_gone = match &self.beside {
            Some(beside) => beside.standing(id).is_none(),
            None => self.dropped.lock().contains(&id),
        };
        if is_gone { Err(dropped_error()) } else { Ok(()) }
    }

    /// Whether a partition may have changes that are not in its newest manifest.
    pub(crate) fn may_be_dirty(&self, id: PartitionId) -> bool {
        self.replays.lock().contains_key(&id) || self.partitions.lock().contains_key(&id)
    }

    pub(crate) fn open_partitions(&self) -> Vec<Arc<Partition>> {
        self.partitions.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// Partitions whose log records have not been applied yet.
    pub(crate) fn unopened(&self) -> Vec<Unopened> {
        let replays = self.replays.lock();
        let unopened = replays.iter().filter_map(|(id, replay)| {
            Some(Unopened { id: *id, log: self.log_of(*id).ok()?, replay: replay.clone() })
        });
        unopened.collect()
    }

    /// Segments referenced by log records that have not been applied yet.
    pub(crate) fn unopened_segments(&self) -> Vec<SegmentId> {
        let replays = self.replays.lock();
        let records = replays.values().flat_map(|replay| replay.records());
        records
            .filter_map(|logged| record::decode(&logged.body).ok())
            .flat_map(|r| r.segments().collect::<Vec<_>>())
            .collect()
    }

    /// Closes a partition if it is unused and flushed. Returns it if it was open and is closed now.
    pub(crate) fn close_if_unused(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.close_if_unused_and(id, || ())
    }

    /// Like [`Self::close_if_unused`]; `then` runs before the partition can be opened again.
    pub(crate) fn close_if_unused_and(&self, id: PartitionId, then: impl FnOnce()) -> Option<Arc<Partition>> {
        let mut partitions = self.partitions.lock();
        let old = partitions.get(&id).cloned();
        if let Some(slot) = &old {
            let is_idle = |partition: &Arc<Partition>| {
                partition.is_unused(1) && partition.is_settled() && !self.is_undecided(id)
            };
            // Two references: the map's and this one. No task holds the partition or is opening it.
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

    /// Returns a partition if it is open.
    pub(crate) fn open_one(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.partitions.lock().get(&id).and_then(|slot| slot.get().cloned())
    }

    /// Removes a partition from the open ones if `which` accepts it. The next access reopens it.
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

    /// Removes a permanently closed partition from the open ones. The next access reopens it.
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
        // Pooled connections and their partition reference each other.
        for partition in self.open_partitions().into_iter().chain(self.past.open()) {
            partition.pool.clear();
        }
    }
}

//! The engine of one node: its partitions, opened on first use and closed when nobody uses them.

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
    /// Partitions of which the catalog may say that they were restored, or not: they are not opened again, and what they may open from stays.
    pub(crate) undecided: Mutex<HashSet<PartitionId>>,
    pub(crate) retention: RetentionSource,
    /// Partitions whose creation was refused since the start, because another process created one with the same id.
    pub(crate) foreign: Mutex<HashSet<PartitionId>>,
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

/// A partition that has not been opened since the start, though its log holds records of it.
pub(crate) struct Unopened {
    pub id: PartitionId,
    pub log: Arc<CommitLog>,
    pub replay: Arc<Replay>,
}

impl Engine {
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

    /// Flushes what has changed, seals the log and stops. Sessions must have been closed.
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
                Ok(closed) => flushed.and(closed.map_err(crate::partition::log_error))?,
                Err(e) => return Err(Error::new(sqlstate::INTERNAL, format!("closing a log panicked: {e}"))),
            }
            self.end_term().await
        }
        .boxed()
    }

    /// The store, for what else is kept in it.
    pub fn store(&self) -> PageStore {
        PageStore::clone(&self.node.store)
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

    /// The longest SQL text of one statement, in bytes.
    pub fn max_statement_bytes(&self) -> usize {
        self.node.max_statement_bytes
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
            None => self.opening.run(id, self.open_in(&slot, id)).await?,
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

    /// Boxed: opening has kilobytes of state, which every session's future would have to have room for.
    fn open_in<'a>(&'a self, slot: &'a Slot, id: PartitionId) -> BoxFuture<'a, Result<Arc<Partition>>> {
        async move {
            let opened = slot.get_or_try_init(|| self.open_partition(id)).await?;
            // Not before: who looks for what a log names, or wants to cut it, must find it here or there.
            self.replays.lock().remove(&id);
            // What another node owns that one compacts.
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

    /// Where all partitions stand that were restored.
    pub(crate) fn eras(&self) -> HashMap<PartitionId, Era> {
        self.eras.lock().clone()
    }

    /// Whether it is not known if a partition was restored.
    pub(crate) fn is_undecided(&self, id: PartitionId) -> bool {
        self.undecided.lock().contains(&id)
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

    /// Partitions whose records in their log have not been applied yet.
    pub(crate) fn unopened(&self) -> Vec<Unopened> {
        let replays = self.replays.lock();
        let unopened = replays.iter().filter_map(|(id, replay)| {
            Some(Unopened { id: *id, log: self.log_of(*id).ok()?, replay: replay.clone() })
        });
        unopened.collect()
    }

    /// Segments that records name which have not been applied yet.
    pub(crate) fn unopened_segments(&self) -> Vec<SegmentId> {
        let replays = self.replays.lock();
        let records = replays.values().flat_map(|replay| replay.records());
        records
            .filter_map(|logged| record::decode(&logged.body).ok())
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
            let is_idle = |partition: &Arc<Partition>| {
                partition.is_unused(1) && partition.is_settled() && !self.is_undecided(id)
            };
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

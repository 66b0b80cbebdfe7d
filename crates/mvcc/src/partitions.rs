//! The partitions of a node: opens them on first use, finds the open ones, and closes unused ones.
//!
//! ```text
//!   found in a log at the start --> replays --> opened: applied, in the map of open partitions
//!   never used, or closed ------------------'                 |
//!                                         unused and settled, |
//!                                         or dropped          v  removed from the map
//! ```
//!
//! How a partition is opened depends on the node: an owner opens it with its log, a replica at a
//! manifest of the primary. [`Opener`] decides that.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_pages::{PartitionId, SegmentId, Timeline, record};
use fulmar_sqlite::Result;
use fulmar_store::{CommitLog, SingleFlight};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::error::dropped_error;
use crate::node::Node;
use crate::partition::{Partition, PartitionStats, Replay};

/// An open partition, or one that is being opened.
pub type Slot = Arc<OnceCell<Arc<Partition>>>;

/// Returns the era of a partition in the primary's catalog; `None` if it does not exist.
pub type PrimaryEra = Arc<dyn Fn(PartitionId) -> Option<Timeline> + Send + Sync>;

/// How a node opens its partitions, and which log they commit to.
pub trait Opener: Send + Sync {
    /// Opens a partition.
    fn open<'a>(
        &'a self,
        partitions: &'a Partitions,
        id: PartitionId,
    ) -> BoxFuture<'a, Result<Arc<Partition>>>;

    /// Called once an opened partition is in the map of open partitions.
    fn opened(&self, partition: &Arc<Partition>);

    /// The log that a partition commits to. Fails if it is unknown, or cannot be used.
    fn log_of(&self, node: &Node, id: PartitionId) -> Result<Arc<CommitLog>>;

    /// Waits until no change of a partition's log is in progress.
    fn log_settled(&self, id: PartitionId) -> BoxFuture<'_, ()>;

    /// Makes the partition's current timeline known ([`Partitions::timeline`]), without opening it.
    fn learn_timeline<'a>(&'a self, partitions: &'a Partitions, id: PartitionId)
    -> BoxFuture<'a, Result<()>>;

    /// Fails if the shared log was rejected: its records are unknown.
    fn check_shared_log(&self) -> Result<()>;

    /// Forgets a dropped partition.
    fn forget(&self, id: PartitionId);
}

/// A partition that has records in its log and has not been opened since the start.
pub struct Unopened {
    /// Its id.
    pub id: PartitionId,
    /// Its log.
    pub log: Arc<CommitLog>,
    /// The records.
    pub replay: Arc<Replay>,
}

/// What is known about a node's partitions at its start.
#[derive(Default)]
pub struct Found {
    /// Log records of partitions, which are applied when these are opened.
    pub replays: HashMap<PartitionId, Arc<Replay>>,
    /// The eras of restored partitions.
    pub timelines: HashMap<PartitionId, Timeline>,
    /// On a replica: the eras in the primary's catalog.
    pub primary: Option<PrimaryEra>,
}

/// The partitions of a node.
pub struct Partitions {
    node: Arc<Node>,
    opener: Arc<dyn Opener>,
    open: Mutex<HashMap<PartitionId, Slot>>,
    /// Partitions that are being opened.
    opening: SingleFlight<PartitionId, Result<Arc<Partition>>>,
    /// Statistics of every partition that has been open.
    counted: Mutex<HashMap<PartitionId, Arc<PartitionStats>>>,
    /// Log records of partitions that have not been opened since the start.
    replays: Mutex<HashMap<PartitionId, Arc<Replay>>>,
    /// The eras of restored partitions.
    timelines: Mutex<HashMap<PartitionId, Timeline>>,
    primary: Option<PrimaryEra>,
    /// Partitions with a restore of unknown outcome in the catalog. They are not opened, and all
    /// their possible manifests are kept.
    undecided: Mutex<HashSet<PartitionId>>,
    /// Partitions dropped since the start. Their ids are never reused.
    dropped: Mutex<HashSet<PartitionId>>,
}

impl Partitions {
    /// Creates the list of a node's partitions, none of which is open.
    pub fn new(node: Arc<Node>, opener: Arc<dyn Opener>, found: Found) -> Self {
        Partitions {
            node,
            opener,
            open: Mutex::default(),
            opening: SingleFlight::default(),
            counted: Mutex::default(),
            replays: Mutex::new(found.replays),
            timelines: Mutex::new(found.timelines),
            primary: found.primary,
            undecided: Mutex::default(),
            dropped: Mutex::default(),
        }
    }

    /// The node.
    #[inline]
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// How partitions are opened.
    pub fn opener(&self) -> &dyn Opener {
        &*self.opener
    }

    /// Returns a partition, and opens it if necessary.
    pub async fn partition(&self, id: PartitionId) -> Result<Arc<Partition>> {
        let slot = self.open.lock().entry(id).or_default().clone();
        let partition = match slot.get() {
            Some(partition) => partition.clone(),
            None => self.opening.run(id, self.open_in(&slot, id)).await?,
        };
        // Checked after the opening: an earlier drop is seen here, a later one finds the partition.
        if self.dropped.lock().contains(&id) {
            partition.close();
            self.open.lock().remove(&id);
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
            let opened = slot.get_or_try_init(|| self.opener.open(self, id)).await?;
            // Only now: flushes and the collector must find the partition's records in one of the
            // two maps.
            self.replays.lock().remove(&id);
            self.opener.opened(opened);
            Ok(opened.clone())
        }
        .boxed()
    }

    /// The log records of a partition that has not been opened since the start.
    pub fn replay(&self, id: PartitionId) -> Option<Arc<Replay>> {
        self.replays.lock().get(&id).cloned()
    }

    /// Forgets a dropped partition, and closes it. Its sessions get 57P04.
    pub fn drop_partition(&self, id: PartitionId) {
        self.dropped.lock().insert(id);
        self.opener.forget(id);
        self.counted.lock().remove(&id);
        self.timelines.lock().remove(&id);
        self.undecided.lock().remove(&id);
        let slot = self.open.lock().remove(&id);
        self.replays.lock().remove(&id);
        if let Some(partition) = slot.as_ref().and_then(|slot| slot.get()) {
            partition.close();
            partition.close_idle();
        }
    }

    /// Returns a partition's statistics.
    pub fn counted(&self, id: PartitionId) -> Arc<PartitionStats> {
        self.counted.lock().entry(id).or_default().clone()
    }

    /// Returns a partition's statistics, if it has been open.
    pub fn counted_if_used(&self, id: PartitionId) -> Option<Arc<PartitionStats>> {
        self.counted.lock().get(&id).cloned()
    }

    /// Calls `count` with the statistics of every partition that has been open.
    pub fn count_all(&self, count: impl FnMut(&Arc<PartitionStats>)) {
        self.counted.lock().values().for_each(count);
    }

    /// Returns a partition's era.
    pub fn timeline(&self, id: PartitionId) -> Timeline {
        let known = match &self.primary {
            Some(primary) => primary(id),
            None => self.timelines.lock().get(&id).copied(),
        };
        known.unwrap_or(Timeline::first(id))
    }

    /// The eras of all restored partitions.
    pub fn timelines(&self) -> HashMap<PartitionId, Timeline> {
        self.timelines.lock().clone()
    }

    /// Records the new era of a restored partition.
    pub fn set_timeline(&self, id: PartitionId, era: Timeline) {
        self.timelines.lock().insert(id, era);
    }

    /// Records the timeline of a partition that is not open, unless a later one is known.
    pub fn learn_timeline(&self, id: PartitionId, timeline: Timeline) {
        let mut timelines = self.timelines.lock();
        if timelines.get(&id).is_none_or(|known| known.epoch < timeline.epoch) {
            timelines.insert(id, timeline);
        }
    }

    /// Whether a restore of the partition has an unknown outcome.
    pub fn is_undecided(&self, id: PartitionId) -> bool {
        self.undecided.lock().contains(&id)
    }

    /// Records whether a restore of the partition has an unknown outcome.
    pub fn set_undecided(&self, id: PartitionId, undecided: bool) {
        let mut all = self.undecided.lock();
        let _changed = if undecided { all.insert(id) } else { all.remove(&id) };
    }

    /// Fails if the partition was dropped.
    pub fn check_not_dropped(&self, id: PartitionId) -> Result<()> {
        let is_gone = match &self.primary {
            Some(primary) => primary(id).is_none(),
            None => self.dropped.lock().contains(&id),
        };
        if is_gone { Err(dropped_error()) } else { Ok(()) }
    }

    /// Whether a partition may have changes that are not in its newest manifest.
    pub fn may_be_dirty(&self, id: PartitionId) -> bool {
        self.replays.lock().contains_key(&id) || self.open.lock().contains_key(&id)
    }

    /// The open partitions.
    pub fn open_partitions(&self) -> Vec<Arc<Partition>> {
        self.open.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// Partitions whose log records have not been applied yet.
    pub fn unopened(&self) -> Vec<Unopened> {
        let replays = self.replays.lock();
        let unopened = replays.iter().filter_map(|(id, replay)| {
            let log = self.opener.log_of(&self.node, *id).ok()?;
            Some(Unopened { id: *id, log, replay: replay.clone() })
        });
        unopened.collect()
    }

    /// Segments referenced by log records that have not been applied yet.
    pub fn unopened_segments(&self) -> Vec<SegmentId> {
        let replays = self.replays.lock();
        let records = replays.values().flat_map(|replay| replay.records());
        records
            .filter_map(|logged| record::decode(&logged.body).ok())
            .flat_map(|r| r.segments().collect::<Vec<_>>())
            .collect()
    }

    /// Closes a partition if it is unused and flushed. Returns it if it was open and is closed now.
    pub fn close_if_unused(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.close_if_unused_and(id, || ())
    }

    /// Like [`Self::close_if_unused`]; `then` runs before the partition can be opened again.
    pub fn close_if_unused_and(&self, id: PartitionId, then: impl FnOnce()) -> Option<Arc<Partition>> {
        let mut partitions = self.open.lock();
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
        closed.release_resources();
        Some(closed)
    }

    /// Returns a partition if it is open.
    pub fn open_one(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.open.lock().get(&id).and_then(|slot| slot.get().cloned())
    }

    /// Removes a partition from the open ones if `which` accepts it. The next access reopens it.
    pub fn take_open(
        &self,
        id: PartitionId,
        which: impl FnOnce(&Partition) -> bool,
    ) -> Option<Arc<Partition>> {
        let mut partitions = self.open.lock();
        let open = partitions.get(&id).and_then(|slot| slot.get().cloned()).filter(|open| which(open))?;
        partitions.remove(&id);
        Some(open)
    }

    /// Keeps the log records of a partition that cannot be opened. Returns false if it is open.
    pub fn keep_replay(&self, id: PartitionId, replay: Arc<Replay>) -> bool {
        self.replays.lock().insert(id, replay);
        // An opening that is in progress removes it.
        let is_open = self.open_one(id).is_some();
        if is_open {
            self.forget_replay(id);
        }
        !is_open
    }

    /// Forgets the log records of a partition that another node owns.
    pub fn forget_replay(&self, id: PartitionId) {
        self.replays.lock().remove(&id);
    }

    /// Forgets everything about a partition that was handed over to another node, and closes it.
    pub fn give_up(&self, id: PartitionId) {
        let slot = self.open.lock().remove(&id);
        self.forget_replay(id);
        self.timelines.lock().remove(&id);
        self.undecided.lock().remove(&id);
        if let Some(partition) = slot.as_ref().and_then(|slot| slot.get()) {
            partition.close_to_move();
            partition.end_move();
            partition.release_resources();
        }
    }

    /// Removes a permanently closed partition from the open ones. The next access reopens it.
    pub fn forget_open(&self, partition: &Arc<Partition>) {
        let mut partitions = self.open.lock();
        let is_it = |slot: &Slot| slot.get().is_some_and(|open| Arc::ptr_eq(open, partition));
        if partitions.get(&partition.id).is_some_and(is_it) {
            partitions.remove(&partition.id);
        }
        drop(partitions);
        partition.release_resources();
    }
}

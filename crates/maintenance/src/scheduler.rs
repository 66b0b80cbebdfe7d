//! Schedules compactions and garbage collections, which run in a task of their own, so that flushes
//! never wait for them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use fulmar_mvcc::Partition;
use fulmar_pages::PartitionId;
use parking_lot::Mutex;

use crate::background::Background;
use crate::compact::Work;
use crate::schedule::Schedule;
use crate::segment_refs::ReachabilityIndex;
use crate::throttle::CompactionThrottle;

/// Decides what the maintenance task does next, and holds its state.
pub struct Scheduler {
    pub(crate) task: Arc<Background>,
    collections: Mutex<Schedule>,
    /// One compaction or collection runs at a time.
    pub(crate) working: tokio::sync::Mutex<Working>,
    compactions: Mutex<Queue>,
    holds: Holds,
}

/// The partitions that are not compacted for now, with the reasons.
type Holds = Arc<Mutex<HashMap<PartitionId, Vec<CopyDirection>>>>;

/// Why a partition is not compacted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyDirection {
    /// Its segments are copied from another node, and merged by that.
    In,
    /// Its pages are copied to another node. Those that a merge moves would be copied again.
    Out,
}

/// A partition is not compacted until this is dropped.
pub(crate) struct CompactionHold {
    partition: PartitionId,
    copy: CopyDirection,
    all: Holds,
}

impl Drop for CompactionHold {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        let Some(copies) = all.get_mut(&self.partition) else { return };
        if let Some(own) = copies.iter().position(|copy| *copy == self.copy) {
            copies.swap_remove(own);
        }
        if copies.is_empty() {
            all.remove(&self.partition);
        }
    }
}

/// State kept between jobs.
#[derive(Default)]
pub(crate) struct Working {
    /// Throttle of compactions.
    pub(crate) throttle: CompactionThrottle,
    /// Index of manifests, kept between collections.
    pub(crate) reachability: ReachabilityIndex,
}

/// Partitions waiting for compaction, which keeps them open.
#[derive(Default)]
struct Queue {
    partitions: VecDeque<Arc<Partition>>,
    waiting: HashSet<PartitionId>,
}

/// A unit of work.
pub(crate) enum Job {
    Collect,
    Compact(Arc<Partition>),
}

impl Default for Scheduler {
    /// A scheduler without work.
    fn default() -> Self {
        Scheduler {
            task: Background::new(Arc::default()),
            collections: Mutex::default(),
            working: tokio::sync::Mutex::default(),
            compactions: Mutex::default(),
            holds: Holds::default(),
        }
    }
}

impl Scheduler {
    /// Called after a partition was flushed: it may have too many segments now.
    pub(crate) fn flushed(&self, partition: &Arc<Partition>) {
        if self.queue(partition) {
            self.task.wake();
        }
    }

    /// Called after a partition was opened: the node may have ended before its segments were
    /// merged. Does not wake the task, so that the opening session runs first.
    pub fn opened(&self, partition: &Arc<Partition>) {
        self.queue(partition);
    }

    /// Holds compactions of a partition back while it is copied.
    pub(crate) fn hold_compaction(&self, partition: PartitionId, copy: CopyDirection) -> CompactionHold {
        self.holds.lock().entry(partition).or_default().push(copy);
        CompactionHold { partition, copy, all: self.holds.clone() }
    }

    /// Returns true if a compaction of a partition may begin, or take effect. A copy to another node does
    /// not hold it back if there are too many segments.
    pub(crate) fn may_compact(&self, partition: PartitionId, work: &Work) -> bool {
        let all = self.holds.lock();
        let mut copies = all.get(&partition).into_iter().flatten();
        copies.all(|copy| *copy == CopyDirection::Out && work.crowded)
    }

    /// Queues a partition if it needs compaction. Returns true if it was not queued before.
    fn queue(&self, partition: &Arc<Partition>) -> bool {
        if Work::of(partition).is_none() {
            return false;
        }
        let mut queue = self.compactions.lock();
        let is_new = queue.waiting.insert(partition.id);
        if is_new {
            queue.partitions.push_back(partition.clone());
        }
        is_new
    }

    /// Removes a partition from the queue, until it is flushed or opened again.
    pub fn forget(&self, id: PartitionId) {
        let mut queue = self.compactions.lock();
        if queue.waiting.remove(&id) {
            queue.partitions.retain(|partition| partition.id != id);
        }
    }

    /// Returns the next job. A due collection goes first: under constant writes the queue of
    /// compactions may never be empty, and they add garbage. A collection cannot starve
    /// compactions, since it is due again only after more was written or ten minutes have passed.
    pub(crate) fn next_job(&self, now_ms: u64, disk_is_low: bool) -> Option<Job> {
        if self.collections.lock().take(now_ms, disk_is_low) {
            return Some(Job::Collect);
        }
        self.next().map(Job::Compact)
    }

    pub(crate) fn next(&self) -> Option<Arc<Partition>> {
        let mut queue = self.compactions.lock();
        let partition = queue.partitions.pop_front()?;
        queue.waiting.remove(&partition.id);
        Some(partition)
    }

    /// Counts bytes written to segments.
    pub(crate) fn count_written(&self, bytes: u64) {
        self.collections.lock().written_bytes += bytes;
    }

    /// Counts a dropped partition.
    pub(crate) fn count_dropped(&self) {
        self.collections.lock().dropped = true;
    }
}

#[cfg(test)]
mod tests {
    use fulmar_mvcc::SystemTime;
    use fulmar_store::Backend;

    use super::*;
    use crate::tests::start;

    #[tokio::test(flavor = "multi_thread")]
    async fn due_collection_runs_before_queued_compactions() {
        let (_directory, node) = start(Arc::new(Backend::memory()), Arc::new(SystemTime::default())).await;
        let partition = node.partitions.partition(PartitionId(7)).await.unwrap();
        let scheduler = Scheduler::default();
        let enqueue = || {
            let mut queue = scheduler.compactions.lock();
            queue.waiting.insert(partition.id);
            queue.partitions.push_back(partition.clone());
        };
        enqueue();
        assert!(matches!(scheduler.next_job(0, false), Some(Job::Compact(_))), "no collection is due yet");
        enqueue();
        scheduler.count_written(1 << 30);
        assert!(
            matches!(scheduler.next_job(0, false), Some(Job::Collect)),
            "a due collection must run first"
        );
        assert!(
            matches!(scheduler.next_job(0, false), Some(Job::Compact(_))),
            "the collection must be due only once"
        );
        assert!(scheduler.next_job(0, false).is_none());
    }
}

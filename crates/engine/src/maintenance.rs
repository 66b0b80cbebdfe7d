//! Background maintenance: compaction and garbage collection, in a task of its own, so that flushes
//! never wait for them.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use fulmar_pages::PartitionId;
use parking_lot::Mutex;

use crate::background::Background;
use crate::collect::Schedule;
use crate::marks::Marks;
use crate::pace::Pace;
use crate::partition::Partition;
use crate::{Engine, Result};

/// State of the maintenance task.
pub(crate) struct Maintenance {
    pub(crate) task: Arc<Background>,
    collections: Mutex<Schedule>,
    /// One compaction or collection runs at a time.
    working: tokio::sync::Mutex<Working>,
    compactions: Mutex<Queue>,
}

/// State kept between jobs.
#[derive(Default)]
struct Working {
    /// Throttle of compactions.
    pace: Pace,
    /// Index of manifests, kept between collections.
    marks: Marks,
}

/// Partitions waiting for compaction, which keeps them open.
#[derive(Default)]
struct Queue {
    partitions: VecDeque<Arc<Partition>>,
    waiting: HashSet<PartitionId>,
}

/// A unit of work.
enum Job {
    Collect,
    Compact(Arc<Partition>),
}

impl Maintenance {
    pub(crate) fn new() -> Self {
        Maintenance {
            task: Background::new(Arc::default()),
            collections: Mutex::default(),
            working: tokio::sync::Mutex::default(),
            compactions: Mutex::default(),
        }
    }

    /// Called after a partition was flushed: it may have too many segments now.
    pub(crate) fn flushed(&self, partition: &Arc<Partition>) {
        if self.queue(partition) {
            self.task.wake();
        }
    }

    /// Called after a partition was opened: the node may have ended before its segments were
    /// merged. Does not wake the task, so that the opening session runs first.
    pub(crate) fn opened(&self, partition: &Arc<Partition>) {
        self.queue(partition);
    }

    /// Queues a partition if it needs compaction. Returns true if it was not queued before.
    fn queue(&self, partition: &Arc<Partition>) -> bool {
        if partition.compaction().is_none() {
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
    pub(crate) fn forget(&self, id: PartitionId) {
        let mut queue = self.compactions.lock();
        if queue.waiting.remove(&id) {
            queue.partitions.retain(|partition| partition.id != id);
        }
    }

    /// Returns the next job. A due collection goes first: under constant writes the queue of
    /// compactions may never be empty, and they add garbage. A collection cannot starve
    /// compactions, since it is due again only after more was written or ten minutes have passed.
    fn next_job(&self, now_ms: u64, disk_is_low: bool) -> Option<Job> {
        if self.collections.lock().take(now_ms, disk_is_low) {
            return Some(Job::Collect);
        }
        self.next().map(Job::Compact)
    }

    fn next(&self) -> Option<Arc<Partition>> {
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

/// Runs due collections and queued compactions until there are none.
pub(crate) async fn round(engine: Arc<Engine>) {
    let (node, maintenance) = (engine.node(), &engine.maintenance);
    let mut working = maintenance.working.lock().await;
    while !maintenance.task.is_stopping() {
        match maintenance.next_job(node.clock.monotonic_ms(), node.disk.is_low()) {
            Some(Job::Collect) => {
                if let Err(error) = engine.delete_unneeded(&mut working.marks).await {
                    tracing::warn!(%error, detail = error.get_detail(), "garbage collection failed; will retry");
                }
            }
            Some(Job::Compact(partition)) => {
                if let Err(error) = engine.compact(&partition, &mut working.pace).await {
                    tracing::warn!(
                        %error,
                        partition = %partition.id,
                        "compaction failed; will retry after the next flush"
                    );
                }
            }
            None => return,
        }
    }
}

impl Engine {
    /// Runs all queued compactions. For tests and tools; the engine does so by itself.
    pub async fn compact_all(&self) -> Result<()> {
        let mut working = self.maintenance.working.lock().await;
        while let Some(partition) = self.maintenance.next() {
            self.compact(&partition, &mut working.pace).await?;
        }
        Ok(())
    }

    /// Runs a garbage collection. For tests and tools; the engine does so by itself.
    pub async fn collect(&self) -> Result<()> {
        let mut working = self.maintenance.working.lock().await;
        self.delete_unneeded(&mut working.marks).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[tokio::test(flavor = "multi_thread")]
    async fn due_collection_runs_before_queued_compactions() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
        let partition = engine.partition(PartitionId(7)).await.unwrap();
        let maintenance = Maintenance::new();
        let enqueue = || {
            let mut queue = maintenance.compactions.lock();
            queue.waiting.insert(partition.id);
            queue.partitions.push_back(partition.clone());
        };
        enqueue();
        assert!(matches!(maintenance.next_job(0, false), Some(Job::Compact(_))), "no collection is due yet");
        enqueue();
        maintenance.count_written(1 << 30);
        assert!(
            matches!(maintenance.next_job(0, false), Some(Job::Collect)),
            "a due collection must run first"
        );
        assert!(
            matches!(maintenance.next_job(0, false), Some(Job::Compact(_))),
            "the collection must be due only once"
        );
        assert!(maintenance.next_job(0, false).is_none());
    }
}

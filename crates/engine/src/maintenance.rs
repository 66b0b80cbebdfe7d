//! What tidies up behind the flushes: compaction and collection, in a task of its own, so that no flush waits for them.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_pages::PartitionId;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::collect::Schedule;
use crate::partition::Partition;
use crate::{Engine, Result};

/// How often it looks around.
const PERIOD: Duration = Duration::from_millis(500);

/// What is to be done.
#[derive(Default)]
pub(crate) struct Maintenance {
    stopping: AtomicBool,
    wake: Arc<Notify>,
    stopped: Notify,
    collections: Mutex<Schedule>,
    /// One compaction or collection at a time.
    pub(crate) working: tokio::sync::Mutex<()>,
    compactions: Mutex<Queue>,
}

/// Partitions to be compacted. They stay open meanwhile.
#[derive(Default)]
struct Queue {
    partitions: VecDeque<Arc<Partition>>,
    waiting: HashSet<PartitionId>,
}

impl Maintenance {
    /// A partition has been flushed: it may have too many segments now.
    pub(crate) fn flushed(&self, partition: &Arc<Partition>) {
        if self.queue(partition) {
            self.wake.notify_one();
        }
    }

    /// A partition has been opened: the node may have ended before its segments were merged. Who has opened it goes first.
    pub(crate) fn opened(&self, partition: &Arc<Partition>) {
        self.queue(partition);
    }

    /// Answers whether there is something to do that was not known.
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

    /// Lets go of a partition that waits to be compacted, until it is flushed or opened again.
    pub(crate) fn forget(&self, id: PartitionId) {
        let mut queue = self.compactions.lock();
        if queue.waiting.remove(&id) {
            queue.partitions.retain(|partition| partition.id != id);
        }
    }

    fn next(&self) -> Option<Arc<Partition>> {
        let mut queue = self.compactions.lock();
        let partition = queue.partitions.pop_front()?;
        queue.waiting.remove(&partition.id);
        Some(partition)
    }

    /// So many bytes of a segment were written.
    pub(crate) fn count_written(&self, bytes: u64) {
        self.collections.lock().written_bytes += bytes;
    }

    /// A partition was dropped.
    pub(crate) fn count_dropped(&self) {
        self.collections.lock().dropped = true;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Ends the task; waits for it.
    pub(crate) async fn stop(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            self.wake.notify_one();
            self.stopped.notified().await;
        }
    }
}

/// Starts the task. It ends when the engine is stopped or gone.
pub(crate) fn spawn(engine: &Arc<Engine>) {
    let weak = Arc::downgrade(engine);
    tokio::spawn(async move {
        loop {
            let Some(engine) = weak.upgrade() else { return };
            if engine.maintenance.is_stopping() {
                engine.maintenance.stopped.notify_one();
                return;
            }
            round(&engine).await;
            let wake = engine.maintenance.wake.clone();
            // The flusher holds it too, nearly all the time: it could never go.
            drop(engine);
            let _woken = tokio::time::timeout(PERIOD, wake.notified()).await;
        }
    });
}

async fn round(engine: &Engine) {
    let (node, maintenance) = (engine.node(), &engine.maintenance);
    let _one = maintenance.working.lock().await;
    while let Some(partition) = maintenance.next().filter(|_| !maintenance.is_stopping()) {
        if let Err(error) = engine.compact(&partition).await {
            tracing::warn!(%error, partition = %partition.id, "a compaction failed; it is tried again after the next flush");
        }
    }
    let due = maintenance.collections.lock().take(node.clock.monotonic_ms(), node.disk.is_low());
    if due && let Err(error) = engine.delete_unneeded().await {
        tracing::warn!(%error, "a collection failed; it is tried again");
    }
}

impl Engine {
    /// Merges what flushes have left to merge. For tests and tools; the engine does it by itself.
    pub async fn compact_all(&self) -> Result<()> {
        let _one = self.maintenance.working.lock().await;
        while let Some(partition) = self.maintenance.next() {
            self.compact(&partition).await?;
        }
        Ok(())
    }

    /// Deletes what nobody needs any more. For tests and tools; the engine does it by itself.
    pub async fn collect(&self) -> Result<()> {
        let _one = self.maintenance.working.lock().await;
        self.delete_unneeded().await
    }
}

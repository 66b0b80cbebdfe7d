//! Starts and stops the background tasks, and runs the scheduled work.

use std::sync::Arc;

use fulmar_pages::PartitionId;
use fulmar_sqlite::Result;

use crate::flush;
use crate::maintenance::Maintenance;
use crate::scheduler::Job;

/// Runs due collections and queued compactions until there are none.
async fn round(maintenance: Arc<Maintenance>) {
    let (node, scheduler) = (maintenance.node(), &maintenance.scheduler);
    let mut working = scheduler.working.lock().await;
    while !scheduler.task.is_stopping() {
        match scheduler.next_job(node.clock.monotonic_ms(), node.disk.is_low()) {
            Some(Job::Collect) => {
                if let Err(error) = maintenance.delete_unneeded(&mut working.reachability).await {
                    tracing::warn!(%error, detail = error.get_detail(), "garbage collection failed; will retry");
                }
            }
            Some(Job::Compact(partition)) => {
                if let Err(error) = maintenance.compact(&partition, &mut working.throttle).await {
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

impl Maintenance {
    /// Runs all queued compactions. For tests and tools; the background task does so by itself.
    pub async fn compact_all(&self) -> Result<()> {
        let mut working = self.scheduler.working.lock().await;
        while let Some(partition) = self.scheduler.next() {
            self.compact(&partition, &mut working.throttle).await?;
        }
        Ok(())
    }

    /// Runs a garbage collection. For tests and tools; the background task does so by itself.
    pub async fn collect(&self) -> Result<()> {
        let mut working = self.scheduler.working.lock().await;
        self.delete_unneeded(&mut working.reachability).await
    }

    /// Starts the background tasks of an owner.
    pub fn spawn(self: &Arc<Self>) {
        self.flusher.task.spawn(self, flush::round);
        self.scheduler.task.spawn(self, round);
    }

    /// Stops the background tasks, and waits for them.
    pub async fn stop(&self) {
        self.hot.stop_prewarming();
        if !self.node().is_replica {
            self.scheduler.task.stop().await;
        }
        self.flusher.task.stop().await;
    }

    /// Flushes all changed partitions.
    pub async fn flush_all(&self) -> Result<()> {
        flush::flush_all(self).await
    }

    /// Flushes some partitions. Returns the first error of any partition.
    pub async fn flush(&self, partitions: Vec<Arc<fulmar_mvcc::Partition>>) -> Result<()> {
        flush::flush(self, partitions).await
    }

    /// Flushes partitions, and stores a manifest of each whose newest one has a number below the
    /// given one, even if nothing has changed. Returns the first error of any partition.
    pub async fn store_manifests(&self, partitions: Vec<(Arc<fulmar_mvcc::Partition>, u64)>) -> Result<()> {
        let _one = self.flusher.lock_flushes().await;
        let all = partitions.iter().map(|(partition, _)| partition.clone()).collect();
        let flushed = flush::flush_settled(self, all).await;
        flushed.and(flush::write_missing_manifests(self, partitions).await)
    }

    /// Flushes partitions that move to another node. Each that is flushed then has its newest
    /// manifest in the store, and no other follows. The others stay as they are.
    pub async fn flush_to_move(&self, partitions: &[Arc<fulmar_mvcc::Partition>]) -> Result<()> {
        let _one = self.flusher.lock_flushes().await;
        let flushed = flush::flush_settled(self, partitions.to_vec()).await;
        for partition in partitions.iter().filter(|partition| partition.is_settled()) {
            partition.end_move();
        }
        flushed
    }

    /// Stores a list of the hot pages of a partition that another node will open.
    pub fn store_hot_pages_of(&self, partition: &fulmar_mvcc::Partition) {
        self.hot.store_on_close(partition);
    }

    /// Reads pages of a partition that is about to be moved to this node ([`crate::HotLists::warm`]).
    pub async fn warm(
        &self,
        partition: &fulmar_mvcc::Partition,
        pages: &[fulmar_pages::PageNo],
    ) -> Result<u64> {
        self.hot.warm(partition, pages).await
    }

    /// Stores lists of hot pages of the open partitions when the node stops.
    pub async fn store_hot_pages(&self) {
        self.hot.store_all(self.partitions.open_partitions()).await;
    }

    /// Drops a partition: its sessions get 57P04, its manifests are deleted, and its segments are
    /// collected later unless other partitions reference them. Idempotent; does nothing for a
    /// partition that never existed.
    pub async fn drop_partition(&self, id: PartitionId) -> Result<()> {
        self.node().check_owner()?;
        self.partitions.drop_partition(id);
        self.historical_versions.drop_partition(id);
        flush::delete(self, id).await
    }
}

//! The maintenance of a node's partitions: its state, and its background tasks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{Node, Partitions, Replay, SnapshotBounds};
use fulmar_pages::PartitionId;
use fulmar_sqlite::Result;
use fulmar_store::CommitLog;
use parking_lot::Mutex;

use crate::background::Background;
use crate::flush;
use crate::flusher::Flusher;
use crate::hot::HotLists;
use crate::pins::Pins;
use crate::restore_points::RetentionSource;
use crate::scheduler::Scheduler;
use crate::time_travel::Past;

/// The parts of [`Maintenance`] that partitions are opened with.
#[derive(Clone)]
pub struct Parts {
    /// Schedules compactions.
    pub scheduler: Arc<Scheduler>,
    /// Stores and prewarms hot pages.
    pub hot: Arc<HotLists>,
    /// On a replica: the manifests that are pinned while they are read.
    pub pins: Option<Arc<Pins>>,
}

/// Intervals and bounds.
pub struct Settings {
    /// Maximum time that a partition is dirty without a new manifest.
    pub manifest_interval: Duration,
    /// Time after which an unused partition is closed.
    pub idle_after: Duration,
    /// Bounds of snapshots.
    pub snapshots: SnapshotBounds,
    /// Retention period of the history.
    pub retention: RetentionSource,
}

/// The maintenance of a node's partitions.
pub struct Maintenance {
    pub(crate) partitions: Arc<Partitions>,
    pub(crate) flusher: Flusher,
    pub(crate) scheduler: Arc<Scheduler>,
    pub(crate) hot: Arc<HotLists>,
    pub(crate) pins: Option<Arc<Pins>>,
    /// The open historical versions.
    pub(crate) historical_versions: Past,
    pub(crate) retention: RetentionSource,
    /// Ids whose creation failed since the start because another process has created a partition
    /// with the same id.
    pub(crate) foreign: Mutex<HashSet<PartitionId>>,
}

impl Maintenance {
    /// Creates the maintenance of a node's partitions. No task runs yet.
    pub fn new(partitions: Arc<Partitions>, parts: Parts, settings: Settings) -> Self {
        let memory = &partitions.node().memory;
        let flusher = Flusher::new(
            settings.manifest_interval,
            settings.idle_after,
            settings.snapshots,
            memory.limit_bytes(),
            memory.flush_due(),
        );
        Maintenance {
            partitions,
            flusher,
            scheduler: parts.scheduler,
            hot: parts.hot,
            pins: parts.pins,
            historical_versions: Past::default(),
            retention: settings.retention,
            foreign: Mutex::default(),
        }
    }

    /// The node.
    pub fn node(&self) -> &Arc<Node> {
        self.partitions.node()
    }

    /// The open historical versions.
    pub fn historical_versions(&self) -> &Past {
        &self.historical_versions
    }

    /// The task that flushes; on a replica, the task that keeps partitions bounded.
    pub fn flush_task(&self) -> &Arc<Background> {
        &self.flusher.task
    }

    /// Number of flushes.
    pub fn flushes(&self) -> u64 {
        self.flusher.flushes()
    }

    /// Time after which an unused partition is closed.
    pub fn idle_after_ms(&self) -> u64 {
        self.flusher.idle_after_ms()
    }

    /// Bounds of snapshots.
    pub fn snapshot_bounds(&self) -> &SnapshotBounds {
        &self.flusher.snapshots
    }

    /// Appends the unapplied records of a partition, which are in other logs, to this one. Returns
    /// once the copies are durable.
    pub async fn copy_to_log(&self, log: &CommitLog, replay: &Replay) -> Result<()> {
        flush::copy_to(self, log, replay).await
    }

    /// Removes a partition from the queue of compactions, until it is flushed or opened again.
    pub fn forget_compaction(&self, id: PartitionId) {
        self.scheduler.forget(id);
    }

    /// Registers a log's callbacks: discarded records discard the versions of its partitions, and a
    /// long backlog wakes the flusher.
    pub fn register_callbacks(self: &Arc<Self>, log: &Arc<CommitLog>) {
        let flusher = self.flusher.task.clone();
        log.on_flush_due(Box::new(move || flusher.wake()));
        let (maintenance, of) = (Arc::downgrade(self), Arc::downgrade(log));
        log.on_discard(Box::new(move |durable, _appended| {
            let Some(maintenance) = maintenance.upgrade() else { return };
            for partition in maintenance.partitions.open_partitions() {
                if std::ptr::eq(Arc::as_ptr(&partition.log), of.as_ptr()) {
                    partition.discard(durable);
                }
            }
        }));
    }
}

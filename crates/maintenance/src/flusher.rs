//! Configuration and state of flushing ([`crate::flush`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_mvcc::SnapshotBounds;
use tokio::sync::{MutexGuard, Notify};

use crate::background::Background;

/// Upper bound of the log size, or a quarter of the memory budget if that is less, since a start
/// holds the whole log in memory. Beyond it the partitions with the oldest records are flushed
/// immediately. The larger the log, the less often a frequently changed page is flushed.
const MAX_LOG_BYTES: u64 = 384 << 20;
/// Lower bound of the log size, for small memory budgets.
const MIN_LOG_BYTES: u64 = 32 << 20;

/// Configuration and state of flushing.
pub(crate) struct Flusher {
    pub(crate) manifest_interval: Duration,
    idle_after: Duration,
    pub(crate) snapshots: SnapshotBounds,
    /// Log size beyond which the partitions with the oldest records are flushed.
    pub(crate) log_bytes: u64,
    pub(crate) task: Arc<Background>,
    flushes: AtomicU64,
    /// Flushes are exclusive.
    flushing: tokio::sync::Mutex<()>,
}

impl Flusher {
    /// Creates a flusher for a node with a memory budget of `memory_bytes`. `due` wakes it.
    pub(crate) fn new(
        manifest_interval: Duration,
        idle_after: Duration,
        snapshots: SnapshotBounds,
        memory_bytes: u64,
        due: Arc<Notify>,
    ) -> Self {
        Flusher {
            manifest_interval,
            idle_after,
            snapshots,
            log_bytes: (memory_bytes / 4).clamp(MIN_LOG_BYTES, MAX_LOG_BYTES),
            task: Background::new(due),
            flushes: AtomicU64::new(0),
            flushing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn idle_after_ms(&self) -> u64 {
        self.idle_after.as_millis() as u64
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// While the guard is held, no manifest is replaced by a newer one.
    pub(crate) async fn lock_flushes(&self) -> MutexGuard<'_, ()> {
        self.flushing.lock().await
    }

    pub(crate) fn count(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }
}

//! What the log counts, for the metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counters of one log, since it was opened. Each is read by itself, so two of them may be a batch apart.
#[derive(Debug, Default)]
pub struct LogStatistics {
    /// Syncs that succeeded.
    pub syncs: AtomicU64,
    /// Batches written, each with one write and one sync in the usual case.
    pub batches: AtomicU64,
    /// Records made durable.
    pub records: AtomicU64,
    /// Bytes made durable, heads of frames included.
    pub bytes: AtomicU64,
    /// Records in the last batch.
    pub last_batch_records: AtomicU64,
    /// Records in the largest batch.
    pub largest_batch_records: AtomicU64,
    /// The smoothed time that a sync takes, in nanoseconds.
    pub sync_nanos: AtomicU64,
    /// Times that a write or sync failed and a new log was begun.
    pub failures: AtomicU64,
    /// Records refused for want of space.
    pub refused_full: AtomicU64,
    /// Records refused because too much was pending.
    pub refused_busy: AtomicU64,
}

impl LogStatistics {
    pub(super) fn batch(&self, records: u64, bytes: u64) {
        self.batches.fetch_add(1, Relaxed);
        self.records.fetch_add(records, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
        self.last_batch_records.store(records, Relaxed);
        self.largest_batch_records.fetch_max(records, Relaxed);
    }

    /// Only the log's writer calls this, so load and store need not be one step.
    pub(super) fn sync(&self, took: Duration) {
        self.syncs.fetch_add(1, Relaxed);
        let took = took.as_nanos() as u64;
        let smoothed = match self.sync_nanos.load(Relaxed) {
            0 => took,
            before => before - before / 8 + took / 8,
        };
        self.sync_nanos.store(smoothed, Relaxed);
    }

    pub(super) fn smoothed_sync(&self) -> Duration {
        Duration::from_nanos(self.sync_nanos.load(Relaxed))
    }
}

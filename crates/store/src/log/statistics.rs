//! Log counters for metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::durations::{DurationCounts, Durations};

/// Counters of one log since it was opened. Each is read separately, so two of them may differ by
/// one batch.
#[derive(Debug, Default)]
pub struct LogStatistics {
    /// Syncs that succeeded.
    pub syncs: AtomicU64,
    /// Batches written, normally with one write and one sync each.
    pub batches: AtomicU64,
    /// Records made durable.
    pub records: AtomicU64,
    /// Bytes made durable, frame heads included.
    pub bytes: AtomicU64,
    /// Records in the last batch.
    pub last_batch_records: AtomicU64,
    /// Records in the largest batch.
    pub largest_batch_records: AtomicU64,
    /// Smoothed duration of a sync, in nanoseconds.
    pub sync_nanos: AtomicU64,
    /// Durations of the syncs.
    sync_durations: Durations,
    /// Number of failed writes or syncs after which a new log was started.
    pub failures: AtomicU64,
    /// Records rejected for lack of space.
    pub refused_full: AtomicU64,
    /// Records rejected because too many bytes were pending.
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

    /// Called only by the log's writer, so the load and the store need not be one atomic step.
    pub(super) fn sync(&self, took: Duration) {
        self.syncs.fetch_add(1, Relaxed);
        self.sync_durations.record(took);
        let took = took.as_nanos() as u64;
        let smoothed = match self.sync_nanos.load(Relaxed) {
            0 => took,
            before => before - before / 8 + took / 8,
        };
        self.sync_nanos.store(smoothed, Relaxed);
    }

    /// Durations of the syncs; of a log in a store, of the puts.
    pub fn sync_durations(&self) -> DurationCounts {
        self.sync_durations.counts()
    }

    pub(super) fn smoothed_sync(&self) -> Duration {
        Duration::from_nanos(self.sync_nanos.load(Relaxed))
    }
}

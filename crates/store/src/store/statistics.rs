//! Counters of store operations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Failure, FailureKind};
use crate::durations::{DurationCounts, Durations};

/// A kind of store operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StoreOperation {
    /// Creating an object with a single put.
    Put,
    /// A step of an upload in parts.
    Upload,
    /// Reading an object or a part of it.
    Get,
    /// Listing names.
    List,
    /// Deleting an object.
    Delete,
}

impl StoreOperation {
    const ALL: [StoreOperation; 5] = [
        StoreOperation::Put,
        StoreOperation::Upload,
        StoreOperation::Get,
        StoreOperation::List,
        StoreOperation::Delete,
    ];

    /// Label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            StoreOperation::Put => "put",
            StoreOperation::Upload => "upload",
            StoreOperation::Get => "get",
            StoreOperation::List => "list",
            StoreOperation::Delete => "delete",
        }
    }
}

/// Counters of an operation since the start. An operation consists of one attempt, and of further
/// ones after failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationStatistics {
    /// The operation.
    pub operation: StoreOperation,
    /// Attempts.
    pub attempts: u64,
    /// Attempts after a failure.
    pub retries: u64,
    /// Bytes of objects written or read.
    pub bytes: u64,
    /// Failed attempts, in the order of [`FailureKind::ALL`].
    pub failures: [u64; FailureKind::ALL.len()],
    /// Durations of the attempts.
    pub durations: DurationCounts,
}

#[derive(Default, Debug)]
struct Counters {
    attempts: AtomicU64,
    retries: AtomicU64,
    bytes: AtomicU64,
    failures: [AtomicU64; FailureKind::ALL.len()],
    durations: Durations,
}

/// Counters of a store.
#[derive(Default, Debug)]
pub(super) struct Statistics([Counters; StoreOperation::ALL.len()]);

impl Statistics {
    pub(super) fn record_attempt(
        &self,
        operation: StoreOperation,
        duration: Duration,
        failure: Option<&Failure>,
    ) {
        let counters = &self.0[operation as usize];
        let add = |counter: &AtomicU64, amount| counter.fetch_add(amount, Ordering::Relaxed);
        add(&counters.attempts, 1);
        counters.durations.record(duration);
        if let Some(failure) = failure {
            add(&counters.failures[failure.kind().index()], 1);
        }
    }

    pub(super) fn record_retry(&self, operation: StoreOperation) {
        self.0[operation as usize].retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn record_bytes(&self, operation: StoreOperation, bytes: usize) {
        self.0[operation as usize].bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> Vec<OperationStatistics> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let operation = |(operation, counters): (StoreOperation, &Counters)| OperationStatistics {
            operation,
            attempts: load(&counters.attempts),
            retries: load(&counters.retries),
            bytes: load(&counters.bytes),
            failures: std::array::from_fn(|kind| load(&counters.failures[kind])),
            durations: counters.durations.counts(),
        };
        StoreOperation::ALL.into_iter().zip(&self.0).map(operation).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_own_counters() {
        let statistics = Statistics::default();
        let failure = Failure::new(FailureKind::TimedOut, "late");
        statistics.record_attempt(StoreOperation::Get, Duration::from_micros(100), Some(&failure));
        statistics.record_retry(StoreOperation::Get);
        statistics.record_attempt(StoreOperation::Get, Duration::from_micros(100), None);
        statistics.record_bytes(StoreOperation::Get, 7);
        let snapshot = statistics.snapshot();
        assert!(snapshot.iter().enumerate().all(|(at, one)| one.operation as usize == at));
        let get = snapshot[StoreOperation::Get as usize];
        assert_eq!((get.attempts, get.retries, get.bytes, get.durations.total_us), (2, 1, 7, 200));
        assert_eq!(get.failures, [0, 0, 0, 0, 1, 0]);
        assert_eq!(snapshot[StoreOperation::Put as usize].attempts, 0);
    }
}

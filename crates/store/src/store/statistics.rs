//! What is counted of a store, by operation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Failure, FailureKind};

/// Buckets for the times of tries: up to 64 us, then doubled; the last one has no bound.
pub const TIME_BUCKETS: usize = 22;
const FIRST_BUCKET_US: u64 = 64;

/// An operation of a store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StoreOperation {
    /// An object is made in one piece.
    Put,
    /// A step of an object that comes in parts.
    Upload,
    /// An object, or some of it, is read.
    Get,
    /// Names are listed.
    List,
    /// An object is deleted.
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

    /// As metrics call it.
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

/// What has been counted of an operation since the start. A try is what a store is asked once: an operation is one try or,
/// after failures, several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationStatistics {
    /// Which one.
    pub operation: StoreOperation,
    /// Tries.
    pub tries: u64,
    /// Tries after a failure.
    pub retries: u64,
    /// Bytes of objects that were written or read.
    pub bytes: u64,
    /// Tries that failed, by [`FailureKind::ALL`].
    pub failures: [u64; FailureKind::ALL.len()],
    /// How long all tries have taken, microseconds.
    pub time_us: u64,
    /// How many took how long: see [`time_bucket_us`].
    pub times: [u64; TIME_BUCKETS],
}

/// The upper bound of a bucket of times, microseconds; `None` for the last.
pub fn time_bucket_us(bucket: usize) -> Option<u64> {
    (bucket + 1 < TIME_BUCKETS).then(|| FIRST_BUCKET_US << bucket)
}

#[derive(Default, Debug)]
struct Counters {
    tries: AtomicU64,
    retries: AtomicU64,
    bytes: AtomicU64,
    failures: [AtomicU64; FailureKind::ALL.len()],
    time_us: AtomicU64,
    times: [AtomicU64; TIME_BUCKETS],
}

/// The counters of a store.
#[derive(Default, Debug)]
pub(super) struct Statistics([Counters; StoreOperation::ALL.len()]);

impl Statistics {
    pub(super) fn tried(&self, operation: StoreOperation, took: Duration, failure: Option<&Failure>) {
        let counters = &self.0[operation as usize];
        let add = |counter: &AtomicU64, amount| counter.fetch_add(amount, Ordering::Relaxed);
        let took_us = took.as_micros() as u64;
        add(&counters.tries, 1);
        add(&counters.time_us, took_us);
        add(&counters.times[bucket(took_us)], 1);
        if let Some(failure) = failure {
            add(&counters.failures[failure.kind().index()], 1);
        }
    }

    pub(super) fn retried(&self, operation: StoreOperation) {
        self.0[operation as usize].retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn moved(&self, operation: StoreOperation, bytes: usize) {
        self.0[operation as usize].bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> Vec<OperationStatistics> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let operation = |(operation, counters): (StoreOperation, &Counters)| OperationStatistics {
            operation,
            tries: load(&counters.tries),
            retries: load(&counters.retries),
            bytes: load(&counters.bytes),
            failures: std::array::from_fn(|kind| load(&counters.failures[kind])),
            time_us: load(&counters.time_us),
            times: std::array::from_fn(|bucket| load(&counters.times[bucket])),
        };
        StoreOperation::ALL.into_iter().zip(&self.0).map(operation).collect()
    }
}

fn bucket(time_us: u64) -> usize {
    let units = time_us.div_ceil(FIRST_BUCKET_US).max(1);
    ((units - 1).checked_ilog2().map_or(0, |log| log + 1) as usize).min(TIME_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_the_bucket_whose_bound_they_do_not_exceed() {
        for time_us in [0, 1, 64, 65, 128, 129, 5_000_000, u64::MAX] {
            let found = bucket(time_us);
            assert!(time_bucket_us(found).is_none_or(|bound| time_us <= bound), "{time_us}");
            assert!(found == 0 || time_bucket_us(found - 1).unwrap() < time_us, "{time_us}");
        }
    }

    #[test]
    fn each_operation_has_its_own_counters() {
        let statistics = Statistics::default();
        let failure = Failure::new(FailureKind::TimedOut, "late");
        statistics.tried(StoreOperation::Get, Duration::from_micros(100), Some(&failure));
        statistics.retried(StoreOperation::Get);
        statistics.tried(StoreOperation::Get, Duration::from_micros(100), None);
        statistics.moved(StoreOperation::Get, 7);
        let now = statistics.now();
        assert!(now.iter().enumerate().all(|(at, one)| one.operation as usize == at));
        let get = now[StoreOperation::Get as usize];
        assert_eq!((get.tries, get.retries, get.bytes, get.time_us, get.times[1]), (2, 1, 7, 200, 2));
        assert_eq!(get.failures, [0, 0, 0, 0, 1, 0]);
        assert_eq!(now[StoreOperation::Put as usize].tries, 0);
    }
}

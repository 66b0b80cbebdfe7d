//! Counts of durations in buckets, for histograms in metrics.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of buckets. The first contains durations of up to 64 us, the limit doubles from bucket to
/// bucket, and the last one has no limit.
pub const DURATION_BUCKETS: usize = 22;
const FIRST_BUCKET_US: u64 = 64;

/// Counts durations. Each counter is read separately, so two of them may differ by one duration.
#[derive(Debug, Default)]
pub(crate) struct Durations {
    total_us: AtomicU64,
    buckets: [AtomicU64; DURATION_BUCKETS],
}

/// The counts at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationCounts {
    /// The sum of all durations, in microseconds.
    pub total_us: u64,
    /// Number of durations per bucket; see [`duration_bucket_us`].
    pub buckets: [u64; DURATION_BUCKETS],
}

/// Upper limit of a bucket in microseconds; None for the last one.
pub fn duration_bucket_us(bucket: usize) -> Option<u64> {
    (bucket + 1 < DURATION_BUCKETS).then(|| FIRST_BUCKET_US << bucket)
}

impl Durations {
    pub(crate) fn record(&self, duration: Duration) {
        let duration_us = duration.as_micros() as u64;
        self.total_us.fetch_add(duration_us, Relaxed);
        self.buckets[bucket(duration_us)].fetch_add(1, Relaxed);
    }

    pub(crate) fn counts(&self) -> DurationCounts {
        DurationCounts {
            total_us: self.total_us.load(Relaxed),
            buckets: std::array::from_fn(|bucket| self.buckets[bucket].load(Relaxed)),
        }
    }
}

fn bucket(duration_us: u64) -> usize {
    let units = duration_us.div_ceil(FIRST_BUCKET_US).max(1);
    ((units - 1).checked_ilog2().map_or(0, |log| log + 1) as usize).min(DURATION_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_in_the_smallest_bucket_that_contains_them() {
        for duration_us in [0, 1, 64, 65, 128, 129, 5_000_000, u64::MAX] {
            let found = bucket(duration_us);
            assert!(duration_bucket_us(found).is_none_or(|bound| duration_us <= bound), "{duration_us}");
            assert!(found == 0 || duration_bucket_us(found - 1).unwrap() < duration_us, "{duration_us}");
        }
    }

    #[test]
    fn durations_are_summed() {
        let durations = Durations::default();
        durations.record(Duration::from_micros(100));
        durations.record(Duration::from_micros(100));
        let counts = durations.counts();
        assert_eq!((counts.total_us, counts.buckets[1]), (200, 2));
        assert_eq!(counts.buckets.iter().sum::<u64>(), 2);
    }
}

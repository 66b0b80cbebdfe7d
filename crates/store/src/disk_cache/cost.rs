//! Estimates the cost of reading a page again, depending on its location. The page cache uses it
//! for eviction.
//!
//! A page in the disk cache costs 1. Any other page costs the ratio of the recent read latencies of
//! the store and of the disk cache, up to [`MAX_READ_COST`]. Without that limit, a page that is
//! only in the store would stay in memory for a very long time without being used.
//!
//! Each latency is an exponentially weighted mean of successful reads of a single page; for larger
//! reads the time depends mostly on the number of pages. Concurrent updates may lose a sample,
//! which hardly changes the mean. A sample counts as at most 1 s, so that a store that did not
//! respond for a minute does not raise the cost of its pages for an hour.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::{FrameLocation, SegmentId};

use super::{DiskCache, Key};

/// Maximum cost of a page.
pub const MAX_READ_COST: u64 = 8;

/// Latencies that are assumed before anything has been read.
const INITIAL_CACHE_LATENCY: Duration = Duration::from_micros(100);
const INITIAL_STORE_LATENCY: Duration = Duration::from_millis(20);
/// Minimum and maximum of a sample.
const MIN_SAMPLE: Duration = Duration::from_micros(1);
const MAX_SAMPLE: Duration = Duration::from_secs(1);
/// The weight of a sample is 1 divided by this.
const SMOOTHING_DIVISOR: u64 = 8;

/// A smoothed latency, in nanoseconds.
struct MeanLatency(AtomicU64);

impl MeanLatency {
    fn new(initial: Duration) -> Self {
        MeanLatency(AtomicU64::new(initial.as_nanos() as u64))
    }

    fn add(&self, latency: Duration) {
        let latency_ns = latency.clamp(MIN_SAMPLE, MAX_SAMPLE).as_nanos() as u64;
        let mean_ns = self.0.load(Ordering::Relaxed);
        // Never zero, because every sample is at least the minimum.
        self.0.store(
            (mean_ns * (SMOOTHING_DIVISOR - 1) + latency_ns).div_ceil(SMOOTHING_DIVISOR),
            Ordering::Relaxed,
        );
    }
}

/// Latencies of single-page reads.
pub(super) struct Costs {
    cache: MeanLatency,
    store: MeanLatency,
}

impl Costs {
    pub(super) fn new() -> Self {
        Costs {
            cache: MeanLatency::new(INITIAL_CACHE_LATENCY),
            store: MeanLatency::new(INITIAL_STORE_LATENCY),
        }
    }

    pub(super) fn read_from_cache(&self, latency: Duration) {
        self.cache.add(latency);
    }

    /// The ratio of the store's latency to the disk cache's.
    fn store_cost(&self) -> u64 {
        let [cache_ns, store_ns] = [&self.cache, &self.store].map(|mean| mean.0.load(Ordering::Relaxed));
        (store_ns / cache_ns.max(1)).clamp(1, MAX_READ_COST)
    }
}

impl DiskCache {
    /// Records the latency of reading a page from the store.
    pub(crate) fn read_from_store(&self, latency: Duration) {
        self.shared.costs.store.add(latency);
    }

    /// Returns the cost of reading the page at this location of a segment: 1 to [`MAX_READ_COST`].
    /// Only looks up the index, and does not count as a use of the entry.
    pub fn cost(&self, id: SegmentId, location: FrameLocation) -> u64 {
        match self.shared.index.contains(Key::frame(id, location.offset).hash()) {
            true => 1,
            false => self.shared.costs.store_cost(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    #[test]
    fn cost_follows_the_ratio_of_latencies_within_its_limits() {
        let costs = Costs::new();
        assert_eq!(costs.store_cost(), MAX_READ_COST);
        let add = |cache: Duration, store: Duration| {
            (0..100).for_each(|_| costs.cache.add(cache));
            (0..100).for_each(|_| costs.store.add(store));
            costs.store_cost()
        };
        assert_eq!(add(100 * MICROSECOND, 450 * MICROSECOND), 4);
        assert_eq!(add(200 * MICROSECOND, 450 * MICROSECOND), 2);
        assert_eq!(
            add(10_000 * MICROSECOND, 450 * MICROSECOND),
            1,
            "a store that is faster than the cache must cost 1"
        );
        assert_eq!(add(Duration::ZERO, Duration::MAX), MAX_READ_COST);
        assert_eq!(add(Duration::MAX, Duration::ZERO), 1);
    }

    #[test]
    fn a_single_slow_read_is_forgotten() {
        let costs = Costs::new();
        let (short, long) = (200 * MICROSECOND, Duration::from_secs(60));
        (0..100).for_each(|_| costs.store.add(short));
        assert_eq!(costs.store_cost(), 2);
        costs.store.add(long);
        assert_eq!(costs.store_cost(), MAX_READ_COST);
        (0..100).for_each(|_| costs.store.add(short));
        assert_eq!(costs.store_cost(), 2);
    }
}

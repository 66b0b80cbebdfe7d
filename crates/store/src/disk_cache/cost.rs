//! What it costs to read a page back, by where it lies: the figure by which who keeps pages in memory tells them apart.
//!
//! A page that the cache has costs one. Any other costs as many times that as a read of one page from the store has taken
//! longer lately than one from the cache, up to [`MOST_COST`]: beyond that a page that only the store has would stay in memory
//! however long nobody wants it.
//!
//! Each of the two times is an exponentially weighted mean, of reads of one page that succeeded: what is read with others says
//! more of their number. Two that end at once may lose one of their times, which a mean does not notice. One read counts as a
//! second at most, so that a store which did not answer for a minute is no reason to hold on to its pages for an hour.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::{FrameLocation, SegmentId};

use super::{DiskCache, Key};

/// The most that a page costs.
pub const MOST_COST: u64 = 8;

/// What is believed before anything has been read.
const USUAL_CACHE: Duration = Duration::from_micros(100);
const USUAL_STORE: Duration = Duration::from_millis(20);
/// What a read counts as, at least and at most.
const SHORTEST: Duration = Duration::from_micros(1);
const LONGEST: Duration = Duration::from_secs(1);
/// Of the mean the part that is the latest read's.
const LATEST_PART: u64 = 8;

/// A smoothed time, in nanoseconds.
struct MeanTime(AtomicU64);

impl MeanTime {
    fn new(usual: Duration) -> Self {
        MeanTime(AtomicU64::new(usual.as_nanos() as u64))
    }

    fn add(&self, took: Duration) {
        let took_ns = took.clamp(SHORTEST, LONGEST).as_nanos() as u64;
        let mean_ns = self.0.load(Ordering::Relaxed);
        // Within the bounds of what is added: it is never zero.
        self.0.store((mean_ns * (LATEST_PART - 1) + took_ns).div_ceil(LATEST_PART), Ordering::Relaxed);
    }
}

/// How long reads of one page take.
pub(super) struct Costs {
    cache: MeanTime,
    store: MeanTime,
}

impl Costs {
    pub(super) fn new() -> Self {
        Costs { cache: MeanTime::new(USUAL_CACHE), store: MeanTime::new(USUAL_STORE) }
    }

    pub(super) fn read_from_cache(&self, took: Duration) {
        self.cache.add(took);
    }

    /// How many times as long as the cache the store takes.
    fn of_store(&self) -> u64 {
        let [cache_ns, store_ns] = [&self.cache, &self.store].map(|mean| mean.0.load(Ordering::Relaxed));
        (store_ns / cache_ns.max(1)).clamp(1, MOST_COST)
    }
}

impl DiskCache {
    /// A page was read from the store.
    pub(crate) fn read_from_store(&self, took: Duration) {
        self.shared.costs.store.add(took);
    }

    /// What it costs to read the page at this place of a segment: 1 to [`MOST_COST`]. A look at the index, which does not
    /// count as one who wants the page.
    pub fn cost(&self, id: SegmentId, location: FrameLocation) -> u64 {
        match self.shared.index.contains(Key::frame(id, location.offset).hash()) {
            true => 1,
            false => self.shared.costs.of_store(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    #[test]
    fn costs_follow_what_reads_take_within_their_bounds() {
        let costs = Costs::new();
        assert_eq!(costs.of_store(), MOST_COST);
        let add = |cache: Duration, store: Duration| {
            (0..100).for_each(|_| costs.cache.add(cache));
            (0..100).for_each(|_| costs.store.add(store));
            costs.of_store()
        };
        assert_eq!(add(100 * MICROSECOND, 450 * MICROSECOND), 4);
        assert_eq!(add(200 * MICROSECOND, 450 * MICROSECOND), 2);
        assert_eq!(add(10_000 * MICROSECOND, 450 * MICROSECOND), 1, "the store is the nearer one");
        assert_eq!(add(Duration::ZERO, Duration::MAX), MOST_COST);
        assert_eq!(add(Duration::MAX, Duration::ZERO), 1);
    }

    #[test]
    fn one_slow_read_is_forgotten() {
        let costs = Costs::new();
        let (short, long) = (200 * MICROSECOND, Duration::from_secs(60));
        (0..100).for_each(|_| costs.store.add(short));
        assert_eq!(costs.of_store(), 2);
        costs.store.add(long);
        assert_eq!(costs.of_store(), MOST_COST);
        (0..100).for_each(|_| costs.store.add(short));
        assert_eq!(costs.of_store(), 2);
    }
}

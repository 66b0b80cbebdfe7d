//! The partition's part of [`crate::cache`]: evicts pages.

use std::sync::atomic::Ordering;

use super::{PageVersion, Partition};
use crate::cache::Evictable;

impl Evictable for Partition {
    fn is_at_its_floor(&self) -> bool {
        // The floor applies to the current database, not to a historical version.
        !self.is_historical() && self.resident_bytes() <= self.stats.cache_floor_bytes.load(Ordering::Relaxed)
    }

    fn evict(&self, clock: u64, most: usize) -> (usize, bool) {
        let _commits = self.commits.lock();
        let (evicted, more) = self.residency.evict(clock, most, &self.pages, |version| self.cost(version));
        self.stats.pages_evicted.fetch_add(evicted as u64, Ordering::Relaxed);
        (evicted, more)
    }

    fn free_limbo(&self) -> bool {
        self.residency.free_limbo()
    }

    fn close_idle_if_crowded(&self) {
        if self.heap().is_crowded() {
            self.close_idle();
        }
    }
}

impl Partition {
    /// The cost of reading a version back from the store, see [`crate::cache`]. The caller holds
    /// the commit lock.
    fn cost(&self, version: &PageVersion) -> u64 {
        let Some(disk_cache) = self.node.store.disk_cache() else { return 1 };
        match self.pages.frame(version) {
            Ok(Some((segment, location))) => disk_cache.cost(segment, location),
            _ => 1,
        }
    }
}

//! The partition's part of a migration by Albatross (ElasTraS 6): the source lists the pages that it
//! has cached, and the destination has them in memory before it becomes the owner.
//!
//! Until then the destination has opened a version of the partition that is in the store, read-only.
//! No statement reads it. When a later version is opened, it takes over the pages that have not
//! changed: a frame in the store never changes, so the bytes of equal frames are equal.

use std::sync::atomic::Ordering;

use fulmar_pages::{PAGE_SIZE, PageNo};

use super::Partition;

/// A page in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedPage {
    /// The page.
    pub page: PageNo,
    /// The number of the version that is in memory.
    pub number: u64,
}

impl Partition {
    /// The current versions in memory that are in the store too, hottest first.
    pub fn cached_pages(&self) -> Vec<CachedPage> {
        let snapshot = self.pin();
        // SAFETY: pinned.
        let find = |page| unsafe { self.find(page, &snapshot) }.filter(|version| version.is_resident());
        // A prefetched page that was not accessed is the coldest.
        let heat = |page| find(page).map(|version| version.heat().unwrap_or(0));
        let pages = self.residency.hottest(self.node.cache.clock(), usize::MAX, heat);
        let cached = pages.into_iter().filter_map(|page| {
            let number = find(page)?.number();
            Some(CachedPage { page, number })
        });
        let cached = cached.collect();
        self.unpin(snapshot);
        cached
    }

    /// Takes the pages in memory out of another version of this partition, which no session reads, if
    /// their frames are the same. Returns how many.
    pub fn adopt_pages(&self, from: &Partition) -> u64 {
        // Excludes evictions.
        let _commits = from.commits.lock();
        let (own, other) = (self.pin(), from.pin());
        let mut adopted = 0;
        for page in from.residency.queued() {
            // SAFETY: pinned.
            let (to, version) = unsafe { (self.find(page, &own), from.find(page, &other)) };
            let (Some(to), Some(version)) = (to, version) else { continue };
            let frame = from.pages.frame(version).ok().flatten();
            if to.is_resident() || frame.is_none() || frame != self.pages.frame(to).ok().flatten() {
                continue;
            }
            let Some(bytes) = version.take() else { continue };
            self.arrived(page, to, bytes.into_page(), from.pages.account().give(PAGE_SIZE as u64));
            adopted += 1;
        }
        from.unpin(other);
        self.unpin(own);
        self.stats.pages_warmed.fetch_add(adopted, Ordering::Relaxed);
        adopted
    }
}

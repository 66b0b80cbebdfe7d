//! Page cache: all partitions' pages in memory, and the eviction policy.
//!
//! # Policy
//! GreedyDual-Size with frequency. A page's priority is the clock at its last examination, plus the
//! value of its touches since: their number, times the cost of reading the page back, divided by
//! its size. The page with the lowest priority is evicted, and the clock is set to its priority.
//!
//! All pages have the same size. On a node with one store all cost the same to read back, so a
//! touch is worth one. Priorities are then small integers above the clock, and no heap is needed:
//! pages of one priority form a queue ([`crate::partition::BufferResidency`]), and a touched page
//! moves to its new queue when its turn comes, not when it is touched. A hit costs one plain store
//! to a saturating counter. An eviction costs one examination of the page, plus one for every time
//! it was found touched.
//!
//! A page that was touched once, when it was read, is evicted after one round; a page that is
//! touched repeatedly stays for up to seven. A scan of a large table therefore replaces its own
//! pages and unused ones, not the working sets of others.
//!
//! **Two tiers.** With a disk cache in front of the store, a touch of a page that is not on the
//! disk is worth up to eight, by the ratio of read latencies (`fulmar_store::DiskCache::cost`). A
//! page's tier is looked up in the disk cache's index when a touched page is examined, and is not
//! stored: a page read from the store is on the disk a moment later, the disk may have evicted a
//! page since, and it evicts pages that are always in memory first. A page that arrives counts as
//! being on the disk, which has just served or received it. So a page read once by a scan is
//! evicted after one round at any cost; only pages that were requested again stay longer. Costs are
//! integers, and a touch advances a page by at most 31 rounds. The clock advances by one for an
//! empty class and cannot overflow, and a cold page leaves after that many rounds whatever its
//! cost.
//!
//! **Floors.** A tenant with a floor (`cache_floor`; ElasTraS 7.9) is skipped while it has no more
//! than that, unless no other tenant has evictable pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::partition::{EVICTION_CLASSES, TIERED_EVICTION_CLASSES};

/// Pages evicted from a partition before its locks are released to others.
const BATCH_PAGES: usize = 64;

/// How often a waiting task retries, and how long the result "nothing to evict" is reused.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The pages of one partition that are in memory, as the cache sees them.
pub(crate) trait Evictable: Send + Sync {
    /// Returns true if evictions on behalf of other partitions must leave its pages alone.
    fn is_at_its_floor(&self) -> bool;

    /// Evicts up to `most` pages of the clock's current class. Returns how many, and whether that
    /// class has more.
    fn evict(&self, clock: u64, most: usize) -> (usize, bool);

    /// Frees evicted bytes whose readers have left. Returns true if some are still in use.
    fn free_limbo(&self) -> bool;

    /// Closes idle connections if the statements of the partition use much memory.
    fn close_idle_if_crowded(&self);
}

/// All open partitions, and the eviction clock.
pub struct Cache {
    /// Number of priority classes per partition.
    classes: u64,
    clock: AtomicU64,
    partitions: Mutex<Vec<Weak<dyn Evictable>>>,
    /// Locked by the evicting task.
    hand: Mutex<Hand>,
}

/// Position of the eviction scan.
#[derive(Default)]
struct Hand {
    /// Index of the partition to examine next.
    next: usize,
    /// When the last scan found nothing to evict.
    barren: Option<Instant>,
}

impl Cache {
    /// `tiers`: whether the cost of reading a page back differs between pages.
    pub fn new(tiers: bool) -> Self {
        Cache {
            classes: if tiers { TIERED_EVICTION_CLASSES } else { EVICTION_CLASSES },
            clock: AtomicU64::new(0),
            partitions: Mutex::default(),
            hand: Mutex::default(),
        }
    }

    pub(crate) fn classes(&self) -> u64 {
        self.classes
    }

    /// Makes a partition's pages evictable.
    pub(crate) fn add(&self, partition: Weak<dyn Evictable>) {
        let mut partitions = self.partitions.lock();
        // Usually the sweeper drops closed partitions; here only before the vector would grow.
        if partitions.len() == partitions.capacity() {
            partitions.retain(|partition| partition.strong_count() > 0);
        }
        partitions.push(partition);
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Evicts up to `bytes` of pages, rounded up to whole pages. Returns the number of evicted
    /// pages, whose memory may still be in use by readers. Returns None if another task is
    /// evicting.
    pub(crate) fn evict(&self, bytes: u64) -> Option<usize> {
        let hand = &mut *self.hand.try_lock()?;
        // A scan without result is expensive with many partitions, so it is not repeated
        // immediately.
        if hand.barren.is_some_and(|barren| barren.elapsed() < RETRY_INTERVAL) {
            return Some(0);
        }
        let goal = bytes.div_ceil(fulmar_pages::PAGE_SIZE as u64) as usize;
        let (mut evicted, mut barren, mut steps) = (0, 0, 0);
        // A touched page becomes evictable within as many steps as there are classes. After twice
        // as many only tenants at their floors are left to evict from; after three times as many
        // there is nothing.
        while evicted < goal && steps < 3 * self.classes {
            let (partition, partitions) = {
                let partitions = self.partitions.lock();
                (partitions.get(hand.next).map(Weak::upgrade), partitions.len())
            };
            if barren > partitions {
                self.clock.fetch_add(1, Ordering::Relaxed);
                (barren, steps) = (0, steps + 1);
            }
            barren += 1;
            let Some(partition) = partition else {
                hand.next = 0;
                continue;
            };
            let is_evictable =
                |partition: &&Arc<dyn Evictable>| steps >= 2 * self.classes || !partition.is_at_its_floor();
            let partition = partition.as_ref().filter(is_evictable);
            let mut more = partition.is_some();
            while let Some(partition) = partition.filter(|_| more && evicted < goal) {
                let (out, left) = partition.evict(self.clock(), BATCH_PAGES.min(goal - evicted));
                evicted += out;
                more = left;
                if out > 0 {
                    (barren, steps) = (0, 0);
                }
            }
            // If the partition has more evictable pages the next scan starts with it.
            hand.next += usize::from(!more);
        }
        hand.barren = (evicted == 0).then(Instant::now);
        Some(evicted)
    }

    /// Closes idle connections of partitions whose statements use much memory.
    pub(crate) fn close_idle_connections(&self) {
        let open: Vec<_> = self.partitions.lock().iter().filter_map(Weak::upgrade).collect();
        open.iter().for_each(|partition| partition.close_idle_if_crowded());
    }

    /// Frees evicted memory that readers have left, and drops closed partitions from the list.
    /// Returns true if memory is still waiting for readers.
    pub(crate) fn free_limbo(&self) -> bool {
        let mut open = Vec::new();
        self.partitions.lock().retain(|partition| {
            let partition = partition.upgrade();
            let is_open = partition.is_some();
            open.extend(partition);
            is_open
        });
        open.iter().filter(|partition| partition.free_limbo()).count() > 0
    }
}

//! Page cache: all partitions' pages in memory, and the eviction policy.
//!
//! # Policy
//! GreedyDual-Size with frequency. A page's priority is the clock at its last examination, plus the
//! value of its touches since: their number, times the cost of reading the page back, divided by
//! its size. The page with the lowest priority is evicted, and the clock is set to its priority.
//!
//! All pages have the same size. On a node with one store all cost the same to read back, so a
//! touch is worth one. Priorities are then small integers above the clock, and no heap is needed:
//! pages of one priority form a queue ([`crate::partition::Residence`]), and a touched page moves
//! to its new queue when its turn comes, not when it is touched. A hit costs one plain store to a
//! saturating counter. An eviction costs one examination of the page, plus one for every time it
//! was found touched.
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
//!
//! # Reservations
//! A sweeper keeps part of the budget free. A task that finds no free memory evicts pages itself.
//! Evicted memory is free once concurrent readers have left it. Changed pages can be evicted after
//! a flush has written them; tasks wait for that without holding a thread. A reservation fails when
//! no progress is possible: nothing can be evicted, and a flush that began after that was observed
//! has ended. It also fails after [`RESERVATION_TIMEOUT`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::Result;
use crate::memory::{self, Reservation};
use crate::node::Node;
use crate::page_memory;
use crate::partition::{CLASSES, CLASSES_OF_TIERS, Partition};

/// Pages evicted from a partition before its locks are released to others.
const BATCH_PAGES: usize = 64;

/// Minimum bytes evicted by a task that finds no free memory.
const MIN_EVICTION_BYTES: u64 = 256 << 10;

/// Maximum time that a task waits for memory.
const RESERVATION_TIMEOUT: Duration = Duration::from_secs(30);

/// Minimum time before a reservation fails. By then old snapshots that retain too much have
/// expired.
const MIN_RESERVATION_WAIT: Duration = Duration::from_secs(2);

/// How often a waiting task retries, and how long the result "nothing to evict" is reused.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Minimum interval between the sweeper's checks of the process's memory usage.
const BALANCE_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum interval between two runs of the sweeper.
const SWEEPER_INTERVAL: Duration = Duration::from_secs(1);

/// All open partitions, and the eviction clock.
pub(crate) struct Cache {
    /// Number of priority classes per partition.
    classes: u64,
    clock: AtomicU64,
    partitions: Mutex<Vec<Weak<Partition>>>,
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
    pub(crate) fn new(tiers: bool) -> Self {
        Cache {
            classes: if tiers { CLASSES_OF_TIERS } else { CLASSES },
            clock: AtomicU64::new(0),
            partitions: Mutex::default(),
            hand: Mutex::default(),
        }
    }

    pub(crate) fn classes(&self) -> u64 {
        self.classes
    }

    /// Makes a partition's pages evictable.
    pub(crate) fn add(&self, partition: &Arc<Partition>) {
        let mut partitions = self.partitions.lock();
        // Usually the sweeper drops closed partitions; here only before the vector would grow.
        if partitions.len() == partitions.capacity() {
            partitions.retain(|partition| partition.strong_count() > 0);
        }
        partitions.push(Arc::downgrade(partition));
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Evicts up to `bytes` of pages, rounded up to whole pages. Returns the number of evicted
    /// pages, whose memory may still be in use by readers. Returns None if another task is
    /// evicting.
    fn evict(&self, bytes: u64) -> Option<usize> {
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
                |partition: &&Arc<Partition>| steps >= 2 * self.classes || !partition.is_at_its_floor();
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

    /// Frees evicted memory that readers have left, and drops closed partitions from the list.
    /// Returns true if memory is still waiting for readers.
    fn free_limbo(&self) -> bool {
        let mut open = Vec::new();
        self.partitions.lock().retain(|partition| {
            let partition = partition.upgrade();
            let is_open = partition.is_some();
            open.extend(partition);
            is_open
        });
        open.iter().filter(|partition| partition.residence.free_limbo()).count() > 0
    }
}

impl Node {
    /// Reserves memory for pages that are about to be read.
    pub(crate) async fn room(&self, bytes: u64) -> Result<Reservation> {
        self.room_by(bytes, || self.memory.reserve(bytes)).await
    }

    /// Reserves memory for changed pages.
    pub(crate) async fn room_for_changes(&self, bytes: u64, grows: bool) -> Result<Reservation> {
        self.room_by(bytes, || self.memory.reserve_unwritten(bytes, grows)).await
    }

    async fn room_by(&self, bytes: u64, reserve: impl Fn() -> bool) -> Result<Reservation> {
        let memory = &self.memory;
        let reserved = || reserve().then(|| Reservation::of(memory.clone(), bytes));
        if let Some(reservation) = reserved() {
            return Ok(reservation);
        }
        let begun = Instant::now();
        let mut waiting = None;
        loop {
            let mut freed = std::pin::pin!(memory.freed().notified());
            // Registered before the check, so that no notification is lost.
            freed.as_mut().enable();
            let flushes = memory.flushes();
            let lacks = memory.used_bytes() + bytes > memory.limit_bytes();
            let evicted = if lacks { self.cache.evict(bytes.max(MIN_EVICTION_BYTES)) } else { Some(0) };
            let moves = evicted != Some(0) || (lacks && self.cache.free_limbo()) || memory.is_moving();
            if let Some(reservation) = reserved() {
                return Ok(reservation);
            }
            if !moves && waiting.is_none() {
                // The flush in progress may have begun earlier; the one after it has not.
                waiting = Some((memory.wait(), flushes + 2));
            }
            let ended = waiting.as_ref().is_some_and(|(_, hopeless_at)| flushes >= *hopeless_at);
            let hopeless = !moves && ended && begun.elapsed() >= MIN_RESERVATION_WAIT;
            if hopeless || begun.elapsed() >= RESERVATION_TIMEOUT || bytes > memory.limit_bytes() {
                return Err(memory.exhausted());
            }
            let _ = tokio::time::timeout(RETRY_INTERVAL, freed).await;
        }
    }
}

/// Adjusts the budget to the process's actual memory usage, and returns unused page memory to the
/// system.
fn balance(node: &Node) {
    let over = match node.whole_process.then(memory::of_process).flatten() {
        Some(process_bytes) => node.memory.balance(process_bytes, page_memory::places()),
        None => 0,
    };
    page_memory::give_back(over);
}

/// Closes pooled connections of partitions whose statements use much memory.
fn close_idle_connections(node: &Node) {
    let open: Vec<Arc<Partition>> = node.cache.partitions.lock().iter().filter_map(Weak::upgrade).collect();
    for partition in open.iter().filter(|partition| partition.heap().is_crowded()) {
        partition.pool.clear();
    }
}

/// Starts the sweeper, which keeps part of the budget free. It ends when the node is dropped.
pub(crate) fn spawn(node: &Arc<Node>) {
    let (memory, weak) = (node.memory.clone(), Arc::downgrade(node));
    tokio::spawn(async move {
        let mut balanced = None;
        while let Some(node) = weak.upgrade() {
            if balanced.is_none_or(|balanced: Instant| balanced.elapsed() >= BALANCE_INTERVAL) {
                balanced = Some(Instant::now());
                balance(&node);
                if node.heap.is_crowded() {
                    close_idle_connections(&node);
                }
            }
            let excess = memory.excess_bytes();
            if excess > 0 && node.cache.evict(excess.min(MIN_EVICTION_BYTES)) != Some(0) {
                drop(node);
                tokio::task::yield_now().await;
                continue;
            }
            node.cache.free_limbo();
            drop(node);
            // Any reservation above the mark wakes the sweeper, which is useless while nothing can
            // be evicted.
            tokio::time::sleep(RETRY_INTERVAL).await;
            let _ = tokio::time::timeout(SWEEPER_INTERVAL, memory.crowded()).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use fulmar_pages::PartitionId;

    use crate::{Config, Engine};

    /// Frames move with compaction, so segments whose pages have all been rewritten are not needed
    /// any more, although the partition stays open and keeps reading its pages.
    #[tokio::test(flavor = "multi_thread")]
    async fn open_partition_releases_segments_it_no_longer_reads() {
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 4 << 20)).await.unwrap();
        let mut session = engine.session(PartitionId(1));
        let partition = engine.partition(PartitionId(1)).await.unwrap();
        let mut before = Vec::new();
        for rows in [400, 500, 600] {
            let rows = format!(
                "INSERT INTO t WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i WHERE k < {rows}) \
                 SELECT k, randomblob(3000) FROM i"
            );
            for sql in ["CREATE TABLE IF NOT EXISTS t(k, v)", "DELETE FROM t", &rows, "SELECT sum(k) FROM t"]
            {
                session.run(sql).await;
                engine.flush().await.unwrap();
            }
            partition.sweep();
            let now = partition.frame_segments();
            assert!(!now.is_empty() && now.iter().all(|segment| !before.contains(segment)), "{now:?}");
            before = now;
        }
        session.close().await;
    }
}

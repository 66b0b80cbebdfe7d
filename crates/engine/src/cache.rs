//! The pages of all partitions in memory as one cache of the store: who goes when there is no room.
//!
//! # Policy
//! GreedyDual-Size with frequency: a page's priority is the clock at the time when it was looked at last, plus what its
//! touches since are worth (their number, times the time to read it back, by the bytes that it holds); the page with the
//! lowest priority goes, and the clock is set to its priority. All pages hold the same. On a node with one store every
//! page costs the same to read back too, so a touch is worth one. Priorities are then small integers above the clock, and the
//! order needs no heap: pages of one priority are a queue ([`crate::partition::Residence`]), and pages that were touched are moved to where they
//! belong when their turn comes, not when they are touched. A hit costs a plain store of a counter that saturates;
//! an eviction costs a look at the page, and one more for every time that it was found to have been touched.
//!
//! So a page that was touched once when it was read goes after one round, and one that is touched again and again stays
//! for as long as seven: a scan of a large tenant replaces its own pages and what nobody uses, not the working sets of
//! others.
//!
//! **Two tiers.** With a disk cache before the store a touch of a page that the disk does not have is worth up to eight:
//! as many times as reads from the store take longer (`fulmar_store::DiskCache::cost`). Where a page lies is asked when it is
//! looked at and was touched, of the index that says it, and is noted nowhere: what was read from the store is on the disk
//! a moment later, what the disk has had it may have thrown away since, and what is always in memory is thrown away there
//! first. When it arrives a page counts as one that the disk has, which has just answered it or been given it. So what a scan
//! reads once goes after one round, whatever it cost; who stays longer was wanted again. Costs are whole
//! numbers, and a touch leads 31 rounds ahead at most: the clock goes on by one for a class that is empty, and
//! cannot overflow; and what has gone cold leaves after so many rounds, whatever it was worth.
//!
//! **Floors.** A tenant that has a floor (`cache_floor`; ElasTraS 7.9) is passed over while it has no more than that, unless
//! nobody else has anything to give.
//!
//! # Room
//! A sweeper keeps some of the budget free. Who needs room and finds none evicts by itself. What was evicted is free when
//! readers have stepped aside; what is changed can be evicted when a flush has written it: whoever needs room waits for
//! that, without holding a thread. It is refused when nothing moves any more: nothing can be evicted, and a flush that
//! began after that was seen has ended; or after [`PATIENCE`].

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

/// Pages that are evicted from a partition before others may have its locks.
const BATCH_PAGES: usize = 64;

/// Bytes that are evicted at least by who finds no room.
const STRIDE_BYTES: u64 = 256 << 10;

/// The longest that anybody waits for room.
const PATIENCE: Duration = Duration::from_secs(30);

/// The shortest before it is refused: by then old snapshots that hold too much have been let go of.
const LEAST_PATIENCE: Duration = Duration::from_secs(2);

/// How often who waits looks by itself, and how long it is believed that there is nothing to evict.
const LOOK: Duration = Duration::from_millis(10);

/// How often the sweeper looks at what the process takes, at most.
const BALANCE: Duration = Duration::from_millis(100);

/// How often the sweeper looks around if nobody wakes it.
const SWEEPER_PERIOD: Duration = Duration::from_secs(1);

/// All open partitions, and the clock that their pages leave by.
pub(crate) struct Cache {
    /// Classes of pages in each of them.
    classes: u64,
    clock: AtomicU64,
    partitions: Mutex<Vec<Weak<Partition>>>,
    /// Held by the one that evicts.
    hand: Mutex<Hand>,
}

/// Where who evicts has come to.
#[derive(Default)]
struct Hand {
    /// The partition that is looked at next.
    next: usize,
    /// When there was nothing to evict.
    barren: Option<Instant>,
}

impl Cache {
    /// Of a node whose pages do not all cost the same to read back, if it has `tiers`.
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

    /// From now on the partition's pages may be evicted.
    pub(crate) fn add(&self, partition: &Arc<Partition>) {
        let mut partitions = self.partitions.lock();
        // Else the sweeper does it, if it is not busy.
        if partitions.len() == partitions.capacity() {
            partitions.retain(|partition| partition.strong_count() > 0);
        }
        partitions.push(Arc::downgrade(partition));
    }

    pub(crate) fn clock(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Evicts pages of at least so many bytes, if there are as many that may go. Answers the pages, whose bytes may still
    /// wait for readers; `None` if somebody else is at it.
    fn evict(&self, bytes: u64) -> Option<usize> {
        let hand = &mut *self.hand.try_lock()?;
        // Looking at everything for nothing is dear where partitions are many.
        if hand.barren.is_some_and(|barren| barren.elapsed() < LOOK) {
            return Some(0);
        }
        let goal = bytes.div_ceil(fulmar_pages::PAGE_SIZE as u64) as usize;
        let (mut evicted, mut barren, mut steps) = (0, 0, 0);
        // A page that was touched comes round in as many steps as there are classes. Twice, and only floors are left to be
        // broken; once more, and nothing is.
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
            let may = |partition: &&Arc<Partition>| steps >= 2 * self.classes || !partition.is_at_its_floor();
            let partition = partition.as_ref().filter(may);
            let mut more = partition.is_some();
            while let Some(partition) = partition.filter(|_| more && evicted < goal) {
                let (out, left) = partition.evict(self.clock(), BATCH_PAGES.min(goal - evicted));
                evicted += out;
                more = left;
                if out > 0 {
                    (barren, steps) = (0, 0);
                }
            }
            // If it has more it is the first to be asked by the next who comes.
            hand.next += usize::from(!more);
        }
        hand.barren = (evicted == 0).then(Instant::now);
        Some(evicted)
    }

    /// Frees what readers have left, and the memory of partitions that have been closed. Answers whether something still waits.
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
    /// Room for bytes of pages that are about to be read.
    pub(crate) async fn room(&self, bytes: u64) -> Result<Reservation> {
        self.room_by(bytes, || self.memory.reserve(bytes)).await
    }

    /// Room for bytes of changed pages.
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
            // Before the look, so that no notice falls between.
            freed.as_mut().enable();
            let flushes = memory.flushes();
            let lacks = memory.used_bytes() + bytes > memory.limit_bytes();
            let evicted = if lacks { self.cache.evict(bytes.max(STRIDE_BYTES)) } else { Some(0) };
            let moves = evicted != Some(0) || (lacks && self.cache.free_limbo()) || memory.is_moving();
            if let Some(reservation) = reserved() {
                return Ok(reservation);
            }
            if !moves && waiting.is_none() {
                // The flush that is under way may have begun before; the one after it has not.
                waiting = Some((memory.wait(), flushes + 2));
            }
            let ended = waiting.as_ref().is_some_and(|(_, hopeless_at)| flushes >= *hopeless_at);
            let hopeless = !moves && ended && begun.elapsed() >= LEAST_PATIENCE;
            if hopeless || begun.elapsed() >= PATIENCE || bytes > memory.limit_bytes() {
                return Err(memory.exhausted());
            }
            let _ = tokio::time::timeout(LOOK, freed).await;
        }
    }
}

/// Sees to it that the process takes what it was allowed, and that memory for pages that is not needed goes back to the system.
fn balance(node: &Node) {
    let over = match node.whole_process.then(memory::of_process).flatten() {
        Some(process_bytes) => node.memory.balance(process_bytes, page_memory::places()),
        None => 0,
    };
    page_memory::give_back(over);
}

/// Closes connections that wait for a transaction, of partitions whose statements hold much memory.
fn close_idle_connections(node: &Node) {
    let open: Vec<Arc<Partition>> = node.cache.partitions.lock().iter().filter_map(Weak::upgrade).collect();
    for partition in open.iter().filter(|partition| partition.heap().is_crowded()) {
        partition.pool.clear();
    }
}

/// Starts the sweeper, which keeps some room free. It ends when the node is gone.
pub(crate) fn spawn(node: &Arc<Node>) {
    let (memory, weak) = (node.memory.clone(), Arc::downgrade(node));
    tokio::spawn(async move {
        let mut balanced = None;
        while let Some(node) = weak.upgrade() {
            if balanced.is_none_or(|balanced: Instant| balanced.elapsed() >= BALANCE) {
                balanced = Some(Instant::now());
                balance(&node);
                if node.heap.is_crowded() {
                    close_idle_connections(&node);
                }
            }
            let excess = memory.excess_bytes();
            if excess > 0 && node.cache.evict(excess.min(STRIDE_BYTES)) != Some(0) {
                drop(node);
                tokio::task::yield_now().await;
                continue;
            }
            node.cache.free_limbo();
            drop(node);
            // Whoever takes some above the mark wakes it, which is of no use if there is nothing to evict.
            tokio::time::sleep(LOOK).await;
            let _ = tokio::time::timeout(SWEEPER_PERIOD, memory.crowded()).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use fulmar_pages::PartitionId;

    use crate::{Config, Engine};

    /// Where pages lie now is where they are read from: segments whose pages have all been written anew are not needed any
    /// more, though the partition stays open, and reads its pages again and again.
    #[tokio::test(flavor = "multi_thread")]
    async fn an_open_partition_lets_go_of_segments_that_it_reads_nothing_from() {
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

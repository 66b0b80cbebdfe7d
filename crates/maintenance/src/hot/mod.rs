//! Prewarming: when a partition is closed, the list of its hot pages is stored, and the next
//! opening reads these pages first. Also stores an anchor for a closed partition, by which a
//! missing newest manifest is noticed ([`fulmar_store`]'s `objects/anchors`). If no anchor was
//! written, because of a crash or a slow store, the collector writes it.
//!
//! ```text
//!   a partition is closed: idle, or the node stops    the partition opens again
//!     -> select touched pages that are in memory        -> the manifest's listing has the list
//!     -> store their list, hottest first                -> a task reads these pages ([`prewarm`])
//!     -> delete the previous list                       -> the first statement does not wait
//! ```
//!
//! The list is a hint. No statement waits for its reading or writing, failures are logged and
//! ignored, and a partition without a list works normally. A partition that is closed for another
//! reason (it is dropped, restored, or changes its log) stores none.
//!
//! A tenant's working set rarely changes, and an object costs money: if a new list would be nearly
//! the same as the one that the partition opened with, the old one is kept.
//!
//! # Crashes and late requests
//! - A list is one object, which exists completely or not at all. A crash before it is stored
//!   leaves the previous list, which is as useful as before. A crash before the previous list is
//!   deleted leaves both: the newer one counts, and the collector deletes the other.
//! - A put that was given up and arrives late is older than later lists; or its partition has been
//!   dropped and has no manifest, so the collector deletes the list ([`crate::collect`]).
//! - The collector never deletes a list that a partition will open with. Its pages are in segments,
//!   and a partition is closed only when a manifest references all of them; so the manifest existed
//!   before the list, and exists until the partition is dropped.
//! - If a list is missing when it is read, the partition opens without it.
//!
//! Pages in a list may have been truncated, changed or, after a restore, replaced since. Lists of
//! an older epoch are not used; for other lists the current versions of the pages are read,
//! wherever they are.

mod prewarm;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_mvcc::{PageRun, Partition, store_error};
use fulmar_pages::{HotPages, PAGE_SIZE, PageNo};
use fulmar_sqlite::Result;
use fulmar_store::{HotPagesName, ManifestName, PageStore, ReadHint};
use futures::stream::{self, StreamExt, TryStreamExt};
use hashbrown::HashSet;
use tokio::sync::Semaphore;

/// Maximum number of concurrent and of pending puts of lists. Beyond that partitions are closed
/// without a list.
const MAX_CONCURRENT_PUTS: usize = 8;
const MAX_PENDING_PUTS: usize = 1000;

/// Minimum length of a list. Fewer pages are read with one or two requests, and an object per
/// opening of thousands of small tenants would cost more.
const MIN_PAGES: usize = 32;

/// Maximum delay of a node's shutdown for storing lists.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of concurrent reads for a partition that is about to be moved to this node.
const MAX_CONCURRENT_WARM_READS: usize = 2;

/// Prewarming uses 1/8 of the store's useful concurrent reads; statements have the rest.
const READS_DIVISOR: usize = 8;

/// The hot page lists of a node's partitions.
pub struct HotLists {
    store: Arc<PageStore>,
    reads: Arc<Semaphore>,
    puts: Arc<Semaphore>,
    /// Permits of pending puts.
    waiting: Arc<Semaphore>,
}

/// What is stored about a closed partition.
struct ClosingRecord {
    /// Its newest manifest, if that has no anchor yet.
    anchor: Option<ManifestName>,
    /// Its hot pages, and the list that they replace.
    list: Option<(HotPages, Option<HotPagesName>)>,
}

impl HotLists {
    /// Creates the lists of a node.
    pub fn new(store: Arc<PageStore>) -> Self {
        HotLists {
            reads: Arc::new(Semaphore::new(store.read_concurrency().div_ceil(READS_DIVISOR))),
            puts: Arc::new(Semaphore::new(MAX_CONCURRENT_PUTS)),
            waiting: Arc::new(Semaphore::new(MAX_PENDING_PUTS)),
            store,
        }
    }

    /// Stores the list of a partition that was closed because it was idle, in the background.
    pub(crate) fn store_on_close(&self, partition: &Partition) {
        let Ok(permit) = self.waiting.clone().try_acquire_owned() else {
            tracing::debug!(partition = %partition.id, "hot pages not stored: the object store is slow");
            return;
        };
        let Some(last) = ClosingRecord::of(partition) else { return };
        let (store, puts) = (self.store.clone(), self.puts.clone());
        tokio::spawn(async move {
            let _turn = puts.acquire().await;
            last.store(&store).await;
            drop(permit);
        });
    }

    /// Stores the lists of the partitions that are open when the node stops, and finishes pending
    /// ones, within a time limit.
    pub(crate) async fn store_all(&self, partitions: Vec<Arc<Partition>>) {
        let all = async {
            let lists = partitions.iter().filter_map(|partition| ClosingRecord::of(partition));
            let puts = lists.map(|last| last.store(&self.store));
            stream::iter(puts.collect::<Vec<_>>()).for_each_concurrent(MAX_CONCURRENT_PUTS, |put| put).await;
            let _all_done = self.waiting.acquire_many(MAX_PENDING_PUTS as u32).await;
        };
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, all).await.is_err() {
            tracing::debug!("hot pages of some partitions not stored: the object store is slow");
        }
    }

    /// Reads the given pages of a partition that are not in memory, and evicts others if memory is
    /// full: the partition is about to be moved to this node. Returns how many pages it has read.
    pub async fn warm(&self, partition: &Partition, pages: &[PageNo]) -> Result<u64> {
        let read = AtomicU64::new(0);
        let runs = stream::iter(partition.absent_runs(pages)).map(Ok);
        let reading = runs
            .try_for_each_concurrent(MAX_CONCURRENT_WARM_READS, |run| self.warm_run(partition, run, &read));
        reading.await?;
        Ok(read.into_inner())
    }

    async fn warm_run(&self, partition: &Partition, run: PageRun, read: &AtomicU64) -> Result<()> {
        let locations: Vec<_> = run.pages.iter().map(|(_, location)| *location).collect();
        let mut bytes = Vec::with_capacity(locations.len() * PAGE_SIZE);
        let reading = self.store.read_pages(run.segment, &locations, ReadHint::WillReuse, &mut bytes);
        reading.await.map_err(store_error)?;
        partition.fill_run_evicting(&run, &bytes).await?;
        read.fetch_add(locations.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Stops all prewarming.
    pub(crate) fn stop_prewarming(&self) {
        self.reads.close();
    }
}

impl ClosingRecord {
    /// Returns what is to be stored about an unused partition, if anything.
    fn of(partition: &Partition) -> Option<ClosingRecord> {
        // A partition that is not settled has changes without a manifest, or a fenced log.
        if partition.is_closed() || !partition.is_settled() || partition.log.fenced().is_some() {
            return None;
        }
        let last = ClosingRecord { anchor: partition.new_manifest(), list: list_of(partition) };
        (last.anchor.is_some() || last.list.is_some()).then_some(last)
    }

    async fn store(self, store: &PageStore) {
        if let Some(manifest) = self.anchor
            && let Err(error) = store.put_anchor(manifest).await
        {
            tracing::debug!(
                %error,
                partition = %manifest.partition,
                "could not store an anchor; the collector will"
            );
        }
        let Some((list, before)) = self.list else { return };
        let mut stored = store.put_hot_pages(&list).await;
        // In this order: two lists are better than none.
        if let (Ok(()), Some(before)) = (&stored, before) {
            stored = store.delete_hot_pages(before).await;
        }
        if let Err(error) = stored {
            tracing::debug!(%error, partition = %list.partition, "could not store hot pages");
        }
    }
}

/// Returns a partition's hot pages and the list that they replace, if storing them is worthwhile.
fn list_of(partition: &Partition) -> Option<(HotPages, Option<HotPagesName>)> {
    let node = &partition.node;
    let pages = partition.hottest();
    let before = partition.hot_list.get();
    // Hints are not stored while disk space is low.
    let is_useless = pages.len() < MIN_PAGES || before.is_some_and(|before| are_alike(&before.pages, &pages));
    if is_useless || node.disk.is_low() {
        return None;
    }
    let timestamp = node.clock.tick();
    let list = HotPages { partition: partition.id, epoch: partition.epoch, timestamp, pages };
    Some((list, partition.hot_name.get().copied()))
}

/// Whether two lists of pages have at least 7/8 in common.
fn are_alike(before: &[PageNo], now: &[PageNo]) -> bool {
    let known: HashSet<PageNo> = before.iter().copied().collect();
    let common = now.iter().filter(|page| known.contains(*page)).count();
    8 * common >= 7 * before.len().max(now.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_with_seven_of_eight_pages_in_common_are_alike() {
        let pages: Vec<PageNo> = (2..82).collect();
        let reversed: Vec<PageNo> = pages.iter().rev().copied().collect();
        assert!(are_alike(&pages, &reversed));
        assert!(are_alike(&pages, &pages[..70]) && are_alike(&pages[..70], &pages));
        assert!(!are_alike(&pages, &pages[..69]) && !are_alike(&pages[..69], &pages));
        assert!(!are_alike(&[], &pages));
    }
}

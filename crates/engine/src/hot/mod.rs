//! Hot pages: what a partition was working with when it was closed is what its next life begins with. And what else a partition at rest
//! leaves in the store: an anchor, by which its newest manifest is missed if it is gone ([`fulmar_store`]'s `objects/anchors`). Where none
//! was written, by a crash or a slow store, the collector does it.
//!
//! ```text
//!   a partition is closed, since it is idle or the node ends      it opens again
//!     -> which pages are in memory, and were touched?               -> the listing that finds the manifest finds the list
//!     -> a list in the store, the hottest first                     -> a task of its own reads those pages ([`warm`])
//!     -> the list that it had before is deleted                     -> the first statement is answered meanwhile
//! ```
//!
//! The list is a hint. Nobody waits for it to be written or read, what goes wrong with it is logged and forgotten, and
//! nothing is wrong with a partition that has none. A partition that is closed for any other reason (it is dropped,
//! restored, or commits to another log from now on) writes none.
//!
//! What most lives of a tenant touch is the same, and an object costs something: where a list would say nearly what the
//! one says with which the partition has opened, that one stays.
//!
//! # Crashes, and what comes late
//! A list is one object, made whole or not at all. Who dies before it is made leaves the one before it, which is as good
//! as it was. Who dies before that one is deleted leaves both: the newer one counts, and the collector deletes the other.
//! A put that was given up and arrives later is older than what was put since; or its partition has been dropped meanwhile,
//! and has no manifest any more, so that the collector deletes it too ([`crate::collect`]). The other way round the
//! collector takes no list for garbage that a partition will open with: pages are in memory that lie in segments, a
//! partition is closed when all of it is named by a manifest, so there was a manifest before there was the list, and there
//! is one until the partition is dropped. If an opening finds a list that is gone when it is read, it does without.
//!
//! Pages in a list may have been cut off or changed since, and after a restore they may be others: those of an older epoch
//! are not used, and of the others what there is now is read, wherever it lies.

mod warm;

use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::{HotPages, PageNo};
use fulmar_store::{HotPagesName, ManifestName, PageStore};
use futures::stream::{self, StreamExt};
use hashbrown::HashSet;
use tokio::sync::Semaphore;

use crate::partition::Partition;

/// Lists that are being stored, at once and in all. Who comes when a slow store has so many to do writes none.
const PUTS_AT_ONCE: usize = 8;
const MOST_PUTS: usize = 1000;

/// Fewer pages are no list: a read or two bring them, and an object for each life of thousands of small tenants costs more.
const LEAST_PAGES: usize = 32;

/// How long the end of a node may take because of its lists.
const PATIENCE_AT_THE_END: Duration = Duration::from_secs(3);

/// The lists of a node's partitions.
pub(crate) struct HotLists {
    store: Arc<PageStore>,
    reads: Arc<Semaphore>,
    puts: Arc<Semaphore>,
    /// Places for those who wait for one of the puts.
    waiting: Arc<Semaphore>,
}

/// What is to be stored of a partition.
struct Last {
    /// Its newest manifest, if that has no anchor yet.
    anchor: Option<ManifestName>,
    /// Its hot pages, and the list that they replace.
    list: Option<(HotPages, Option<HotPagesName>)>,
}

impl HotLists {
    pub(crate) fn new(store: Arc<PageStore>) -> Self {
        HotLists {
            reads: Arc::new(Semaphore::new(warm::reads_of_a_node(&store))),
            puts: Arc::new(Semaphore::new(PUTS_AT_ONCE)),
            waiting: Arc::new(Semaphore::new(MOST_PUTS)),
            store,
        }
    }

    /// A partition was closed because nobody uses it: its list is written, in a while.
    pub(crate) fn closed(&self, partition: &Partition) {
        let Ok(place) = self.waiting.clone().try_acquire_owned() else {
            tracing::debug!(partition = %partition.id, "its hot pages are not noted: the store is slow");
            return;
        };
        let Some(last) = Last::of(partition) else { return };
        let (store, puts) = (self.store.clone(), self.puts.clone());
        tokio::spawn(async move {
            let _turn = puts.acquire().await;
            last.store(&store).await;
            drop(place);
        });
    }

    /// The node ends, with these partitions open: writes their lists, and those that are on their way, as far as that is
    /// soon done.
    pub(crate) async fn node_ends(&self, partitions: Vec<Arc<Partition>>) {
        let all = async {
            let lists = partitions.iter().filter_map(|partition| Last::of(partition));
            let puts = lists.map(|last| last.store(&self.store));
            stream::iter(puts.collect::<Vec<_>>()).for_each_concurrent(PUTS_AT_ONCE, |put| put).await;
            let _all_done = self.waiting.acquire_many(MOST_PUTS as u32).await;
        };
        if tokio::time::timeout(PATIENCE_AT_THE_END, all).await.is_err() {
            tracing::debug!("the hot pages of some partitions are not noted: the store is slow");
        }
    }

    /// Nothing more is read.
    pub(crate) fn stop_reading(&self) {
        self.reads.close();
    }
}

impl Last {
    /// What is to be noted of a partition that nobody uses any more, if there is something.
    fn of(partition: &Partition) -> Option<Last> {
        // What is not settled is not named by a manifest, or not by ours.
        if partition.is_closed() || !partition.is_settled() || partition.log.fenced().is_some() {
            return None;
        }
        let last = Last { anchor: partition.new_manifest(), list: list_of(partition) };
        (last.anchor.is_some() || last.list.is_some()).then_some(last)
    }

    async fn store(self, store: &PageStore) {
        if let Some(manifest) = self.anchor
            && let Err(error) = store.put_anchor(manifest).await
        {
            tracing::debug!(%error, partition = %manifest.partition, "its newest manifest is not noted; the collector does it");
        }
        let Some((list, before)) = self.list else { return };
        let mut stored = store.put_hot_pages(&list).await;
        // Not before: it is better to have two of them than none.
        if let (Ok(()), Some(before)) = (&stored, before) {
            stored = store.delete_hot_pages(before).await;
        }
        if let Err(error) = stored {
            tracing::debug!(%error, partition = %list.partition, "its hot pages are not noted");
        }
    }
}

/// A partition's hot pages and the list that they replace, if it is worth it.
fn list_of(partition: &Partition) -> Option<(HotPages, Option<HotPagesName>)> {
    let node = &partition.node;
    let pages = partition.hottest();
    let before = partition.hot_list.get();
    // Space that is short is not for hints.
    let is_useless =
        pages.len() < LEAST_PAGES || before.is_some_and(|before| are_alike(&before.pages, &pages));
    if is_useless || node.disk.is_low() {
        return None;
    }
    let timestamp = node.clock.tick();
    let list = HotPages { partition: partition.id, epoch: partition.epoch, timestamp, pages };
    Some((list, partition.hot_name.get().copied()))
}

/// Whether two lists of pages have at least seven of eight in common.
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

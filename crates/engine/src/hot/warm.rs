//! Warming: the pages that a partition's last life has worked with are read, before anybody asks for them.
//!
//! Each partition that opens with a list has a task for it, which ends with the list, or before:
//! - when the memory is full. It takes what is free, below the mark from which on the sweeper evicts ([`crate::memory`]): for a
//!   page that may be wanted none leaves that was;
//! - when the partition is closed. The task has the partition in its hands only to look up where pages lie and to put them
//!   in, and never while it waits: it keeps no partition open, pins no snapshot, and reserves no memory for what has not
//!   come yet;
//! - when something goes wrong.
//!
//! Statements do not wait for it. Who misses a page that is being read here reads it too, and the first to come is kept: else
//! it would wait for thirty others, and for a turn. Few reads are under way at once, of a partition and of the node.
//!
//! A page that nobody has asked for is not touched, though it is in memory: of those that came last it is the first to
//! leave, and in the next list it is not.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use fulmar_pages::{HotPages, PAGE_SIZE};
use fulmar_store::{HotPagesName, PageStore, Reading, StoreError};
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::sync::Semaphore;

use super::HotLists;
use crate::partition::{Partition, Run};

/// Reads for one partition at once.
const READS_AT_ONCE: usize = 2;

/// Of the reads that are worth doing at once those for statements have the others.
const SHARE_OF_READS: usize = 8;

/// Pages of the list that are looked up together: those of them that lie together are read together.
const WINDOW_PAGES: usize = 256;

/// Reads for all partitions of a node at once.
pub(super) fn reads_of_a_node(store: &PageStore) -> usize {
    store.reads_at_once().div_ceil(SHARE_OF_READS)
}

/// Why no more is read.
enum Ended {
    /// Of a partition that is closed, or where there is no room.
    Quietly,
    Failed(StoreError),
}

impl From<StoreError> for Ended {
    fn from(error: StoreError) -> Self {
        Ended::Failed(error)
    }
}

impl HotLists {
    /// A partition has been opened, and has this list: its pages are read from now on.
    pub(crate) fn warm(&self, partition: &Arc<Partition>, list: HotPagesName) {
        // Whether or not it is read: the next one replaces it.
        let _first = partition.hot_name.set(list);
        let (store, reads, stats) = (self.store.clone(), self.reads.clone(), partition.stats.clone());
        let warming = Warming { store, reads, partition: Arc::downgrade(partition) };
        tokio::spawn(async move {
            if let Err(Ended::Failed(error)) = warming.run(list).await {
                tracing::debug!(%error, partition = %list.partition, "its hot pages are not read ahead");
            }
            stats.warmups_ended.fetch_add(1, Ordering::Relaxed);
        });
    }
}

struct Warming {
    store: Arc<PageStore>,
    reads: Arc<Semaphore>,
    partition: Weak<Partition>,
}

impl Warming {
    async fn run(&self, name: HotPagesName) -> Result<(), Ended> {
        let list = self.read_list(name).await?;
        for window in list.pages.chunks(WINDOW_PAGES) {
            let runs = self.partition()?.absent(window);
            let runs = stream::iter(runs).map(Ok);
            runs.try_for_each_concurrent(READS_AT_ONCE, |run| self.read(run)).await?;
        }
        Ok(())
    }

    /// The partition, if it is open and one more page has room.
    fn partition(&self) -> Result<Arc<Partition>, Ended> {
        let open = self.partition.upgrade().filter(|partition| !partition.is_closed());
        open.filter(|partition| partition.node.memory.has_spare(PAGE_SIZE as u64)).ok_or(Ended::Quietly)
    }

    async fn read_list(&self, name: HotPagesName) -> Result<HotPages, Ended> {
        let _turn = self.reads.acquire().await.map_err(|_stopped| Ended::Quietly)?;
        self.partition()?;
        let list = self.store.read_hot_pages(name).await?;
        // For the end of this life, which compares.
        let _first = self.partition()?.hot_list.set(list.clone());
        Ok(list)
    }

    async fn read(&self, run: Run) -> Result<(), Ended> {
        let _turn = self.reads.acquire().await.map_err(|_stopped| Ended::Quietly)?;
        self.partition()?;
        let locations: Vec<_> = run.pages.iter().map(|(_, location)| *location).collect();
        let mut bytes = Vec::with_capacity(locations.len() * PAGE_SIZE);
        // If it has been merged meanwhile, and collected, that is the end: soon all of the list lies elsewhere.
        self.store.read_pages(run.segment, &locations, Reading::Again, &mut bytes).await?;
        if self.partition()?.warmed(&run, &bytes) { Ok(()) } else { Err(Ended::Quietly) }
    }
}

//! Prewarming task: reads the hot pages of a partition's previous opening before statements need
//! them.
//!
//! Each partition that opens with a list has a task, which ends after the list, or earlier:
//! - when memory is full. It only uses free memory, below the mark at which the sweeper evicts
//!   (`memory` in `fulmar_mvcc`): no page in use is evicted for one that may not be needed;
//! - when the partition is closed. The task holds a reference to the partition only while it looks
//!   up locations and stores pages, and never while it waits. It keeps no partition open, pins no
//!   snapshot, and reserves no memory for pending reads;
//! - when an error occurs.
//!
//! Statements do not wait for it. A statement that misses a page which is being prewarmed reads it
//! too, and the first result is used: otherwise it would wait for 30 other pages and for a permit.
//! Few reads are in progress at a time, per partition and per node.
//!
//! A prewarmed page counts as untouched until a statement reads it: it is evicted before other
//! pages of its age, and is not in the next list.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use fulmar_mvcc::{PageRun, Partition};
use fulmar_pages::{HotPages, PAGE_SIZE};
use fulmar_store::{HotPagesName, PageStore, ReadHint, StoreError};
use futures::stream::{self, StreamExt, TryStreamExt};
use tokio::sync::Semaphore;

use super::HotLists;

/// Maximum number of concurrent reads per partition.
const MAX_CONCURRENT_READS: usize = 2;

/// Number of listed pages that are looked up together. Adjacent ones are read together.
const WINDOW_PAGES: usize = 256;

/// Why a task ends early.
enum Ended {
    /// The partition is closed, or memory is full.
    Quietly,
    Failed(StoreError),
}

impl From<StoreError> for Ended {
    fn from(error: StoreError) -> Self {
        Ended::Failed(error)
    }
}

impl HotLists {
    /// Starts to prewarm a partition that was opened with this list.
    pub fn prewarm(&self, partition: &Arc<Partition>, list: HotPagesName) {
        // Recorded even if it is not read: the next list replaces it.
        let _first = partition.hot_name.set(list);
        let (store, reads, stats) = (self.store.clone(), self.reads.clone(), partition.stats.clone());
        let warming = Prewarm { store, reads, partition: Arc::downgrade(partition) };
        tokio::spawn(async move {
            if let Err(Ended::Failed(error)) = warming.run(list).await {
                tracing::debug!(%error, partition = %list.partition, "prewarming failed");
            }
            stats.warmups_ended.fetch_add(1, Ordering::Relaxed);
        });
    }
}

struct Prewarm {
    store: Arc<PageStore>,
    reads: Arc<Semaphore>,
    partition: Weak<Partition>,
}

impl Prewarm {
    async fn run(&self, name: HotPagesName) -> Result<(), Ended> {
        let list = self.read_list(name).await?;
        for window in list.pages.chunks(WINDOW_PAGES) {
            let runs = self.partition()?.absent_runs(window);
            let runs = stream::iter(runs).map(Ok);
            runs.try_for_each_concurrent(MAX_CONCURRENT_READS, |run| self.read(run)).await?;
        }
        Ok(())
    }

    /// The partition, if it is open and there is free memory for a page.
    fn partition(&self) -> Result<Arc<Partition>, Ended> {
        let open = self.partition.upgrade().filter(|partition| !partition.is_closed());
        open.filter(|partition| partition.node.memory.has_spare(PAGE_SIZE as u64)).ok_or(Ended::Quietly)
    }

    async fn read_list(&self, name: HotPagesName) -> Result<HotPages, Ended> {
        let _permit = self.reads.acquire().await.map_err(|_stopped| Ended::Quietly)?;
        self.partition()?;
        let list = self.store.read_hot_pages(name).await?;
        // Kept for comparison when the partition is closed.
        let _first = self.partition()?.hot_list.set(list.clone());
        Ok(list)
    }

    async fn read(&self, run: PageRun) -> Result<(), Ended> {
        let _permit = self.reads.acquire().await.map_err(|_stopped| Ended::Quietly)?;
        self.partition()?;
        let locations: Vec<_> = run.pages.iter().map(|(_, location)| *location).collect();
        let mut bytes = Vec::with_capacity(locations.len() * PAGE_SIZE);
        // If the segment was merged and collected meanwhile the task ends: soon all listed pages
        // have moved.
        self.store.read_pages(run.segment, &locations, ReadHint::WillReuse, &mut bytes).await?;
        if self.partition()?.fill_run(&run, &bytes) { Ok(()) } else { Err(Ended::Quietly) }
    }
}

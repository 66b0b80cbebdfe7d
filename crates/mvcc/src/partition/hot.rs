//! The partition's part of prewarming: reports its hot pages, and prewarms pages.

use std::sync::atomic::Ordering;

use fulmar_pages::hot_pages::MAX_PAGES;
use fulmar_pages::{FrameLocation, PAGE_SIZE, PageNo, SegmentId};

use fulmar_sqlite::Result;

use super::{Partition, readahead};
use crate::memory::Reservation;
use crate::page_memory::PageBytes;

/// Pages that are close to each other in a segment, in their order there.
pub struct PageRun {
    /// The segment.
    pub segment: SegmentId,
    /// The pages, and where they are in it.
    pub pages: Vec<(PageNo, FrameLocation)>,
}

impl Partition {
    /// The pages in memory that have been accessed, hottest first, at most as many as a list may
    /// have.
    pub fn hottest(&self) -> Vec<PageNo> {
        let snapshot = self.pin();
        // SAFETY: pinned.
        let heat = |page| unsafe { self.find(page, &snapshot) }.and_then(|version| version.heat());
        let hottest = self.residency.hottest(self.node.cache.clock(), MAX_PAGES, heat);
        self.unpin(snapshot);
        hottest
    }

    /// The given pages that exist and are not in memory, grouped by reads.
    pub fn absent_runs(&self, pages: &[PageNo]) -> Vec<PageRun> {
        let snapshot = self.pin();
        let lies = |no: &PageNo| {
            // SAFETY: pinned.
            let version = unsafe { self.find(*no, &snapshot) }.filter(|version| !version.is_resident())?;
            let (segment, location) = self.pages.frame(version).ok()??;
            Some((segment, *no, location))
        };
        let mut absent: Vec<_> = pages.iter().filter(|no| **no != 0).filter_map(lies).collect();
        self.unpin(snapshot);
        absent.sort_unstable_by_key(|(segment, _, location)| (*segment, location.offset));
        let near = absent.chunk_by(|(in_a, _, a), (in_b, _, b)| in_a == in_b && readahead::are_near(a, b));
        let near = near.flat_map(|run| run.chunks(readahead::MAX_READAHEAD_PAGES as usize));
        let run = |near: &[(SegmentId, PageNo, FrameLocation)]| PageRun {
            segment: near[0].0,
            pages: near.iter().map(|(_, no, location)| (*no, *location)).collect(),
        };
        near.map(run).collect()
    }

    /// Fills the pages of a run, as long as memory is free. Returns true if all had room.
    pub fn fill_run(&self, run: &PageRun, bytes: &[u8]) -> bool {
        let memory = &self.node.memory;
        self.fill_run_with(run, bytes, || {
            let has_room = memory.reserve_spare(PAGE_SIZE as u64);
            has_room.then(|| Reservation::of(memory.clone(), PAGE_SIZE as u64))
        })
    }

    /// Fills the pages of a run, and evicts others if memory is full.
    pub async fn fill_run_evicting(&self, run: &PageRun, bytes: &[u8]) -> Result<()> {
        let mut room = self.node.room((run.pages.len() * PAGE_SIZE) as u64).await?;
        self.fill_run_with(run, bytes, || room.split(PAGE_SIZE as u64));
        Ok(())
    }

    /// Fills the pages of a run, as long as there is room. Returns true if all had room.
    ///
    /// A version gets the bytes only if its frame is still the one that was read. Then the bytes
    /// are its own, whatever was committed, flushed or merged since. A version that has moved stays
    /// absent.
    fn fill_run_with(
        &self,
        run: &PageRun,
        bytes: &[u8],
        mut room: impl FnMut() -> Option<Reservation>,
    ) -> bool {
        let snapshot = self.pin();
        let mut pages = run.pages.iter().zip(bytes.as_chunks::<PAGE_SIZE>().0);
        let all_have_room = pages.all(|((no, location), page)| {
            // SAFETY: pinned.
            let version = unsafe { self.find(*no, &snapshot) }.filter(|version| !version.is_resident());
            let lies_there = |frame| frame == Some((run.segment, *location));
            let Some(version) = version.filter(|version| self.pages.frame(version).is_ok_and(lies_there))
            else {
                return true;
            };
            let Some(room) = room() else { return false };
            version.mark_prefetched();
            self.arrived(*no, version, PageBytes::copy_of(page), room);
            self.stats.pages_warmed.fetch_add(1, Ordering::Relaxed);
            true
        });
        self.unpin(snapshot);
        all_have_room
    }
}

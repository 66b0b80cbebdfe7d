//! Read-ahead for scans: reads the next pages together with a missed one, in one request to the
//! store.
//!
//! ```text
//!  pages missed:      100    101     103                 107
//!  read with them:           102     104 105 106         108 ... 114
//! ```
//!
//! A table scan visits pages in the order in which they were created. Their numbers mostly ascend,
//! with gaps for the pages of other tables and for interior pages. A miss up to 4 pages behind the
//! last window counts as a continued scan, and doubles the window (at most 32 pages). Any other
//! miss starts with a window of 1.
//!
//! Of the window, those pages are read that the snapshot sees in the same segment, close to each
//! other: pages that are written together are in the order of their numbers. They are read only if
//! memory is free for all of them. Their first access is not counted, so a scan does not make the
//! pages hot that it reads once.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use fulmar_pages::{FrameLocation, PAGE_SIZE, PageNo, SegmentId};
use fulmar_sqlite::Result;
use fulmar_store::ReadHint;

use super::{PageVersion, Partition, Snapshot};
use crate::error::store_error_of;
use crate::memory::Reservation;
use crate::page_memory::PageBytes;

/// The maximum of pages per read.
pub(super) const MAX_READAHEAD_PAGES: u32 = 32;

/// Pages that a scan may skip between two misses.
const MAX_SKIPPED_PAGES: u32 = 4;

/// The maximum gap between two pages in a segment that is read and discarded, to save a request.
const MAX_GAP_BYTES: u64 = 16 << 10;

/// The sequential-read detector of one reader.
#[derive(Default)]
pub(crate) struct Readahead {
    /// The page behind the last window.
    next: Cell<PageNo>,
    pages: Cell<u32>,
}

impl Readahead {
    /// Records a miss. Returns how many pages to read, including the missed one.
    pub(crate) fn record_miss(&self, page: PageNo) -> u32 {
        let next = self.next.get();
        let is_sequential = page >= next && page - next <= MAX_SKIPPED_PAGES && next > 0;
        let pages = if is_sequential { (2 * self.pages.get()).min(MAX_READAHEAD_PAGES) } else { 1 };
        self.pages.set(pages);
        self.next.set(page.saturating_add(pages));
        pages
    }
}

/// An absent version, and its position in its segment.
pub(super) type AbsentPage<'a> = (PageNo, &'a PageVersion, FrameLocation);

/// Returns true if one request should read both positions. The second one is behind the first.
pub(super) fn are_near(a: &FrameLocation, b: &FrameLocation) -> bool {
    b.offset.saturating_sub(a.offset + u64::from(a.length)) <= MAX_GAP_BYTES
}

impl Partition {
    /// The pages among the next `pages` that can be read together with the one at `location`, in
    /// their order in the segment. That page is included. The caller has pinned the snapshot.
    pub(super) fn readahead_candidates<'a>(
        &'a self,
        (segment, first): (SegmentId, AbsentPage<'a>),
        pages: u32,
        snapshot: &Snapshot,
    ) -> Result<Vec<AbsentPage<'a>>> {
        let mut near = vec![first];
        for no in first.0.saturating_add(1)..first.0.saturating_add(pages) {
            // SAFETY: pinned by the caller.
            let Some(version) = (unsafe { self.find(no, snapshot) }) else { continue };
            match self.pages.frame(version)? {
                Some((other, location)) if other == segment && !version.is_resident() => {
                    near.push((no, version, location));
                }
                _ => {}
            }
        }
        near.sort_unstable_by_key(|(_, _, location)| location.offset);
        let mut runs = near.chunk_by(|(_, _, a), (_, _, b)| are_near(a, b));
        let run = runs.find(|run| run.iter().any(|(no, _, _)| *no == first.0));
        Ok(run.map_or_else(|| vec![first], <[_]>::to_vec))
    }

    /// Reads pages that are close to each other into memory. Fails if memory for all of them is not
    /// available immediately.
    pub(super) async fn read_near(&self, segment: SegmentId, near: &[AbsentPage<'_>]) -> Result<()> {
        let memory = &self.node.memory;
        if !memory.reserve((near.len() * PAGE_SIZE) as u64) {
            return Err(memory.exhausted());
        }
        let rooms: Vec<_> = near.iter().map(|_| Reservation::of(memory.clone(), PAGE_SIZE as u64)).collect();
        let locations: Vec<_> = near.iter().map(|(_, _, location)| *location).collect();
        let mut bytes = Vec::with_capacity(near.len() * PAGE_SIZE);
        self.node
            .store
            .read_pages(segment, &locations, ReadHint::WillReuse, &mut bytes)
            .await
            .map_err(|error| store_error_of(self.id, error))?;
        let pages = bytes.as_chunks::<PAGE_SIZE>().0;
        for (((no, version, _), page), room) in near.iter().zip(pages).zip(rooms) {
            version.mark_prefetched();
            self.arrived(*no, version, PageBytes::copy_of(page), room);
        }
        self.stats.pages_read_ahead.fetch_add(near.len() as u64 - 1, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_doubles_during_a_sequential_scan() {
        let ahead = Readahead::default();
        let windows =
            [100, 101, 103, 109, 117, 140, 175, 210, 90, 91, 5000].map(|page| ahead.record_miss(page));
        assert_eq!(windows, [1, 2, 4, 8, 16, 1, 1, 1, 1, 2, 1]);
        let mut page = 7;
        for _ in 0..10 {
            page += ahead.record_miss(page);
        }
        assert_eq!(ahead.record_miss(page), MAX_READAHEAD_PAGES);
        assert_eq!(ahead.record_miss(PageNo::MAX), 1);
    }
}

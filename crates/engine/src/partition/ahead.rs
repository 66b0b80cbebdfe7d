//! Read-ahead: what a scan will want next is read with what it wants now, by one request to the store.
//!
//! ```text
//!  page wanted:   100    101     103                 106                            (a miss each)
//!  read with it:         102     104 105 106 ->      no miss: 107 ... 114, with 107
//! ```
//!
//! A scan of a table visits its pages in the order in which they were made, so their numbers ascend, more or less: other
//! tables' pages, and interior ones, lie between. A miss a little above what the last one has brought counts as the scan going
//! on, and the window doubles; any other one as the beginning of something else.
//!
//! Of the pages of the window those are read that the snapshot sees in the same segment, near each other: pages that are
//! written together lie in the order of their numbers. They only come along where memory is free for them, and that they
//! are wanted then is not counted as a touch: else a scan would make hot what it reads once.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use fulmar_pages::{FrameLocation, PAGE_SIZE, PageNo, SegmentId};
use fulmar_store::Reading;

use super::{PageVersion, Partition, Snapshot, store_error_of};
use crate::Result;
use crate::memory::Reservation;
use crate::page_memory::PageBytes;

/// Pages that are read at once, at most.
pub(super) const MOST_PAGES: u32 = 32;

/// Pages that a scan may pass over.
const SLACK_PAGES: u32 = 4;

/// Bytes between two pages of a segment that are read for nothing, at most, rather than by a request of their own.
const GAP_BYTES: u64 = 16 << 10;

/// What one reader missed last.
#[derive(Default)]
pub(crate) struct Ahead {
    /// The page after those that came with it.
    next: Cell<PageNo>,
    pages: Cell<u32>,
}

impl Ahead {
    /// A page is missed: how many are to be read, with it and after it.
    pub(crate) fn missed(&self, page: PageNo) -> u32 {
        let next = self.next.get();
        let goes_on = page >= next && page - next <= SLACK_PAGES && next > 0;
        let pages = if goes_on { (2 * self.pages.get()).min(MOST_PAGES) } else { 1 };
        self.pages.set(pages);
        self.next.set(page.saturating_add(pages));
        pages
    }
}

/// A version that is absent, and where it lies in its segment.
pub(super) type Near<'a> = (PageNo, &'a PageVersion, FrameLocation);

/// Whether two places of a segment, the second behind the first, are read by one request.
pub(super) fn are_near(a: &FrameLocation, b: &FrameLocation) -> bool {
    b.offset.saturating_sub(a.offset + u64::from(a.length)) <= GAP_BYTES
}

impl Partition {
    /// Of the next `pages` after one that lies at `location` those that can be read with it, in the order in which they lie;
    /// the page itself is among them. The caller has pinned the snapshot.
    pub(super) fn near<'a>(
        &'a self,
        (segment, first): (SegmentId, Near<'a>),
        pages: u32,
        snapshot: &Snapshot,
    ) -> Result<Vec<Near<'a>>> {
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

    /// Reads pages that lie near each other, and puts them into memory, if there is room for them at once.
    pub(super) async fn read_near(&self, segment: SegmentId, near: &[Near<'_>]) -> Result<()> {
        let memory = &self.node.memory;
        if !memory.reserve((near.len() * PAGE_SIZE) as u64) {
            return Err(memory.exhausted());
        }
        let rooms: Vec<_> = near.iter().map(|_| Reservation::of(memory.clone(), PAGE_SIZE as u64)).collect();
        let locations: Vec<_> = near.iter().map(|(_, _, location)| *location).collect();
        let mut bytes = Vec::with_capacity(near.len() * PAGE_SIZE);
        self.node
            .store
            .read_pages(segment, &locations, Reading::Again, &mut bytes)
            .await
            .map_err(|error| store_error_of(self.id, error))?;
        let pages = bytes.as_chunks::<PAGE_SIZE>().0;
        for (((no, version, _), page), room) in near.iter().zip(pages).zip(rooms) {
            version.comes_along();
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
    fn a_window_grows_while_a_scan_goes_on() {
        let ahead = Ahead::default();
        let windows = [100, 101, 103, 109, 117, 140, 175, 210, 90, 91, 5000].map(|page| ahead.missed(page));
        assert_eq!(windows, [1, 2, 4, 8, 16, 1, 1, 1, 1, 2, 1]);
        let mut page = 7;
        for _ in 0..10 {
            page += ahead.missed(page);
        }
        assert_eq!(ahead.missed(page), MOST_PAGES);
        assert_eq!(ahead.missed(PageNo::MAX), 1);
    }
}

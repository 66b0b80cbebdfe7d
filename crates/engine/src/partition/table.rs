//! The versioned pages of one partition: for each page a chain of versions, newest first.
//!
//! ```text
//!  slot of page 7 -> [version 12] -> [version 9] -> [version 3] -> end
//!                         ^               ^
//!        reader at 12..---'               '--- reader at snapshot 10
//! ```
//!
//! Readers take no lock. What makes that safe:
//! - Versions are only put in front, under the partition's commit lock, before the version becomes current.
//! - A chain is only cut *behind* the first version that the oldest pinned snapshot sees (or, if none is pinned, the
//!   current one). A reader stops at the first version at or below its own snapshot, and its snapshot is at or above
//!   the oldest: it never looks behind the cut, and what it has found is not freed while its snapshot is pinned.
//! - Slots live in buckets of doubling size that never move.
//!
//! A version may be *absent*: its bytes lie in a segment of the store ([`Frame`]) and are read on first touch.
//! One with neither bytes nor frame is an *end*: the page was cut off, and does not exist until a newer version.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use fulmar_pages::{PAGE_SIZE, Page, PageNo};

use crate::store::Frame;

/// Slots in the first bucket; every next one is twice as large.
const FIRST_BUCKET: usize = 64;
/// Enough for 2^32 pages.
const BUCKETS: usize = 27;

/// One version of one page.
pub(crate) struct PageVersion {
    number: u64,
    older: AtomicPtr<PageVersion>,
    /// Null while the bytes are in the store only.
    data: AtomicPtr<Page>,
    frame: Option<Frame>,
}

impl PageVersion {
    /// The page's bytes, if they are in memory.
    pub(crate) fn data(&self) -> Option<&Page> {
        // SAFETY: once set, the pointer stays valid as long as the version does.
        unsafe { self.data.load(Ordering::Acquire).as_ref() }
    }

    /// Whether the page was cut off the partition's end: from here on it does not exist, until a newer version.
    fn is_end(&self) -> bool {
        self.frame.is_none() && self.data.load(Ordering::Acquire).is_null()
    }

    /// Where the bytes are in the store, if they are there.
    pub(crate) fn frame(&self) -> Option<Frame> {
        self.frame
    }

    /// The number of the commit that made this version.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Puts in the bytes that were read from the store; answers whether they were the first to arrive.
    pub(crate) fn fill(&self, page: Box<Page>) -> bool {
        let page = Box::into_raw(page);
        let filled =
            self.data.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !filled {
            // SAFETY: it was not published.
            drop(unsafe { Box::from_raw(page) });
        }
        filled
    }
}

impl Drop for PageVersion {
    fn drop(&mut self) {
        let data = *self.data.get_mut();
        if !data.is_null() {
            // SAFETY: the version owns its bytes.
            drop(unsafe { Box::from_raw(data) });
        }
    }
}

/// All pages of a partition.
pub(crate) struct PageTable {
    buckets: [AtomicPtr<AtomicPtr<PageVersion>>; BUCKETS],
    /// Bytes of page data in memory, all versions together.
    resident_bytes: AtomicU64,
}

fn locate(page: PageNo) -> (usize, usize) {
    let index = page as usize - 1 + FIRST_BUCKET;
    let bucket = index.ilog2() as usize - FIRST_BUCKET.ilog2() as usize;
    (bucket, index - (FIRST_BUCKET << bucket))
}

impl PageTable {
    pub(crate) fn new() -> Self {
        PageTable {
            buckets: [const { AtomicPtr::new(ptr::null_mut()) }; BUCKETS],
            resident_bytes: AtomicU64::new(0),
        }
    }

    fn slot(&self, page: PageNo) -> Option<&AtomicPtr<PageVersion>> {
        let (bucket, offset) = locate(page);
        let slots = self.buckets[bucket].load(Ordering::Acquire);
        // SAFETY: a bucket, once there, holds `FIRST_BUCKET << bucket` slots and stays until the table is dropped.
        (!slots.is_null()).then(|| unsafe { &*slots.add(offset) })
    }

    /// The slot of a page, made if need be. Callers hold the commit lock.
    fn slot_or_new(&self, page: PageNo) -> &AtomicPtr<PageVersion> {
        let (bucket, offset) = locate(page);
        let mut slots = self.buckets[bucket].load(Ordering::Acquire);
        if slots.is_null() {
            let fresh: Box<[AtomicPtr<PageVersion>]> =
                (0..FIRST_BUCKET << bucket).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
            slots = Box::into_raw(fresh).cast();
            self.buckets[bucket].store(slots, Ordering::Release);
        }
        // SAFETY: as in `slot`.
        unsafe { &*slots.add(offset) }
    }

    /// The newest version of a page at or below `snapshot`.
    ///
    /// # Safety
    /// The caller holds a pin on `snapshot` (or the commit lock) for as long as it uses the answer.
    pub(crate) unsafe fn find(&self, page: PageNo, snapshot: u64) -> Option<&PageVersion> {
        let mut version = self.slot(page)?.load(Ordering::Acquire);
        loop {
            // SAFETY: the module's argument: nothing at or before the first visible version is freed under a pin.
            let found = unsafe { version.as_ref() }?;
            if found.number <= snapshot {
                return (!found.is_end()).then_some(found);
            }
            version = found.older.load(Ordering::Acquire);
        }
    }

    /// The number of the newest version of a page; 0 if it has none. Callers hold the commit lock or a pin.
    pub(crate) fn newest_number(&self, page: PageNo) -> u64 {
        let Some(slot) = self.slot(page) else { return 0 };
        // SAFETY: the newest version is never freed while a pin or the commit lock is held.
        unsafe { slot.load(Ordering::Acquire).as_ref() }.map_or(0, |version| version.number)
    }

    /// Puts a version in front. Callers hold the commit lock. Answers whether it covers one whose bytes are in memory.
    pub(crate) fn install(
        &self,
        page: PageNo,
        number: u64,
        data: Option<Box<Page>>,
        frame: Option<Frame>,
    ) -> bool {
        let slot = self.slot_or_new(page);
        if data.is_some() {
            self.resident_bytes.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
        }
        let older = slot.load(Ordering::Relaxed);
        // SAFETY: the newest version is not freed while the commit lock is held.
        let covers = unsafe { older.as_ref() }.is_some_and(|older| older.data().is_some());
        let version = PageVersion {
            number,
            older: AtomicPtr::new(older),
            data: AtomicPtr::new(data.map_or(ptr::null_mut(), Box::into_raw)),
            frame,
        };
        slot.store(Box::into_raw(Box::new(version)), Ordering::Release);
        covers
    }

    /// Ends the chain of a page that is cut off the partition's end. Else the page would show its old bytes once the
    /// partition has grown again over it, until somebody writes it (SQLite does not write a page that is allocated and
    /// freed by one transaction). Callers hold the commit lock.
    pub(crate) fn end(&self, page: PageNo, number: u64) {
        if self.newest_number(page) != 0 {
            self.install(page, number, None, None);
        }
    }

    /// Notes that an absent version's bytes have come to memory.
    pub(crate) fn filled(&self) {
        self.resident_bytes.fetch_add(PAGE_SIZE as u64, Ordering::Relaxed);
    }

    /// Frees the versions of a page that nobody at or above `oldest` can see. Callers hold the commit lock.
    /// Answers the bytes freed.
    pub(crate) fn prune(&self, page: PageNo, oldest: u64) -> u64 {
        let Some(slot) = self.slot(page) else { return 0 };
        let mut version = slot.load(Ordering::Acquire);
        // SAFETY: only the commit lock's holder frees versions, and that is the caller.
        while let Some(kept) = unsafe { version.as_ref() } {
            if kept.number <= oldest {
                let cut = kept.older.swap(ptr::null_mut(), Ordering::AcqRel);
                return self.free_chain(cut);
            }
            version = kept.older.load(Ordering::Acquire);
        }
        0
    }

    /// Frees all versions of a page that was cut off the partition's end by version `number`, unless it has come back
    /// since. Readers at or above `number` do not look for it. Callers hold the commit lock. Answers the bytes freed.
    pub(crate) fn remove(&self, page: PageNo, number: u64) -> u64 {
        if self.newest_number(page) > number {
            return 0;
        }
        self.slot(page).map_or(0, |slot| self.free_chain(slot.swap(ptr::null_mut(), Ordering::AcqRel)))
    }

    /// Takes the versions above `number` off a page's chain: their commits have been discarded. They are handed to
    /// the caller, who keeps them until no reader can hold them. Callers hold the commit lock.
    #[expect(clippy::vec_box, reason = "readers may hold pointers to the versions")]
    pub(crate) fn discard_above(&self, page: PageNo, number: u64, graveyard: &mut Vec<Box<PageVersion>>) {
        let Some(slot) = self.slot(page) else { return };
        let mut version = slot.load(Ordering::Acquire);
        // SAFETY: as in `prune`; the versions taken off are kept alive in the graveyard.
        while let Some(taken) = unsafe { version.as_ref() } {
            if taken.number <= number {
                break;
            }
            let older = taken.older.load(Ordering::Acquire);
            slot.store(older, Ordering::Release);
            // SAFETY: it came from `Box::into_raw` in `install` and is off the chain.
            graveyard.push(unsafe { Box::from_raw(version) });
            version = older;
        }
    }

    /// Bytes of page data in memory.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes.load(Ordering::Relaxed)
    }

    /// Forgets the bytes of versions that a caller frees itself.
    pub(crate) fn released(&self, bytes: u64) {
        self.resident_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn free_chain(&self, mut version: *mut PageVersion) -> u64 {
        let mut freed = 0;
        while !version.is_null() {
            // SAFETY: the chain behind a cut belongs to the caller.
            let mut boxed = unsafe { Box::from_raw(version) };
            version = *boxed.older.get_mut();
            if !boxed.data.get_mut().is_null() {
                freed += PAGE_SIZE as u64;
            }
        }
        self.resident_bytes.fetch_sub(freed, Ordering::Relaxed);
        freed
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        for bucket in 0..BUCKETS {
            let slots = *self.buckets[bucket].get_mut();
            if slots.is_null() {
                continue;
            }
            for offset in 0..FIRST_BUCKET << bucket {
                // SAFETY: see `slot`; nobody else is left.
                let version = unsafe { *(*slots.add(offset)).get_mut() };
                self.free_chain(version);
            }
            // SAFETY: it was made from a boxed slice of that length.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(slots, FIRST_BUCKET << bucket)) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locates_every_page_once() {
        let mut seen = std::collections::HashSet::new();
        for page in 1..5000 {
            let (bucket, offset) = locate(page);
            assert!(offset < FIRST_BUCKET << bucket);
            assert!(seen.insert((bucket, offset)));
        }
        assert!(locate(u32::MAX).0 < BUCKETS);
    }

    #[test]
    fn readers_see_their_snapshot_and_pruning_keeps_what_they_see() {
        let table = PageTable::new();
        for number in [3, 9, 12] {
            table.install(7, number, Some(Box::new([number as u8; PAGE_SIZE])), None);
        }
        // SAFETY: one thread; nothing is pruned while the answers are used.
        let at = |snapshot| unsafe { table.find(7, snapshot) }.map(|v| v.data().unwrap()[0]);
        assert_eq!([at(2), at(3), at(10), at(12), at(99)], [None, Some(3), Some(9), Some(12), Some(12)]);
        assert_eq!(table.newest_number(7), 12);
        assert_eq!(table.prune(7, 10), PAGE_SIZE as u64);
        assert_eq!([at(3), at(10), at(12)], [None, Some(9), Some(12)]);
        assert_eq!(table.resident_bytes(), 2 * PAGE_SIZE as u64);
        let mut graveyard = Vec::new();
        table.discard_above(7, 9, &mut graveyard);
        assert_eq!((graveyard.len(), at(99)), (1, Some(9)));
    }
}

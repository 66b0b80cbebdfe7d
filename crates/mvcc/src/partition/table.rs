//! The multi-version page table of one partition: for each page a chain of versions, newest first.
//!
//! ```text
//!  slot of page 7 -> [version 12] -> [version 9] -> [version 3] -> end
//!                         ^               ^
//!        reader at 12..---'               '--- reader at snapshot 10
//! ```
//!
//! Readers take no lock. This is safe for versions because:
//!
//! - Versions are only added at the front, under the partition's commit lock, before the version
//!   becomes current.
//! - A chain is only cut *behind* the first version that the oldest pinned snapshot sees (or the
//!   current version, if none is pinned). A reader stops at the first version at or below its own
//!   snapshot, which is at or above the oldest one. So it never reads behind the cut, and the
//!   version that it has found is not freed while its snapshot is pinned.
//! - Slots are in buckets of doubling size that never move.
//!
//! A version's bytes can be evicted before the version is freed:
//!
//! - An *absent* version has no bytes in memory. They are in a segment of the store ([`Frame`]) and
//!   are read on the next access.
//! - A version with a known frame may be evicted; [`super::buffer_residency`] makes that safe for
//!   readers.
//! - A version without a frame stays in memory until a flush has written it. Page 1 always stays.
//! - An *end marker* has neither bytes nor a frame: the page was cut off, and does not exist until
//!   a newer version. It is freed when the page is written, or when no version from it on covers
//!   the page.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use fulmar_pages::{FrameLocation, PageNo, SegmentId};
use fulmar_sqlite::Result;
use parking_lot::Mutex;

use super::version::{PageVersion, Taken};
use crate::memory::{Account, Tally};
use crate::page_memory::PageBytes;
use crate::store::{Frame, Segments};

/// Slots in the first bucket. Each further bucket is twice as large as the one before.
const FIRST_BUCKET: usize = 64;
/// Enough for 2^32 pages.
const BUCKETS: usize = 27;

/// The result of an attempt to evict a page.
pub(super) enum Evicted<'a> {
    /// This version was accessed this many times since the last check, more often than any other
    /// version of the page.
    Touched(u8, &'a PageVersion),
    /// No evictable version of the page is in memory any more.
    Out,
}

/// All pages of a partition.
pub(crate) struct PageTable {
    buckets: [AtomicPtr<AtomicPtr<PageVersion>>; BUCKETS],
    segments: Segments,
    /// Held while a frame is read or changed: its fields belong together.
    frame_lock: Mutex<()>,
    account: Arc<Account>,
}

fn locate(page: PageNo) -> (usize, usize) {
    let index = page as usize - 1 + FIRST_BUCKET;
    let bucket = index.ilog2() as usize - FIRST_BUCKET.ilog2() as usize;
    (bucket, index - (FIRST_BUCKET << bucket))
}

impl PageTable {
    pub(crate) fn new(account: Arc<Account>) -> Self {
        PageTable {
            buckets: [const { AtomicPtr::new(ptr::null_mut()) }; BUCKETS],
            segments: Segments::default(),
            frame_lock: Mutex::default(),
            account,
        }
    }

    /// The segments that its frames are in.
    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    fn slot(&self, page: PageNo) -> Option<&AtomicPtr<PageVersion>> {
        let (bucket, offset) = locate(page);
        let slots = self.buckets[bucket].load(Ordering::Acquire);
        // SAFETY: a bucket, once created, has `FIRST_BUCKET << bucket` slots and exists until the
        // table is dropped.
        (!slots.is_null()).then(|| unsafe { &*slots.add(offset) })
    }

    /// The slot of a page, created if necessary. Callers hold the commit lock.
    fn slot_or_new(&self, page: PageNo, tally: &mut Tally) -> &AtomicPtr<PageVersion> {
        let (bucket, offset) = locate(page);
        let mut slots = self.buckets[bucket].load(Ordering::Acquire);
        if slots.is_null() {
            let fresh: Box<[AtomicPtr<PageVersion>]> =
                (0..FIRST_BUCKET << bucket).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
            tally.bytes += size_of_val(&*fresh) as i64;
            slots = Box::into_raw(fresh).cast();
            self.buckets[bucket].store(slots, Ordering::Release);
        }
        // SAFETY: as in `slot`.
        unsafe { &*slots.add(offset) }
    }

    /// The newest version of a page at or below `snapshot`.
    ///
    /// # Safety
    /// The caller holds a pin on `snapshot` (or the commit lock) for as long as it uses the result.
    pub(crate) unsafe fn find(&self, page: PageNo, snapshot: u64) -> Option<&PageVersion> {
        // SAFETY: the caller's contract.
        unsafe { self.find_any(page, snapshot) }.filter(|found| !found.is_end())
    }

    /// As [`PageTable::find`], but also returns an end marker.
    ///
    /// # Safety
    /// As [`PageTable::find`].
    pub(super) unsafe fn find_any(&self, page: PageNo, snapshot: u64) -> Option<&PageVersion> {
        let mut version = self.slot(page)?.load(Ordering::Acquire);
        loop {
            // SAFETY: see the module's argument: no version up to the first visible one is freed
            // under a pin.
            let found = unsafe { version.as_ref() }?;
            if found.number() <= snapshot {
                return Some(found);
            }
            version = found.older.load(Ordering::Acquire);
        }
    }

    /// The number of the newest version of a page; 0 if it has none. Callers hold the commit lock
    /// or a pin.
    pub(crate) fn newest_number(&self, page: PageNo) -> u64 {
        let Some(slot) = self.slot(page) else { return 0 };
        // SAFETY: the newest version is never freed while a pin or the commit lock is held.
        unsafe { slot.load(Ordering::Acquire).as_ref() }.map_or(0, PageVersion::number)
    }

    /// Adds a version at the front of the chain. Returns true if the bytes of the version behind it
    /// are in memory. Callers hold the commit lock.
    pub(crate) fn install(
        &self,
        page: PageNo,
        number: u64,
        data: Option<PageBytes>,
        frame: Option<Frame>,
        tally: &mut Tally,
    ) -> bool {
        let slot = self.slot_or_new(page, tally);
        let older = slot.load(Ordering::Relaxed);
        // SAFETY: the newest version is not freed while the commit lock is held.
        let covers = unsafe { older.as_ref() }.is_some_and(PageVersion::is_resident);
        let version = PageVersion::new(number, older, data, frame);
        if let Some(frame) = frame {
            self.segments.acquire(frame.segment);
        }
        tally.bytes += version.tally().bytes;
        tally.unwritten_bytes += version.tally().unwritten_bytes;
        slot.store(Box::into_raw(Box::new(version)), Ordering::Release);
        covers
    }

    /// Adds an end marker for a page that is cut off the partition's end. Without it, the page
    /// would show its old bytes once the partition has grown over it again, until it is written:
    /// SQLite does not write a page that one transaction allocates and frees. Callers hold the
    /// commit lock.
    pub(crate) fn install_end_marker(&self, page: PageNo, number: u64, tally: &mut Tally) {
        if self.newest_number(page) != 0 {
            self.install(page, number, None, None, tally);
        }
    }

    /// The position of a version's bytes in the store; `None` if they are not there. The caller
    /// holds a pin that sees the version, or the commit lock.
    pub(crate) fn frame(&self, version: &PageVersion) -> Result<Option<(SegmentId, FrameLocation)>> {
        let _guard = self.frame_lock.lock();
        let Some(Frame { segment, location }) = version.frame() else { return Ok(None) };
        Ok(Some((self.segments.known(segment)?, location)))
    }

    /// Records that the version's bytes are in this frame. The caller holds a pin that sees the
    /// version.
    pub(crate) fn set_frame(&self, version: &PageVersion, frame: Frame, tally: &mut Tally) {
        let _guard = self.frame_lock.lock();
        match version.segment() {
            Some(segment) => self.segments.release(segment),
            // Its bytes are counted as unwritten: a version without a frame is not evicted.
            None => tally.unwritten_bytes -= version.tally().unwritten_bytes,
        }
        self.segments.acquire(frame.segment);
        version.set_frame(frame);
    }

    /// As [`PageTable::set_frame`]. Returns true if the frame was not known before.
    pub(crate) fn set_frame_if_new(&self, version: &PageVersion, frame: Frame, tally: &mut Tally) -> bool {
        let is_new = {
            let _guard = self.frame_lock.lock();
            version.frame() != Some(frame)
        };
        if is_new {
            self.set_frame(version, frame, tally);
        }
        is_new
    }

    /// Moves a version from one frame to another one with the same bytes, unless it has left `from`
    /// meanwhile. The caller holds a pin that sees the version.
    pub(crate) fn move_frame(&self, version: &PageVersion, from: Frame, to: Frame) {
        let _guard = self.frame_lock.lock();
        if version.frame() == Some(from) {
            self.segments.release(from.segment);
            self.segments.acquire(to.segment);
            version.set_frame(to);
        }
    }

    /// Evicts the bytes of a page's versions that are in the store, except those accessed since the
    /// last call. Callers hold the commit lock.
    pub(super) fn evict(&self, page: PageNo, taken: &mut Vec<Taken>) -> Evicted<'_> {
        let Some(slot) = self.slot(page) else { return Evicted::Out };
        let mut version = slot.load(Ordering::Acquire);
        let mut hottest = Evicted::Out;
        // SAFETY: only the commit lock's holder frees versions, and that is the caller.
        while let Some(candidate) = unsafe { version.as_ref() } {
            if candidate.segment().is_some() && candidate.is_resident() {
                match candidate.take_heat() {
                    0 => taken.extend(candidate.take()),
                    touched if matches!(hottest, Evicted::Touched(heat, _) if heat >= touched) => {}
                    touched => hottest = Evicted::Touched(touched, candidate),
                }
            }
            version = candidate.older.load(Ordering::Acquire);
        }
        hottest
    }

    /// Frees the versions of a page that no snapshot at or above `oldest` can see. Callers hold the
    /// commit lock.
    pub(crate) fn prune(&self, page: PageNo, oldest: u64, tally: &mut Tally) {
        let Some(slot) = self.slot(page) else { return };
        let mut version = slot.load(Ordering::Acquire);
        // SAFETY: only the commit lock's holder frees versions, and that is the caller.
        while let Some(kept) = unsafe { version.as_ref() } {
            if kept.number() <= oldest {
                return self.free_chain(kept.older.swap(ptr::null_mut(), Ordering::AcqRel), tally);
            }
            version = kept.older.load(Ordering::Acquire);
        }
    }

    /// Frees all versions of a page that version `number` cut off the partition's end, unless the
    /// page has been written since. The current version must not cover the page: then no reader at
    /// or above `number` looks it up. Callers hold the commit lock.
    pub(crate) fn remove(&self, page: PageNo, number: u64, tally: &mut Tally) {
        if self.newest_number(page) > number {
            return;
        }
        if let Some(slot) = self.slot(page) {
            self.free_chain(slot.swap(ptr::null_mut(), Ordering::AcqRel), tally);
        }
    }

    /// Removes the versions above `number` from a page's chain: their commits have been discarded.
    /// The caller keeps them until no reader can hold a pointer to them. Callers hold the commit
    /// lock.
    #[expect(clippy::vec_box, reason = "readers may hold pointers to the versions")]
    pub(crate) fn discard_above(&self, page: PageNo, number: u64, graveyard: &mut Vec<Box<PageVersion>>) {
        let Some(slot) = self.slot(page) else { return };
        let mut version = slot.load(Ordering::Acquire);
        // SAFETY: as in `prune`; the removed versions are kept alive in the graveyard.
        while let Some(taken) = unsafe { version.as_ref() } {
            if taken.number() <= number {
                break;
            }
            let older = taken.older.load(Ordering::Acquire);
            slot.store(older, Ordering::Release);
            // SAFETY: it came from `Box::into_raw` in `install` and is off the chain.
            graveyard.push(unsafe { Box::from_raw(version) });
            version = older;
        }
    }

    /// Frees a version that is off its chain and that no reader holds.
    pub(crate) fn free(&self, version: PageVersion, tally: &mut Tally) {
        let gone = version.tally();
        tally.bytes -= gone.bytes;
        tally.unwritten_bytes -= gone.unwritten_bytes;
        if let Some(segment) = version.segment() {
            self.segments.release(segment);
        }
    }

    fn free_chain(&self, mut version: *mut PageVersion, tally: &mut Tally) {
        while !version.is_null() {
            // SAFETY: the chain behind a cut belongs to the caller.
            let mut gone = *unsafe { Box::from_raw(version) };
            version = *gone.older.get_mut();
            self.free(gone, tally);
        }
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
                // SAFETY: see `slot`; `&mut self` excludes all other users.
                let version = unsafe { *(*slots.add(offset)).get_mut() };
                // The account releases its bytes when it is dropped.
                self.free_chain(version, &mut Tally::default());
            }
            // SAFETY: it was made from a boxed slice of that length.
            drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(slots, FIRST_BUCKET << bucket)) });
        }
    }
}

#[cfg(test)]
mod tests {
    use fulmar_pages::PAGE_SIZE;

    use super::super::version::{PAGE_BYTES, VERSION_BYTES};
    use super::*;
    use crate::memory::MemoryBudget;

    fn table() -> PageTable {
        PageTable::new(Account::new(MemoryBudget::new(1 << 30)))
    }

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
    fn readers_see_their_snapshot_and_pruning_keeps_visible_versions() {
        let table = table();
        let mut tally = Tally::default();
        for number in [3, 9, 12] {
            table.install(7, number, Some(PageBytes::copy_of(&[number as u8; PAGE_SIZE])), None, &mut tally);
        }
        // SAFETY: single-threaded; nothing is pruned or evicted while the results are used.
        let at = |snapshot| unsafe { table.find(7, snapshot).map(|v| v.data().unwrap()[0]) };
        assert_eq!([at(2), at(3), at(10), at(12), at(99)], [None, Some(3), Some(9), Some(12), Some(12)]);
        assert_eq!(table.newest_number(7), 12);
        let mut pruned = Tally::default();
        table.prune(7, 10, &mut pruned);
        let one = Tally { bytes: -PAGE_BYTES - VERSION_BYTES, unwritten_bytes: -PAGE_BYTES };
        assert_eq!(pruned, one);
        assert_eq!([at(3), at(10), at(12)], [None, Some(9), Some(12)]);
        let mut graveyard = Vec::new();
        table.discard_above(7, 9, &mut graveyard);
        assert_eq!((graveyard.len(), at(99)), (1, Some(9)));
    }

    #[test]
    fn evicts_only_untouched_versions_that_are_in_the_store() {
        let table = table();
        let mut tally = Tally::default();
        table.install(7, 1, Some(PageBytes::copy_of(&[1; PAGE_SIZE])), None, &mut tally);
        // SAFETY: single-threaded.
        let version = unsafe { table.find(7, 1) }.unwrap();
        let mut taken = Vec::new();
        assert!(matches!(table.evict(7, &mut taken), Evicted::Out) && taken.is_empty());

        let segment = table.segments().index_of(SegmentId(5));
        let frame = Frame { segment, location: FrameLocation { offset: 9, length: 77 } };
        table.set_frame(version, frame, &mut tally);
        assert_eq!(tally.unwritten_bytes, 0);
        assert_eq!(table.frame(version).unwrap(), Some((SegmentId(5), frame.location)));
        version.touch();
        assert!(matches!(table.evict(7, &mut taken), Evicted::Touched(1, _)) && taken.is_empty());
        assert!(matches!(table.evict(7, &mut taken), Evicted::Out) && taken.len() == 1);
        assert!(!version.is_resident() && version.fill(PageBytes::copy_of(&[1; PAGE_SIZE])));

        // Once the version has moved, and again once it is removed, the old segment is no longer in
        // use.
        let moved = table.segments().index_of(SegmentId(6));
        table.set_frame(version, Frame { segment: moved, ..frame }, &mut tally);
        assert_eq!(table.segments().in_use(), [SegmentId(6)]);
        table.remove(7, 1, &mut tally);
        assert_eq!(table.segments().in_use(), []);
    }
}

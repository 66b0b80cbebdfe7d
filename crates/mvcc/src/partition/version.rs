//! One version of one page: its number, its bytes if they are in memory, and its position in the
//! store.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use fulmar_pages::{FrameLocation, PAGE_SIZE, Page};

use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::store::Frame;

/// Memory of a version in addition to its bytes.
pub(super) const VERSION_BYTES: i64 = size_of::<PageVersion>() as i64;
pub(super) const PAGE_BYTES: i64 = PAGE_SIZE as i64;

/// The frame is not known.
const NO_SEGMENT: u32 = u32::MAX;

/// The maximum of the access counter.
pub(super) const MAX_HEAT: u8 = 7;

/// It was prefetched and has not been accessed since. The first access is not counted.
const PREFETCHED: u8 = u8::MAX;

/// One version of one page.
pub(crate) struct PageVersion {
    number: u64,
    pub(super) older: AtomicPtr<PageVersion>,
    /// Null while the bytes are in the store only.
    data: AtomicPtr<Page>,
    // The frame. Once known, it changes only to another copy of the same bytes. Callers that read
    // or write all three fields hold the page table's lock.
    offset: AtomicU64,
    segment: AtomicU32,
    length: AtomicU16,
    /// Accesses since it arrived, or since eviction last checked it.
    heat: AtomicU8,
    is_end: bool,
}

impl PageVersion {
    pub(super) fn new(
        number: u64,
        older: *mut PageVersion,
        data: Option<PageBytes>,
        frame: Option<Frame>,
    ) -> Self {
        let location = frame.map_or(FrameLocation { offset: 0, length: 0 }, |frame| frame.location);
        PageVersion {
            number,
            older: AtomicPtr::new(older),
            is_end: data.is_none() && frame.is_none(),
            data: AtomicPtr::new(data.map_or(ptr::null_mut(), PageBytes::into_raw)),
            offset: AtomicU64::new(location.offset),
            segment: AtomicU32::new(frame.map_or(NO_SEGMENT, |frame| frame.segment)),
            length: AtomicU16::new(location.length as u16),
            heat: AtomicU8::new(0),
        }
    }

    /// The number of the commit that made this version.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns true if the page was cut off the partition's end: it does not exist until a newer
    /// version.
    pub(super) fn is_end(&self) -> bool {
        self.is_end
    }

    /// The page's bytes, if they are in memory.
    ///
    /// # Safety
    /// While the result is used, the caller is inside the partition's [`super::buffer_residency`],
    /// or holds its lock; or the page is page 1.
    pub(crate) unsafe fn data(&self) -> Option<&Page> {
        // SAFETY: bytes that are evicted are kept for readers inside.
        unsafe { self.data.load(Ordering::Acquire).as_ref() }
    }

    /// Returns true if the bytes are in memory at this moment.
    pub(crate) fn is_resident(&self) -> bool {
        !self.data.load(Ordering::Relaxed).is_null()
    }

    /// Adds the bytes that were read from the store. Returns false if they have been added before.
    pub(crate) fn fill(&self, page: PageBytes) -> bool {
        let page = page.into_raw();
        let filled =
            self.data.compare_exchange(ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !filled {
            // SAFETY: it was not published.
            drop(unsafe { PageBytes::from_raw(page) });
        }
        filled
    }

    /// Evicts the bytes; the version is then absent. Readers inside may still use them.
    pub(super) fn take(&self) -> Option<Taken> {
        let page = self.data.swap(ptr::null_mut(), Ordering::AcqRel);
        (!page.is_null()).then(|| Taken(page))
    }

    /// The segment of its frame, if the frame is known.
    pub(super) fn segment(&self) -> Option<u32> {
        let segment = self.segment.load(Ordering::Acquire);
        (segment != NO_SEGMENT).then_some(segment)
    }

    /// The frame of its bytes in the store, if it is known. Callers hold the page table's lock.
    pub(super) fn frame(&self) -> Option<Frame> {
        let (offset, length) = (self.offset.load(Ordering::Relaxed), self.length.load(Ordering::Relaxed));
        let location = FrameLocation { offset, length: length.into() };
        self.segment().map(|segment| Frame { segment, location })
    }

    /// Records that the same bytes are in this frame. Callers hold the page table's lock.
    pub(super) fn set_frame(&self, frame: Frame) {
        self.offset.store(frame.location.offset, Ordering::Relaxed);
        self.length.store(frame.location.length as u16, Ordering::Relaxed);
        self.segment.store(frame.segment, Ordering::Release);
    }

    /// Counts an access that found the bytes in memory. Uses plain stores, and none for a hot page:
    /// of two concurrent accesses one may not be counted.
    #[inline]
    pub(crate) fn touch(&self) {
        let heat = self.heat.load(Ordering::Relaxed);
        if heat < MAX_HEAT {
            self.heat.store(heat + 1, Ordering::Relaxed);
        } else if heat == PREFETCHED {
            self.heat.store(0, Ordering::Relaxed);
        }
    }

    /// Marks the version as prefetched.
    pub(crate) fn mark_prefetched(&self) {
        self.heat.store(PREFETCHED, Ordering::Relaxed);
    }

    /// Accesses since eviction last checked it; `None` if it is not in memory, or was prefetched
    /// and not accessed since.
    pub(super) fn heat(&self) -> Option<u8> {
        let heat = self.heat.load(Ordering::Relaxed);
        (heat != PREFETCHED && self.is_resident()).then_some(heat)
    }

    /// Resets the access counter, and returns its previous value.
    pub(super) fn take_heat(&self) -> u8 {
        match self.heat.swap(0, Ordering::Relaxed) {
            PREFETCHED => 0,
            touched => touched,
        }
    }

    /// The amounts to subtract from an account when the version is freed.
    pub(super) fn tally(&self) -> Tally {
        let bytes = if self.is_resident() { PAGE_BYTES } else { 0 };
        let unwritten_bytes = if self.segment().is_some() { 0 } else { bytes };
        Tally { bytes: bytes + VERSION_BYTES, unwritten_bytes }
    }
}

impl Drop for PageVersion {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Bytes that were taken out of their version, freed when this is dropped. A pointer and not a box:
/// readers may still use the bytes.
pub(super) struct Taken(*mut Page);

// SAFETY: it owns the bytes, which are not modified.
unsafe impl Send for Taken {}

impl Taken {
    /// The bytes, which no reader uses.
    pub(super) fn into_page(self) -> PageBytes {
        let page = self.0;
        std::mem::forget(self);
        // SAFETY: it came from `PageBytes::into_raw`, was taken out of its version exactly once, and
        // is not freed by this value any more.
        unsafe { PageBytes::from_raw(page) }
    }

    pub(super) fn as_ptr(&self) -> *const Page {
        self.0
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it came from `PageBytes::into_raw`, and was taken out of its version exactly
        // once.
        let page = unsafe { PageBytes::from_raw(self.0) };
        // Tests overwrite the bytes, so that a reader that still uses them fails.
        #[cfg(test)]
        let page = {
            let mut page = page;
            page.fill(0xdd);
            std::hint::black_box(page)
        };
        drop(page);
    }
}

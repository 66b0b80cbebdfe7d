//! One version of one page: its number, its bytes if they are in memory, and where they lie in the store.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use fulmar_pages::{FrameLocation, PAGE_SIZE, Page};

use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::store::Frame;

/// What a version takes besides its bytes.
pub(super) const VERSION_BYTES: i64 = size_of::<PageVersion>() as i64;
pub(super) const PAGE_BYTES: i64 = PAGE_SIZE as i64;

/// The frame is not known.
const NO_SEGMENT: u32 = u32::MAX;

/// Touches that are counted.
pub(super) const HOTTEST: u8 = 7;

/// Nobody has touched it since it came along with another. The first touch is not counted.
const CAME_ALONG: u8 = u8::MAX;

/// One version of one page.
pub(crate) struct PageVersion {
    number: u64,
    pub(super) older: AtomicPtr<PageVersion>,
    /// Null while the bytes are in the store only.
    data: AtomicPtr<Page>,
    // The frame. Once known it changes only to another place of the same bytes. Who reads or writes all of it holds the
    // page table's lock.
    offset: AtomicU64,
    segment: AtomicU32,
    length: AtomicU16,
    /// Touches since it came, or was looked at last by who evicts.
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

    /// Whether the page was cut off the partition's end: from here on it does not exist, until a newer version.
    pub(super) fn is_end(&self) -> bool {
        self.is_end
    }

    /// The page's bytes, if they are in memory.
    ///
    /// # Safety
    /// While the answer is used the caller is inside of the partition's [`super::residence`], or holds its lock; or the
    /// page is page 1.
    pub(crate) unsafe fn data(&self) -> Option<&Page> {
        // SAFETY: bytes that are taken out are kept for those inside.
        unsafe { self.data.load(Ordering::Acquire).as_ref() }
    }

    /// Whether the bytes are in memory, at this moment.
    pub(crate) fn is_resident(&self) -> bool {
        !self.data.load(Ordering::Relaxed).is_null()
    }

    /// Puts in the bytes that were read from the store; answers whether they were the first to arrive.
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

    /// Takes the bytes out; the version is absent. Whoever is inside may still use them.
    pub(super) fn take(&self) -> Option<Taken> {
        let page = self.data.swap(ptr::null_mut(), Ordering::AcqRel);
        (!page.is_null()).then(|| Taken(page))
    }

    /// The segment of its frame, if that is known.
    pub(super) fn segment(&self) -> Option<u32> {
        let segment = self.segment.load(Ordering::Acquire);
        (segment != NO_SEGMENT).then_some(segment)
    }

    /// Where the bytes are in the store, if they are there. Callers hold the page table's lock.
    pub(super) fn frame(&self) -> Option<Frame> {
        let (offset, length) = (self.offset.load(Ordering::Relaxed), self.length.load(Ordering::Relaxed));
        let location = FrameLocation { offset, length: length.into() };
        self.segment().map(|segment| Frame { segment, location })
    }

    /// The same bytes lie there from now on. Callers hold the page table's lock.
    pub(super) fn set_frame(&self, frame: Frame) {
        self.offset.store(frame.location.offset, Ordering::Relaxed);
        self.length.store(frame.location.length as u16, Ordering::Relaxed);
        self.segment.store(frame.segment, Ordering::Release);
    }

    /// Notes that its bytes were wanted and there. Plain stores, and none for what is hot: two that meet lose a count.
    #[inline]
    pub(crate) fn touch(&self) {
        let heat = self.heat.load(Ordering::Relaxed);
        if heat < HOTTEST {
            self.heat.store(heat + 1, Ordering::Relaxed);
        } else if heat == CAME_ALONG {
            self.heat.store(0, Ordering::Relaxed);
        }
    }

    /// It is read before anybody has asked for it.
    pub(crate) fn comes_along(&self) {
        self.heat.store(CAME_ALONG, Ordering::Relaxed);
    }

    /// How often it was touched since it was looked at by who evicts; `None` if it is not in memory, or nobody has asked for
    /// it since it came.
    pub(super) fn heat(&self) -> Option<u8> {
        let heat = self.heat.load(Ordering::Relaxed);
        (heat != CAME_ALONG && self.is_resident()).then_some(heat)
    }

    /// How often it was touched since this was asked last.
    pub(super) fn cool(&self) -> u8 {
        match self.heat.swap(0, Ordering::Relaxed) {
            CAME_ALONG => 0,
            touched => touched,
        }
    }

    /// What goes with it from an account.
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

/// Bytes that were taken out of their version, freed when this is dropped. A pointer and no box: others may still read.
pub(super) struct Taken(*mut Page);

// SAFETY: it owns the bytes, which nobody changes.
unsafe impl Send for Taken {}

impl Taken {
    pub(super) fn as_ptr(&self) -> *const Page {
        self.0
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it came from `PageBytes::into_raw`, and only one has taken it out of its version.
        let page = unsafe { PageBytes::from_raw(self.0) };
        // In tests whoever reads on is found out.
        #[cfg(test)]
        let page = {
            let mut page = page;
            page.fill(0xdd);
            std::hint::black_box(page)
        };
        drop(page);
    }
}

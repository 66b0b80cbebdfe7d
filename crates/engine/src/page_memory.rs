//! Memory for pages: places of 4 KiB each that are used again and again.
//!
//! Pages come and go one by one, are made by one thread and freed by another, and are most of what a node holds. In a general
//! allocator what is freed here and there lies between what is used, and nobody can tell how much that is. Here every place is as
//! good as every other one: what has been freed last is used next, and what is spare is known, so that the rest of what the process
//! takes is known too ([`crate::memory`]; decision 0011).
//!
//! ```text
//!  region, 64 MiB   [ used | spare | used | used | ... | never used yet ......... ]
//!                            |  ^
//!    a thread's few spare ones  '--- all others, under a lock, 16 at a time
//! ```
//!
//! Regions are never unmapped. What is spare beyond some is given back to the system ([`give_back`]): the place stays, its memory
//! is taken away, and comes back as zeros when the place is used again.
//!
//! Regions may be backed by the processor's huge pages (a page of ours then costs no entry of its own in its tables), but
//! for the first few MiB, so that a small node stays small; and not any more where some was given back, or the kernel would
//! fill it up again.

use std::alloc::{Layout, handle_alloc_error};
use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use fulmar_pages::{PAGE_SIZE, Page};
use parking_lot::Mutex;

/// Address space that is taken at once.
const REGION_BYTES: usize = 64 << 20;
/// One of the processor's huge pages.
const HUGE_BYTES: usize = 2 << 20;
/// Of the first region, not backed by huge pages.
const SMALL_BYTES: usize = 8 << 20;
/// Places that go between a thread and the others at once.
const BATCH: usize = 16;
/// Spare places that are kept in any case: 4 MiB.
const KEPT: usize = 1024;

/// The bytes of a page, owned.
pub(crate) struct PageBytes(NonNull<Page>);

// SAFETY: it owns its bytes, as a box does.
unsafe impl Send for PageBytes {}
// SAFETY: the same.
unsafe impl Sync for PageBytes {}

impl PageBytes {
    pub(crate) fn copy_of(page: &Page) -> PageBytes {
        let place = take();
        // SAFETY: the place is ours, and large enough.
        unsafe { place.copy_from_nonoverlapping(page.into(), 1) };
        PageBytes(place)
    }

    pub(crate) fn zeroed() -> PageBytes {
        let place = take();
        // SAFETY: the place is ours, and large enough.
        unsafe { place.write_bytes(0, 1) };
        PageBytes(place)
    }

    pub(crate) fn into_raw(self) -> *mut Page {
        let place = self.0.as_ptr();
        std::mem::forget(self);
        place
    }

    /// # Safety
    /// `page` came from [`PageBytes::into_raw`], once.
    pub(crate) unsafe fn from_raw(page: *mut Page) -> PageBytes {
        // SAFETY: the caller's promise; it was not null.
        PageBytes(unsafe { NonNull::new_unchecked(page) })
    }
}

impl Deref for PageBytes {
    type Target = Page;

    fn deref(&self) -> &Page {
        // SAFETY: initialized when it was made, and ours until it is dropped.
        unsafe { self.0.as_ref() }
    }
}

impl DerefMut for PageBytes {
    fn deref_mut(&mut self) -> &mut Page {
        // SAFETY: as above.
        unsafe { self.0.as_mut() }
    }
}

impl Drop for PageBytes {
    fn drop(&mut self) {
        give(self.0);
    }
}

impl fmt::Debug for PageBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PageBytes").field(&self.0).finish()
    }
}

/// Spare places of one thread.
struct Near(Vec<NonNull<Page>>);

thread_local! {
    static NEAR: RefCell<Near> = RefCell::new(Near(Vec::with_capacity(2 * BATCH)));
}

impl Drop for Near {
    fn drop(&mut self) {
        POOL.lock().spare.append(&mut self.0);
    }
}

fn take() -> NonNull<Page> {
    // A thread that ends has no places of its own any more.
    let taken = NEAR.try_with(|near| {
        let near = &mut near.borrow_mut().0;
        if near.is_empty() {
            POOL.lock().take(BATCH, near);
        }
        near.pop()
    });
    taken.ok().flatten().unwrap_or_else(|| POOL.lock().take_one())
}

fn give(place: NonNull<Page>) {
    let given = NEAR.try_with(|near| {
        let near = &mut near.borrow_mut().0;
        near.push(place);
        if near.len() >= 2 * BATCH {
            // Those that were given back last stay at hand.
            POOL.lock().spare.extend(near.drain(..BATCH));
        }
    });
    if given.is_err() {
        POOL.lock().spare.push(place);
    }
}

/// Places of the process that no thread has.
struct Pool {
    /// Used before, those that were used last at the end.
    spare: Vec<NonNull<Page>>,
    /// Given back to the system.
    empty: Vec<NonNull<Page>>,
    /// Of the newest region what was never used: the first one, and how many.
    fresh: (*mut Page, usize),
    regions: usize,
    /// Places that take memory: in use, or spare.
    taken: usize,
}

// SAFETY: what it points to is owned by it.
unsafe impl Send for Pool {}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    spare: Vec::new(),
    empty: Vec::new(),
    fresh: (ptr::null_mut(), 0),
    regions: 0,
    taken: 0,
});

impl Pool {
    fn take(&mut self, count: usize, into: &mut Vec<NonNull<Page>>) {
        let spare = self.spare.len().saturating_sub(count);
        into.extend(self.spare.drain(spare..));
        if into.is_empty() {
            into.push(self.take_one());
        }
    }

    fn take_one(&mut self) -> NonNull<Page> {
        if let Some(place) = self.spare.pop() {
            return place;
        }
        self.taken += 1;
        if let Some(place) = self.empty.pop() {
            return place;
        }
        if self.fresh.1 == 0 {
            self.fresh = (map_region(self.regions == 0).as_ptr(), REGION_BYTES / PAGE_SIZE);
            self.regions += 1;
        }
        let (place, left) = self.fresh;
        // SAFETY: within the region, or at its end.
        self.fresh = (unsafe { place.add(1) }, left - 1);
        // SAFETY: a region is not at address 0.
        unsafe { NonNull::new_unchecked(place) }
    }
}

/// New memory, all zeros, at a multiple of [`HUGE_BYTES`].
fn map_region(is_first: bool) -> NonNull<Page> {
    let layout = Layout::new::<[u8; REGION_BYTES]>();
    // SAFETY: new memory, of which the part that is not a whole huge page is never used.
    unsafe {
        let bytes = REGION_BYTES + HUGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapped = libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if mapped == libc::MAP_FAILED {
            handle_alloc_error(layout);
        }
        let region = mapped.byte_add(mapped.align_offset(HUGE_BYTES));
        let small = if is_first { SMALL_BYTES } else { 0 };
        // Where there are none, it goes without.
        libc::madvise(region.byte_add(small), REGION_BYTES - small, libc::MADV_HUGEPAGE);
        NonNull::new(region.cast()).unwrap_or_else(|| handle_alloc_error(layout))
    }
}

/// What places take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    /// Those in use, and spare ones.
    pub(crate) bytes: u64,
    /// Those in use, or at hand for one thread.
    pub(crate) in_use_bytes: u64,
}

pub(crate) fn places() -> Places {
    let pool = &*POOL.lock();
    let bytes = |places: usize| (places * PAGE_SIZE) as u64;
    Places { bytes: bytes(pool.taken), in_use_bytes: bytes(pool.taken - pool.spare.len()) }
}

/// Gives spare places' memory back to the system: so many bytes of it, if there are as many, and what is more than an eighth of all.
pub(crate) fn give_back(bytes: u64) {
    let mut places = {
        let pool = &mut *POOL.lock();
        let much = pool.spare.len().saturating_sub(KEPT + pool.taken / 8);
        let count = much.max((bytes / PAGE_SIZE as u64) as usize).min(pool.spare.len());
        // Those that were used last are in the processor's caches.
        pool.spare.drain(..count).collect::<Vec<_>>()
    };
    places.sort_unstable();
    let runs = places.chunk_by(|a, b| a.as_ptr().wrapping_add(1) == b.as_ptr());
    for run in runs {
        let (start, bytes) = (run[0].as_ptr().cast::<libc::c_void>(), run.len() * PAGE_SIZE);
        let huge = start.map_addr(|address| address - address % HUGE_BYTES);
        let huge_bytes = (start.addr() + bytes - huge.addr()).next_multiple_of(HUGE_BYTES);
        // SAFETY: places that nobody uses, whose bytes mean nothing; whole huge pages are of one region.
        unsafe {
            libc::madvise(huge, huge_bytes, libc::MADV_NOHUGEPAGE);
            libc::madvise(start, bytes, libc::MADV_DONTNEED);
        }
    }
    let pool = &mut *POOL.lock();
    pool.taken -= places.len();
    pool.empty.append(&mut places);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_by_whichever_thread() {
        let page = |i: usize| -> Page { [i as u8; PAGE_SIZE] };
        for round in 0..20 {
            let pages: Vec<_> = (0..1000).map(|i| PageBytes::copy_of(&page(i + round))).collect();
            let mut copies: Vec<_> = pages.iter().map(|page| PageBytes::copy_of(page)).collect();
            copies.iter_mut().for_each(|copy| copy[7] ^= 1);
            let other = std::thread::spawn(move || {
                assert!(pages.iter().enumerate().all(|(i, bytes)| **bytes == page(i + round)));
                drop(pages);
                give_back(1 << 20);
                assert!(*PageBytes::zeroed() == [0; PAGE_SIZE]);
            });
            assert!(copies.iter().enumerate().all(|(i, bytes)| bytes[7] == (i + round) as u8 ^ 1));
            other.join().unwrap();
            // SAFETY: once.
            let raw = copies.into_iter().map(|copy| unsafe { PageBytes::from_raw(copy.into_raw()) });
            assert!(raw.enumerate().all(|(i, bytes)| bytes[8] == (i + round) as u8));
        }
    }
}

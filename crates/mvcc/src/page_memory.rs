//! Allocator for page memory: slots of 4 KiB that are reused.
//!
//! Pages are allocated and freed one at a time, often by different threads, and are most of a
//! node's memory. In a general-purpose allocator the freed ones would be scattered between used
//! ones, and their total would be unknown. Here all slots are interchangeable: the most recently
//! freed slot is reused next, and the number of spare slots is known, so the rest of the process's
//! memory is known too ([`crate::memory`]; decision 0011).
//!
//! ```text
//!  region, 64 MiB   [ used | spare | used | used | ... | never used yet ......... ]
//!                            |  ^
//!    a few per thread -------'  '--- all others, under a lock, 16 at a time
//! ```
//!
//! The last slot of a region is never used: SQLite reads up to 256 bytes beyond a page that it fetched,
//! for example when it compares a key at the end of the page, and that memory must exist.
//!
//! Regions are never unmapped. Spare memory beyond a threshold is returned to the system
//! ([`give_back`]): the slot remains, its memory is discarded, and reads as zeros when the slot is
//! reused.
//!
//! Regions are not backed by huge pages, with which a small node would not stay small, and the kernel
//! would fill up ranges whose memory was returned (decision 0016).

use std::alloc::{Layout, handle_alloc_error};
use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use fulmar_pages::{PAGE_SIZE, Page};
use parking_lot::Mutex;

/// Size of a region.
const REGION_BYTES: usize = 64 << 20;
/// Number of slots of a region that are used.
const SLOTS: usize = REGION_BYTES / PAGE_SIZE - 1;
/// Slots moved between a thread and the shared pool at a time.
const BATCH: usize = 16;
/// Minimum number of spare slots that are kept: 4 MiB.
const MIN_SPARE: usize = 1024;

/// An owned page.
pub(crate) struct PageBytes(NonNull<Page>);

// SAFETY: it owns its bytes, like a Box.
unsafe impl Send for PageBytes {}
// SAFETY: it owns its bytes, like a Box.
unsafe impl Sync for PageBytes {}

impl PageBytes {
    pub(crate) fn copy_of(page: &Page) -> PageBytes {
        let slot = take();
        // SAFETY: the slot is exclusively owned, and large enough.
        unsafe { slot.copy_from_nonoverlapping(page.into(), 1) };
        PageBytes(slot)
    }

    pub(crate) fn zeroed() -> PageBytes {
        let slot = take();
        // SAFETY: the slot is exclusively owned, and large enough.
        unsafe { slot.write_bytes(0, 1) };
        PageBytes(slot)
    }

    pub(crate) fn into_raw(self) -> *mut Page {
        let slot = self.0.as_ptr();
        std::mem::forget(self);
        slot
    }

    /// # Safety
    /// `page` must come from [`PageBytes::into_raw`], and be used once.
    pub(crate) unsafe fn from_raw(page: *mut Page) -> PageBytes {
        // SAFETY: guaranteed by the caller; the pointer was not null.
        PageBytes(unsafe { NonNull::new_unchecked(page) })
    }
}

impl Deref for PageBytes {
    type Target = Page;

    fn deref(&self) -> &Page {
        // SAFETY: initialized at construction, and exclusively owned until drop.
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

/// Spare slots of one thread.
struct LocalSlots(Vec<NonNull<Page>>);

thread_local! {
    static LOCAL: RefCell<LocalSlots> = RefCell::new(LocalSlots(Vec::with_capacity(2 * BATCH)));
}

impl Drop for LocalSlots {
    fn drop(&mut self) {
        POOL.lock().spare.append(&mut self.0);
    }
}

fn take() -> NonNull<Page> {
    // A thread that is being torn down has no slots any more.
    let taken = LOCAL.try_with(|local| {
        let local = &mut local.borrow_mut().0;
        if local.is_empty() {
            POOL.lock().take(BATCH, local);
        }
        local.pop()
    });
    taken.ok().flatten().unwrap_or_else(|| POOL.lock().take_one())
}

fn give(slot: NonNull<Page>) {
    let given = LOCAL.try_with(|local| {
        let local = &mut local.borrow_mut().0;
        local.push(slot);
        if local.len() >= 2 * BATCH {
            // The most recently freed slots stay with the thread.
            POOL.lock().spare.extend(local.drain(..BATCH));
        }
    });
    if given.is_err() {
        POOL.lock().spare.push(slot);
    }
}

/// The process's slots that are not cached by a thread.
struct Pool {
    /// Slots that were used before, most recently used last.
    spare: Vec<NonNull<Page>>,
    /// Slots whose memory was returned to the system.
    empty: Vec<NonNull<Page>>,
    /// The unused rest of the newest region: its first slot, and the number of slots.
    fresh: (*mut Page, usize),
    /// Number of slots with memory: in use, or spare.
    taken: usize,
}

// SAFETY: it owns the memory that its pointers refer to.
unsafe impl Send for Pool {}

static POOL: Mutex<Pool> = Mutex::new(Pool::new());

impl Pool {
    const fn new() -> Pool {
        Pool { spare: Vec::new(), empty: Vec::new(), fresh: (ptr::null_mut(), 0), taken: 0 }
    }

    fn take(&mut self, count: usize, into: &mut Vec<NonNull<Page>>) {
        let spare = self.spare.len().saturating_sub(count);
        into.extend(self.spare.drain(spare..));
        if into.is_empty() {
            into.push(self.take_one());
        }
    }

    fn take_one(&mut self) -> NonNull<Page> {
        if let Some(slot) = self.spare.pop() {
            return slot;
        }
        self.taken += 1;
        if let Some(slot) = self.empty.pop() {
            return slot;
        }
        if self.fresh.1 == 0 {
            self.fresh = (map_region().as_ptr(), SLOTS);
        }
        let (slot, left) = self.fresh;
        // SAFETY: within the region, or one past its end.
        self.fresh = (unsafe { slot.add(1) }, left - 1);
        // SAFETY: a region is not at address 0.
        unsafe { NonNull::new_unchecked(slot) }
    }
}

/// Maps a region of zeroed memory.
fn map_region() -> NonNull<Page> {
    let layout = Layout::new::<[u8; REGION_BYTES]>();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: new memory.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let region = libc::mmap(ptr::null_mut(), REGION_BYTES, protection, flags, -1, 0);
        if region == libc::MAP_FAILED {
            handle_alloc_error(layout);
        }
        // Kernels without huge pages refuse this.
        libc::madvise(region, REGION_BYTES, libc::MADV_NOHUGEPAGE);
        NonNull::new(region.cast()).unwrap_or_else(|| handle_alloc_error(layout))
    }
}

/// Memory used by slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotUsage {
    /// Slots in use and spare slots.
    pub bytes: u64,
    /// Slots in use or cached by a thread.
    pub in_use_bytes: u64,
}

pub(crate) fn slot_usage() -> SlotUsage {
    let pool = &*POOL.lock();
    let bytes = |slots: usize| (slots * PAGE_SIZE) as u64;
    SlotUsage { bytes: bytes(pool.taken), in_use_bytes: bytes(pool.taken - pool.spare.len()) }
}

/// Returns memory of spare slots to the system: `bytes` if that much is spare, and at least what
/// exceeds an eighth of all slots.
pub(crate) fn give_back(bytes: u64) {
    let mut slots = {
        let pool = &mut *POOL.lock();
        let much = pool.spare.len().saturating_sub(MIN_SPARE + pool.taken / 8);
        let count = much.max((bytes / PAGE_SIZE as u64) as usize).min(pool.spare.len());
        // The most recently used slots are kept, since they are in the CPU caches.
        pool.spare.drain(..count).collect::<Vec<_>>()
    };
    slots.sort_unstable();
    let runs = slots.chunk_by(|a, b| a.as_ptr().wrapping_add(1) == b.as_ptr());
    for run in runs {
        let (start, bytes) = (run[0].as_ptr().cast::<libc::c_void>(), run.len() * PAGE_SIZE);
        // SAFETY: unused slots, whose bytes are meaningless.
        unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) };
    }
    let pool = &mut *POOL.lock();
    pool.taken -= slots.len();
    pool.empty.append(&mut slots);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_after_each_slot_belongs_to_the_region() {
        let mut pool = Pool::new();
        for _ in 0..2 {
            let first = pool.take_one().as_ptr();
            let end = first.wrapping_byte_add(REGION_BYTES);
            let mut last = first;
            while pool.fresh.1 > 0 {
                last = pool.take_one().as_ptr();
                assert!(first < last && last.wrapping_add(1).wrapping_byte_add(256) <= end);
            }
            assert_eq!(last.wrapping_add(2), end);
        }
    }

    #[test]
    fn slots_are_reused_across_threads() {
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
            // SAFETY: each pointer is used once.
            let raw = copies.into_iter().map(|copy| unsafe { PageBytes::from_raw(copy.into_raw()) });
            assert!(raw.enumerate().all(|(i, bytes)| bytes[8] == (i + round) as u8));
        }
    }
}

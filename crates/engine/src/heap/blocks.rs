//! Blocks that a thread keeps for its next statement.
//!
//! A statement takes some dozen small blocks and a few of a page's size, and gives them all back when it ends; the next one asks
//! for the same. A general allocator hands its blocks out in turn, so that the next statement would write to memory that is in no cache of
//! the processor; here it gets what was given back last. SQLite has such a pool for each connection, which is cold
//! when a connection of many is used; this one belongs to the thread that runs them all.
//!
//! ```text
//!  [16 bytes] -> block -> block      a list for each size, at most so many blocks long
//!  [32 bytes] -> block               the link lies in the block
//!   ...
//!  [4.1 KiB]  -> block -> block      pages in SQLite's own cache, with their heads
//! ```

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use super::allocator::free;

/// Sizes differ by so much at least.
const STEP_BYTES: usize = 16;
/// The largest of the small ones.
const SMALL_BYTES: usize = 512;
/// What is larger than a page, by no more than its heads.
const PAGE_BYTES: std::ops::RangeInclusive<usize> = 4096..=4096 + SMALL_BYTES - STEP_BYTES;
const SMALL_LISTS: usize = SMALL_BYTES / STEP_BYTES;
const LISTS: usize = 2 * SMALL_LISTS;
/// Blocks that a list keeps.
const MOST: usize = 64;

/// What is asked for, rounded to a size that there are lists of.
pub(super) fn rounded(bytes: c_int) -> c_int {
    let step = if bytes as usize <= *PAGE_BYTES.end() { STEP_BYTES as c_int } else { 8 };
    // SQLite asks for less than 2 GiB, by some KiB.
    (bytes + step - 1) & -step
}

fn list_of(bytes: usize) -> Option<usize> {
    if bytes == 0 || !bytes.is_multiple_of(STEP_BYTES) {
        return None;
    }
    if bytes <= SMALL_BYTES {
        return Some(bytes / STEP_BYTES - 1);
    }
    PAGE_BYTES.contains(&bytes).then(|| SMALL_LISTS + (bytes - PAGE_BYTES.start()) / STEP_BYTES)
}

/// Blocks of one size, the one that was kept last first.
#[derive(Clone, Copy)]
struct List {
    first: Option<NonNull<c_void>>,
    blocks: usize,
}

struct Near(UnsafeCell<[List; LISTS]>);

thread_local! {
    static NEAR: Near = const { Near(UnsafeCell::new([List { first: None, blocks: 0 }; LISTS])) };
}

impl Near {
    /// Works on a list; nobody else has one meanwhile, since `work` asks for no memory.
    fn with<R>(&self, list: usize, work: impl FnOnce(&mut List) -> R) -> R {
        // SAFETY: of this thread, and used by one call at a time.
        work(&mut unsafe { &mut *self.0.get() }[list])
    }

    fn let_go(&self) {
        for list in 0..LISTS {
            while let Some(block) = self.with(list, List::pop) {
                // SAFETY: it was kept, and is taken off the list.
                unsafe { free(block) };
            }
        }
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl List {
    fn pop(&mut self) -> Option<NonNull<c_void>> {
        let block = self.first?;
        // SAFETY: a block that is kept holds the link, and is ours.
        self.first = unsafe { block.cast().read() };
        self.blocks -= 1;
        Some(block)
    }
}

/// A block of this size that was kept, if there is one.
pub(super) fn take(bytes: c_int) -> Option<NonNull<c_void>> {
    let list = list_of(bytes as usize)?;
    NEAR.try_with(|near| near.with(list, List::pop)).ok().flatten()
}

/// Keeps a block for the next one who asks for as much; answers whether it did.
///
/// # Safety
/// The block is of that size, aligned to a pointer, and its owner uses it no more.
pub(super) unsafe fn keep(block: NonNull<c_void>, bytes: c_int) -> bool {
    let Some(list) = list_of(bytes as usize) else { return false };
    let keep = |list: &mut List| {
        if list.blocks == MOST {
            return false;
        }
        // SAFETY: the caller's promise; a size that there is a list of has room for a link.
        unsafe { block.cast().write(list.first) };
        list.first = Some(block);
        list.blocks += 1;
        true
    };
    // A thread that ends keeps nothing any more.
    NEAR.try_with(|near| near.with(list, keep)).unwrap_or(false)
}

/// Gives all back that this thread has kept. A connection has been closed: what it had is not what the next statement asks for, and lies
/// among what others have, so that one block of it would keep 64 KiB of the allocator's from being given back.
pub(crate) fn let_go() {
    let _ = NEAR.try_with(Near::let_go); // else the thread ends, and keeps nothing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_are_rounded_have_lists_of_their_own() {
        assert_eq!([0, 1, 16, 17, 512, 513].map(rounded), [0, 16, 16, 32, 512, 528]);
        assert_eq!([4097, 4592, 4593, 5000].map(rounded), [4112, 4592, 4600, 5000]);
        assert_eq!([16, 512, 4096, 4592].map(list_of), [0, 31, 32, 63].map(Some));
        assert_eq!([0, 8, 24, 528, 4080, 4600, 4608].map(list_of), [None; 7]);
        let sizes = (16..=5000)
            .map(rounded)
            .filter_map(|bytes| list_of(bytes as usize))
            .collect::<std::collections::BTreeSet<_>>();
        assert_eq!(sizes.len(), LISTS);
    }

    #[test]
    fn what_was_kept_last_is_taken_first_and_no_list_grows_without_end() {
        let block = || NonNull::from(Box::leak(Box::new([0_u64; 4]))).cast::<c_void>();
        // SAFETY: it came from a box, and is on no list any more.
        let taken_back =
            |block: NonNull<c_void>| drop(unsafe { Box::from_raw(block.cast::<[u64; 4]>().as_ptr()) });
        // SAFETY: it has 32 bytes, and nobody uses it.
        let keep_it = |block: &NonNull<c_void>| unsafe { keep(*block, 32) };
        std::thread::spawn(move || {
            let blocks: Vec<_> = (0..MOST + 1).map(|_| block()).collect();
            let kept: Vec<bool> = blocks.iter().map(keep_it).collect();
            assert!(kept[..MOST].iter().all(|&kept| kept) && !kept[MOST]);
            assert_eq!(take(48), None);
            for &block in blocks[..MOST].iter().rev() {
                assert_eq!(take(32), Some(block));
            }
            assert_eq!(take(32), None);
            blocks.into_iter().for_each(taken_back);
        })
        .join()
        .unwrap();
    }
}

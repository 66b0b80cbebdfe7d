//! A per-thread cache of freed memory blocks, for the next statement.
//!
//! A statement allocates some dozen small blocks and a few of a page's size, and frees them all
//! when it ends; the next one allocates the same. A general allocator reuses blocks in rotation, so
//! the next statement would write to memory that is not in the CPU caches. Here it gets the most
//! recently freed block. SQLite has such a pool per connection (lookaside), which is cold if the
//! connection is one of many; this cache belongs to the thread that runs them all.
//!
//! ```text
//!  [16 bytes] -> block -> block      a list per size, of at most 64 blocks
//!  [32 bytes] -> block               the link is stored in the block
//!   ...
//!  [4.1 KiB]  -> block -> block      pages in SQLite's cache, with their headers
//! ```

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use super::free;

/// The granularity of block sizes.
const STEP_BYTES: usize = 16;
/// The largest of the small sizes.
const SMALL_BYTES: usize = 512;
/// The sizes of a page with SQLite's headers.
const PAGE_BYTES: std::ops::RangeInclusive<usize> = 4096..=4096 + SMALL_BYTES - STEP_BYTES;
const SMALL_LISTS: usize = SMALL_BYTES / STEP_BYTES;
const LISTS: usize = 2 * SMALL_LISTS;
/// Maximum of blocks per list.
const MAX_BLOCKS_PER_LIST: usize = 64;

/// Rounds an allocation up to a size that has a list.
pub(super) fn rounded(bytes: c_int) -> c_int {
    let step = if bytes as usize <= *PAGE_BYTES.end() { STEP_BYTES as c_int } else { 8 };
    // SQLite's allocations are at most 2 GiB minus a few KiB.
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

/// Blocks of one size, most recently freed first.
#[derive(Clone, Copy)]
struct List {
    first: Option<NonNull<c_void>>,
    blocks: usize,
}

struct BlockCache(UnsafeCell<[List; LISTS]>);

thread_local! {
    static BLOCK_CACHE: BlockCache =
        const { BlockCache(UnsafeCell::new([List { first: None, blocks: 0 }; LISTS])) };
}

impl BlockCache {
    /// Runs `work` on a list. It is the only reference to the lists, since `work` does not
    /// allocate.
    fn with<R>(&self, list: usize, work: impl FnOnce(&mut List) -> R) -> R {
        // SAFETY: belongs to this thread, and one call at a time uses it.
        work(&mut unsafe { &mut *self.0.get() }[list])
    }

    fn clear(&self) {
        for list in 0..LISTS {
            while let Some(block) = self.with(list, List::pop) {
                // SAFETY: it was cached, and is off the list.
                unsafe { free(block) };
            }
        }
    }
}

impl Drop for BlockCache {
    fn drop(&mut self) {
        self.clear();
    }
}

impl List {
    fn pop(&mut self) -> Option<NonNull<c_void>> {
        let block = self.first?;
        // SAFETY: a cached block contains the link, and is owned by the list.
        self.first = unsafe { block.cast().read() };
        self.blocks -= 1;
        Some(block)
    }
}

/// Takes a cached block of this size, if there is one.
pub(super) fn take(bytes: c_int) -> Option<NonNull<c_void>> {
    let list = list_of(bytes as usize)?;
    BLOCK_CACHE.try_with(|cache| cache.with(list, List::pop)).ok().flatten()
}

/// Caches a block. Returns false if there is no list for its size, or the list is full.
///
/// # Safety
/// The block has that size, is aligned to a pointer, and is no longer used.
pub(super) unsafe fn keep(block: NonNull<c_void>, bytes: c_int) -> bool {
    let Some(list) = list_of(bytes as usize) else { return false };
    let keep = |list: &mut List| {
        if list.blocks == MAX_BLOCKS_PER_LIST {
            return false;
        }
        // SAFETY: the caller's contract; every size with a list has room for a link.
        unsafe { block.cast().write(list.first) };
        list.first = Some(block);
        list.blocks += 1;
        true
    };
    // A thread that is being torn down caches nothing.
    BLOCK_CACHE.try_with(|cache| cache.with(list, keep)).unwrap_or(false)
}

/// Frees all cached blocks of this thread. Called after a connection was closed: its blocks are not
/// what the next statement needs. They are spread among blocks in use, so each of them could keep
/// 64 KiB of the allocator from being released.
pub(crate) fn free_cached_blocks() {
    let _ = BLOCK_CACHE.try_with(BlockCache::clear); // fails if the thread is being torn down
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rounded_size_has_a_list() {
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
    fn lists_are_lifo_and_bounded() {
        let block = || NonNull::from(Box::leak(Box::new([0_u64; 4]))).cast::<c_void>();
        // SAFETY: it came from a box, and is on no list any more.
        let taken_back =
            |block: NonNull<c_void>| drop(unsafe { Box::from_raw(block.cast::<[u64; 4]>().as_ptr()) });
        // SAFETY: it has 32 bytes, and is not in use.
        let keep_it = |block: &NonNull<c_void>| unsafe { keep(*block, 32) };
        std::thread::spawn(move || {
            let blocks: Vec<_> = (0..MAX_BLOCKS_PER_LIST + 1).map(|_| block()).collect();
            let kept: Vec<bool> = blocks.iter().map(keep_it).collect();
            assert!(kept[..MAX_BLOCKS_PER_LIST].iter().all(|&kept| kept) && !kept[MAX_BLOCKS_PER_LIST]);
            assert_eq!(take(48), None);
            for &block in blocks[..MAX_BLOCKS_PER_LIST].iter().rev() {
                assert_eq!(take(32), Some(block));
            }
            assert_eq!(take(32), None);
            blocks.into_iter().for_each(taken_back);
        })
        .join()
        .unwrap();
    }
}

//! Stacks of fibers: reserved address space, populated lazily, with a guard page at the low end.
//!
//! SQLite recurses over the contents of a statement, and none of its limits bounds that depth for
//! all statements: the query flattener substitutes expressions into each other after their depth
//! was checked, generated columns and views refer to one another, and table-valued and full-text
//! functions have their own parsers. A fiber therefore has far more address space than it may use:
//!
//! ```text
//!  limit                                                                        base
//!    | guard |              reserve (15/16)                     |   budget (1/16)  |
//!                                                               ^                  <-- grows down
//!                                                         soft limit
//! ```
//!
//! - **Budget.** Whenever SQLite allocates memory, the allocator compares the stack pointer with
//!   the soft limit ([`super::Suspender::has_stack`]). Below it the allocation fails, SQLite
//!   unwinds through its out-of-memory path, and the statement gets SQLSTATE 54001. SQLite builds
//!   every deep structure by recursion that allocates at each level, so the budget bounds the depth
//!   of every expression, FROM clause and query tree.
//! - **Reserve.** SQLite also walks these structures without allocating (name resolution, code
//!   generation, deletion). Such a walk is as deep as the structure, and its frames are at most a
//!   few times larger than those of the functions that built it. The reserve is 15 times the
//!   budget.
//! - **Guard.** A stack that overflows nevertheless hits the guard page, and [`super::overflow`]
//!   reports the tenant and the statement before the process ends.
//!
//! Untouched address space costs nothing: an ordinary statement touches 8 KiB. A stack that was
//! used deeply returns its memory before it is reused.

use std::cell::Cell;
use std::io;
use std::num::NonZeroUsize;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use corosensei::stack::{Stack, StackPointer};

/// Address space of a stack, unless configured otherwise.
pub const DEFAULT_STACK_BYTES: usize = 16 << 20;
/// The smallest stack that can be configured. Its budget is 256 KiB; the deepest JSON path takes
/// about 200 KiB.
pub const MIN_STACK_BYTES: usize = 4 << 20;
/// The stack size divided by this is the budget.
const BUDGET_DIVISOR: usize = 16;
/// Memory that a pooled stack may keep. A stack that was deeper returns the rest to the system.
const RESIDENT_BYTES: usize = 64 << 10;
/// Uses of a stack between two trims that are not caused by its depth.
const TRIM_INTERVAL: u32 = 64;
const GUARD_BYTES: usize = 4096;

static STACK_BYTES: AtomicUsize = AtomicUsize::new(DEFAULT_STACK_BYTES);

/// Sets the size of stacks that are created from now on, in bytes; at least [`MIN_STACK_BYTES`].
pub fn set_stack_bytes(bytes: usize) {
    STACK_BYTES.store(bytes.max(MIN_STACK_BYTES).next_multiple_of(GUARD_BYTES), Ordering::Relaxed);
}

/// A stack, unmapped when dropped.
pub struct FiberStack {
    base: usize,
    bytes: usize,
    uses: Cell<u32>,
}

impl FiberStack {
    /// Reserves a stack. Fails if the process has too many mappings (`vm.max_map_count`) or no
    /// address space left.
    pub fn new() -> io::Result<FiberStack> {
        let bytes = STACK_BYTES.load(Ordering::Relaxed) + GUARD_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        // SAFETY: a new mapping at an address that the system chooses.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = FiberStack { base: start as usize + bytes, bytes, uses: Cell::new(0) };
        // SAFETY: within the mapping. Without the advice a first touch could allocate 2 MiB.
        let guarded = unsafe {
            libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE);
            libc::mprotect(start, GUARD_BYTES, libc::PROT_NONE)
        };
        if guarded != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stack)
    }

    /// The address below which allocations fail.
    pub(crate) fn soft_limit(&self) -> usize {
        self.base - (self.bytes - GUARD_BYTES) / BUDGET_DIVISOR
    }

    fn resident_limit(&self) -> usize {
        self.base - RESIDENT_BYTES
    }

    /// The address range of the guard page.
    pub(crate) fn guard(&self) -> (usize, usize) {
        let start = self.base - self.bytes;
        (start, start + GUARD_BYTES)
    }

    /// Called after each use. Returns memory to the system if the stack pointer was seen below the
    /// resident part. Recursion without allocations is not seen, so each stack is also trimmed at
    /// intervals.
    pub(crate) fn trim_if_deep(&self, deepest: usize) {
        let uses = self.uses.replace(self.uses.get().wrapping_add(1));
        if deepest < self.resident_limit() || uses.is_multiple_of(TRIM_INTERVAL) {
            self.trim();
        }
    }

    /// Returns the memory below the resident part to the system. Nothing may be running on the
    /// stack.
    fn trim(&self) {
        let start = self.guard().1;
        // SAFETY: within the mapping, and without frames.
        unsafe { libc::madvise(start as *mut _, self.resident_limit() - start, libc::MADV_DONTNEED) };
    }
}

impl Drop for FiberStack {
    fn drop(&mut self) {
        // SAFETY: this stack owns the mapping, and no fiber runs on it.
        unsafe { libc::munmap((self.base - self.bytes) as *mut _, self.bytes) };
    }
}

// SAFETY: the lowest page is a guard page, and everything else is writable.
unsafe impl Stack for FiberStack {
    fn base(&self) -> StackPointer {
        NonZeroUsize::new(self.base).unwrap_or(NonZeroUsize::MIN)
    }

    fn limit(&self) -> StackPointer {
        NonZeroUsize::new(self.base - self.bytes).unwrap_or(NonZeroUsize::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_pages(stack: &FiberStack) -> usize {
        let (start, pages) = (stack.guard().1, (stack.bytes - GUARD_BYTES) / 4096);
        let mut present = vec![0_u8; pages];
        // SAFETY: a mapped range, and a byte for each of its pages.
        let code = unsafe { libc::mincore(start as *mut _, pages * 4096, present.as_mut_ptr()) };
        assert_eq!(code, 0);
        present.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn untouched_stack_is_not_resident_and_a_deep_one_is_trimmed() {
        let stack = FiberStack::new().unwrap();
        assert_eq!(resident_pages(&stack), 0, "only touched pages take memory");
        for page in 1..=1024_usize {
            // SAFETY: within the stack, on which nothing runs.
            unsafe { ((stack.base - page * 4096) as *mut u8).write_volatile(1) };
        }
        assert_eq!(resident_pages(&stack), 1024, "a touch must bring in one page, not a huge one");
        stack.trim();
        assert_eq!(resident_pages(&stack), RESIDENT_BYTES / 4096);
    }

    #[test]
    fn limits_are_ordered() {
        let stack = FiberStack::new().unwrap();
        assert!(stack.guard().1 < stack.soft_limit());
        assert!(stack.soft_limit() < stack.resident_limit(), "the budget must exceed the resident part");
        assert_eq!(stack.base % corosensei::stack::MIN_STACK_SIZE, 0);
    }
}

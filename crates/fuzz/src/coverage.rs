//! Which code an input reaches.
//!
//! `scripts/instrument` has the compiler (LLVM's SanitizerCoverage, which stable rustc can be told to use) put a
//! counter of one byte on each edge of the workspace's crates. Before `main`, each object file announces its counters
//! to [`__sanitizer_cov_8bit_counters_init`]. After each input they are read and set to zero; an edge that was passed
//! for the first time, or several times more often than before, makes the input one to go on from.
//!
//! In an ordinary build there are no counters, and no input is new.

use std::cell::RefCell;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

static START: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Called for each object file that was compiled with counters, with the same range for all of a program.
///
/// # Safety
/// The range is one of bytes that live as long as the program: the linker's section of counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sanitizer_cov_8bit_counters_init(start: *mut AtomicU8, stop: *mut AtomicU8) {
    COUNT.store((stop as usize).saturating_sub(start as usize), Ordering::Relaxed);
    START.store(start, Ordering::Release);
}

fn counters() -> &'static [AtomicU8] {
    let start = START.load(Ordering::Acquire);
    if start.is_null() {
        return &[];
    }
    // SAFETY: the section of counters, as it was announced; bytes that other threads count in are read as atomics.
    unsafe { std::slice::from_raw_parts(start, COUNT.load(Ordering::Relaxed)) }
}

thread_local! {
    /// For each edge the classes of counts that were seen, as bits.
    static SEEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Whether code was reached since the last call that no input of this thread's target had reached before.
pub(crate) fn is_new() -> bool {
    let counters = counters();
    SEEN.with_borrow_mut(|seen| {
        seen.resize(counters.len(), 0);
        let mut new = false;
        for (counter, seen) in counters.iter().zip(seen) {
            if counter.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let class = class(counter.swap(0, Ordering::Relaxed));
            new |= *seen & class == 0;
            *seen |= class;
        }
        new
    })
}

/// How many edges have been reached.
pub(crate) fn reached() -> usize {
    SEEN.with_borrow(|seen| seen.iter().filter(|seen| **seen != 0).count())
}

/// Counts that mean about the same share a bit.
fn class(count: u8) -> u8 {
    match count {
        0 => 0,
        1 => 1,
        2 => 2,
        3 => 4,
        4..=7 => 8,
        8..=15 => 16,
        16..=31 => 32,
        32..=127 => 64,
        128.. => 128,
    }
}

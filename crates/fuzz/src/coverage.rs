//! Edge coverage: detects whether an input reached new code.
//!
//! `scripts/instrument` enables LLVM's SanitizerCoverage, which stable rustc supports. It puts a
//! one-byte counter on each edge of the workspace's crates. Before `main`, each object file passes
//! its counters to [`__sanitizer_cov_8bit_counters_init`]. After each input the counters are read
//! and reset. An input is new if it passes an edge for the first time, or with a count in a
//! class that was not seen before.
//!
//! An ordinary build has no counters, so no input is new.

use std::cell::RefCell;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering};

static START: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Called once for each object file with counters, always with the range of the whole program.
///
/// # Safety
/// The range must be the linker's section of counters: bytes that live as long as the program.
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
    // SAFETY: the section of counters, as passed to the function above. Other threads change the
    // bytes, so they are accessed as atomics.
    unsafe { std::slice::from_raw_parts(start, COUNT.load(Ordering::Relaxed)) }
}

thread_local! {
    /// For each edge, the classes of counts that were seen, as bits.
    static SEEN: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Returns true if code was reached since the last call that no earlier input of this thread's
/// target had reached.
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

/// Number of edges reached so far.
pub(crate) fn reached() -> usize {
    SEEN.with_borrow(|seen| seen.iter().filter(|seen| **seen != 0).count())
}

/// The class of a count, as a bit. Similar counts share a class.
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

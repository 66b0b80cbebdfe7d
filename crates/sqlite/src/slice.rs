//! The time slice of a fiber: how long it may compute before it yields its thread.
//!
//! A fiber checks its timer between pages and every few thousand steps of SQLite's virtual machine.
//! The first check after a resume starts the slice; a later check reports that it is over. The
//! length is configurable because tests must not depend on the speed of the machine: with
//! [`Duration::ZERO`] every second check yields, with [`Duration::MAX`] none does.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The default length of a slice.
pub const DEFAULT_TIME_SLICE: Duration = Duration::from_millis(1);

pub(crate) struct SliceTimer {
    length: Duration,
    /// When the slice began, if it was checked since the last reset.
    began: Cell<Option<Instant>>,
}

impl Default for SliceTimer {
    fn default() -> Self {
        SliceTimer::new(DEFAULT_TIME_SLICE)
    }
}

impl SliceTimer {
    pub(crate) fn new(length: Duration) -> Self {
        SliceTimer { length, began: Cell::new(None) }
    }

    /// Called when the fiber is resumed: the next check starts a new slice.
    pub(crate) fn reset(&self) {
        self.began.set(None);
    }

    /// Returns true if the slice is over. Starts it if it has not begun.
    pub(crate) fn is_over(&self) -> bool {
        let now = Instant::now();
        match self.began.get() {
            None => {
                self.began.set(Some(now));
                false
            }
            Some(began) => now.saturating_duration_since(began) >= self.length,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_length_is_over_at_the_second_check_after_each_reset() {
        let timer = SliceTimer::new(Duration::ZERO);
        for _ in 0..3 {
            assert_eq!([timer.is_over(), timer.is_over(), timer.is_over()], [false, true, true]);
            timer.reset();
        }
    }

    #[test]
    fn unlimited_slice_is_never_over() {
        let timer = SliceTimer::new(Duration::MAX);
        assert_eq!([timer.is_over(), timer.is_over()], [false, false]);
    }
}

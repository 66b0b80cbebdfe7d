//! Measures how long this thread's runtime sleeps.
//!
//! The runtime calls [`falls_asleep`] before it waits for events and [`wakes_up`] afterwards. Often
//! there are events already. [`falls_asleep`] also notifies the commit log: while a worker has
//! sessions to serve, their commits share one sync.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum duration of a sleep that counts as idle.
const MIN_IDLE: Duration = Duration::from_micros(50);

thread_local! {
    static PARKED_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static IDLE_TIME: Cell<Rested> = const { Cell::new(Rested { times: 0, time: Duration::ZERO }) };
}

/// The time that a worker has slept since it started.
#[derive(Clone, Copy)]
pub(crate) struct Rested {
    /// The number of idle periods.
    pub(crate) times: u64,
    /// The total time slept.
    pub(crate) time: Duration,
}

pub(crate) fn falls_asleep() {
    fulmar_store::announce_idle();
    PARKED_SINCE.set(Some(Instant::now()));
}

pub(crate) fn wakes_up() {
    let Some(since) = PARKED_SINCE.take() else { return };
    let (slept, Rested { times, time }) = (since.elapsed(), IDLE_TIME.get());
    IDLE_TIME.set(Rested { times: times + u64::from(slept >= MIN_IDLE), time: time + slept });
}

/// The time that this thread has slept.
pub(crate) fn rested() -> Rested {
    IDLE_TIME.get()
}

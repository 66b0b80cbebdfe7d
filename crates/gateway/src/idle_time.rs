//! Measures how long this thread's runtime sleeps.
//!
//! The runtime calls [`on_park`] before it waits for events and [`on_unpark`] afterwards. Often
//! there are events already. [`on_park`] also notifies the commit log: while a worker has
//! sessions to serve, their commits share one sync.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Minimum duration of a sleep that counts as idle.
const MIN_IDLE: Duration = Duration::from_micros(50);

thread_local! {
    static PARKED_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static IDLE_TIME: Cell<IdleTime> = const { Cell::new(IdleTime { periods: 0, total: Duration::ZERO }) };
}

/// The time that a worker has slept since it started.
#[derive(Clone, Copy)]
pub(crate) struct IdleTime {
    /// The number of idle periods.
    pub(crate) periods: u64,
    /// The total time slept.
    pub(crate) total: Duration,
}

pub(crate) fn on_park() {
    fulmar_store::announce_idle();
    PARKED_SINCE.set(Some(Instant::now()));
}

pub(crate) fn on_unpark() {
    let Some(since) = PARKED_SINCE.take() else { return };
    let (slept, IdleTime { periods, total }) = (since.elapsed(), IDLE_TIME.get());
    IDLE_TIME.set(IdleTime { periods: periods + u64::from(slept >= MIN_IDLE), total: total + slept });
}

/// The time that this thread has slept.
pub(crate) fn read() -> IdleTime {
    IDLE_TIME.get()
}

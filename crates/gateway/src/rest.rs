//! How long this thread's runtime has slept.
//!
//! The runtime calls [`falls_asleep`] before it waits for events and [`wakes_up`] after; often they are there already. The
//! commit log is told: while a worker has sessions to serve, one sync is enough for all of them.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// A worker that has slept for so long had nothing to do.
const REST: Duration = Duration::from_micros(50);

thread_local! {
    static ASLEEP_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static RESTED: Cell<Rested> = const { Cell::new(Rested { times: 0, time: Duration::ZERO }) };
}

/// What a worker has slept, since it was started.
#[derive(Clone, Copy)]
pub(crate) struct Rested {
    /// How often it had nothing to do.
    pub(crate) times: u64,
    /// For how long it slept, all together.
    pub(crate) time: Duration,
}

pub(crate) fn falls_asleep() {
    fulmar_store::this_thread_rests();
    ASLEEP_SINCE.set(Some(Instant::now()));
}

pub(crate) fn wakes_up() {
    let Some(since) = ASLEEP_SINCE.take() else { return };
    let (slept, Rested { times, time }) = (since.elapsed(), RESTED.get());
    RESTED.set(Rested { times: times + u64::from(slept >= REST), time: time + slept });
}

/// What this thread has slept.
pub(crate) fn rested() -> Rested {
    RESTED.get()
}

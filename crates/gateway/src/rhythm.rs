//! The rhythm of a client, and polling for the one that is quick.
//!
//! A client that asks again as soon as it is answered spends most of a round trip waking up threads: its own and ours.
//! On a virtual machine waking an idle processor costs more than the statement. So a worker that has had nobody but one
//! quick client for a while does not go to sleep at once when it has answered: it polls for the next message, for
//! about as long as that client usually takes, and letting everything else on the worker run in between.
//!
//! Bounds, so that this never costs others anything: the client was alone on its worker for the last
//! [`ALONE`] messages; its usual gap is below [`QUICK`]; at most [`most_polling`] clients of the process are polled
//! for at once (half of the processors, at least one); and a client that slows down loses it after a few messages.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Messages in a row that must have come from this client alone.
const ALONE: u32 = 32;
/// The usual gap between answer and next message, below which a client is quick.
const QUICK: Duration = Duration::from_micros(100);

/// Clients that are polled for at the moment.
static POLLING: AtomicUsize = AtomicUsize::new(0);
static CLIENTS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The client that this worker heard of last, and how many times in a row.
    static LAST: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// Half of the processors. Asking the system costs more than a statement, so it is asked once.
fn most_polling() -> &'static usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    MOST.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| (n.get() / 2).max(1)))
}

/// One client's rhythm.
pub(crate) struct Rhythm {
    client: u64,
    /// Smoothed gap between an answer and the next message.
    gap: Duration,
}

impl Rhythm {
    pub(crate) fn new() -> Rhythm {
        Rhythm { client: CLIENTS.fetch_add(1, Ordering::Relaxed), gap: Duration::from_secs(1) }
    }

    /// A message has come, `gap` after the last answer.
    pub(crate) fn heard(&mut self, gap: Duration) {
        // A long pause does not count for more than it must: a quick client is quick again after a few messages.
        let sample = gap.min(10 * QUICK);
        self.gap = (self.gap.min(10 * QUICK) * 7 + sample) / 8;
        let (client, times) = LAST.get();
        LAST.set((self.client, if client == self.client { times.saturating_add(1) } else { 0 }));
    }

    /// For how long to poll for the next message, if at all.
    pub(crate) fn patience(&self) -> Option<Patience> {
        let (client, times) = LAST.get();
        if client != self.client || times < ALONE || self.gap > QUICK {
            return None;
        }
        let most = *most_polling();
        let polling = POLLING.fetch_add(1, Ordering::Relaxed);
        let patience = Patience(Instant::now() + 2 * self.gap);
        // Dropping it gives the place back.
        (polling < most).then_some(patience)
    }
}

/// A place among those who poll, until the patience is over.
pub(crate) struct Patience(Instant);

impl Patience {
    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

impl Drop for Patience {
    fn drop(&mut self) {
        POLLING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_quick_client_that_is_alone_is_polled_for() {
        let (mut quick, mut other) = (Rhythm::new(), Rhythm::new());
        for _ in 0..100 {
            quick.heard(Duration::from_micros(20));
        }
        assert!(quick.patience().is_some());
        assert!(other.patience().is_none());
        other.heard(Duration::from_micros(20));
        quick.heard(Duration::from_micros(20));
        assert!(quick.patience().is_none(), "not alone any more");
        for _ in 0..100 {
            quick.heard(Duration::from_millis(5));
        }
        assert!(quick.patience().is_none(), "slow by now");
    }
}

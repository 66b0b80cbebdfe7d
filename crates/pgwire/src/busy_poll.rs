//! Adaptive busy-polling: a worker polls for the next message of a client that responds quickly.
//!
//! For a client that sends its next request as soon as it has a response, most of the round trip is
//! spent waking up threads, both the client's and the worker's. On a virtual machine, waking an
//! idle CPU costs more than the statement. If a worker has served a single fast client for a while,
//! it therefore does not sleep after a response. It polls for the next message for about as long as
//! the client usually takes, and lets everything else on the worker run in between.
//!
//! Limits keep the cost to others small:
//!
//! - The client sent the last [`MIN_EXCLUSIVE_MESSAGES`] messages of its worker.
//! - Its usual gap between a response and the next message is at most [`MAX_GAP`].
//! - At most [`max_polled_clients`] clients of the process are polled at a time: half of the CPUs,
//!   at least one.
//! - A client that slows down is no longer polled after a few messages.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The number of consecutive messages of a worker that must come from the same client.
const MIN_EXCLUSIVE_MESSAGES: u32 = 32;
/// The maximum usual gap between a response and the next message.
const MAX_GAP: Duration = Duration::from_micros(100);

/// The number of clients that are currently polled.
static POLLED_CLIENTS: AtomicUsize = AtomicUsize::new(0);
static NEXT_CLIENT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The client that sent this worker's last message, and the number of consecutive messages from
    /// it.
    static LAST_CLIENT: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// Half of the CPUs. Cached, since the system call costs more than a statement.
fn max_polled_clients() -> &'static usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    MAX.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| (n.get() / 2).max(1)))
}

/// The message timing of a client.
pub struct BusyPoller {
    client: u64,
    /// The smoothed gap between a response and the next message.
    gap: Duration,
}

impl BusyPoller {
    pub fn new() -> BusyPoller {
        BusyPoller { client: NEXT_CLIENT.fetch_add(1, Ordering::Relaxed), gap: Duration::from_secs(1) }
    }

    /// Records that a message arrived `gap` after the last response.
    pub fn record_gap(&mut self, gap: Duration) {
        // A long pause is capped, so that the client is fast again after a few messages.
        let sample = gap.min(10 * MAX_GAP);
        self.gap = (self.gap.min(10 * MAX_GAP) * 7 + sample) / 8;
        let (client, times) = LAST_CLIENT.get();
        LAST_CLIENT.set((self.client, if client == self.client { times.saturating_add(1) } else { 0 }));
    }

    /// Returns a poll budget if the client should be polled.
    pub fn poll_budget(&self) -> Option<PollBudget> {
        let (client, times) = LAST_CLIENT.get();
        if client != self.client || times < MIN_EXCLUSIVE_MESSAGES || self.gap > MAX_GAP {
            return None;
        }
        let max = *max_polled_clients();
        let polling = POLLED_CLIENTS.fetch_add(1, Ordering::Relaxed);
        let budget = PollBudget(Instant::now() + 2 * self.gap);
        // Dropping it releases the slot.
        (polling < max).then_some(budget)
    }
}

/// The right to poll for a client, until the budget is used up.
pub struct PollBudget(Instant);

impl PollBudget {
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}

impl Drop for PollBudget {
    fn drop(&mut self) {
        POLLED_CLIENTS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_only_a_fast_client_without_competitors() {
        let (mut quick, mut other) = (BusyPoller::new(), BusyPoller::new());
        for _ in 0..100 {
            quick.record_gap(Duration::from_micros(20));
        }
        assert!(quick.poll_budget().is_some());
        assert!(other.poll_budget().is_none());
        other.record_gap(Duration::from_micros(20));
        quick.record_gap(Duration::from_micros(20));
        assert!(quick.poll_budget().is_none(), "another client has sent a message");
        for _ in 0..100 {
            quick.record_gap(Duration::from_millis(5));
        }
        assert!(quick.poll_budget().is_none(), "the client has become slow");
    }
}

//! Write turns: a fair lock for the writers of a contended partition, first come first served.
//!
//! A turn has two strengths:
//!
//! - A plain turn excludes only other turns: two replays at a time would conflict with each other.
//!   Optimistic commits continue. At moderate contention only few transactions conflict; if each
//!   replay stopped all other commits, they would queue for the next replay, and soon all would
//!   wait.
//! - An *exclusive* turn also excludes commits without a turn: they wait in the commit queue until
//!   it ends. A replay that is overtaken, or must not be, makes its turn exclusive, so that it
//!   cannot be overtaken again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The queue for a partition's turn.
pub struct TurnQueue {
    queue: Arc<Semaphore>,
    /// The ticket of the exclusive turn; 0 if there is none.
    holder: Arc<AtomicU64>,
    tickets: AtomicU64,
    /// The smoothed share of commits that conflict, in 1/65536.
    contention: AtomicU64,
}

/// A turn that is held; the next waiter gets it when it is dropped.
pub struct Turn {
    ticket: u64,
    holder: Arc<AtomicU64>,
    _permit: OwnedSemaphorePermit,
}

impl Turn {
    /// The number by which a commit recognizes the transaction that holds the turn.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Makes the turn exclusive: other transactions cannot commit until it ends.
    pub fn make_exclusive(&self) {
        self.holder.store(self.ticket, Ordering::Release);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // No other turn can be the holder: the permit is held until the end of this drop.
        self.holder.store(0, Ordering::Release);
    }
}

/// A partition is contended if more than half of its commits conflict. Below that it is cheaper to
/// run the losers twice, on all CPUs, than to run every transaction once, one after the other.
const CONTENTION_THRESHOLD: u64 = 65536 / 2;

impl TurnQueue {
    pub(crate) fn new() -> Self {
        TurnQueue {
            queue: Arc::new(Semaphore::new(1)),
            holder: Arc::default(),
            tickets: AtomicU64::new(0),
            contention: AtomicU64::new(0),
        }
    }

    /// Waits for the turn.
    pub async fn take(&self) -> Turn {
        // The semaphore is never closed.
        let Ok(permit) = self.queue.clone().acquire_owned().await else { unreachable!("closed turn queue") };
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed) + 1;
        Turn { ticket, holder: self.holder.clone(), _permit: permit }
    }

    /// The number of turns granted so far.
    pub fn taken(&self) -> u64 {
        self.tickets.load(Ordering::Relaxed)
    }

    /// The ticket of the exclusive turn; 0 if there is none.
    pub fn holder(&self) -> u64 {
        self.holder.load(Ordering::Acquire)
    }

    /// Records whether an optimistic commit conflicted.
    pub fn record_commit(&self, conflicted: bool) {
        let old = self.contention.load(Ordering::Relaxed);
        let sample = if conflicted { 65536 } else { 0 };
        // Lost updates by concurrent callers do not matter.
        self.contention.store(old - old / 16 + sample / 16, Ordering::Relaxed);
    }

    /// Decays the contention. Called for each commit in a turn, so that the partition becomes
    /// optimistic again after some hundred commits and measures the contention again.
    pub fn decay_contention(&self) {
        let old = self.contention.load(Ordering::Relaxed);
        self.contention.store(old - old / 256, Ordering::Relaxed);
    }

    /// Returns true if writers should take turns from the start.
    pub fn contended(&self) -> bool {
        self.contention.load(Ordering::Relaxed) > CONTENTION_THRESHOLD
    }
}

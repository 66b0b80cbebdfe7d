//! Turns: the right to be the one writer of a contended partition for a moment, first come first served.
//!
//! A turn comes in two strengths. At first it only keeps its holder apart from the others that queue for one: two
//! replays at a time would be each other's conflicts. Whoever conflicts is some few of many, so the others go on
//! committing meanwhile; if every replay stopped them, they would meet the next one, and all would soon stand in line.
//! Whoever is overtaken all the same, or must not be, makes its turn *exclusive*: the commits of others wait for its end in the
//! queue, so what its holder runs cannot be overtaken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The queue for a partition's turn.
pub(crate) struct Turns {
    queue: Arc<Semaphore>,
    /// The ticket of the turn that is held exclusively; 0 if none is.
    holder: Arc<AtomicU64>,
    tickets: AtomicU64,
    /// How often commits conflict, smoothed, in 1/65536.
    contention: AtomicU64,
}

/// A turn that is held; passed on when it is dropped.
pub(crate) struct Turn {
    ticket: u64,
    holder: Arc<AtomicU64>,
    _permit: OwnedSemaphorePermit,
}

impl Turn {
    /// What the transaction shows at its commit.
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    /// From now on nobody else commits until the turn ends.
    pub(crate) fn exclude_others(&self) {
        self.holder.store(self.ticket, Ordering::Release);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Nobody else can be the holder: the permit is ours until we are gone.
        self.holder.store(0, Ordering::Release);
    }
}

/// One conflict in two commits makes a partition contended: up to there it is cheaper to run the losers twice, on all
/// processors, than everything once, one after the other.
const CONTENDED: u64 = 65536 / 2;

impl Turns {
    pub(crate) fn new() -> Self {
        Turns {
            queue: Arc::new(Semaphore::new(1)),
            holder: Arc::default(),
            tickets: AtomicU64::new(0),
            contention: AtomicU64::new(0),
        }
    }

    /// Waits for the turn.
    pub(crate) async fn take(&self) -> Turn {
        // The semaphore is never closed.
        let Ok(permit) = self.queue.clone().acquire_owned().await else { unreachable!("closed turn queue") };
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed) + 1;
        Turn { ticket, holder: self.holder.clone(), _permit: permit }
    }

    /// How many there have been.
    pub(crate) fn taken(&self) -> u64 {
        self.tickets.load(Ordering::Relaxed)
    }

    /// The ticket of the turn that is held exclusively; 0 if none is.
    pub(crate) fn holder(&self) -> u64 {
        self.holder.load(Ordering::Acquire)
    }

    /// Counts an optimistic commit that went through or conflicted.
    pub(crate) fn note(&self, conflicted: bool) {
        let old = self.contention.load(Ordering::Relaxed);
        let sample = if conflicted { 65536 } else { 0 };
        // Lost updates of concurrent counters do not matter.
        self.contention.store(old - old / 16 + sample / 16, Ordering::Relaxed);
    }

    /// Lets the memory of contention fade: called for each commit in a turn, so that the partition becomes optimistic
    /// again some hundred commits later and finds out anew.
    pub(crate) fn fade(&self) {
        let old = self.contention.load(Ordering::Relaxed);
        self.contention.store(old - old / 256, Ordering::Relaxed);
    }

    /// Whether writers had better take turns from the start.
    pub(crate) fn contended(&self) -> bool {
        self.contention.load(Ordering::Relaxed) > CONTENDED
    }
}

//! A turn held across client round trips (BEGIN IMMEDIATE, and the next attempt after a 40001),
//! with time limits.
//!
//! The transaction keeps the turn while its client is active. If the client is silent for longer
//! than a few of its own round trips, or holds the turn too long in total, the turn is passed on,
//! and the transaction continues optimistically.
//!
//! One task watches a turn, for any number of statements: it sleeps until the silence limit, and
//! then either takes the turn away or finds that the client has been active meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use fulmar_mvcc::Turn;

/// Maximum silence of any client.
const MAX_SILENCE: Duration = Duration::from_millis(10);
/// Silence that is allowed to every client.
const MIN_SILENCE: Duration = Duration::from_millis(2);
/// Maximum time that a turn is held in total.
const MAX_HOLD: Duration = Duration::from_secs(1);

struct Inner {
    turn: Option<Turn>,
    /// When the silence limit is reached; None while a statement runs.
    deadline: Option<Instant>,
    /// The task that checks at that time.
    watch: Option<AbortHandle>,
}

impl Inner {
    /// Takes the turn away if the limit is reached. Returns the time of the next check; None ends
    /// the watch, and the next pause starts another one.
    fn expire_if_due(&mut self) -> Option<Instant> {
        let next_check = self.deadline.filter(|deadline| self.turn.is_some() && *deadline > Instant::now());
        if next_check.is_none() {
            if self.deadline.is_some() {
                self.turn = None;
            }
            self.watch = None;
        }
        next_check
    }
}

/// A turn that can be taken away while the client is silent.
pub(super) struct HeldTurn {
    inner: Arc<Mutex<Inner>>,
    since: Instant,
    answered: Option<Instant>,
    /// The client's smoothed round trip time in microseconds.
    round_trip_us: AtomicU64,
    /// Long silence is tolerated, since the transaction cannot be replayed.
    patient: bool,
}

impl Drop for HeldTurn {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        inner.turn = None;
        if let Some(watch) = inner.watch.take().filter(|_| self.patient) {
            // It would sleep for up to 30 s.
            watch.abort();
        }
    }
}

impl HeldTurn {
    pub(super) fn new(turn: Turn, patient: bool) -> Self {
        HeldTurn {
            inner: Arc::new(Mutex::new(Inner { turn: Some(turn), deadline: None, watch: None })),
            since: Instant::now(),
            answered: None,
            round_trip_us: AtomicU64::new(0),
            patient,
        }
    }

    /// Called when a statement begins. Returns the turn's ticket, or 0 if the turn was passed on.
    pub(super) fn resume(&mut self) -> u64 {
        if let Some(answered) = self.answered.take() {
            let sample = answered.elapsed().as_micros() as u64;
            let old = self.round_trip_us.load(Ordering::Relaxed);
            self.round_trip_us
                .store(if old == 0 { sample } else { (3 * old + sample) / 4 }, Ordering::Relaxed);
        }
        let mut inner = self.inner.lock();
        inner.deadline = None;
        inner.turn.as_ref().map_or(0, Turn::ticket)
    }

    /// Prevents all other commits while the turn is held.
    pub(super) fn exclude_others(&self) {
        if let Some(turn) = &self.inner.lock().turn {
            turn.make_exclusive();
        }
    }

    /// Called when the statement is answered: the client's silence counts from now on.
    pub(super) fn pause(&mut self) {
        let now = Instant::now();
        self.answered = Some(now);
        let mut inner = self.inner.lock();
        if inner.turn.is_none() {
            return;
        }
        let silence_limit = if self.patient {
            30 * MAX_HOLD
        } else {
            Duration::from_micros(4 * self.round_trip_us.load(Ordering::Relaxed))
                .clamp(MIN_SILENCE, MAX_SILENCE)
                .min(MAX_HOLD.saturating_sub(self.since.elapsed()))
        };
        // If this is sooner than the running watch's next check, the turn is taken away with a
        // delay of at most the maximum silence.
        inner.deadline = Some(now + silence_limit);
        if inner.watch.is_none() {
            let watched = self.inner.clone();
            let watch = tokio::spawn(async move {
                loop {
                    let Some(deadline) = watched.lock().expire_if_due() else { break };
                    tokio::time::sleep_until(deadline.into()).await;
                }
            });
            inner.watch = Some(watch.abort_handle());
        }
    }
}

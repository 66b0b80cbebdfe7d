//! A turn held across client round trips (BEGIN IMMEDIATE, and the next try after a 40001).
//!
//! It is held while the client keeps going. A client that falls silent for longer than a few of its own round trips, or
//! that takes too long in all, loses it: the turn is passed on and the transaction goes on optimistically.
//!
//! One task looks after a turn, however many statements it is held for: it sleeps until the client's silence has been too
//! long, and finds then that it has, or that the client has gone on meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use crate::partition::Turn;

/// A client that is silent for this long loses its turn, however slow it has been before.
const LONGEST_SILENCE: Duration = Duration::from_millis(10);
/// A client is given at least this long between two statements.
const SHORTEST_SILENCE: Duration = Duration::from_millis(2);
/// Nobody holds a turn for longer.
const LONGEST_HOLD: Duration = Duration::from_secs(1);

struct Inner {
    turn: Option<Turn>,
    /// When the client has been silent for too long; `None` while a statement runs.
    ends: Option<Instant>,
    /// By a task that will look when that is.
    watch: Option<AbortHandle>,
}

impl Inner {
    /// Takes the turn away if it is time. Answers when to look again; never, if the next one who waits has to start a watch.
    fn look(&mut self) -> Option<Instant> {
        let later = self.ends.filter(|ends| self.turn.is_some() && *ends > Instant::now());
        if later.is_none() {
            if self.ends.is_some() {
                self.turn = None;
            }
            self.watch = None;
        }
        later
    }
}

/// A turn that may be taken away while the client is silent.
pub(super) struct HeldTurn {
    inner: Arc<Mutex<Inner>>,
    since: Instant,
    answered: Option<Instant>,
    /// The client's round trip, smoothed, in microseconds.
    round_trip_us: AtomicU64,
    /// Kept through silence: the transaction cannot be replayed.
    patient: bool,
}

impl Drop for HeldTurn {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        inner.turn = None;
        if let Some(watch) = inner.watch.take().filter(|_| self.patient) {
            // It would sleep for half a minute.
            watch.abort();
        }
    }
}

impl HeldTurn {
    pub(super) fn new(turn: Turn, patient: bool) -> Self {
        HeldTurn {
            inner: Arc::new(Mutex::new(Inner { turn: Some(turn), ends: None, watch: None })),
            since: Instant::now(),
            answered: None,
            round_trip_us: AtomicU64::new(0),
            patient,
        }
    }

    /// A statement begins: the ticket of the turn, if it is still held; 0 if it was passed on.
    pub(super) fn resume(&mut self) -> u64 {
        if let Some(answered) = self.answered.take() {
            let sample = answered.elapsed().as_micros() as u64;
            let old = self.round_trip_us.load(Ordering::Relaxed);
            self.round_trip_us
                .store(if old == 0 { sample } else { (3 * old + sample) / 4 }, Ordering::Relaxed);
        }
        let mut inner = self.inner.lock();
        inner.ends = None;
        inner.turn.as_ref().map_or(0, Turn::ticket)
    }

    /// From now on nobody else commits, as long as the turn is held.
    pub(super) fn exclude_others(&self) {
        if let Some(turn) = &self.inner.lock().turn {
            turn.exclude_others();
        }
    }

    /// The statement is answered: from now on the client's silence counts.
    pub(super) fn pause(&mut self) {
        let now = Instant::now();
        self.answered = Some(now);
        let mut inner = self.inner.lock();
        if inner.turn.is_none() {
            return;
        }
        let patience = if self.patient {
            30 * LONGEST_HOLD
        } else {
            Duration::from_micros(4 * self.round_trip_us.load(Ordering::Relaxed))
                .clamp(SHORTEST_SILENCE, LONGEST_SILENCE)
                .min(LONGEST_HOLD.saturating_sub(self.since.elapsed()))
        };
        // If this is sooner than the one who watches will look, it looks after the longest silence at most.
        inner.ends = Some(now + patience);
        if inner.watch.is_none() {
            let watched = self.inner.clone();
            let watch = tokio::spawn(async move {
                loop {
                    let Some(ends) = watched.lock().look() else { break };
                    tokio::time::sleep_until(ends.into()).await;
                }
            });
            inner.watch = Some(watch.abort_handle());
        }
    }
}

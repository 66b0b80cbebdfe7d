//! A turn held across client round trips (BEGIN IMMEDIATE, and the next try after a 40001).
//!
//! It is held while the client keeps going. A client that falls silent for longer than a few of its own round trips, or
//! that takes too long in all, loses it: the turn is passed on and the transaction goes on optimistically.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::partition::Turn;

/// A client that is silent for this long loses its turn, however slow it has been before.
const LONGEST_SILENCE: Duration = Duration::from_millis(10);
/// A client is given at least this long between two statements.
const SHORTEST_SILENCE: Duration = Duration::from_millis(2);
/// Nobody holds a turn for longer.
const LONGEST_HOLD: Duration = Duration::from_secs(1);

struct Inner {
    turn: Option<Turn>,
    /// Raised whenever a statement begins, so that an older timer does nothing.
    silence: u64,
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
        // A timer may still hold the other end.
        self.inner.lock().turn = None;
    }
}

impl HeldTurn {
    pub(super) fn new(turn: Turn, patient: bool) -> Self {
        HeldTurn {
            inner: Arc::new(Mutex::new(Inner { turn: Some(turn), silence: 0 })),
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
        inner.silence += 1;
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
        self.answered = Some(Instant::now());
        let silence = {
            let inner = self.inner.lock();
            if inner.turn.is_none() {
                return;
            }
            inner.silence
        };
        let patience = if self.patient {
            30 * LONGEST_HOLD
        } else {
            Duration::from_micros(4 * self.round_trip_us.load(Ordering::Relaxed))
                .clamp(SHORTEST_SILENCE, LONGEST_SILENCE)
        };
        let left = if self.patient { patience } else { LONGEST_HOLD.saturating_sub(self.since.elapsed()) };
        let inner = self.inner.clone();
        tokio::spawn(async move {
            tokio::time::sleep(patience.min(left)).await;
            let mut inner = inner.lock();
            if inner.silence == silence {
                inner.turn = None;
            }
        });
    }
}

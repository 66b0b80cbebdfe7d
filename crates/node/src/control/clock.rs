//! The clock of a controller's term.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::environment::boot_time;

/// Where the time comes from.
pub(super) trait TimeSource: Send {
    /// The time since the machine was started, including the time that it was suspended.
    fn boot_time(&self) -> Duration;

    /// The time since 1970. It may be set at any time.
    fn unix_time(&self) -> Duration;
}

/// The clocks of the machine.
struct Machine;

impl TimeSource for Machine {
    fn boot_time(&self) -> Duration {
        boot_time()
    }

    fn unix_time(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

/// A smaller difference is no jump: clocks are adjusted all the time.
const MIN_JUMP_S: f64 = 10.0;

/// A clock that is not set: seconds since 1970 at the begin of the term, and then steadily on.
pub(super) struct Clock {
    source: Box<dyn TimeSource>,
    begun: Duration,
    begun_unix_s: f64,
    /// From this clock to the time of day, in seconds, when it was last compared.
    offset_s: f64,
}

impl Clock {
    /// A clock by those of the machine.
    pub fn new() -> Clock {
        Clock::with(Box::new(Machine))
    }

    /// A clock by another source.
    pub fn with(source: Box<dyn TimeSource>) -> Clock {
        let (begun, begun_unix_s) = (source.boot_time(), source.unix_time().as_secs_f64());
        Clock { source, begun, begun_unix_s, offset_s: 0.0 }
    }

    /// The time.
    pub fn at_s(&self) -> f64 {
        self.begun_unix_s + self.source.boot_time().saturating_sub(self.begun).as_secs_f64()
    }

    /// How far the time of day was set since the last call, in seconds, if it was.
    pub fn jumped(&mut self) -> Option<f64> {
        let offset_s = self.source.unix_time().as_secs_f64() - self.at_s();
        let jump_s = offset_s - std::mem::replace(&mut self.offset_s, offset_s);
        (jump_s.abs() >= MIN_JUMP_S).then_some(jump_s)
    }
}

/// The time of records, in milliseconds since 1970.
pub(super) fn unix_ms() -> u64 {
    Machine.unix_time().as_millis() as u64
}

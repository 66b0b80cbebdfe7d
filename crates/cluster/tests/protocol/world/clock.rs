//! The clocks of a machine.

use std::time::Duration;

use fulmar_cluster::Rules;

/// How wrong the clocks of a run are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockError {
    /// Within the margin of the lease: 2 % faster or slower.
    Tolerated,
    /// Three times faster or slower, and CLOCK_BOOTTIME stops while the machine is suspended.
    Unbounded,
}

/// Virtual time counts microseconds.
const ROUNDING: Duration = Duration::from_micros(4);

/// The clocks of a machine, as functions of virtual time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Speed of all clocks, in 1,000.
    per_mille: u32,
    /// CLOCK_BOOTTIME stops while the machine is suspended, which it must not.
    stops: bool,
    /// How long the machine was suspended.
    suspended: Duration,
    /// CLOCK_REALTIME at the start.
    unix_start: Duration,
}

impl Default for Clock {
    fn default() -> Clock {
        let unix_start = Duration::from_secs(1_800_000_000);
        Clock { per_mille: 1000, stops: false, suspended: Duration::ZERO, unix_start }
    }
}

impl Clock {
    /// A clock that is wrong in one direction.
    pub fn new(error: ClockError, is_fast: bool) -> Clock {
        let (slow, fast, stops) = match error {
            ClockError::Tolerated => (980, 1020, false),
            ClockError::Unbounded => (330, 3000, true),
        };
        let per_mille = if is_fast { fast } else { slow };
        Clock { per_mille, stops, ..Clock::default() }
    }

    fn elapsed(&self, now: Duration) -> Duration {
        now * self.per_mille / 1000
    }

    /// The clock that leases are counted on. Without the rule it is CLOCK_MONOTONIC.
    pub fn boot_time(&self, rules: &Rules, now: Duration) -> Duration {
        let stops = self.stops || !rules.boot_time;
        self.elapsed(now).saturating_sub(if stops { self.elapsed(self.suspended) } else { Duration::ZERO })
    }

    /// CLOCK_REALTIME.
    pub fn unix_time(&self, now: Duration) -> Duration {
        self.unix_start + self.elapsed(now)
    }

    /// How long a sleep really takes. Rounded up, as by every operating system.
    pub fn real(&self, duration: Duration) -> Duration {
        duration * 1000 / self.per_mille + ROUNDING
    }

    /// The machine was suspended.
    pub fn suspend(&mut self, duration: Duration) {
        self.suspended += duration;
    }

    /// CLOCK_REALTIME is set forwards or backwards.
    pub fn step(&mut self, forwards: bool, duration: Duration) {
        self.unix_start = match forwards {
            true => self.unix_start + duration,
            false => self.unix_start.saturating_sub(duration),
        };
    }
}

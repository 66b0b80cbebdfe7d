//! Time sources, hybrid timestamps and transaction ids.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};

/// A source of time: the system's clocks, or a test's.
pub trait TimeSource: Send + Sync {
    /// Milliseconds since 1970 (UTC).
    fn unix_ms(&self) -> u64;
    /// Milliseconds since about the start of the process. Never goes back, and includes time while
    /// the machine was suspended.
    fn monotonic_ms(&self) -> u64;
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemTime {
    start_ms: u64,
}

impl Default for SystemTime {
    fn default() -> Self {
        SystemTime { start_ms: boot_ms() }
    }
}

/// Milliseconds since the machine booted. Unlike CLOCK_MONOTONIC ([`std::time::Instant`]) this
/// clock advances while the machine is suspended, as the clocks of other machines do.
fn boot_ms() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

impl TimeSource for SystemTime {
    fn unix_ms(&self) -> u64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
    }

    fn monotonic_ms(&self) -> u64 {
        boot_ms() - self.start_ms
    }
}

/// 2024-01-01T00:00:00Z, the origin of transaction ids.
const EPOCH_MS: u64 = 1_704_067_200_000;

/// Low bits of a transaction id, a counter within the millisecond. In a cluster the lowest
/// [`ID_NODE_BITS`] of them are the node.
const ID_COUNTER_BITS: u32 = 21;

/// Bits of the node in the transaction ids of a cluster. The remaining counter allows 1024 ids per
/// millisecond and node; beyond that ids are ahead of the clock.
pub const ID_NODE_BITS: u32 = 11;

/// How far an id may be ahead of a node's clock. Clocks differ, and a node that has restarted assigns
/// ids above those that it had reserved before ([`IdReservation`]).
pub const MAX_ID_LEAD: u64 = 64_000 << ID_COUNTER_BITS;

/// The times of the ids that this process may assign, in milliseconds since 1970: from `from_ms` on,
/// which earlier processes have not reached.
#[derive(Debug)]
pub struct IdReservation {
    from_ms: u64,
    until_ms: AtomicU64,
}

impl IdReservation {
    /// Reserved times.
    pub fn new(from_ms: u64, until_ms: u64) -> Self {
        IdReservation { from_ms, until_ms: AtomicU64::new(until_ms) }
    }

    /// Times up to this one are reserved as well.
    pub fn extend(&self, until_ms: u64) {
        self.until_ms.fetch_max(until_ms, Ordering::AcqRel);
    }
}

impl Default for IdReservation {
    /// All times.
    fn default() -> Self {
        IdReservation::new(0, u64::MAX)
    }
}

/// Maximum lead of hybrid timestamps over the system clock before it is reported.
pub const MAX_CLOCK_LEAD_MS: u64 = 60_000;

/// The first id of a time.
fn id_at(unix_ms: u64) -> u64 {
    unix_ms.saturating_sub(EPOCH_MS).min(u64::MAX >> ID_COUNTER_BITS) << ID_COUNTER_BITS
}

/// Hybrid timestamps and transaction ids of a node.
pub struct Clock {
    source: Arc<dyn TimeSource>,
    hybrid: AtomicU64,
    /// Whether hybrid timestamps are more than [`MAX_CLOCK_LEAD_MS`] ahead.
    is_ahead: AtomicBool,
    id: AtomicU64,
    /// The node in the lowest bits of transaction ids; None if it is the only one.
    id_node: Option<u32>,
    reserved: Arc<IdReservation>,
}

impl Clock {
    /// Creates a clock.
    pub fn new(source: Arc<dyn TimeSource>) -> Self {
        Clock {
            source,
            hybrid: AtomicU64::new(0),
            is_ahead: AtomicBool::new(false),
            id: AtomicU64::new(0),
            id_node: None,
            reserved: Arc::default(),
        }
    }

    /// Makes transaction ids unique in a cluster. `node` has at most [`ID_NODE_BITS`] bits.
    pub fn for_node(self, node: u32, reserved: Arc<IdReservation>) -> Self {
        self.observe_id(id_at(reserved.from_ms));
        Clock { id_node: Some(node), reserved, ..self }
    }

    /// Milliseconds since 1970 (UTC).
    pub fn unix_ms(&self) -> u64 {
        self.source.unix_ms()
    }

    /// Milliseconds since about the start of the process.
    pub fn monotonic_ms(&self) -> u64 {
        self.source.monotonic_ms()
    }

    /// Returns a hybrid timestamp above all earlier ones: milliseconds since 1970 in the upper 48
    /// bits, a counter in the lower 16.
    pub fn tick(&self) -> u64 {
        let now_ms = self.unix_ms();
        let timestamp = self.above(&self.hybrid, now_ms << 16);
        self.report_lead((timestamp >> 16).saturating_sub(now_ms));
        timestamp
    }

    /// Logs when hybrid timestamps get far ahead of the system clock, and when the clock has caught
    /// up. The times of restore points made in between do not say when their versions were current
    /// (`history` in `fulmar_maintenance`).
    fn report_lead(&self, lead_ms: u64) {
        let is_ahead = lead_ms > MAX_CLOCK_LEAD_MS;
        if self.is_ahead.load(Ordering::Relaxed) == is_ahead
            || self.is_ahead.swap(is_ahead, Ordering::Relaxed) == is_ahead
        {
            return;
        }
        match is_ahead {
            true => tracing::warn!(
                lead_ms,
                "system clock was set back; restore points have wrong times until it has caught up"
            ),
            false => tracing::info!("system clock has caught up with the times of restore points"),
        }
    }

    /// Makes all later timestamps greater than one that was read from a log.
    pub fn observe(&self, timestamp: u64) {
        self.hybrid.fetch_max(timestamp, Ordering::AcqRel);
    }

    /// Returns a new transaction id, which contains the time of its assignment.
    pub fn transaction_id(&self) -> u64 {
        let Some(node) = self.id_node else { return self.above(&self.id, self.newest_id()) };
        // At the end of the reserved times, for example without the metadata store, ids are behind the
        // clock.
        let end = id_at(self.reserved.until_ms.load(Ordering::Acquire));
        let now = self.newest_id().min(end) >> ID_NODE_BITS;
        let next = |seen: u64| now.max((seen >> ID_NODE_BITS) + 1) << ID_NODE_BITS | u64::from(node);
        let seen = self.id.update(Ordering::AcqRel, Ordering::Acquire, next);
        next(seen)
    }

    /// An upper bound of all ids assigned so far, by the current time.
    pub fn newest_id(&self) -> u64 {
        id_at(self.unix_ms())
    }

    /// Makes all later ids greater than one that was read from a log.
    pub fn observe_id(&self, id: u64) {
        self.id.fetch_max(id, Ordering::AcqRel);
    }

    fn above(&self, last: &AtomicU64, now: u64) -> u64 {
        let mut seen = last.load(Ordering::Acquire);
        loop {
            let next = now.max(seen + 1);
            match last.compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return next,
                Err(other) => seen = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_and_ids_grow_when_the_clock_goes_back() {
        struct Back(AtomicU64);
        impl TimeSource for Back {
            fn unix_ms(&self) -> u64 {
                EPOCH_MS + self.0.fetch_sub(1, Ordering::Relaxed)
            }
            fn monotonic_ms(&self) -> u64 {
                0
            }
        }
        let clock = Clock::new(Arc::new(Back(AtomicU64::new(100))));
        let (a, b) = (clock.tick(), clock.tick());
        assert!(b > a);
        let (a, b) = (clock.transaction_id(), clock.transaction_id());
        assert!(b > a && a >> ID_COUNTER_BITS == 98);
        clock.observe(b << 32);
        assert!(clock.tick() > b << 32);
    }

    #[test]
    fn ids_do_not_repeat_when_the_clock_is_set_back_over_a_restart() {
        struct At(u64);
        impl TimeSource for At {
            fn unix_ms(&self) -> u64 {
                EPOCH_MS + self.0
            }
            fn monotonic_ms(&self) -> u64 {
                0
            }
        }
        let reserved = |from, until| Arc::new(IdReservation::new(EPOCH_MS + from, EPOCH_MS + until));
        let ids = |clock: &Clock| [(); 3].map(|()| clock.transaction_id());
        let first = Clock::new(Arc::new(At(1000))).for_node(7, reserved(0, 1500));
        let before = ids(&first);
        assert!(before.iter().all(|id| id >> ID_COUNTER_BITS == 1000 && id % (1 << ID_NODE_BITS) == 7));
        let second = Clock::new(Arc::new(At(990))).for_node(7, reserved(1500, 2500));
        assert!(ids(&second).iter().all(|id| id >> ID_COUNTER_BITS == 1500), "above all that were reserved");
        // The clock is beyond the reserved times, until more are reserved.
        let third_reserved = reserved(2500, 3500);
        let third = Clock::new(Arc::new(At(9000))).for_node(7, third_reserved.clone());
        assert!(ids(&third).iter().all(|id| id >> ID_COUNTER_BITS == 3500));
        third_reserved.extend(EPOCH_MS + 10_000);
        assert!(ids(&third).iter().all(|id| id >> ID_COUNTER_BITS == 9000));
    }

    #[test]
    fn lead_over_the_system_clock_is_reported_until_it_catches_up() {
        struct Set(AtomicU64);
        impl TimeSource for Set {
            fn unix_ms(&self) -> u64 {
                self.0.load(Ordering::Relaxed)
            }
            fn monotonic_ms(&self) -> u64 {
                0
            }
        }
        let source = Arc::new(Set(AtomicU64::new(EPOCH_MS)));
        let clock = Clock::new(source.clone());
        let is_ahead_at = |ms: u64| {
            source.0.store(EPOCH_MS + ms, Ordering::Relaxed);
            clock.tick();
            clock.is_ahead.load(Ordering::Relaxed)
        };
        let leads =
            [3 * MAX_CLOCK_LEAD_MS, 2 * MAX_CLOCK_LEAD_MS + 1, 0, MAX_CLOCK_LEAD_MS, 3 * MAX_CLOCK_LEAD_MS]
                .map(is_ahead_at);
        assert_eq!(leads, [false, false, true, true, false]);
    }
}

//! Decides when a garbage collection is due.

use std::time::Duration;

/// Bytes of segments written that trigger a collection. While disk space is low any written byte
/// does.
const TRIGGER_BYTES: u64 = 256 << 20;
/// Maximum interval between collections, and delay of the first one after the start: a crash may
/// have left garbage.
const INTERVAL: Duration = Duration::from_secs(600);
const FIRST_DELAY: Duration = Duration::from_secs(60);

/// Decides when a collection is due.
#[derive(Default)]
pub(crate) struct Schedule {
    /// Bytes of segments written since the last collection.
    pub written_bytes: u64,
    /// Whether a partition was dropped since the last collection.
    pub dropped: bool,
    /// Time of the last collection (monotonic milliseconds); None before the first.
    last_ms: Option<u64>,
}

impl Schedule {
    /// Returns true if a collection is due, and then counts it as begun.
    pub(crate) fn take(&mut self, now_ms: u64, disk_is_low: bool) -> bool {
        let waited = match self.last_ms {
            None => now_ms > FIRST_DELAY.as_millis() as u64,
            Some(last_ms) => now_ms.saturating_sub(last_ms) > INTERVAL.as_millis() as u64,
        };
        let has_garbage = self.written_bytes > 0 || self.dropped;
        let due = self.written_bytes > TRIGGER_BYTES || waited || (disk_is_low && has_garbage);
        if due {
            *self = Schedule { last_ms: Some(now_ms), ..Schedule::default() };
        }
        due
    }
}

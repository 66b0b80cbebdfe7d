//! Configuration of a local log, and requests to a log's writer.

use std::time::Duration;

/// How soon a record must be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// As soon as the disk is idle: a session waits for it and will continue afterwards. If the
    /// appending thread announces when it is idle ([`announce_idle`](super::announce_idle)) and the
    /// log is busy, the record may wait until then.
    Immediate,
    /// As `Immediate`, unless the appender commits infrequently. The duration is the time since its
    /// last commit. If it is long enough, the record may wait for others to share its sync, for at
    /// most a tenth of that time.
    Deferred(Duration),
    /// As soon as the disk is idle, and accepted even if the log is full, within its
    /// [reserve](LogOptions::capacity_bytes): once the record is durable, the log can be truncated.
    FreesSpace,
}

/// The reserve of a log is its capacity divided by this.
pub(super) const RESERVE_DIVISOR: u64 = 8;

/// Whether, and how, a log's writer must stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    No,
    /// Once everything is durable and the log is sealed.
    Drain,
    /// Immediately.
    Abandon,
}

/// Configuration of a local log.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// Length of a log file. The first file of a log is shorter, so that a node starts fast.
    pub file_bytes: u64,
    /// Maximum size of all files together; at least four files. In addition, an eighth of it (at
    /// least one file) is reserved for [`Urgency::FreesSpace`].
    pub capacity_bytes: u64,
    /// Maximum size of the records that wait in memory to be written. The same amount can be in
    /// flight to the disk.
    pub pending_bytes: usize,
    /// Delay before the disk is retried after a failure. Doubles with each attempt, up to
    /// [`MAX_RETRY_DELAY`].
    pub retry_delay: Duration,
}

/// Maximum delay between two attempts to use a broken or full disk.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            file_bytes: 64 << 20,
            capacity_bytes: 1 << 30,
            pending_bytes: 64 << 20,
            retry_delay: Duration::from_millis(50),
        }
    }
}

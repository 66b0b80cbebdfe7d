//! Helpers for the tests of the log.
#![allow(dead_code, reason = "each test binary uses its part")]

mod records;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_store::{CommitLog, LogError, LogFiles, LogOptions, Lsn, Urgency};

pub use records::commit;

pub use futures::FutureExt;
pub use futures::executor::block_on;

/// Short files and short retry delays.
pub fn options() -> LogOptions {
    LogOptions {
        file_bytes: 4096,
        capacity_bytes: 1 << 20,
        pending_bytes: 1 << 20,
        retry_delay: Duration::from_millis(1),
    }
}

pub type Opened = Result<(Arc<CommitLog>, Vec<(u64, Lsn)>), LogError>;

/// Opens a log. Also returns the replayed transaction ids and positions.
pub fn open_with(options: LogOptions, files: impl LogFiles) -> Opened {
    let mut seen = Vec::new();
    let log = CommitLog::open(options, Arc::new(files), &mut |lsn, record| {
        assert_eq!(
            record.body(),
            commit(record.header.transaction, record.pages().next().unwrap().diff.len())
        );
        seen.push((record.header.transaction, lsn));
        Ok(())
    })?;
    Ok((log, seen))
}

pub fn open(files: impl LogFiles) -> (Arc<CommitLog>, Vec<(u64, Lsn)>) {
    open_with(options(), files).unwrap()
}

pub fn transactions(seen: &[(u64, Lsn)]) -> Vec<u64> {
    seen.iter().map(|(transaction, _)| *transaction).collect()
}

/// Appends a record, waiting for space if necessary.
pub fn append(log: &CommitLog, transaction: u64, bytes: usize) -> Result<Lsn, LogError> {
    let body = commit(transaction, bytes);
    loop {
        match log.append(&body, Urgency::Immediate) {
            Err(LogError::Busy) => block_on(log.wait_for_space(body.len(), Urgency::Immediate))?,
            other => return other,
        }
    }
}

/// Appends a record and waits until it is durable.
pub fn append_durably(log: &CommitLog, transaction: u64, bytes: usize) -> Lsn {
    let lsn = append(log, transaction, bytes).unwrap();
    block_on(log.wait_durable(lsn)).unwrap();
    lsn
}

/// Waits for an effect of another thread.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !condition() {
        assert!(Instant::now() < end, "timed out: {what}");
        std::thread::yield_now();
    }
}

/// Xorshift: deterministic on every platform.
pub struct Random(pub u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

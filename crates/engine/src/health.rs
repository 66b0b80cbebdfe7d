//! Health of a node, and statistics of its recovery at startup.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_mvcc::Replay;
use fulmar_pages::PartitionId;
use fulmar_store::CommitLog;
use hashbrown::HashMap;

/// What recovery has read from a log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recovery {
    /// Commit records in the log, including those that manifests already cover.
    pub records: u64,
    /// Size of these records.
    pub bytes: u64,
    /// Number of partitions they belong to.
    pub partitions: u64,
    /// Duration of the recovery.
    pub time: Duration,
}

impl Recovery {
    pub(crate) fn of(replays: &HashMap<PartitionId, Arc<Replay>>, time: Duration) -> Self {
        let records = || replays.values().flat_map(|replay| replay.records());
        Recovery {
            records: records().count() as u64,
            bytes: records().map(|logged| logged.body.len() as u64).sum(),
            partitions: replays.len() as u64,
            time,
        }
    }
}

/// The current conditions that keep a node from accepting work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// 0: enough disk space; 1: commits that need more space are rejected; 2: all commits are
    /// rejected.
    pub disk_level: u64,
    /// The node's local log.
    pub log: LogHealth,
    /// The shared log in the store, used by databases with `shared` durability. Healthy if it is
    /// not open.
    pub shared_log: LogHealth,
}

/// The current conditions that keep a log from accepting records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogHealth {
    /// Failures since the node started.
    pub failures: u64,
    /// Whether the log can be written.
    pub works: bool,
    /// Whether the log rejects records because it is out of space.
    pub full: bool,
}

impl LogHealth {
    /// A log without problems.
    pub const HEALTHY: LogHealth = LogHealth { failures: 0, works: true, full: false };

    pub(crate) fn of(log: &CommitLog) -> Self {
        // Read before the counter: a failure is counted before `works` reports it.
        let works = log.is_read_only() || log.check_available().is_ok();
        LogHealth {
            failures: log.statistics().failures.load(Ordering::Relaxed),
            works,
            full: log.full_cause().is_some(),
        }
    }

    /// Whether the log accepts records.
    pub fn accepts(&self) -> bool {
        self.works && !self.full
    }
}

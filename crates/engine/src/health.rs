//! Health of a node, and statistics of its recovery at startup.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::CommitLog;
use hashbrown::HashMap;

use crate::Engine;
use crate::partition::Replay;

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
    pub const WELL: LogHealth = LogHealth { failures: 0, works: true, full: false };

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

impl Engine {
    /// Reports the conditions that keep the node from accepting work.
    pub fn health(&self) -> Health {
        let node = self.node();
        Health {
            disk_level: node.disk.level(),
            log: LogHealth::of(&node.log),
            shared_log: node.shared_log.get().map_or(LogHealth::WELL, |log| LogHealth::of(log)),
        }
    }

    /// Whether the node accepts commits, for health checks. True if:
    /// - the local log works and is not full;
    /// - the disk is not full;
    /// - no other process has taken over the store;
    /// - on a replica, the primary's log can be read.
    ///
    /// The shared log does not count: without it the node still serves all databases that do not
    /// commit to it.
    pub fn accepts_commits(&self) -> bool {
        let can_read = self.beside.as_ref().is_none_or(|beside| beside.is_well());
        let owns_store = self.node().tenure.as_ref().is_none_or(|tenure| !tenure.is_over());
        can_read && owns_store && self.node().disk.admit(false).is_ok() && self.health().log.accepts()
    }
}

//! Whether a node can do all of its work, and what its start has found.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::CommitLog;
use hashbrown::HashMap;

use crate::Engine;
use crate::partition::Replay;

/// What the start has read of the log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recovery {
    /// Commits that stand in it, whether manifests cover them or not.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The partitions that they belong to.
    pub partitions: u64,
    /// How long that took.
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

/// What keeps a node from its work, now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// 0: there is space; 1: commits that need more space are refused; 2: all are.
    pub disk_level: u64,
    /// The node's own log.
    pub log: LogHealth,
    /// The one in the store, that of the databases that are `shared`; a node that does not need it has none.
    pub shared_log: LogHealth,
}

/// What keeps a log from its work, now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogHealth {
    /// Failures since the start.
    pub failures: u64,
    /// Whether it can be written.
    pub works: bool,
    /// Whether it refuses records for want of space.
    pub full: bool,
}

impl LogHealth {
    /// Nothing keeps it.
    pub const WELL: LogHealth = LogHealth { failures: 0, works: true, full: false };

    pub(crate) fn of(log: &CommitLog) -> Self {
        // Asked first: a failure is counted before it shows.
        let works = log.is_read_only() || log.works().is_ok();
        LogHealth {
            failures: log.statistics().failures.load(Ordering::Relaxed),
            works,
            full: log.full().is_some(),
        }
    }

    /// Whether it takes records.
    pub fn accepts(&self) -> bool {
        self.works && !self.full
    }
}

impl Engine {
    /// What keeps the node from its work.
    pub fn health(&self) -> Health {
        let node = self.node();
        Health {
            disk_level: node.disk.level(),
            log: LogHealth::of(&node.log),
            shared_log: node.shared_log.get().map_or(LogHealth::WELL, |log| LogHealth::of(log)),
        }
    }

    /// Whether commits are accepted, for health checks: the node's own log is not failing, neither it nor the disk is
    /// full, and no other process has taken over the store. The log in the store does not count: without it the node serves all databases that do not commit to it. But of a node
    /// that reads beside another one: whether that one's log can be read.
    pub fn accepts_commits(&self) -> bool {
        let can_read = self.beside.as_ref().is_none_or(|beside| beside.is_well());
        let owns_store = self.node().tenure.as_ref().is_none_or(|tenure| !tenure.is_over());
        can_read && owns_store && self.node().disk.admit(false).is_ok() && self.health().log.accepts()
    }
}

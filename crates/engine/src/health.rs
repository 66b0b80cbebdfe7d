//! Whether a node can do all of its work, and what its start has found.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::LogError;
use futures::FutureExt;
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
        let records = || replays.values().flat_map(|replay| &replay.records);
        Recovery {
            records: records().count() as u64,
            bytes: records().map(|(_, body)| body.len() as u64).sum(),
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
    /// Failures of the logs since the start.
    pub log_failures: u64,
    /// Whether all logs can be written.
    pub log_works: bool,
    /// Whether one refuses records for want of space.
    pub log_full: bool,
}

impl Engine {
    /// What keeps the node from its work.
    pub fn health(&self) -> Health {
        let node = self.node();
        Health {
            disk_level: node.disk.level(),
            log_failures: node.logs().map(|log| log.statistics().failures.load(Ordering::Relaxed)).sum(),
            log_works: node.logs().all(|log| match log.wait_room(0).now_or_never() {
                Some(Err(error)) => matches!(error, LogError::Full(_)),
                _ => true,
            }),
            log_full: node.logs().any(|log| log.full().is_some()),
        }
    }

    /// Whether commits are accepted, for health checks: the log is not failing, and neither it nor the disk is full.
    pub fn accepts_commits(&self) -> bool {
        let health = self.health();
        self.node().disk.admit(false).is_ok() && health.log_works && !health.log_full
    }
}

//! The health of an engine.

use super::Engine;
use crate::health::{Health, LogHealth};

impl Engine {
    /// Reports the conditions that keep the node from accepting work.
    pub fn health(&self) -> Health {
        let node = self.node();
        Health {
            disk_level: node.disk.level(),
            log: LogHealth::of(&node.log),
            shared_log: node.shared_log.get().map_or(LogHealth::HEALTHY, |log| LogHealth::of(log)),
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
        let can_read = self.replica().is_none_or(|replica| replica.is_healthy());
        let owns_store = !self.node().is_taken_over();
        can_read && owns_store && self.node().disk.admit(false).is_ok() && self.health().log.accepts()
    }
}

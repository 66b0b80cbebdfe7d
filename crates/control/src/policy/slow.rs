//! Which slow node is replaced (ElasTraS 7.9): one at a time, and one per hour.
//!
//! A node that was chosen counts as no capacity. So the rule adds another one, unless the others are
//! enough, and then it is drained. It stays chosen when it is fast again: without load most nodes
//! are.
//!
//! Not chosen is a node
//! - that is overloaded, which explains why it is slow;
//! - that cannot be removed, because no provisioner has added it or a tenant is pinned to it.
//!
//! A tenant may be what makes its node slow, and move along. The pause of an hour limits what that
//! costs.

use std::collections::BTreeSet;

use crate::picture::{Node, NodeState, Picture};

/// After a slow node was drained, no other one is chosen for this time, in seconds.
const PAUSE_S: f64 = 3600.0;

/// The slow node that is being replaced.
#[derive(Debug, Default)]
pub(super) struct SlowNode {
    chosen: Option<String>,
    /// When the last one was drained.
    drained_at_s: Option<f64>,
}

impl SlowNode {
    /// The node that is being replaced, or a new one. `is_overloaded` says whether a node is.
    pub(super) fn choose<'a>(
        &mut self,
        picture: &'a Picture,
        is_overloaded: impl Fn(&Node) -> bool,
    ) -> Option<&'a Node> {
        let with_pins: BTreeSet<&str> =
            picture.partitions.iter().filter(|of| of.pinned).map(|of| of.owner.as_str()).collect();
        let removable = || {
            let can_leave = |node: &&Node| {
                node.state == NodeState::Active && !node.fixed && !with_pins.contains(node.name.as_str())
            };
            picture.nodes.iter().filter(can_leave)
        };
        let is_chosen = |node: &&Node| self.chosen.as_ref() == Some(&node.name);
        let chosen = removable().find(is_chosen).or_else(|| {
            let is_paused = self.drained_at_s.is_some_and(|at_s| picture.at_s - at_s < PAUSE_S);
            removable().find(|node| node.slow && !is_paused && !is_overloaded(node))
        });
        self.chosen = chosen.map(|node| node.name.clone());
        chosen
    }

    /// Records that the node that was chosen is drained.
    pub(super) fn drained(&mut self, at_s: f64) {
        self.drained_at_s = Some(at_s);
    }
}

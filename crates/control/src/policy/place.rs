//! Where a tenant goes (ShuttleDB 4, step 3; ElasTraS 6.5).
//!
//! - A new tenant goes to the least loaded node.
//! - A tenant that needs more goes to the nearest node with enough idle capacity: same rack, same
//!   site, another site. Among equally near ones, the least loaded. Only to a node that will be less
//!   used than its own is, by [`MIN_GAIN`]: elsewhere it would be as late, and moves cost both nodes.
//! - A tenant that needs more than any node has goes to the emptiest one, nearest first, where it gets
//!   the most.
//!
//! Only active nodes that are not forbidden and have memory are chosen, and none above `high` with
//! it, except for a tenant that needs more than any node has.

use std::collections::HashMap;

use super::MIN_GAIN;
use crate::picture::{Node, Partition, Picture};

/// What a tenant is placed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// More resources: the least loaded node with room.
    Relief,
    /// More than any node has: the least loaded node.
    Extraction,
}

/// The distance of two nodes: 0 same rack, 1 same site, 2 different sites.
pub fn distance(left: &Node, right: &Node) -> u8 {
    match (left.site == right.site, left.rack == right.rack) {
        (true, true) => 0,
        (true, false) => 1,
        (false, _) => 2,
    }
}

/// The nodes of a picture with what they have, including the tenants that were placed already.
pub struct Places<'a> {
    picture: &'a Picture,
    by_name: HashMap<&'a str, usize>,
    /// Load and memory of each node.
    used: Vec<(f64, u64)>,
}

impl<'a> Places<'a> {
    /// The placement of a picture.
    pub fn new(picture: &'a Picture) -> Places<'a> {
        let by_name: HashMap<&str, usize> =
            picture.nodes.iter().enumerate().map(|(index, node)| (node.name.as_str(), index)).collect();
        let mut used = vec![(0.0, 0_u64); picture.nodes.len()];
        for partition in &picture.partitions {
            if let Some(owner) = by_name.get(partition.owner.as_str()) {
                let (load, memory) = &mut used[*owner];
                *load += partition.load;
                *memory = memory.saturating_add(partition.memory);
            }
        }
        Places { picture, by_name, used }
    }

    /// Finds a node for a tenant that moves, and counts the tenant there from now on. `None` if no
    /// other node has room.
    pub fn place(&mut self, tenant: &Partition, purpose: Purpose, high: f64) -> Option<&'a Node> {
        let home = self.by_name.get(tenant.owner.as_str()).copied();
        let home_utilisation = home.map(|home| self.used[home].0 / self.picture.nodes[home].capacity);
        let with_tenant = |index: usize, node: &Node| {
            let (load, memory) = self.used[index];
            ((load + tenant.load) / node.capacity, memory.saturating_add(tenant.memory))
        };
        let has_room = |(index, node): &(usize, &Node)| {
            let (utilisation, memory) = with_tenant(*index, node);
            let is_better = home_utilisation.is_none_or(|home| utilisation <= home - MIN_GAIN);
            let fits = (utilisation <= high || purpose == Purpose::Extraction) && memory <= node.memory;
            node.accepts_moves() && home != Some(*index) && fits && is_better
        };
        let rank = |(index, node): &(usize, &Node)| {
            let (utilisation, _) = with_tenant(*index, node);
            (home.map_or(0, |home| distance(&self.picture.nodes[home], node)), utilisation)
        };
        let open = self.picture.nodes.iter().enumerate().filter(has_room);
        let (chosen, node) = open.min_by(|left, right| {
            let (left, right) = (rank(left), rank(right));
            left.0.cmp(&right.0).then(left.1.total_cmp(&right.1))
        })?;
        let left_behind = home.map(|home| (home, -tenant.load, 0));
        for (index, load, memory) in left_behind.into_iter().chain([(chosen, tenant.load, tenant.memory)]) {
            self.used[index].0 += load;
            self.used[index].1 = self.used[index].1.saturating_add(memory);
        }
        Some(node)
    }

    /// Finds a node for a new tenant: the least loaded one with memory for it. `None` if all are
    /// closed or full.
    pub fn place_new(&self, memory: u64) -> Option<&'a Node> {
        let open =
            self.picture.nodes.iter().zip(&self.used).filter(|(node, (_, used))| {
                node.accepts_moves() && used.saturating_add(memory) <= node.memory
            });
        let utilisation = |(node, (load, _)): &(&Node, &(f64, u64))| load / node.capacity;
        open.min_by(|left, right| utilisation(left).total_cmp(&utilisation(right))).map(|(node, _)| node)
    }
}

//! Where a tenant goes (ShuttleDB 4, step 3; ElasTraS 6.5).
//!
//! - A new tenant goes to the least loaded node.
//! - A tenant that needs more goes to the nearest node with enough idle capacity: same rack, same site,
//!   another site. Among equally near ones, the least loaded.
//! - A tenant that is consolidated goes to the nearest node that has room and is the fullest.
//!
//! Only active nodes that are not forbidden and have memory are chosen, and none above `high` with it.

use std::collections::HashMap;

use crate::picture::{Node, Partition, Picture};

/// What a tenant is placed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// More resources: the least loaded node.
    Relief,
    /// Fewer nodes: the fullest node with room.
    Consolidation,
}

/// The distance of two nodes: 0 same rack, 1 same site, 2 different sites.
pub fn distance(left: &Node, right: &Node) -> u8 {
    match (left.site == right.site, left.rack == right.rack) {
        (true, true) => 0,
        (true, false) => 1,
        (false, _) => 2,
    }
}

struct Use {
    load: f64,
    memory: u64,
}

fn uses(picture: &Picture) -> HashMap<&str, Use> {
    let mut uses: HashMap<&str, Use> = HashMap::new();
    for partition in &picture.partitions {
        let owner = uses.entry(partition.owner.as_str()).or_insert(Use { load: 0.0, memory: 0 });
        owner.load += partition.load;
        owner.memory = owner.memory.saturating_add(partition.memory);
    }
    uses
}

/// The node for a tenant that moves. `None` if no other node has room.
pub fn place<'a>(picture: &'a Picture, tenant: &Partition, purpose: Purpose, high: f64) -> Option<&'a Node> {
    let home = picture.nodes.iter().find(|node| node.name == tenant.owner);
    let uses = uses(picture);
    let with_tenant = |node: &Node| {
        let (load, memory) = uses.get(node.name.as_str()).map_or((0.0, 0), |sum| (sum.load, sum.memory));
        ((load + tenant.load) / node.capacity, memory.saturating_add(tenant.memory))
    };
    let has_room = |node: &&Node| {
        let (utilisation, memory) = with_tenant(node);
        node.accepts_moves() && node.name != tenant.owner && utilisation <= high && memory <= node.memory
    };
    let rank = |node: &Node| {
        let (utilisation, _) = with_tenant(node);
        let order = if purpose == Purpose::Relief { utilisation } else { -utilisation };
        (home.map_or(0, |home| distance(home, node)), order)
    };
    picture.nodes.iter().filter(has_room).min_by(|left, right| {
        let (left, right) = (rank(left), rank(right));
        left.0.cmp(&right.0).then(left.1.total_cmp(&right.1))
    })
}

/// The node for a new tenant: the least loaded one with memory for it. `None` if all are closed or full.
pub fn place_new(picture: &Picture, memory: u64) -> Option<&Node> {
    let uses = uses(picture);
    let usage = |node: &Node| {
        uses.get(node.name.as_str()).map_or((0.0, 0), |sum| (sum.load / node.capacity, sum.memory))
    };
    let open = picture
        .nodes
        .iter()
        .filter(|node| node.accepts_moves() && usage(node).1.saturating_add(memory) <= node.memory);
    open.min_by(|left, right| usage(left).0.total_cmp(&usage(right).0))
}

//! The picture of the cluster that the controller decides on.
//!
//! - A node that was never heard from since the controller was elected counts as starting. One whose
//!   report is old, that is slow, or that other nodes do not hear gets nothing. The policy may
//!   drain one that is slow for `replace_after`.
//! - A node that has ended is missing for `replace_after`, and then dead until it was replaced.
//! - A partition that is being moved, or waits for that, is shown at its destination.
//! - A partition needs the memory of its `cache_floor`. Its other pages in memory are a cache, which a
//!   new owner makes room for.
//! - While a node is overloaded, its partitions show their hot keys, for the reasons of decisions.
//! - Partitions that cannot move count as pinned: those of `local` durability in a common store,
//!   quarantined ones, those whose pages are still being copied, and those whose last move has failed
//!   within the cool-down, or a minute ago if their node has to be emptied.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use fulmar_cluster::{LogKind, NodeId, NodeState as RecordState};
use fulmar_control::picture::{Node as PictureNode, NodeState, Partition, Picture, Piece};
use fulmar_control::report::KeyReport;
use fulmar_meta::Limit;
use fulmar_pages::PartitionId;
use hashbrown::HashMap;

use super::observed::Marks;
use super::records::PlanRecord;
use super::reports::{Reports, capacity};
use crate::Node;
use crate::environment::boot_time;
use crate::owners::{KnownNode, Ownership};

/// The capacity of a node that is not known, if no node's is.
const DEFAULT_CAPACITY: f64 = 1.0;
/// The latency of a partition without statements says nothing.
const MIN_REQUESTS_PER_S: f64 = 0.01;

/// A key is hot if this share of its partition's accesses goes to it.
const MIN_HOT_SHARE: f64 = 0.01;
const MAX_HOT_KEYS: usize = 100;

/// What the picture is made of, besides what the node knows.
pub(super) struct Sources<'a> {
    pub reports: &'a Reports,
    pub marks: &'a Marks,
    pub plan: &'a PlanRecord,
    /// Names of nodes that the provisioner can remove; `None` if that is not known.
    pub provisioned: Option<&'a BTreeSet<String>>,
    /// The destinations of moves that were decided and have not ended.
    pub arriving: BTreeMap<PartitionId, String>,
    /// Partitions that stay where they are for now.
    pub resting: BTreeSet<PartitionId>,
    /// The same, of nodes that have to be emptied.
    pub resting_leaving: BTreeSet<PartitionId>,
    /// When partitions were moved, on the clock of the picture.
    pub moved_at_s: &'a HashMap<PartitionId, f64>,
    /// How long a node must be dead before it is replaced.
    pub replace_after: std::time::Duration,
    pub at_s: f64,
}

/// A picture, and the partitions by the names that they have in it.
pub(super) struct Pictured {
    pub picture: Picture,
    pub by_name: HashMap<String, PartitionId>,
}

/// Builds the picture.
pub(super) fn build(node: &Node, sources: &Sources<'_>) -> Pictured {
    let known = node.owners().nodes();
    let mut nodes: Vec<PictureNode> =
        known.iter().filter_map(|known| pictured(node, known, sources)).collect();
    let joined: BTreeSet<String> = nodes.iter().map(|node| node.name.clone()).collect();
    let capacity = sources.reports.mean_capacity().unwrap_or(DEFAULT_CAPACITY);
    let adding = sources.plan.adding.iter().filter(|adding| !joined.contains(&adding.name));
    nodes.extend(adding.map(|adding| PictureNode {
        state: NodeState::Joining,
        ..PictureNode::new(adding.name.as_str(), capacity)
    }));
    let shown: BTreeMap<&str, &PictureNode> = nodes
        .iter()
        .filter(|node| node.state != NodeState::Missing)
        .map(|node| (node.name.as_str(), node))
        .collect();
    let owners: BTreeMap<NodeId, &PictureNode> =
        known.iter().filter_map(|known| Some((known.id, *shown.get(known.name.as_str())?))).collect();
    let pulling: BTreeSet<PartitionId> =
        known.iter().flat_map(|known| node.owners().pulling(known.id)).collect();
    let (mut partitions, mut by_name) = (Vec::new(), HashMap::new());
    for (id, ownership) in node.owners().all() {
        let Some(owner) = owners.get(&ownership.node) else { continue };
        let tenant = node.catalog().tenant_of(id);
        let can_move = tenant.is_some() && !pulling.contains(&id) && may_move(node, id, ownership);
        // A name that no tenant can have.
        let name = tenant.as_ref().map_or_else(|| format!("\0{id}"), |tenant| tenant.name.clone());
        let arrives = sources.arriving.get(&id).filter(|to| shown.contains_key(to.as_str()));
        let mut partition = Partition::new(name.as_str(), arrives.unwrap_or(&owner.name).as_str(), 0.0);
        if let Some(load) = sources.reports.partition(id) {
            let report = &load.report;
            partition.load = load.load;
            // In a common store, a move copies only what is in memory.
            partition.bytes = if node.is_private() { report.size } else { report.memory.min(report.size) };
            let is_used =
                load.is_fresh && report.requests_per_s >= MIN_REQUESTS_PER_S && report.latency_ms > 0.0;
            partition.latency_ms = Some(report.latency_ms).filter(|ms| is_used && ms.is_finite());
            partition.hot_keys =
                report.keys.as_ref().map(|keys| hot_keys(keys, load.load)).unwrap_or_default();
        }
        let resting = if owner.state.is_leaving() { &sources.resting_leaving } else { &sources.resting };
        let floor_kb = node.catalog().limit_of(id, Limit::CacheFloor);
        partition.memory = floor_kb.unwrap_or(0).saturating_mul(1024);
        let objective = node.catalog().limit_of(id, Limit::LatencyObjective);
        partition.objective_ms = objective.map(|ms| ms.max(1) as f64);
        partition.pinned =
            !can_move || arrives.is_some() || resting.contains(&id) || sources.marks.pinned.contains(&id);
        partition.moved_at_s = sources.moved_at_s.get(&id).copied();
        by_name.insert(name, id);
        partitions.push(partition);
    }
    Pictured { picture: Picture { at_s: sources.at_s, nodes, partitions }, by_name }
}

/// A node of the cluster; `None` if it does not matter.
fn pictured(node: &Node, known: &KnownNode, sources: &Sources<'_>) -> Option<PictureNode> {
    let name = known.name.as_str();
    let reported = sources.reports.node(name, Instant::now());
    let mut shown = PictureNode::new(
        name,
        reported
            .map(|(report, _)| capacity(report))
            .or(sources.reports.mean_capacity())
            .unwrap_or(DEFAULT_CAPACITY),
    );
    if let Some((report, _)) = reported.filter(|(report, _)| report.memory > 0) {
        shown.memory = report.memory;
    }
    (shown.site, shown.rack) = (known.place.site.clone(), known.place.rack.clone());
    shown.fixed = !sources.provisioned.is_some_and(|names| names.contains(name));
    let (incarnation, state) = known.state?;
    shown.state = match state {
        RecordState::Alive if sources.plan.is_removing(name) => NodeState::Draining,
        RecordState::Alive if node.is_leaving(known.id) => NodeState::Draining,
        RecordState::Alive if reported.is_none() || !node.is_serving(known.id) => NodeState::Joining,
        RecordState::Alive => NodeState::Active,
        RecordState::Ended | RecordState::Sealed { .. } => {
            let ended = node.owners().observed_ended(known.id, incarnation);
            let dead_for = ended.map_or_else(Default::default, |at| boot_time().saturating_sub(at));
            let is_replaced = sources.plan.replaced.iter().any(|replaced| replaced == name);
            let is_named = sources.plan.names(name);
            if is_replaced || is_named {
                return None;
            }
            if dead_for < sources.replace_after { NodeState::Missing } else { NodeState::Dead }
        }
    };
    let is_recent = reported.is_some_and(|(_, is_recent)| is_recent);
    shown.forbidden = sources.marks.forbidden.contains(name);
    let slow_for = node.slow_nodes.lock().slow_for(known.id, Instant::now());
    shown.unsuitable = !is_recent || !node.hears(known.id) || slow_for.is_some();
    shown.slow = slow_for.is_some_and(|slow_for| slow_for >= sources.replace_after);
    Some(shown)
}

/// The hot keys of a partition with this load. Their loads are what the counts prove, so that they
/// are never more than the partition's.
fn hot_keys(report: &KeyReport, load: f64) -> Vec<Piece> {
    let mut names = BTreeSet::new();
    let mut left = 1.0;
    let keys = report.keys.iter().filter_map(|key| {
        let proven = key.share - key.error;
        let share = proven.min(left);
        let name = format!("{} {}", key.table, key.key);
        if !proven.is_finite() || share < MIN_HOT_SHARE || !names.insert(name.clone()) {
            return None;
        }
        left -= share;
        Some(Piece::new(name, share * load, 0))
    });
    keys.take(MAX_HOT_KEYS).collect()
}

/// Whether a partition can be moved at all.
fn may_move(node: &Node, id: PartitionId, ownership: Ownership) -> bool {
    (ownership.log == LogKind::Shared || node.is_private()) && !node.owners().is_quarantined(id)
}

#[cfg(test)]
mod tests {
    use fulmar_control::report::KeyAccess;

    use super::*;

    #[test]
    fn hot_keys_are_never_more_than_their_partition() {
        let access =
            |key: &str, share, error| KeyAccess { table: "t".to_owned(), key: key.to_owned(), share, error };
        let keys = vec![
            access("9", f64::NAN, 0.0),
            access("7", 0.6, 0.1),
            access("7", 0.2, 0.0),
            access("8", 0.9, 0.0),
            access("10", 0.005, 0.0),
        ];
        let pieces = hot_keys(&KeyReport { sampled: 100, unkeyed: 0, keys }, 2.0);
        let shown: Vec<(&str, f64)> = pieces.iter().map(|piece| (&*piece.name, piece.load)).collect();
        assert_eq!(shown, [("t 7", 1.0), ("t 8", 1.0)]);
        let mut partition = Partition::new("shop", "n1", 2.0);
        partition.hot_keys = pieces;
        let (nodes, partitions) = (vec![PictureNode::new("n1", 1.0)], vec![partition]);
        assert!(Picture { at_s: 0.0, nodes, partitions }.validate().is_ok());
    }
}

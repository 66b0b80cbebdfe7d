//! More nodes or fewer: pictures with hypothetical nodes, or with nodes that leave.
//!
//! E-Store adds or removes one node per round (5.1). Here it may be several. How many there should
//! be is a matter of policy ([`crate::policy::when`]).

use crate::picture::{Node, NodeState, Picture};

/// A change of the number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// Adds nodes.
    Add(usize),
    /// Drains nodes.
    Remove(usize),
}

/// Adds hypothetical nodes named `new-1`, `new-2` ... like the largest active node, or lets the
/// least loaded nodes leave. A node with a pinned partition is not drained, nor is the last active
/// one, so fewer may leave than asked for.
pub fn resize(picture: &Picture, change: Resize) -> Picture {
    let mut picture = picture.clone();
    match change {
        Resize::Add(count) => {
            let largest = active(&picture).max_by(|left, right| left.capacity.total_cmp(&right.capacity));
            let Some(model) = largest.or(picture.nodes.first()).cloned() else { return picture };
            let used = |name: &String| picture.nodes.iter().all(|node| node.name != *name);
            let names: Vec<String> =
                (1..).map(|number| format!("new-{number}")).filter(used).take(count).collect();
            let state = NodeState::Active;
            let new = |name| Node {
                name,
                state,
                forbidden: false,
                unsuitable: false,
                fixed: false,
                ..model.clone()
            };
            picture.nodes.extend(names.into_iter().map(new));
        }
        Resize::Remove(count) => {
            let leaving = least_loaded(&picture, count);
            for node in picture.nodes.iter_mut().filter(|node| leaving.contains(&node.name)) {
                node.state = NodeState::Draining;
            }
        }
    }
    picture
}

fn active(picture: &Picture) -> impl Iterator<Item = &Node> {
    picture.nodes.iter().filter(|node| node.state == NodeState::Active)
}

/// The names of the nodes that are cheapest to drain: those with the least load that are not fixed. A
/// forbidden node without load is not one of them: it is no capacity, so nothing is gained.
pub(crate) fn least_loaded(picture: &Picture, count: usize) -> Vec<String> {
    let mut loads: Vec<(f64, &str)> = active(picture).map(|node| (0.0, node.name.as_str())).collect();
    let by_name: std::collections::HashMap<String, usize> =
        loads.iter().enumerate().map(|(index, (_, name))| ((*name).to_owned(), index)).collect();
    let mut is_pinned: Vec<bool> = active(picture).map(|node| node.fixed).collect();
    for partition in &picture.partitions {
        if let Some(index) = by_name.get(&partition.owner) {
            loads[*index].0 += partition.load;
            is_pinned[*index] |= partition.pinned;
        }
    }
    for (node, ((load, _), is_pinned)) in active(picture).zip(loads.iter().zip(&mut is_pinned)) {
        *is_pinned |= node.forbidden && *load <= 0.0;
    }
    let count = count.min(loads.len().saturating_sub(1));
    let mut free: Vec<(f64, &str)> =
        loads.into_iter().zip(is_pinned).filter(|(_, pinned)| !pinned).map(|(node, _)| node).collect();
    free.sort_by(|left, right| left.0.total_cmp(&right.0));
    free.into_iter().take(count).map(|(_, name)| name.to_owned()).collect()
}

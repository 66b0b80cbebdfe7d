//! What all planners work on: a picture as numbered items and nodes.
//!
//! A partition contributes one item for each hot key, one for each block, and one for its rest. Of
//! a partition without pieces the rest is the whole partition, as of all partitions with
//! [`Settings::whole_partitions`].

use std::collections::HashMap;

use serde::Serialize;

use super::Settings;
use crate::picture::{Node, NodeState, Partition, Picture, Piece};

/// What an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ItemKind {
    /// One hot root key.
    HotKey,
    /// A block of cold root keys.
    Block,
    /// A partition without its hot keys and blocks.
    Partition,
}

/// What a planner can place on one node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// What it is.
    pub kind: ItemKind,
    /// The index of its partition in the picture.
    pub partition: u32,
    /// Its index among the partition's hot keys or blocks.
    pub piece: u32,
    /// Its load in CPUs.
    pub load: f64,
    /// What a move copies, in bytes.
    pub bytes: u64,
    /// The memory that it needs, in bytes.
    pub memory: u64,
    /// The index of the node that has it.
    pub owner: u32,
    /// False for a pinned partition, and during a partition's cool-down unless its node is leaving.
    pub movable: bool,
}

/// A node, as planners see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// What it can serve, in CPUs.
    pub capacity: f64,
    /// Memory for items, in bytes.
    pub memory: u64,
    /// Items may be moved to it.
    pub accepts: bool,
    /// It is active: its capacity counts.
    pub serves: bool,
    /// Its items have to be moved away.
    pub leaving: bool,
    /// The number of its site.
    pub site: u32,
    /// The number of its rack, unique in the cluster.
    pub rack: u32,
}

/// A picture as numbered items and nodes.
#[derive(Debug)]
pub struct Problem<'a> {
    /// The picture.
    pub picture: &'a Picture,
    /// Everything that has a place.
    pub items: Vec<Item>,
    /// The nodes, in the picture's order.
    pub nodes: Vec<Target>,
    /// Mean utilisation: all load over the capacity of the nodes that serve.
    pub mean: f64,
    /// No placement has a lower highest utilisation: `max(mean, largest item on the largest node)`.
    pub bound: f64,
    /// The settings.
    pub settings: Settings,
}

impl<'a> Problem<'a> {
    /// Numbers the items and nodes of a valid picture. An item whose owner is not in the picture is
    /// left out; [`Picture::validate`] rejects such pictures.
    pub fn new(picture: &'a Picture, settings: &Settings) -> Problem<'a> {
        let nodes = targets(picture);
        let by_name: HashMap<&str, u32> =
            picture.nodes.iter().zip(0..).map(|(node, index)| (node.name.as_str(), index)).collect();
        let mut items = Vec::with_capacity(picture.partitions.len());
        for (partition, number) in picture.partitions.iter().zip(0..) {
            let Some(home) = by_name.get(partition.owner.as_str()) else { continue };
            let cools = partition.moved_at_s.is_some_and(|at| picture.at_s - at < settings.cool_down_s);
            let is_movable = |owner: u32| !partition.pinned && (!cools || nodes[owner as usize].leaving);
            if settings.whole_partitions {
                items.push(whole(partition, number, *home, is_movable(*home)));
                continue;
            }
            for (kind, pieces) in
                [(ItemKind::HotKey, &partition.hot_keys), (ItemKind::Block, &partition.blocks)]
            {
                items.extend(pieces.iter().zip(0..).map(|(piece, index)| {
                    let owner = piece.owner.as_deref().and_then(|name| by_name.get(name)).unwrap_or(home);
                    let Piece { load, bytes, memory, .. } = *piece;
                    let movable = is_movable(*owner);
                    Item {
                        kind,
                        partition: number,
                        piece: index,
                        load,
                        bytes,
                        memory,
                        owner: *owner,
                        movable,
                    }
                }));
            }
            items.extend(rest(partition, number, *home, is_movable(*home)));
        }
        let (mean, bound) = bounds(&items, &nodes);
        Problem { picture, items, nodes, mean, bound, settings: *settings }
    }

    /// The current owners of the items.
    pub fn owners(&self) -> Vec<u32> {
        self.items.iter().map(|item| item.owner).collect()
    }

    /// The names of an item's partition, and of its hot key or block.
    pub fn names(&self, item: usize) -> (&'a str, Option<&'a str>) {
        let item = &self.items[item];
        let partition: &'a Partition = &self.picture.partitions[item.partition as usize];
        let pieces = match item.kind {
            ItemKind::HotKey => &partition.hot_keys,
            ItemKind::Block => &partition.blocks,
            ItemKind::Partition => return (&partition.name, None),
        };
        (&partition.name, Some(&pieces[item.piece as usize].name))
    }

    /// The predicted duration of an item's move from its owner to a node, in seconds.
    pub fn move_seconds(&self, item: usize, to: u32) -> f64 {
        let item = &self.items[item];
        let crosses = self.nodes[item.owner as usize].site != self.nodes[to as usize].site;
        self.settings.cost.seconds(item.bytes, crosses)
    }
}

fn targets<'n>(picture: &'n Picture) -> Vec<Target> {
    let mut sites = HashMap::new();
    let mut racks = HashMap::new();
    let target = |node: &'n Node| {
        let next = sites.len() as u32;
        let site = *sites.entry(node.site.as_str()).or_insert(next);
        let next = racks.len() as u32;
        let rack = *racks.entry((node.site.as_str(), node.rack.as_str())).or_insert(next);
        Target {
            capacity: node.capacity,
            memory: node.memory,
            accepts: node.accepts_moves(),
            serves: node.state == NodeState::Active,
            leaving: node.state.is_leaving(),
            site,
            rack,
        }
    };
    picture.nodes.iter().map(target).collect()
}

/// A partition with its pieces.
fn whole(partition: &Partition, number: u32, owner: u32, movable: bool) -> Item {
    Item {
        kind: ItemKind::Partition,
        partition: number,
        piece: 0,
        load: partition.load,
        bytes: partition.bytes,
        memory: partition.memory,
        owner,
        movable,
    }
}

/// What a partition has beyond its pieces, if that is anything or if it has no pieces.
fn rest(partition: &Partition, number: u32, owner: u32, movable: bool) -> Option<Item> {
    let mut item = whole(partition, number, owner, movable);
    if partition.hot_keys.is_empty() && partition.blocks.is_empty() {
        return Some(item);
    }
    for piece in partition.pieces() {
        item.load -= piece.load;
        item.bytes = item.bytes.saturating_sub(piece.bytes);
        item.memory = item.memory.saturating_sub(piece.memory);
    }
    item.load = item.load.max(0.0);
    let is_empty = item.load <= partition.load * 1e-9 && item.bytes == 0 && item.memory == 0;
    (!is_empty).then_some(item)
}

fn bounds(items: &[Item], nodes: &[Target]) -> (f64, f64) {
    let serving = nodes.iter().filter(|node| node.serves);
    let capacity: f64 = serving.clone().map(|node| node.capacity).sum();
    let largest_node = serving.map(|node| node.capacity).fold(0.0, f64::max);
    if largest_node == 0.0 {
        return (0.0, 0.0);
    }
    let load: f64 = items.iter().map(|item| item.load).sum();
    let largest_item = items.iter().map(|item| item.load).fold(0.0, f64::max);
    let mean = load / capacity;
    (mean, mean.max(largest_item / largest_node))
}

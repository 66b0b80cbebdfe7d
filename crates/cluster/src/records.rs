//! The records of the ownership protocol in the metadata store.
//!
//! | key | value |
//! | --- | --- |
//! | `node/ID` | [`NodeRecord`]: the node's incarnation and its state |
//! | `owner/ID` | [`PartitionRecord`]: owner, epoch, base manifest and log ranges of partition ID |
//!
//! A restart of a node changes its node record only. A change of owner changes the partition's
//! record only, and compares both nodes' records. Values are JSON with a format version `v`.

use std::fmt;

use fulmar_meta::Revision;
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::Error;

/// A node of the cluster. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One start of a node's process: 1 for the first. Never restarts from a lower number.
pub type Incarnation = u64;

/// The commit log of one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId {
    /// The node that writes it.
    pub node: NodeId,
    /// The incarnation that writes it.
    pub incarnation: Incarnation,
}

/// A slot of one of a node's logs. Ordered as the node wrote them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Position {
    /// The incarnation that wrote the log.
    pub incarnation: Incarnation,
    /// The slot in that log, from 0.
    pub slot: u64,
}

/// The state of a node's incarnation. It moves only from `Alive` to `Ended` to `Sealed`, and then
/// to `Alive` of the next incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It may own partitions and commit.
    Alive,
    /// It was declared dead. Its log may still grow until it is sealed.
    Ended,
    /// Its log has permanently ended before this slot.
    Sealed {
        /// The first slot that holds no record.
        end: u64,
        /// `kept_from` of the log's last object: records before it are in manifests.
        kept_from: Position,
    },
}

/// The metadata store's record of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    v: u32,
    /// Its newest incarnation.
    pub incarnation: Incarnation,
    /// The state of that incarnation.
    pub state: NodeState,
    /// A random number chosen by the process. Distinguishes it from another process that was
    /// started as the same node.
    pub run: u64,
}

impl NodeRecord {
    /// A record of this incarnation.
    pub fn new(incarnation: Incarnation, state: NodeState, run: u64) -> NodeRecord {
        NodeRecord { v: VERSION, incarnation, state, run }
    }

    /// The record with another state of the same incarnation.
    pub fn with_state(&self, state: NodeState) -> NodeRecord {
        NodeRecord { state, ..self.clone() }
    }
}

/// The part of a node's logs that contains the records of one epoch of a partition. Records outside
/// of all ranges are not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The epoch.
    pub epoch: u32,
    /// The node that owned the partition.
    pub node: NodeId,
    /// No record of the epoch is before this position.
    pub from: Position,
    /// Records of the epoch at or after this position are not applied. `None` while the node owns
    /// the partition: the range then covers the node's later incarnations, each up to its seal.
    pub to: Option<Position>,
}

/// Names a manifest of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ManifestName {
    /// The epoch in which it was written.
    pub epoch: u32,
    /// The incarnation that wrote it.
    pub incarnation: Incarnation,
    /// The slot of that incarnation's log up to which it covers the partition's records.
    pub covered: u64,
    /// The node that wrote it.
    pub node: NodeId,
    /// Written for an epoch that its node did not own yet (a restore). It is used only if the
    /// partition's record names it as the base.
    pub is_draft: bool,
}

/// The metadata store's record of a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRecord {
    v: u32,
    /// The node that may write and answers reads.
    pub owner: NodeId,
    /// The fencing number. Incremented at each change of owner.
    pub epoch: u32,
    /// The epoch began because the previous owner was declared dead: its lease may still run.
    pub by_failover: bool,
    /// A manifest as of the last change of owner; newer ones may exist.
    pub base: Option<ManifestName>,
    /// The log ranges with the records since that manifest, oldest epoch first. The last one is
    /// open.
    pub ranges: Vec<Range>,
}

impl PartitionRecord {
    /// The record of a new partition.
    pub fn new(owner: NodeId, from: Position) -> PartitionRecord {
        let range = Range { epoch: 1, node: owner, from, to: None };
        PartitionRecord { v: VERSION, owner, epoch: 1, by_failover: false, base: None, ranges: vec![range] }
    }

    /// The record after a change of owner: the open range ends at `to`, and records before
    /// `kept_from` are in manifests; the new range begins at `from` in the log of `owner`.
    pub fn moved(
        &self,
        kept_from: Position,
        to: Position,
        owner: NodeId,
        from: Position,
        by_failover: bool,
    ) -> PartitionRecord {
        let mut next = self.clone();
        if let Some(open) = next.ranges.last_mut() {
            open.from = open.from.max(kept_from).min(to);
            open.to = Some(to);
        }
        next.epoch += 1;
        next.owner = owner;
        next.by_failover = by_failover;
        next.ranges.push(Range { epoch: next.epoch, node: owner, from, to: None });
        next
    }

    /// The record after a restore by its owner: the contents are those of the draft manifest
    /// `base`, and records before `from` are no longer applied.
    pub fn restored(&self, base: ManifestName, from: Position) -> PartitionRecord {
        let epoch = self.epoch + 1;
        let ranges = vec![Range { epoch, node: self.owner, from, to: None }];
        PartitionRecord { epoch, by_failover: false, base: Some(base), ranges, ..self.clone() }
    }
}

/// A record with the revision that a transaction compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<T> {
    /// The record.
    pub record: T,
    /// The revision that wrote it.
    pub revision: Revision,
}

const VERSION: u32 = 1;

/// The key of a node's record.
pub fn node_key(node: NodeId) -> String {
    format!("node/{:08x}", node.0)
}

/// The key of a partition's record.
pub fn owner_key(partition: PartitionId) -> String {
    format!("owner/{:016x}", partition.0)
}

/// The partition of a key made by [`owner_key`].
pub fn partition_of_key(key: &str) -> Option<PartitionId> {
    u64::from_str_radix(key.strip_prefix("owner/")?, 16).ok().map(PartitionId)
}

/// The value of a record.
pub fn encode<T: Serialize>(record: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(record).map_err(|error| Error::Corrupt(error.to_string()))
}

/// The record of a value. An unknown format version is an error.
pub fn decode<T: for<'a> Deserialize<'a>>(key: &str, value: &[u8]) -> Result<T, Error> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    let damaged = |error: serde_json::Error| Error::Corrupt(format!("record \"{key}\": {error}"));
    let Versioned { v } = serde_json::from_slice(value).map_err(damaged)?;
    if v != VERSION {
        return Err(Error::Corrupt(format!("record \"{key}\" has format version {v}, expected {VERSION}")));
    }
    serde_json::from_slice(value).map_err(damaged)
}

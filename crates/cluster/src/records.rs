//! The records of the ownership protocol in the metadata store.
//!
//! | key | value |
//! | --- | --- |
//! | `node/ID` | [`NodeRecord`]: the node's incarnation and its state |
//! | `owner/ID` | [`PartitionRecord`]: owner, epoch, base manifest and log ranges of partition ID |
//! | `role/NAME` | [`crate::election::RoleRecord`]: the node that fills a role |
//! | `collection` | [`crate::collection::CollectionRecord`]: what the collector deletes |
//! | `hold/NODE/INCARNATION/NUMBER` | [`crate::hold::HoldRecord`]: objects not to be deleted |
//! | `migration/ID` | [`crate::migration::Journal`]: the newest migration of partition ID |
//! | `quarantine/ID` | [`crate::quarantine::QuarantineRecord`]: nodes that died in partition ID |
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

/// Where an incarnation keeps a log. A partition's durability is the kind of its open range's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogKind {
    /// In the object store. It can be sealed and read by other nodes.
    Shared,
    /// In the node's data directory. Other nodes cannot read it.
    Local,
}

/// A commit log of one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogId {
    /// The node that writes it.
    pub node: NodeId,
    /// The incarnation that writes it.
    pub incarnation: Incarnation,
    /// Which of its logs.
    pub kind: LogKind,
}

impl LogId {
    /// The shared log of an incarnation.
    pub fn shared(node: NodeId, incarnation: Incarnation) -> LogId {
        LogId { node, incarnation, kind: LogKind::Shared }
    }
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
    /// Which of its logs.
    pub log: LogKind,
    /// No record of the epoch is before this position.
    pub from: Position,
    /// Records of the epoch at or after this position are not applied. `None` while the node owns
    /// the partition: the range then covers the node's later incarnations, each up to its seal.
    pub to: Option<Position>,
}

impl Range {
    /// Returns true if the range may contain records of this incarnation.
    pub fn needs(&self, node: NodeId, incarnation: Incarnation) -> bool {
        let is_before_end = self.to.is_none_or(|to| incarnation <= to.incarnation);
        self.node == node && self.from.incarnation <= incarnation && is_before_end
    }

    /// Returns true if the range contains no position.
    pub fn is_empty(&self) -> bool {
        self.to.is_some_and(|to| to <= self.from)
    }
}

/// Names a segment, which may contain pages of several partitions. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SegmentName {
    /// The node that wrote it: its maker.
    pub node: NodeId,
    /// The incarnation that wrote it.
    pub incarnation: Incarnation,
    /// Distinguishes the segments of an incarnation.
    pub number: u128,
}

/// Names a manifest of a partition. The greatest name is the newest manifest. A draft is the start
/// of its epoch, so it is older than every other manifest of the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

impl ManifestName {
    fn order(&self) -> (u32, bool, Incarnation, u64, NodeId) {
        (self.epoch, !self.is_draft, self.incarnation, self.covered, self.node)
    }
}

impl Ord for ManifestName {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for ManifestName {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
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
    /// The node that still has pages which the owner does not have yet, after an on-demand
    /// migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub page_server: Option<NodeId>,
}

impl PartitionRecord {
    /// The record of a new partition.
    pub fn new(owner: NodeId, log: LogKind, from: Position) -> PartitionRecord {
        let ranges = vec![Range { epoch: 1, node: owner, log, from, to: None }];
        PartitionRecord {
            v: VERSION,
            owner,
            epoch: 1,
            by_failover: false,
            base: None,
            ranges,
            page_server: None,
        }
    }

    /// The record of a partition that existed before the cluster. Its manifest has all commits, with
    /// version numbers below those of `epoch`.
    pub fn converted(owner: NodeId, epoch: u32, from: Position) -> PartitionRecord {
        let ranges = vec![Range { epoch, node: owner, log: LogKind::Shared, from, to: None }];
        PartitionRecord { epoch, ranges, ..PartitionRecord::new(owner, LogKind::Shared, from) }
    }

    /// The log that the owner writes: the partition's durability.
    pub fn log(&self) -> LogKind {
        self.ranges.last().map_or(LogKind::Shared, |range| range.log)
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
            // At a failover a range of earlier incarnations stays, although their records are in
            // manifests: they may still store a manifest, and the collector must keep its
            // segments. At a handover the owner has stored a newer manifest.
            if !by_failover || open.from.incarnation == kept_from.incarnation {
                open.from = open.from.max(kept_from).min(to);
            }
            open.to = Some(to);
        }
        next.epoch += 1;
        next.owner = owner;
        next.by_failover = by_failover;
        next.ranges.push(Range { epoch: next.epoch, node: owner, log: self.log(), from, to: None });
        next
    }

    /// The record after its owner has made the manifest `base` the whole of the contents. Records
    /// of the owner from `from` on, in the log `log`, follow it; earlier ones are no longer
    /// applied.
    pub fn rebased(&self, base: ManifestName, log: LogKind, from: Position) -> PartitionRecord {
        self.begun(self.owner, Some(base), log, from)
    }

    /// The record after a migration of a private partition: the new owner has stored every page as
    /// the manifest `base`, or pulls the pages from `page_server`.
    pub fn migrated(
        &self,
        owner: NodeId,
        base: Option<ManifestName>,
        page_server: Option<NodeId>,
        from: Position,
    ) -> PartitionRecord {
        PartitionRecord { page_server, ..self.begun(owner, base, LogKind::Local, from) }
    }

    /// The record after its owner has stored all pages as the manifest `base`. The epoch continues.
    pub fn pulled(&self, base: ManifestName) -> PartitionRecord {
        PartitionRecord { base: Some(base), page_server: None, ..self.clone() }
    }

    /// The record after the owner has stored a manifest in this epoch that covers every record
    /// before `from`: earlier ranges are dropped. `base` is that manifest, if records name
    /// manifests.
    pub fn covered(&self, base: Option<ManifestName>, from: Position) -> PartitionRecord {
        let mut next = PartitionRecord { base, ..self.clone() };
        next.ranges.drain(..next.ranges.len().saturating_sub(1));
        if let Some(open) = next.ranges.last_mut() {
            open.from = open.from.max(from);
        }
        next
    }

    /// Returns true if the only range is the owner's, and begins in this incarnation or later.
    pub fn is_covered(&self, incarnation: Incarnation) -> bool {
        matches!(&self.ranges[..], [open] if open.from.incarnation >= incarnation)
    }

    /// An epoch that needs no records of earlier ones.
    fn begun(
        &self,
        owner: NodeId,
        base: Option<ManifestName>,
        log: LogKind,
        from: Position,
    ) -> PartitionRecord {
        let epoch = self.epoch + 1;
        let ranges = vec![Range { epoch, node: owner, log, from, to: None }];
        PartitionRecord { v: VERSION, owner, epoch, by_failover: false, base, ranges, page_server: None }
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

/// A partition id as a number, for serde.
pub(crate) mod partition_number {
    use fulmar_pages::PartitionId;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(partition: &PartitionId, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(partition.0)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<PartitionId, D::Error> {
        u64::deserialize(deserializer).map(PartitionId)
    }
}

/// A record of the metadata store: JSON with a format version.
pub trait Record: Serialize + for<'a> Deserialize<'a> {
    /// The format version of the value.
    fn version(&self) -> u32;
}

macro_rules! records {
    ($($record:ty),*) => {
        $(impl $crate::records::Record for $record {
            fn version(&self) -> u32 {
                self.v
            }
        })*
    };
}
pub(crate) use records;

records!(NodeRecord, PartitionRecord);

/// The format version of all records.
pub(crate) const VERSION: u32 = 1;

/// The key of a node's record.
pub fn node_key(node: NodeId) -> String {
    format!("node/{:08x}", node.0)
}

/// The node of a key made by [`node_key`].
pub fn node_of_key(key: &str) -> Option<NodeId> {
    let id = NodeId(u32::from_str_radix(key.strip_prefix("node/")?, 16).ok()?);
    (node_key(id) == key).then_some(id)
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
pub fn encode<T: Record>(record: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(record).map_err(|error| Error::Corrupt(error.to_string()))
}

/// The record of a value. An unknown format version is an error.
pub fn decode<T: Record>(key: &str, value: &[u8]) -> Result<T, Error> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    let damaged = |error: serde_json::Error| Error::Corrupt(format!("record \"{key}\": {error}"));
    let decoded = serde_json::from_slice::<T>(value);
    let version = match &decoded {
        Ok(record) => record.version(),
        // A record of another version may lack fields of this one.
        Err(_) => serde_json::from_slice::<Versioned>(value).map_err(damaged)?.v,
    };
    if version != VERSION {
        return Err(Error::Corrupt(format!(
            "record \"{key}\" has format version {version}, expected {VERSION}"
        )));
    }
    decoded.map_err(damaged)
}

//! Membership in a cluster: an engine that owns only the partitions that the cluster assigns to it.
//!
//! The engine of a single node owns every partition in its store. In a cluster the metadata store
//! records the owners. The engine asks for the assignment of a partition whenever it opens it
//! ([`Assignments`]), reads the log ranges that the assignment names, and commits to the log of its
//! own incarnation.

use async_trait::async_trait;
use fulmar_pages::{Durability, PartitionId};
use fulmar_sqlite::Result;
use fulmar_store::LogPosition;
use std::sync::Arc;

/// The incarnation of a cluster's node that the engine runs for.
#[derive(Clone)]
pub struct Membership {
    /// Names the node's shared logs in the store.
    pub log_node: u128,
    /// The incarnation, which names the log.
    pub incarnation: u64,
    /// A number of the incarnation that is unique in the cluster. It is part of the names of
    /// segments and of version numbers.
    pub term: u32,
    /// The node's id, which makes transaction ids unique in the cluster.
    pub node: u32,
    /// Where to ask for assignments.
    pub assignments: Arc<dyn Assignments>,
}

/// Says which partitions this node owns.
#[async_trait]
pub trait Assignments: Send + Sync + 'static {
    /// The assignment of a partition to this node, read linearizably. Fails with
    /// [`sqlstate::PARTITION_MOVED`](fulmar_sqlite::sqlstate::PARTITION_MOVED) if another node owns
    /// it.
    async fn assignment(&self, partition: PartitionId) -> Result<Assignment>;
}

/// How to open a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The epoch of the ownership.
    pub epoch: u32,
    /// The log that the partition commits to.
    pub durability: Durability,
    /// The parts of shared logs that may contain records since the newest manifest, oldest first.
    /// The last one is of earlier incarnations of this node.
    pub ranges: Vec<ReplayRange>,
}

/// A part of a node's shared logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayRange {
    /// Names the node's logs.
    pub log_node: u128,
    /// The first position that counts.
    pub from: LogPosition,
    /// The first position that does not count.
    pub to: LogPosition,
}

//! Errors of the protocols.

use thiserror::Error;

use fulmar_pages::PartitionId;

use crate::directory::Mismatch;
use crate::{Incarnation, NodeId};

/// Why a protocol stopped.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// This incarnation was declared dead. The process must stop serving and start again.
    #[error("node {node} was fenced: incarnation {incarnation} has ended")]
    Fenced {
        /// This node.
        node: NodeId,
        /// The incarnation that ended.
        incarnation: Incarnation,
    },
    /// The data directory is not the one that the node's previous incarnation used.
    #[error("data directory does not belong to node {node}: {mismatch}")]
    WrongDirectory {
        /// This node.
        node: NodeId,
        /// How it differs. [`Mismatch::remedy`] is the advice for the operator.
        mismatch: Mismatch,
    },
    /// A file of the data directory is damaged, or cannot be read or written. Names the file and
    /// the remedy.
    #[error("{0}")]
    Directory(String),
    /// The store has a manifest of an epoch that the metadata store has not reached: the metadata
    /// store was restored from an old backup.
    #[error("partition {partition} has a manifest of epoch {stored}, but its record has epoch {recorded}")]
    RecordTooOld {
        /// The partition.
        partition: PartitionId,
        /// The epoch of the manifest.
        stored: u32,
        /// The epoch of the record.
        recorded: u32,
    },
    /// The metadata store was restored from an old backup: it lacks what the node has seen.
    #[error("the metadata store is older than node {node}: it has generation {stored}, the node {known}")]
    MetadataTooOld {
        /// This node.
        node: NodeId,
        /// The node's generation in the metadata store.
        stored: u64,
        /// Its generation in the data directory.
        known: u64,
    },
    /// A record cannot be read.
    #[error("metadata is damaged: {0}")]
    Corrupt(String),
    /// The catalog does not allow the change: another one came first.
    #[error("{0}")]
    Rejected(String),
    /// The metadata store has no space for the change.
    #[error("{cause}")]
    OutOfSpace {
        /// The cause.
        cause: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The metadata store did not answer in time, or refused.
    #[error("metadata store unavailable: {0}")]
    Unavailable(String),
}

//! Errors of the protocols.

use thiserror::Error;

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
    /// A record cannot be read.
    #[error("metadata is damaged: {0}")]
    Corrupt(String),
    /// The metadata store did not answer in time, or refused.
    #[error("metadata store unavailable: {0}")]
    Unavailable(String),
}

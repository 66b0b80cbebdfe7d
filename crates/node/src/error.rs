//! Errors of a node of a cluster.

use fulmar_meta::MetaError;
use fulmar_transport::Error as TransportError;
use thiserror::Error;

/// Why a node cannot join or serve its cluster.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The node's name is invalid.
    #[error("invalid node name \"{name}\": use 1 to 63 characters a-z, 0-9, hyphen, underscore and period")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// The data directory belongs to another node.
    #[error("{0}")]
    WrongDirectory(String),
    /// A record cannot be read.
    #[error("metadata record \"{key}\" cannot be read: {cause}; start the version of Fulmar that wrote it")]
    Damaged {
        /// The key.
        key: String,
        /// The problem.
        cause: String,
    },
    /// A record that must exist does not.
    #[error(
        "the metadata store has lost the record \"{0}\"; check that --meta names the metadata store of \
         this cluster, and that it was not restored from an old backup"
    )]
    MissingRecord(&'static str),
    /// The metadata store was restored from an old backup.
    #[error(
        "the metadata store is older than the store: it knows incarnation {known} of node {node} as the newest, \
         but a later one has written a log; restore a newer backup of the metadata store"
    )]
    Restored {
        /// The node.
        node: fulmar_cluster::NodeId,
        /// Its newest incarnation in the metadata store.
        known: u64,
    },
    /// The metadata store was restored from an old backup, which lacks what the node has seen.
    #[error(
        "the metadata store is older than the data directory of node {node}: it has generation {stored}, the \
         directory {known}; restore a newer backup of the metadata store; to lose all later databases, commits \
         and users, start this node once with --accept-catalog {stored}"
    )]
    MetadataTooOld {
        /// The node.
        node: fulmar_cluster::NodeId,
        /// Its generation in the metadata store.
        stored: u64,
        /// Its generation in the data directory.
        known: u64,
    },
    /// The cluster keeps its data elsewhere than the node would.
    #[error("{}", match is_private {
        true => "each node of this cluster has a store of its own; start the node without --store",
        false => "the nodes of this cluster share a store; start the node with the --store of the others",
    })]
    OtherStores {
        /// Whether each node of the cluster has a store of its own.
        is_private: bool,
    },
    /// All terms are used.
    #[error("the cluster has used all of its 8388607 terms; create a new cluster and import the databases")]
    OutOfTerms,
    /// Every attempt conflicted with a change by another node.
    #[error("the cluster's record is being changed by too many nodes; start the node again")]
    Contended,
    /// The metadata store failed.
    #[error("{source}. {}", .source.remedy())]
    Metadata {
        /// The error.
        #[from]
        source: MetaError,
    },
    /// Another process runs as the node.
    #[error(
        "another process runs as node \"{name}\" at {address}; stop it first, or start this one with another \
         --node and an empty --data"
    )]
    Running {
        /// The node.
        name: String,
        /// Where the process listens for other nodes.
        address: String,
    },
    /// No living node accepts connections of this one.
    #[error("node \"{name}\" at {address} refuses connections of this node: {cause}")]
    Rejected {
        /// A node that lives.
        name: String,
        /// Where it listens for other nodes.
        address: String,
        /// Its reason, or this node's, with the remedy.
        cause: String,
    },
    /// A protocol failed.
    #[error("{0}")]
    Protocol(fulmar_cluster::Error),
    /// The connection to another node failed.
    #[error("{0}")]
    Transport(#[from] TransportError),
    /// The listener for other nodes failed.
    #[error("cannot listen on --rpc {address}: {cause}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The cause.
        cause: String,
    },
    /// A thread could not be started.
    #[error(
        "cannot start a thread: {cause}; raise the limits of threads and open files (ulimit -u, ulimit -n)"
    )]
    Thread {
        /// The cause.
        cause: String,
    },
}

impl From<fulmar_cluster::Error> for Error {
    fn from(error: fulmar_cluster::Error) -> Self {
        match error {
            fulmar_cluster::Error::WrongDirectory { mismatch, .. } => Error::WrongDirectory(format!(
                "the data directory does not belong to this node: {mismatch}. {}",
                mismatch.remedy()
            )),
            fulmar_cluster::Error::MetadataTooOld { node, stored, known } => {
                Error::MetadataTooOld { node, stored, known }
            }
            error => Error::Protocol(error),
        }
    }
}

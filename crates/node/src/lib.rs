//! A node of a cluster: runs the ownership protocol of [`fulmar_cluster`] for a server.
//!
//! ```text
//!   gateway ── Cluster ──┐                       ┌── Assignments ── engine
//!                        ▼                       ▼
//!                      Node ── Partitions ──► engine
//!      ┌─────────────────┼───────────────┬────────────────┐
//!   owners            detector         moves             rpc
//!   in memory         heartbeats,      handovers         streams to
//!   (Observer)        failover                           other nodes
//! ```
//!
//! - [`registration`]: the records of the cluster and its members.
//! - [`conversion`]: the first records of a cluster that a single node becomes.
//! - [`environment`], [`logs`], [`directory`]: what the protocols run on.
//! - [`owners`]: a copy of the ownership records, for routing.
//! - [`rpc`]: the listener and the connections to other nodes.
//! - `assignments`: states which partitions the engine may open.
//! - `detector`: detects dead nodes and fails them over.
//! - `collector`, `objects`: deletes what no database needs from the store.
//! - `control`: decides where databases are served and by how many nodes, and does it.
//! - `forget`: removes a node that does not come back.
//! - `replica`: the records of a cluster for a read-only node.
//! - [`metadata`]: the embedded metadata store of one node, for the others.
//! - `moves`: hands partitions over, and drains the node.
//! - `slow_nodes`: finds nodes that are many times slower than the others.
//! - `migrations`: moves partitions with what their owner has cached.
//! - `quarantine`: refuses partitions whose statements kill nodes.
//! - `load`: load reports of all nodes.
//! - `administration`: branches, restores, changes of durability.
//! - `gateway`: the cluster as the gateway sees it.
//!
//! # Start
//! The node registers ([`registration::register`]), listens for other nodes, begins an incarnation,
//! and keeps its lease ([`Node::join`]). The engine and the gateway start with the [`Node`], which
//! then gets both ([`Node::serve`]).
//!
//! # End
//! An incarnation that was declared dead is *fenced*: it can no longer commit or answer.
//! [`Node::fenced`] completes, and the process must start again. Before a planned stop
//! [`Node::drain`] hands all partitions over, and [`Node::leave`] ends the incarnation.

mod administration;
mod assignments;
mod collector;
mod control;
pub mod conversion;
mod detector;
pub mod directory;
pub mod environment;
mod error;
mod forget;
mod gateway;
pub mod json_file;
mod load;
pub mod logs;
mod messages;
pub mod metadata;
mod migrations;
mod moves;
mod node;
mod objects;
pub mod owners;
mod page_servers;
mod partitions;
mod pulse;
mod quarantine;
pub mod registration;
mod replica;
pub mod rpc;
mod slow_nodes;
mod transaction_ids;

pub use error::Error;
pub use node::{Node, NodeOptions};
pub use page_servers::PulledSegments;
pub use partitions::{EnginePartitions, Partitions, SessionHandler};
pub use replica::ReplicaOwners;

//! What a gateway needs from the cluster that its node belongs to.
//!
//! A node without a cluster owns every partition, and its gateway has no [`Cluster`]. In a cluster
//! the gateway asks for the owner of a session's partition, relays the session to it, and asks
//! again when the owner has changed. Statements that create, drop or move databases change the
//! ownership records through this trait as well.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_control::forecast::series::SeriesReport;
use fulmar_control::report::NodeReport;
use fulmar_migrate::report::Report;
use fulmar_pages::{Durability, PartitionId};
use fulmar_transport::Stream;
use serde::{Deserialize, Serialize};

use crate::{Result, StatementReport};

/// The owner of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The id of the node.
    pub node: u32,
    /// The epoch of its ownership.
    pub epoch: u32,
}

/// What became of a transaction whose answer was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransactionOutcome {
    /// It was committed.
    Committed,
    /// It was not committed, and can no longer be.
    Aborted,
    /// It is too long ago: unknown.
    Forgotten,
}

/// A node of the cluster, for `fulmar.nodes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Its id.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// `starting` until it serves clients, `alive`, `draining`, `ended` or `sealed`; `suspect` if this
    /// node does not hear from it.
    pub state: &'static str,
    /// Its newest incarnation.
    pub incarnation: u64,
    /// Where it listens for other nodes.
    pub rpc: String,
    /// Where it listens for clients.
    pub sql: String,
    /// Its site; empty if unknown.
    pub site: String,
    /// Its rack within the site; empty if unknown.
    pub rack: String,
    /// How many partitions it owns.
    pub partitions: u64,
    /// In which respect it is many times slower than the others, if it is.
    pub slow: Option<Slowness>,
    /// How long ago this node heard from it. `None` for itself and for nodes it never heard.
    pub heard: Option<Duration>,
}

/// A respect in which a node is many times slower than the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slowness {
    /// `log puts`, `store reads`, `disk syncs` or `CPU`.
    pub resource: &'static str,
    /// Its latency.
    pub latency: Duration,
    /// The median latency of the others.
    pub others: Duration,
}

impl fmt::Display for Slowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, others) = (self.latency.as_millis(), self.others.as_millis());
        write!(f, "{}: {own} ms, others {others} ms", self.resource)
    }
}

/// What this node has done as the cluster's garbage collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectorStatistics {
    /// It is the collector now.
    pub is_elected: bool,
    /// Passes over the store.
    pub passes: u64,
    /// Segments and manifests that it has deleted.
    pub objects: u64,
    /// Log objects of ended incarnations that it has deleted.
    pub log_objects: u64,
    /// The time since its last complete pass, if there was one.
    pub last_pass: Option<Duration>,
}

/// How a partition is to be moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Move {
    /// The name of the mechanism. The default is chosen by the cluster.
    pub mechanism: Option<String>,
    /// Limit of the bytes copied per second.
    pub max_bytes_per_s: Option<u64>,
}

/// A migration, for `fulmar.migrations`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationInfo {
    /// The partition.
    pub partition: PartitionId,
    /// Its step, or how it ended.
    pub step: String,
    /// What it has cost.
    pub report: Report,
}

/// A change of what the cluster's controller may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlChange {
    /// A setting, by its name. Without a value, its default.
    Set {
        /// Its name.
        name: String,
        /// Its new value.
        value: Option<String>,
    },
    /// A partition is not moved, or is again.
    Pin {
        /// The partition.
        partition: PartitionId,
        /// Whether it is pinned.
        is_pinned: bool,
    },
    /// No partitions are moved to a node, or are again.
    Forbid {
        /// The name of the node.
        node: String,
        /// Whether it is forbidden.
        is_forbidden: bool,
    },
    /// The plan in progress is given up.
    CancelPlan,
}

/// A setting or the state of the controller, for `fulmar.control`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlInfo {
    /// The name.
    pub name: &'static str,
    /// The value.
    pub value: String,
    /// The default of a setting.
    pub default: Option<String>,
    /// What it is.
    pub about: &'static str,
}

/// A decision of the controller, for `fulmar.decisions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionInfo {
    /// Its number.
    pub number: u64,
    /// When it was made, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// The node that was the controller.
    pub controller: String,
    /// The controller's mode.
    pub mode: String,
    /// The kind of action.
    pub action: String,
    /// What is to be done.
    pub what: String,
    /// The reasons.
    pub why: String,
    /// What is predicted to change.
    pub predicted: String,
    /// What came of it; `None` while it is carried out.
    pub outcome: Option<String>,
    /// When that was known, in milliseconds since 1970.
    pub ended_unix_ms: Option<u64>,
    /// All of it, as JSON.
    pub report: String,
}

/// The error of a forecasting method for the load of the cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ForecastError {
    /// The method.
    pub method: String,
    /// Its mean absolute error at the horizon, as a share of the mean load.
    pub ratio: f64,
}

/// How long the clients of a partition have waited at this node because its owner changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// The longest wait, in milliseconds.
    pub longest_ms: u64,
    /// Number of clients that had to wait.
    pub count: u64,
    /// Number of transactions that could not be continued.
    pub failed: u64,
}

impl Waits {
    /// Adds other waits.
    pub fn add(&mut self, other: Waits) {
        self.longest_ms = self.longest_ms.max(other.longest_ms);
        self.count += other.count;
        self.failed += other.failed;
    }
}

/// A partition of the cluster, for `fulmar.partitions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionInfo {
    /// Its id.
    pub id: PartitionId,
    /// The name of its owner.
    pub owner: String,
    /// The epoch of its owner.
    pub epoch: u32,
    /// The log that it commits to.
    pub durability: Durability,
}

/// The cluster as seen by one of its nodes.
#[async_trait]
pub trait Cluster: Send + Sync + 'static {
    /// The id of this node.
    fn this_node(&self) -> u32;

    /// The owner of a partition, from memory. `None` if this node has not heard of the partition.
    fn owner(&self, partition: PartitionId) -> Option<Owner>;

    /// The owner of a partition, read linearizably. `None` if the partition does not exist.
    async fn find_owner(&self, partition: PartitionId) -> Result<Option<Owner>>;

    /// Waits until the owner of a partition in memory has a later epoch than `epoch`, the partition
    /// was dropped, or the node of that epoch lives again as a new incarnation. Returns only then: a
    /// gateway breaks the connections of its sessions.
    async fn owner_changed(&self, partition: PartitionId, epoch: u32);

    /// Whether the move of a partition that ends this epoch, as far as this node knows, aborts open
    /// transactions.
    fn aborts_transactions(&self, partition: PartitionId, epoch: u32) -> bool;

    /// Opens a stream for a session to a node, this one included. The other side passes it to
    /// [`Gateway::serve_relayed`](crate::Gateway::serve_relayed).
    async fn open_session_stream(&self, node: u32) -> Result<Stream>;

    /// Whether this node may answer now: its lease is valid.
    fn may_answer(&self) -> bool;

    /// Waits until this node may answer. Fails if its incarnation has ended.
    async fn wait_to_answer(&self) -> Result<()>;

    /// Asks the owner of a partition for the outcome of a transaction. A transaction that was not
    /// committed cannot be committed after the answer.
    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome>;

    /// Whether each node has a store of its own, so that all databases have local durability.
    fn has_private_stores(&self) -> bool;

    /// The durability of a database for which none was chosen.
    fn default_durability(&self) -> Durability {
        if self.has_private_stores() { Durability::Local } else { Durability::Shared }
    }

    /// Creates the ownership record of a new partition, at the least loaded node.
    async fn create_partition(&self, partition: PartitionId, durability: Durability) -> Result<()>;

    /// Creates the ownership record of a new partition, at this node.
    async fn own_partition(&self, partition: PartitionId, durability: Durability) -> Result<()>;

    /// Stores a partition, as it is now or was at a time (milliseconds since 1970), as the contents
    /// of a partition that has no ownership record yet.
    async fn branch_partition(
        &self,
        source: PartitionId,
        branch: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<()>;

    /// Restores a partition to a time (milliseconds since 1970), and records its new timeline in
    /// the catalog. Ends its sessions.
    async fn restore_partition(&self, partition: PartitionId, at_unix_ms: u64) -> Result<()>;

    /// Changes the durability of a partition, in the catalog too. Its sessions wait meanwhile.
    async fn set_durability(&self, partition: PartitionId, durability: Durability) -> Result<()>;

    /// The number of clients of a partition, at all nodes. Fails if a node that lives does not
    /// answer.
    async fn sessions(&self, partition: PartitionId) -> Result<u64>;

    /// Ends the quarantine of a partition. Fails if it is not quarantined.
    async fn resume_partition(&self, partition: PartitionId) -> Result<()>;

    /// Fails if no node can serve a partition until an operator has acted.
    fn check_available(&self, partition: PartitionId) -> Result<()>;

    /// Drops a partition at its owner, and deletes its ownership record. Does nothing if it has
    /// none.
    async fn drop_partition(&self, partition: PartitionId) -> Result<()>;

    /// Starts to move a partition to the node with this name. Returns the number of the migration;
    /// `None` if that node owns it.
    async fn start_move(&self, partition: PartitionId, node: &str, options: Move) -> Result<Option<u64>>;

    /// Waits until the migration with this number has ended. Fails if it was undone.
    async fn wait_for_move(&self, partition: PartitionId, number: u64) -> Result<()>;

    /// Cancels the migration of a partition: the one with this number, if one is given. Fails if
    /// there is none that can be cancelled.
    async fn cancel_move(&self, partition: PartitionId, number: Option<u64>) -> Result<()>;

    /// The running and the newest migrations, newest first.
    fn migrations(&self) -> Vec<MigrationInfo>;

    /// Changes what the controller may do.
    async fn change_control(&self, change: ControlChange) -> Result<()>;

    /// The settings and the state of the controller.
    fn control_settings(&self) -> Vec<ControlInfo>;

    /// The newest decisions of the controller, newest first.
    fn decisions(&self) -> Vec<DecisionInfo>;

    /// Removes a node that has ended, owns no partition and whose logs are not needed. Another node
    /// can then have its name.
    async fn forget_node(&self, node: &str) -> Result<()>;

    /// All nodes, by id.
    fn nodes(&self) -> Vec<NodeInfo>;

    /// The load reports of all nodes that live, by name, or why there is none: one that does not
    /// answer within 2 s has none. With the most accessed keys of their partitions if `with_keys`.
    async fn load_reports(&self, with_keys: bool) -> Vec<(String, Result<NodeReport>)>;

    /// The statistics of statements of all nodes that live, by name, as [`Cluster::load_reports`]:
    /// of these partitions, or of all.
    async fn statement_reports(&self, partitions: Option<&[u64]>) -> Vec<(String, Result<StatementReport>)>;

    /// The series of loads that the controller keeps, with their forecasts. None if no node controls
    /// the cluster.
    async fn forecasts(&self) -> Result<Vec<SeriesReport>>;

    /// The errors of the forecasting methods for the load of the cluster. None if this node is not the
    /// controller.
    fn forecast_errors(&self) -> Vec<ForecastError>;

    /// What this node has done as the garbage collector.
    fn collector(&self) -> CollectorStatistics;

    /// All partitions, by id.
    fn partitions(&self) -> Vec<PartitionInfo>;

    /// The address where clients reach this node. Set once by the gateway when it listens.
    fn listening(&self, sql: SocketAddr);
}

impl fmt::Debug for dyn Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster(node {})", self.this_node())
    }
}

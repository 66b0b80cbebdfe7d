//! The cluster as the gateway of this node sees it.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use fulmar_cluster::metadata::{self, Change};
use fulmar_cluster::migration::Outcome;
use fulmar_cluster::records::{self, node_key, owner_key};
use fulmar_cluster::{Incarnation, LogKind, NodeId, NodeState, PartitionRecord, Position};
use fulmar_control::forecast::series::SeriesReport;
use fulmar_control::report::NodeReport;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::StatementReport;
use fulmar_gateway::cluster::{
    Cluster, CollectorStatistics, ControlChange, ControlInfo, DecisionInfo, ForecastError, MigrationInfo,
    Move, NodeInfo, Owner, PartitionInfo, TransactionOutcome,
};
use fulmar_meta::Transaction;
use fulmar_pages::{Durability, PartitionId};
use fulmar_transport::Stream;
use tokio::time::timeout;

use crate::administration::{ADMINISTRATION_TIMEOUT, log_kind};
use crate::assignments::{metadata_unavailable, protocol_error};
use crate::detector::Placement;
use crate::messages::{Answer, Opening, ROUTING_TIMEOUT, Request};
use crate::node::Heard;
use crate::owners::Ownership;
use crate::slow_nodes::Latencies;
use crate::{Node, registration};

/// How long reading an owner may take.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a stream to another node may take to open.
const STREAM_TIMEOUT: Duration = Duration::from_secs(3);
/// Pause before a transaction that conflicted is planned again.
const CONFLICT_DELAY: Duration = Duration::from_millis(20);

impl Node {
    /// Creates the ownership record of a new partition, at this node if `is_here`.
    pub(crate) async fn record_owner(
        &self,
        partition: PartitionId,
        durability: Durability,
        is_here: bool,
    ) -> Result<()> {
        let log = log_kind(durability);
        // In a common store, a local log may only be chosen for the node that the client uses.
        let is_here = is_here || (log == LogKind::Local && !self.is_private());
        let deadline = Instant::now() + ROUTING_TIMEOUT;
        while Instant::now() < deadline {
            if self.find_owner(partition).await?.is_some() {
                return Ok(());
            }
            let owner = match is_here {
                true => self.id(),
                false => Placement::new(self, self.serving()).next().unwrap_or(self.id()),
            };
            let read =
                metadata::node(self.environment(), owner).await.map_err(|error| protocol_error(&error))?;
            if let Some(read) = read.filter(|read| read.record.state == NodeState::Alive) {
                let from = Position { incarnation: read.record.incarnation, slot: 0 };
                let record = PartitionRecord::new(owner, log, from);
                let value = records::encode(&record).map_err(|error| protocol_error(&error))?;
                let create = Transaction::new()
                    .absent(owner_key(partition))
                    .unchanged(node_key(owner), read.revision)
                    .put(owner_key(partition), value);
                if metadata::transact(self.environment(), create).await == Change::Applied {
                    return Ok(());
                }
            }
            tokio::time::sleep(CONFLICT_DELAY).await;
        }
        Err(metadata_unavailable())
    }
}

fn owner(ownership: Ownership) -> Owner {
    Owner { node: ownership.node.0, epoch: ownership.epoch }
}

#[async_trait]
impl Cluster for Node {
    fn this_node(&self) -> u32 {
        self.id().0
    }

    fn owner(&self, partition: PartitionId) -> Option<Owner> {
        self.owners().owner(partition).map(owner)
    }

    async fn find_owner(&self, partition: PartitionId) -> Result<Option<Owner>> {
        let read = timeout(READ_TIMEOUT, metadata::partition(self.environment(), partition)).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        Ok(read.map(|read| Owner { node: read.record.owner.0, epoch: read.record.epoch }))
    }

    fn aborts_transactions(&self, partition: PartitionId, epoch: u32) -> bool {
        let journal = Node::migrations(self).journal(partition);
        // The epoch of a migration that was undone may end by another move.
        journal.is_some_and(|journal| {
            journal.epoch == epoch
                && journal.outcome != Some(Outcome::Undone)
                && journal.options.mechanism.aborts_transactions()
        })
    }

    async fn owner_changed(&self, partition: PartitionId, epoch: u32) {
        let incarnation = |node: NodeId| self.owners().node(node).and_then(|known| known.alive());
        let mut first = None;
        loop {
            let (changed, nodes) =
                (self.owners().partition_changed(partition), self.owners().nodes_changed());
            match self.owners().owner(partition) {
                Some(owner) if owner.epoch > epoch => return,
                Some(owner) if owner.epoch == epoch => {
                    let alive = incarnation(owner.node);
                    if alive.is_some() && alive != *first.get_or_insert(alive) {
                        return;
                    }
                }
                // It was dropped.
                None if first.is_some() => return,
                // What this node knows is older than what the caller knows.
                _ => {}
            }
            tokio::select! {
                () = changed => {}
                () = nodes => {}
            }
        }
    }

    async fn open_session_stream(&self, node: u32) -> Result<Stream> {
        let opened = timeout(STREAM_TIMEOUT, self.open_stream(NodeId(node), &Opening::Session)).await;
        let error = match opened {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no connection within {STREAM_TIMEOUT:?}"),
        };
        Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, format!("cannot reach node {node}: {error}"))
            .hint("Check the nodes with \"fulmar node list\"."))
    }

    fn may_answer(&self) -> bool {
        self.has_lease()
    }

    async fn wait_to_answer(&self) -> Result<()> {
        self.wait_for_lease().await
    }

    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome> {
        let request = || Request::Outcome { partition: partition.0, transaction };
        match self.ask_owner(partition, ROUTING_TIMEOUT, request).await? {
            Answer::Committed => Ok(TransactionOutcome::Committed),
            Answer::Aborted => Ok(TransactionOutcome::Aborted),
            _ => Ok(TransactionOutcome::Forgotten),
        }
    }

    async fn create_partition(&self, partition: PartitionId, durability: Durability) -> Result<()> {
        self.record_owner(partition, durability, false).await
    }

    fn has_private_stores(&self) -> bool {
        self.is_private()
    }

    async fn own_partition(&self, partition: PartitionId, durability: Durability) -> Result<()> {
        self.record_owner(partition, durability, true).await
    }

    async fn branch_partition(
        &self,
        source: PartitionId,
        branch: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<()> {
        let request = || Request::Branch { source: source.0, branch: branch.0, at_unix_ms };
        self.ask_owner(source, ADMINISTRATION_TIMEOUT, request).await.map(drop)
    }

    async fn restore_partition(&self, partition: PartitionId, at_unix_ms: u64) -> Result<()> {
        self.request_restore(partition, at_unix_ms).await
    }

    async fn set_durability(&self, partition: PartitionId, durability: Durability) -> Result<()> {
        let request = || Request::SetDurability { partition: partition.0, durability };
        self.ask_owner(partition, ADMINISTRATION_TIMEOUT, request).await.map(drop)
    }

    async fn sessions(&self, partition: PartitionId) -> Result<u64> {
        self.count_sessions(partition).await
    }

    async fn resume_partition(&self, partition: PartitionId) -> Result<()> {
        Node::resume_partition(self, partition).await
    }

    fn check_available(&self, partition: PartitionId) -> Result<()> {
        self.check_known_quarantine(partition)?;
        let Some(owner) = self.owners().owner(partition) else { return Ok(()) };
        self.unavailable(owner.node, owner.log).map_or(Ok(()), Err)
    }

    async fn drop_partition(&self, partition: PartitionId) -> Result<()> {
        let request = || Request::Drop { partition: partition.0 };
        match self.ask_owner(partition, ROUTING_TIMEOUT, request).await {
            Ok(_) => Ok(()),
            Err(error) if error.state() == sqlstate::INVALID_CATALOG_NAME => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn start_move(&self, partition: PartitionId, node: &str, options: Move) -> Result<Option<u64>> {
        self.request_migration(partition, node, options, None).await
    }

    async fn wait_for_move(&self, partition: PartitionId, number: u64) -> Result<()> {
        self.migration_ended(partition, number).await
    }

    async fn cancel_move(&self, partition: PartitionId, number: Option<u64>) -> Result<()> {
        self.cancel_migration(partition, number).await
    }

    fn migrations(&self) -> Vec<MigrationInfo> {
        self.migration_infos()
    }

    async fn change_control(&self, change: ControlChange) -> Result<()> {
        Node::change_control(self, change).await
    }

    fn control_settings(&self) -> Vec<ControlInfo> {
        self.control_infos()
    }

    fn decisions(&self) -> Vec<DecisionInfo> {
        self.control().decision_infos()
    }

    async fn forget_node(&self, node: &str) -> Result<()> {
        self.forget(node, None).await
    }

    fn nodes(&self) -> Vec<NodeInfo> {
        let nodes = self.owners().nodes().into_iter();
        nodes
            .map(|known| {
                let (incarnation, state) = known.state.unwrap_or((0, NodeState::Ended));
                let heard = self.last_heard(known.id, incarnation);
                NodeInfo {
                    id: known.id.0,
                    state: match state {
                        NodeState::Alive => shown_state(heard),
                        NodeState::Ended => "ended",
                        NodeState::Sealed { .. } => "sealed",
                    },
                    incarnation,
                    partitions: self.owners().count(known.id).all(),
                    slow: self.slow_nodes.lock().of(known.id),
                    heard: heard.filter(|_| known.id != self.id()).map(|(heard, _)| heard.at.elapsed()),
                    name: known.name,
                    rpc: known.rpc,
                    sql: known.sql,
                    site: known.place.site,
                    rack: known.place.rack,
                }
            })
            .collect()
    }

    async fn load_reports(&self, with_keys: bool) -> Vec<(String, Result<NodeReport>)> {
        Node::load_reports(self, with_keys).await
    }

    async fn statement_reports(&self, partitions: Option<&[u64]>) -> Vec<(String, Result<StatementReport>)> {
        Node::statement_reports(self, partitions).await
    }

    async fn forecasts(&self) -> Result<Vec<SeriesReport>> {
        Node::forecasts(self).await
    }

    fn forecast_errors(&self) -> Vec<ForecastError> {
        Node::forecast_errors(self)
    }

    fn collector(&self) -> CollectorStatistics {
        self.collected.lock().statistics()
    }

    fn partitions(&self) -> Vec<PartitionInfo> {
        let names: std::collections::BTreeMap<NodeId, String> =
            self.owners().nodes().into_iter().map(|known| (known.id, known.name)).collect();
        let partitions = self.owners().all().into_iter();
        partitions
            .map(|(id, owner)| PartitionInfo {
                id,
                owner: names.get(&owner.node).cloned().unwrap_or_else(|| owner.node.to_string()),
                epoch: owner.epoch,
                durability: match owner.log {
                    LogKind::Shared => Durability::Shared,
                    LogKind::Local => Durability::Local,
                },
            })
            .collect()
    }

    fn listening(&self, mut sql: SocketAddr) {
        // Clients on other machines reach this one where the other nodes do.
        if sql.ip().is_unspecified()
            && let Ok(rpc) = self.rpc_address().parse::<SocketAddr>()
        {
            sql.set_ip(rpc.ip());
        }
        let (metadata, name) = (self.metadata().clone(), self.name().to_owned());
        let (rpc, place) = (self.rpc_address().to_owned(), self.place().clone());
        tokio::spawn(async move {
            let addresses = (rpc.as_str(), &*sql.to_string());
            let published = registration::publish_addresses(&*metadata, &name, addresses, &place).await;
            if let Err(error) = published {
                tracing::warn!(%error, "cannot publish this node's address for clients");
            }
        });
    }
}

impl Node {
    /// The last heartbeat of an incarnation, and whether it is recent.
    fn last_heard(&self, node: NodeId, incarnation: Incarnation) -> Option<(Heard, bool)> {
        if node == self.id() {
            let is_draining = self.is_draining.load(Ordering::Relaxed);
            let own = Heard {
                incarnation,
                at: Instant::now(),
                serves: self.serves(),
                is_draining,
                utilisation: self.own_utilisation(),
                latencies: Latencies::default(),
            };
            return Some((own, true));
        }
        let heard = self.heard.lock().get(&node).copied();
        let heard = heard.filter(|heard| heard.incarnation == incarnation)?;
        Some((heard, self.hears(node)))
    }
}

/// The state of a node that is recorded as alive.
fn shown_state(heard: Option<(Heard, bool)>) -> &'static str {
    match heard {
        // A new incarnation is heard when it has joined.
        None => "starting",
        Some((_, false)) => "suspect",
        Some((heard, true)) if heard.is_draining => "draining",
        Some((heard, true)) if heard.serves => "alive",
        Some((_, true)) => "starting",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_shown_as_alive_when_it_serves() {
        let heard = |serves, is_draining| Heard {
            incarnation: 2,
            at: Instant::now(),
            serves,
            is_draining,
            utilisation: 0.0,
            latencies: Latencies::default(),
        };
        assert_eq!(shown_state(None), "starting");
        assert_eq!(shown_state(Some((heard(false, false), true))), "starting");
        assert_eq!(shown_state(Some((heard(true, false), true))), "alive");
        assert_eq!(shown_state(Some((heard(true, false), false))), "suspect");
        assert_eq!(shown_state(Some((heard(false, true), true))), "draining");
    }
}

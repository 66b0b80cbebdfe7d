//! The shared logs of a cluster's nodes, for the ownership protocol.

use async_trait::async_trait;
use fulmar_cluster::environment::{LogObjects, Slot, Uncertain};
use fulmar_cluster::{LogId, LogKind, NodeId, Position};
use fulmar_store::{LogPosition, LogSlot, LogSlots, Reliable};

/// Names a node's shared logs in the store. The first node keeps the name that its log has in the
/// store of a single node: the id of the store.
pub fn log_node(cluster: u128, node: NodeId) -> u128 {
    cluster.wrapping_add(u128::from(node.0).wrapping_sub(1))
}

/// The logs in a cluster's store.
pub struct StoreLogs {
    slots: LogSlots,
    cluster: u128,
}

impl StoreLogs {
    /// The logs of the nodes of `cluster`.
    pub fn new(store: Reliable, cluster: u128) -> Self {
        StoreLogs { slots: LogSlots::new(store), cluster }
    }

    /// The name of a log in the store. A local log has none.
    fn name(&self, log: LogId) -> Result<(u128, u64), Uncertain> {
        match log.kind {
            LogKind::Shared => Ok((log_node(self.cluster, log.node), log.incarnation)),
            LogKind::Local => Err(Uncertain),
        }
    }
}

#[async_trait]
impl LogObjects for StoreLogs {
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> Result<bool, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        // Records are written only by the engine.
        let Slot::Seal = contents else { return Err(Uncertain) };
        self.slots.create_seal(node, incarnation, slot).await.map_err(uncertain)
    }

    /// The contents of a slot. The records themselves are read by the engine: their `body` is
    /// empty.
    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        let found = self.slots.read(node, incarnation, slot).await.map_err(uncertain)?;
        Ok(found.map(|contents| match contents {
            LogSlot::Records { needed } => Slot::Records { kept_from: position(needed), body: Vec::new() },
            LogSlot::Seal => Slot::Seal,
        }))
    }

    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.list(node, incarnation).await.map_err(uncertain)
    }

    async fn create_end_mark(&self, log: LogId, slot: u64) -> Result<bool, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.create_end_mark(node, incarnation, slot).await.map_err(uncertain)
    }

    async fn delete(&self, log: LogId, slot: u64) -> Result<(), Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.delete(node, incarnation, slot).await.map_err(uncertain)
    }
}

fn uncertain(error: fulmar_store::LogError) -> Uncertain {
    tracing::warn!(%error, "cannot access a node's log; trying again");
    Uncertain
}

/// A position as the protocol records it.
pub fn position(position: LogPosition) -> Position {
    Position { incarnation: position.incarnation(), slot: position.sequence() }
}

/// A recorded position as the engine uses it.
pub fn log_position(position: Position) -> LogPosition {
    LogPosition::new(position.incarnation, position.slot)
}

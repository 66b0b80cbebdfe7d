//! The shared logs of a cluster's nodes, for the ownership protocol.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use fulmar_cluster::environment::{LogObjects, Slot, Uncertain};
use fulmar_cluster::{LogId, LogKind, NodeId, Position};
use fulmar_store::{LogError, LogPosition, LogSlot, LogSlots, Reliable};
use parking_lot::Mutex;
use tokio::sync::watch;

/// Interval between log lines about failures.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Delay before a damaged object is read again.
const DAMAGED_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Names a node's shared logs in the store. The first node keeps the name that its log has in the
/// store of a single node: the id of the store.
pub fn log_node(cluster: u128, node: NodeId) -> u128 {
    cluster.wrapping_add(u128::from(node.0).wrapping_sub(1))
}

/// The logs in a cluster's store.
pub struct StoreLogs {
    slots: LogSlots,
    cluster: u128,
    /// The damaged object that a protocol waits for, as the store reports it.
    damaged: watch::Sender<Option<String>>,
    /// When a failure was last logged.
    logged: Mutex<Option<Instant>>,
}

impl StoreLogs {
    /// The logs of the nodes of `cluster`.
    pub fn new(store: Reliable, cluster: u128) -> Self {
        let (slots, damaged) = (LogSlots::new(store), watch::Sender::new(None));
        StoreLogs { slots, cluster, damaged, logged: Mutex::default() }
    }

    /// The damaged object that a protocol waits for.
    pub(crate) fn damaged(&self) -> watch::Receiver<Option<String>> {
        self.damaged.subscribe()
    }

    /// Logs a failure, at most once per [`LOG_INTERVAL`]: protocols repeat failed requests several
    /// times per second.
    fn failed(&self, error: LogError) -> Uncertain {
        let is_damaged = matches!(error, LogError::Corrupt { .. });
        let is_new = is_damaged && self.damaged.borrow().is_none();
        {
            let mut logged = self.logged.lock();
            if !is_new && logged.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
                return Uncertain;
            }
            *logged = Some(Instant::now());
        }
        match is_damaged {
            true => {
                tracing::error!(%error, "an object of a node's log is damaged; its databases wait");
                self.damaged.send_replace(Some(error.to_string()));
            }
            false => tracing::warn!(%error, "cannot access a node's log; trying again"),
        }
        Uncertain
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
        self.slots.create_seal(node, incarnation, slot).await.map_err(|error| self.failed(error))
    }

    /// The contents of a slot. The records themselves are read by the engine: their `body` is
    /// empty.
    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        let found = match self.slots.read(node, incarnation, slot).await {
            Err(error @ LogError::Corrupt { .. }) => {
                let failed = self.failed(error);
                // It stays damaged until an operator has restored it.
                tokio::time::sleep(DAMAGED_RETRY_DELAY).await;
                return Err(failed);
            }
            found => found.map_err(|error| self.failed(error))?,
        };
        self.damaged.send_if_modified(|damaged| damaged.take().is_some());
        Ok(found.map(|contents| match contents {
            LogSlot::Records { needed } => Slot::Records { kept_from: position(needed), body: Vec::new() },
            LogSlot::Seal => Slot::Seal,
        }))
    }

    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.list(node, incarnation).await.map_err(|error| self.failed(error))
    }

    async fn create_end_mark(&self, log: LogId, slot: u64) -> Result<bool, Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.create_end_mark(node, incarnation, slot).await.map_err(|error| self.failed(error))
    }

    async fn delete(&self, log: LogId, slot: u64) -> Result<(), Uncertain> {
        let (node, incarnation) = self.name(log)?;
        self.slots.delete(node, incarnation, slot).await.map_err(|error| self.failed(error))
    }
}

/// A position as the protocol records it.
pub fn position(position: LogPosition) -> Position {
    Position { incarnation: position.incarnation(), slot: position.sequence() }
}

/// A recorded position as the engine uses it.
pub fn log_position(position: Position) -> LogPosition {
    LogPosition::new(position.incarnation, position.slot)
}

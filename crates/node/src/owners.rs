//! The owners of all partitions and the states of all nodes, in memory.
//!
//! [`Owners`] follows the metadata store, so it may lag behind it for a moment. Routing uses it,
//! and finds out by the answer if it was wrong. Decisions that must be right read the store.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fulmar_cluster::quarantine::{self, QuarantineRecord};
use fulmar_cluster::records::{decode, node_of_key, partition_of_key};
use fulmar_cluster::{Incarnation, LogKind, NodeId, NodeRecord, NodeState, PartitionRecord};
use fulmar_meta::{Change, Entry, MetaError, Observer};
use fulmar_pages::PartitionId;
use hashbrown::HashMap;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::environment::boot_time;
use crate::registration::{MEMBER_PREFIX, MemberRecord, Place};

/// Number of lists of waiting tasks. A change wakes the tasks of one list.
const WAITER_SHARDS: usize = 64;

/// How often a node that was failed over checks whether that is complete.
const FAILOVER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The owner of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The node.
    pub node: NodeId,
    /// The epoch of its ownership.
    pub epoch: u32,
    /// The log that it commits to.
    pub log: LogKind,
    /// The record names no range of earlier incarnations than this one; 0 if it names ranges of
    /// earlier owners.
    pub covered_since: Incarnation,
}

/// A node, as far as its records are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownNode {
    /// Its id.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Where it listens for other nodes; empty before its first start.
    pub rpc: String,
    /// Where it listens for clients.
    pub sql: String,
    /// Where it is.
    pub place: Place,
    /// Its newest incarnation, and that incarnation's state; `None` before its first start.
    pub state: Option<(Incarnation, NodeState)>,
}

impl KnownNode {
    /// The incarnation that is alive.
    pub fn alive(&self) -> Option<Incarnation> {
        self.state.filter(|(_, state)| *state == NodeState::Alive).map(|(incarnation, _)| incarnation)
    }
}

/// The numbers of partitions that a node owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionCounts {
    /// Those in its shared log.
    pub shared: u64,
    /// Those in its local log.
    pub local: u64,
}

impl PartitionCounts {
    /// All of them.
    pub fn all(self) -> u64 {
        self.shared + self.local
    }

    fn of(&mut self, log: LogKind) -> &mut u64 {
        match log {
            LogKind::Shared => &mut self.shared,
            LogKind::Local => &mut self.local,
        }
    }
}

#[derive(Default)]
struct State {
    partitions: HashMap<PartitionId, Ownership>,
    counts: BTreeMap<NodeId, PartitionCounts>,
    nodes: BTreeMap<NodeId, NodeRecord>,
    members: BTreeMap<NodeId, (String, MemberRecord)>,
    /// The partitions whose pages another node than the owner still has.
    page_servers: BTreeMap<PartitionId, NodeId>,
    /// The partitions that no node may open.
    quarantined: BTreeSet<PartitionId>,
    /// The newest incarnation of each node that is known to have ended, and when this process
    /// learned it, by CLOCK_BOOTTIME.
    ended: BTreeMap<NodeId, (Incarnation, Duration)>,
}

/// The owners of partitions and the nodes, kept up to date by the metadata store.
pub struct Owners {
    state: RwLock<State>,
    partitions_changed: [Notify; WAITER_SHARDS],
    nodes_changed: Notify,
    quarantined: Notify,
}

impl Default for Owners {
    fn default() -> Self {
        Owners {
            state: RwLock::default(),
            partitions_changed: std::array::from_fn(|_| Notify::new()),
            nodes_changed: Notify::new(),
            quarantined: Notify::new(),
        }
    }
}

impl Owners {
    /// The owner of a partition.
    pub fn owner(&self, partition: PartitionId) -> Option<Ownership> {
        self.state.read().partitions.get(&partition).copied()
    }

    /// All partitions and their owners, by id.
    pub fn all(&self) -> Vec<(PartitionId, Ownership)> {
        let state = self.state.read();
        let mut all: Vec<_> = state.partitions.iter().map(|(id, owner)| (*id, *owner)).collect();
        drop(state);
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }

    /// The partitions of a node, by id.
    pub fn owned_by(&self, node: NodeId) -> Vec<(PartitionId, Ownership)> {
        let mut owned = self.all();
        owned.retain(|(_, owner)| owner.node == node);
        owned
    }

    /// The partitions of a node whose pages another one still has.
    pub fn pulling(&self, node: NodeId) -> Vec<PartitionId> {
        let state = self.state.read();
        let is_own = |id: &&PartitionId| state.partitions.get(*id).is_some_and(|owner| owner.node == node);
        state.page_servers.keys().filter(is_own).copied().collect()
    }

    /// The number of partitions that need a node: it owns them, or still has pages that their owners do
    /// not have.
    pub fn needing(&self, node: NodeId) -> u64 {
        let pages_of = self.state.read().page_servers.values().filter(|server| **server == node).count();
        self.count(node).all() + pages_of as u64
    }

    /// The partitions of a node whose records name ranges before this incarnation.
    pub fn uncovered(&self, node: NodeId, incarnation: Incarnation) -> Vec<PartitionId> {
        let state = self.state.read();
        let is_uncovered = |owner: &Ownership| owner.node == node && owner.covered_since < incarnation;
        state.partitions.iter().filter(|(_, owner)| is_uncovered(owner)).map(|(id, _)| *id).collect()
    }

    /// How many partitions a node owns.
    pub fn count(&self, node: NodeId) -> PartitionCounts {
        self.state.read().counts.get(&node).copied().unwrap_or_default()
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> Option<KnownNode> {
        self.state.read().node(id)
    }

    /// All nodes, by id.
    pub fn nodes(&self) -> Vec<KnownNode> {
        let state = self.state.read();
        state.members.keys().filter_map(|id| state.node(*id)).collect()
    }

    /// The node with this name.
    pub fn find_node(&self, name: &str) -> Option<KnownNode> {
        self.nodes().into_iter().find(|node| node.name == name)
    }

    /// When this process learned that an incarnation had ended, if it has.
    pub fn observed_ended(&self, node: NodeId, incarnation: Incarnation) -> Option<Duration> {
        let state = self.state.read();
        state.ended.get(&node).filter(|(ended, _)| *ended >= incarnation).map(|(_, at)| *at)
    }

    /// Returns true if another node is failing this one over: its newest incarnation has ended, and it
    /// still owns databases.
    fn is_failing_over(&self, node: NodeId) -> bool {
        let has_ended = self.node(node).and_then(|own| own.state).is_some_and(|(_, state)| match state {
            NodeState::Alive => false,
            NodeState::Ended => true,
            NodeState::Sealed { .. } => self.count(node).shared > 0,
        });
        has_ended && self.nodes().iter().any(|other| other.id != node && other.alive().is_some())
    }

    /// Waits until no other node is failing this one over, at most for `max`. Otherwise a node that is
    /// cut off only from the other nodes would begin its next incarnation before they have taken its
    /// databases over, keep them, and be declared dead again.
    pub(crate) async fn wait_for_failover(&self, node: NodeId, max: Duration) {
        let ended = async {
            while self.is_failing_over(node) {
                tokio::time::sleep(FAILOVER_POLL_INTERVAL).await;
            }
        };
        let _ = tokio::time::timeout(max, ended).await;
    }

    /// Returns true if no node may open a partition.
    pub fn is_quarantined(&self, partition: PartitionId) -> bool {
        self.state.read().quarantined.contains(&partition)
    }

    /// The partitions of a node that no node may open.
    pub fn quarantined_of(&self, node: NodeId) -> Vec<PartitionId> {
        let state = self.state.read();
        let is_own = |id: &PartitionId| state.partitions.get(id).is_some_and(|owner| owner.node == node);
        state.quarantined.iter().copied().filter(is_own).collect()
    }

    /// Completes at the next change of the partitions that no node may open. Changes are not missed
    /// after the call of this function.
    pub fn quarantine_changed(&self) -> Notified<'_> {
        self.quarantined.notified()
    }

    /// Completes at the next change of the owner of this partition (or of some others). Changes are
    /// not missed after the call of this function.
    pub fn partition_changed(&self, partition: PartitionId) -> Notified<'_> {
        self.partitions_changed[shard(partition)].notified()
    }

    /// Completes at the next change of a node.
    pub fn nodes_changed(&self) -> Notified<'_> {
        self.nodes_changed.notified()
    }
}

fn shard(partition: PartitionId) -> usize {
    (partition.0 % WAITER_SHARDS as u64) as usize
}

/// What a change concerns.
enum Touched {
    Partition(PartitionId),
    Nodes,
    Quarantine,
    Nothing,
}

impl State {
    fn node(&self, id: NodeId) -> Option<KnownNode> {
        let (name, member) = self.members.get(&id)?;
        let state = self.nodes.get(&id).map(|record| (record.incarnation, record.state));
        let MemberRecord { rpc, sql, place, .. } = member.clone();
        Some(KnownNode { id, name: name.clone(), rpc, sql, place, state })
    }

    fn put(&mut self, entry: &Entry) -> Result<Touched, MetaError> {
        if let Some(partition) = partition_of_key(&entry.key) {
            let record: PartitionRecord =
                decode(&entry.key, &entry.value).map_err(|error| corrupt(entry, &error))?;
            let covered_since = match &record.ranges[..] {
                [open] => open.from.incarnation,
                _ => 0,
            };
            let log = record.log();
            let owner = Ownership { node: record.owner, epoch: record.epoch, log, covered_since };
            self.remove(partition);
            if let Some(server) = record.page_server {
                self.page_servers.insert(partition, server);
            }
            *self.counts.entry(owner.node).or_default().of(owner.log) += 1;
            self.partitions.insert(partition, owner);
            return Ok(Touched::Partition(partition));
        }
        if let Some(id) = node_of_key(&entry.key) {
            let record: NodeRecord =
                decode(&entry.key, &entry.value).map_err(|error| corrupt(entry, &error))?;
            let ended = match record.state {
                NodeState::Alive => record.incarnation.saturating_sub(1),
                NodeState::Ended | NodeState::Sealed { .. } => record.incarnation,
            };
            if self.ended.get(&id).is_none_or(|(known, _)| *known < ended) {
                self.ended.insert(id, (ended, boot_time()));
            }
            self.nodes.insert(id, record);
            return Ok(Touched::Nodes);
        }
        if let Some(name) = entry.key.strip_prefix(MEMBER_PREFIX) {
            let member = MemberRecord::decode(entry).map_err(|error| corrupt(entry, &error))?;
            self.members.insert(NodeId(member.id), (name.to_owned(), member));
            return Ok(Touched::Nodes);
        }
        if let Some(partition) = quarantine::partition_of_key(&entry.key) {
            let record: QuarantineRecord =
                decode(&entry.key, &entry.value).map_err(|error| corrupt(entry, &error))?;
            match record.is_quarantined {
                true => self.quarantined.insert(partition),
                false => self.quarantined.remove(&partition),
            };
            return Ok(Touched::Quarantine);
        }
        Ok(Touched::Nothing)
    }

    fn delete(&mut self, key: &str) -> Touched {
        if let Some(partition) = partition_of_key(key) {
            self.remove(partition);
            return Touched::Partition(partition);
        }
        if let Some(id) = node_of_key(key) {
            self.nodes.remove(&id);
            return Touched::Nodes;
        }
        if let Some(partition) = quarantine::partition_of_key(key) {
            self.quarantined.remove(&partition);
            return Touched::Quarantine;
        }
        match key.strip_prefix(MEMBER_PREFIX) {
            Some(name) => {
                self.members.retain(|_, (known, _)| known != name);
                Touched::Nodes
            }
            None => Touched::Nothing,
        }
    }

    fn remove(&mut self, partition: PartitionId) {
        self.page_servers.remove(&partition);
        if let Some(owner) = self.partitions.remove(&partition) {
            *self.counts.entry(owner.node).or_default().of(owner.log) -= 1;
        }
    }
}

fn corrupt(entry: &Entry, error: &impl ToString) -> MetaError {
    MetaError::Corrupt { place: entry.key.clone(), cause: error.to_string() }
}

impl Observer for Owners {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        let mut next = State::default();
        let mut state = self.state.write();
        next.ended = std::mem::take(&mut state.ended);
        for entry in &entries {
            if let Err(error) = next.put(entry) {
                state.ended = next.ended;
                return Err(error);
            }
        }
        *state = next;
        drop(state);
        for waiters in &self.partitions_changed {
            waiters.notify_waiters();
        }
        self.nodes_changed.notify_waiters();
        self.quarantined.notify_waiters();
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let (mut touched_nodes, mut touched_quarantine) = (false, false);
        let mut touched_shards = 0u64;
        let mut state = self.state.write();
        for change in changes {
            let touched = match &change.value {
                Some(value) => {
                    let (key, value, modified) = (change.key.clone(), value.clone(), change.revision);
                    let put = state.put(&Entry { key, value, modified });
                    put.unwrap_or_else(|error| {
                        tracing::error!(%error, "ignored an unreadable record of a partition or node");
                        Touched::Nothing
                    })
                }
                None => state.delete(&change.key),
            };
            match touched {
                Touched::Partition(partition) => touched_shards |= 1 << shard(partition),
                Touched::Nodes => touched_nodes = true,
                Touched::Quarantine => touched_quarantine = true,
                Touched::Nothing => {}
            }
        }
        drop(state);
        let waiters = self.partitions_changed.iter().enumerate();
        for (_, waiters) in waiters.filter(|(shard, _)| touched_nodes || touched_shards & (1 << shard) != 0) {
            waiters.notify_waiters();
        }
        if touched_nodes {
            self.nodes_changed.notify_waiters();
        }
        if touched_quarantine {
            self.quarantined.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use fulmar_cluster::Position;
    use fulmar_cluster::records::{encode, node_key, owner_key};
    use fulmar_meta::Revision;

    use super::*;

    fn put(owners: &Owners, key: String, value: Vec<u8>) {
        owners.changed(&[Change { key, value: Some(value), revision: Revision(1) }]);
    }

    #[test]
    fn partitions_are_counted_by_owner() {
        let owners = Owners::default();
        let from = Position { incarnation: 1, slot: 0 };
        let record = |node| encode(&PartitionRecord::new(NodeId(node), LogKind::Shared, from)).unwrap();
        for (partition, node) in [(1, 1), (2, 1), (3, 2), (2, 2)] {
            put(&owners, owner_key(PartitionId(partition)), record(node));
        }
        assert_eq!((owners.count(NodeId(1)).all(), owners.count(NodeId(2)).shared), (1, 2));
        let ids: Vec<u64> = owners.owned_by(NodeId(2)).iter().map(|(id, _)| id.0).collect();
        assert_eq!(ids, [2, 3]);
        let key = owner_key(PartitionId(2));
        owners.changed(&[Change { key, value: None, revision: Revision(2) }]);
        assert_eq!((owners.owner(PartitionId(2)), owners.count(NodeId(2)).shared), (None, 1));
    }

    #[test]
    fn page_server_is_needed_until_the_owner_has_its_pages() {
        let owners = Owners::default();
        let from = Position { incarnation: 1, slot: 0 };
        let moved = PartitionRecord::new(NodeId(2), LogKind::Shared, from);
        let mut pulls = moved.clone();
        pulls.page_server = Some(NodeId(1));
        put(&owners, owner_key(PartitionId(1)), encode(&pulls).unwrap());
        assert_eq!((owners.needing(NodeId(1)), owners.needing(NodeId(2))), (1, 1));
        assert_eq!(owners.pulling(NodeId(2)), [PartitionId(1)]);
        put(&owners, owner_key(PartitionId(1)), encode(&moved).unwrap());
        assert_eq!((owners.needing(NodeId(1)), owners.needing(NodeId(2))), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn ended_node_waits_until_it_was_failed_over() {
        let owners = Owners::default();
        let from = Position { incarnation: 1, slot: 0 };
        let own = |node| {
            let record = encode(&PartitionRecord::new(NodeId(node), LogKind::Shared, from)).unwrap();
            put(&owners, owner_key(PartitionId(1)), record);
        };
        let set = |node, state| {
            let member = format!("{{\"v\":1,\"id\":{node},\"rpc\":\"\",\"sql\":\"\"}}");
            put(&owners, format!("{MEMBER_PREFIX}n{node}"), member.into_bytes());
            put(&owners, node_key(NodeId(node)), encode(&NodeRecord::new(1, state, 1)).unwrap());
        };
        let max = Duration::from_secs(5);
        let sealed = NodeState::Sealed { end: 1, kept_from: from };
        own(1);
        set(1, NodeState::Ended);
        let is_failing_over = || owners.is_failing_over(NodeId(1));
        assert!(!is_failing_over(), "there is no other node");
        set(2, NodeState::Alive);
        assert!(is_failing_over());
        let waiting = owners.wait_for_failover(NodeId(1), max);
        futures::pin_mut!(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        set(1, sealed);
        assert!(is_failing_over(), "its database has not moved yet");
        own(2);
        waiting.await;
        assert!(!is_failing_over());
        // A node that dies during the failover is not waited for.
        own(1);
        let begun = tokio::time::Instant::now();
        owners.wait_for_failover(NodeId(1), max).await;
        assert_eq!(begun.elapsed(), max);
        set(1, NodeState::Alive);
        assert!(!is_failing_over(), "a node that was not declared dead keeps its databases");
    }

    #[test]
    fn quarantine_follows_its_record() {
        let owners = Owners::default();
        let from = Position { incarnation: 1, slot: 0 };
        let record = encode(&PartitionRecord::new(NodeId(1), LogKind::Shared, from)).unwrap();
        put(&owners, owner_key(PartitionId(5)), record);
        let quarantine = |is_quarantined| {
            let record = format!(r#"{{"v":1,"deaths":[],"is_quarantined":{is_quarantined}}}"#);
            put(&owners, quarantine::key(PartitionId(5)), record.into_bytes());
        };
        quarantine(true);
        assert!(owners.is_quarantined(PartitionId(5)));
        assert_eq!(owners.quarantined_of(NodeId(1)), [PartitionId(5)]);
        assert_eq!(owners.quarantined_of(NodeId(2)), []);
        quarantine(false);
        assert!(!owners.is_quarantined(PartitionId(5)));
    }

    #[test]
    fn end_of_an_incarnation_is_observed_once() {
        let owners = Owners::default();
        let node = |incarnation, state| encode(&NodeRecord::new(incarnation, state, 1)).unwrap();
        put(&owners, node_key(NodeId(3)), node(7, NodeState::Alive));
        assert_eq!(owners.observed_ended(NodeId(3), 7), None);
        assert!(owners.observed_ended(NodeId(3), 6).is_some(), "an incarnation ends before the next one");
        put(&owners, node_key(NodeId(3)), node(7, NodeState::Ended));
        let at = owners.observed_ended(NodeId(3), 7).unwrap();
        let sealed = NodeState::Sealed { end: 0, kept_from: Position::default() };
        put(&owners, node_key(NodeId(3)), node(7, sealed));
        assert_eq!(owners.observed_ended(NodeId(3), 7), Some(at));
    }
}

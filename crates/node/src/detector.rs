//! Detects nodes that have died, and fails them over.
//!
//! Every node sends heartbeats to every other one. A node counts as heard if it answers under a
//! valid lease, so that a node which has lost only the metadata store is failed over as well. A node
//! is suspected when it was silent for [`SUSPECT_TIMEOUT`], or when its connection was lost and its
//! address refuses new ones. A node that hears less than half of the others waits longer: it may be
//! the one that is cut off. The others then suspect it first. A suspicion may be wrong: the protocol
//! then costs the node a restart, but no commit.
//!
//! The node with the lowest id of those that live runs a failover. The others do the same a little
//! later if it is not completed by then, so the death of any node is no special case.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_cluster::{Incarnation, NodeId, NodeState, failover};
use fulmar_transport::{Error as TransportError, Stream};
use hashbrown::HashSet;
use tokio::time::timeout;

use crate::messages::{self, Heartbeat, Opening};
use crate::node::Heard;
use crate::{Node, rpc};

/// How often a heartbeat is sent.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);
/// How long the answer to a heartbeat may take.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(500);
/// A node that was silent for this long is suspected. Twice the lease, because a node on a machine
/// with little CPU time answers late, and renews its lease late.
const SUSPECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for a node that hears less than half of the others.
const ISOLATED_SUSPECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Missed heartbeats that a suspicion requires. After a suspension of this process the clock alone
/// would suspect every other node.
const SUSPECT_MISSED: u32 = 3;
/// Refused connections, in a row, that a suspicion requires.
const SUSPECT_REFUSED: u32 = 2;
/// Pause between two attempts to connect to a node whose connection was lost.
const RECONNECT_DELAY: Duration = Duration::from_millis(20);
/// How long the other nodes leave a failover to the first one.
const TURN_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one attempt of a failover may take.
const FAILOVER_TIMEOUT: Duration = Duration::from_secs(30);
/// Nodes whose utilisations are in the same step have about the same load.
const LOAD_STEP: f64 = 0.25;
/// How often new members are looked for, besides notifications.
const MEMBERS_INTERVAL: Duration = Duration::from_secs(1);

/// What a heartbeat has shown.
enum Beat {
    Heard(Heartbeat),
    Refused,
    Missed,
}

/// What heartbeats have shown of one incarnation of a node.
#[derive(Debug)]
struct Watch {
    incarnation: Incarnation,
    /// When it was last heard, or could have been.
    since: Instant,
    /// Heartbeats without a valid answer since then.
    missed: u32,
    /// Refused connections, in a row.
    refused: u32,
    was_heard: bool,
}

impl Watch {
    /// A new incarnation has its own time-out. Otherwise a node that takes long to start would be
    /// declared dead again whenever it has started.
    fn new(incarnation: Incarnation, now: Instant) -> Watch {
        Watch { incarnation, since: now, missed: 0, refused: 0, was_heard: false }
    }

    /// Waits for the full time-out again.
    fn restart(&mut self, now: Instant) {
        (self.since, self.missed, self.refused) = (now, 0, 0);
    }

    /// The heartbeat, if it is of this incarnation.
    fn heard(&self, beat: &Beat, now: Instant) -> Option<Heard> {
        match beat {
            Beat::Heard(heartbeat) if heartbeat.incarnation == self.incarnation => Some(Heard {
                incarnation: heartbeat.incarnation,
                at: now,
                serves: heartbeat.serves,
                is_draining: heartbeat.is_draining,
                utilisation: heartbeat.utilisation,
                latencies: heartbeat.latencies,
            }),
            _ => None,
        }
    }

    /// Counts a heartbeat of a node that is recorded as alive. Returns why the node is suspected, if it
    /// is. `has_lease` is whether this node has a valid lease.
    fn suspects(
        &mut self,
        beat: &Beat,
        now: Instant,
        has_lease: bool,
        suspect_timeout: Duration,
    ) -> Option<&'static str> {
        match beat {
            Beat::Heard(heartbeat) if heartbeat.incarnation == self.incarnation => {
                self.restart(now);
                self.was_heard = true;
            }
            // The records of the new incarnation will arrive.
            Beat::Heard(_) => self.missed = 0,
            Beat::Refused => (self.missed, self.refused) = (self.missed + 1, self.refused + 1),
            Beat::Missed => (self.missed, self.refused) = (self.missed + 1, 0),
        }
        if !has_lease {
            // Without the metadata store no node has a lease. When it is back, the others may renew
            // theirs a little later.
            self.restart(now);
        }
        let silent_for = now.saturating_duration_since(self.since);
        // A node that was not heard yet may listen at another address than before.
        let may_be_refused = self.was_heard || silent_for >= SUSPECT_TIMEOUT;
        if self.missed >= SUSPECT_MISSED && silent_for >= suspect_timeout {
            Some("it does not answer heartbeats")
        } else if self.refused >= SUSPECT_REFUSED && may_be_refused {
            Some("its connection was lost and its address refuses new ones")
        } else {
            None
        }
    }
}

/// How long a node must be silent to be suspected by one that hears `heard` of `others`, the nodes
/// besides the two.
fn suspect_timeout(heard: usize, others: usize) -> Duration {
    if heard * 2 >= others { SUSPECT_TIMEOUT } else { ISOLATED_SUSPECT_TIMEOUT }
}

/// The nodes that serve. All of them, if none does.
fn serving_or_all(nodes: Vec<NodeId>, serves: impl Fn(&NodeId) -> bool) -> Vec<NodeId> {
    let serving: Vec<NodeId> = nodes.iter().copied().filter(serves).collect();
    if serving.is_empty() { nodes } else { serving }
}

/// The stream for heartbeats to one node.
#[derive(Default)]
struct Pulse(Option<Stream>);

impl Pulse {
    /// Sends a heartbeat and waits for the answer.
    async fn beat(&mut self, node: &Node, peer: NodeId) -> Beat {
        match timeout(HEARTBEAT_TIMEOUT, self.exchange(node, peer)).await {
            Ok(Ok(heartbeat)) if heartbeat.is_valid => return Beat::Heard(heartbeat),
            // The stream is kept: the node answers, but has no lease.
            Ok(Ok(_)) => return Beat::Missed,
            Ok(Err(error)) if rpc::is_refused(&error) => {
                self.0 = None;
                return Beat::Refused;
            }
            Ok(Err(_)) | Err(_) => {}
        }
        self.0 = None;
        Beat::Missed
    }

    async fn exchange(&mut self, node: &Node, peer: NodeId) -> Result<Heartbeat, TransportError> {
        let stream = match &mut self.0 {
            Some(stream) => stream,
            none => none.insert(node.open_stream(peer, &Opening::Heartbeat).await?),
        };
        stream.send(b"{}").await?;
        let answer = stream.receive().await?.ok_or(TransportError::Protocol("no answer to a heartbeat"))?;
        messages::decode(&answer).map_err(TransportError::Refused)
    }

    /// Waits for the time of the next heartbeat, or until the connection is lost. Returns true
    /// then.
    async fn pause(&mut self) -> bool {
        match &mut self.0 {
            Some(stream) => {
                let is_lost = timeout(HEARTBEAT_INTERVAL, stream.receive()).await.is_ok();
                if is_lost {
                    self.0 = None;
                }
                is_lost
            }
            None => {
                tokio::time::sleep(HEARTBEAT_INTERVAL).await;
                false
            }
        }
    }
}

impl Node {
    /// Watches all other nodes. Closes the connection to an incarnation that has ended: its process
    /// may be suspended, and would keep what waits for it.
    pub(crate) async fn detect(self: Arc<Self>) {
        let mut watched = HashSet::new();
        let mut disconnected: BTreeMap<NodeId, Incarnation> = BTreeMap::new();
        loop {
            let changed = self.owners().nodes_changed();
            for known in self.owners().nodes() {
                if known.id == self.id() {
                    continue;
                }
                if watched.insert(known.id) {
                    tokio::spawn(self.clone().watch_node(known.id));
                }
                let Some((newest, state)) = known.state else { continue };
                let ended = if state == NodeState::Alive { newest.saturating_sub(1) } else { newest };
                if disconnected.insert(known.id, ended).is_some_and(|before| before != ended) {
                    self.disconnect(known.id);
                }
            }
            let _ = timeout(MEMBERS_INTERVAL, changed).await;
        }
    }

    async fn watch_node(self: Arc<Self>, peer: NodeId) {
        let mut pulse = Pulse::default();
        let mut watch = Watch::new(0, Instant::now());
        let mut was_lost = false;
        loop {
            let state = self.owners().node(peer).and_then(|known| known.state);
            let Some((incarnation, state)) = state else {
                was_lost = pulse.pause().await;
                continue;
            };
            if incarnation != watch.incarnation {
                watch = Watch::new(incarnation, Instant::now());
            }
            if state != NodeState::Alive {
                let is_waiting = state == NodeState::Ended || self.owners().count(peer).shared > 0;
                if is_waiting && watch.since.elapsed() > SUSPECT_TIMEOUT {
                    self.fail_over(peer, incarnation, "its failover is incomplete").await;
                    watch.since = Instant::now();
                }
                tokio::time::sleep(HEARTBEAT_INTERVAL).await;
                continue;
            }
            let beat = pulse.beat(&self, peer).await;
            let now = Instant::now();
            if let Some(heard) = watch.heard(&beat, now) {
                self.heard.lock().insert(peer, heard);
            }
            if let Some(reason) = watch.suspects(&beat, now, self.has_lease(), self.suspect_timeout(peer)) {
                self.fail_over(peer, incarnation, reason).await;
                watch.restart(Instant::now());
            }
            if was_lost || watch.refused > 0 {
                tokio::time::sleep(RECONNECT_DELAY).await;
                was_lost = false;
            } else {
                was_lost = pulse.pause().await;
            }
        }
    }

    /// How long a node must be silent to be suspected.
    fn suspect_timeout(&self, suspect: NodeId) -> Duration {
        let others = self.owners().nodes().into_iter().filter(|known| known.alive().is_some());
        let others: Vec<NodeId> =
            others.map(|known| known.id).filter(|id| *id != suspect && *id != self.id()).collect();
        suspect_timeout(others.iter().filter(|id| self.hears(**id)).count(), others.len())
    }

    /// Returns true if the node answers heartbeats.
    pub(crate) fn hears(&self, node: NodeId) -> bool {
        node == self.id()
            || self.heard.lock().get(&node).is_some_and(|heard| heard.at.elapsed() < SUSPECT_TIMEOUT)
    }

    /// The nodes that partitions can be given to, without slow and forbidden ones and those that are
    /// being removed if there are others; those that live, if there are none.
    pub(crate) fn serving(&self) -> Vec<NodeId> {
        let living = self.living();
        let serves = |id: &NodeId| match *id == self.id() {
            true => self.serves(),
            false => self.heard.lock().get(id).is_some_and(|heard| heard.serves),
        };
        let serving = serving_or_all(living, serves);
        let avoids = |id: &NodeId| self.control().avoids(&self.name_of(*id));
        let serving = serving_or_all(serving, |id| !avoids(id));
        let slow = self.slow_nodes.lock();
        serving_or_all(serving, |id| slow.of(*id).is_none())
    }

    /// The share of a node's capacity that it has used in the last ten seconds or so, as far as it is
    /// known.
    fn utilisation(&self, node: NodeId) -> f64 {
        match node == self.id() {
            true => self.own_utilisation(),
            false => self.heard.lock().get(&node).map_or(0.0, |heard| heard.utilisation),
        }
    }

    pub(crate) fn own_utilisation(&self) -> f64 {
        let utilisation = self.partitions().map_or(0.0, |partitions| partitions.utilisation());
        if utilisation.is_finite() { utilisation } else { 0.0 }
    }

    /// Returns true if a node serves partitions.
    pub(crate) fn is_serving(&self, node: NodeId) -> bool {
        match node == self.id() {
            true => self.serves(),
            false => self.hears(node) && self.heard.lock().get(&node).is_some_and(|heard| heard.serves),
        }
    }

    /// Returns true if a node hands its partitions over to others.
    pub(crate) fn is_leaving(&self, node: NodeId) -> bool {
        match node == self.id() {
            true => self.is_draining.load(std::sync::atomic::Ordering::Relaxed),
            false => self.hears(node) && self.heard.lock().get(&node).is_some_and(|heard| heard.is_draining),
        }
    }

    /// The nodes that live, as far as this node knows.
    pub(crate) fn living(&self) -> Vec<NodeId> {
        let alive = self.owners().nodes().into_iter().filter(|known| known.alive().is_some());
        alive.map(|known| known.id).filter(|id| self.hears(*id)).collect()
    }

    /// Fails over an incarnation of a node.
    async fn fail_over(self: &Arc<Self>, dead: NodeId, incarnation: Incarnation, reason: &'static str) {
        // Thousands of databases may be placed, which would delay heartbeats.
        let node = self.clone();
        let failing = self.runtime.spawn(async move { node.run_failover(dead, incarnation, reason).await });
        let _ = failing.await;
    }

    async fn run_failover(&self, dead: NodeId, incarnation: Incarnation, reason: &str) {
        let mut living = self.living();
        living.retain(|id| *id != dead);
        if living.first() != Some(&self.id()) {
            tokio::time::sleep(TURN_TIMEOUT).await;
            let state = self.owners().node(dead).and_then(|known| known.state);
            let is_same = state.is_some_and(|(newest, _)| newest == incarnation);
            let is_sealed = matches!(state, Some((_, NodeState::Sealed { .. })));
            if !is_same || (is_sealed && self.owners().count(dead).shared == 0) || self.hears(dead) {
                return;
            }
        }
        let begun = Instant::now();
        let name = self.owners().node(dead).map(|known| known.name).unwrap_or_default();
        tracing::warn!(
            node = name,
            incarnation,
            reason,
            "node is considered dead; failing over its databases"
        );
        let mut serving = self.serving();
        serving.retain(|id| *id != dead);
        let mut placement = Placement::new(self, serving);
        let failing = failover::fail_over(self.environment(), dead, incarnation, |_| placement.next());
        match timeout(FAILOVER_TIMEOUT, failing).await {
            Ok(Ok(failover::Outcome::Completed)) => tracing::info!(
                node = name,
                incarnation,
                databases = placement.placed,
                ms = begun.elapsed().as_millis() as u64,
                "failover completed"
            ),
            Ok(Ok(failover::Outcome::Restarted)) => tracing::info!(node = name, "the node has restarted"),
            Ok(Err(error)) => tracing::error!(node = name, %error, "failover failed"),
            Err(_) => tracing::warn!(node = name, "failover is incomplete; it will be continued"),
        }
    }
}

/// Places partitions on the least loaded nodes (ElasTraS 5.3), and on those with the fewest partitions
/// among nodes with about the same load.
pub(crate) struct Placement {
    uses: BTreeMap<NodeId, NodeUse>,
    /// What a partition uses of a node's capacity, on average.
    mean: f64,
    placed: u64,
}

struct NodeUse {
    utilisation: f64,
    partitions: u64,
}

impl Placement {
    /// Places partitions on these nodes.
    pub(crate) fn new(node: &Node, nodes: Vec<NodeId>) -> Self {
        let used = |id: NodeId| {
            (id, NodeUse { utilisation: node.utilisation(id), partitions: node.owners().count(id).all() })
        };
        Placement::of(nodes.into_iter().map(used).collect())
    }

    fn of(uses: BTreeMap<NodeId, NodeUse>) -> Self {
        let utilisation: f64 = uses.values().map(|used| used.utilisation).sum();
        let partitions: u64 = uses.values().map(|used| used.partitions).sum();
        Placement { uses, mean: utilisation / partitions.max(1) as f64, placed: 0 }
    }

    /// The node for the next partition.
    pub(crate) fn next(&mut self) -> Option<NodeId> {
        let level = |used: &NodeUse| ((used.utilisation / LOAD_STEP) as u64, used.partitions);
        let (node, used) = self.uses.iter_mut().min_by_key(|(_, used)| level(used))?;
        used.utilisation += self.mean;
        used.partitions += 1;
        self.placed += 1;
        Some(*node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slow_nodes::Latencies;

    #[test]
    fn partitions_are_placed_on_the_least_loaded_nodes() {
        let place = |nodes: &[(f64, u64)], count: usize| -> Vec<u32> {
            let uses = (1_u32..).zip(nodes);
            let uses = uses.map(|(id, (utilisation, partitions))| {
                (NodeId(id), NodeUse { utilisation: *utilisation, partitions: *partitions })
            });
            let mut placement = Placement::of(uses.collect());
            (0..count).filter_map(|_| placement.next()).map(|node| node.0).collect()
        };
        assert_eq!(place(&[], 1), [0; 0]);
        assert_eq!(place(&[(0.9, 1), (0.3, 50)], 2), [2, 2]);
        // About the same load: the fewest partitions.
        assert_eq!(place(&[(0.1, 3), (0.2, 1), (0.0, 4)], 4), [2, 2, 1, 1]);
        // The partitions of a node that has died do not all go to one node.
        let placed = place(&[(0.5, 10), (0.2, 10)], 10);
        assert!(placed[..1] == [2] && placed.contains(&1), "{placed:?}");
    }

    /// A watch of incarnation 3, in virtual time.
    struct Watched {
        watch: Watch,
        now: Instant,
        has_lease: bool,
        /// Other nodes that are heard, and their number.
        others: (usize, usize),
    }

    impl Watched {
        fn new() -> Watched {
            let now = Instant::now();
            Watched { watch: Watch::new(3, now), now, has_lease: true, others: (1, 1) }
        }

        fn beat(&mut self, beat: &Beat) -> Option<&'static str> {
            self.now += HEARTBEAT_INTERVAL;
            let (heard, others) = self.others;
            self.watch.suspects(beat, self.now, self.has_lease, suspect_timeout(heard, others))
        }

        /// How long the node gets the same heartbeat until it is suspected; at most a minute.
        fn suspected_after(&mut self, beat: &Beat) -> Option<Duration> {
            let begun = self.now;
            while self.beat(beat).is_none() {
                if self.now - begun > Duration::from_secs(60) {
                    return None;
                }
            }
            Some(self.now - begun)
        }
    }

    fn answer(incarnation: Incarnation) -> Beat {
        Beat::Heard(Heartbeat {
            incarnation,
            is_valid: true,
            serves: true,
            is_draining: false,
            utilisation: 0.0,
            latencies: Latencies::default(),
        })
    }

    #[test]
    fn silent_node_is_suspected_after_the_timeout() {
        let mut watched = Watched::new();
        assert_eq!(watched.suspected_after(&answer(3)), None);
        assert_eq!(watched.suspected_after(&Beat::Missed), Some(SUSPECT_TIMEOUT));
        assert_eq!(watched.beat(&answer(3)), None, "an answer ends the suspicion");
        assert_eq!(watched.suspected_after(&Beat::Missed), Some(SUSPECT_TIMEOUT));
    }

    #[test]
    fn time_alone_is_no_suspicion() {
        let mut watched = Watched::new();
        watched.beat(&answer(3));
        // This process was suspended.
        watched.now += Duration::from_secs(3600);
        assert_eq!(watched.beat(&Beat::Missed), None);
        assert_eq!(watched.beat(&answer(3)), None);
    }

    #[test]
    fn node_without_a_lease_suspects_no_node() {
        let mut watched = Watched::new();
        watched.beat(&answer(3));
        watched.has_lease = false;
        assert_eq!(watched.suspected_after(&Beat::Missed), None);
        assert_eq!(watched.suspected_after(&Beat::Refused), None);
        // The metadata store is back. The other node renews its lease a little later.
        watched.has_lease = true;
        assert_eq!(watched.suspected_after(&Beat::Missed), Some(SUSPECT_TIMEOUT), "from the renewal on");
    }

    #[test]
    fn refused_connections_suspect_a_node_that_was_heard() {
        let mut watched = Watched::new();
        watched.beat(&answer(3));
        assert_eq!(watched.beat(&Beat::Refused), None, "one may be chance");
        assert_eq!(watched.beat(&Beat::Missed), None);
        assert_eq!(watched.beat(&Beat::Refused), None, "not in a row");
        assert!(watched.beat(&Beat::Refused).is_some());
    }

    #[test]
    fn node_that_was_not_heard_yet_is_given_time() {
        // It has restarted at another address, which is not known yet.
        let mut watched = Watched::new();
        assert_eq!(watched.suspected_after(&Beat::Refused), Some(SUSPECT_TIMEOUT));
        let mut watched = Watched::new();
        watched.now += SUSPECT_TIMEOUT - HEARTBEAT_INTERVAL * 3;
        assert_eq!(watched.beat(&Beat::Refused), None);
        assert_eq!(watched.beat(&Beat::Refused), None);
        assert_eq!(watched.beat(&answer(3)), None, "it starts just in time");
    }

    #[test]
    fn answers_of_another_incarnation_are_not_heard() {
        let mut watched = Watched::new();
        assert!(watched.watch.heard(&answer(4), watched.now).is_none());
        assert!(watched.watch.heard(&answer(3), watched.now).is_some_and(|heard| heard.serves));
        assert_eq!(watched.suspected_after(&answer(4)), None, "its records will arrive");
    }

    #[test]
    fn isolated_node_waits_longer() {
        let mut watched = Watched::new();
        for (heard, others, expected) in [
            (0, 0, SUSPECT_TIMEOUT), // two nodes cannot know which one is cut off
            (0, 1, ISOLATED_SUSPECT_TIMEOUT),
            (1, 2, SUSPECT_TIMEOUT),
            (1, 3, ISOLATED_SUSPECT_TIMEOUT),
            (2, 3, SUSPECT_TIMEOUT),
        ] {
            watched.others = (heard, others);
            watched.beat(&answer(3));
            let after = watched.suspected_after(&Beat::Missed);
            assert_eq!(after, Some(expected), "{heard} of {others} others are heard");
        }
    }

    #[test]
    fn partitions_are_placed_on_nodes_that_serve() {
        let nodes = || vec![NodeId(1), NodeId(2), NodeId(3)];
        assert_eq!(serving_or_all(nodes(), |id| id.0 != 2), [NodeId(1), NodeId(3)]);
        assert_eq!(serving_or_all(nodes(), |_| false), nodes(), "better late than never");
    }
}

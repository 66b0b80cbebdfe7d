//! Background tasks: the lease, heartbeats and failover.

use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::{NodeId, NodeRecord, NodeState, failover, metadata};
use futures::future::{Either, select};

use super::{Answer, Node, Report, Request};
use fulmar_pages::PartitionId;

use crate::run::PARTITIONS;

const PING_INTERVAL: Duration = Duration::from_millis(300);
const SUSPECT_TIMEOUT: Duration = Duration::from_millis(1000);

impl Node {
    pub(super) fn start_background(self) {
        self.spawn(self.clone().keep_lease());
        for peer in self.processes.nodes().filter(|peer| *peer != self.id) {
            self.spawn(self.clone().watch(peer));
        }
        self.spawn(self.clone().flush());
        if self.features.collection {
            self.spawn(self.clone().collect());
        }
        if self.features.exports {
            self.spawn(self.clone().export());
        }
        if self.features.migrations {
            let partitions = (1..=PARTITIONS).map(PartitionId).collect();
            self.spawn(self.clone().resume_migrations(partitions));
            self.spawn(self.clone().unpin());
        }
    }

    async fn keep_lease(self) {
        let begun = self.begun();
        let error = self.lease.keep(&self.env, self.id, &begun).await;
        self.fenced(&error.to_string());
    }

    /// Pings a peer, and fails it over if it does not answer for [`SUSPECT_TIMEOUT`].
    async fn watch(self, peer: NodeId) {
        loop {
            let to = self.processes.current(peer);
            let ping = self.network.call(self.env.process, to, Request::Ping, PING_INTERVAL);
            let answer = ping.await;
            let now = self.env.now();
            let (known, since) = self.shared.lock().heard[&peer];
            if let Some(Answer::Alive { incarnation }) = answer {
                self.heard(peer, incarnation.max(known));
            } else if now.saturating_sub(since) > SUSPECT_TIMEOUT {
                let incarnation = self.replace(peer, known).await;
                self.heard(peer, incarnation.max(known));
            }
            self.env.sleep(PING_INTERVAL).await;
        }
    }

    fn heard(&self, peer: NodeId, incarnation: u64) {
        let now = self.env.now();
        self.shared.lock().heard.insert(peer, (incarnation, now));
    }

    /// Fails over a peer whose incarnation `known` is silent. Returns its newest incarnation. A
    /// newer one than `known` has its own time-out. Otherwise a node that takes long to start would
    /// be declared dead again whenever it has started.
    async fn replace(&self, peer: NodeId, known: u64) -> u64 {
        let Ok(Some(read)) = metadata::node(&self.env, peer).await else { return known };
        self.observe(peer, &read.record);
        let incarnation = read.record.incarnation;
        if known != 0 && incarnation > known && read.record.state == NodeState::Alive {
            return incarnation;
        }
        let (simulation, id) = (self.simulation(), self.id);
        simulation.note(|| format!("node {id}: fails over node {peer}, incarnation {incarnation}"));
        let choices: Vec<NodeId> = self.processes.nodes().filter(|node| *node != peer).collect();
        let choose = |_| Some(choices[simulation.below(choices.len() as u64) as usize]);
        let failing = failover::fail_over(&self.env, peer, incarnation, choose);
        let failing = simulation.within(Duration::from_secs(5), failing);
        let (failing, observing) = (std::pin::pin!(failing), std::pin::pin!(self.observe_end(peer)));
        let Either::Left((done, _)) = select(failing, observing).await else {
            return incarnation;
        };
        simulation.note(|| format!("node {id}: failover of node {peer}: {done:?}"));
        if let Ok(Ok(failover::Outcome::Completed)) = done {
            (self.report)(self.env.process, Report::FailedOver);
        }
        incarnation
    }

    /// Reads the record of a peer that is being failed over, as a watch would.
    async fn observe_end(&self, peer: NodeId) {
        loop {
            self.env.sleep(Duration::from_millis(10)).await;
            if let Ok(Some(read)) = metadata::node(&self.env, peer).await {
                self.observe(peer, &read.record);
                if read.record.state != NodeState::Alive {
                    return std::future::pending().await;
                }
            }
        }
    }

    /// Records the time at which it first observed that an incarnation had ended.
    fn observe(&self, node: NodeId, record: &NodeRecord) {
        if record.state != NodeState::Alive {
            let now = self.env.now();
            self.shared.lock().observed_ended.entry((node, record.incarnation)).or_insert(now);
        }
    }
}

//! One run: a policy on a trace, minute by minute.
//!
//! Each minute: loads change; nodes that have started accept moves; latencies follow from the
//! utilisation of the nodes; the controller decides; decisions are applied; moves make progress;
//! drained nodes stop. What a node takes part in is limited by time: it has 60 s per minute for
//! moves.

use std::collections::{HashMap, VecDeque};

use super::model::{self, MOVE_OVERHEAD, Tenants};
use super::report::{Minute, PolicyReport};
use super::trace::STEP_S;
use crate::picture::{Node, NodeState, Picture};
use crate::policy::{Action, Controller, Outlook, Settings};

/// Decisions that a report keeps: the first ones.
const MAX_KEPT_DECISIONS: usize = 100;

struct PendingMove {
    tenant: usize,
    to: String,
    seconds_left: f64,
    bytes: u64,
}

/// A simulated cluster.
pub(super) struct Run<'t> {
    tenants: &'t Tenants,
    picture: Picture,
    controller: Controller,
    settings: Settings,
    by_tenant: HashMap<String, usize>,
    pending: VecDeque<PendingMove>,
    /// When nodes that were requested are ready, by name.
    ready_at: HashMap<String, f64>,
    /// The seconds of the last minute that a node spent on moves, by name.
    moving_s: HashMap<String, f64>,
    next_node: usize,
    node_capacity: f64,
    report: PolicyReport,
}

impl<'t> Run<'t> {
    pub(super) fn new(
        tenants: &'t Tenants,
        nodes: usize,
        node_capacity: f64,
        controller: Controller,
        settings: Settings,
    ) -> Run<'t> {
        let picture = tenants.picture(nodes, node_capacity);
        let names = picture.partitions.iter().enumerate();
        let by_tenant = names.map(|(index, partition)| (partition.name.clone(), index)).collect();
        Run {
            tenants,
            picture,
            controller,
            settings,
            by_tenant,
            pending: VecDeque::new(),
            ready_at: HashMap::new(),
            moving_s: HashMap::new(),
            next_node: nodes,
            node_capacity,
            report: PolicyReport::default(),
        }
    }

    /// Simulates one minute.
    pub(super) fn step(&mut self, step: usize, share: f64, outlook: &Outlook) {
        let at_s = step as f64 * STEP_S;
        self.picture.at_s = at_s;
        for node in &mut self.picture.nodes {
            if node.state == NodeState::Joining
                && self.ready_at.get(&node.name).is_none_or(|ready| *ready <= at_s)
            {
                node.state = NodeState::Active;
                self.ready_at.remove(&node.name);
            }
        }
        let late = self.serve(step, at_s, share);
        for decision in self.controller.decide(&self.picture, outlook) {
            if self.report.decisions.len() < MAX_KEPT_DECISIONS
                && !matches!(decision.action, Action::Move { .. })
            {
                self.report.decisions.push(decision.clone());
            }
            self.apply(decision.action, at_s);
        }
        self.move_tenants(at_s);
        self.stop_drained();
        let nodes = self.picture.nodes.len();
        self.report.record(Minute { nodes, late, tenants: self.tenants.len() });
    }

    /// Sets loads and latencies. Returns the number of tenants above their objective.
    fn serve(&mut self, step: usize, at_s: f64, share: f64) -> usize {
        let mut load: HashMap<&str, f64> =
            self.picture.nodes.iter().map(|node| (node.name.as_str(), 0.0)).collect();
        for (index, partition) in self.picture.partitions.iter_mut().enumerate() {
            partition.load = self.tenants.load(index, step, at_s, share);
            if let Some(sum) = load.get_mut(partition.owner.as_str()) {
                *sum += partition.load;
            }
        }
        let latency = |node: &Node| {
            let moving = self.moving_s.get(&node.name).copied().unwrap_or(0.0) / STEP_S;
            let capacity = node.capacity * (1.0 - MOVE_OVERHEAD * moving.min(1.0));
            model::latency_ms(load[node.name.as_str()] / capacity)
        };
        let latencies: HashMap<&str, f64> =
            self.picture.nodes.iter().map(|node| (node.name.as_str(), latency(node))).collect();
        let mut late = 0;
        for partition in &mut self.picture.partitions {
            partition.latency_ms = latencies.get(partition.owner.as_str()).copied();
            late += usize::from(partition.latency_ms > partition.objective_ms);
        }
        late
    }

    fn apply(&mut self, action: Action, at_s: f64) {
        match action {
            Action::AddNodes { count } => {
                for _ in 0..count {
                    let name = format!("n{}", self.next_node);
                    self.next_node += 1;
                    self.ready_at.insert(name.clone(), at_s + self.settings.node_start_s);
                    let state = NodeState::Joining;
                    self.picture.nodes.push(Node { state, ..Node::new(name, self.node_capacity) });
                }
                self.report.nodes_added += count;
            }
            Action::Drain { nodes } => {
                self.report.nodes_removed += nodes.len();
                for node in self.picture.nodes.iter_mut().filter(|node| nodes.contains(&node.name)) {
                    node.state = NodeState::Draining;
                }
            }
            Action::KeepNodes { nodes } => {
                self.report.nodes_kept += nodes.len();
                for node in self.picture.nodes.iter_mut().filter(|node| nodes.contains(&node.name)) {
                    node.state = NodeState::Active;
                }
                let is_evacuated =
                    |pending: &PendingMove| nodes.contains(&self.picture.partitions[pending.tenant].owner);
                self.pending.retain(|pending| !is_evacuated(pending));
            }
            // A new plan starts from the present placement, and replaces what is left of the old
            // one.
            Action::Move { moves, .. } => {
                self.pending.clear();
                for step in moves {
                    let Some(tenant) = self.by_tenant.get(&step.partition).copied() else { continue };
                    let (to, seconds_left, bytes) = (step.to, step.seconds, step.bytes);
                    self.pending.push_back(PendingMove { tenant, to, seconds_left, bytes });
                }
            }
            Action::Tenant { tenant, to: Some(to), .. } => {
                let Some(tenant) = self.by_tenant.get(&tenant).copied() else { return };
                let bytes = self.picture.partitions[tenant].bytes;
                let seconds_left = self.settings.planning.cost.seconds(bytes, false);
                if !self.pending.iter().any(|pending| pending.tenant == tenant) {
                    self.pending.push_back(PendingMove { tenant, to, seconds_left, bytes });
                }
            }
            Action::Tenant { to: None, .. } => {}
        }
    }

    /// Lets moves make progress for one minute, in their order.
    fn move_tenants(&mut self, at_s: f64) {
        self.moving_s.clear();
        let states: HashMap<&str, NodeState> =
            self.picture.nodes.iter().map(|node| (node.name.as_str(), node.state)).collect();
        let mut unfinished = VecDeque::new();
        let mut finished = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            let from = &self.picture.partitions[pending.tenant].owner;
            if states.get(pending.to.as_str()) != Some(&NodeState::Active) || *from == pending.to {
                continue;
            }
            let used = |name: &str, moving: &HashMap<String, f64>| moving.get(name).copied().unwrap_or(0.0);
            let free = STEP_S - used(from, &self.moving_s).max(used(&pending.to, &self.moving_s));
            let seconds = pending.seconds_left.min(free);
            if seconds > 0.0 {
                *self.moving_s.entry(from.clone()).or_insert(0.0) += seconds;
                *self.moving_s.entry(pending.to.clone()).or_insert(0.0) += seconds;
                pending.seconds_left -= seconds;
            }
            if pending.seconds_left > 1e-9 {
                unfinished.push_back(pending);
            } else {
                let is_exempt = states.get(from.as_str()).is_some_and(|state| state.is_leaving());
                finished.push((pending, is_exempt));
            }
        }
        self.pending = unfinished;
        for (pending, is_exempt) in finished {
            let partition = &mut self.picture.partitions[pending.tenant];
            let cools = |before: f64| at_s - before < self.settings.planning.cool_down_s;
            if !is_exempt && partition.moved_at_s.is_some_and(cools) {
                self.report.cool_down_violations += 1;
            }
            partition.owner = pending.to;
            partition.moved_at_s = Some(at_s);
            self.report.moves += 1;
            self.report.bytes += pending.bytes;
        }
    }

    /// Stops draining nodes that are empty.
    fn stop_drained(&mut self) {
        let is_draining = |node: &Node| node.state == NodeState::Draining;
        if !self.picture.nodes.iter().any(is_draining) {
            return;
        }
        let owners: std::collections::HashSet<&str> =
            self.picture.partitions.iter().map(|partition| partition.owner.as_str()).collect();
        self.picture.nodes.retain(|node| !is_draining(node) || owners.contains(node.name.as_str()));
    }

    pub(super) fn finish(mut self, policy: &str) -> PolicyReport {
        policy.clone_into(&mut self.report.policy);
        self.report
    }
}

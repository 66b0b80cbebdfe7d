//! One round of the policy: from a picture and a forecast to decisions.
//!
//! 1. Dead nodes are replaced (ElasTraS 5.3), once each. A node that is missing, because it has ended
//!    a short time ago, is not: most come back. A slow node counts as no capacity, and is drained when
//!    the others can serve its tenants ([`super::slow`]).
//! 2. The rule ([`super::when`]) or the limits wish for a number of nodes: nodes are added, or the
//!    least loaded ones drained. If more are needed while some are being drained, those are kept, unless an
//!    operator drains them.
//! 3. Moves are planned if nodes leave, lack memory, are new and empty, or will be above the high
//!    threshold at the forecast load, and have been for [`HOLD_S`]. In the last two cases they must
//!    be worth it ([`MIN_GAIN`]). An overload's reasons contain the hot keys of the tenant that has
//!    most of them (E-Store).
//! 4. A tenant that is late on a node that is not overloaded is helped by itself
//!    ([`super::which`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::outlook::{Ahead, Outlook};
use super::place::{Places, Purpose};
use super::slow::SlowNode;
use super::tenants::{Bottleneck, Candidate, candidates, choose};
use super::when::{self, Rule, View};
use super::which::{self, Cell, Link, Need, Step, Tenancy};
use super::{Action, Decision, Effect, HotKey, MIN_GAIN, Reason, Settings, full_s};
use crate::picture::{Node, NodeState, Partition, Picture};
use crate::plan::CostModel;
use crate::planners;

/// Nodes with late tenants that are helped in one round.
const MAX_NODES_PER_ROUND: usize = 20;

/// The load that leaves a late tenant's node is at least this share of the tenant's.
const MIN_RELIEF: f64 = 0.5;

/// How long a node must be above the high threshold before tenants are moved away, in seconds; less
/// if nodes are added sooner than that. At the first round above it the load is still rising, so that
/// too few tenants would move.
const HOLD_S: f64 = 10.0;

/// Number of hot keys that a decision lists.
const MAX_HOT_KEYS: usize = 20;

/// A new node counts as empty below this share of the mean utilisation.
const EMPTY_SHARE: f64 = 0.5;

/// The policy of a cluster: a rule, and what it remembers from round to round.
pub struct Controller {
    settings: Settings,
    rule: Box<dyn Rule>,
    planner: &'static dyn planners::Planner,
    replaced: BTreeSet<String>,
    /// Nodes that this controller has drained, and not an operator.
    drained: BTreeSet<String>,
    slow: SlowNode,
    /// Since when some node has been above the high threshold.
    above_since_s: Option<f64>,
    /// The time of the round before: before all others at first, and after all others if it says nothing.
    last_s: f64,
    /// From the time of pictures to UTC, in seconds.
    utc_offset_s: f64,
}

struct NodeUse {
    load: f64,
    memory: u64,
    tenants: usize,
}

impl Controller {
    /// A controller with a rule of [`when::RULES`]. `None` if the rule or the planner is unknown.
    pub fn new(rule: &str, settings: Settings) -> Option<Controller> {
        let planner = planners::planner(settings.planner)?;
        Some(Controller {
            rule: when::rule(rule)?,
            planner,
            settings,
            replaced: BTreeSet::new(),
            drained: BTreeSet::new(),
            slow: SlowNode::default(),
            above_since_s: None,
            last_s: f64::NEG_INFINITY,
            utc_offset_s: 0.0,
        })
    }

    /// Continues the drains of an earlier controller.
    pub fn adopt(&mut self, drained: impl IntoIterator<Item = String>) {
        self.drained.extend(drained);
    }

    /// Sets what is added to the time of pictures for the maintenance window, in seconds: the clock may
    /// have been set since that time began.
    pub fn set_utc_offset(&mut self, seconds: f64) {
        self.utc_offset_s = seconds;
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Sets the cost model of moves, which was measured.
    pub fn set_move_cost(&mut self, cost: CostModel) {
        self.settings.planning.cost = cost;
    }

    /// The name of the rule.
    pub fn rule(&self) -> &'static str {
        self.rule.name()
    }

    /// Forgets what was decided, because it is not carried out. `drained` are the nodes that are being
    /// drained.
    pub fn forget_decisions(&mut self, drained: impl IntoIterator<Item = String>) {
        self.replaced.clear();
        self.drained = drained.into_iter().collect();
    }

    /// Forgets for how long conditions have held. For a time about which nothing is known: a clock
    /// has jumped, or there were no rounds.
    pub fn forget_times(&mut self) {
        if let Some(rule) = when::rule(self.rule.name()) {
            self.rule = rule;
        }
        (self.above_since_s, self.last_s) = (None, f64::INFINITY);
    }

    /// Decides for one round.
    pub fn decide(&mut self, picture: &Picture, outlook: &Outlook) -> Vec<Decision> {
        let uses = uses(picture);
        let high = self.settings.high;
        let overloaded: BTreeSet<&str> = (picture.nodes.iter().zip(&uses))
            .filter(|(node, used)| used.load / node.capacity > high)
            .map(|(node, _)| node.name.as_str())
            .collect();
        let slow = self.slow.choose(picture, |node| overloaded.contains(node.name.as_str()));
        let view = self.view(picture, outlook, &uses, slow);
        let mut decisions = Vec::new();
        decisions.extend(self.replace(picture, &view));
        let is_replacing = !decisions.is_empty();
        let settings = self.with_missing_nodes(picture);
        let wish = self.rule.wish(&view, &settings);
        if let Some(wish) = wish.or_else(|| within_limits(&view, &settings)) {
            decisions.extend(self.resize(picture, &uses, &view, wish, is_replacing));
        }
        if decisions.is_empty() {
            decisions.extend(slow.and_then(|slow| self.drain_slow(picture, &uses, &view, slow)));
        }
        let loads: Vec<f64> = uses.iter().map(|used| used.load).collect();
        let ahead = Ahead::new(picture, outlook, &loads);
        let overload = self.overload(picture.at_s, ahead.highest);
        // The picture shows kept nodes as leaving, so moves are planned in the next round.
        if decisions.iter().any(|decision| matches!(decision.action, Action::KeepNodes { .. })) {
            return decisions;
        }
        decisions.extend(self.balance(picture, &ahead, &view, &uses, overload));
        let is_moving = decisions.iter().any(|decision| matches!(decision.action, Action::Move { .. }));
        if !is_moving {
            decisions.extend(self.help_late_tenants(picture, &view, &uses));
        }
        decisions
    }

    /// What the rule sees. `slow` does not count as capacity.
    fn view(&self, picture: &Picture, outlook: &Outlook, uses: &[NodeUse], slow: Option<&Node>) -> View {
        let is_slow = |node: &Node| slow.is_some_and(|slow| slow.name == node.name);
        let counts = |(node, used): &(&Node, &NodeUse)| {
            let is_member = matches!(node.state, NodeState::Active | NodeState::Joining);
            is_member && is_used(node, used) && !is_slow(node)
        };
        // A node that does not answer for a moment is joining as well, but has tenants.
        let starts = |(node, used): &(&Node, &NodeUse)| node.state == NodeState::Joining && used.tenants == 0;
        let counted: Vec<&Node> =
            picture.nodes.iter().zip(uses).filter(counts).map(|(node, _)| node).collect();
        // Without any, a new node is probably like the others.
        let known = if counted.is_empty() { picture.nodes.iter().collect() } else { counted.clone() };
        let capacity: f64 = known.iter().map(|node| node.capacity).sum();
        let serving = picture.nodes.iter().zip(uses).filter(|(node, _)| node.state == NodeState::Active);
        let above =
            serving.clone().filter(|(node, used)| used.load / node.capacity > self.settings.high).count();
        let with_objective = picture.partitions.iter().filter(|partition| partition.objective_ms.is_some());
        let late = with_objective.clone().filter(|partition| is_late(partition)).count();
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        View {
            at_s: picture.at_s,
            nodes: counted.len(),
            joining: picture.nodes.iter().zip(uses).filter(starts).count(),
            load: picture.load(),
            node_capacity: capacity / known.len().max(1) as f64,
            share_above: share(above, serving.count()),
            late_share: share(late, with_objective.count()),
            method: outlook.method,
            forecast: outlook.loads.clone(),
            step_s: outlook.step_s,
            full_s: full_s(picture, &self.settings.planning.cost),
        }
    }

    fn decision(&self, view: &View, action: Action, reasons: Vec<Reason>, nodes_after: usize) -> Decision {
        let peak = view.forecast.iter().copied().fold(view.load, f64::max);
        let mean = |nodes: usize| peak / (nodes.max(1) as f64 * view.node_capacity).max(f64::MIN_POSITIVE);
        let predicted = Effect {
            nodes_before: view.nodes,
            nodes_after,
            mean_before: mean(view.nodes),
            mean_after: mean(nodes_after),
            moves: None,
        };
        Decision { at_s: view.at_s, action, reasons, predicted }
    }

    /// Adds a node for each that has died, once per node.
    fn replace(&mut self, picture: &Picture, view: &View) -> Option<Decision> {
        let is_dead = |node: &&Node| node.state == NodeState::Dead;
        let dead: Vec<&String> = picture.nodes.iter().filter(is_dead).map(|node| &node.name).collect();
        let new: Vec<String> =
            dead.iter().filter(|name| !self.replaced.contains(**name)).map(|name| (*name).clone()).collect();
        self.replaced.retain(|name| dead.contains(&name));
        self.replaced.extend(new.iter().cloned());
        let count = new.len().min(self.settings.max_nodes.saturating_sub(view.nodes));
        let reasons = vec![Reason::NodesLeave { nodes: new }];
        (count > 0).then(|| self.decision(view, Action::AddNodes { count }, reasons, view.nodes + count))
    }

    /// Drains a slow node if the others can serve its tenants.
    fn drain_slow(
        &mut self,
        picture: &Picture,
        uses: &[NodeUse],
        view: &View,
        slow: &Node,
    ) -> Option<Decision> {
        let has_room = view.load <= view.nodes as f64 * view.node_capacity * self.settings.high;
        if !has_room || !self.may_drain(picture, uses) {
            return None;
        }
        self.slow.drained(picture.at_s);
        let action = Action::Drain { nodes: vec![slow.name.clone()] };
        let reasons = vec![Reason::SlowNode { node: slow.name.clone() }];
        Some(self.decision(view, action, reasons, view.nodes))
    }

    /// Returns true if nodes may be removed now, and no earlier change is in progress.
    fn may_drain(&self, picture: &Picture, uses: &[NodeUse]) -> bool {
        let utc_s = picture.at_s + self.utc_offset_s;
        let is_allowed = self.settings.maintenance.is_none_or(|window| window.contains(utc_s));
        // A node that starts or leaves is a change that has not taken effect yet.
        let is_settled = |(node, used): (&Node, &NodeUse)| match node.state {
            NodeState::Active | NodeState::Missing => true,
            NodeState::Dead => used.tenants == 0,
            NodeState::Joining | NodeState::Draining => false,
        };
        is_allowed && picture.nodes.iter().zip(uses).all(is_settled)
    }

    /// The settings of a round: missing nodes count for the minimum.
    fn with_missing_nodes(&self, picture: &Picture) -> Settings {
        let missing = picture.nodes.iter().filter(|node| node.state == NodeState::Missing).count();
        let min_nodes = self.settings.min_nodes.saturating_sub(missing).max(1);
        Settings { min_nodes, ..self.settings.clone() }
    }

    fn resize(
        &mut self,
        picture: &Picture,
        uses: &[NodeUse],
        view: &View,
        wish: when::Wish,
        is_replacing: bool,
    ) -> Vec<Decision> {
        let draining = picture.nodes.iter().filter(|node| node.state == NodeState::Draining);
        let draining: Vec<&String> = draining.map(|node| &node.name).collect();
        self.drained.retain(|name| draining.contains(&name));
        if wish.nodes > view.nodes {
            let missing = wish.nodes - view.nodes;
            let is_slow = |name: &&String| picture.nodes.iter().any(|node| node.slow && node.name == **name);
            let kept: Vec<String> =
                self.drained.iter().filter(|name| !is_slow(name)).take(missing).cloned().collect();
            kept.iter().for_each(|name| {
                self.drained.remove(name);
            });
            let (keeping, count) = (view.nodes + kept.len(), missing - kept.len());
            let mut decisions = Vec::new();
            if !kept.is_empty() {
                let action = Action::KeepNodes { nodes: kept };
                decisions.push(self.decision(view, action, wish.reasons.clone(), keeping));
            }
            if count > 0 && !is_replacing {
                decisions.push(self.decision(view, Action::AddNodes { count }, wish.reasons, wish.nodes));
            }
            return decisions;
        }
        if !self.may_drain(picture, uses) {
            return Vec::new();
        }
        let nodes = planners::least_loaded(picture, view.nodes - wish.nodes);
        if nodes.is_empty() {
            return Vec::new();
        }
        self.drained.extend(nodes.iter().cloned());
        let after = view.nodes - nodes.len();
        vec![self.decision(view, Action::Drain { nodes }, wish.reasons, after)]
    }

    /// A node that will be above the high threshold at the forecast load, and has been for long enough.
    /// `highest` is the highest utilisation then.
    fn overload(&mut self, at_s: f64, highest: f64) -> Option<Reason> {
        let last_s = std::mem::replace(&mut self.last_s, at_s).min(at_s);
        let threshold = self.settings.high;
        if highest <= threshold {
            self.above_since_s = None;
            return None;
        }
        // The load of a round is that since the round before.
        let for_s = at_s - *self.above_since_s.get_or_insert(last_s);
        let quantity = "highest utilisation at the forecast load";
        let shown_s = if for_s.is_finite() { for_s } else { 0.0 };
        let reason = Reason::Threshold { quantity, value: highest, threshold, for_s: shown_s };
        (for_s >= HOLD_S.min(self.settings.hold_up_s)).then_some(reason)
    }

    /// Plans moves, if there is a reason to.
    fn balance(
        &self,
        picture: &Picture,
        ahead: &Ahead<'_>,
        view: &View,
        uses: &[NodeUse],
        overload: Option<Reason>,
    ) -> Option<Decision> {
        let nodes = || picture.nodes.iter().zip(uses);
        let active = || nodes().filter(|(node, _)| node.state == NodeState::Active);
        let mut reasons = Vec::new();
        let leaving: Vec<String> = nodes()
            .filter(|(node, used)| node.state.is_leaving() && used.tenants > 0)
            .map(|(node, _)| node.name.clone())
            .collect();
        if !leaving.is_empty() {
            reasons.push(Reason::NodesLeave { nodes: leaving });
        }
        let over_memory = active().filter(|(node, used)| used.memory > node.memory).count();
        if over_memory > 0 {
            reasons.push(Reason::Memory { nodes: over_memory });
        }
        let (is_required, is_overloaded) = (!reasons.is_empty(), overload.is_some());
        if let Some(overload) = overload {
            reasons.push(overload);
            reasons.extend(ahead.reason());
        }
        let used = active().filter(|(node, used)| is_used(node, used));
        let capacity: f64 = used.map(|(node, _)| node.capacity).sum();
        let mean = view.load / capacity.max(f64::MIN_POSITIVE);
        let is_empty = |(node, used): &(&Node, &NodeUse)| {
            node.accepts_moves() && used.load / node.capacity < mean * EMPTY_SHARE
        };
        let empty = active().filter(is_empty).count();
        if empty > 0 && ahead.highest > self.settings.target {
            reasons.push(Reason::NewNodes { nodes: empty });
        }
        if reasons.is_empty() {
            return None;
        }
        let acceptable = self.settings.target / ahead.factor;
        let planning = planners::Settings { acceptable, ..self.settings.planning };
        let plan = planners::plan(&ahead.picture(), self.planner, &planning);
        let gain = plan.evaluation.highest_before - plan.evaluation.highest;
        let keys = is_overloaded.then(|| self.hot_keys(ahead, uses, &planning)).flatten();
        let hot = keys.as_ref().map(|(tenant, _)| tenant.clone());
        reasons.extend(keys.into_iter().flat_map(|(_, reasons)| reasons));
        if plan.moves.is_empty() || (gain < MIN_GAIN && !is_required) {
            let action = Action::Tenant { tenant: hot?, to: None, steps: Vec::new() };
            return Some(self.decision(view, action, reasons, view.nodes));
        }
        let action = Action::Move { planner: plan.planner, moves: plan.moves };
        let mut decision = self.decision(view, action, reasons, view.nodes);
        decision.predicted.moves = Some(plan.evaluation);
        Some(decision)
    }

    /// The tenant of an overloaded node with the most load on hot keys, its keys, and the mechanism
    /// that is missing to move them (E-Store).
    fn hot_keys(
        &self,
        ahead: &Ahead<'_>,
        uses: &[NodeUse],
        planning: &planners::Settings,
    ) -> Option<(String, [Reason; 2])> {
        if !planning.whole_partitions {
            return None;
        }
        let picture = ahead.picture();
        let threshold = self.settings.high / ahead.factor;
        let nodes = picture.nodes.iter().zip(uses);
        let is_over = |(node, used): &(&Node, &NodeUse)| used.load / node.capacity > threshold;
        let overloaded: BTreeSet<&str> = nodes.filter(is_over).map(|(node, _)| &*node.name).collect();
        let hot_load = |of: &Partition| of.hot_keys.iter().map(|key| key.load).sum::<f64>();
        let hottest = picture
            .partitions
            .iter()
            .filter(|of| !of.hot_keys.is_empty() && overloaded.contains(of.owner.as_str()))
            .max_by(|left, right| hot_load(left).total_cmp(&hot_load(right)))?;
        let mut keys: Vec<HotKey> =
            hottest.hot_keys.iter().map(|key| HotKey { key: key.name.clone(), load: key.load }).collect();
        keys.sort_by(|left, right| right.load.total_cmp(&left.load));
        keys.truncate(MAX_HOT_KEYS);
        let with_keys = planners::Settings { whole_partitions: false, ..*planning };
        let highest = planners::plan(&picture, self.planner, &with_keys).evaluation.highest;
        let tenant = hottest.name.clone();
        let reason = Reason::HotKeys { tenant: tenant.clone(), keys, highest };
        let mechanism = which::Mechanism::MoveRows;
        Some((tenant, [reason, Reason::MissingMechanism { mechanism }]))
    }

    fn help_late_tenants(&self, picture: &Picture, view: &View, uses: &[NodeUse]) -> Vec<Decision> {
        let by_name: HashMap<&str, usize> =
            picture.nodes.iter().enumerate().map(|(index, node)| (node.name.as_str(), index)).collect();
        // The tenant of each node that is the furthest above its objective.
        let mut worst: BTreeMap<usize, (f64, &Partition)> = BTreeMap::new();
        for partition in picture.partitions.iter().filter(|partition| is_late(partition)) {
            let Some(node) = by_name.get(partition.owner.as_str()) else { continue };
            let (Some(latency), Some(objective)) = (partition.latency_ms, partition.objective_ms) else {
                continue;
            };
            let lateness = latency / objective;
            let entry = worst.entry(*node).or_insert((lateness, partition));
            if lateness > entry.0 {
                *entry = (lateness, partition);
            }
        }
        if worst.is_empty() {
            return Vec::new();
        }
        let mut places = Places::new(picture);
        let late = worst.into_iter().take(MAX_NODES_PER_ROUND);
        let help = |(node, (_, tenant)): (usize, (f64, &Partition))| {
            self.help(&mut places, picture, view, tenant, (&picture.nodes[node], &uses[node]))
        };
        late.flat_map(help).collect()
    }

    /// Helps a late tenant: scales it out, or moves those tenants of its node away that free enough
    /// at the lowest cost, which may be others ([`super::tenants`]).
    fn help(
        &self,
        places: &mut Places,
        picture: &Picture,
        view: &View,
        tenant: &Partition,
        (home, used): (&Node, &NodeUse),
    ) -> Vec<Decision> {
        let (Some(latency_ms), Some(objective_ms)) = (tenant.latency_ms, tenant.objective_ms) else {
            return Vec::new();
        };
        let largest = picture.nodes.iter().filter(|node| node.accepts_moves()).map(|node| node.capacity);
        let need = match tenant.load > largest.fold(home.capacity, f64::max) * self.settings.high {
            true => Need::ScaleOut,
            false => Need::ScaleUp,
        };
        let tenancy = if used.tenants == 1 { Tenancy::Dedicated } else { Tenancy::Shared };
        let candidates = candidates(picture, &home.name, Bottleneck::Cpu, &self.settings.planning);
        let moved = match need {
            Need::ScaleUp => {
                let excess = used.load - self.settings.target * home.capacity;
                choose(&candidates, excess.max(tenant.load * MIN_RELIEF))
            }
            Need::ScaleOut | Need::ScaleBack => {
                candidates.into_iter().filter(|candidate| candidate.partition.name == tenant.name).collect()
            }
        };
        let mut decide = |candidate: &Candidate| {
            let moved = candidate.partition;
            let purpose = if need == Need::ScaleOut { Purpose::Extraction } else { Purpose::Relief };
            let to = places.place(moved, purpose, self.settings.high);
            let link = match to {
                Some(to) if to.site != home.site => Link::Wan,
                _ => Link::Lan,
            };
            let cell = Cell { tenancy, need, link };
            let (mut steps, missing) = which::steps(cell);
            let is_move = |step: &Step| match step {
                Step::Extract => true,
                Step::Use(mechanism) => {
                    matches!(mechanism, which::Mechanism::MoveTenant | which::Mechanism::MoveMachine)
                }
            };
            let moves = steps.iter().any(is_move);
            if to.is_none() {
                steps.retain(|step| !is_move(step));
            }
            let mut reasons = vec![Reason::Latency { latency_ms, objective_ms }, Reason::Table1(cell)];
            if moved.name != tenant.name {
                let Candidate { benefit, cost, .. } = *candidate;
                reasons.push(Reason::CheaperTenant {
                    late: tenant.name.clone(),
                    load: benefit,
                    seconds: cost,
                });
            }
            reasons.extend(missing.into_iter().map(|mechanism| Reason::MissingMechanism { mechanism }));
            let to = if moves { to.map(|node| node.name.clone()) } else { None };
            let action = Action::Tenant { tenant: moved.name.clone(), to, steps };
            self.decision(view, action, reasons, view.nodes)
        };
        moved.iter().map(&mut decide).collect()
    }
}

/// The wish of an operator: the minimum or maximum was changed, or a node was removed by hand.
fn within_limits(view: &View, settings: &Settings) -> Option<when::Wish> {
    let limit = view.nodes.max(settings.min_nodes).min(settings.max_nodes);
    let reasons = vec![Reason::NodeLimit { nodes: view.nodes, limit }];
    (limit != view.nodes).then_some(when::Wish { nodes: limit, reasons })
}

/// Returns true if a node serves tenants, or can. One that is forbidden and has no load, such as a node
/// that only accepts connections, is no capacity.
fn is_used(node: &Node, used: &NodeUse) -> bool {
    !node.forbidden || used.load > 0.0
}

fn is_late(partition: &Partition) -> bool {
    partition.latency_ms.zip(partition.objective_ms).is_some_and(|(latency, objective)| latency > objective)
}

fn uses(picture: &Picture) -> Vec<NodeUse> {
    let by_name: HashMap<&str, usize> =
        picture.nodes.iter().enumerate().map(|(index, node)| (node.name.as_str(), index)).collect();
    let mut uses: Vec<NodeUse> =
        picture.nodes.iter().map(|_| NodeUse { load: 0.0, memory: 0, tenants: 0 }).collect();
    for partition in &picture.partitions {
        let Some(home) = by_name.get(partition.owner.as_str()).copied() else { continue };
        let mut rest = (partition.load, partition.memory);
        for piece in partition.pieces() {
            let owner = piece.owner.as_deref().and_then(|name| by_name.get(name)).copied().unwrap_or(home);
            uses[owner].load += piece.load;
            uses[owner].memory = uses[owner].memory.saturating_add(piece.memory);
            uses[owner].tenants += usize::from(owner != home);
            rest = (rest.0 - piece.load, rest.1.saturating_sub(piece.memory));
        }
        uses[home].load += rest.0.max(0.0);
        uses[home].memory = uses[home].memory.saturating_add(rest.1);
        uses[home].tenants += 1;
    }
    uses
}

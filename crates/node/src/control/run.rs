//! A controller during one term: its rounds.
//!
//! Every change of the records compares the role's record and the plan's. If a change is not known to
//! be applied, the term begins again ([`Ended`]): the next campaign finds out whether this node is
//! still the controller, and all records are read again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fulmar_cluster::election::{self, Term};
use fulmar_cluster::metadata;
use fulmar_cluster::records::encode;
use fulmar_control::picture::Picture;
use fulmar_control::planners::ItemKind;
use fulmar_control::policy::{Action, Decision, Reason};
use fulmar_elastic::settings::{ControlSettings, Mode};
use fulmar_gateway::events::{Event, Kind};
use fulmar_meta::{Outcome, Revision, Transaction};
use fulmar_pages::PartitionId;
use hashbrown::HashMap;
use tokio::time::sleep_until;

use super::balance;
use super::brain::Brain;
use super::clock::{Clock, unix_ms};
use super::decisions::{Advice, Part, Progress, Recorded, add_latency, inherited, not_done};
use super::forecast::{self, Forecaster, Stored};
use super::moves::{Moves, Queued};
use super::nodes::NodeWork;
use super::observed::Marks;
use super::picture::{self, Pictured, Sources};
use super::records::{
    Adding, CANCEL_KEY, DecisionRecord, MAX_DECISIONS, OutcomeRecord, OutcomeResult, PLAN_KEY, Phase,
    PlanRecord, Removing, decision_key, shortened,
};
use super::reports::{self, Reports};
use super::{ROLE, texts};
use crate::load::Observation;
use crate::{Node, Partitions};

/// Old decisions that are deleted at a time.
const MAX_DELETED: usize = 50;
/// An effect is measured when a decision was carried out this number of rounds ago, and loads show
/// nearly all of it.
const SETTLE_ROUNDS: f64 = 2.0;
const SETTLE_SMOOTHINGS: f64 = 2.0;
/// Advice of one kind is recorded at most once in this number of rounds.
const ROUNDS_PER_ADVICE: f64 = 12.0;
/// A move from a node that has to be emptied is repeated after this number of rounds.
const RETRY_ROUNDS: f64 = 12.0;
/// Pause between two events that nodes do not report.
const WAIT_EVENT_INTERVAL: Duration = Duration::from_secs(600);
/// Why something was given up.
const CANCELLED: &str = "cancelled by an administrator";

/// The term has ended, or has to begin again.
#[derive(Debug)]
pub(super) struct Ended;

/// A controller.
pub(super) struct Run {
    pub node: Arc<Node>,
    partitions: Arc<dyn Partitions>,
    pub term: Term,
    pub settings: ControlSettings,
    /// Absent while it decides.
    brain: Option<Brain>,
    clock: Clock,
    reports: Reports,
    pub plan: PlanRecord,
    plan_revision: Option<Revision>,
    pub nodes: NodeWork,
    pub moves: Moves,
    pub progress: Progress,
    advice: Advice,
    next_decision: u64,
    /// The numbers of the decisions in the metadata store.
    kept: VecDeque<u64>,
    /// The decisions without outcome.
    pending: BTreeMap<u64, DecisionRecord>,
    /// When partitions were moved: by the nodes' clocks in UTC, and as first seen on the clock of the
    /// pictures. A node's clock may be ahead.
    moves_seen: HashMap<PartitionId, (u64, f64)>,
    /// Nothing is decided until then, on the clock of the pictures.
    paused_until_s: f64,
    /// What operators allowed when the round began.
    marks: Marks,
    /// The last request to cancel the plan that was carried out.
    last_cancel: u64,
    /// Too many nodes do not report their load.
    is_waiting: bool,
    /// When an event said so.
    wait_recorded_at: Option<Instant>,
}

impl Run {
    /// Reads the records that an earlier controller has left, and continues its plan.
    pub(super) async fn begin(
        node: Arc<Node>,
        partitions: Arc<dyn Partitions>,
        term: Term,
    ) -> Result<Run, fulmar_cluster::Error> {
        let environment = node.environment();
        let plan = metadata::read::<_, PlanRecord>(environment, PLAN_KEY).await?;
        let Recorded { numbers: kept, readable } = Recorded::read(environment).await;
        let stored = Stored::read(&node).await;
        let settings = node.control().settings();
        let clock = Clock::new();
        let forecaster = Forecaster::start(&settings, stored, clock.at_s());
        node.control().set_forecasts(Some(forecaster.forecasts.clone()));
        let brain = Brain::new(&settings, forecaster);
        let plan_revision = plan.as_ref().map(|read| read.revision);
        let pending = readable.into_iter().filter(|record| record.outcome.is_none());
        let mut run = Run {
            node,
            partitions,
            term,
            settings,
            brain,
            clock,
            reports: Reports::default(),
            plan: plan.map(|read| read.record).unwrap_or_default(),
            plan_revision,
            nodes: NodeWork::default(),
            moves: Moves::default(),
            progress: Progress::default(),
            advice: Advice::default(),
            next_decision: kept.back().copied().unwrap_or(0) + 1,
            kept,
            pending: pending.map(|record| (record.number, record)).collect(),
            moves_seen: HashMap::new(),
            paused_until_s: 0.0,
            marks: Marks::default(),
            last_cancel: 0,
            is_waiting: false,
            wait_recorded_at: None,
        };
        run.pause_after_cancel(unix_ms().saturating_sub(run.plan.cancelled_unix_ms) as f64 / 1000.0);
        run.adopt();
        Ok(run)
    }

    /// Continues the decisions of an earlier controller that are in the plan.
    fn adopt(&mut self) {
        let mut parts: BTreeMap<u64, Vec<Part>> = BTreeMap::new();
        let adding = self.plan.adding.iter().map(|adding| (adding.decision, &adding.name));
        let removing = self.plan.removing.iter().map(|removing| (removing.decision, &removing.name));
        for (decision, name) in adding.chain(removing) {
            parts.entry(decision).or_default().push(Part::Node(name.clone()));
        }
        for number in self.pending.keys() {
            self.progress.begin(*number, parts.remove(number).unwrap_or_default());
        }
        if let Some(brain) = &mut self.brain {
            brain.adopt(self.plan.drained());
        }
    }

    /// Decides nothing for the rest of `cool_down` after a plan was cancelled, this long ago.
    fn pause_after_cancel(&mut self, ago_s: f64) {
        self.paused_until_s = self.clock.at_s() + self.settings.policy.planning.cool_down_s - ago_s;
    }

    /// Returns true if nothing is decided for now, because an operator has cancelled a plan.
    fn is_paused(&self) -> bool {
        self.clock.at_s() < self.paused_until_s
    }

    /// Returns true if nodes may be removed now.
    pub(super) fn may_remove(&self) -> bool {
        let window = self.settings.policy.maintenance;
        window.is_none_or(|window| window.contains(unix_ms() as f64 / 1000.0))
    }

    /// A request to cancel the plan that was not carried out.
    fn cancel_request(&self) -> Option<u64> {
        self.node.control().cancel_request().filter(|request| *request != self.last_cancel)
    }

    /// Returns true if operators have changed what is allowed since the round began.
    fn is_outdated(&self) -> bool {
        let control = self.node.control();
        self.cancel_request().is_some()
            || control.settings() != self.settings
            || control.marks() != self.marks
    }

    /// Runs rounds until the term has ended, or nothing is left to do.
    pub(super) async fn until_ended(&mut self) {
        while self.round().await.is_ok() {
            let is_needed = self.node.control().is_needed() || !self.moves.is_idle();
            if !is_needed || self.node.is_draining.load(Ordering::Relaxed) {
                return;
            }
            self.wait().await;
        }
    }

    /// Waits for the next round, which begins at once if operators change what is allowed. A move that
    /// ends makes room for another one.
    async fn wait(&mut self) {
        let deadline = tokio::time::Instant::now() + self.settings.round;
        let node = self.node.clone();
        loop {
            let changed = node.control().changed();
            if self.is_outdated() {
                return;
            }
            tokio::select! {
                () = sleep_until(deadline) => return,
                () = changed => {}
                ended = self.moves.ended() => {
                    let at_s = self.clock.at_s();
                    self.moves.end(ended, at_s, &mut self.progress);
                    self.start_moves();
                }
            }
        }
    }

    fn start_moves(&mut self) {
        if self.is_outdated() {
            return;
        }
        let (max, fence) = (self.settings.moves, self.term.fence());
        self.moves.start(&self.node, &fence, max, &mut self.progress);
    }

    async fn round(&mut self) -> Result<(), Ended> {
        self.check_term().await?;
        self.update_settings();
        self.marks = self.node.control().marks();
        let (mut reports, mut silent) = (Vec::new(), Vec::new());
        // E-Store's phases: the keys of a node are counted while it is overloaded.
        let is_over = |name: &str| self.reports.is_above(name, self.settings.policy.high, Instant::now());
        let observation = |name: &str| Observation { keys: is_over(name), count: is_over(name) };
        for (node, report) in self.node.observe_load(observation).await {
            match report {
                Ok(report) => reports.push(report),
                Err(_) => silent.push(node),
            }
        }
        let now = Instant::now();
        self.reports.update(reports, &silent, self.settings.round, now);
        if let Some(request) = self.cancel_request() {
            self.cancel(request).await?;
        }
        if self.settings.mode != Mode::On {
            self.stand_down().await?;
        }
        self.advance_nodes().await?;
        let pictured = self.picture();
        self.settle(&pictured.picture).await?;
        self.moves.check(&pictured.picture, &self.marks.pinned, &mut self.progress);
        self.observe_time(&silent, now);
        // The policy must not decide before it is known which nodes can be removed.
        let is_known = self.nodes.provisioned.is_some() && !self.is_waiting;
        if self.settings.mode != Mode::Off && is_known {
            self.decide(pictured).await?;
        }
        self.start_moves();
        self.save_forecasts().await
    }

    /// Records that the clock was set, or that nothing is decided until `silent` nodes report again.
    fn observe_time(&mut self, silent: &[String], now: Instant) {
        if let Some(seconds) = self.clock.jumped() {
            let event = Event::new(Kind::ControllerClockJumped);
            self.record_event(event.detail("seconds", seconds.round() as i64));
        }
        self.is_waiting = self.reports.has_holes(silent, now);
        let is_due = self.wait_recorded_at.is_none_or(|at| now.duration_since(at) >= WAIT_EVENT_INTERVAL);
        if self.is_waiting && is_due {
            self.wait_recorded_at = Some(now);
            let event = Event::new(Kind::ControllerWaits);
            self.record_event(event.detail("nodes", texts::listed(silent)));
        }
    }

    pub(super) async fn check_term(&mut self) -> Result<(), Ended> {
        let node = (self.node.id(), &self.node.begun().read);
        match election::campaign(self.node.environment(), ROLE, node).await {
            Ok(Some(term)) if term.number() == self.term.number() => Ok(()),
            _ => Err(Ended),
        }
    }

    fn update_settings(&mut self) {
        let settings = self.node.control().settings();
        if settings == self.settings && self.brain.is_some() {
            return;
        }
        let kept = self.brain.take().map(|brain| brain.forecaster);
        let has_same_step = forecast::step_s(&settings) == forecast::step_s(&self.settings);
        let forecaster = kept
            .filter(|_| has_same_step)
            .unwrap_or_else(|| Forecaster::start(&settings, Stored::default(), self.clock.at_s()));
        self.node.control().set_forecasts(Some(forecaster.forecasts.clone()));
        self.brain = Brain::new(&settings, forecaster);
        if let Some(brain) = &mut self.brain {
            brain.adopt(self.plan.drained());
        }
        self.settings = settings;
    }

    fn picture(&mut self) -> Pictured {
        let at_s = self.clock.at_s();
        let seen = self.node.migrations().moved().into_iter().map(|(partition, unix_ms)| {
            let before = self.moves_seen.get(&partition).filter(|(seen, _)| *seen == unix_ms);
            (partition, (unix_ms, before.map_or((unix_ms as f64 / 1000.0).min(at_s), |(_, at_s)| *at_s)))
        });
        self.moves_seen = seen.collect();
        let mut moved_at_s: HashMap<PartitionId, f64> =
            self.moves_seen.iter().map(|(partition, (_, at_s))| (*partition, *at_s)).collect();
        moved_at_s.extend(self.moves.moved_at_s.iter().map(|(partition, at_s)| (*partition, *at_s)));
        let retry_s = RETRY_ROUNDS * self.round_s();
        let rest_s = self.settings.policy.planning.cool_down_s.max(retry_s);
        self.moves.forget_failures(at_s - rest_s);
        let mut arriving = self.moves.arriving();
        for (partition, journal, _) in self.node.migrations().running() {
            arriving.insert(partition, self.node.name_of(journal.destination));
        }
        let sources = Sources {
            resting: self.moves.resting(at_s, rest_s),
            resting_leaving: self.moves.resting(at_s, retry_s),
            arriving,
            reports: &self.reports,
            marks: &self.marks,
            plan: &self.plan,
            provisioned: self.nodes.provisioned.as_ref(),
            moved_at_s: &moved_at_s,
            replace_after: self.settings.replace_after,
            at_s,
        };
        picture::build(&self.node, &sources)
    }

    fn round_s(&self) -> f64 {
        self.settings.round.as_secs_f64()
    }

    /// How long it takes until loads show the effect of a change, in seconds.
    fn settle_s(&self) -> f64 {
        let smoothing_s = reports::smoothing(self.settings.round).as_secs_f64();
        (SETTLE_ROUNDS * self.round_s()).max(SETTLE_SMOOTHINGS * smoothing_s)
    }

    /// Records what has come of decisions.
    async fn settle(&mut self, picture: &Picture) -> Result<(), Ended> {
        for (number, open) in self.progress.settled(self.clock.at_s(), self.settle_s()) {
            let record = self.pending.remove(&number).filter(|_| self.kept.contains(&number));
            let Some(mut record) = record else { continue };
            let mut outcome = match open.had_parts() {
                true => open.outcome(picture, unix_ms()),
                false => inherited(&record.decision, picture, unix_ms()),
            };
            add_latency(&mut outcome, &record.decision, picture);
            record.outcome = Some(outcome);
            let Ok(value) = encode(&record) else { continue };
            self.commit(Transaction::new().put(decision_key(number), value)).await?;
        }
        Ok(())
    }

    async fn decide(&mut self, pictured: Pictured) -> Result<(), Ended> {
        let Pictured { picture, by_name } = pictured;
        if let Err(error) = picture.validate() {
            tracing::debug!(%error, "nothing is decided on an invalid picture of the cluster");
            return Ok(());
        }
        let Some(mut brain) = self.brain.take() else { return Ok(()) };
        brain.set_move_cost(self.reports.move_cost());
        let (is_paused, unix_s) = (self.is_paused(), unix_ms() as f64 / 1000.0);
        let decided = tokio::task::spawn_blocking(move || {
            let decisions = brain.decide(&Arc::new(picture), unix_s, is_paused);
            (brain, decisions)
        });
        let Ok((mut brain, decisions)) = decided.await else { return Err(Ended) };
        brain.decided(self.clock.at_s());
        self.brain = Some(brain);
        if self.is_outdated() {
            // Decisions may take a minute. The policy takes them for carried out.
            if !decisions.is_empty() {
                self.forget_decisions();
            }
            return Ok(());
        }
        // Loads and latencies are smoothed: they show the effect of earlier moves after a while, and
        // until then what the moves cost.
        let (at_s, settle_s) = (self.clock.at_s(), self.settle_s());
        let home = |partition| owner_name(&self.node, partition);
        let mut changing = self.moves.changing(at_s, settle_s, home);
        for (_, journal, _) in self.node.migrations().running() {
            changing.extend([journal.source, journal.destination].map(|node| self.node.name_of(node)));
        }
        for decision in decisions {
            let home = |tenant: &str| owner_name(&self.node, *by_name.get(tenant)?);
            if let Some(decision) = balance::apart_from(&changing, decision, home) {
                self.act(decision, &by_name).await?;
            }
        }
        Ok(())
    }

    /// Writes a record of the forecasts, if there is a new one.
    async fn save_forecasts(&mut self) -> Result<(), Ended> {
        let unsaved = self.brain.as_ref().and_then(|brain| brain.forecaster.forecasts.take_unsaved());
        let Some((key, value)) = unsaved else { return Ok(()) };
        let change = match value {
            Some(value) => Transaction::new().put(key, value),
            None => Transaction::new().delete(key),
        };
        self.commit(change).await.map(drop)
    }

    /// Records a decision, and begins to carry it out.
    async fn act(&mut self, decision: Decision, by_name: &HashMap<String, PartitionId>) -> Result<(), Ended> {
        if self.settings.mode == Mode::Advise {
            return self.advise(&decision, "the mode is advise").await;
        }
        match &decision.action {
            Action::AddNodes { .. } if self.node.provisioner.is_none() => {
                self.advise(&decision, "the controller's node has no --provisioner").await
            }
            Action::AddNodes { .. } if self.nodes.adding.is_active() => {
                self.postpone(&decision, "no node is added for a while: the last one could not be").await
            }
            Action::Drain { .. } if self.nodes.removing.is_active() => {
                self.postpone(&decision, "no node is removed for a while: the last one could not be").await
            }
            Action::AddNodes { count } => self.add_nodes(*count, &decision).await,
            Action::Drain { nodes } => {
                let (mut next, number) = (self.plan.clone(), self.next_decision);
                next.removing.extend(
                    nodes.iter().filter(|name| !self.plan.names(name)).map(|name| Removing {
                        name: name.clone(),
                        decision: number,
                        phase: Phase::Draining,
                    }),
                );
                let parts = nodes.iter().cloned().map(Part::Node).collect();
                self.record(&decision, None, None, parts, Some(next)).await.map(drop)
            }
            Action::KeepNodes { nodes } => self.keep_nodes(nodes, &decision).await,
            Action::Move { moves, .. } => {
                let whole = moves.iter().filter(|one| one.kind == ItemKind::Partition);
                let found = whole.filter_map(|one| Some((*by_name.get(&one.partition)?, one.to.clone())));
                let found: Vec<(PartitionId, String)> = found.collect();
                self.queue(&decision, found).await
            }
            Action::Tenant { tenant, to: Some(to), .. } => {
                let found = by_name.get(tenant).map(|partition| (*partition, to.clone()));
                self.queue(&decision, found.into_iter().collect()).await
            }
            Action::Tenant { to: None, .. } => {
                let is_hot_key = |reason: &Reason| matches!(reason, Reason::HotKeys { .. });
                let why = match decision.reasons.iter().any(is_hot_key) {
                    true => "single keys cannot be moved",
                    false => "no node can take the tenant",
                };
                self.advise(&decision, why).await
            }
        }
    }

    /// The policy forgets what it has decided and is not in the plan.
    fn forget_decisions(&mut self) {
        if let Some(brain) = &mut self.brain {
            brain.forget_decisions(self.plan.drained());
        }
    }

    /// Records a decision that is not carried out for now. The policy decides it again.
    async fn postpone(&mut self, decision: &Decision, why: &str) -> Result<(), Ended> {
        self.forget_decisions();
        self.advise(decision, why).await
    }

    async fn add_nodes(&mut self, count: usize, decision: &Decision) -> Result<(), Ended> {
        let ((names, last_number), number) = (self.new_names(count), self.next_decision);
        let what = format!("add {}", texts::listed(&names));
        let mut next = self.plan.clone();
        next.last_number = last_number;
        let adding = |name: &String| Adding { name: name.clone(), decision: number };
        next.adding.extend(names.iter().map(adding));
        // Nodes that this decision replaces are not replaced again. Nodes that were added for other
        // reasons make up for those that are missing.
        match decision.reasons.first() {
            Some(Reason::NodesLeave { nodes }) => next.replaced.extend(nodes.iter().cloned()),
            _ => next.replaced.extend(self.unreplaced().take(count)),
        }
        let parts = names.into_iter().map(Part::Node).collect();
        self.record(decision, Some(what), None, parts, Some(next)).await.map(drop)
    }

    /// The nodes that have ended, are in no plan, and were not replaced; those first that have ended
    /// first.
    fn unreplaced(&self) -> impl Iterator<Item = String> {
        let owners = self.node.owners();
        let mut ended: Vec<_> = owners
            .nodes()
            .into_iter()
            .filter(|known| known.alive().is_none())
            .filter_map(|known| Some((owners.observed_ended(known.id, known.state?.0), known.name)))
            .collect();
        ended.sort_unstable();
        let names = ended.into_iter().map(|(_, name)| name);
        names.filter(|name| !self.plan.names(name) && !self.plan.replaced.contains(name))
    }

    /// Keeps nodes that are being drained.
    async fn keep_nodes(&mut self, nodes: &[String], decision: &Decision) -> Result<(), Ended> {
        let mut next = self.plan.clone();
        for name in nodes {
            let drained = next.removing.iter().find(|removing| removing.name == *name);
            if let Some(removing) = drained.filter(|removing| removing.phase == Phase::Draining) {
                let part = Part::Node(name.clone());
                self.progress.give_up(removing.decision, &part, "the node is needed again");
                next.removing.retain(|removing| removing.name != *name);
            }
        }
        let parts: Vec<Part> = nodes.iter().cloned().map(Part::Node).collect();
        let number = self.record(decision, None, None, parts.clone(), Some(next)).await?;
        parts.iter().for_each(|part| self.progress.end(number, part, Ok(())));
        Ok(())
    }

    async fn queue(&mut self, decision: &Decision, found: Vec<(PartitionId, String)>) -> Result<(), Ended> {
        if found.is_empty() {
            return Ok(());
        }
        let parts = found.iter().map(|(partition, _)| Part::Move(*partition)).collect();
        let number = self.record(decision, None, None, parts, None).await?;
        let queued = |(partition, to)| Queued { partition, to, decision: number };
        self.moves.push(found.into_iter().map(queued), &mut self.progress);
        Ok(())
    }

    /// Records a decision that is not carried out, unless it was recorded lately.
    async fn advise(&mut self, decision: &Decision, why: &str) -> Result<(), Ended> {
        let (kind, what) = (texts::kind(&decision.action), texts::what(&decision.action));
        let (pause_s, cool_down_s) =
            (ROUNDS_PER_ADVICE * self.round_s(), self.settings.policy.planning.cool_down_s);
        let pauses = (pause_s, cool_down_s.max(pause_s));
        if !self.advice.is_new(kind, &what, self.clock.at_s(), pauses) {
            return Ok(());
        }
        let outcome = not_done(OutcomeResult::Advised, why, unix_ms());
        self.record(decision, None, Some(outcome), Vec::new(), None).await.map(drop)
    }

    /// Records a decision, and the plan that follows from it. Returns its number.
    async fn record(
        &mut self,
        decision: &Decision,
        what: Option<String>,
        outcome: Option<OutcomeRecord>,
        parts: Vec<Part>,
        plan: Option<PlanRecord>,
    ) -> Result<u64, Ended> {
        let number = self.next_decision;
        let mode = self.settings.mode.name();
        let mut record = DecisionRecord::new(number, unix_ms(), self.node.name(), mode);
        texts::kind(&decision.action).clone_into(&mut record.action);
        record.what = what.unwrap_or_else(|| texts::what(&decision.action));
        record.why = decision.reasons.iter().map(texts::why).collect();
        record.predicted = texts::predicted(&decision.predicted);
        record.decision = shortened(decision);
        record.outcome = outcome;
        let key = decision_key(number);
        let value = encode(&record).map_err(|_| Ended)?;
        let mut change = Transaction::new().absent(key.as_str()).put(key, value);
        let surplus = (self.kept.len() + 1).saturating_sub(MAX_DECISIONS).min(MAX_DELETED);
        let old: Vec<u64> = self.kept.iter().take(surplus).copied().collect();
        for old in &old {
            change = change.delete(decision_key(*old));
        }
        match plan {
            Some(plan) => self.change_plan(change, plan).await?,
            None => {
                self.commit(change).await?;
            }
        }
        tracing::info!(number, what = record.what, "decided");
        self.next_decision += 1;
        self.kept.drain(..old.len());
        self.kept.push_back(number);
        if record.outcome.is_none() {
            self.pending.insert(number, record);
            self.progress.begin(number, parts);
        }
        Ok(number)
    }

    /// Gives up the plan in progress: nodes that are added are removed, those that are drained are
    /// kept, and moves that copy are cancelled.
    async fn cancel(&mut self, request: u64) -> Result<(), Ended> {
        let mut next = self.plan.clone();
        for adding in self.plan.adding.clone() {
            self.progress.give_up(adding.decision, &Part::Node(adding.name.clone()), CANCELLED);
            self.undo(&adding, CANCELLED, &mut next);
        }
        self.give_up_drains(&mut next, CANCELLED);
        self.give_up_moves(CANCELLED);
        // The moves themselves report what came of them.
        self.moves.cancel();
        self.pause_after_cancel(0.0);
        next.cancelled_unix_ms = unix_ms();
        self.last_cancel = request;
        self.change_plan(Transaction::new().delete(CANCEL_KEY), next).await
    }

    /// Begins nothing new: the mode is not `on` any more.
    async fn stand_down(&mut self) -> Result<(), Ended> {
        let why = format!("the mode is {}", self.settings.mode.name());
        let mut next = self.plan.clone();
        self.give_up_drains(&mut next, &why);
        self.give_up_moves(&why);
        if next != self.plan {
            self.write_plan(next).await?;
        }
        Ok(())
    }

    pub(super) fn give_up_drains(&mut self, next: &mut PlanRecord, why: &str) {
        let is_drain = |removing: &&Removing| removing.phase == Phase::Draining;
        for removing in next.removing.iter().filter(is_drain) {
            self.progress.give_up(removing.decision, &Part::Node(removing.name.clone()), why);
        }
        next.removing.retain(|removing| removing.phase != Phase::Draining);
    }

    fn give_up_moves(&mut self, why: &str) {
        for queued in self.moves.clear() {
            self.progress.give_up(queued.decision, &Part::Move(queued.partition), why);
        }
    }

    /// Replaces the plan's record.
    pub(super) async fn write_plan(&mut self, next: PlanRecord) -> Result<(), Ended> {
        self.change_plan(Transaction::new(), next).await
    }

    /// Replaces the plan's record together with other changes.
    async fn change_plan(&mut self, change: Transaction, next: PlanRecord) -> Result<(), Ended> {
        let value = encode(&next).map_err(|_| Ended)?;
        let change = match self.plan_revision {
            Some(revision) => change.unchanged(PLAN_KEY, revision),
            None => change.absent(PLAN_KEY),
        };
        let revision = self.commit(change.put(PLAN_KEY, value)).await?;
        (self.plan, self.plan_revision) = (next, Some(revision));
        Ok(())
    }

    /// Applies a change in the name of this term.
    async fn commit(&mut self, change: Transaction) -> Result<Revision, Ended> {
        let change = self.term.compare(change);
        let outcome = self.node.metadata().transact(change).await;
        match outcome.or_else(|error| error.outcome().ok_or(error)) {
            Ok(Outcome::Committed(revision)) => Ok(revision),
            Ok(Outcome::Conflict(_)) | Err(_) => Err(Ended),
        }
    }

    pub(super) fn record_event(&self, event: Event) {
        self.partitions.record(event);
    }
}

/// The name of a partition's owner.
fn owner_name(node: &Node, partition: PartitionId) -> Option<String> {
    node.owners().owner(partition).map(|owner| node.name_of(owner.node))
}

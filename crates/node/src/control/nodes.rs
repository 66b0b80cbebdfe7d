//! Nodes that are added and removed: the plan in progress.
//!
//! ```text
//!   adding ── serves ──► (member)          a provisioner that fails or lies:
//!     └───── given up ──► undoing ──┐        adding -> undoing, and a pause
//!   draining ── empty ──► stopping ─┴─► removed by the provisioner, sealed, forgotten
//!     └── no progress ──► (member)     └── given up ──► (member)
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_cluster::{NodeId, NodeState, PartitionRecord, metadata};
use fulmar_elastic::provisioner::{Provisioner, ProvisionerError};
use fulmar_elastic::settings::Mode;
use fulmar_gateway::events::{Event, Kind};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::decisions::Part;
use super::records::{Adding, Phase, PlanRecord, Removing};
use super::run::{Ended, Run};
use crate::owners::KnownNode;

/// Attempts of a call of the provisioner.
pub(super) const MAX_ATTEMPTS: u32 = 3;
/// The longest pause between two attempts.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// The longest pause after a failure in which no node is added or removed.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// A drain without progress is given up after this time, or `start_timeout` if that is longer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(600);
/// Nodes are listed once in this number of rounds.
const ROUNDS_PER_LISTING: u32 = 4;

/// A call of the provisioner. Dropping it cancels the call.
struct Call<T>(JoinHandle<Result<T, String>>);

impl<T> Drop for Call<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<T: Send + 'static> Call<T> {
    fn start(
        limit: Duration,
        call: impl Future<Output = Result<T, ProvisionerError>> + Send + 'static,
    ) -> Call<T> {
        Call(tokio::spawn(async move {
            match timeout(limit, call).await {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(_) => Err(format!("no answer within {limit:?}")),
            }
        }))
    }

    /// The result, if the call has ended.
    async fn result(&mut self) -> Option<Result<T, String>> {
        if !self.0.is_finished() {
            return None;
        }
        let ended = (&mut self.0).await;
        Some(ended.unwrap_or_else(|_| Err("internal error: it has panicked".to_owned())))
    }
}

/// What is done for one node.
struct Work {
    since: Instant,
    attempts: u32,
    retry_at: Instant,
    call: Option<Call<()>>,
    /// When a call succeeded.
    called_at: Option<Instant>,
    drain: Drain,
}

impl Work {
    fn new(now: Instant) -> Work {
        Work {
            since: now,
            attempts: 0,
            retry_at: now,
            call: None,
            called_at: None,
            drain: Drain { databases: u64::MAX, copied_bytes: 0, progress_at: now },
        }
    }

    /// Counts a failed attempt.
    fn fail(&mut self, delay: Duration, now: Instant) {
        self.called_at = None;
        self.attempts += 1;
        let delay = delay * 2_u32.saturating_pow(self.attempts.min(16));
        self.retry_at = now + delay.min(MAX_RETRY_DELAY);
    }
}

/// How far the drain of a node has come.
struct Drain {
    /// The fewest databases that needed the node.
    databases: u64,
    /// The most bytes that were copied of the databases that are being moved away.
    copied_bytes: u64,
    progress_at: Instant,
}

impl Drain {
    /// Records the state of the drain, and returns for how long it has made no progress. Bytes that
    /// are copied again after a failed move are no progress.
    fn observe(&mut self, databases: u64, copied_bytes: u64, now: Instant) -> Duration {
        if databases < self.databases || copied_bytes > self.copied_bytes {
            let databases = databases.min(self.databases);
            *self = Drain { databases, copied_bytes, progress_at: now };
        }
        now.saturating_duration_since(self.progress_at)
    }
}

/// How far the calls for a node have come.
enum Driven {
    Busy,
    Done,
    Failed(String),
    GaveUp(String),
}

/// What the controller does with nodes.
#[derive(Default)]
pub(super) struct NodeWork {
    work: BTreeMap<String, Work>,
    /// The nodes that the provisioner has added; `None` before it was asked.
    pub provisioned: Option<BTreeSet<String>>,
    listing: Option<Call<Vec<String>>>,
    listed_at: Option<Instant>,
    has_listing_failed: bool,
    /// Since when listed nodes have not been alive.
    unknown_since: BTreeMap<String, Instant>,
    /// Nodes that were added, and when they began to serve.
    joined: BTreeMap<String, Instant>,
    /// No node is added for now.
    pub adding: Pause,
    /// No node is removed for now.
    pub removing: Pause,
}

/// A pause after failures.
#[derive(Default)]
pub(super) struct Pause {
    /// Failures in succession.
    failures: u32,
    began: Option<Instant>,
    until: Option<Instant>,
}

impl Pause {
    /// Returns true if it has not ended.
    pub fn is_active(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }

    /// Ends it after a success that has lasted since then, unless there was a failure meanwhile.
    fn end(&mut self, since: Instant) {
        if self.began.is_none_or(|began| began < since) {
            *self = Pause::default();
        }
    }

    /// Pauses, longer after each failure in succession.
    fn begin(&mut self, unit: Duration) {
        let pause = unit * 2_u32.pow(self.failures.min(10));
        self.failures += 1;
        self.began = Some(Instant::now());
        self.until = Some(Instant::now() + pause.min(MAX_PAUSE));
    }
}

impl NodeWork {
    fn work(&mut self, node: &str) -> &mut Work {
        self.work.entry(node.to_owned()).or_insert_with(|| Work::new(Instant::now()))
    }
}

impl Run {
    /// Advances all nodes that are added or removed by one step.
    pub(super) async fn advance_nodes(&mut self) -> Result<(), Ended> {
        self.list_nodes().await;
        self.observe_joined();
        let mut next = self.plan.clone();
        if self.settings.mode == Mode::On && !self.nodes.removing.is_active() {
            self.remove_unknown(&mut next);
        }
        if !self.may_remove() {
            self.give_up_drains(&mut next, "the maintenance window has ended");
        }
        let owners = self.node.owners();
        next.replaced.retain(|name| owners.find_node(name).is_some_and(|known| known.alive().is_none()));
        for adding in self.plan.adding.clone() {
            self.advance_adding(&adding, &mut next).await;
        }
        for removing in self.plan.removing.clone() {
            self.advance_removing(&removing, &mut next).await;
        }
        if next != self.plan {
            self.write_plan(next).await?;
        }
        let plan = &self.plan;
        self.nodes.work.retain(|name, _| plan.names(name));
        Ok(())
    }

    /// Finds out which nodes the provisioner has added.
    async fn list_nodes(&mut self) {
        let Some(provisioner) = self.node.provisioner.clone() else {
            self.nodes.provisioned.get_or_insert_default();
            return;
        };
        if let Some(listing) = &mut self.nodes.listing {
            let Some(result) = listing.result().await else { return };
            self.nodes.listing = None;
            self.nodes.listed_at = Some(Instant::now());
            match result {
                Ok(names) => {
                    self.nodes.provisioned = Some(names.into_iter().collect());
                    self.nodes.has_listing_failed = false;
                }
                Err(error) => {
                    self.nodes.provisioned.get_or_insert_default();
                    if !std::mem::replace(&mut self.nodes.has_listing_failed, true) {
                        self.record_failure("list", "", &error);
                    }
                }
            }
        }
        let pause = self.settings.round * ROUNDS_PER_LISTING;
        if self.nodes.listed_at.is_none_or(|at| at.elapsed() >= pause) {
            let limit = self.settings.provisioner_timeout;
            self.nodes.listing = Some(Call::start(limit, async move { provisioner.list().await }));
        }
    }

    /// Ends the pause after failures when a node that was added has served for `start_timeout`. One that
    /// ends before that is a failure: the next one probably ends as well.
    fn observe_joined(&mut self) {
        let enough = self.settings.start_timeout;
        let mut has_failed = false;
        for (name, since) in std::mem::take(&mut self.nodes.joined) {
            let known = self.node.owners().find_node(&name);
            let is_alive = known.is_some_and(|known| known.alive().is_some());
            match is_alive {
                true if since.elapsed() > enough => self.nodes.adding.end(since),
                true => drop(self.nodes.joined.insert(name, since)),
                false if self.plan.names(&name) => {}
                false => {
                    let text =
                        format!("it has ended {} s after it began to serve", since.elapsed().as_secs());
                    self.record_failure("add", &name, &text);
                    has_failed = true;
                }
            }
        }
        if has_failed {
            self.nodes.adding.begin(enough);
        }
    }

    /// Removes what is left of nodes that were added, do not live, and are in no plan. A node that
    /// databases need is not removed: they wait for it, because they or some of their pages are nowhere
    /// else, or are being failed over.
    fn remove_unknown(&mut self, next: &mut PlanRecord) {
        let listed = self.nodes.provisioned.clone().unwrap_or_default();
        let owners = self.node.owners();
        let is_gone = |known: KnownNode| known.alive().is_none() && owners.needing(known.id) == 0;
        let is_unknown = |name: &String| !self.plan.names(name) && owners.find_node(name).is_none_or(is_gone);
        let unknown: BTreeSet<String> = listed.into_iter().filter(is_unknown).collect();
        let since = &mut self.nodes.unknown_since;
        since.retain(|name, _| unknown.contains(name));
        let patience = self.settings.start_timeout.max(self.settings.replace_after);
        for name in unknown {
            if since.entry(name.clone()).or_insert_with(Instant::now).elapsed() > patience {
                since.remove(&name);
                next.removing.push(Removing { name, decision: 0, phase: Phase::Undoing });
            }
        }
    }

    async fn advance_adding(&mut self, adding: &Adding, next: &mut PlanRecord) {
        let Adding { name, decision } = adding;
        let part = Part::Node(name.clone());
        let known = self.node.owners().find_node(name);
        if known.is_some_and(|known| known.alive().is_some() && self.node.is_serving(known.id)) {
            next.adding.retain(|adding| adding.name != *name);
            self.nodes.joined.insert(name.clone(), Instant::now());
            self.nodes.provisioned.get_or_insert_default().insert(name.clone());
            self.record_node(Kind::NodeAdded, name);
            self.progress.end(*decision, &part, Ok(()));
            return;
        }
        let driven = self.drive(name, "add").await;
        let is_late = self.nodes.work(name).since.elapsed() > self.settings.start_timeout;
        let why = match driven {
            Driven::Failed(error) => {
                self.record_failure("add", name, &error);
                return;
            }
            Driven::GaveUp(error) => error,
            Driven::Done if is_late => {
                let text =
                    format!("it was added, and does not serve after {:?}", self.settings.start_timeout);
                self.record_failure("add", name, &text);
                text
            }
            Driven::Done | Driven::Busy => return,
        };
        self.undo(adding, &why, next);
        self.progress.end(*decision, &part, Err(format!("{name}: {why}")));
        self.nodes.adding.begin(self.settings.start_timeout);
    }

    /// Removes a node that is being added.
    pub(super) fn undo(&mut self, adding: &Adding, why: &str, next: &mut PlanRecord) {
        let Adding { name, decision } = adding.clone();
        tracing::info!(node = name, reason = why, "the node that is being added is removed again");
        next.adding.retain(|adding| adding.name != name);
        self.nodes.work.remove(&name);
        next.removing.push(Removing { name, decision, phase: Phase::Undoing });
    }

    async fn advance_removing(&mut self, removing: &Removing, next: &mut PlanRecord) {
        let known = self.node.owners().find_node(&removing.name);
        match removing.phase {
            Phase::Draining => self.advance_drain(removing, known, next),
            Phase::Stopping | Phase::Undoing => self.stop_node(removing, known, next).await,
        }
    }

    /// Waits until no database needs a node. Moves are decided by the policy, because the picture shows
    /// the node as draining.
    fn advance_drain(&mut self, removing: &Removing, known: Option<KnownNode>, next: &mut PlanRecord) {
        let name = &removing.name;
        let Some(known) = known else {
            set_phase(next, name, Phase::Stopping);
            return;
        };
        let databases = self.node.owners().needing(known.id);
        let running = self.node.migrations().running();
        let arriving = self.moves.involves(name)
            || running.iter().any(|(_, journal, _)| journal.destination == known.id);
        if databases == 0 && !arriving {
            set_phase(next, name, Phase::Stopping);
            return;
        }
        let leaving = running.iter().filter(|(_, journal, _)| journal.source == known.id);
        let copied = leaving.filter_map(|(_, _, progress)| Some(progress.as_ref()?.bytes())).sum();
        let stalled = self.nodes.work(name).drain.observe(databases, copied, Instant::now());
        if stalled > DRAIN_TIMEOUT.max(self.settings.start_timeout) {
            let why = format!("node {name} was kept: {databases} of its databases could not be moved");
            self.keep(removing, next, Err(why));
        }
    }

    async fn stop_node(&mut self, removing: &Removing, known: Option<KnownNode>, next: &mut PlanRecord) {
        let Removing { name, decision, phase } = removing;
        self.nodes.joined.remove(name);
        let is_called = self.nodes.work(name).call.is_some() || self.nodes.work(name).called_at.is_some();
        let databases = match &known {
            Some(known) if !is_called => self.needing(known.id).await,
            _ => 0,
        };
        let is_alive = known.as_ref().is_some_and(|known| known.alive().is_some());
        if databases > 0 {
            match phase {
                Phase::Undoing if !is_alive => {
                    let why = format!("{name} was kept: {databases} databases need it, and wait for it");
                    self.keep(removing, next, Err(why));
                }
                Phase::Undoing => {
                    // It has joined after all, and was given databases before it was avoided.
                    next.removing.retain(|removing| removing.name != *name);
                    self.record_node(Kind::NodeAdded, name);
                }
                Phase::Draining | Phase::Stopping => set_phase(next, name, Phase::Draining),
            }
            return;
        }
        // A process that was suspended may have lost its term. Nothing is begun outside of the window.
        let is_postponed = *phase == Phase::Stopping && !self.may_remove();
        if !is_called && (is_postponed || self.check_term().await.is_err()) {
            return;
        }
        match self.drive(name, "remove").await {
            Driven::Busy => {}
            Driven::Failed(error) => self.record_failure("remove", name, &error),
            Driven::GaveUp(error) => {
                // If it ends late, that was on purpose.
                next.replaced.push(name.clone());
                self.keep(removing, next, Err(format!("{name}: {error}")));
            }
            Driven::Done => {
                let called_at = self.nodes.work(name).called_at.unwrap_or_else(Instant::now);
                let is_late = called_at.elapsed() > self.settings.start_timeout;
                let result = match known.and_then(|known| known.state) {
                    Some((_, NodeState::Alive)) if is_late => {
                        let error = "it was removed, and still runs";
                        self.record_failure("remove", name, error);
                        let delay = self.settings.round;
                        self.nodes.work(name).fail(delay, Instant::now());
                        return;
                    }
                    Some((_, NodeState::Alive)) => return,
                    _ => match self.forget(name).await {
                        Err(error) if is_late => {
                            // It was removed on purpose.
                            next.replaced.push(name.clone());
                            Err(format!("{name} was stopped, but not forgotten: {error}"))
                        }
                        Err(_) => return,
                        Ok(()) => Ok(()),
                    },
                };
                next.removing.retain(|removing| removing.name != *name);
                if let Some(provisioned) = &mut self.nodes.provisioned {
                    provisioned.remove(name);
                }
                self.nodes.removing = Pause::default();
                self.record_node(Kind::NodeRemoved, name);
                self.progress.end(*decision, &Part::Node(name.clone()), result);
            }
        }
    }

    /// The number of databases that need a node, read linearizably if none seems to.
    async fn needing(&mut self, node: NodeId) -> u64 {
        match self.node.owners().needing(node) {
            0 => {
                let all = metadata::partitions(self.node.environment()).await;
                let needs =
                    |record: &PartitionRecord| record.owner == node || record.page_server == Some(node);
                // An unreadable record may be of any owner.
                all.map_or(1, |all| all.iter().filter(|(_, read)| needs(&read.record)).count() as u64)
            }
            databases => databases,
        }
    }

    /// Forgets a member, if it is one.
    async fn forget(&mut self, name: &str) -> Result<(), String> {
        if self.node.owners().find_node(name).is_none() {
            return Ok(());
        }
        let fence = self.term.fence();
        self.node.forget(name, Some(&fence)).await.map_err(|error| error.to_string())
    }

    /// Ends the removal of a node, which stays.
    fn keep(&mut self, removing: &Removing, next: &mut PlanRecord, result: Result<(), String>) {
        next.removing.retain(|other| other.name != removing.name);
        self.progress.end(removing.decision, &Part::Node(removing.name.clone()), result);
        self.nodes.removing.begin(self.settings.start_timeout);
    }

    /// Calls the provisioner for a node, again after failures, until it has succeeded once.
    async fn drive(&mut self, name: &str, action: &'static str) -> Driven {
        let (now, delay) = (Instant::now(), self.settings.round);
        let limit = self.settings.provisioner_timeout;
        let provisioner: Option<Arc<dyn Provisioner>> = self.node.provisioner.clone();
        let work = self.nodes.work(name);
        if let Some(call) = &mut work.call {
            let Some(result) = call.result().await else { return Driven::Busy };
            work.call = None;
            return match result {
                Ok(()) => {
                    work.called_at = Some(now);
                    Driven::Done
                }
                Err(error) => {
                    work.fail(delay, now);
                    Driven::Failed(error)
                }
            };
        }
        if work.called_at.is_some() {
            return Driven::Done;
        }
        let Some(provisioner) = provisioner else {
            return Driven::GaveUp("the controller's node has no --provisioner".to_owned());
        };
        if work.attempts >= MAX_ATTEMPTS {
            return Driven::GaveUp(format!("the provisioner has failed {MAX_ATTEMPTS} times to {action} it"));
        }
        if now >= work.retry_at {
            let name = name.to_owned();
            work.call = Some(Call::start(limit, async move {
                match action {
                    "add" => provisioner.add(&name).await,
                    _ => provisioner.remove(&name).await,
                }
            }));
        }
        Driven::Busy
    }

    /// Names for new nodes, and the highest number in them.
    pub(super) fn new_names(&self, count: usize) -> (Vec<String>, u64) {
        let provisioned = self.nodes.provisioned.clone().unwrap_or_default();
        let is_free = |name: &String| {
            !provisioned.contains(name)
                && !self.plan.names(name)
                && self.node.owners().find_node(name).is_none()
        };
        let base = &self.settings.base_name;
        let numbered = (self.plan.last_number + 1..).map(|number| (format!("{base}-{number}"), number));
        let new: Vec<(String, u64)> = numbered.filter(|(name, _)| is_free(name)).take(count).collect();
        let last_number = new.last().map_or(self.plan.last_number, |(_, number)| *number);
        (new.into_iter().map(|(name, _)| name).collect(), last_number)
    }

    fn record_failure(&self, action: &str, node: &str, error: &str) {
        let event = Event::new(Kind::ProvisionerFailed).detail("action", action);
        self.record_event(event.detail("node", node).detail("error", error));
    }

    fn record_node(&self, kind: Kind, node: &str) {
        self.record_event(Event::new(kind).detail("node", node));
    }
}

fn set_phase(plan: &mut PlanRecord, name: &str, phase: Phase) {
    for removing in plan.removing.iter_mut().filter(|removing| removing.name == name) {
        removing.phase = phase;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_each_attempt_and_are_limited() {
        let now = Instant::now();
        let mut work = Work::new(now);
        let delays: Vec<u64> = (0..8)
            .map(|_| {
                work.fail(Duration::from_secs(5), now);
                (work.retry_at - now).as_secs()
            })
            .collect();
        assert_eq!(delays, [10, 20, 40, 60, 60, 60, 60, 60]);
        let mut pause = Pause::default();
        assert!(!pause.is_active());
        for failures in 1..=20 {
            pause.begin(Duration::from_secs(300));
            let left = pause.until.unwrap() - Instant::now();
            assert!(pause.is_active() && left <= MAX_PAUSE && left.as_secs() >= 299, "{failures}: {left:?}");
        }
        pause.end(now);
        assert!(pause.is_active(), "the last failure was after that");
        pause.end(Instant::now() + Duration::from_secs(1));
        assert!(!pause.is_active());
    }

    #[test]
    fn repeated_copies_are_no_progress_of_a_drain() {
        let start = Instant::now();
        let mut drain = Work::new(start).drain;
        let mut observe = |seconds: u64, databases: u64, copied_bytes: u64| {
            drain.observe(databases, copied_bytes, start + Duration::from_secs(seconds)).as_secs()
        };
        assert_eq!(observe(1, 2, 0), 0);
        assert_eq!([observe(2, 2, 10), observe(3, 2, 20)], [0, 0]);
        // The move fails, and begins again.
        assert_eq!([observe(5, 2, 0), observe(6, 2, 20), observe(8, 3, 5)], [2, 3, 5]);
        assert_eq!([observe(9, 2, 21), observe(11, 1, 3), observe(12, 1, 4)], [0, 0, 0]);
        assert_eq!([observe(13, 2, 0), observe(14, 1, 4)], [1, 2]);
    }

    #[tokio::test]
    async fn call_that_hangs_is_ended() {
        let mut call = Call::<()>::start(Duration::from_millis(1), std::future::pending());
        let result = loop {
            match call.result().await {
                Some(result) => break result,
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!(result, Err("no answer within 1ms".to_owned()));
    }
}

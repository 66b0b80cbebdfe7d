//! What has come of decisions.
//!
//! A decision has parts: the nodes and the moves that it asks for. It has ended when all of them
//! have. Its effect is measured two rounds later, when loads have been reported again, and stored with
//! its outcome.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::metadata;
use fulmar_control::picture::{NodeState, Partition, Picture};
use fulmar_meta::Entry;
use fulmar_pages::PartitionId;
use hashbrown::HashMap;

use super::observed::read;
use super::records::{DECISION_PREFIX, DecisionRecord, OutcomeRecord, OutcomeResult, decision_of_key};
use super::texts::{counted, listed, percent};

/// The decisions that controllers have recorded.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// The numbers of all, in order: those of unreadable ones are not used again either.
    pub numbers: VecDeque<u64>,
    /// Those that can be read. One that cannot says nothing about the plan, so it stops no controller.
    pub readable: Vec<DecisionRecord>,
}

impl Recorded {
    /// Reads them. Repeats the request until the metadata store answers.
    pub async fn read(environment: &impl Environment) -> Recorded {
        Recorded::of(&metadata::entries(environment, DECISION_PREFIX).await)
    }

    /// Decodes them, in the order of their keys.
    fn of(entries: &[Entry]) -> Recorded {
        Recorded {
            numbers: entries.iter().filter_map(|entry| decision_of_key(&entry.key)).collect(),
            readable: entries.iter().filter_map(|entry| read(&entry.key, Some(&entry.value))).collect(),
        }
    }
}

/// A part of a decision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// A node that is added, removed or kept.
    Node(String),
    /// A partition that is moved.
    Move(PartitionId),
}

/// A decision that is being carried out, or whose effect is not measured yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Open {
    remaining: BTreeSet<Part>,
    parts: usize,
    failures: Vec<String>,
    /// Why the rest of it was given up.
    dropped: Option<String>,
    ended_at_s: Option<f64>,
}

/// The decisions that are being carried out.
#[derive(Debug, Default)]
pub(super) struct Progress {
    open: BTreeMap<u64, Open>,
}

impl Progress {
    /// Adds a decision with these parts.
    pub fn begin(&mut self, decision: u64, parts: impl IntoIterator<Item = Part>) {
        let remaining: BTreeSet<Part> = parts.into_iter().collect();
        let parts = remaining.len();
        self.open.insert(decision, Open { remaining, parts, ..Open::default() });
    }

    /// Records the end of a part.
    pub fn end(&mut self, decision: u64, part: &Part, result: Result<(), String>) {
        let Some(open) = self.open.get_mut(&decision) else { return };
        if open.remaining.remove(part)
            && let Err(error) = result
        {
            open.failures.push(error);
        }
    }

    /// Gives up a part.
    pub fn give_up(&mut self, decision: u64, part: &Part, why: &str) {
        let Some(open) = self.open.get_mut(&decision) else { return };
        if open.remaining.remove(part) {
            open.dropped = Some(why.to_owned());
        }
    }

    /// The number of parts of a decision that have not ended.
    #[cfg(test)]
    pub fn remaining(&self, decision: u64) -> usize {
        self.open.get(&decision).map_or(0, |open| open.remaining.len())
    }

    /// Removes and returns the decisions that ended at least `settle_s` ago.
    pub fn settled(&mut self, at_s: f64, settle_s: f64) -> Vec<(u64, Open)> {
        let mut settled = Vec::new();
        self.open.retain(|number, open| {
            if !open.remaining.is_empty() {
                return true;
            }
            let ended_at_s = *open.ended_at_s.get_or_insert(at_s);
            if at_s - ended_at_s < settle_s {
                return true;
            }
            settled.push((*number, open.clone()));
            false
        });
        settled
    }
}

impl Open {
    /// Returns true if it had parts that were carried out in this term.
    pub fn had_parts(&self) -> bool {
        self.parts > 0
    }

    /// What has come of it.
    pub fn outcome(&self, picture: &Picture, at_unix_ms: u64) -> OutcomeRecord {
        let measured = Measured::of(picture);
        let done = self.parts - self.failures.len().min(self.parts);
        let (result, begin) = match (&self.dropped, self.failures.is_empty()) {
            (Some(why), _) => (OutcomeResult::Dropped, format!("given up: {why}")),
            (None, true) => (OutcomeResult::Done, "done".to_owned()),
            (None, false) => {
                let begin = format!("{done} of {} done: {}", self.parts, listed(&self.failures));
                (OutcomeResult::Failed, begin)
            }
        };
        let text = format!(
            "{begin}; then highest {}, mean {}, {}",
            percent(measured.highest),
            percent(measured.mean),
            counted(measured.nodes, "node")
        );
        let Measured { highest, mean, nodes } = measured;
        OutcomeRecord {
            highest: Some(highest),
            mean: Some(mean),
            nodes: Some(nodes),
            ..OutcomeRecord::new(at_unix_ms, result, text)
        }
    }
}

/// Adds the latency of the tenant that a decision was made for, if it was made because of that.
/// `decision` is its record.
pub(super) fn add_latency(outcome: &mut OutcomeRecord, decision: &serde_json::Value, picture: &Picture) {
    let reasons = decision.get("reasons").and_then(serde_json::Value::as_array);
    let reason = |kind: &str| reasons?.iter().find(|reason| reason["reason"] == kind);
    let Some(before_ms) = reason("latency").and_then(|reason| reason["latency_ms"].as_f64()) else { return };
    // The tenant that was moved may be another one.
    let late = reason("cheaper-tenant").map_or(&decision["tenant"], |reason| &reason["late"]);
    let Some(late) = late.as_str() else { return };
    let shown = picture.partitions.iter().find(|partition| partition.name == late);
    outcome.latency_ms = shown.and_then(|partition| partition.latency_ms);
    let after = outcome.latency_ms.map_or_else(|| "unknown".to_owned(), |ms| format!("{ms:.1} ms"));
    let _ = write!(outcome.text, "; latency of {late} {before_ms:.1} ms -> {after}");
}

/// The outcome of a decision of an earlier controller of which the plan contains nothing. `decision` is
/// its record, which has the first moves of a large plan.
pub(super) fn inherited(decision: &serde_json::Value, picture: &Picture, at_unix_ms: u64) -> OutcomeRecord {
    let text = |value: &serde_json::Value, key: &str| value.get(key)?.as_str().map(str::to_owned);
    let one = text(decision, "tenant").zip(text(decision, "to"));
    let listed = decision.get("moves").and_then(serde_json::Value::as_array);
    let listed = listed.into_iter().flatten().filter_map(|one| text(one, "partition").zip(text(one, "to")));
    let planned: BTreeSet<(String, String)> = listed.chain(one).collect();
    let is_made = |of: &&Partition| planned.contains(&(of.name.clone(), of.owner.clone()));
    let made = picture.partitions.iter().filter(is_made).count();
    let text = match planned.len() {
        0 => "the controller has changed; what was completed is not known".to_owned(),
        all => format!("the controller has changed; moves that were made or have begun: {made} of {all}"),
    };
    OutcomeRecord::new(at_unix_ms, OutcomeResult::Dropped, text)
}

/// The outcome of a decision that is not carried out, or no longer.
pub(super) fn not_done(result: OutcomeResult, why: &str, at_unix_ms: u64) -> OutcomeRecord {
    let text = match result {
        OutcomeResult::Advised => format!("not carried out: {why}"),
        _ => format!("given up: {why}"),
    };
    OutcomeRecord::new(at_unix_ms, result, text)
}

/// The utilisation of the nodes that serve.
struct Measured {
    highest: f64,
    mean: f64,
    nodes: usize,
}

impl Measured {
    fn of(picture: &Picture) -> Measured {
        let mut load: HashMap<&str, f64> = HashMap::new();
        for partition in &picture.partitions {
            *load.entry(partition.owner.as_str()).or_default() += partition.load;
        }
        let serving = picture.nodes.iter().filter(|node| node.state == NodeState::Active);
        let (mut highest, mut sum, mut capacity, mut nodes) = (0.0_f64, 0.0, 0.0, 0);
        for node in serving {
            let used = load.get(node.name.as_str()).copied().unwrap_or(0.0);
            highest = highest.max(used / node.capacity);
            sum += used;
            capacity += node.capacity;
            nodes += 1;
        }
        let mean = if capacity > 0.0 { sum / capacity } else { 0.0 };
        Measured { highest, mean, nodes }
    }
}

/// Decisions that were recorded and are not carried out: they are not recorded again in every round.
#[derive(Debug, Default)]
pub(super) struct Advice {
    given: BTreeMap<&'static str, (String, f64)>,
}

impl Advice {
    /// Returns true if the advice is new: another one than the last of its kind, which was not given
    /// within `pause_s`, or the same one and not within `repeat_s`.
    pub fn is_new(
        &mut self,
        kind: &'static str,
        what: &str,
        at_s: f64,
        (pause_s, repeat_s): (f64, f64),
    ) -> bool {
        if let Some((last, given_s)) = self.given.get(kind) {
            let age_s = at_s - given_s;
            if age_s < pause_s || (last == what && age_s < repeat_s) {
                return false;
            }
        }
        self.given.insert(kind, (what.to_owned(), at_s));
        true
    }
}

#[cfg(test)]
mod tests {
    use fulmar_cluster::records::encode;
    use fulmar_control::picture::Node;
    use fulmar_control::policy::Reason;
    use fulmar_meta::Revision;

    use super::super::records::decision_key;
    use super::*;

    fn picture() -> Picture {
        let nodes = vec![Node::new("n1", 1.0), Node::new("n2", 1.0)];
        let partitions = vec![Partition::new("a", "n1", 0.5), Partition::new("b", "n2", 0.1)];
        Picture { at_s: 0.0, nodes, partitions }
    }

    #[test]
    fn unreadable_decision_is_skipped_and_its_number_is_not_used_again() {
        let record = DecisionRecord::new(7, 0, "n1", "on");
        let entry =
            |number, value: Vec<u8>| Entry { key: decision_key(number), value, modified: Revision(1) };
        let entries = [entry(7, encode(&record).unwrap()), entry(8, b"{".to_vec())];
        let recorded = Recorded::of(&entries);
        assert_eq!(recorded.numbers, [7, 8]);
        let readable: Vec<u64> = recorded.readable.iter().map(|record| record.number).collect();
        assert_eq!(readable, [7]);
    }

    #[test]
    fn outcome_is_measured_after_all_parts_have_ended() {
        let mut progress = Progress::default();
        let (node, moved) = (Part::Node("a1".to_owned()), Part::Move(PartitionId(3)));
        progress.begin(7, [node.clone(), moved.clone()]);
        progress.end(7, &node, Ok(()));
        assert!(progress.settled(10.0, 2.0).is_empty());
        progress.end(7, &moved, Err("the disk is full".to_owned()));
        progress.end(7, &moved, Ok(()));
        assert!(progress.settled(11.0, 2.0).is_empty(), "it has just ended");
        let settled = progress.settled(13.0, 2.0);
        let [(7, open)] = settled.as_slice() else { panic!("{settled:?}") };
        let outcome = open.outcome(&picture(), 1);
        assert_eq!(outcome.text, "1 of 2 done: the disk is full; then highest 50 %, mean 30 %, 2 nodes");
        assert_eq!((outcome.result, outcome.nodes), (OutcomeResult::Failed, Some(2)));
        assert!(progress.settled(100.0, 2.0).is_empty(), "an outcome is recorded once");
    }

    #[test]
    fn moves_of_an_earlier_controller_are_counted() {
        let moves =
            serde_json::json!({"moves": [{"partition": "a", "to": "n1"}, {"partition": "b", "to": "n1"}]});
        let text = |decision| inherited(&decision, &picture(), 1).text;
        let begin = "the controller has changed;";
        assert_eq!(text(moves), format!("{begin} moves that were made or have begun: 1 of 2"));
        let tenant = serde_json::json!({"tenant": "b", "to": "n2"});
        assert_eq!(text(tenant), format!("{begin} moves that were made or have begun: 1 of 1"));
        let nodes = serde_json::json!({"action": "add-nodes", "count": 1});
        assert_eq!(text(nodes), format!("{begin} what was completed is not known"));
    }

    #[test]
    fn decision_that_was_given_up_says_why() {
        let mut progress = Progress::default();
        let part = Part::Node("a1".to_owned());
        progress.begin(1, [part.clone()]);
        progress.give_up(1, &part, "cancelled by an administrator");
        let settled = progress.settled(1.0, 0.0);
        let outcome = settled[0].1.outcome(&picture(), 1);
        assert_eq!(outcome.result, OutcomeResult::Dropped);
        assert!(outcome.text.starts_with("given up: cancelled by an administrator;"), "{}", outcome.text);
    }

    #[test]
    fn outcome_has_the_latency_that_a_decision_was_made_for() {
        let mut picture = picture();
        picture.partitions[1].latency_ms = Some(12.0);
        let text = |picture: &Picture, decision| {
            let mut outcome = OutcomeRecord::new(1, OutcomeResult::Done, "done".to_owned());
            add_latency(&mut outcome, &decision, picture);
            (outcome.text, outcome.latency_ms)
        };
        let latency = Reason::Latency { latency_ms: 45.0, objective_ms: 20.0 };
        let cheaper = Reason::CheaperTenant { late: "b".to_owned(), load: 0.2, seconds: 1.0 };
        let decision = |tenant: &str, reasons: &[&Reason]| {
            let reasons: Vec<&Reason> = reasons.to_vec();
            serde_json::json!({"action": "tenant", "tenant": tenant, "reasons": reasons})
        };
        let expected = ("done; latency of b 45.0 ms -> 12.0 ms".to_owned(), Some(12.0));
        assert_eq!(text(&picture, decision("b", &[&latency])), expected);
        assert_eq!(text(&picture, decision("a", &[&latency, &cheaper])), expected, "the late tenant stays");
        let unused = ("done; latency of a 45.0 ms -> unknown".to_owned(), None);
        assert_eq!(text(&picture, decision("a", &[&latency])), unused, "no statements since");
        assert_eq!(text(&picture, decision("a", &[&cheaper])), ("done".to_owned(), None));
    }

    #[test]
    fn advice_is_repeated_after_a_while() {
        let mut advice = Advice::default();
        let mut is_new = |kind, what, at_s| advice.is_new(kind, what, at_s, (60.0, 600.0));
        assert!(is_new("move", "a", 0.0));
        assert!(is_new("drain", "n1", 0.0), "another kind");
        assert!(!is_new("move", "b", 59.0), "too soon");
        assert!(is_new("move", "b", 60.0));
        assert!(!is_new("move", "b", 659.0), "the same");
        assert!(is_new("move", "b", 660.0));
    }
}

//! The controller's records in the metadata store.
//!
//! | key | value | written by |
//! | --- | --- | --- |
//! | `control/settings` | [`SettingsRecord`] | operators |
//! | `control/pinned/PARTITION`, `control/forbidden/NODE` | [`Mark`] | operators |
//! | `control/cancel` | [`Mark`]: the plan is to be given up | operators; deleted by the controller |
//! | `control/plan` | [`PlanRecord`]: the nodes that are being added or removed | the controller |
//! | `control/decision/NUMBER` | [`DecisionRecord`], the newest [`MAX_DECISIONS`] | the controller |
//! | `control/forecast/...` | [`SeriesRecord`], see [`super::forecast`] | the controller |

use std::collections::BTreeMap;

use fulmar_cluster::records::{Record, encode};
use fulmar_control::forecast::stored::StoredSeries;
use fulmar_control::policy::Decision;
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

pub(super) const SETTINGS_KEY: &str = "control/settings";
pub(super) const PLAN_KEY: &str = "control/plan";
pub(super) const CANCEL_KEY: &str = "control/cancel";
const PINNED_PREFIX: &str = "control/pinned/";
const FORBIDDEN_PREFIX: &str = "control/forbidden/";
pub(super) const DECISION_PREFIX: &str = "control/decision/";
pub(super) const FORECAST_PREFIX: &str = "control/forecast/";

/// Number of moves that the record of a decision contains.
const MAX_RECORDED_MOVES: usize = 50;
/// Number of decisions that are kept.
pub(super) const MAX_DECISIONS: usize = 1000;

const VERSION: u32 = 1;

fn version() -> u32 {
    VERSION
}

/// The settings that operators have set, as text by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SettingsRecord {
    v: u32,
    pub values: BTreeMap<String, String>,
}

/// The value of a key that has no contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mark {
    v: u32,
}

/// The nodes that are being added or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PlanRecord {
    #[serde(default = "version")]
    v: u32,
    pub adding: Vec<Adding>,
    pub removing: Vec<Removing>,
    /// Nodes that have ended and are not replaced: others were added for them, or they were removed and
    /// could not be forgotten.
    pub replaced: Vec<String>,
    /// The highest number in the name of a node that was added. Names are not used again: a call of
    /// the provisioner that outlives its controller must not hit another node.
    #[serde(default)]
    pub last_number: u64,
    /// When an operator has cancelled a plan, in milliseconds since 1970.
    #[serde(default)]
    pub cancelled_unix_ms: u64,
}

/// A node that is being added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Adding {
    pub name: String,
    pub decision: u64,
}

/// A node that is being removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Removing {
    pub name: String,
    /// 0 if no decision was made: what is left of the node is removed.
    pub decision: u64,
    pub phase: Phase,
}

/// How far the removal of a node has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Phase {
    /// Its databases are moved away.
    Draining,
    /// It has none; the provisioner removes it, and then it is forgotten.
    Stopping,
    /// The same for a node that was added and does not serve.
    Undoing,
}

/// A decision, and what has come of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DecisionRecord {
    v: u32,
    pub number: u64,
    pub at_unix_ms: u64,
    pub controller: String,
    pub mode: String,
    pub action: String,
    pub what: String,
    pub why: Vec<String>,
    pub predicted: String,
    /// The decision as [`fulmar_control::policy::Decision`] is serialized, with fewer moves.
    pub decision: serde_json::Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<OutcomeRecord>,
}

/// What has come of a decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct OutcomeRecord {
    pub at_unix_ms: u64,
    pub result: OutcomeResult,
    /// What is shown.
    pub text: String,
    /// Highest utilisation of a node, measured afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub highest: Option<f64>,
    /// Of a decision for a late tenant: its smoothed latency in milliseconds, measured afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<f64>,
    /// Mean utilisation, measured afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean: Option<f64>,
    /// Number of nodes that serve, counted afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<usize>,
}

impl OutcomeRecord {
    /// An outcome for which nothing was measured.
    pub fn new(at_unix_ms: u64, result: OutcomeResult, text: String) -> OutcomeRecord {
        OutcomeRecord { at_unix_ms, result, text, highest: None, latency_ms: None, mean: None, nodes: None }
    }
}

/// How a decision ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum OutcomeResult {
    /// All of it was carried out.
    Done,
    /// Some of it was not.
    Failed,
    /// The rest of it was given up.
    Dropped,
    /// It was only recorded.
    Advised,
}

/// Series of loads, for the next controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SeriesRecord {
    v: u32,
    /// Length of a step of the cluster's series, in seconds.
    pub step_s: f64,
    pub series: Vec<StoredSeries>,
}

macro_rules! records {
    ($($record:ty),*) => {
        $(impl Record for $record {
            fn version(&self) -> u32 {
                self.v
            }
        })*
    };
}

records!(SettingsRecord, Mark, PlanRecord, DecisionRecord, SeriesRecord);

impl SettingsRecord {
    pub fn new(values: BTreeMap<String, String>) -> SettingsRecord {
        SettingsRecord { v: VERSION, values }
    }
}

impl SeriesRecord {
    pub fn new(step_s: f64, series: Vec<StoredSeries>) -> SeriesRecord {
        SeriesRecord { v: VERSION, step_s, series }
    }
}

impl Default for PlanRecord {
    fn default() -> PlanRecord {
        let (adding, removing, replaced) = (Vec::new(), Vec::new(), Vec::new());
        PlanRecord { v: VERSION, adding, removing, replaced, last_number: 0, cancelled_unix_ms: 0 }
    }
}

impl PlanRecord {
    /// Returns true if no node is being added or removed.
    pub fn is_empty(&self) -> bool {
        self.adding.is_empty() && self.removing.is_empty()
    }

    /// Returns true if a node with this name is being added or removed.
    pub fn names(&self, node: &str) -> bool {
        self.adding.iter().any(|adding| adding.name == node)
            || self.removing.iter().any(|removing| removing.name == node)
    }

    /// The nodes that the policy drains.
    pub fn drained(&self) -> Vec<String> {
        let drained = self.removing.iter().filter(|removing| removing.phase == Phase::Draining);
        drained.map(|removing| removing.name.clone()).collect()
    }

    /// Returns true if a node is being removed.
    pub fn is_removing(&self, node: &str) -> bool {
        self.removing.iter().any(|removing| removing.name == node)
    }
}

impl DecisionRecord {
    /// A record of the current version with these contents.
    pub fn new(number: u64, at_unix_ms: u64, controller: &str, mode: &str) -> DecisionRecord {
        DecisionRecord {
            v: VERSION,
            number,
            at_unix_ms,
            controller: controller.to_owned(),
            mode: mode.to_owned(),
            action: String::new(),
            what: String::new(),
            why: Vec::new(),
            predicted: String::new(),
            decision: serde_json::Value::Null,
            outcome: None,
        }
    }
}

/// The value of a mark.
pub(super) fn mark() -> Vec<u8> {
    encode(&Mark { v: VERSION }).unwrap_or_default()
}

/// The key of a pinned partition.
pub(crate) fn pin_key(partition: PartitionId) -> String {
    format!("{PINNED_PREFIX}{:016x}", partition.0)
}

/// The partition of a key made by [`pin_key`].
pub(super) fn pinned_of_key(key: &str) -> Option<PartitionId> {
    Some(PartitionId(u64::from_str_radix(key.strip_prefix(PINNED_PREFIX)?, 16).ok()?))
}

/// The key of a forbidden node.
pub(crate) fn forbidden_key(node: &str) -> String {
    format!("{FORBIDDEN_PREFIX}{node}")
}

/// The node of a key made by [`forbidden_key`].
pub(super) fn forbidden_of_key(key: &str) -> Option<&str> {
    key.strip_prefix(FORBIDDEN_PREFIX)
}

/// The key of a decision. Keys are in order of the numbers.
pub(super) fn decision_key(number: u64) -> String {
    format!("{DECISION_PREFIX}{number:016}")
}

/// The number of a key made by [`decision_key`].
pub(super) fn decision_of_key(key: &str) -> Option<u64> {
    key.strip_prefix(DECISION_PREFIX)?.parse().ok()
}

/// A decision as JSON, with its first moves.
pub(super) fn shortened(decision: &Decision) -> serde_json::Value {
    let mut value = serde_json::to_value(decision).unwrap_or_default();
    if let Some(moves) = value.get_mut("moves").and_then(serde_json::Value::as_array_mut) {
        moves.truncate(MAX_RECORDED_MOVES);
    }
    value
}

#[cfg(test)]
mod tests {
    use fulmar_control::plan::Move;
    use fulmar_control::planners::ItemKind;
    use fulmar_control::policy::{Action, Effect};

    use fulmar_cluster::records::decode;

    use super::*;

    #[test]
    fn keys_are_read_back() {
        assert_eq!(pinned_of_key(&pin_key(PartitionId(77))), Some(PartitionId(77)));
        assert_eq!(forbidden_of_key(&forbidden_key("n1")), Some("n1"));
        assert_eq!(decision_of_key(&decision_key(12)), Some(12));
        assert!(decision_key(9) < decision_key(10), "keys are in order of the numbers");
        assert_eq!((pinned_of_key("x"), forbidden_of_key("x"), decision_of_key("x")), (None, None, None));
    }

    #[test]
    fn plan_survives_a_round_trip() {
        let adding = vec![Adding { name: "a1".to_owned(), decision: 3 }];
        let removing = vec![Removing { name: "a2".to_owned(), decision: 0, phase: Phase::Undoing }];
        let plan = PlanRecord { adding, removing, replaced: vec!["n1".to_owned()], ..PlanRecord::default() };
        let read: PlanRecord = decode(PLAN_KEY, &encode(&plan).unwrap()).unwrap();
        assert_eq!(read, plan);
        assert!(read.names("a1") && read.is_removing("a2") && !read.is_removing("a1") && !read.names("n1"));
        assert_eq!(read.drained(), [""; 0]);
    }

    #[test]
    fn record_of_a_large_plan_is_short() {
        let one = Move {
            partition: "shop".to_owned(),
            kind: ItemKind::Partition,
            piece: None,
            from: "n1".to_owned(),
            to: "n2".to_owned(),
            load: 0.1,
            bytes: 1,
            seconds: 0.2,
        };
        let action = Action::Move { planner: "greedy", moves: vec![one; 100_000] };
        let decision = Decision { at_s: 0.0, action, reasons: Vec::new(), predicted: Effect::default() };
        let text = shortened(&decision).to_string();
        assert!(text.len() < 20_000, "{} bytes", text.len());
        assert!(text.contains("\"action\":\"move\""), "{text}");
    }
}

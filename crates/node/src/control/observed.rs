//! The controller's records in memory, at every node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fulmar_cluster::election::RoleRecord;
use fulmar_cluster::records::{Record, decode};
use fulmar_cluster::{Incarnation, NodeId};
use fulmar_elastic::settings::{ControlSettings, Mode};
use fulmar_gateway::cluster::{ControlInfo, DecisionInfo};
use fulmar_meta::{Change, Entry, MetaError, Observer};
use fulmar_pages::PartitionId;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::forecast::Forecasts;
use super::records::{
    CANCEL_KEY, DecisionRecord, PLAN_KEY, Phase, PlanRecord, SETTINGS_KEY, SettingsRecord, decision_of_key,
    forbidden_of_key, pinned_of_key,
};
use crate::Node;

/// The key of the controller's role.
const ROLE_KEY: &str = "role/controller";
/// How many names a row of `fulmar.control` lists.
const MAX_LISTED: usize = 100;

/// What an operator allows, as far as it is not a setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// Partitions that are not moved.
    pub pinned: BTreeSet<PartitionId>,
    /// Nodes to which nothing is moved.
    pub forbidden: BTreeSet<String>,
}

#[derive(Default)]
struct State {
    values: BTreeMap<String, String>,
    settings: ControlSettings,
    marks: Marks,
    /// An operator has cancelled the plan, and the controller has not deleted the mark yet.
    is_cancelled: bool,
    /// How often that was seen.
    cancels: u64,
    plan: PlanRecord,
    role: Option<RoleRecord>,
    decisions: BTreeMap<u64, DecisionRecord>,
}

/// The controller's records, kept up to date by the metadata store.
#[derive(Default)]
pub(crate) struct Control {
    state: RwLock<State>,
    changed: Notify,
    /// The forecasts of this node's term, while it is the controller.
    forecasts: RwLock<Option<Arc<Forecasts>>>,
}

impl Control {
    /// Completes at the next change. Changes are not missed after the call of this function.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Returns true if a controller has something to do.
    pub(super) fn is_needed(&self) -> bool {
        self.state.read().is_needed()
    }

    /// The settings.
    pub(super) fn settings(&self) -> ControlSettings {
        self.state.read().settings.clone()
    }

    /// What an operator allows.
    pub(super) fn marks(&self) -> Marks {
        self.state.read().marks.clone()
    }

    /// The number of the request of an operator to cancel the plan, if there is one.
    pub(super) fn cancel_request(&self) -> Option<u64> {
        let state = self.state.read();
        state.is_cancelled.then_some(state.cancels)
    }

    /// Returns true if nothing should be placed on a node: it is being removed, or forbidden.
    pub(crate) fn avoids(&self, node: &str) -> bool {
        let state = self.state.read();
        state.plan.is_removing(node) || state.marks.forbidden.contains(node)
    }

    /// Returns true if a node is being removed.
    pub(crate) fn is_removing(&self, node: &str) -> bool {
        self.state.read().plan.is_removing(node)
    }

    /// The node that was elected last, if a controller is needed.
    pub(super) fn controller(&self) -> Option<(NodeId, Incarnation)> {
        let state = self.state.read();
        state.role.as_ref().filter(|_| state.is_needed()).map(|role| (role.node, role.incarnation))
    }

    /// The forecasts of this node's term, if it is the controller.
    pub(super) fn forecasts(&self) -> Option<Arc<Forecasts>> {
        self.forecasts.read().clone()
    }

    /// Sets the forecasts of this node's term.
    pub(super) fn set_forecasts(&self, forecasts: Option<Arc<Forecasts>>) {
        *self.forecasts.write() = forecasts;
    }

    /// All decisions, newest first.
    pub(crate) fn decision_infos(&self) -> Vec<DecisionInfo> {
        self.state.read().decisions.values().rev().map(info).collect()
    }
}

fn info(record: &DecisionRecord) -> DecisionInfo {
    let record = record.clone();
    DecisionInfo {
        number: record.number,
        at_unix_ms: record.at_unix_ms,
        report: serde_json::to_string(&record).unwrap_or_default(),
        outcome: record.outcome.as_ref().map(|outcome| outcome.text.clone()),
        ended_unix_ms: record.outcome.map(|outcome| outcome.at_unix_ms),
        controller: record.controller,
        mode: record.mode,
        action: record.action,
        what: record.what,
        why: record.why.join("; "),
        predicted: record.predicted,
    }
}

impl State {
    fn is_needed(&self) -> bool {
        self.settings.mode != Mode::Off || !self.plan.is_empty()
    }

    /// Applies a change. Returns true if it concerns the controller.
    fn apply(&mut self, key: &str, value: Option<&[u8]>) -> bool {
        match key {
            SETTINGS_KEY => {
                self.values =
                    read::<SettingsRecord>(key, value).map(|record| record.values).unwrap_or_default();
                self.settings = ControlSettings::read(&self.values);
            }
            PLAN_KEY => self.plan = read(key, value).unwrap_or_default(),
            CANCEL_KEY => {
                self.is_cancelled = value.is_some();
                self.cancels += u64::from(self.is_cancelled);
            }
            ROLE_KEY => self.role = read(key, value),
            _ => {
                let is_set = value.is_some();
                if let Some(partition) = pinned_of_key(key) {
                    match is_set {
                        true => self.marks.pinned.insert(partition),
                        false => self.marks.pinned.remove(&partition),
                    };
                } else if let Some(node) = forbidden_of_key(key) {
                    match is_set {
                        true => self.marks.forbidden.insert(node.to_owned()),
                        false => self.marks.forbidden.remove(node),
                    };
                } else if let Some(number) = decision_of_key(key) {
                    match read(key, value) {
                        Some(record) => drop(self.decisions.insert(number, record)),
                        None => drop(self.decisions.remove(&number)),
                    }
                } else {
                    return false;
                }
            }
        }
        true
    }
}

/// A record; `None` if it was deleted, or cannot be read.
pub(super) fn read<T: Record>(key: &str, value: Option<&[u8]>) -> Option<T> {
    let decoded = decode(key, value?);
    decoded.map_err(|error| tracing::error!(%error, "ignored an unreadable record of the controller")).ok()
}

impl Observer for Control {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        let mut next = State { cancels: self.state.read().cancels, ..State::default() };
        for entry in &entries {
            next.apply(&entry.key, Some(&entry.value));
        }
        *self.state.write() = next;
        self.changed.notify_waiters();
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut state = self.state.write();
        let mut touched = false;
        for change in changes {
            touched |= state.apply(&change.key, change.value.as_deref());
        }
        drop(state);
        if touched {
            self.changed.notify_waiters();
        }
    }
}

impl Node {
    /// The settings and the state of the controller.
    pub(crate) fn control_infos(&self) -> Vec<ControlInfo> {
        let state = self.control().state.read();
        let mut infos: Vec<ControlInfo> = state
            .settings
            .shown()
            .into_iter()
            .map(|shown| ControlInfo {
                name: shown.name,
                value: shown.value,
                default: Some(shown.default),
                about: shown.about,
            })
            .collect();
        let pinned = state.marks.pinned.iter().map(|partition| {
            let tenant = self.catalog().tenant_of(*partition);
            tenant.map_or_else(|| format!("partition {partition}"), |tenant| tenant.name.clone())
        });
        let adding = state.plan.adding.iter().map(|adding| format!("adding {}", adding.name));
        let removing = state.plan.removing.iter().map(|removing| {
            let verb = match removing.phase {
                Phase::Draining => "draining",
                Phase::Stopping | Phase::Undoing => "removing",
            };
            format!("{verb} {}", removing.name)
        });
        let controller = state.role.as_ref().map_or_else(String::new, |role| self.name_of(role.node));
        infos.extend(
            [
                ("controller", controller, "The node that was elected last"),
                ("plan", listed(adding.chain(removing)), "Nodes that are being added or removed"),
                ("pinned", listed(pinned), "Tenants that are not moved"),
                (
                    "forbidden",
                    listed(state.marks.forbidden.iter().cloned()),
                    "Nodes to which nothing is moved",
                ),
            ]
            .map(|(name, value, about)| ControlInfo { name, value, default: None, about }),
        );
        infos
    }
}

fn listed(names: impl Iterator<Item = String>) -> String {
    names.take(MAX_LISTED).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use fulmar_cluster::records::encode;
    use fulmar_meta::Revision;

    use super::super::records::{Removing, forbidden_key, mark, pin_key};
    use super::*;

    fn put(control: &Control, key: String, value: Option<Vec<u8>>) {
        Observer::changed(control, &[Change { key, value, revision: Revision(1) }]);
    }

    #[test]
    fn records_are_followed() {
        let control = Control::default();
        assert!(!control.is_needed(), "the default mode is off");
        let values = BTreeMap::from([("mode".to_owned(), "advise".to_owned())]);
        put(&control, SETTINGS_KEY.to_owned(), Some(encode(&SettingsRecord::new(values)).unwrap()));
        assert!(control.is_needed() && control.settings().mode == Mode::Advise);
        put(&control, SETTINGS_KEY.to_owned(), None);
        assert!(!control.is_needed());

        put(&control, pin_key(PartitionId(7)), Some(mark()));
        put(&control, forbidden_key("n1"), Some(mark()));
        assert!(control.marks().pinned.contains(&PartitionId(7)) && control.avoids("n1"));
        put(&control, pin_key(PartitionId(7)), None);
        put(&control, forbidden_key("n1"), None);
        assert_eq!(control.marks(), Marks::default());

        let mut plan = PlanRecord::default();
        plan.removing.push(Removing { name: "n2".to_owned(), decision: 1, phase: Phase::Draining });
        put(&control, PLAN_KEY.to_owned(), Some(encode(&plan).unwrap()));
        assert!(control.avoids("n2") && control.is_needed(), "a plan is finished in mode off too");
    }
}

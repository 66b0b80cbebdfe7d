//! Changes by operators: settings, pinned partitions, forbidden nodes, and the end of a plan.

use fulmar_cluster::records::{decode, encode};
use fulmar_elastic::settings::{self, SettingError};
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::cluster::ControlChange;
use fulmar_meta::{MetaError, Outcome, Transaction};

use super::records::{CANCEL_KEY, SETTINGS_KEY, SettingsRecord, forbidden_key, mark, pin_key};
use crate::Node;
use crate::assignments::{metadata_unavailable, protocol_error};

/// The prefix of the settings' names in SQL.
const NAMESPACE: &str = "control.";
/// Attempts of a change that conflicts with others.
const MAX_ATTEMPTS: u32 = 16;
const UNDEFINED_OBJECT: &str = "42704";

impl Node {
    /// Changes what the controller may do.
    pub(crate) async fn change_control(&self, change: ControlChange) -> Result<()> {
        let marked = |key: String, is_set: bool| match is_set {
            true => Transaction::new().put(key, mark()),
            false => Transaction::new().delete(key),
        };
        match change {
            ControlChange::Set { name, value } => self.set_control(&name, value.as_deref()).await,
            ControlChange::Pin { partition, is_pinned } => {
                self.apply(marked(pin_key(partition), is_pinned)).await.map(drop)
            }
            ControlChange::Forbid { node, is_forbidden } => {
                if is_forbidden && self.owners().find_node(&node).is_none() {
                    let text = format!("node \"{}\" does not exist", node.escape_debug());
                    return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, text)
                        .hint("\"fulmar node list\" lists the nodes."));
                }
                self.apply(marked(forbidden_key(&node), is_forbidden)).await.map(drop)
            }
            ControlChange::CancelPlan if !self.control().is_needed() => {
                let text = "no plan is in progress: the mode of the controller is off";
                Err(Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, text)
                    .hint("\"fulmar move DATABASE --cancel\" cancels a move that an operator has started."))
            }
            ControlChange::CancelPlan => self.apply(marked(CANCEL_KEY.to_owned(), true)).await.map(drop),
        }
    }

    async fn set_control(&self, name: &str, value: Option<&str>) -> Result<()> {
        let short = name.strip_prefix(NAMESPACE).ok_or_else(|| {
            let text = format!("unrecognized configuration parameter \"{}\"", name.escape_debug());
            Error::new(UNDEFINED_OBJECT, text)
                .hint("ALTER SYSTEM changes the settings control.*: SELECT * FROM fulmar.control.")
        })?;
        for _ in 0..MAX_ATTEMPTS {
            let entry = self.metadata().get(SETTINGS_KEY).await.map_err(|_| metadata_unavailable())?;
            let record: Option<SettingsRecord> = entry
                .as_ref()
                .map(|entry| decode(SETTINGS_KEY, &entry.value))
                .transpose()
                .map_err(|error| protocol_error(&error))?;
            let mut values = record.map(|record| record.values).unwrap_or_default();
            match value {
                Some(value) => {
                    settings::check(short, value, &values).map_err(|error| refused(&error))?;
                    values.insert(short.to_owned(), value.to_owned());
                }
                None => {
                    settings::check_reset(short, &values).map_err(|error| refused(&error))?;
                    values.remove(short);
                }
            }
            let next = encode(&SettingsRecord::new(values)).map_err(|error| protocol_error(&error))?;
            let change = match entry {
                Some(entry) => Transaction::new().unchanged(SETTINGS_KEY, entry.modified),
                None => Transaction::new().absent(SETTINGS_KEY),
            };
            if self.apply(change.put(SETTINGS_KEY, next)).await? {
                return Ok(());
            }
        }
        Err(Error::new(sqlstate::OBJECT_IN_USE, "the settings are being changed concurrently").hint("Retry."))
    }

    /// Applies a change that can be repeated. Returns false if a compare did not hold.
    async fn apply(&self, change: Transaction) -> Result<bool> {
        for _ in 0..MAX_ATTEMPTS {
            match self.metadata().transact(change.clone()).await {
                Ok(outcome) => return Ok(matches!(outcome, Outcome::Committed(_))),
                Err(MetaError::OutcomeUnknown { .. }) if change.compares.is_empty() => {}
                Err(error) => match error.outcome() {
                    Some(outcome) => return Ok(matches!(outcome, Outcome::Committed(_))),
                    None if matches!(error, MetaError::OutcomeUnknown { .. }) => return Ok(false),
                    None => return Err(metadata_unavailable()),
                },
            }
        }
        Err(metadata_unavailable())
    }
}

fn refused(error: &SettingError) -> Error {
    let state = match error {
        SettingError::Unknown { .. } => UNDEFINED_OBJECT,
        SettingError::Invalid { .. } => sqlstate::INVALID_PARAMETER_VALUE,
    };
    Error::new(state, error.to_string()).hint(error.remedy())
}

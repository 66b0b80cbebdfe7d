//! An event, with the tenant that it affects and the user that caused it.

use std::borrow::Cow;
use std::net::IpAddr;

use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::details::Details;
use super::kinds::{Kind, Severity};

/// Details that name users, other tenants or addresses.
const NAMES: [&str; 6] = ["role", "roles", "owner", "template", "addresses", "pid"];
/// Maximum length of an actor's name, in characters. The name in a failed login is not checked
/// against the rules for user names.
const MAX_NAME_CHARS: usize = 63;

/// The user and the client address that caused an event, if known.
#[derive(Clone, Copy)]
pub(crate) struct Actor<'a> {
    pub(crate) user: Option<&'a str>,
    pub(crate) address: Option<IpAddr>,
}

/// An event.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Sequence number, continued across restarts. A gap means that events were lost.
    pub(crate) id: u64,
    pub(crate) time_unix_ms: u64,
    pub(crate) kind: Cow<'static, str>,
    pub(crate) severity: Severity,
    /// The name that the affected tenant had at the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) database: Option<String>,
    /// The partition of that tenant. Unlike its name, the id is never reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partition: Option<u64>,
    /// The user that caused the event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<IpAddr>,
    pub(crate) text: Cow<'static, str>,
    #[serde(default, skip_serializing_if = "Details::is_empty")]
    pub(crate) details: Details,
}

impl Event {
    /// Creates an event of a kind.
    pub fn new(kind: Kind) -> Event {
        Event {
            id: 0,
            time_unix_ms: 0,
            kind: kind.name().into(),
            severity: kind.severity(),
            database: None,
            partition: None,
            user: None,
            address: None,
            text: kind.text().into(),
            details: Details::default(),
        }
    }

    /// Adds a detail. The value must not contain text that a user has entered, except names.
    pub fn detail(mut self, name: &str, value: impl Into<Value>) -> Event {
        self.details.insert(name, value.into());
        self
    }

    pub(crate) fn database(self, tenant: &Tenant) -> Event {
        let partition = Some(tenant.partition.0);
        Event { partition, ..self.database_name(&tenant.name) }
    }

    /// Sets the name of a tenant that does not exist, or no longer exists.
    pub(crate) fn database_name(self, name: &str) -> Event {
        Event { database: Some(name.to_owned()), ..self }
    }

    pub(crate) fn by(self, actor: Actor<'_>) -> Event {
        let user = actor.user.map(|user| user.chars().take(MAX_NAME_CHARS).collect());
        Event { user, address: actor.address, ..self }
    }

    /// Returns true if the event affects this tenant.
    pub(crate) fn concerns(&self, partition: PartitionId) -> bool {
        self.partition == Some(partition.0)
    }

    /// The event as shown to the owner of its tenant: without names of others.
    pub(crate) fn for_owner(&self, owner: &str) -> Event {
        let mut event = self.clone();
        if event.user.as_deref() != Some(owner) {
            (event.user, event.address) = (None, None);
        }
        event.details.retain(|name, value| !NAMES.contains(&name) || value.as_str() == Some(owner));
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_owner_hides_names_of_other_users() {
        let actor = Actor { user: Some("boss"), address: Some(IpAddr::from([10, 0, 0, 1])) };
        let event = Event::new(Kind::RightGranted).by(actor).detail("role", "bert").detail("right", "SELECT");
        let shown = event.for_owner("anna");
        assert_eq!((&shown.user, shown.address), (&None, None));
        assert_eq!(Value::Object(shown.details.to_map()), serde_json::json!({"right": "SELECT"}));
        let own =
            Event::new(Kind::RightGranted).by(Actor { user: Some("anna"), ..actor }).detail("role", "anna");
        let shown = own.for_owner("anna");
        assert!(
            shown.user.is_some() && shown.address.is_some() && shown.details.to_map().contains_key("role")
        );
    }

    #[test]
    fn event_survives_serialization_and_long_names_are_truncated() {
        let long = "\u{e9}".repeat(5000);
        let event = Event::new(Kind::LoginFailed).by(Actor { user: Some(&long), address: None });
        let line = serde_json::to_string(&event).unwrap();
        assert!(line.len() < 400, "{line}");
        let read: Event = serde_json::from_str(&line).unwrap();
        assert_eq!((read.kind.as_ref(), read.severity), ("login.failed", Severity::Warning));
    }
}

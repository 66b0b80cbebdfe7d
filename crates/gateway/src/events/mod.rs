//! The journal: what the server did and why, and who administered it. `fulmar.events` shows it.
//!
//! ```text
//!   administration, logins, tokens  --record--+
//!   what anybody can cause, often   --gather--+--> Journal: the newest in memory --> "fulmar-events": files
//!   the node's health (each second) --record--+              |
//!                                                            +--> fulmar.events, for who may see them
//! ```
//!
//! Nobody waits for it: an event is put into memory under a lock that is held for moments, and a thread of its own
//! writes it into one of a few files that take turns ([`files`]), from which the next start reads it. So there is a
//! bound for memory and for the disk.
//!
//! **Nobody can push others' events out.** What superusers do is recorded as it is. What anybody can cause as often
//! as he likes, wrong passwords for example, is *gathered* ([`gathered`]): one event at once, then one for all of the
//! same kind in ten minutes.
//!
//! **No secrets.** An event has names, numbers and addresses; what a user has typed is never in it. Whom an event
//! names is told to superusers; a tenant's owner sees what happened to the tenant, not who else it concerns
//! ([`Event::for_owner`]).

mod details;
mod files;
mod gathered;
mod journal;
mod kinds;
mod watch;

use std::borrow::Cow;
use std::net::IpAddr;

use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use details::Details;
pub use journal::{Before, Journal};
pub use kinds::{Kind, Severity};
pub(crate) use watch::watch;

/// Details that name users, other tenants or addresses.
const NAMES: [&str; 6] = ["role", "roles", "owner", "template", "addresses", "pid"];
/// Characters of a name that did not have to keep the rule of names: that of a login that failed.
const NAME_CHARS: usize = 63;

/// Who does something, as far as it is known.
#[derive(Clone, Copy)]
pub(crate) struct Actor<'a> {
    pub(crate) user: Option<&'a str>,
    pub(crate) address: Option<IpAddr>,
}

/// Something that happened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Events are numbered, over restarts; a number that is missing was lost.
    pub(crate) id: u64,
    pub(crate) time_unix_ms: u64,
    pub(crate) kind: Cow<'static, str>,
    pub(crate) severity: Severity,
    /// The tenant that it concerns, by the name that it had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) database: Option<String>,
    /// The same for good: a name may be given to another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partition: Option<u64>,
    /// Who did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) address: Option<IpAddr>,
    pub(crate) text: Cow<'static, str>,
    #[serde(default, skip_serializing_if = "Details::is_empty")]
    pub(crate) details: Details,
}

impl Event {
    /// An event of which only the kind is known yet.
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

    /// With something else to know about it. No text that a user has typed, unless it is a name.
    pub fn detail(mut self, name: &str, value: impl Into<Value>) -> Event {
        self.details.insert(name, value.into());
        self
    }

    pub(crate) fn database(self, tenant: &Tenant) -> Event {
        let partition = Some(tenant.partition.0);
        Event { partition, ..self.database_name(&tenant.name) }
    }

    /// A tenant that there is not, or not any more.
    pub(crate) fn database_name(self, name: &str) -> Event {
        Event { database: Some(name.to_owned()), ..self }
    }

    pub(crate) fn by(self, actor: Actor<'_>) -> Event {
        let user = actor.user.map(|user| user.chars().take(NAME_CHARS).collect());
        Event { user, address: actor.address, ..self }
    }

    /// Whether it happened to this tenant.
    pub(crate) fn concerns(&self, partition: PartitionId) -> bool {
        self.partition == Some(partition.0)
    }

    /// As the owner of its tenant may see it: without the names of others.
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
    fn an_owner_sees_no_names_of_others() {
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
    fn what_is_written_is_short_and_read_back() {
        let long = "\u{e9}".repeat(5000);
        let event = Event::new(Kind::LoginFailed).by(Actor { user: Some(&long), address: None });
        let line = serde_json::to_string(&event).unwrap();
        assert!(line.len() < 400, "{line}");
        let read: Event = serde_json::from_str(&line).unwrap();
        assert_eq!((read.kind.as_ref(), read.severity), ("login.failed", Severity::Warning));
    }
}

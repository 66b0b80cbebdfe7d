//! Run-time parameters: what SET sets and SHOW shows.
//!
//! A table names those that are known, with their defaults and what they may be; what Fulmar does not do cannot be
//! asked for. Names with a point in them (`myapp.user`) belong to applications and are stored as they are. As in
//! Postgres, what a transaction sets is taken back if it rolls back, and SET LOCAL ends with it.
//!
//! A session keeps only what differs from the default. What a limit of the tenant bounds has the limit as its default.

use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, LiveLimits, Unit};

use super::limits::Bounds;
use crate::Result;
use crate::dialect::admin::parse_moment;

/// Parameters that an application may add.
const CUSTOM: usize = 100;
/// Bytes of a name. PostgreSQL cuts identifiers at 63 bytes, and such a name has two or more of them.
const NAME_BYTES: usize = 128;
/// Bytes of a value.
const VALUE_BYTES: usize = 4096;

/// What a parameter may be.
enum Rule {
    /// Any text.
    Any,
    /// One of these, without regard to case.
    OneOf(&'static [&'static str]),
    Boolean,
    /// A time; without a unit it is milliseconds. 0 switches it off.
    Duration,
    /// A time that may be 0.
    Time,
    /// A timestamp, or nothing.
    Moment,
    /// It can be shown only.
    Fixed,
}

struct Parameter {
    name: &'static str,
    default: &'static str,
    rule: Rule,
    /// Clients are told when it changes.
    reported: bool,
    about: &'static str,
}

const fn parameter(name: &'static str, default: &'static str, rule: Rule, about: &'static str) -> Parameter {
    Parameter { name, default, rule, reported: false, about }
}

const fn reported(name: &'static str, default: &'static str, rule: Rule, about: &'static str) -> Parameter {
    Parameter { name, default, rule, reported: true, about }
}

/// Shows the database as it was.
pub(crate) const AS_OF: &str = "fulmar.as_of";
/// Says as it was when.
pub(crate) const SNAPSHOT_TIME: &str = "fulmar.snapshot_time";
/// ... and how long ago that is.
pub(crate) const SNAPSHOT_AGE: &str = "fulmar.snapshot_age";
/// How old what is seen may be, where another node owns the database.
const STALENESS: &str = "fulmar.staleness";
/// What begins so is Fulmar's own: a misspelt one is no application's.
const OWN_PREFIX: &str = "fulmar.";

const ISOLATION: Rule =
    Rule::OneOf(&["serializable", "repeatable read", "read committed", "read uncommitted"]);

/// The known parameters, sorted by their names in lower case.
static PARAMETERS: [Parameter; 39] = [
    reported("application_name", "", Rule::Any, "What the client calls itself."),
    parameter("block_size", "4096", Rule::Fixed, "Bytes of a page."),
    parameter("bytea_output", "hex", Rule::OneOf(&["hex"]), "How bytea is written as text."),
    reported("client_encoding", "UTF8", Rule::OneOf(&["UTF8", "UTF-8", "unicode"]), "All text is UTF-8."),
    parameter(
        "client_min_messages",
        "notice",
        Rule::OneOf(&["debug", "log", "notice", "warning", "error"]),
        "Accepted, without effect.",
    ),
    reported(
        "DateStyle",
        "ISO, MDY",
        Rule::OneOf(&["ISO", "ISO, MDY", "ISO, DMY", "ISO, YMD"]),
        "Dates are written as ISO 8601 has them.",
    ),
    parameter("default_table_access_method", "heap", Rule::OneOf(&["heap"]), "Without effect."),
    parameter("default_tablespace", "", Rule::OneOf(&[""]), "Without effect."),
    parameter(
        "default_transaction_isolation",
        "serializable",
        ISOLATION,
        "Every transaction is serializable.",
    ),
    parameter("default_transaction_read_only", "off", Rule::Boolean, "Whether transactions may not write."),
    parameter(
        "extra_float_digits",
        "1",
        Rule::Any,
        "Floats are always written so that they read back the same.",
    ),
    parameter(AS_OF, "", Rule::Moment, "The time as of which the database is seen; empty: now."),
    parameter(
        SNAPSHOT_AGE,
        "0ms",
        Rule::Fixed,
        "How old what is seen is at most; 0ms: it is the newest version.",
    ),
    parameter(SNAPSHOT_TIME, "", Rule::Fixed, "When what is seen was the newest version; empty: it is now."),
    parameter(
        STALENESS,
        "5s",
        Rule::Time,
        "How old what is seen may be on a node that reads the databases of another one; 0: as new as when it was asked for.",
    ),
    parameter(
        "idle_in_transaction_session_timeout",
        "0",
        Rule::Duration,
        "How long the client may be silent inside a transaction.",
    ),
    reported("in_hot_standby", "off", Rule::Fixed, "Whether this is a standby."),
    reported("integer_datetimes", "on", Rule::Fixed, "Times are whole microseconds."),
    reported("IntervalStyle", "postgres", Rule::OneOf(&["postgres"]), "There are no intervals."),
    reported("is_superuser", "off", Rule::Fixed, "Whether the user is a superuser."),
    parameter("jit", "off", Rule::Boolean, "Without effect."),
    parameter("lock_timeout", "0", Rule::OneOf(&["0"]), "Not supported; see statement_timeout."),
    parameter("max_identifier_length", "63", Rule::Fixed, "Bytes of a name of a database or user."),
    parameter("max_index_keys", "32", Rule::Fixed, "Columns of an index that clients show."),
    parameter("row_security", "on", Rule::OneOf(&["on"]), "Without effect."),
    parameter("search_path", "\"$user\", public", Rule::Any, "Without effect: there is one schema."),
    reported("server_encoding", "UTF8", Rule::Fixed, "All text is UTF-8."),
    reported(
        "server_version",
        crate::SERVER_VERSION,
        Rule::Fixed,
        "As which Postgres Fulmar speaks, and its own version.",
    ),
    parameter("server_version_num", crate::SERVER_VERSION_NUMBER, Rule::Fixed, "The same as a number."),
    reported("session_authorization", "", Rule::Fixed, "The user."),
    reported("standard_conforming_strings", "on", Rule::OneOf(&["on"]), "A backslash in '...' is itself."),
    parameter("statement_timeout", "0", Rule::Duration, "How long a statement may run."),
    parameter("synchronous_commit", "on", Rule::OneOf(&["on"]), "A commit is durable when it is answered."),
    reported("TimeZone", "UTC", Rule::Any, "Accepted; times with a zone are always written in UTC."),
    parameter("transaction_deferrable", "off", Rule::OneOf(&["off"]), "Without effect."),
    parameter("transaction_isolation", "serializable", ISOLATION, "Every transaction is serializable."),
    parameter("transaction_read_only", "off", Rule::Fixed, "Begin with BEGIN READ ONLY."),
    parameter("work_mem", "4MB", Rule::Any, "Without effect."),
    parameter("xmloption", "content", Rule::OneOf(&["content", "document"]), "Without effect."),
];

fn find(name: &str) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|parameter| parameter.name.eq_ignore_ascii_case(name))
}

fn unknown(name: &str) -> Error {
    const UNDEFINED_OBJECT: &str = "42704";
    Error::new(UNDEFINED_OBJECT, format!("unrecognized configuration parameter \"{name}\""))
        .hint("SHOW ALL lists the known ones. A name with a point in it (myapp.setting) can be anything.")
}

/// The parameters of a session.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    /// What differs from the default, by name as the table or the application writes it.
    values: Vec<(Box<str>, Box<str>)>,
    /// What the client has asked for when it connected: to that a parameter is reset.
    defaults: Arc<[(Box<str>, Box<str>)]>,
    /// What the open transaction has set.
    changed: Vec<Change>,
    /// Reported parameters that have changed since the client was last told.
    reports: Vec<&'static str>,
    bounds: Bounds,
}

/// A parameter that the open transaction has set. `None` is the default.
#[derive(Clone)]
struct Change {
    name: Box<str>,
    /// If it rolls back.
    before: Option<Box<str>>,
    /// If it commits.
    after: Option<Box<str>>,
}

impl Settings {
    /// Sets what the session is, not what its client wants.
    pub(crate) fn set_fixed(&mut self, name: &'static str, value: &str) {
        self.store(name, Some(value.into()));
    }

    /// What is set now is what parameters are reset to from here on: the client has connected.
    pub(crate) fn keep_as_defaults(&mut self) {
        self.defaults = self.values.iter().cloned().collect();
    }

    /// Bounds parameters by the tenant's limits as they are now, and by what the user may do.
    pub(crate) fn set_bounds(&mut self, limits: &LiveLimits, access: Access) {
        self.bounds = Bounds::of(limits, access);
    }

    /// Refuses who may only read.
    pub(crate) fn check_may_write(&self) -> Result<()> {
        self.bounds.check("default_transaction_read_only", "off")
    }

    /// Sets a parameter; `None` is its default.
    pub(crate) fn set(&mut self, name: &str, value: Option<&str>) -> Result<()> {
        let (name, value) = self.checked(name, value)?;
        if let Some(change) = self.changed.iter_mut().find(|change| change.name == name) {
            change.after.clone_from(&value);
        }
        self.store(&name, value);
        Ok(())
    }

    /// As [`Settings::set`], inside a transaction: taken back if it rolls back, and if `local` also if it commits.
    pub(crate) fn set_in_transaction(&mut self, name: &str, value: Option<&str>, local: bool) -> Result<()> {
        let (name, value) = self.checked(name, value)?;
        let before = self.stored(&name);
        let change = match self.changed.iter_mut().find(|change| change.name == name) {
            Some(change) => change,
            None => {
                self.changed.push(Change { name: name.clone(), before: before.clone(), after: before });
                let last = self.changed.len() - 1;
                &mut self.changed[last]
            }
        };
        if !local {
            change.after.clone_from(&value);
        }
        self.store(&name, value);
        Ok(())
    }

    /// Whether the end of the transaction matters.
    pub(crate) fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// The transaction has ended.
    pub(crate) fn end_transaction(&mut self, committed: bool) {
        for change in std::mem::take(&mut self.changed) {
            self.store(&change.name, if committed { change.after } else { change.before });
        }
    }

    /// Sets all that can be set to the default.
    pub(crate) fn reset_all(&mut self) {
        let set = self.values.iter().chain(&*self.defaults);
        let names: Vec<Box<str>> = set.map(|value| value.0.clone()).collect();
        for name in names {
            if !find(&name).is_some_and(|parameter| matches!(parameter.rule, Rule::Fixed)) {
                self.store(&name, self.default_of(&name));
            }
        }
    }

    /// What a parameter is reset to, if that is not what it is for everybody.
    fn default_of(&self, name: &str) -> Option<Box<str>> {
        self.defaults.iter().find(|value| *value.0 == *name).map(|value| value.1.clone())
    }

    /// The value of a parameter.
    pub(crate) fn get(&self, name: &str) -> Result<&str> {
        let parameter = find(name);
        let name = parameter.map_or(name, |parameter| parameter.name);
        let value = match self.values.iter().find(|value| *value.0 == *name) {
            Some(value) => &value.1,
            None => parameter.map(|parameter| parameter.default).ok_or_else(|| unknown(name))?,
        };
        Ok(self.bounds.within(name, value))
    }

    /// All parameters: name, value, what it is about.
    pub(crate) fn all(&self) -> Vec<[&str; 3]> {
        let own = self.values.iter().filter(|value| find(&value.0).is_none());
        let known = PARAMETERS.iter();
        known
            .map(|parameter| [parameter.name, self.get(parameter.name).unwrap_or_default(), parameter.about])
            .chain(own.map(|value| [&*value.0, &*value.1, "Set by the application."]))
            .collect()
    }

    /// The parameters that a client is told when it connects.
    pub(crate) fn reported(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let reported = PARAMETERS.iter().filter(|parameter| parameter.reported);
        reported.map(|parameter| (parameter.name, self.get(parameter.name).unwrap_or_default()))
    }

    /// Takes the names of reported parameters that have changed.
    pub(crate) fn take_reports(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.reports)
    }

    /// `statement_timeout`; `None` if there is none.
    pub(crate) fn statement_timeout(&self) -> Option<Duration> {
        self.time("statement_timeout")
    }

    /// `idle_in_transaction_session_timeout`; `None` if there is none.
    pub(crate) fn idle_in_transaction_timeout(&self) -> Option<Duration> {
        self.time("idle_in_transaction_session_timeout")
    }

    fn time(&self, name: &str) -> Option<Duration> {
        let milliseconds = self.get(name).ok().and_then(milliseconds)?;
        (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
    }

    /// `fulmar.as_of`, in milliseconds since 1970; `None` if it is empty.
    pub(crate) fn as_of(&self) -> Option<u64> {
        self.get(AS_OF).ok().filter(|text| !text.is_empty()).and_then(|text| parse_moment(text).ok())
    }

    /// `fulmar.staleness`.
    pub(crate) fn staleness(&self) -> Duration {
        Duration::from_millis(self.get(STALENESS).ok().and_then(milliseconds).unwrap_or_default())
    }

    /// `default_transaction_read_only`.
    pub(crate) fn is_read_only(&self) -> bool {
        self.get("default_transaction_read_only").is_ok_and(|value| value == "on")
    }

    fn stored(&self, name: &str) -> Option<Box<str>> {
        self.values.iter().find(|value| *value.0 == *name).map(|value| value.1.clone())
    }

    fn store(&mut self, name: &str, value: Option<Box<str>>) {
        let reported = find(name).filter(|parameter| parameter.reported);
        if let Some(parameter) = reported.filter(|parameter| !self.reports.contains(&parameter.name)) {
            self.reports.push(parameter.name);
        }
        let place = self.values.iter().position(|value| *value.0 == *name);
        match (place, value) {
            (Some(place), Some(value)) => self.values[place].1 = value,
            (Some(place), None) => drop(self.values.swap_remove(place)),
            (None, Some(value)) => self.values.push((name.into(), value)),
            (None, None) => {}
        }
    }

    /// Memory of the values, of the system catalog's copy of them, and of what the end of the transaction restores.
    pub(crate) fn bytes(&self) -> usize {
        let entry =
            |(name, value): &(Box<str>, Box<str>)| name.len() + value.len() + size_of::<[Box<str>; 2]>();
        let text = |value: &Option<Box<str>>| value.as_ref().map_or(0, |value| value.len());
        let values = self.values.iter().map(entry).sum::<usize>();
        let defaults = self.defaults.iter().map(entry).sum::<usize>();
        let changed = self.changed.iter().map(|change| {
            size_of::<Change>() + change.name.len() + text(&change.before) + text(&change.after)
        });
        2 * values + defaults + changed.sum::<usize>()
    }

    /// [`Settings::bytes`] after `name` has been set to `value`, at most.
    pub(crate) fn bytes_with(&self, name: &str, value: Option<&str>) -> usize {
        let longest = [value, self.get(name).ok(), self.default_of(name).as_deref()]
            .map(|value| value.map_or(0, str::len))
            .into_iter()
            .fold(0, usize::max);
        // Twice in the values, and twice in the transaction's changes.
        let entry_bytes = size_of::<Change>() + name.len().min(NAME_BYTES) + longest.min(VALUE_BYTES);
        self.bytes() + 4 * entry_bytes
    }

    /// The name as it is stored, and the value as it is shown.
    pub(crate) fn checked(&self, name: &str, value: Option<&str>) -> Result<(Box<str>, Option<Box<str>>)> {
        if name.len() > NAME_BYTES {
            let message = "name of configuration parameter is too long";
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message)
                .detail(format!("It has {} bytes. The limit is {NAME_BYTES}.", name.len())));
        }
        if value.is_some_and(|value| value.len() > VALUE_BYTES) {
            let message = format!("the value of \"{name}\" is longer than {VALUE_BYTES} bytes");
            return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message));
        }
        let Some(parameter) = find(name) else {
            let is_ours = |prefix: &str| prefix.eq_ignore_ascii_case(OWN_PREFIX);
            if !name.contains('.') || name.get(..OWN_PREFIX.len()).is_some_and(is_ours) {
                return Err(unknown(name));
            }
            let own = self.values.iter().filter(|value| find(&value.0).is_none()).count();
            if own >= CUSTOM && self.stored(name).is_none() {
                let message = format!("a session can have {CUSTOM} parameters of its own at most");
                return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
            }
            return Ok((name.into(), value.map(Into::into).or_else(|| self.default_of(name))));
        };
        let value = value.map(|value| parameter.check(value)).transpose()?;
        if let Some(value) = &value {
            self.bounds.check(parameter.name, value)?;
        }
        if let (Rule::Fixed, None) = (&parameter.rule, &value) {
            return Err(parameter.fixed());
        }
        Ok((parameter.name.into(), value.or_else(|| self.default_of(parameter.name))))
    }
}

impl Parameter {
    fn fixed(&self) -> Error {
        const CANNOT_CHANGE: &str = "55P02";
        Error::new(CANNOT_CHANGE, format!("parameter \"{}\" cannot be changed", self.name)).hint(self.about)
    }

    /// The value as it is stored.
    fn check(&self, value: &str) -> Result<Box<str>> {
        let refused = |hint: String| {
            let message = format!("invalid value for parameter \"{}\": \"{value}\"", self.name);
            Error::new(sqlstate::INVALID_PARAMETER_VALUE, message).hint(hint)
        };
        match self.rule {
            Rule::Any => Ok(value.into()),
            // At the start some clients send it as it would stand in a SET.
            Rule::OneOf(values) => {
                match values.iter().find(|known| known.eq_ignore_ascii_case(value.trim_matches('\''))) {
                    Some(known) => Ok((*known).into()),
                    None => Err(refused(format!("{} Possible: {}.", self.about, values.join("; ")))),
                }
            }
            Rule::Boolean => match value.to_ascii_lowercase().as_str() {
                "on" | "true" | "yes" | "1" => Ok("on".into()),
                "off" | "false" | "no" | "0" => Ok("off".into()),
                _ => Err(refused("It is on or off.".into())),
            },
            Rule::Duration | Rule::Time => match milliseconds(value) {
                Some(_) => Ok(value.trim().into()),
                None => Err(refused(format!("It is {}.", Unit::Milliseconds.rule()))),
            },
            Rule::Moment if value.trim().is_empty() => Ok("".into()),
            Rule::Moment => parse_moment(value).map(|_| value.trim().into()),
            Rule::Fixed => Err(self.fixed()),
        }
    }
}

/// A time in milliseconds, within Postgres's own bound: 2^31 - 1.
fn milliseconds(text: &str) -> Option<u64> {
    Unit::Milliseconds.parse(text).filter(|&time| time <= i32::MAX as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        let names: Vec<String> = PARAMETERS.iter().map(|parameter| parameter.name.to_lowercase()).collect();
        assert!(names.is_sorted(), "{names:?}");
    }

    #[test]
    fn values_are_checked() {
        let mut settings = Settings::default();
        settings.set("STATEMENT_TIMEOUT", Some("2 min")).unwrap();
        assert_eq!(settings.statement_timeout(), Some(Duration::from_secs(120)));
        settings.set("statement_timeout", None).unwrap();
        assert_eq!(settings.statement_timeout(), None);
        assert_eq!(settings.staleness(), Duration::from_secs(5));
        settings.set("fulmar.staleness", Some("0")).unwrap();
        assert_eq!(settings.staleness(), Duration::ZERO);
        settings.set("client_encoding", Some("utf8")).unwrap();
        assert_eq!(settings.get("client_encoding").unwrap(), "UTF8");
        let state = |settings: &mut Settings, name, value| settings.set(name, value).unwrap_err().state();
        assert_eq!(
            state(&mut settings, "statement_timeout", Some("soon")),
            sqlstate::INVALID_PARAMETER_VALUE
        );
        assert_eq!(state(&mut settings, "statement_timeout", Some("99999999999999999999d")), "22023");
        assert_eq!(state(&mut settings, "client_encoding", Some("LATIN1")), "22023");
        assert_eq!(state(&mut settings, "server_version", Some("16")), "55P02");
        assert_eq!(state(&mut settings, "server_version", None), "55P02");
        assert_eq!(state(&mut settings, "nothing", Some("1")), "42704");
        assert_eq!(settings.get("nothing").unwrap_err().state(), "42704");
    }

    #[test]
    fn applications_have_their_own() {
        let mut settings = Settings::default();
        for number in 0..CUSTOM {
            settings.set(&format!("app.s{number}"), Some("x")).unwrap();
        }
        assert_eq!(settings.set("app.more", Some("x")).unwrap_err().state(), sqlstate::PROGRAM_LIMIT);
        settings.set("app.s1", Some("y")).unwrap();
        assert_eq!(settings.get("app.s1").unwrap(), "y");
        assert_eq!(settings.all().len(), PARAMETERS.len() + CUSTOM);
    }

    #[test]
    fn names_are_not_long() {
        let mut settings = Settings::default();
        let longest = format!("app.{}", "x".repeat(NAME_BYTES - 4));
        settings.set(&longest, Some("1")).unwrap();
        for value in [Some("1"), None] {
            let error = settings.set(&format!("{longest}x"), value).unwrap_err();
            assert_eq!(error.state(), sqlstate::PROGRAM_LIMIT);
            assert!(error.message().len() < NAME_BYTES, "the name must not be repeated");
        }
    }

    #[test]
    fn the_estimate_covers_a_change() {
        let mut settings = Settings::default();
        for (name, value) in
            [("app.x", Some("long value")), ("app.x", Some("short")), ("app.y", Some("")), ("app.x", None)]
        {
            let estimate = settings.bytes_with(name, value);
            settings.set_in_transaction(name, value, false).unwrap();
            assert!(settings.bytes() <= estimate, "{name} {value:?}");
        }
        settings.end_transaction(false);
        assert_eq!(settings.bytes(), 0);
    }

    #[test]
    fn a_transaction_takes_back_what_it_set() {
        let mut settings = Settings::default();
        settings.set("application_name", Some("a")).unwrap();
        settings.take_reports();
        settings.set_in_transaction("application_name", Some("b"), false).unwrap();
        settings.set_in_transaction("application_name", Some("c"), true).unwrap();
        assert_eq!(settings.get("application_name").unwrap(), "c");
        settings.end_transaction(true);
        assert_eq!(settings.get("application_name").unwrap(), "b");
        settings.set_in_transaction("application_name", Some("d"), false).unwrap();
        settings.set_in_transaction("app.x", Some("1"), false).unwrap();
        settings.end_transaction(false);
        assert_eq!(settings.get("application_name").unwrap(), "b");
        assert!(settings.get("app.x").is_err());
        assert_eq!(settings.take_reports(), ["application_name"]);
    }
}

//! Run-time configuration parameters of a session: SET, RESET and SHOW.
//!
//! - A table lists the known parameters with their defaults and allowed values. Values that request
//!   an unsupported feature are rejected.
//! - Names that contain a dot (`myapp.user`) are custom parameters of the application. Their values
//!   are stored unchecked.
//! - As in PostgreSQL, a rollback reverts the changes of the transaction, and SET LOCAL ends with
//!   the transaction.
//! - A session stores only values that differ from the default. The default of a parameter that a
//!   tenant limit bounds is the limit.

mod bounds;
mod saved;

use std::sync::Arc;
use std::time::Duration;

use fulmar_dialect::admin::parse_timestamp_unix_ms;
use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, LiveLimits, Unit};

use crate::Result;
use bounds::Bounds;

/// Maximum number of custom parameters of a session.
const MAX_CUSTOM_PARAMETERS: usize = 100;
/// Maximum size of a name. PostgreSQL truncates identifiers at 63 bytes, and a custom name has at
/// least two of them.
const MAX_NAME_BYTES: usize = 128;
/// Maximum size of a value.
const MAX_VALUE_BYTES: usize = 4096;

/// The allowed values of a parameter.
enum Rule {
    /// Any text.
    Any,
    /// One of these, case-insensitive.
    OneOf(&'static [&'static str]),
    Boolean,
    /// A duration, in milliseconds if it has no unit. 0 disables the parameter.
    Duration,
    /// A duration for which 0 has no special meaning.
    Time,
    /// A timestamp, or empty.
    Moment,
    /// Read-only.
    Fixed,
}

struct Parameter {
    name: &'static str,
    default: &'static str,
    rule: Rule,
    /// Changes are reported to the client with ParameterStatus.
    reported: bool,
    description: &'static str,
}

const fn parameter(
    name: &'static str,
    default: &'static str,
    rule: Rule,
    description: &'static str,
) -> Parameter {
    Parameter { name, default, rule, reported: false, description }
}

const fn reported(
    name: &'static str,
    default: &'static str,
    rule: Rule,
    description: &'static str,
) -> Parameter {
    Parameter { name, default, rule, reported: true, description }
}

/// The time as of which the session reads the database.
pub(crate) const AS_OF: &str = "fulmar.as_of";
/// The address for clients of the node that owns the database. Empty if the client is connected to
/// it. In a cluster, changes are reported to the client.
pub(crate) const OWNER: &str = "fulmar.owner";
/// The time of the version that the session reads.
pub(crate) const SNAPSHOT_TIME: &str = "fulmar.snapshot_time";
/// The maximum age of that version.
pub(crate) const SNAPSHOT_AGE: &str = "fulmar.snapshot_age";
/// The maximum age of the data that a replica returns.
const STALENESS: &str = "fulmar.staleness";
/// The prefix of Fulmar's own parameters. It cannot be used for custom parameters, so that
/// misspelled names are rejected.
const RESERVED_PREFIX: &str = "fulmar.";

const ISOLATION: Rule =
    Rule::OneOf(&["serializable", "repeatable read", "read committed", "read uncommitted"]);

/// The known parameters, sorted by lower-case name.
static PARAMETERS: [Parameter; 40] = [
    reported("application_name", "", Rule::Any, "Sets the application name to be reported in statistics."),
    parameter("block_size", "4096", Rule::Fixed, "Shows the size of a page in bytes."),
    parameter("bytea_output", "hex", Rule::OneOf(&["hex"]), "Sets the output format for bytea."),
    reported(
        "client_encoding",
        "UTF8",
        Rule::OneOf(&["UTF8", "UTF-8", "unicode"]),
        "Sets the client's character set encoding. Only UTF-8 is supported.",
    ),
    parameter(
        "client_min_messages",
        "notice",
        Rule::OneOf(&["debug", "log", "notice", "warning", "error"]),
        "Accepted for compatibility. Has no effect.",
    ),
    reported(
        "DateStyle",
        "ISO, MDY",
        Rule::OneOf(&["ISO", "ISO, MDY", "ISO, DMY", "ISO, YMD"]),
        "Sets the display format for date and time values. Output is always ISO 8601.",
    ),
    parameter(
        "default_table_access_method",
        "heap",
        Rule::OneOf(&["heap"]),
        "Accepted for compatibility. Has no effect.",
    ),
    parameter("default_tablespace", "", Rule::OneOf(&[""]), "Accepted for compatibility. Has no effect."),
    parameter(
        "default_transaction_isolation",
        "serializable",
        ISOLATION,
        "Sets the isolation level of new transactions. All levels behave as serializable.",
    ),
    parameter(
        "default_transaction_read_only",
        "off",
        Rule::Boolean,
        "Sets the read-only status of new transactions.",
    ),
    parameter(
        "extra_float_digits",
        "1",
        Rule::Any,
        "Accepted for compatibility. Floating-point output always preserves the exact value.",
    ),
    parameter(
        AS_OF,
        "",
        Rule::Moment,
        "Sets the time as of which the database is read. Empty: the current data.",
    ),
    parameter(
        OWNER,
        "",
        Rule::Fixed,
        "Shows the address of the node that owns the database, if the client is connected to another one.",
    ),
    parameter(
        SNAPSHOT_AGE,
        "0ms",
        Rule::Fixed,
        "Shows the maximum age of the data that the session reads. 0ms: the newest version.",
    ),
    parameter(
        SNAPSHOT_TIME,
        "",
        Rule::Fixed,
        "Shows the time of the version that the session reads. Empty: the newest version.",
    ),
    parameter(
        STALENESS,
        "5s",
        Rule::Time,
        "Sets the maximum age of the data that a replica returns. 0: at least as new as the start of the query.",
    ),
    parameter(
        "idle_in_transaction_session_timeout",
        "0",
        Rule::Duration,
        "Sets the maximum allowed idle time between queries in a transaction. 0 disables it.",
    ),
    reported("in_hot_standby", "off", Rule::Fixed, "Shows whether the node is a replica."),
    reported(
        "integer_datetimes",
        "on",
        Rule::Fixed,
        "Shows whether timestamps are integers in microseconds.",
    ),
    reported(
        "IntervalStyle",
        "postgres",
        Rule::OneOf(&["postgres"]),
        "Accepted for compatibility. There is no interval type.",
    ),
    reported("is_superuser", "off", Rule::Fixed, "Shows whether the current user is a superuser."),
    parameter("jit", "off", Rule::Boolean, "Accepted for compatibility. Has no effect."),
    parameter(
        "lock_timeout",
        "0",
        Rule::OneOf(&["0"]),
        "Lock timeouts are not supported. Use statement_timeout.",
    ),
    parameter(
        "max_identifier_length",
        "63",
        Rule::Fixed,
        "Shows the maximum size of a database or user name in bytes.",
    ),
    parameter(
        "max_index_keys",
        "32",
        Rule::Fixed,
        "Shows the maximum number of index columns that clients display.",
    ),
    parameter("row_security", "on", Rule::OneOf(&["on"]), "Accepted for compatibility. Has no effect."),
    parameter(
        "search_path",
        "\"$user\", public",
        Rule::Any,
        "Accepted for compatibility. There is only one schema.",
    ),
    reported("server_encoding", "UTF8", Rule::Fixed, "Shows the server's character set encoding."),
    reported(
        "server_version",
        fulmar_pgwire::SERVER_VERSION,
        Rule::Fixed,
        "Shows the emulated PostgreSQL version and the Fulmar version.",
    ),
    parameter(
        "server_version_num",
        fulmar_pgwire::SERVER_VERSION_NUMBER,
        Rule::Fixed,
        "Shows the emulated PostgreSQL version as an integer.",
    ),
    reported("session_authorization", "", Rule::Fixed, "Shows the session user name."),
    reported(
        "standard_conforming_strings",
        "on",
        Rule::OneOf(&["on"]),
        "Treats backslashes in '...' strings literally. Cannot be turned off.",
    ),
    parameter(
        "statement_timeout",
        "0",
        Rule::Duration,
        "Sets the maximum allowed duration of any statement. 0 disables it.",
    ),
    parameter(
        "synchronous_commit",
        "on",
        Rule::OneOf(&["on"]),
        "Commits are always durable before they are acknowledged.",
    ),
    reported(
        "TimeZone",
        "UTC",
        Rule::Any,
        "Accepted for compatibility. Timestamps with time zone are always displayed in UTC.",
    ),
    parameter(
        "transaction_deferrable",
        "off",
        Rule::OneOf(&["off"]),
        "Accepted for compatibility. Has no effect.",
    ),
    parameter(
        "transaction_isolation",
        "serializable",
        ISOLATION,
        "Sets the current isolation level. All levels behave as serializable.",
    ),
    parameter(
        "transaction_read_only",
        "off",
        Rule::Fixed,
        "Use BEGIN READ ONLY to begin a read-only transaction.",
    ),
    parameter("work_mem", "4MB", Rule::Any, "Accepted for compatibility. Has no effect."),
    parameter(
        "xmloption",
        "content",
        Rule::OneOf(&["content", "document"]),
        "Accepted for compatibility. Has no effect.",
    ),
];

fn find(name: &str) -> Option<&'static Parameter> {
    PARAMETERS.iter().find(|parameter| parameter.name.eq_ignore_ascii_case(name))
}

fn unknown(name: &str) -> Error {
    const UNDEFINED_OBJECT: &str = "42704";
    Error::new(UNDEFINED_OBJECT, format!("unrecognized configuration parameter \"{name}\"")).hint(
        "Run SHOW ALL to list the known parameters. Names of custom parameters must contain a \
             dot (myapp.setting).",
    )
}

/// The parameters of a session.
#[derive(Clone, Default)]
pub(crate) struct Settings {
    /// Values that differ from the default. Known names are spelled as in the table.
    values: Vec<(Box<str>, Box<str>)>,
    /// The values that the client set when it connected. RESET restores them.
    defaults: Arc<[(Box<str>, Box<str>)]>,
    /// Changes of the open transaction.
    changed: Vec<Change>,
    /// Reported parameters that have changed since the last ParameterStatus.
    reports: Vec<&'static str>,
    /// A value has changed since the last [`Settings::take_stored`].
    stored: bool,
    /// The same for [`Settings::take_stored_in_transaction`].
    stored_in_transaction: bool,
    bounds: Bounds,
}

/// A parameter that the open transaction has set. `None` is the default.
#[derive(Clone)]
struct Change {
    name: Box<str>,
    /// The value after a rollback.
    before: Option<Box<str>>,
    /// The value after a commit.
    after: Option<Box<str>>,
}

impl Settings {
    /// Sets a read-only parameter that describes the session.
    pub(crate) fn set_fixed(&mut self, name: &'static str, value: &str) {
        self.store(name, Some(value.into()));
    }

    /// Makes the current values the session defaults that RESET restores. Called when the client
    /// has connected.
    pub(crate) fn save_as_defaults(&mut self) {
        self.defaults = self.values.iter().cloned().collect();
    }

    /// Bounds parameters by the tenant's current limits and the user's access.
    pub(crate) fn set_bounds(&mut self, limits: &LiveLimits, access: Access) {
        self.bounds = Bounds::of(limits, access);
    }

    /// Fails if the user has read-only access.
    pub(crate) fn check_may_write(&self) -> Result<()> {
        self.bounds.check("default_transaction_read_only", "off")
    }

    /// Sets a parameter. `None` resets it to the default.
    pub(crate) fn set(&mut self, name: &str, value: Option<&str>) -> Result<()> {
        let (name, value) = self.checked(name, value)?;
        if let Some(change) = self.changed.iter_mut().find(|change| change.name == name) {
            change.after.clone_from(&value);
        }
        self.store(&name, value);
        Ok(())
    }

    /// Like [`Settings::set`], inside a transaction: reverted if the transaction rolls back. If
    /// `local`, also reverted if it commits.
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

    /// Returns true if the open transaction has set parameters.
    pub(crate) fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Applies the end of the transaction.
    pub(crate) fn end_transaction(&mut self, committed: bool) {
        for change in std::mem::take(&mut self.changed) {
            self.store(&change.name, if committed { change.after } else { change.before });
        }
    }

    /// Resets all parameters that can be changed.
    pub(crate) fn reset_all(&mut self) {
        let set = self.values.iter().chain(&*self.defaults);
        let names: Vec<Box<str>> = set.map(|value| value.0.clone()).collect();
        for name in names {
            if !find(&name).is_some_and(|parameter| matches!(parameter.rule, Rule::Fixed)) {
                self.store(&name, self.default_of(&name));
            }
        }
    }

    /// The session default of a parameter. `None` if it is the global default.
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

    /// All parameters: name, value and description.
    pub(crate) fn all(&self) -> Vec<[&str; 3]> {
        let custom = self.values.iter().filter(|value| find(&value.0).is_none());
        let known = PARAMETERS.iter();
        known
            .map(|parameter| {
                [parameter.name, self.get(parameter.name).unwrap_or_default(), parameter.description]
            })
            .chain(custom.map(|value| [&*value.0, &*value.1, "Custom parameter."]))
            .collect()
    }

    /// The parameters that are reported to the client when it connects.
    pub(crate) fn reported(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let reported = PARAMETERS.iter().filter(|parameter| parameter.reported);
        reported.map(|parameter| (parameter.name, self.get(parameter.name).unwrap_or_default()))
    }

    /// Takes the names of reported parameters that have changed since the last call.
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
        self.get(AS_OF)
            .ok()
            .filter(|text| !text.is_empty())
            .and_then(|text| parse_timestamp_unix_ms(text).ok())
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
        (self.stored, self.stored_in_transaction) = (true, true);
        let reported = find(name).filter(|parameter| parameter.reported);
        if let Some(parameter) = reported.filter(|parameter| !self.reports.contains(&parameter.name)) {
            self.reports.push(parameter.name);
        }
        let index = self.values.iter().position(|value| *value.0 == *name);
        match (index, value) {
            (Some(index), Some(value)) => self.values[index].1 = value,
            (Some(index), None) => drop(self.values.swap_remove(index)),
            (None, Some(value)) => self.values.push((name.into(), value)),
            (None, None) => {}
        }
    }

    /// Memory of the values, of their copy in the system catalog, and of the transaction's changes.
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

    /// An upper bound of [`Settings::bytes`] after `name` has been set to `value`.
    pub(crate) fn bytes_with(&self, name: &str, value: Option<&str>) -> usize {
        let longest = [value, self.get(name).ok(), self.default_of(name).as_deref()]
            .map(|value| value.map_or(0, str::len))
            .into_iter()
            .fold(0, usize::max);
        // Stored twice in the values and twice in the transaction's changes.
        let entry_bytes = size_of::<Change>() + name.len().min(MAX_NAME_BYTES) + longest.min(MAX_VALUE_BYTES);
        self.bytes() + 4 * entry_bytes
    }

    /// Checks a name and a value. Returns both as they are stored.
    pub(crate) fn checked(&self, name: &str, value: Option<&str>) -> Result<(Box<str>, Option<Box<str>>)> {
        if name.len() > MAX_NAME_BYTES {
            let message = "name of configuration parameter is too long";
            return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).detail(format!(
                "The name has {} bytes. The maximum is {MAX_NAME_BYTES} bytes.",
                name.len()
            )));
        }
        if value.is_some_and(|value| value.len() > MAX_VALUE_BYTES) {
            let message = format!("value for parameter \"{name}\" is too long");
            return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
                .detail(format!("The maximum is {MAX_VALUE_BYTES} bytes.")));
        }
        let Some(parameter) = find(name) else {
            let is_reserved = |prefix: &str| prefix.eq_ignore_ascii_case(RESERVED_PREFIX);
            if !name.contains('.') || name.get(..RESERVED_PREFIX.len()).is_some_and(is_reserved) {
                return Err(unknown(name));
            }
            let custom = self.values.iter().filter(|value| find(&value.0).is_none()).count();
            if custom >= MAX_CUSTOM_PARAMETERS && self.stored(name).is_none() {
                return Err(Error::new(sqlstate::PROGRAM_LIMIT, "too many custom parameters")
                    .detail(format!("A session can set {MAX_CUSTOM_PARAMETERS} custom parameters.")));
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
        Error::new(CANNOT_CHANGE, format!("parameter \"{}\" cannot be changed", self.name))
            .hint(self.description)
    }

    /// Checks a value. Returns it as it is stored.
    fn check(&self, value: &str) -> Result<Box<str>> {
        let invalid = |hint: String| {
            let message = format!("invalid value for parameter \"{}\": \"{value}\"", self.name);
            Error::new(sqlstate::INVALID_PARAMETER_VALUE, message).hint(hint)
        };
        match self.rule {
            Rule::Any => Ok(value.into()),
            // Some clients quote the value in the startup packet as in a SET statement.
            Rule::OneOf(values) => {
                match values.iter().find(|valid| valid.eq_ignore_ascii_case(value.trim_matches('\''))) {
                    Some(valid) => Ok((*valid).into()),
                    None => {
                        Err(invalid(format!("{} Available values: {}.", self.description, values.join("; "))))
                    }
                }
            }
            Rule::Boolean => match value.to_ascii_lowercase().as_str() {
                "on" | "true" | "yes" | "1" => Ok("on".into()),
                "off" | "false" | "no" | "0" => Ok("off".into()),
                _ => Err(invalid("The value must be on or off.".into())),
            },
            Rule::Duration | Rule::Time => match milliseconds(value) {
                Some(_) => Ok(value.trim().into()),
                None => Err(invalid(format!("The value must be {}.", Unit::Milliseconds.rule()))),
            },
            Rule::Moment if value.trim().is_empty() => Ok("".into()),
            Rule::Moment => parse_timestamp_unix_ms(value).map(|_| value.trim().into()),
            Rule::Fixed => Err(self.fixed()),
        }
    }
}

/// A duration in milliseconds. As in PostgreSQL, the maximum is 2^31 - 1.
fn milliseconds(text: &str) -> Option<u64> {
    Unit::Milliseconds.parse(text).filter(|&time| time <= i32::MAX as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_sorted_by_name() {
        let names: Vec<String> = PARAMETERS.iter().map(|parameter| parameter.name.to_lowercase()).collect();
        assert!(names.is_sorted(), "{names:?}");
    }

    #[test]
    fn set_validates_values() {
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
    fn custom_parameters_are_limited() {
        let mut settings = Settings::default();
        for number in 0..MAX_CUSTOM_PARAMETERS {
            settings.set(&format!("app.s{number}"), Some("x")).unwrap();
        }
        assert_eq!(settings.set("app.more", Some("x")).unwrap_err().state(), sqlstate::PROGRAM_LIMIT);
        settings.set("app.s1", Some("y")).unwrap();
        assert_eq!(settings.get("app.s1").unwrap(), "y");
        assert_eq!(settings.all().len(), PARAMETERS.len() + MAX_CUSTOM_PARAMETERS);
    }

    #[test]
    fn long_names_are_rejected() {
        let mut settings = Settings::default();
        let longest = format!("app.{}", "x".repeat(MAX_NAME_BYTES - 4));
        settings.set(&longest, Some("1")).unwrap();
        for value in [Some("1"), None] {
            let error = settings.set(&format!("{longest}x"), value).unwrap_err();
            assert_eq!(error.state(), sqlstate::PROGRAM_LIMIT);
            assert!(error.message().len() < MAX_NAME_BYTES, "the message must not repeat a long name");
        }
    }

    #[test]
    fn bytes_with_is_an_upper_bound() {
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
    fn transaction_end_reverts_or_keeps_changes() {
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

//! Bounds of a session's parameters: by the tenant's limits and the user's access rights.

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, Limit, LiveLimits, Unit};

use crate::Result;

/// Parameters that are bounded by a limit.
const BOUNDED: [(&str, Limit); 2] = [
    ("statement_timeout", Limit::StatementTimeout),
    ("idle_in_transaction_session_timeout", Limit::IdleInTransactionTimeout),
];

/// The maximum of a parameter, which is also its default.
#[derive(Clone)]
struct Bound {
    limit: Limit,
    milliseconds: u64,
    text: Box<str>,
}

/// The bounds of a session's parameters.
#[derive(Clone, Default)]
pub(super) struct Bounds {
    times: [Option<Bound>; BOUNDED.len()],
    /// The user has read-only access.
    read_only: bool,
}

/// The parameter that is bounded by the user's access.
const READ_ONLY: &str = "default_transaction_read_only";

impl Bounds {
    pub(super) fn of(limits: &LiveLimits, access: Access) -> Bounds {
        let times = BOUNDED.map(|(_, limit)| {
            let milliseconds = limits.get(limit)?;
            let text = Unit::Milliseconds.write(milliseconds).into();
            Some(Bound { limit, milliseconds, text })
        });
        Bounds { times, read_only: access == Access::ReadOnly }
    }

    fn find(&self, parameter: &str) -> Option<&Bound> {
        let index = BOUNDED.iter().position(|(name, _)| *name == parameter)?;
        self.times[index].as_ref()
    }

    /// The effective value of a parameter. `value` may have been set under an earlier, higher
    /// bound.
    pub(super) fn within<'a>(&'a self, parameter: &str, value: &'a str) -> &'a str {
        match self.find(parameter) {
            None if self.read_only && parameter == READ_ONLY => "on",
            Some(bound) if !bound.admits(value) => &bound.text,
            _ => value,
        }
    }

    /// Rejects a value beyond the bound.
    pub(super) fn check(&self, parameter: &str, value: &str) -> Result<()> {
        if self.read_only && parameter == READ_ONLY && value == "off" {
            return Err(Error::new(
                sqlstate::INSUFFICIENT_PRIVILEGE,
                format!("permission denied to set parameter \"{parameter}\" to off"),
            )
            .detail("The user has read-only access to the database.")
            .hint("A superuser can run GRANT CONNECT ON DATABASE to allow writes."));
        }
        let Some(bound) = self.find(parameter).filter(|bound| !bound.admits(value)) else { return Ok(()) };
        let (limit, max) = (bound.limit.name(), &bound.text);
        let message =
            format!("cannot set parameter \"{parameter}\" to \"{value}\": the database's limit is {max}");
        Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint(format!("A superuser can raise the limit with ALTER DATABASE ... SET {limit}.")))
    }
}

impl Bound {
    /// Returns true if `value` is within the bound. 0 means no timeout, so it is not.
    fn admits(&self, value: &str) -> bool {
        Unit::Milliseconds.parse(value).is_some_and(|time| time > 0 && time <= self.milliseconds)
    }
}

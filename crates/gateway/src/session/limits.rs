//! Applies the tenant's limits and the user's access rights to a session: bounds of its parameters
//! and limits of its transactions.
//!
//! A changed limit takes effect with the next message. Detecting a change costs one comparison of a
//! generation number per message.

use fulmar_engine::{Error, TransactionLimits, sqlstate};
use fulmar_meta::{Access, Limit, LiveLimits, Unit};

use super::Session;
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

impl Session {
    /// Applies the tenant's limits if they have changed.
    pub(super) fn follow_limits(&mut self) {
        let generation = self.identity.limits.generation();
        if generation == self.limits_seen {
            return;
        }
        self.limits_seen = generation;
        let limits = &self.identity.limits;
        self.settings.set_bounds(limits, self.identity.access);
        let bytes = |limit| limits.get(limit).map_or(u64::MAX, |kilobytes| kilobytes * 1024);
        let temporary_bytes = temporary_bytes(limits);
        self.temporary.set_limit(temporary_bytes);
        self.link.engine.set_limits(TransactionLimits {
            held_bytes: bytes(Limit::TransactionMemory),
            database_bytes: bytes(Limit::MaxSize),
            temporary_bytes,
            value_bytes: bytes(Limit::MaxValueSize),
            pattern_bytes: limits.get(Limit::MaxPatternLength).unwrap_or(u64::MAX),
            parameters: limits.get(Limit::MaxParameters).unwrap_or(u64::MAX),
        });
        let floor = limits.get(Limit::CacheFloor).map_or(0, |kilobytes| kilobytes * 1024);
        self.link.engine.set_cache_floor(floor);
        self.apply_settings();
    }
}

/// The default of `temp_file_limit` as a multiple of `max_size`. A VACUUM of a full database needs
/// three times the database's size.
const TEMPORARY_PER_SIZE: u64 = 4;
/// The minimum of that default.
const MIN_TEMPORARY_KILOBYTES: u64 = 64 << 10;

/// Maximum size of the temporary files of a tenant's sessions. The engine lowers it to the tenant's
/// share of the disk.
fn temporary_bytes(limits: &LiveLimits) -> u64 {
    let of_size = || {
        let kilobytes = limits.get(Limit::MaxSize)?.saturating_mul(TEMPORARY_PER_SIZE);
        Some(kilobytes.max(MIN_TEMPORARY_KILOBYTES))
    };
    let kilobytes = limits.get(Limit::TempFileLimit).or_else(of_size);
    kilobytes.map_or(u64::MAX, |kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use fulmar_meta::Limits;

    use super::*;

    #[test]
    fn temp_file_limit_defaults_to_four_times_max_size() {
        let of = |size, limit| {
            let mut limits = Limits::default();
            limits.set(Limit::MaxSize, size);
            limits.set(Limit::TempFileLimit, limit);
            temporary_bytes(&LiveLimits::new(&limits))
        };
        assert_eq!(of(None, None), u64::MAX);
        assert_eq!(of(Some(64 << 10), None), 256 << 20);
        assert_eq!(of(Some(1 << 10), None), 64 << 20);
        assert_eq!(of(Some(64 << 10), Some(1 << 10)), 1 << 20);
    }
}

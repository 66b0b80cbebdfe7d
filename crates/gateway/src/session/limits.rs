//! What the limits of its tenant, and its user's rights, mean for a session: bounds of its parameters, and what its
//! transactions may take.
//!
//! A limit that changes is seen with the next message. To know that there is one to be seen costs a look at a number.

use fulmar_engine::{Error, TransactionLimits, sqlstate};
use fulmar_meta::{Access, Limit, LiveLimits, Unit};

use super::Session;
use crate::Result;

/// Parameters that a limit bounds.
const BOUNDED: [(&str, Limit); 2] = [
    ("statement_timeout", Limit::StatementTimeout),
    ("idle_in_transaction_session_timeout", Limit::IdleInTransactionTimeout),
];

/// The most that a parameter can be, which is also its default.
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
    /// The user may not write.
    read_only: bool,
}

/// The parameter that is bounded by what the user may do.
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
        let place = BOUNDED.iter().position(|(name, _)| *name == parameter)?;
        self.times[place].as_ref()
    }

    /// The value that holds of one that was set, perhaps when its bound was another.
    pub(super) fn within<'a>(&'a self, parameter: &str, value: &'a str) -> &'a str {
        match self.find(parameter) {
            None if self.read_only && parameter == READ_ONLY => "on",
            Some(bound) if !bound.admits(value) => &bound.text,
            _ => value,
        }
    }

    /// Refuses a value beyond the bound.
    pub(super) fn check(&self, parameter: &str, value: &str) -> Result<()> {
        if self.read_only && parameter == READ_ONLY && value == "off" {
            return Err(Error::new(
                sqlstate::INSUFFICIENT_PRIVILEGE,
                format!("permission denied to switch off \"{parameter}\""),
            )
            .hint("The user may only read this database; GRANT CONNECT ON DATABASE lets it write."));
        }
        let Some(bound) = self.find(parameter).filter(|bound| !bound.admits(value)) else { return Ok(()) };
        let (limit, most) = (bound.limit.name(), &bound.text);
        let message =
            format!("parameter \"{parameter}\" cannot be set to \"{value}\": the database's limit is {most}");
        Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint(format!("A superuser can raise the limit with ALTER DATABASE ... SET {limit}.")))
    }
}

impl Bound {
    /// 0 is for ever.
    fn admits(&self, value: &str) -> bool {
        Unit::Milliseconds.parse(value).is_some_and(|time| time > 0 && time <= self.milliseconds)
    }
}

impl Session {
    /// Does what the tenant's limits ask for, if they have changed.
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

/// Temporary files that the sessions of a tenant may have without a `temp_file_limit`, in proportion to its `max_size`. A VACUUM of
/// a full database needs three times as much.
const TEMPORARY_PER_SIZE: u64 = 4;
const MIN_TEMPORARY_KILOBYTES: u64 = 64 << 10;

/// Bytes that the temporary files of a tenant's sessions may have; the engine lowers that to the tenant's share of the disk.
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
    fn temporary_files_follow_the_size_of_the_database() {
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

//! Resource limits of tenants.
//!
//! - [`Limit`] is the list of all limits, with names, units and ranges. Code that sets, shows or
//!   enforces a limit uses it.
//! - [`Limits`] are the limits of one tenant, as stored in its record.
//! - [`LiveLimits`] are the current limits of one tenant for its sessions. There is one object per
//!   tenant, which survives changes of the record. Reading it takes no lock.
//!
//! ```text
//!   ALTER DATABASE ... SET --> durable record --> Catalog --> LiveLimits <-- sessions, per message
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{MetaError, Unit};

/// A resource limit of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Number of concurrent sessions.
    MaxConnections,
    /// Maximum run time of a statement.
    StatementTimeout,
    /// Maximum idle time of a client inside a transaction.
    IdleInTransactionTimeout,
    /// Memory of a transaction's changed pages, replay journal and temporary data.
    TransactionMemory,
    /// Maximum size of the database.
    MaxSize,
    /// Relative share of the CPUs under contention.
    CpuShare,
    /// How far back the database can be restored and branched.
    Retention,
    /// Page cache memory that other tenants cannot evict.
    CacheFloor,
    /// Total size of the temporary files of its sessions.
    TempFileLimit,
    /// Maximum size of a value or row.
    MaxValueSize,
    /// Maximum length of a LIKE or GLOB pattern.
    MaxPatternLength,
    /// Maximum number of parameters of a statement.
    MaxParameters,
    /// The latency that the tenant was promised.
    LatencyObjective,
}

/// Properties of a limit.
struct Definition {
    limit: Limit,
    name: &'static str,
    unit: Unit,
    min: u64,
    max: u64,
    /// `None`: unlimited.
    default: Option<u64>,
    description: &'static str,
}

/// With smaller sizes a tenant could not run any statement, including those that would fix it.
const MIN_KILOBYTES: u64 = 1024;
/// PostgreSQL's maximum for times and counts, 2^31 - 1.
const MAX_INTEGER: u64 = i32::MAX as u64;
/// Maximum retention.
const YEAR_MS: u64 = 366 * DAY_MS;
/// Default retention.
const DAY_MS: u64 = 86_400_000;
/// Maximum size of a partition: 2^32 - 1 pages of 4 KiB.
const MAX_KILOBYTES: u64 = 4 * u32::MAX as u64;
/// SQLite's limits, as the engine configures it.
const MAX_VALUE_KILOBYTES: u64 = 256 << 10;
const MAX_PATTERN_BYTES: u64 = 50_000;
const MAX_PARAMETERS: u64 = 32_766;

/// In the order of [`Limit`].
static LIMITS: [Definition; Limit::ALL.len()] = [
    Definition {
        limit: Limit::MaxConnections,
        name: "max_connections",
        unit: Unit::Count,
        min: 0,
        max: MAX_INTEGER,
        default: None,
        description: "Maximum number of concurrent sessions. Superusers are counted but not refused.",
    },
    Definition {
        limit: Limit::StatementTimeout,
        name: "statement_timeout",
        unit: Unit::Milliseconds,
        min: 1,
        max: MAX_INTEGER,
        default: None,
        description: "Maximum run time of a statement. Default and upper bound of the session setting.",
    },
    Definition {
        limit: Limit::IdleInTransactionTimeout,
        name: "idle_in_transaction_timeout",
        unit: Unit::Milliseconds,
        min: 1,
        max: MAX_INTEGER,
        default: None,
        description: "Maximum idle time inside a transaction. The session is then terminated.",
    },
    Definition {
        limit: Limit::TransactionMemory,
        name: "transaction_memory",
        unit: Unit::Kilobytes,
        min: MIN_KILOBYTES,
        max: MAX_KILOBYTES,
        default: None,
        description: "Memory for a transaction's changed pages, journals and temporary data.",
    },
    Definition {
        limit: Limit::MaxSize,
        name: "max_size",
        unit: Unit::Kilobytes,
        min: MIN_KILOBYTES,
        max: MAX_KILOBYTES,
        default: None,
        description: "Maximum size of the database.",
    },
    Definition {
        limit: Limit::CpuShare,
        name: "cpu_share",
        unit: Unit::Count,
        min: 1,
        max: 10_000,
        default: Some(100),
        description: "The tenant's weight when CPU time is scarce.",
    },
    Definition {
        limit: Limit::Retention,
        name: "retention",
        unit: Unit::Milliseconds,
        min: 0,
        max: YEAR_MS,
        default: Some(DAY_MS),
        description: "How far back the database can be restored and branched. 0 disables history.",
    },
    Definition {
        limit: Limit::CacheFloor,
        name: "cache_floor",
        unit: Unit::Kilobytes,
        min: MIN_KILOBYTES,
        max: MAX_KILOBYTES,
        default: None,
        description: "Page cache memory that other tenants cannot evict.",
    },
    Definition {
        limit: Limit::TempFileLimit,
        name: "temp_file_limit",
        unit: Unit::Kilobytes,
        min: MIN_KILOBYTES,
        max: MAX_KILOBYTES,
        default: None,
        description: "Total size of temporary files of all sessions: sorts, large transactions, results.",
    },
    Definition {
        limit: Limit::MaxValueSize,
        name: "max_value_size",
        unit: Unit::Kilobytes,
        min: MIN_KILOBYTES,
        max: MAX_VALUE_KILOBYTES,
        default: None,
        description: "Maximum size of a value or row. At most one eighth of the node's statement memory.",
    },
    Definition {
        limit: Limit::MaxPatternLength,
        name: "max_pattern_length",
        unit: Unit::Count,
        min: 1,
        max: MAX_PATTERN_BYTES,
        default: Some(250),
        description: "Maximum length of a LIKE or GLOB pattern, in bytes.",
    },
    Definition {
        limit: Limit::MaxParameters,
        name: "max_parameters",
        unit: Unit::Count,
        min: 1,
        max: MAX_PARAMETERS,
        default: Some(MAX_PARAMETERS),
        description: "Maximum number of parameters of a statement.",
    },
    Definition {
        limit: Limit::LatencyObjective,
        name: "latency_objective",
        unit: Unit::Milliseconds,
        min: 1,
        max: MAX_INTEGER,
        default: None,
        description: "Smoothed latency of statements above which the cluster's controller helps.",
    },
];

impl Limit {
    /// All limits.
    pub const ALL: [Limit; 13] = [
        Limit::MaxConnections,
        Limit::StatementTimeout,
        Limit::IdleInTransactionTimeout,
        Limit::TransactionMemory,
        Limit::MaxSize,
        Limit::CpuShare,
        Limit::Retention,
        Limit::CacheFloor,
        Limit::TempFileLimit,
        Limit::MaxValueSize,
        Limit::MaxPatternLength,
        Limit::MaxParameters,
        Limit::LatencyObjective,
    ];

    fn definition(self) -> &'static Definition {
        &LIMITS[self as usize]
    }

    /// Finds a limit by its lower-case name.
    pub fn find(name: &str) -> Result<Limit, MetaError> {
        let found = LIMITS.iter().find(|definition| definition.name == name);
        found.map(|definition| definition.limit).ok_or_else(|| MetaError::UnknownLimit {
            name: name.to_owned(),
            known: format!(
                "The limits are {}.",
                LIMITS.each_ref().map(|definition| definition.name).join(", ")
            ),
        })
    }

    /// The limit's name.
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// The unit of its values.
    pub fn unit(self) -> Unit {
        self.definition().unit
    }

    /// The default. `None` means unlimited.
    pub fn default_value(self) -> Option<u64> {
        self.definition().default
    }

    /// A description.
    pub fn description(self) -> &'static str {
        self.definition().description
    }

    /// Parses a value. `None` removes the limit. As in PostgreSQL, a time of 0 means unlimited,
    /// unless 0 is a valid value.
    pub fn parse(self, text: &str) -> Result<Option<u64>, MetaError> {
        let value = self.unit().parse(text);
        if value == Some(0) && self.unit() == Unit::Milliseconds && !self.allows(0) {
            return Ok(None);
        }
        value.filter(|value| self.allows(*value)).map(Some).ok_or_else(|| self.refused(text))
    }

    /// Returns true if the value is in the valid range.
    pub(crate) fn allows(self, value: u64) -> bool {
        (self.definition().min..=self.definition().max).contains(&value)
    }

    fn refused(self, text: &str) -> MetaError {
        let Definition { name, unit, min, max, .. } = self.definition();
        MetaError::InvalidLimit {
            name,
            value: text.chars().take(100).collect(),
            rule: format!(
                "The value must be {}, from {} to {}.",
                unit.rule(),
                unit.write(*min),
                unit.write(*max)
            ),
        }
    }
}

/// A tenant's limits. A limit that is not set has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The values that were set, indexed by limit.
    values: [Option<u64>; Limit::ALL.len()],
}

/// A limit of a tenant, formatted for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownLimit {
    /// The limit's name.
    pub name: &'static str,
    /// The tenant's value with its unit. `None` means unlimited.
    pub value: Option<String>,
    /// The default.
    pub default: Option<String>,
    /// A description.
    pub description: &'static str,
}

impl Limits {
    /// The value in force. `None` means unlimited.
    pub fn get(&self, limit: Limit) -> Option<u64> {
        self.values[limit as usize].or(limit.default_value())
    }

    /// Sets a limit. `None` resets it to its default.
    pub fn set(&mut self, limit: Limit, value: Option<u64>) {
        self.values[limit as usize] = value;
    }

    /// The limits that were set.
    pub(crate) fn iter_set(&self) -> impl Iterator<Item = (Limit, u64)> + '_ {
        Limit::ALL.into_iter().filter_map(|limit| Some((limit, self.values[limit as usize]?)))
    }

    /// All limits, formatted for display.
    pub fn shown(&self) -> impl Iterator<Item = ShownLimit> + '_ {
        Limit::ALL.into_iter().map(|limit| ShownLimit {
            name: limit.name(),
            value: self.get(limit).map(|value| limit.unit().write(value)),
            default: limit.default_value().map(|value| limit.unit().write(value)),
            description: limit.description(),
        })
    }
}

/// The stored value of "unlimited". It is outside of every limit's range.
const UNLIMITED: u64 = u64::MAX;

/// The current limits of a tenant. Can be read from any thread.
#[derive(Debug)]
pub struct LiveLimits {
    values: [AtomicU64; Limit::ALL.len()],
    generation: AtomicU64,
}

impl LiveLimits {
    /// Live limits with these initial values.
    pub fn new(limits: &Limits) -> LiveLimits {
        let live = LiveLimits {
            values: [const { AtomicU64::new(UNLIMITED) }; Limit::ALL.len()],
            generation: AtomicU64::new(0),
        };
        live.store(limits);
        live
    }

    /// The current value. `None` means unlimited.
    pub fn get(&self, limit: Limit) -> Option<u64> {
        Some(self.values[limit as usize].load(Ordering::Relaxed)).filter(|value| *value != UNLIMITED)
    }

    /// Changes with every change of the limits. A caller that caches values derived from the limits
    /// compares this number first.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Replaces the limits. A concurrent reader may see some old and some new values. The
    /// generation changes last, so the reader then reads them again.
    pub(crate) fn store(&self, limits: &Limits) {
        for limit in Limit::ALL {
            self.values[limit as usize].store(limits.get(limit).unwrap_or(UNLIMITED), Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_order_and_limits_are_found_by_name() {
        for (limit, definition) in Limit::ALL.into_iter().zip(&LIMITS) {
            assert_eq!(definition.limit, limit);
            assert_eq!(Limit::find(definition.name), Ok(limit));
            assert!(definition.default.is_none_or(|value| limit.allows(value)) && !limit.allows(UNLIMITED));
        }
        assert!(Limit::find("work_mem").unwrap_err().remedy().contains("max_size"));
    }

    #[test]
    fn values_are_parsed_and_checked() {
        assert_eq!(Limit::MaxSize.parse("1GB"), Ok(Some(1 << 20)));
        assert_eq!(Limit::StatementTimeout.parse("5s"), Ok(Some(5000)));
        assert_eq!(Limit::StatementTimeout.parse("0"), Ok(None));
        assert_eq!(Limit::MaxConnections.parse("0"), Ok(Some(0)));
        assert_eq!(Limit::Retention.parse("0"), Ok(Some(0)));
        assert_eq!(Limit::Retention.parse("7d"), Ok(Some(7 * DAY_MS)));
        for (limit, text) in [
            (Limit::MaxSize, "1023kB"),
            (Limit::TransactionMemory, "0"),
            (Limit::CpuShare, "0"),
            (Limit::CpuShare, "10001"),
            (Limit::MaxConnections, "-1"),
            (Limit::StatementTimeout, "25d"),
            (Limit::Retention, "367d"),
        ] {
            assert!(matches!(limit.parse(text), Err(MetaError::InvalidLimit { .. })), "{text}");
        }
    }

    #[test]
    fn unset_limit_has_its_default() {
        let mut limits = Limits::default();
        assert_eq!((limits.get(Limit::CpuShare), limits.get(Limit::MaxSize)), (Some(100), None));
        limits.set(Limit::CpuShare, Some(250));
        limits.set(Limit::MaxSize, Some(2048));
        let shown: Vec<ShownLimit> = limits.shown().filter(|shown| shown.value.is_some()).collect();
        let texts = |shown: &ShownLimit| (shown.name, shown.value.clone(), shown.default.clone());
        assert_eq!(texts(&shown[0]), ("max_size", Some("2MB".to_owned()), None));
        assert_eq!(texts(&shown[1]), ("cpu_share", Some("250".to_owned()), Some("100".to_owned())));
        assert_eq!(texts(&shown[2]), ("retention", Some("1d".to_owned()), Some("1d".to_owned())));
        limits.set(Limit::CpuShare, None);
        assert_eq!(limits.iter_set().collect::<Vec<_>>(), [(Limit::MaxSize, 2048)]);
    }
}

//! What a tenant may use: the table of its limits.
//!
//! [`Limit`] is the one list of them, with names, units and ranges; whoever sets, shows or enforces a limit asks here.
//! [`Limits`] are a tenant's own, as its record keeps them. [`LiveLimits`] are the same for those who serve the tenant:
//! there is one for each tenant, however often its record is read anew, and reading it takes no lock:
//!
//! ```text
//!   ALTER DATABASE ... SET  -->  record (durable)  -->  Catalog  -->  LiveLimits  <--  sessions, with each message
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{MetaError, Unit};

/// Something that a tenant's use of can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Sessions at once.
    MaxConnections,
    /// How long a statement may run.
    StatementTimeout,
    /// How long a client may be silent inside a transaction.
    IdleInTransactionTimeout,
    /// What a transaction may hold beside the database.
    TransactionMemory,
    /// How large the database may be.
    MaxSize,
    /// How much of the processors it gets when there is not enough for all.
    CpuShare,
    /// How far back it can be restored and branched.
    Retention,
    /// What others leave it of the memory for pages.
    CacheFloor,
    /// Temporary files of its sessions.
    TempFileLimit,
    /// The size of a value or row.
    MaxValueSize,
    /// The length of a pattern of LIKE or GLOB.
    MaxPatternLength,
    /// Parameters of a statement.
    MaxParameters,
}

/// What there is to say of a limit.
struct Definition {
    limit: Limit,
    name: &'static str,
    unit: Unit,
    least: u64,
    most: u64,
    /// `None`: without limit.
    default: Option<u64>,
    about: &'static str,
}

/// Sizes below this would keep a tenant from doing anything, and from mending that.
const LEAST_KILOBYTES: u64 = 1024;
/// Postgres's bound of times and counts, 2^31 - 1.
const MOST: u64 = i32::MAX as u64;
/// How long history is kept at most, and if nobody says another.
const YEAR_MS: u64 = 366 * DAY_MS;
const DAY_MS: u64 = 86_400_000;
/// The most that a partition's pages of 4 KiB can be numbered for.
const MOST_KILOBYTES: u64 = 4 * u32::MAX as u64;
/// SQLite's own limits, as the engine compiles and opens it.
const MOST_VALUE_KILOBYTES: u64 = 256 << 10;
const MOST_PATTERN_BYTES: u64 = 50_000;
const MOST_PARAMETERS: u64 = 32_766;

/// In the order of [`Limit`].
static LIMITS: [Definition; Limit::ALL.len()] = [
    Definition {
        limit: Limit::MaxConnections,
        name: "max_connections",
        unit: Unit::Count,
        least: 0,
        most: MOST,
        default: None,
        about: "Sessions at once. Superusers are counted, but not refused.",
    },
    Definition {
        limit: Limit::StatementTimeout,
        name: "statement_timeout",
        unit: Unit::Milliseconds,
        least: 1,
        most: MOST,
        default: None,
        about: "How long a statement may run: what sessions begin with, and the most that they can set.",
    },
    Definition {
        limit: Limit::IdleInTransactionTimeout,
        name: "idle_in_transaction_timeout",
        unit: Unit::Milliseconds,
        least: 1,
        most: MOST,
        default: None,
        about: "How long a client may be silent inside a transaction before its session is ended.",
    },
    Definition {
        limit: Limit::TransactionMemory,
        name: "transaction_memory",
        unit: Unit::Kilobytes,
        least: LEAST_KILOBYTES,
        most: MOST_KILOBYTES,
        default: None,
        about: "What a transaction's changed pages, journals and temporary data may take.",
    },
    Definition {
        limit: Limit::MaxSize,
        name: "max_size",
        unit: Unit::Kilobytes,
        least: LEAST_KILOBYTES,
        most: MOST_KILOBYTES,
        default: None,
        about: "How large the database may grow.",
    },
    Definition {
        limit: Limit::CpuShare,
        name: "cpu_share",
        unit: Unit::Count,
        least: 1,
        most: 10_000,
        default: Some(100),
        about: "The tenant's weight when there is not enough processor time for all.",
    },
    Definition {
        limit: Limit::Retention,
        name: "retention",
        unit: Unit::Milliseconds,
        least: 0,
        most: YEAR_MS,
        default: Some(DAY_MS),
        about: "How far back the database can be restored and branched. 0: nothing is kept for that.",
    },
    Definition {
        limit: Limit::CacheFloor,
        name: "cache_floor",
        unit: Unit::Kilobytes,
        least: LEAST_KILOBYTES,
        most: MOST_KILOBYTES,
        default: None,
        about: "Memory for its pages that other tenants do not take from it.",
    },
    Definition {
        limit: Limit::TempFileLimit,
        name: "temp_file_limit",
        unit: Unit::Kilobytes,
        least: LEAST_KILOBYTES,
        most: MOST_KILOBYTES,
        default: None,
        about: "Temporary files of all its sessions together: sorts, large transactions, results.",
    },
    Definition {
        limit: Limit::MaxValueSize,
        name: "max_value_size",
        unit: Unit::Kilobytes,
        least: LEAST_KILOBYTES,
        most: MOST_VALUE_KILOBYTES,
        default: None,
        about: "The size of a value or row. Never more than an eighth of the node's memory for statements.",
    },
    Definition {
        limit: Limit::MaxPatternLength,
        name: "max_pattern_length",
        unit: Unit::Count,
        least: 1,
        most: MOST_PATTERN_BYTES,
        default: Some(250),
        about: "Bytes of a pattern of LIKE or GLOB.",
    },
    Definition {
        limit: Limit::MaxParameters,
        name: "max_parameters",
        unit: Unit::Count,
        least: 1,
        most: MOST_PARAMETERS,
        default: Some(MOST_PARAMETERS),
        about: "Parameters of a statement.",
    },
];

impl Limit {
    /// All of them.
    pub const ALL: [Limit; 12] = [
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
    ];

    fn definition(self) -> &'static Definition {
        &LIMITS[self as usize]
    }

    /// The limit of that name, which is in lower case.
    pub fn find(name: &str) -> Result<Limit, MetaError> {
        let found = LIMITS.iter().find(|definition| definition.name == name);
        found.map(|definition| definition.limit).ok_or_else(|| MetaError::UnknownLimit {
            name: name.to_owned(),
            known: format!(
                "the limits are {}",
                LIMITS.each_ref().map(|definition| definition.name).join(", ")
            ),
        })
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// What a value counts.
    pub fn unit(self) -> Unit {
        self.definition().unit
    }

    /// What holds where nothing was set; `None` is no limit.
    pub fn default_value(self) -> Option<u64> {
        self.definition().default
    }

    /// What it does.
    pub fn about(self) -> &'static str {
        self.definition().about
    }

    /// The value that a text says. `None` takes the limit away: as in Postgres, 0 of a time is none, where it is no value.
    pub fn parse(self, text: &str) -> Result<Option<u64>, MetaError> {
        let value = self.unit().parse(text);
        if value == Some(0) && self.unit() == Unit::Milliseconds && !self.allows(0) {
            return Ok(None);
        }
        value.filter(|value| self.allows(*value)).map(Some).ok_or_else(|| self.refused(text))
    }

    /// Whether a number can be its value.
    pub(crate) fn allows(self, value: u64) -> bool {
        (self.definition().least..=self.definition().most).contains(&value)
    }

    fn refused(self, text: &str) -> MetaError {
        let Definition { name, unit, least, most, .. } = self.definition();
        MetaError::InvalidLimit {
            name,
            value: text.chars().take(100).collect(),
            rule: format!("it is {}, from {} to {}", unit.rule(), unit.write(*least), unit.write(*most)),
        }
    }
}

/// A tenant's limits. What was not set has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// What was set, by the number of its limit.
    values: [Option<u64>; Limit::ALL.len()],
}

/// A limit of a tenant as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownLimit {
    /// What it is called.
    pub name: &'static str,
    /// What holds for the tenant, with its unit; `None` is no limit.
    pub value: Option<String>,
    /// What would hold if nothing had been set.
    pub default: Option<String>,
    /// What it does.
    pub about: &'static str,
}

impl Limits {
    /// What holds; `None` is no limit.
    pub fn get(&self, limit: Limit) -> Option<u64> {
        self.values[limit as usize].or(limit.default_value())
    }

    /// Sets a limit; `None` is its default.
    pub fn set(&mut self, limit: Limit, value: Option<u64>) {
        self.values[limit as usize] = value;
    }

    /// Those that were set.
    pub(crate) fn own(&self) -> impl Iterator<Item = (Limit, u64)> + '_ {
        Limit::ALL.into_iter().filter_map(|limit| Some((limit, self.values[limit as usize]?)))
    }

    /// All limits, to be shown.
    pub fn shown(&self) -> impl Iterator<Item = ShownLimit> + '_ {
        Limit::ALL.into_iter().map(|limit| ShownLimit {
            name: limit.name(),
            value: self.get(limit).map(|value| limit.unit().write(value)),
            default: limit.default_value().map(|value| limit.unit().write(value)),
            about: limit.about(),
        })
    }
}

/// Where a limit does not hold. No limit's range reaches it.
const NONE: u64 = u64::MAX;

/// The limits of a tenant as they are now, to be read from any thread at any time.
#[derive(Debug)]
pub struct LiveLimits {
    values: [AtomicU64; Limit::ALL.len()],
    generation: AtomicU64,
}

impl LiveLimits {
    /// The limits as they are now.
    pub fn new(limits: &Limits) -> LiveLimits {
        let live = LiveLimits {
            values: [const { AtomicU64::new(NONE) }; Limit::ALL.len()],
            generation: AtomicU64::new(0),
        };
        live.store(limits);
        live
    }

    /// What holds now; `None` is no limit.
    pub fn get(&self, limit: Limit) -> Option<u64> {
        Some(self.values[limit as usize].load(Ordering::Relaxed)).filter(|value| *value != NONE)
    }

    /// Another number after each change. Who keeps something that was made of the limits looks at this first.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Who reads while this writes may see some limits of old and some new ones; the generation, which changes last, has it
    /// read again.
    pub(crate) fn store(&self, limits: &Limits) {
        for limit in Limit::ALL {
            self.values[limit as usize].store(limits.get(limit).unwrap_or(NONE), Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_its_names_are_found() {
        for (limit, definition) in Limit::ALL.into_iter().zip(&LIMITS) {
            assert_eq!(definition.limit, limit);
            assert_eq!(Limit::find(definition.name), Ok(limit));
            assert!(definition.default.is_none_or(|value| limit.allows(value)) && !limit.allows(NONE));
        }
        assert!(Limit::find("work_mem").unwrap_err().remedy().contains("max_size"));
    }

    #[test]
    fn values_are_checked() {
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
    fn what_was_not_set_has_its_default() {
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
        assert_eq!(limits.own().collect::<Vec<_>>(), [(Limit::MaxSize, 2048)]);
    }
}

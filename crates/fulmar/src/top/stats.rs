//! Statistics of tenants: samples of the node's counters, and the rates between two samples.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;
use tokio_postgres::Row;

use crate::cli::Sort;
use crate::client::from_row;

/// The query of a sample.
pub const COUNTERS: &str = "SELECT tenant AS name, sessions, statements, busy_ms, commits, conflicts, errors, p99_ms, \
                            size_bytes, memory_bytes FROM fulmar.tenant_stats";

/// The five longest-running statements and open transactions, except those of this session. The
/// time is never negative, although a statement may begin after `now` was taken.
pub const RUNNING: &str = "\
    SELECT datname AS tenant, usename AS \"user\", pid, state, query, \
        CAST(max(0, coalesce((julianday('now') - julianday(since)) * 86400, 0)) AS REAL) AS seconds \
    FROM (SELECT *, CASE state WHEN 'active' THEN state_change ELSE xact_start END AS since FROM pg_stat_activity) \
    WHERE state <> 'idle' AND pid <> pg_backend_pid() ORDER BY since LIMIT 5";

/// The counters of a tenant.
pub struct Counters {
    name: String,
    sessions: i64,
    statements: i64,
    busy_ms: f64,
    commits: i64,
    conflicts: i64,
    errors: i64,
    p99_ms: f64,
    size_bytes: Option<i64>,
    memory_bytes: Option<i64>,
}

impl Counters {
    /// Decodes a row of [`COUNTERS`].
    pub fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(from_row!(row => Self {
            name, sessions, statements, busy_ms, commits, conflicts, errors, p99_ms, size_bytes, memory_bytes
        }))
    }
}

/// A sample of the counters of all tenants.
pub struct CounterSample {
    pub at: Instant,
    pub tenants: Vec<Counters>,
}

/// A session with a running statement or an open transaction.
#[derive(Debug, PartialEq, Serialize)]
pub struct Running {
    pub tenant: String,
    pub user: String,
    pub pid: i32,
    pub state: String,
    pub seconds: f64,
    pub query: String,
}

impl Running {
    /// Decodes a row of [`RUNNING`].
    pub fn read(row: &Row) -> Result<Self, tokio_postgres::Error> {
        Ok(from_row!(row => Self { tenant, user, pid, state, seconds, query }))
    }
}

/// Statistics of a tenant, or of all tenants, in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TenantStats {
    pub sessions: i64,
    pub statements_per_second: f64,
    /// CPU time in percent of one CPU: 200 is two CPUs.
    pub busy_percent: f64,
    pub commits_per_second: f64,
    pub conflicts_per_second: f64,
    pub errors_per_second: f64,
    /// `None` if the tenant is not open.
    pub size_bytes: Option<i64>,
    pub memory_bytes: Option<i64>,
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tenant {
    #[serde(rename = "tenant")]
    pub name: String,
    #[serde(flatten)]
    pub stats: TenantStats,
    /// Since the node started.
    pub p99_ms: f64,
}

/// Statistics between two samples.
#[derive(Debug, PartialEq, Serialize)]
pub struct Interval {
    pub seconds: f64,
    /// The sum over all tenants, including those not shown.
    pub total: TenantStats,
    pub tenants: Vec<Tenant>,
    /// The longest-running statements and transactions.
    pub running: Vec<Running>,
}

impl Interval {
    /// Computes the statistics of tenants that are in both samples, with counters that have not
    /// been reset. Other tenants have no known rates. A tenant renamed in between counts as another
    /// one.
    pub fn between(before: &CounterSample, now: &CounterSample, running: Vec<Running>) -> Self {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(f64::EPSILON);
        let known: HashMap<&str, &Counters> =
            before.tenants.iter().map(|counters| (counters.name.as_str(), counters)).collect();
        let tenants: Vec<Tenant> = now
            .tenants
            .iter()
            .filter_map(|now| {
                let before =
                    known.get(now.name.as_str()).filter(|before| before.statements <= now.statements)?;
                Some(Tenant::between(before, now, seconds))
            })
            .collect();
        let total = tenants.iter().fold(TenantStats::default(), |total, tenant| total.plus(&tenant.stats));
        Self { seconds, total, tenants, running }
    }

    /// Sorts the tenants: numbers in descending order, names in ascending order.
    pub fn sort(&mut self, by: Sort) {
        self.tenants.sort_by(|a, b| {
            let order = match by {
                Sort::Tenant => Ordering::Equal,
                by => b.sort_value(by).total_cmp(&a.sort_value(by)),
            };
            order.then_with(|| a.name.cmp(&b.name))
        });
    }
}

impl Tenant {
    fn between(before: &Counters, now: &Counters, seconds: f64) -> Self {
        let rate = |before: i64, now: i64| now.saturating_sub(before).max(0) as f64 / seconds;
        let stats = TenantStats {
            sessions: now.sessions,
            statements_per_second: rate(before.statements, now.statements),
            busy_percent: (now.busy_ms - before.busy_ms).max(0.0) / (seconds * 10.0),
            commits_per_second: rate(before.commits, now.commits),
            conflicts_per_second: rate(before.conflicts, now.conflicts),
            errors_per_second: rate(before.errors, now.errors),
            size_bytes: now.size_bytes,
            memory_bytes: now.memory_bytes,
        };
        Self { name: now.name.clone(), stats, p99_ms: now.p99_ms }
    }

    /// Returns the value of a sort column.
    fn sort_value(&self, by: Sort) -> f64 {
        let stats = &self.stats;
        match by {
            Sort::Tenant => 0.0,
            Sort::Sessions => stats.sessions as f64,
            Sort::Statements => stats.statements_per_second,
            Sort::Busy => stats.busy_percent,
            Sort::Commits => stats.commits_per_second,
            Sort::Conflicts => stats.conflicts_per_second,
            Sort::Errors => stats.errors_per_second,
            Sort::P99 => self.p99_ms,
            Sort::Size => stats.size_bytes.unwrap_or(-1) as f64,
            Sort::Memory => stats.memory_bytes.unwrap_or(-1) as f64,
        }
    }
}

impl TenantStats {
    fn plus(&self, other: &Self) -> Self {
        let sum = |a: Option<i64>, b: Option<i64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (known, None) | (None, known) => known,
        };
        Self {
            sessions: self.sessions.saturating_add(other.sessions),
            statements_per_second: self.statements_per_second + other.statements_per_second,
            busy_percent: self.busy_percent + other.busy_percent,
            commits_per_second: self.commits_per_second + other.commits_per_second,
            conflicts_per_second: self.conflicts_per_second + other.conflicts_per_second,
            errors_per_second: self.errors_per_second + other.errors_per_second,
            size_bytes: sum(self.size_bytes, other.size_bytes),
            memory_bytes: sum(self.memory_bytes, other.memory_bytes),
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use super::*;

    fn counters(name: &str, statements: i64, busy_ms: f64) -> Counters {
        Counters {
            name: name.to_owned(),
            sessions: 1,
            statements,
            busy_ms,
            commits: statements / 2,
            conflicts: 0,
            errors: 1,
            p99_ms: 0.5,
            size_bytes: (statements > 0).then_some(8192),
            memory_bytes: None,
        }
    }

    /// An interval of 2 s with two tenants in both samples.
    pub fn interval() -> Interval {
        let at = Instant::now();
        let before = vec![counters("a", 0, 0.0), counters("b", 100, 50.0), counters("again", 9, 9.0)];
        let tenants = vec![
            counters("a", 10, 100.0),
            counters("b", 120, 3050.0),
            counters("again", 8, 8.0),
            counters("new", 7, 7.0),
        ];
        let now = CounterSample { at: at + Duration::from_secs(2), tenants };
        Interval::between(&CounterSample { at, tenants: before }, &now, Vec::new())
    }

    fn names(interval: &Interval) -> Vec<&str> {
        interval.tenants.iter().map(|tenant| tenant.name.as_str()).collect()
    }

    #[test]
    fn two_samples_give_rates_and_totals() {
        let mut interval = interval();
        assert_eq!(names(&interval), ["a", "b"], "only tenants in both samples, without a reset");
        let b = &interval.tenants[1].stats;
        assert_eq!((b.statements_per_second, b.busy_percent, b.commits_per_second), (10.0, 150.0, 5.0));
        assert_eq!((b.errors_per_second, b.size_bytes, b.memory_bytes), (0.0, Some(8192), None));
        let total = &interval.total;
        assert_eq!((total.statements_per_second, total.busy_percent, total.sessions), (15.0, 155.0, 2));
        assert_eq!((total.size_bytes, total.memory_bytes), (Some(16384), None));
        interval.sort(Sort::Busy);
        assert_eq!(names(&interval), ["b", "a"]);
        interval.sort(Sort::Size);
        assert_eq!(names(&interval), ["a", "b"], "equal values are sorted by name");
    }
}

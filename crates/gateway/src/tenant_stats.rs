//! Statistics of each tenant at the gateway: statements, execution times, rows, errors; and those
//! of its statements ([`crate::statement_stats`]).
//!
//! Counters belong to a partition, like those of the engine; a tenant has one partition. They exist
//! from its first session on, and outlive its sessions. All workers update the same counters, with
//! a few relaxed additions per statement.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::PartitionId;
use parking_lot::Mutex;

use crate::histogram::{BUCKETS, bucket, bucket_bound_us};
use crate::statement_stats::{
    Execution, SlowStatements, StatementReport, StatementTable, StatementText, StatementTexts,
};

/// The weight of a new sample in the smoothed time is 1/8.
const SMOOTHING_SHIFT: u32 = 3;

/// The counters of a tenant.
#[derive(Default)]
pub(crate) struct TenantStats {
    reads: AtomicU64,
    writes: AtomicU64,
    rows: AtomicU64,
    errors: AtomicU64,
    time_us: AtomicU64,
    smoothed_us: AtomicU64,
    /// In nanoseconds: busy periods of a worker are often a few microseconds, and truncation errors
    /// would add up.
    busy_ns: AtomicU64,
    buckets: [AtomicU64; BUCKETS + 1],
    /// The statistics of its statements.
    statements: StatementTable,
    /// The values at the end of the last window in which it was used.
    pub(crate) reported: Mutex<Reported>,
}

/// The values of the counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TenantCounts {
    pub(crate) statements: u64,
    /// The statements that read data, and those that may have changed data.
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) rows: u64,
    pub(crate) errors: u64,
    /// Total execution time.
    pub(crate) time_us: u64,
    /// Smoothed execution time of recent statements.
    pub(crate) smoothed_us: u64,
    /// Total time for which its sessions kept workers busy.
    pub(crate) busy_us: u64,
    /// Statements by execution time, in the buckets bounded by [`bucket_bound_us`].
    pub(crate) buckets: [u64; BUCKETS + 1],
}

/// The values of the counters at an earlier time, to compute what was counted since. A third of the
/// size of [`TenantCounts`], because a node keeps them for all tenants: the counts are modulo 2^32,
/// which is more than a tenant does between two reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlierCounts {
    busy_us: u64,
    reads: u32,
    writes: u32,
    rows: u32,
    errors: u32,
    time_us: u32,
    buckets: [u32; BUCKETS + 1],
}

/// The values of which the load monitor reports differences. They are here because a tenant that is
/// not used takes least memory in one allocation.
#[derive(Default)]
pub(crate) struct Reported {
    pub(crate) gateway: EarlierCounts,
    pub(crate) log_bytes: u64,
    pub(crate) page_misses: u64,
}

/// How a statement accesses the tenant's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataAccess {
    /// No access: it controls a session or transaction.
    None,
    Read,
    /// It may change data.
    Write,
}

impl TenantStats {
    /// Records an executed statement.
    pub(crate) fn record_statement(&self, access: DataAccess, time: Duration, rows: u64) {
        let time_us = time.as_micros() as u64;
        match access {
            DataAccess::None => (),
            DataAccess::Read => add(&self.reads, 1),
            DataAccess::Write => add(&self.writes, 1),
        }
        add(&self.time_us, time_us);
        add(&self.buckets[bucket(time_us)], 1);
        if rows > 0 {
            add(&self.rows, rows);
        }
        // If two workers update this concurrently, one sample is lost. The value is smoothed, so
        // that does not matter.
        let before = self.smoothed_us.load(Ordering::Relaxed);
        let after = if before == 0 {
            time_us
        } else {
            before - (before >> SMOOTHING_SHIFT) + (time_us >> SMOOTHING_SHIFT)
        };
        self.smoothed_us.store(after, Ordering::Relaxed);
    }

    /// Records an error sent to a client.
    pub(crate) fn record_error(&self) {
        add(&self.errors, 1);
    }

    /// Records time for which a session kept a worker busy.
    pub(crate) fn record_busy_time(&self, time: Duration) {
        add(&self.busy_ns, time.as_nanos() as u64);
    }

    /// The current values.
    pub(crate) fn counts(&self) -> TenantCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let buckets = self.buckets.each_ref().map(load);
        TenantCounts {
            statements: buckets.iter().sum(),
            reads: load(&self.reads),
            writes: load(&self.writes),
            rows: load(&self.rows),
            errors: load(&self.errors),
            time_us: load(&self.time_us),
            smoothed_us: load(&self.smoothed_us),
            busy_us: load(&self.busy_ns) / 1000,
            buckets,
        }
    }
}

impl TenantCounts {
    /// These values, for [`TenantCounts::since`].
    pub(crate) fn to_earlier(&self) -> EarlierCounts {
        EarlierCounts {
            busy_us: self.busy_us,
            reads: self.reads as u32,
            writes: self.writes as u32,
            rows: self.rows as u32,
            errors: self.errors as u32,
            time_us: self.time_us as u32,
            buckets: self.buckets.map(|count| count as u32),
        }
    }

    /// What was counted since `earlier`. The smoothed time is the current one.
    pub(crate) fn since(&self, earlier: &EarlierCounts) -> TenantCounts {
        let difference = |now: u64, earlier: u32| u64::from((now as u32).wrapping_sub(earlier));
        let mut buckets = self.buckets;
        for (bucket, earlier) in buckets.iter_mut().zip(earlier.buckets) {
            *bucket = difference(*bucket, earlier);
        }
        TenantCounts {
            statements: buckets.iter().sum(),
            reads: difference(self.reads, earlier.reads),
            writes: difference(self.writes, earlier.writes),
            rows: difference(self.rows, earlier.rows),
            errors: difference(self.errors, earlier.errors),
            time_us: difference(self.time_us, earlier.time_us),
            smoothed_us: self.smoothed_us,
            busy_us: self.busy_us.saturating_sub(earlier.busy_us),
            buckets,
        }
    }

    /// An upper bound of the execution time of this percentage of the statements: the bound of the
    /// bucket that contains the quantile.
    pub(crate) fn quantile_us(&self, percent: u64) -> u64 {
        let wanted = (self.statements * percent).div_ceil(100);
        let mut below = 0;
        let bucket_index = self.buckets.iter().position(|count| {
            below += count;
            below >= wanted
        });
        if wanted == 0 { 0 } else { bucket_index.map_or(0, bucket_bound_us) }
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// The counters of all tenants that have had a session.
#[derive(Default)]
pub(crate) struct TenantStatsRegistry {
    tenants: Mutex<HashMap<PartitionId, Arc<TenantStats>>>,
    /// The texts of all tenants' statements.
    pub(crate) texts: Arc<StatementTexts>,
    /// The newest slow statements of all tenants.
    pub(crate) slow: SlowStatements,
    /// How often statements of all tenants were evicted.
    evictions: AtomicU64,
}

impl TenantStatsRegistry {
    /// The counters of a tenant, for one of its sessions.
    pub(crate) fn of(&self, tenant: PartitionId) -> Arc<TenantStats> {
        let create = || {
            let statements = StatementTable::new(self.texts.clone());
            Arc::new(TenantStats { statements, ..TenantStats::default() })
        };
        self.tenants.lock().entry(tenant).or_insert_with(create).clone()
    }

    /// The values of a tenant's counters. `None` if it has had no session.
    pub(crate) fn counts(&self, tenant: PartitionId) -> Option<TenantCounts> {
        self.get(tenant).map(|stats| stats.counts())
    }

    /// The counters of a tenant. `None` if it has had no session.
    pub(crate) fn get(&self, tenant: PartitionId) -> Option<Arc<TenantStats>> {
        self.tenants.lock().get(&tenant).cloned()
    }

    /// The tenants whose sessions have used a worker since they were last reported.
    pub(crate) fn used(&self) -> Vec<PartitionId> {
        let is_used = |stats: &TenantStats| {
            stats.busy_ns.load(Ordering::Relaxed) / 1000 != stats.reported.lock().gateway.busy_us
        };
        let tenants = self.tenants.lock();
        tenants.iter().filter(|(_, stats)| is_used(stats)).map(|(tenant, _)| *tenant).collect()
    }

    /// The `count` tenants that have kept workers busy longest.
    pub(crate) fn busiest(&self, count: usize) -> HashMap<PartitionId, TenantCounts> {
        let busy_ns = |stats: &Arc<TenantStats>| stats.busy_ns.load(Ordering::Relaxed);
        let mut all: Vec<(u64, PartitionId, Arc<TenantStats>)> = self
            .tenants
            .lock()
            .iter()
            .map(|(tenant, stats)| (busy_ns(stats), *tenant, stats.clone()))
            .collect();
        all.sort_unstable_by_key(|(busy_ns, tenant, _)| (Reverse(*busy_ns), *tenant));
        all.iter().take(count).map(|(_, tenant, stats)| (*tenant, stats.counts())).collect()
    }

    /// Removes a tenant that has been dropped.
    pub(crate) fn forget(&self, tenant: PartitionId) {
        self.tenants.lock().remove(&tenant);
        self.slow.forget(tenant.0);
    }

    /// Counts an execution of a tenant's statement. If the statements of all tenants take too much
    /// memory, evicts a share of the least used ones of each tenant.
    pub(crate) fn count_statement(
        &self,
        tenant: &TenantStats,
        text: &Arc<StatementText>,
        execution: Execution,
    ) {
        if !tenant.statements.add(text, execution) {
            return;
        }
        while self.texts.is_full() {
            // Tenants with few statements take turns.
            let turn = self.evictions.fetch_add(1, Ordering::Relaxed);
            let all: Vec<(PartitionId, Arc<TenantStats>)> =
                self.tenants.lock().iter().map(|(id, stats)| (*id, stats.clone())).collect();
            all.iter().for_each(|(id, stats)| stats.statements.evict(turn.wrapping_add(id.0)));
        }
    }

    /// The statistics of the statements of these partitions; of all without.
    pub(crate) fn statement_report(&self, partitions: Option<&[u64]>) -> StatementReport {
        let is_wanted = |partition: u64| partitions.is_none_or(|wanted| wanted.contains(&partition));
        let tenants: Vec<(PartitionId, Arc<TenantStats>)> = {
            let all = self.tenants.lock();
            let wanted = all.iter().filter(|(partition, _)| is_wanted(partition.0));
            wanted.map(|(partition, stats)| (*partition, stats.clone())).collect()
        };
        let statements = tenants.iter().flat_map(|(partition, stats)| stats.statements.counts(partition.0));
        StatementReport { statements: statements.collect(), slow: self.slow.list(is_wanted) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXECUTION: Execution = Execution { time: Duration::from_micros(20), rows: 1, has_failed: false };

    #[test]
    fn quantiles_are_upper_bounds() {
        let stats = TenantStats::default();
        assert_eq!(stats.counts(), TenantCounts::default());
        for _ in 0..99 {
            stats.record_statement(DataAccess::Read, Duration::from_micros(20), 1);
        }
        stats.record_statement(DataAccess::Write, Duration::from_millis(10), 0);
        let counts = stats.counts();
        assert_eq!((counts.statements, counts.reads, counts.writes, counts.rows), (100, 99, 1, 99));
        assert_eq!([50, 99, 100].map(|percent| counts.quantile_us(percent)), [32, 32, 16_384]);
        stats.record_statement(DataAccess::None, Duration::from_millis(10), 0);
        let counts = stats.counts();
        assert_eq!((counts.statements, counts.reads + counts.writes), (101, 100));
        assert_eq!(counts.quantile_us(99), 16_384);
    }

    #[test]
    fn differences_count_a_window() {
        let stats = TenantStats::default();
        stats.record_statement(DataAccess::Read, Duration::from_millis(10), 1);
        stats.record_busy_time(Duration::from_millis(2));
        let earlier = stats.counts();
        assert_eq!(earlier.since(&EarlierCounts::default()), earlier);
        let earlier = earlier.to_earlier();
        stats.record_statement(DataAccess::Write, Duration::from_micros(20), 3);
        stats.record_busy_time(Duration::from_millis(3));
        stats.record_error();
        let window = stats.counts().since(&earlier);
        assert_eq!((window.statements, window.reads, window.writes, window.rows), (1, 0, 1, 3));
        assert_eq!((window.errors, window.busy_us, window.quantile_us(99)), (1, 3000, 32));
        assert_eq!(window.smoothed_us, stats.counts().smoothed_us);

        // A counter passes 2^32.
        let at = |reads: u64| TenantCounts { reads, ..TenantCounts::default() };
        assert_eq!(at((1 << 32) + 5).since(&at((1 << 32) - 2).to_earlier()).reads, 7);
    }

    #[test]
    fn statements_of_all_tenants_are_bounded() {
        let tenants = TenantStatsRegistry::default();
        let column = "c".repeat(500);
        for tenant in 1..=100 {
            let stats = tenants.of(PartitionId(tenant));
            for number in 0..300 {
                let text = tenants.texts.get(&format!("SELECT {column}{tenant}_{number}"));
                tenants.count_statement(&stats, &text, EXECUTION);
                assert!(!tenants.texts.is_full());
            }
        }
        let report = tenants.statement_report(None);
        assert!(report.statements.iter().any(|counts| counts.partition == 1), "all tenants keep some");
        let of_one = tenants.statement_report(Some(&[7])).statements;
        assert!(!of_one.is_empty() && of_one.iter().all(|counts| counts.partition == 7));
        tenants.forget(PartitionId(7));
        assert!(tenants.statement_report(Some(&[7])).statements.is_empty());
    }

    #[test]
    fn statistics_of_tenants_with_one_statement_are_not_all_evicted() {
        let tenants = TenantStatsRegistry::default();
        let column = "c".repeat(2000);
        for id in 1..=10_000 {
            let stats = tenants.of(PartitionId(id));
            tenants.count_statement(&stats, &tenants.texts.get(&format!("SELECT {column}{id}")), EXECUTION);
            assert!(!tenants.texts.is_full());
        }
        let kept = tenants.statement_report(None).statements;
        let newest = kept.iter().filter(|counts| counts.partition > 9000).count();
        assert!(newest > 500 && kept.len() > 3000, "{newest} of the newest 1,000, {} of all", kept.len());
    }

    #[test]
    fn returns_the_busiest_tenants() {
        let tenants = TenantStatsRegistry::default();
        for id in 1..=5 {
            tenants.of(PartitionId(id)).record_busy_time(Duration::from_micros(id % 4));
        }
        let busiest = tenants.busiest(3);
        assert_eq!(busiest.len(), 3);
        assert_eq!([3, 2, 1].map(|id| busiest[&PartitionId(id)].busy_us), [3, 2, 1]);
    }
}

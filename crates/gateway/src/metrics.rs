//! Metrics in the Prometheus text format.
//!
//! Each worker has its own counters, which only its thread writes. An increment is therefore a load
//! and a store, without an atomic read-modify-write instruction and without contention for the
//! cache line. A scrape sums the counters of all workers.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{BesideStatistics, EngineStatistics};
use fulmar_store::{DiskCacheStatistics, FailureKind, OperationStatistics, time_bucket_us};

use crate::crowd::Count;
use crate::memory::Usage;
use crate::tenants::TenantCounts;

/// Number of finite histogram buckets for statement times. The first bound is 16 us, and each
/// further one is twice the previous.
pub(crate) const BUCKETS: usize = 21;
const FIRST_BUCKET_US: u64 = 16;

/// Maximum number of tenants with metrics of their own: the busiest ones. A node has thousands of
/// tenants, and each label value creates new time series.
pub(crate) const TENANTS: usize = 20;

/// A counter that a single thread writes.
#[derive(Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters of a worker.
#[derive(Default)]
pub(crate) struct WorkerMetrics {
    statements: Counter,
    statement_us: Counter,
    buckets: [Counter; BUCKETS + 1],
    rows: Counter,
    errors: Counter,
    received_bytes: Counter,
    sent_bytes: Counter,
    sessions: Counter,
    moved: Counter,
}

impl WorkerMetrics {
    /// Records an executed statement.
    pub(crate) fn ran(&self, time: Duration, rows: u64) {
        let time_us = time.as_micros() as u64;
        self.statements.add(1);
        self.statement_us.add(time_us);
        self.buckets[bucket(time_us)].add(1);
        self.rows.add(rows);
    }

    /// Records an error sent to a client.
    pub(crate) fn failed(&self) {
        self.errors.add(1);
    }

    /// Records bytes received from a client.
    pub(crate) fn received(&self, bytes: usize) {
        self.received_bytes.add(bytes as u64);
    }

    /// Records bytes sent to a client.
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent_bytes.add(bytes as u64);
    }

    /// Records a session that was moved here from another worker.
    pub(crate) fn moved(&self) {
        self.moved.add(1);
    }

    /// Records a new session.
    pub(crate) fn connected(&self) {
        self.sessions.add(1);
    }
}

/// The current connections.
pub(crate) struct Connections {
    pub(crate) sessions: usize,
    /// Connections that are not authenticated yet.
    pub(crate) logins: Count,
    /// Memory charged by the sessions.
    pub(crate) memory: Usage,
}

/// The metrics of a tenant.
pub(crate) struct TenantFigures {
    pub(crate) name: String,
    pub(crate) counts: TenantCounts,
    pub(crate) commits: u64,
    pub(crate) sessions: u64,
    /// Memory charged by its sessions.
    pub(crate) session_memory_bytes: u64,
}

/// The first bucket whose upper bound is at least `time_us`.
pub(crate) fn bucket(time_us: u64) -> usize {
    let units = time_us.div_ceil(FIRST_BUCKET_US).max(1);
    ((units - 1).checked_ilog2().map_or(0, |log| log + 1) as usize).min(BUCKETS)
}

/// The upper bound of a bucket in microseconds.
pub(crate) fn bucket_bound_us(bucket: usize) -> u64 {
    FIRST_BUCKET_US << bucket
}

/// Renders all metrics of a node in the Prometheus text format.
pub(crate) fn render(
    workers: &[Arc<WorkerMetrics>],
    workers_active: usize,
    connections: Connections,
    engine: &EngineStatistics,
    replica: Option<&BesideStatistics>,
    store: &[OperationStatistics],
    tenants: &[TenantFigures],
) -> String {
    let mut out = String::new();
    let sum =
        |counter: fn(&WorkerMetrics) -> &Counter| workers.iter().map(|worker| counter(worker).get()).sum();
    let Connections { sessions, logins, memory } = connections;
    gauge(&mut out, "fulmar_sessions", "Open sessions.", sessions as u64);
    gauge(&mut out, "fulmar_logins", "Connections that are not authenticated yet.", logins.now as u64);
    let help = "Unauthenticated connections that were closed because of the connection limit.";
    counter(&mut out, "fulmar_logins_sent_away_total", help, logins.sent_away);
    session_memory_metrics(&mut out, memory);
    counter(
        &mut out,
        "fulmar_sessions_total",
        "Sessions opened since the start.",
        sum(|worker| &worker.sessions),
    );
    let active = workers_active as u64;
    gauge(
        &mut out,
        "fulmar_workers_active",
        "Worker threads that serve sessions; the number follows the load.",
        active,
    );
    let moved = sum(|worker| &worker.moved);
    counter(&mut out, "fulmar_sessions_moved_total", "Moves of a session to another worker thread.", moved);
    counter(&mut out, "fulmar_rows_total", "Rows sent to clients.", sum(|worker| &worker.rows));
    counter(&mut out, "fulmar_errors_total", "Errors sent to clients.", sum(|worker| &worker.errors));
    let (received, sent) = (sum(|worker| &worker.received_bytes), sum(|worker| &worker.sent_bytes));
    counter(&mut out, "fulmar_received_bytes_total", "Bytes received from clients.", received);
    counter(&mut out, "fulmar_sent_bytes_total", "Bytes sent to clients.", sent);
    statement_times(&mut out, workers);
    engine_metrics(&mut out, engine);
    if let Some(cache) = &engine.disk_cache {
        disk_cache_metrics(&mut out, cache);
    }
    if let Some(replica) = replica {
        replica_metrics(&mut out, replica);
    }
    store_metrics(&mut out, store);
    tenant_metrics(&mut out, tenants);
    out
}

/// Renders the metrics of one tenant, for clients with that tenant's token.
pub(crate) fn render_tenant(tenant: Option<TenantFigures>) -> String {
    let mut out = String::new();
    tenant_metrics(&mut out, tenant.as_slice());
    out
}

fn session_memory_metrics(out: &mut String, memory: Usage) {
    gauge(
        out,
        "fulmar_session_memory_bytes",
        "Memory charged to sessions: messages, prepared statements, portals, unsent results.",
        memory.used_bytes,
    );
    let help = "The limit of fulmar_session_memory_bytes; half of it per database.";
    gauge(out, "fulmar_session_memory_limit_bytes", help, memory.limit_bytes);
    let help = "Requests that failed for lack of session memory.";
    counter(out, "fulmar_session_memory_rejections_total", help, memory.rejected);
}

fn statement_times(out: &mut String, workers: &[Arc<WorkerMetrics>]) {
    const NAME: &str = "fulmar_statement_seconds";
    header(out, NAME, "Execution time of statements.", "histogram");
    let mut total = 0;
    for index in 0..=BUCKETS {
        total += workers.iter().map(|worker| worker.buckets[index].get()).sum::<u64>();
        let bound_us = bucket_bound_us(index);
        let bound = if index == BUCKETS { "+Inf".to_owned() } else { (bound_us as f64 / 1e6).to_string() };
        line(out, format_args!("{NAME}_bucket{{le=\"{bound}\"}} {total}"));
    }
    let time_us: u64 = workers.iter().map(|worker| worker.statement_us.get()).sum();
    let statements: u64 = workers.iter().map(|worker| worker.statements.get()).sum();
    line(out, format_args!("{NAME}_sum {}", time_us as f64 / 1e6));
    line(out, format_args!("{NAME}_count {statements}"));
}

fn engine_metrics(out: &mut String, engine: &EngineStatistics) {
    let totals = [
        ("fulmar_log_bytes_total", "Bytes written to the commit log.", engine.log_bytes),
        ("fulmar_log_records_total", "Commit records in the log.", engine.records),
        ("fulmar_log_record_bytes_total", "Bytes of commit records.", engine.record_bytes),
        ("fulmar_log_pages_total", "Changed pages in commit records.", engine.record_pages),
        ("fulmar_log_syncs_total", "Fsyncs of the commit log.", engine.log_syncs),
        ("fulmar_log_failures_total", "Failed writes of the commit log.", engine.log_failures),
        (
            "fulmar_shared_log_bytes_total",
            "Bytes of objects written to the shared commit log.",
            engine.shared_log_bytes,
        ),
        ("fulmar_shared_log_puts_total", "Objects written to the shared commit log.", engine.shared_log_puts),
        (
            "fulmar_shared_log_failures_total",
            "Times that another process sealed the shared commit log.",
            engine.shared_log_failures,
        ),
        ("fulmar_commits_total", "Commits.", engine.commits),
        (
            "fulmar_conflicts_total",
            "Transactions that had read pages that were changed meanwhile.",
            engine.conflicts,
        ),
        ("fulmar_replays_total", "Transactions that were replayed.", engine.replays),
        ("fulmar_page_hits_total", "Pages that statements found in the page cache.", engine.page_hits),
        (
            "fulmar_page_misses_total",
            "Pages that statements read from the disk cache or the store.",
            engine.page_misses,
        ),
        (
            "fulmar_pages_read_ahead_total",
            "Pages that were read ahead of their use.",
            engine.pages_read_ahead,
        ),
        (
            "fulmar_pages_warmed_total",
            "Pages that were prewarmed when their database was opened.",
            engine.pages_warmed,
        ),
        ("fulmar_pages_evicted_total", "Pages evicted from the page cache.", engine.pages_evicted),
        ("fulmar_flushes_total", "Flushes of changed pages to the store.", engine.flushes),
        (
            "fulmar_temporary_files_total",
            "Temporary files of large transactions and sorts.",
            engine.temporary_files,
        ),
    ];
    for (name, help, value) in totals {
        counter(out, name, help, value);
    }
    let gauges = [
        ("fulmar_log_size_bytes", "Size of the commit log's files.", engine.log_size_bytes),
        ("fulmar_log_sync_microseconds", "Smoothed time of an fsync of the commit log.", engine.log_sync_us),
        (
            "fulmar_shared_log_size_bytes",
            "Size of the part of the shared commit log that is still needed.",
            engine.shared_log_size_bytes,
        ),
        (
            "fulmar_shared_log_backlog_objects",
            "Objects of the shared commit log that a start of the node would read.",
            engine.shared_log_backlog_objects,
        ),
        (
            "fulmar_shared_log_put_microseconds",
            "Smoothed time to write an object of the shared commit log.",
            engine.shared_log_put_us,
        ),
        (
            "fulmar_shared_log_refuses",
            "1 while the shared commit log accepts no commits.",
            engine.shared_log_refuses,
        ),
        ("fulmar_memory_bytes", "Size of the page cache.", engine.memory_bytes),
        (
            "fulmar_memory_unwritten_bytes",
            "Size of the cached pages that have not been flushed to the store.",
            engine.memory_unwritten_bytes,
        ),
        ("fulmar_memory_limit_bytes", "The limit of the page cache.", engine.memory_limit_bytes),
        ("fulmar_statement_memory_bytes", "Memory charged to statements.", engine.statement_bytes),
        (
            "fulmar_statement_memory_limit_bytes",
            "The limit of the memory charged to statements.",
            engine.statement_limit_bytes,
        ),
        ("fulmar_temporary_bytes", "Bytes charged for temporary files.", engine.temporary_bytes),
        (
            "fulmar_temporary_limit_bytes",
            "The limit of the bytes charged for temporary files.",
            engine.temporary_limit_bytes,
        ),
        (
            "fulmar_disk_available_bytes",
            "Space available in the file system of the data directory.",
            engine.disk_available_bytes,
        ),
        ("fulmar_disk_reserve_bytes", "Disk space that is kept free.", engine.disk_reserve_bytes),
        (
            "fulmar_disk_level",
            "0: enough space; 1: commits that need more space are rejected; 2: all commits are rejected.",
            engine.disk_level,
        ),
        ("fulmar_partitions_open", "Open partitions.", engine.open_partitions),
    ];
    for (name, help, value) in gauges {
        gauge(out, name, help, value);
    }
}

fn disk_cache_metrics(out: &mut String, cache: &DiskCacheStatistics) {
    let totals = [
        ("hits", "Pages and segment indexes found in the disk cache.", cache.hits),
        ("misses", "Pages and segment indexes that had to be read from the store.", cache.misses),
        ("written_bytes", "Bytes written to the disk cache.", cache.written_bytes),
        ("dropped", "Entries that were not cached: too many at a time, or no space.", cache.dropped),
        ("failures", "Failed reads and writes of the disk cache.", cache.failures),
    ];
    for (suffix, help, value) in totals {
        counter(out, &format!("fulmar_disk_cache_{suffix}_total"), help, value);
    }
    let gauges = [
        ("bytes", "Size of the disk cache's files.", cache.bytes),
        (
            "limit_bytes",
            "The limit of the disk cache: --disk-cache, or less if disk space is low.",
            cache.limit_bytes,
        ),
        ("entries", "Pages and segment indexes in the disk cache.", cache.entries),
    ];
    for (suffix, help, value) in gauges {
        gauge(out, &format!("fulmar_disk_cache_{suffix}"), help, value);
    }
}

/// Metrics of a read replica.
fn replica_metrics(out: &mut String, replica: &BesideStatistics) {
    counter(out, "fulmar_reader_looks_total", "Polls of the primary's log.", replica.looks);
    counter(
        out,
        "fulmar_reader_reopened_total",
        "Databases reopened after a restore, or because the primary had truncated its log.",
        replica.reopened,
    );
    gauge(
        out,
        "fulmar_reader_fails",
        "1 if the last poll of the primary's log failed.",
        u64::from(replica.fails),
    );
    if let Some(age_ms) = replica.age_ms {
        let help = "Time since the last poll of the primary's log; it grows while no session reads.";
        gauge(out, "fulmar_reader_age_milliseconds", help, age_ms);
    }
}

fn store_metrics(out: &mut String, store: &[OperationStatistics]) {
    const NAME: &str = "fulmar_store_seconds";
    header(out, NAME, "Duration of each attempt of a store operation.", "histogram");
    for one in store {
        let operation = one.operation.label();
        let mut total = 0;
        for (bucket, count) in one.durations.iter().enumerate() {
            total += count;
            let bound = time_bucket_us(bucket).map_or("+Inf".to_owned(), |us| (us as f64 / 1e6).to_string());
            line(out, format_args!("{NAME}_bucket{{operation=\"{operation}\",le=\"{bound}\"}} {total}"));
        }
        line(out, format_args!("{NAME}_sum{{operation=\"{operation}\"}} {}", one.time_us as f64 / 1e6));
        line(out, format_args!("{NAME}_count{{operation=\"{operation}\"}} {}", one.attempts));
    }
    type Value = fn(&OperationStatistics) -> u64;
    let totals: [(&str, &str, Value); 2] = [
        ("fulmar_store_retries_total", "Attempts after a failed one.", |one| one.retries),
        ("fulmar_store_bytes_total", "Bytes of objects written to or read from the store.", |one| one.bytes),
    ];
    for (name, help, value) in totals {
        header(out, name, help, "counter");
        for one in store {
            line(out, format_args!("{name}{{operation=\"{}\"}} {}", one.operation.label(), value(one)));
        }
    }
    const FAILURES: &str = "fulmar_store_failures_total";
    header(out, FAILURES, "Failed attempts.", "counter");
    for one in store {
        for (kind, count) in FailureKind::ALL.iter().zip(one.failures) {
            let (operation, kind) = (one.operation.label(), kind.label());
            line(out, format_args!("{FAILURES}{{operation=\"{operation}\",kind=\"{kind}\"}} {count}"));
        }
    }
}

fn tenant_metrics(out: &mut String, tenants: &[TenantFigures]) {
    type Value = fn(&TenantFigures) -> f64;
    let metrics: [(&str, &str, &str, Value); 6] = [
        ("statements_total", "counter", "Statements executed for the tenant.", |tenant| {
            tenant.counts.statements as f64
        }),
        (
            "busy_seconds_total",
            "counter",
            "Time for which the tenant's sessions kept workers busy.",
            |tenant| tenant.counts.busy_us as f64 / 1e6,
        ),
        ("errors_total", "counter", "Errors sent to clients of the tenant.", |tenant| {
            tenant.counts.errors as f64
        }),
        ("commits_total", "counter", "Commits of the tenant.", |tenant| tenant.commits as f64),
        ("sessions", "gauge", "Open sessions of the tenant.", |tenant| tenant.sessions as f64),
        ("session_memory_bytes", "gauge", "Memory charged to sessions of the tenant.", |tenant| {
            tenant.session_memory_bytes as f64
        }),
    ];
    for (suffix, kind, help, value) in metrics {
        let name = format!("fulmar_tenant_{suffix}");
        header(out, &name, help, kind);
        for tenant in tenants {
            line(out, format_args!("{name}{{tenant=\"{}\"}} {}", escape_label(&tenant.name), value(tenant)));
        }
    }
}

/// Escapes the value of a label.
fn escape_label(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn counter(out: &mut String, name: &str, help: &str, value: u64) {
    header(out, name, help, "counter");
    line(out, format_args!("{name} {value}"));
}

fn gauge(out: &mut String, name: &str, help: &str, value: u64) {
    header(out, name, help, "gauge");
    line(out, format_args!("{name} {value}"));
}

fn header(out: &mut String, name: &str, help: &str, kind: &str) {
    line(out, format_args!("# HELP {name} {help}"));
    line(out, format_args!("# TYPE {name} {kind}"));
}

fn line(out: &mut String, line: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{line}"); // writing to a String cannot fail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_match_their_bounds() {
        assert_eq!([0, 1, 16, 17, 32, 33, 64].map(bucket), [0, 0, 0, 1, 1, 2, 2]);
        assert_eq!(bucket(16 << 20), 20);
        assert_eq!(bucket((16 << 20) + 1), BUCKETS);
        assert_eq!(bucket(u64::MAX), BUCKETS);
    }

    fn connected(sessions: usize) -> Connections {
        let memory = Usage { used_bytes: 11, limit_bytes: 12, rejected: 13 };
        Connections { sessions, logins: Count { now: 3, sent_away: 0 }, memory }
    }

    #[test]
    fn render_sums_all_workers() {
        let workers: Vec<Arc<WorkerMetrics>> = (0..2).map(|_| Arc::default()).collect();
        workers[0].ran(Duration::from_micros(20), 3);
        workers[1].ran(Duration::from_secs(60), 4);
        let disk_cache = Some(DiskCacheStatistics { hits: 8, bytes: 9, ..DiskCacheStatistics::default() });
        let engine = EngineStatistics { log_bytes: 7, disk_cache, ..EngineStatistics::default() };
        let text = render(&workers, 2, connected(5), &engine, None, &[], &[]);
        for expected in [
            "fulmar_sessions 5\n",
            "fulmar_logins 3\n",
            "fulmar_session_memory_bytes 11\n",
            "fulmar_session_memory_limit_bytes 12\n",
            "fulmar_session_memory_rejections_total 13\n",
            "fulmar_rows_total 7\n",
            "fulmar_statement_seconds_bucket{le=\"0.000016\"} 0\n",
            "fulmar_statement_seconds_bucket{le=\"0.000032\"} 1\n",
            "fulmar_statement_seconds_bucket{le=\"+Inf\"} 2\n",
            "fulmar_statement_seconds_count 2\n",
            "fulmar_log_bytes_total 7\n",
            "# TYPE fulmar_disk_cache_hits_total counter\nfulmar_disk_cache_hits_total 8\n",
            "fulmar_disk_cache_bytes 9\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn manual_lists_exactly_the_existing_metrics() {
        let engine =
            EngineStatistics { disk_cache: Some(DiskCacheStatistics::default()), ..Default::default() };
        let replica = BesideStatistics { age_ms: Some(1), ..BesideStatistics::default() };
        let text = render(&[], 1, connected(0), &engine, Some(&replica), &[], &[]);
        let manual = include_str!("../../../docs/operations.md");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let missing: Vec<&str> =
            types.clone().filter(|name| !manual.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(types.count() > 60);
        // The manual must not list metrics that do not exist.
        let is_rendered = |name: &&str| text.contains(&format!("# TYPE {name} "));
        let documented = manual.split('`').filter(|word| word.starts_with("fulmar_") && !word.ends_with('_'));
        let names = documented.map(|word| word.split('{').next().unwrap_or_default());
        let unknown: Vec<&str> = names.filter(|name| !is_rendered(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn tenant_metrics_have_escaped_name_labels() {
        let counts = TenantCounts { statements: 3, busy_us: 2_500_000, errors: 1, ..TenantCounts::default() };
        let name = "a \"b\\\n".into();
        let shop = TenantFigures { name, counts, commits: 1 << 50, sessions: 4, session_memory_bytes: 5 };
        let text = render(&[], 1, connected(0), &EngineStatistics::default(), None, &[], &[shop]);
        for expected in [
            "# TYPE fulmar_tenant_statements_total counter\nfulmar_tenant_statements_total{tenant=\"a \\\"b\\\\\\n\"} 3\n",
            "fulmar_tenant_busy_seconds_total{tenant=\"a \\\"b\\\\\\n\"} 2.5\n",
            "fulmar_tenant_errors_total{tenant=\"a \\\"b\\\\\\n\"} 1\n",
            "fulmar_tenant_commits_total{tenant=\"a \\\"b\\\\\\n\"} 1125899906842624\n",
            "fulmar_tenant_sessions{tenant=\"a \\\"b\\\\\\n\"} 4\n",
            "fulmar_tenant_session_memory_bytes{tenant=\"a \\\"b\\\\\\n\"} 5\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }
}

//! Counters, for Prometheus.
//!
//! Each worker counts for itself: only its own thread writes its counters, so a count is a load and a store, without a
//! locked instruction and without a cache line that others want. A scrape adds them up.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{BesideStatistics, EngineStatistics};
use fulmar_store::{DiskCacheStatistics, FailureKind, OperationStatistics, time_bucket_us};

use crate::crowd::Count;
use crate::memory::Usage;
use crate::tenants::TenantCounts;

/// Upper bounds of the buckets for statement times: 16 us, doubled so often.
pub(crate) const BUCKETS: usize = 21;
const FIRST_BUCKET_US: u64 = 16;

/// Tenants that have figures of their own: the busiest. A node has thousands, and each name makes new time series.
pub(crate) const TENANTS: usize = 20;

/// A counter that one thread writes.
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

/// What one worker counts.
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
    /// A statement has been run.
    pub(crate) fn ran(&self, time: Duration, rows: u64) {
        let time_us = time.as_micros() as u64;
        self.statements.add(1);
        self.statement_us.add(time_us);
        self.buckets[bucket(time_us)].add(1);
        self.rows.add(rows);
    }

    /// A client was told of an error.
    pub(crate) fn failed(&self) {
        self.errors.add(1);
    }

    /// Bytes have come from a client.
    pub(crate) fn received(&self, bytes: usize) {
        self.received_bytes.add(bytes as u64);
    }

    /// Bytes go to a client.
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent_bytes.add(bytes as u64);
    }

    /// A session has come from another worker.
    pub(crate) fn moved(&self) {
        self.moved.add(1);
    }

    /// A client has connected.
    pub(crate) fn connected(&self) {
        self.sessions.add(1);
    }
}

/// Who is connected.
pub(crate) struct Connections {
    pub(crate) sessions: usize,
    /// Those that are no sessions yet.
    pub(crate) logins: Count,
    /// Memory that the sessions hold.
    pub(crate) memory: Usage,
}

/// What is told of one tenant.
pub(crate) struct TenantFigures {
    pub(crate) name: String,
    pub(crate) counts: TenantCounts,
    pub(crate) commits: u64,
    pub(crate) sessions: u64,
    /// Memory that its sessions hold.
    pub(crate) session_memory_bytes: u64,
}

/// The bucket whose upper bound is the first that is not below `time_us`.
pub(crate) fn bucket(time_us: u64) -> usize {
    let units = time_us.div_ceil(FIRST_BUCKET_US).max(1);
    ((units - 1).checked_ilog2().map_or(0, |log| log + 1) as usize).min(BUCKETS)
}

/// The upper bound of a bucket, microseconds.
pub(crate) fn bucket_bound_us(bucket: usize) -> u64 {
    FIRST_BUCKET_US << bucket
}

/// Writes all figures of a node in the Prometheus text format.
pub(crate) fn render(
    workers: &[Arc<WorkerMetrics>],
    workers_active: usize,
    connections: Connections,
    engine: &EngineStatistics,
    beside: Option<&BesideStatistics>,
    store: &[OperationStatistics],
    tenants: &[TenantFigures],
) -> String {
    let mut out = String::new();
    let sum =
        |counter: fn(&WorkerMetrics) -> &Counter| workers.iter().map(|worker| counter(worker).get()).sum();
    let Connections { sessions, logins, memory } = connections;
    gauge(&mut out, "fulmar_sessions", "Sessions that are open.", sessions as u64);
    gauge(&mut out, "fulmar_logins", "Connections that are no sessions yet.", logins.now as u64);
    let help = "Connections that were closed before they were sessions, to make room for others.";
    counter(&mut out, "fulmar_logins_sent_away_total", help, logins.sent_away);
    session_memory_figures(&mut out, memory);
    counter(&mut out, "fulmar_sessions_total", "Sessions since the start.", sum(|worker| &worker.sessions));
    let active = workers_active as u64;
    gauge(
        &mut out,
        "fulmar_workers_active",
        "Threads that sessions are kept on; as few as the load needs.",
        active,
    );
    let moved = sum(|worker| &worker.moved);
    counter(
        &mut out,
        "fulmar_sessions_moved_total",
        "Times that a session moved to another of these threads.",
        moved,
    );
    counter(&mut out, "fulmar_rows_total", "Rows sent to clients.", sum(|worker| &worker.rows));
    counter(
        &mut out,
        "fulmar_errors_total",
        "Errors that clients were told of.",
        sum(|worker| &worker.errors),
    );
    let (received, sent) = (sum(|worker| &worker.received_bytes), sum(|worker| &worker.sent_bytes));
    counter(&mut out, "fulmar_received_bytes_total", "Bytes from clients.", received);
    counter(&mut out, "fulmar_sent_bytes_total", "Bytes to clients.", sent);
    statement_times(&mut out, workers);
    engine_figures(&mut out, engine);
    if let Some(cache) = &engine.disk_cache {
        disk_cache_figures(&mut out, cache);
    }
    if let Some(beside) = beside {
        beside_figures(&mut out, beside);
    }
    store_figures(&mut out, store);
    tenant_figures(&mut out, tenants);
    out
}

/// The same of one tenant: what its own may see.
pub(crate) fn render_tenant(tenant: Option<TenantFigures>) -> String {
    let mut out = String::new();
    tenant_figures(&mut out, tenant.as_slice());
    out
}

fn session_memory_figures(out: &mut String, memory: Usage) {
    gauge(
        out,
        "fulmar_session_memory_bytes",
        "Bytes of messages, prepared statements, portals and unsent results that sessions hold.",
        memory.used_bytes,
    );
    let help = "The limit of fulmar_session_memory_bytes; half of it for one database.";
    gauge(out, "fulmar_session_memory_limit_bytes", help, memory.limit_bytes);
    let help = "Requests that failed because their session could not have more memory.";
    counter(out, "fulmar_session_memory_rejections_total", help, memory.rejected);
}

fn statement_times(out: &mut String, workers: &[Arc<WorkerMetrics>]) {
    const NAME: &str = "fulmar_statement_seconds";
    header(out, NAME, "How long statements take in the server.", "histogram");
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

fn engine_figures(out: &mut String, engine: &EngineStatistics) {
    let totals = [
        ("fulmar_log_bytes_total", "Bytes written to the commit log.", engine.log_bytes),
        ("fulmar_log_records_total", "Commit records in the log.", engine.records),
        ("fulmar_log_record_bytes_total", "Bytes of commit records.", engine.record_bytes),
        ("fulmar_log_pages_total", "Changed pages in commit records.", engine.record_pages),
        ("fulmar_log_syncs_total", "Syncs of the commit log.", engine.log_syncs),
        ("fulmar_log_failures_total", "Failures to write the commit log.", engine.log_failures),
        (
            "fulmar_shared_log_bytes_total",
            "Bytes of objects put into the commit log in the store.",
            engine.shared_log_bytes,
        ),
        ("fulmar_shared_log_puts_total", "Objects of the commit log in the store.", engine.shared_log_puts),
        (
            "fulmar_shared_log_failures_total",
            "Times that another process has closed the commit log in the store.",
            engine.shared_log_failures,
        ),
        ("fulmar_commits_total", "Commits.", engine.commits),
        (
            "fulmar_conflicts_total",
            "Transactions that met a newer version of what they had read.",
            engine.conflicts,
        ),
        ("fulmar_replays_total", "Transactions that were run again.", engine.replays),
        ("fulmar_page_hits_total", "Pages that statements found in memory.", engine.page_hits),
        (
            "fulmar_page_misses_total",
            "Pages that they had to read from the store, or from the disk cache before it.",
            engine.page_misses,
        ),
        (
            "fulmar_pages_read_ahead_total",
            "Pages that were read with others, before they were asked for.",
            engine.pages_read_ahead,
        ),
        (
            "fulmar_pages_warmed_total",
            "Pages that were read when their database opened, since it had used them before.",
            engine.pages_warmed,
        ),
        ("fulmar_pages_evicted_total", "Pages that left memory for others.", engine.pages_evicted),
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
    let now = [
        ("fulmar_log_size_bytes", "Bytes of the commit log's files.", engine.log_size_bytes),
        ("fulmar_log_sync_microseconds", "Smoothed time of a sync.", engine.log_sync_us),
        (
            "fulmar_shared_log_size_bytes",
            "Bytes of the commit log in the store that are needed.",
            engine.shared_log_size_bytes,
        ),
        (
            "fulmar_shared_log_backlog_objects",
            "Objects of the commit log in the store that a start would read.",
            engine.shared_log_backlog_objects,
        ),
        (
            "fulmar_shared_log_put_microseconds",
            "Smoothed time until an object is known to be there.",
            engine.shared_log_put_us,
        ),
        (
            "fulmar_shared_log_refuses",
            "1 while the commit log in the store takes no commits.",
            engine.shared_log_refuses,
        ),
        ("fulmar_memory_bytes", "Bytes of pages in memory.", engine.memory_bytes),
        (
            "fulmar_memory_unwritten_bytes",
            "Bytes of pages in memory that no segment of the store holds yet.",
            engine.memory_unwritten_bytes,
        ),
        ("fulmar_memory_limit_bytes", "The budget for pages in memory.", engine.memory_limit_bytes),
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
            "What the file system of the data directory still has.",
            engine.disk_available_bytes,
        ),
        ("fulmar_disk_reserve_bytes", "What of it is kept free.", engine.disk_reserve_bytes),
        (
            "fulmar_disk_level",
            "0: enough; 1: commits that need more space are refused; 2: all commits are.",
            engine.disk_level,
        ),
        ("fulmar_partitions_open", "Partitions that are open.", engine.open_partitions),
    ];
    for (name, help, value) in now {
        gauge(out, name, help, value);
    }
}

fn disk_cache_figures(out: &mut String, cache: &DiskCacheStatistics) {
    let totals = [
        ("hits", "Pages and indexes of segments that the disk cache had.", cache.hits),
        ("misses", "Those that it had not: they were read from the store.", cache.misses),
        ("written_bytes", "Bytes written to the disk cache.", cache.written_bytes),
        ("dropped", "What the disk cache did not keep: too much at once, or no room.", cache.dropped),
        ("failures", "Reads and writes of the disk cache that failed.", cache.failures),
    ];
    for (figure, help, value) in totals {
        counter(out, &format!("fulmar_disk_cache_{figure}_total"), help, value);
    }
    let now = [
        ("bytes", "Bytes of the disk cache's files.", cache.bytes),
        (
            "limit_bytes",
            "What they may take: less than --disk-cache if the disk is short.",
            cache.limit_bytes,
        ),
        ("entries", "Pages and indexes of segments in the disk cache.", cache.entries),
    ];
    for (figure, help, value) in now {
        gauge(out, &format!("fulmar_disk_cache_{figure}"), help, value);
    }
}

/// Of a node that reads the databases of another one.
fn beside_figures(out: &mut String, beside: &BesideStatistics) {
    counter(
        out,
        "fulmar_reader_looks_total",
        "Looks at the log of the node that owns the store.",
        beside.looks,
    );
    counter(
        out,
        "fulmar_reader_reopened_total",
        "Databases that were opened anew, since the node that owns them had gone on.",
        beside.reopened,
    );
    gauge(out, "fulmar_reader_fails", "1 if the last look at the log failed.", u64::from(beside.fails));
    if let Some(age_ms) = beside.age_ms {
        let help = "How old the last look at the log is; it grows while nobody reads.";
        gauge(out, "fulmar_reader_age_milliseconds", help, age_ms);
    }
}

fn store_figures(out: &mut String, store: &[OperationStatistics]) {
    const NAME: &str = "fulmar_store_seconds";
    header(out, NAME, "How long the store takes to answer, try by try.", "histogram");
    for one in store {
        let operation = one.operation.label();
        let mut total = 0;
        for (bucket, count) in one.times.iter().enumerate() {
            total += count;
            let bound = time_bucket_us(bucket).map_or("+Inf".to_owned(), |us| (us as f64 / 1e6).to_string());
            line(out, format_args!("{NAME}_bucket{{operation=\"{operation}\",le=\"{bound}\"}} {total}"));
        }
        line(out, format_args!("{NAME}_sum{{operation=\"{operation}\"}} {}", one.time_us as f64 / 1e6));
        line(out, format_args!("{NAME}_count{{operation=\"{operation}\"}} {}", one.tries));
    }
    type Value = fn(&OperationStatistics) -> u64;
    let totals: [(&str, &str, Value); 2] = [
        ("fulmar_store_retries_total", "Tries after a failure.", |one| one.retries),
        ("fulmar_store_bytes_total", "Bytes of objects written to or read from the store.", |one| one.bytes),
    ];
    for (name, help, value) in totals {
        header(out, name, help, "counter");
        for one in store {
            line(out, format_args!("{name}{{operation=\"{}\"}} {}", one.operation.label(), value(one)));
        }
    }
    const FAILURES: &str = "fulmar_store_failures_total";
    header(out, FAILURES, "Tries that failed.", "counter");
    for one in store {
        for (kind, count) in FailureKind::ALL.iter().zip(one.failures) {
            let (operation, kind) = (one.operation.label(), kind.label());
            line(out, format_args!("{FAILURES}{{operation=\"{operation}\",kind=\"{kind}\"}} {count}"));
        }
    }
}

fn tenant_figures(out: &mut String, tenants: &[TenantFigures]) {
    type Value = fn(&TenantFigures) -> f64;
    let figures: [(&str, &str, &str, Value); 6] = [
        ("statements_total", "counter", "Statements of the tenant.", |tenant| {
            tenant.counts.statements as f64
        }),
        (
            "busy_seconds_total",
            "counter",
            "How long the tenant's sessions have kept workers busy.",
            |tenant| tenant.counts.busy_us as f64 / 1e6,
        ),
        ("errors_total", "counter", "Errors that clients of the tenant were told of.", |tenant| {
            tenant.counts.errors as f64
        }),
        ("commits_total", "counter", "Commits of the tenant.", |tenant| tenant.commits as f64),
        ("sessions", "gauge", "Sessions of the tenant that are open.", |tenant| tenant.sessions as f64),
        (
            "session_memory_bytes",
            "gauge",
            "Bytes that sessions of the tenant hold at the gateway.",
            |tenant| tenant.session_memory_bytes as f64,
        ),
    ];
    for (figure, kind, help, value) in figures {
        let name = format!("fulmar_tenant_{figure}");
        header(out, &name, help, kind);
        for tenant in tenants {
            line(out, format_args!("{name}{{tenant=\"{}\"}} {}", escaped(&tenant.name), value(tenant)));
        }
    }
}

/// The value of a label, as the format wants it.
fn escaped(label: &str) -> String {
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
    let _ = writeln!(out, "{line}"); // a String grows: it does not fail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_what_their_bound_says() {
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
    fn workers_are_added_up() {
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
    fn every_metric_is_in_the_manual() {
        let engine =
            EngineStatistics { disk_cache: Some(DiskCacheStatistics::default()), ..Default::default() };
        let beside = BesideStatistics { age_ms: Some(1), ..BesideStatistics::default() };
        let text = render(&[], 1, connected(0), &engine, Some(&beside), &[], &[]);
        let manual = include_str!("../../../docs/operations.md");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let missing: Vec<&str> =
            types.clone().filter(|name| !manual.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(types.count() > 60);
        // Nor are there any in it that no node tells.
        let told = |name: &&str| text.contains(&format!("# TYPE {name} "));
        let of_manual = manual.split('`').filter(|word| word.starts_with("fulmar_") && !word.ends_with('_'));
        let names = of_manual.map(|word| word.split('{').next().unwrap_or_default());
        let unknown: Vec<&str> = names.filter(|name| !told(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn tenants_are_told_by_their_names() {
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

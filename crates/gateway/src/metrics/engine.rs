//! Metrics of the engine and the store.

use fulmar_engine::{EngineStatistics, ReplicaStatistics};
use fulmar_store::{DiskCacheStatistics, FailureKind, OperationStatistics};

use super::text::{self, Metric, counter, gauge, header, line};

const ENGINE: &[Metric<EngineStatistics>] = &[
    counter("fulmar_log_bytes_total", "Bytes written to the commit log.", |engine| engine.log_bytes),
    counter("fulmar_log_records_total", "Commit records in the log.", |engine| engine.records),
    counter("fulmar_log_record_bytes_total", "Bytes of commit records.", |engine| engine.record_bytes),
    counter("fulmar_log_pages_total", "Changed pages in commit records.", |engine| engine.record_pages),
    counter("fulmar_log_syncs_total", "Fsyncs of the commit log.", |engine| engine.log_syncs),
    counter("fulmar_log_failures_total", "Failed writes of the commit log.", |engine| engine.log_failures),
    counter(
        "fulmar_shared_log_bytes_total",
        "Bytes of objects written to the shared commit log.",
        |engine| engine.shared_log_bytes,
    ),
    counter("fulmar_shared_log_puts_total", "Objects written to the shared commit log.", |engine| {
        engine.shared_log_puts
    }),
    counter(
        "fulmar_shared_log_failures_total",
        "Times that another process sealed the shared commit log.",
        |engine| engine.shared_log_failures,
    ),
    counter("fulmar_commits_total", "Commits.", |engine| engine.commits),
    counter(
        "fulmar_conflicts_total",
        "Transactions that had read pages which another commit changed.",
        |engine| engine.conflicts,
    ),
    counter("fulmar_replays_total", "Transactions that were replayed.", |engine| engine.replays),
    counter("fulmar_page_hits_total", "Pages that statements found in the page cache.", |engine| {
        engine.page_hits
    }),
    counter(
        "fulmar_page_misses_total",
        "Pages that statements read from the disk cache or the store.",
        |engine| engine.page_misses,
    ),
    counter("fulmar_pages_read_ahead_total", "Pages that were read ahead of their use.", |engine| {
        engine.pages_read_ahead
    }),
    counter(
        "fulmar_pages_prewarmed_total",
        "Pages that were prewarmed when their database was opened.",
        |engine| engine.pages_warmed,
    ),
    counter("fulmar_pages_evicted_total", "Pages evicted from the page cache.", |engine| {
        engine.pages_evicted
    }),
    counter("fulmar_flushes_total", "Flushes of changed pages to the store.", |engine| engine.flushes),
    counter("fulmar_temporary_files_total", "Temporary files of large transactions and sorts.", |engine| {
        engine.temporary_files
    }),
    gauge("fulmar_log_size_bytes", "Size of the commit log's files.", |engine| engine.log_size_bytes),
    gauge(
        "fulmar_shared_log_size_bytes",
        "Size of the part of the shared commit log that is still needed.",
        |engine| engine.shared_log_size_bytes,
    ),
    gauge(
        "fulmar_shared_log_backlog_objects",
        "Objects of the shared commit log that a start of the node would read.",
        |engine| engine.shared_log_backlog_objects,
    ),
    gauge("fulmar_shared_log_available", "0 while the shared commit log accepts no commits.", |engine| {
        engine.shared_log_available
    }),
    gauge("fulmar_page_cache_bytes", "Size of the page cache.", |engine| engine.memory_bytes),
    gauge(
        "fulmar_page_cache_dirty_bytes",
        "Size of the cached pages that have not been flushed to the store.",
        |engine| engine.memory_unwritten_bytes,
    ),
    gauge("fulmar_page_cache_limit_bytes", "The limit of the page cache.", |engine| {
        engine.memory_limit_bytes
    }),
    gauge("fulmar_statement_memory_bytes", "Memory charged to statements.", |engine| engine.statement_bytes),
    gauge(
        "fulmar_statement_memory_limit_bytes",
        "The limit of the memory charged to statements.",
        |engine| engine.statement_limit_bytes,
    ),
    gauge("fulmar_temporary_bytes", "Bytes charged for temporary files.", |engine| engine.temporary_bytes),
    gauge("fulmar_temporary_limit_bytes", "The limit of the bytes charged for temporary files.", |engine| {
        engine.temporary_limit_bytes
    }),
    gauge(
        "fulmar_disk_available_bytes",
        "Space available in the file system of the data directory.",
        |engine| engine.disk_available_bytes,
    ),
    gauge("fulmar_disk_reserve_bytes", "Disk space that is kept free.", |engine| engine.disk_reserve_bytes),
    gauge(
        "fulmar_disk_pressure",
        "0: enough space; 1: commits that need more space are rejected; 2: all commits are rejected.",
        |engine| engine.disk_level,
    ),
    gauge("fulmar_partitions_open", "Open partitions.", |engine| engine.open_partitions),
];

const DISK_CACHE: &[Metric<DiskCacheStatistics>] = &[
    counter("fulmar_disk_cache_hits_total", "Pages and segment indexes found in the disk cache.", |cache| {
        cache.hits
    }),
    counter(
        "fulmar_disk_cache_misses_total",
        "Pages and segment indexes that had to be read from the store.",
        |cache| cache.misses,
    ),
    counter("fulmar_disk_cache_written_bytes_total", "Bytes written to the disk cache.", |cache| {
        cache.written_bytes
    }),
    counter(
        "fulmar_disk_cache_dropped_total",
        "Entries that were not cached: too many at a time, or no space.",
        |cache| cache.dropped,
    ),
    counter("fulmar_disk_cache_failures_total", "Failed reads and writes of the disk cache.", |cache| {
        cache.failures
    }),
    gauge("fulmar_disk_cache_bytes", "Size of the disk cache's files.", |cache| cache.bytes),
    gauge(
        "fulmar_disk_cache_limit_bytes",
        "The limit of the disk cache: --disk-cache, or less if disk space is low.",
        |cache| cache.limit_bytes,
    ),
    gauge("fulmar_disk_cache_entries", "Pages and segment indexes in the disk cache.", |cache| cache.entries),
];

const REPLICA: &[Metric<ReplicaStatistics>] = &[
    counter("fulmar_replica_log_polls_total", "Polls of the primary's log.", |replica| replica.log_polls),
    counter(
        "fulmar_replica_resyncs_total",
        "Databases reopened after a restore, or because the primary had truncated its log.",
        |replica| replica.resyncs,
    ),
    gauge("fulmar_replica_up", "0 if the last poll of the primary's log failed.", |replica| {
        (!replica.is_failing).into()
    }),
];

/// Writes the metrics of the engine, and of the disk cache if there is one.
pub(super) fn write(out: &mut String, engine: &EngineStatistics) {
    text::write(out, ENGINE, engine);
    let log_durations = [
        ("fulmar_log_sync_seconds", "Duration of each fsync of the commit log.", &engine.log_sync_durations),
        (
            "fulmar_shared_log_put_seconds",
            "Duration of each write of an object of the shared commit log.",
            &engine.shared_log_put_durations,
        ),
    ];
    for (name, help, durations) in log_durations {
        header(out, name, help, "histogram");
        text::durations(out, name, "", durations);
    }
    if let Some(cache) = &engine.disk_cache {
        text::write(out, DISK_CACHE, cache);
    }
}

/// Writes the metrics of a read replica.
pub(super) fn write_replica(out: &mut String, replica: &ReplicaStatistics) {
    text::write(out, REPLICA, replica);
    // Not present before the first poll.
    if let Some(age_ms) = replica.age_ms {
        const NAME: &str = "fulmar_replica_last_poll_age_seconds";
        let help = "Time since the last poll of the primary's log; it grows while no session reads.";
        header(out, NAME, help, "gauge");
        line(out, format_args!("{NAME} {}", age_ms as f64 / 1e3));
    }
}

/// Writes the metrics of store operations.
pub(super) fn write_store(out: &mut String, store: &[OperationStatistics]) {
    const NAME: &str = "fulmar_store_seconds";
    header(out, NAME, "Duration of each attempt of a store operation.", "histogram");
    for one in store {
        let label = format!("operation=\"{}\"", one.operation.label());
        text::durations(out, NAME, &label, &one.durations);
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

//! Statistics of an engine.

use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::{PAGE_SIZE, PartitionId};
use fulmar_store::{DiskCache, DiskCacheStatistics, DurationCounts, OperationStatistics};

use super::Engine;
use crate::health::LogHealth;

/// Statistics of a node, for metrics. Totals since the start, or current values where noted.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStatistics {
    /// Bytes of commit records.
    pub record_bytes: u64,
    /// Number of commit records.
    pub records: u64,
    /// Changed pages in commit records.
    pub record_pages: u64,
    /// Bytes written to the log, including frame headers.
    pub log_bytes: u64,
    /// Number of syncs of the log.
    pub log_syncs: u64,
    /// Current size of the log's files in bytes.
    pub log_size_bytes: u64,
    /// Durations of the syncs of the local log.
    pub log_sync_durations: DurationCounts,
    /// Number of log failures.
    pub log_failures: u64,
    /// Bytes of objects put into the shared log.
    pub shared_log_bytes: u64,
    /// Number of these objects.
    pub shared_log_puts: u64,
    /// Current size of the shared log's required objects in bytes.
    pub shared_log_size_bytes: u64,
    /// Current number of these objects.
    pub shared_log_backlog_objects: u64,
    /// Durations of the puts of the shared log.
    pub shared_log_put_durations: DurationCounts,
    /// How often another process has sealed the shared log.
    pub shared_log_failures: u64,
    /// 0 while the shared log accepts no commits, otherwise 1. 1 also if no partition uses it.
    pub shared_log_available: u64,
    /// Current size of pages in memory in bytes.
    pub memory_bytes: u64,
    /// The part of them that is in no segment of the store yet.
    pub memory_unwritten_bytes: u64,
    /// The current limit for them.
    pub memory_limit_bytes: u64,
    /// Space available in the data directory's file system.
    pub disk_available_bytes: u64,
    /// Space reserved in it.
    pub disk_reserve_bytes: u64,
    /// 0: enough space; 1: commits that need more space are rejected; 2: all commits are rejected.
    pub disk_level: u64,
    /// Statistics of the disk cache, if there is one.
    pub disk_cache: Option<DiskCacheStatistics>,
    /// Current number of open partitions.
    pub open_partitions: u64,
    /// Number of commits.
    pub commits: u64,
    /// Transactions and autocommitted statements whose read set had changed at the commit.
    pub conflicts: u64,
    /// Number of replays.
    pub replays: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that statements read from the store.
    pub page_misses: u64,
    /// Pages read together with others, before they were requested.
    pub pages_read_ahead: u64,
    /// Pages prewarmed when their partition was opened.
    pub pages_warmed: u64,
    /// Pages evicted from memory.
    pub pages_evicted: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// Temporary files created by large transactions and sorts.
    pub temporary_files: u64,
    /// Bytes currently charged for temporary files, including results.
    pub temporary_bytes: u64,
    /// Their current limit.
    pub temporary_limit_bytes: u64,
    /// Bytes of memory currently charged to statements.
    pub statement_bytes: u64,
    /// Their limit.
    pub statement_limit_bytes: u64,
}

/// Durations of the writes of a node's logs since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogDurations {
    /// Syncs of the local log.
    pub local: DurationCounts,
    /// Puts of the shared log.
    pub shared: DurationCounts,
}

/// Statistics of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionStatistics {
    /// Number of commits.
    pub commits: u64,
    /// Transactions whose read set had changed at the commit.
    pub conflicts: u64,
    /// Number of replays.
    pub replays: u64,
    /// Number of turns that transactions have taken.
    pub turns: u64,
    /// Bytes of the partition's commit records.
    pub log_bytes: u64,
    /// Changed pages in them.
    pub log_pages: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that statements read from the store.
    pub page_misses: u64,
    /// Pages read together with others, before they were requested.
    pub pages_read_ahead: u64,
    /// Pages prewarmed when the partition was opened.
    pub pages_warmed: u64,
    /// Completed prewarmings. Each opening with a list of hot pages starts one.
    pub warmups_ended: u64,
    /// Pages evicted from memory.
    pub pages_evicted: u64,
    /// Current size of the partition's pages in memory in bytes; None while it is closed.
    pub memory_bytes: Option<u64>,
    /// Current size of the database in bytes; None while it is closed.
    pub size_bytes: Option<u64>,
}

impl Engine {
    /// Returns the durations of the writes of the node's logs.
    pub fn log_durations(&self) -> LogDurations {
        let node = self.node();
        LogDurations {
            local: node.log.statistics().sync_durations(),
            shared: node.shared_log.get().map(|log| log.statistics().sync_durations()).unwrap_or_default(),
        }
    }

    /// Returns the node's statistics.
    pub fn statistics(&self) -> EngineStatistics {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let log = self.node().log.statistics();
        let mut statistics = EngineStatistics {
            record_bytes: load(&self.node().stats.record_bytes),
            records: load(&self.node().stats.records),
            record_pages: load(&self.node().stats.record_pages),
            log_bytes: load(&log.bytes),
            log_syncs: load(&log.syncs),
            log_size_bytes: self.node().log.size_bytes(),
            log_sync_durations: log.sync_durations(),
            log_failures: load(&log.failures),
            shared_log_available: 1,
            memory_bytes: self.node().memory.used_bytes(),
            memory_unwritten_bytes: self.node().memory.unwritten_bytes(),
            memory_limit_bytes: self.node().memory.limit_bytes(),
            disk_available_bytes: self.node().disk.available_bytes(),
            disk_reserve_bytes: self.node().disk.reserve_bytes(),
            disk_level: self.node().disk.level(),
            disk_cache: self.node().store.disk_cache().map(DiskCache::statistics),
            flushes: self.maintenance().flushes(),
            temporary_files: self.node().spill.files(),
            temporary_bytes: self.node().temporary.used_bytes(),
            temporary_limit_bytes: self.node().temporary.limit_bytes(),
            statement_bytes: self.node().heap.used_bytes(),
            statement_limit_bytes: self.node().heap.limit_bytes(),
            ..EngineStatistics::default()
        };
        if let Some(log) = self.node().shared_log.get() {
            let counted = log.statistics();
            statistics.shared_log_bytes = load(&counted.bytes);
            statistics.shared_log_puts = load(&counted.syncs);
            statistics.shared_log_size_bytes = log.size_bytes();
            statistics.shared_log_backlog_objects = log.backlog_objects();
            statistics.shared_log_put_durations = counted.sync_durations();
            statistics.shared_log_failures = load(&counted.failures);
            statistics.shared_log_available = u64::from(LogHealth::of(log).accepts());
        }
        let open = self.partitions().open_partitions();
        statistics.open_partitions = open.len() as u64;
        statistics.page_hits = open.iter().map(|partition| partition.page_hits()).sum();
        self.partitions().count_all(|stats| {
            statistics.commits += load(&stats.commits);
            statistics.conflicts += load(&stats.conflicts);
            statistics.replays += load(&stats.replays);
            statistics.page_hits += load(&stats.page_hits);
            statistics.page_misses += load(&stats.page_misses);
            statistics.pages_read_ahead += load(&stats.pages_read_ahead);
            statistics.pages_warmed += load(&stats.pages_warmed);
            statistics.pages_evicted += load(&stats.pages_evicted);
        });
        statistics
    }

    /// Returns the store's statistics, by operation.
    pub fn store_statistics(&self) -> Vec<OperationStatistics> {
        self.node().store.statistics()
    }

    /// Returns the partitions that are open.
    pub fn open_partitions(&self) -> Vec<PartitionId> {
        self.partitions().open_partitions().iter().map(|partition| partition.id).collect()
    }

    /// Returns the memory that pages and statements use, in bytes.
    pub fn used_memory_bytes(&self) -> u64 {
        self.node().memory.used_bytes() + self.node().heap.used_bytes()
    }

    /// Returns a partition's statistics since the node started; None if it has not been used.
    pub fn partition_statistics(&self, id: PartitionId) -> Option<PartitionStatistics> {
        let stats = self.partitions().counted_if_used(id)?;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let open = self.partitions().open_one(id);
        let turns = open.as_ref().map_or(0, |partition| partition.turns.taken());
        let hits = open.as_ref().map_or(0, |partition| partition.page_hits());
        Some(PartitionStatistics {
            commits: load(&stats.commits),
            conflicts: load(&stats.conflicts),
            replays: load(&stats.replays),
            turns: load(&stats.turns) + turns,
            log_bytes: load(&stats.log_bytes),
            log_pages: load(&stats.log_pages),
            page_hits: load(&stats.page_hits) + hits,
            page_misses: load(&stats.page_misses),
            pages_read_ahead: load(&stats.pages_read_ahead),
            pages_warmed: load(&stats.pages_warmed),
            warmups_ended: load(&stats.warmups_ended),
            pages_evicted: load(&stats.pages_evicted),
            memory_bytes: open.as_ref().map(|partition| partition.resident_bytes()),
            size_bytes: open.map(|partition| u64::from(partition.current().page_count) * PAGE_SIZE as u64),
        })
    }
}

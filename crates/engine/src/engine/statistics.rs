//! What an engine counts.

use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::{PAGE_SIZE, PartitionId};
use fulmar_store::{DiskCache, DiskCacheStatistics, OperationStatistics};

use super::Engine;
use crate::health::LogHealth;

/// Counters of a node, for metrics. All are totals since the start unless they say otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineStatistics {
    /// Bytes of commit records.
    pub record_bytes: u64,
    /// Commit records.
    pub records: u64,
    /// Changed pages in commit records.
    pub record_pages: u64,
    /// Bytes written to the log, frames included.
    pub log_bytes: u64,
    /// Syncs of the log.
    pub log_syncs: u64,
    /// Bytes of the log's files, now.
    pub log_size_bytes: u64,
    /// Smoothed time of a sync, microseconds, now.
    pub log_sync_us: u64,
    /// Log failures.
    pub log_failures: u64,
    /// Bytes of objects put into the log in the store.
    pub shared_log_bytes: u64,
    /// Those objects.
    pub shared_log_puts: u64,
    /// Bytes of the objects that are needed, now.
    pub shared_log_size_bytes: u64,
    /// These objects, now.
    pub shared_log_backlog_objects: u64,
    /// Smoothed time until one is known to be there, microseconds, now.
    pub shared_log_put_us: u64,
    /// Times that another process has closed that log.
    pub shared_log_failures: u64,
    /// 1 while it takes no commits, now.
    pub shared_log_refuses: u64,
    /// Bytes of pages in memory, now.
    pub memory_bytes: u64,
    /// Those of them that no segment of the store holds yet, now.
    pub memory_unwritten_bytes: u64,
    /// The budget for them.
    pub memory_limit_bytes: u64,
    /// What the data directory's file system still has, now.
    pub disk_available_bytes: u64,
    /// What of it is kept free.
    pub disk_reserve_bytes: u64,
    /// 0: enough is left; 1: commits that need more space are refused; 2: all are.
    pub disk_level: u64,
    /// What is counted of the disk cache, if there is one.
    pub disk_cache: Option<DiskCacheStatistics>,
    /// Open partitions, now.
    pub open_partitions: u64,
    /// Commits.
    pub commits: u64,
    /// Transactions, lone statements among them, that met a newer version of what they had read.
    pub conflicts: u64,
    /// Replays.
    pub replays: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that they had to read from the store.
    pub page_misses: u64,
    /// Pages that were read with others, before they were asked for.
    pub pages_read_ahead: u64,
    /// Pages that were read when their partition opened, since its last life had used them.
    pub pages_warmed: u64,
    /// Pages that left memory for others.
    pub pages_evicted: u64,
    /// Flushes.
    pub flushes: u64,
    /// Temporary files made by large transactions and sorts.
    pub temporary_files: u64,
    /// Bytes charged for temporary files, those of results included, now.
    pub temporary_bytes: u64,
    /// The limit for them, now.
    pub temporary_limit_bytes: u64,
    /// Bytes of memory that statements are charged for, now.
    pub statement_bytes: u64,
    /// The limit for them.
    pub statement_limit_bytes: u64,
}

/// What is counted of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionStatistics {
    /// Commits.
    pub commits: u64,
    /// Transactions that met a newer version of what they had read.
    pub conflicts: u64,
    /// Transactions that were run again.
    pub replays: u64,
    /// Turns that transactions have taken.
    pub turns: u64,
    /// Bytes of its commit records.
    pub log_bytes: u64,
    /// Changed pages in them.
    pub log_pages: u64,
    /// Pages that statements found in memory.
    pub page_hits: u64,
    /// Pages that they had to read from the store.
    pub page_misses: u64,
    /// Pages that were read with others, before they were asked for.
    pub pages_read_ahead: u64,
    /// Pages that were read when it opened, since its last life had used them.
    pub pages_warmed: u64,
    /// Warm-ups that have ended. Each opening of a partition with a list of hot pages starts one.
    pub warmups_ended: u64,
    /// Pages that left memory for others.
    pub pages_evicted: u64,
    /// Bytes of its pages in memory, now; `None` while it is closed.
    pub memory_bytes: Option<u64>,
    /// Bytes of the database, now; `None` while it is closed.
    pub size_bytes: Option<u64>,
}

impl Engine {
    /// Counters for metrics.
    pub fn statistics(&self) -> EngineStatistics {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let log = self.node.log.statistics();
        let mut statistics = EngineStatistics {
            record_bytes: load(&self.node.stats.record_bytes),
            records: load(&self.node.stats.records),
            record_pages: load(&self.node.stats.record_pages),
            log_bytes: load(&log.bytes),
            log_syncs: load(&log.syncs),
            log_size_bytes: self.node.log.size_bytes(),
            log_sync_us: load(&log.sync_nanos) / 1000,
            log_failures: load(&log.failures),
            memory_bytes: self.node.memory.used_bytes(),
            memory_unwritten_bytes: self.node.memory.unwritten_bytes(),
            memory_limit_bytes: self.node.memory.limit_bytes(),
            disk_available_bytes: self.node.disk.available_bytes(),
            disk_reserve_bytes: self.node.disk.reserve_bytes(),
            disk_level: self.node.disk.level(),
            disk_cache: self.node.store.disk_cache().map(DiskCache::statistics),
            flushes: self.flusher.flushes(),
            temporary_files: self.node.spill.files(),
            temporary_bytes: self.node.temporary.used_bytes(),
            temporary_limit_bytes: self.node.temporary.limit_bytes(),
            statement_bytes: self.node.heap.used_bytes(),
            statement_limit_bytes: self.node.heap.limit_bytes(),
            ..EngineStatistics::default()
        };
        if let Some(log) = self.node.shared_log.get() {
            let counted = log.statistics();
            statistics.shared_log_bytes = load(&counted.bytes);
            statistics.shared_log_puts = load(&counted.syncs);
            statistics.shared_log_size_bytes = log.size_bytes();
            statistics.shared_log_backlog_objects = log.backlog_objects();
            statistics.shared_log_put_us = load(&counted.sync_nanos) / 1000;
            statistics.shared_log_failures = load(&counted.failures);
            statistics.shared_log_refuses = u64::from(!LogHealth::of(log).accepts());
        }
        let open = self.open_partitions();
        statistics.open_partitions = open.len() as u64;
        statistics.page_hits = open.iter().map(|partition| partition.residence.hits()).sum();
        for stats in self.counted.lock().values() {
            statistics.commits += load(&stats.commits);
            statistics.conflicts += load(&stats.conflicts);
            statistics.replays += load(&stats.replays);
            statistics.page_hits += load(&stats.page_hits);
            statistics.page_misses += load(&stats.page_misses);
            statistics.pages_read_ahead += load(&stats.pages_read_ahead);
            statistics.pages_warmed += load(&stats.pages_warmed);
            statistics.pages_evicted += load(&stats.pages_evicted);
        }
        statistics
    }

    /// What is counted of the store, by operation.
    pub fn store_statistics(&self) -> Vec<OperationStatistics> {
        self.node.store.statistics()
    }

    /// What is counted of one partition since the node started; `None` if nobody has used it.
    pub fn partition_statistics(&self, id: PartitionId) -> Option<PartitionStatistics> {
        let stats = self.counted.lock().get(&id)?.clone();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let open = self.partitions.lock().get(&id).and_then(|slot| slot.get().cloned());
        let turns = open.as_ref().map_or(0, |partition| partition.turns.taken());
        let hits = open.as_ref().map_or(0, |partition| partition.residence.hits());
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

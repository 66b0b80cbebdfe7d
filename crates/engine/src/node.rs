//! What all partitions of a node share: logs, store, memory, clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use fulmar_pages::SegmentId;
use fulmar_store::CommitLog;
use fulmar_store::PageStore;
use parking_lot::Mutex;
use tokio::sync::{OnceCell, RwLock};

use crate::clock::Clock;
use crate::disk::Disk;
use crate::memory::MemoryBudget;
use crate::spill::SpillArea;

/// Shared by all partitions of a node.
pub(crate) struct Node {
    /// On the node's disk.
    pub log: Arc<CommitLog>,
    /// In the store; opened when a partition first needs it.
    pub shared_log: OnceCell<Arc<CommitLog>>,
    pub store: Arc<PageStore>,
    pub spill: Arc<SpillArea>,
    pub memory: MemoryBudget,
    pub disk: Disk,
    pub clock: Clock,
    pub buffers: Buffers,
    /// Lua for procedures.
    pub machines: Arc<crate::procedure::Machines>,
    pub stats: NodeStats,
    /// Held to write while segments are marked and swept; to read by whoever has a segment that nothing names yet.
    pub naming: Arc<RwLock<()>>,
    /// Segments that exports are reading, for as long as those live.
    pub exported: Mutex<Vec<Weak<Vec<SegmentId>>>>,
}

/// Counters of the node's commits.
#[derive(Default, Debug)]
pub(crate) struct NodeStats {
    pub records: AtomicU64,
    pub record_bytes: AtomicU64,
    pub record_pages: AtomicU64,
}

impl Node {
    /// The logs that are open.
    pub(crate) fn logs(&self) -> impl Iterator<Item = &Arc<CommitLog>> {
        std::iter::once(&self.log).chain(self.shared_log.get())
    }

    /// Segments that exports are reading.
    pub(crate) fn exported_segments(&self) -> Vec<SegmentId> {
        let mut exported = self.exported.lock();
        exported.retain(|segments| segments.strong_count() > 0);
        exported.iter().filter_map(Weak::upgrade).flat_map(|segments| segments.to_vec()).collect()
    }

    /// Counts a commit record.
    pub(crate) fn count_record(&self, bytes: usize, pages: usize) {
        self.stats.records.fetch_add(1, Ordering::Relaxed);
        self.stats.record_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.stats.record_pages.fetch_add(pages as u64, Ordering::Relaxed);
    }
}

/// Record buffers for reuse, so that a commit allocates none.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    const KEPT: usize = 16;
    const LARGEST_BYTES: usize = 64 << 10;

    pub(crate) fn take(&self) -> Vec<u8> {
        self.0.lock().pop().unwrap_or_default()
    }

    pub(crate) fn give(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock();
        if kept.len() < Self::KEPT && buffer.capacity() <= Self::LARGEST_BYTES {
            kept.push(buffer);
        }
    }
}

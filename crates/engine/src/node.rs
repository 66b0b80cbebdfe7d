//! State shared by all partitions of a node: logs, store, memory, clock.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use fulmar_pages::SegmentId;
use fulmar_store::CommitLog;
use fulmar_store::PageStore;
use parking_lot::Mutex;
use tokio::sync::{OnceCell, RwLock, mpsc};

use crate::cache::Cache;
use crate::clock::Clock;
use crate::disk::Disk;
use crate::heap::Heap;
use crate::memory::MemoryBudget;
use crate::spill::SpillArea;
use crate::temporary::NodeSpace;
use crate::tenure::Tenure;

/// Shared by all partitions of a node.
pub(crate) struct Node {
    /// The local log, on the node's disk.
    pub log: Arc<CommitLog>,
    /// The shared log, in the store. Opened when a partition first needs it.
    pub shared_log: OnceCell<Arc<CommitLog>>,
    pub store: Arc<PageStore>,
    pub spill: Arc<SpillArea>,
    /// Space for temporary files of all tenants.
    pub temporary: Arc<NodeSpace>,
    pub memory: Arc<MemoryBudget>,
    /// The memory budget covers the whole process, not only pages.
    pub whole_process: bool,
    /// Maximum length of one statement's SQL text.
    pub max_statement_bytes: usize,
    pub heap: Arc<Heap>,
    pub cache: Cache,
    pub disk: Disk,
    pub clock: Clock,
    /// CPU time after which a statement yields its thread.
    pub time_slice: Duration,
    pub buffers: Buffers,
    /// Lua machines for procedures.
    pub machines: Arc<crate::procedure::Machines>,
    pub stats: NodeStats,
    /// Tracks stored segments that are not referenced yet.
    pub naming: Naming,
    /// Read-locked from reading an old manifest until its segments are referenced again or have
    /// been read; write-locked while old manifests are deleted. Acquired before the flush lock if
    /// both are needed.
    pub past: RwLock<()>,
    /// Ownership of the store. None if no other process can own it, or on a replica.
    pub tenure: Option<Tenure>,
    /// Segments in use by exports, which hold the strong references.
    pub exported: Mutex<Vec<Weak<Vec<SegmentId>>>>,
}

/// Grace-period barrier between storing segments and garbage collection, like RCU. A task enters
/// before it stores a segment, and leaves once a manifest, a record or the partition's memory
/// references it. The collector lists the segments, waits until all tasks present at that time have
/// left ([`Naming::settled`]), and only then collects the references. It blocks no task, and a
/// segment that is unreferenced then stays unreferenced forever.
#[derive(Default)]
pub(crate) struct Naming(Mutex<Generation>);

/// A channel that carries no messages: the receiver is notified when the last sender is dropped.
struct Generation {
    entered: mpsc::Sender<Infallible>,
    left: mpsc::Receiver<Infallible>,
}

impl Default for Generation {
    fn default() -> Self {
        let (entered, left) = mpsc::channel(1);
        Generation { entered, left }
    }
}

/// Guard of a task that has a segment which is not referenced yet.
pub(crate) struct Unnamed {
    _entered: mpsc::Sender<Infallible>,
}

impl Naming {
    pub(crate) fn enter(&self) -> Unnamed {
        Unnamed { _entered: self.0.lock().entered.clone() }
    }

    /// Waits until all tasks that are inside now have left.
    pub(crate) async fn settled(&self) {
        let Generation { entered, mut left } = std::mem::take(&mut *self.0.lock());
        drop(entered);
        while left.recv().await.is_some() {}
    }
}

/// Counters of a node's commits.
#[derive(Default, Debug)]
pub(crate) struct NodeStats {
    pub records: AtomicU64,
    pub record_bytes: AtomicU64,
    pub record_pages: AtomicU64,
}

impl Node {
    /// The open logs.
    pub(crate) fn logs(&self) -> impl Iterator<Item = &Arc<CommitLog>> {
        std::iter::once(&self.log).chain(self.shared_log.get())
    }

    /// Segments in use by exports.
    pub(crate) fn exported_segments(&self) -> Vec<SegmentId> {
        let mut exported = self.exported.lock();
        exported.retain(|segments| segments.strong_count() > 0);
        exported.iter().filter_map(Weak::upgrade).flat_map(|segments| segments.to_vec()).collect()
    }

    /// Lower bound of the numbers of new versions.
    pub(crate) fn first_number(&self) -> u64 {
        self.tenure.as_ref().map_or(0, Tenure::first_number)
    }

    /// Counts a commit record.
    pub(crate) fn count_record(&self, bytes: usize, pages: usize) {
        self.stats.records.fetch_add(1, Ordering::Relaxed);
        self.stats.record_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.stats.record_pages.fetch_add(pages as u64, Ordering::Relaxed);
    }
}

/// Pool of record buffers, so that commits do not allocate.
#[derive(Default)]
pub(crate) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    const MAX_BUFFERS: usize = 16;
    const MAX_BUFFER_BYTES: usize = 64 << 10;

    pub(crate) fn take(&self) -> Vec<u8> {
        self.0.lock().pop().unwrap_or_default()
    }

    pub(crate) fn give(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock();
        if kept.len() < Self::MAX_BUFFERS && buffer.capacity() <= Self::MAX_BUFFER_BYTES {
            kept.push(buffer);
        }
    }
}

//! What all partitions of a node share: logs, store, memory, clock.

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
    /// On the node's disk.
    pub log: Arc<CommitLog>,
    /// In the store; opened when a partition first needs it.
    pub shared_log: OnceCell<Arc<CommitLog>>,
    pub store: Arc<PageStore>,
    pub spill: Arc<SpillArea>,
    /// Temporary files of all tenants.
    pub temporary: Arc<NodeSpace>,
    pub memory: Arc<MemoryBudget>,
    /// Its budget is of all that the process takes.
    pub whole_process: bool,
    /// The longest SQL text of one statement.
    pub max_statement_bytes: usize,
    pub heap: Arc<Heap>,
    pub cache: Cache,
    pub disk: Disk,
    pub clock: Clock,
    /// How long a statement computes before it yields its thread.
    pub time_slice: Duration,
    pub buffers: Buffers,
    /// Lua for procedures.
    pub machines: Arc<crate::procedure::Machines>,
    pub stats: NodeStats,
    /// Who has a segment that nothing names yet.
    pub naming: Naming,
    /// Held to read from when an old manifest is read until what it names is named anew, or read; to write while old
    /// manifests are deleted. Who needs the flushes' lock too takes this one first.
    pub past: RwLock<()>,
    /// Since when, and as which one, it owns the store; `None` if nobody else can own it, or it only reads.
    pub tenure: Option<Tenure>,
    /// Segments that exports are reading, for as long as those live.
    pub exported: Mutex<Vec<Weak<Vec<SegmentId>>>>,
}

/// Whoever stores a segment enters before, and leaves when a manifest, a record or the partition's memory names it. The
/// collector looks which segments there are, then waits until all have left that were there ([`Naming::settled`]), and only
/// then asks who names what. So it holds nobody up, and what it finds to be nobody's will never be anybody's.
#[derive(Default)]
pub(crate) struct Naming(Mutex<Crowd>);

/// Nothing is ever sent: the receiver notices when the last sender is gone.
struct Crowd {
    entered: mpsc::Sender<Infallible>,
    left: mpsc::Receiver<Infallible>,
}

impl Default for Crowd {
    fn default() -> Self {
        let (entered, left) = mpsc::channel(1);
        Crowd { entered, left }
    }
}

/// Has a segment that nothing names yet.
pub(crate) struct Unnamed {
    _entered: mpsc::Sender<Infallible>,
}

impl Naming {
    pub(crate) fn enter(&self) -> Unnamed {
        Unnamed { _entered: self.0.lock().entered.clone() }
    }

    /// Waits until all have left that are there now.
    pub(crate) async fn settled(&self) {
        let Crowd { entered, mut left } = std::mem::take(&mut *self.0.lock());
        drop(entered);
        while left.recv().await.is_some() {}
    }
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

    /// What the numbers of new versions are not below.
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

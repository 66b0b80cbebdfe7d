//! State shared by all partitions of a node: logs, store, memory, clock.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use fulmar_pages::SegmentId;
use fulmar_sqlite::{Heap, NodeSpace, Result, SpillArea};
use fulmar_store::{CommitLog, PageStore};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, RwLock, mpsc};

use crate::cache::Cache;
use crate::clock::Clock;
use crate::disk::Disk;
use crate::error::replica_is_read_only;
use crate::memory::MemoryBudget;
use crate::ownership::StoreOwnership;

/// Shared by all partitions of a node.
pub struct Node {
    /// The local log, on the node's disk.
    pub log: Arc<CommitLog>,
    /// The shared log, in the store. Opened when a partition first needs it.
    pub shared_log: OnceCell<Arc<CommitLog>>,
    /// Segments and manifests.
    pub store: Arc<PageStore>,
    /// The directory of temporary files.
    pub spill: Arc<SpillArea>,
    /// Space for temporary files of all tenants.
    pub temporary: Arc<NodeSpace>,
    /// The budget of the pages of all partitions.
    pub memory: Arc<MemoryBudget>,
    /// The memory budget covers the whole process, not only pages.
    pub whole_process: bool,
    /// SQLite's memory, of all partitions.
    pub heap: Arc<Heap>,
    /// The open partitions, for eviction.
    pub cache: Cache,
    /// The free space of the data directory.
    pub disk: Disk,
    /// Time, hybrid timestamps and transaction ids.
    pub clock: Clock,
    /// Buffers of commit records.
    pub buffers: Buffers,
    /// Counters of commit records.
    pub stats: NodeStats,
    /// Tracks stored segments that are not referenced yet.
    pub publication: SegmentPublication,
    /// Read-locked from reading an old manifest until its segments are referenced again or have
    /// been read; write-locked while old manifests are deleted. Acquired before the flush lock if
    /// both are needed.
    pub old_manifests: RwLock<()>,
    /// Ownership of the store. None if no other process can own it, or on a replica.
    pub ownership: Option<StoreOwnership>,
    /// The node is one of a cluster: it owns only the partitions that the cluster assigns to it.
    pub is_member: bool,
    /// Other nodes of the cluster write to the store too, and an elected one of them deletes garbage.
    pub has_common_store: bool,
    /// The node only reads the partitions of another process.
    pub is_replica: bool,
    /// Segments in use by exports, which hold the strong references.
    pub exported: Mutex<Vec<Weak<Vec<SegmentId>>>>,
}

/// Grace-period barrier between storing segments and garbage collection, like RCU. A task enters
/// before it stores a segment, and leaves once a manifest, a record or the partition's memory
/// references it. The collector lists the segments, waits until all tasks present at that time have
/// left ([`SegmentPublication::wait_for_grace_period`]), and only then collects the references. It
/// blocks no task, and a segment that is unreferenced then stays unreferenced forever.
#[derive(Default)]
pub struct SegmentPublication(Mutex<Generation>);

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
pub struct PublicationGuard {
    _entered: mpsc::Sender<Infallible>,
}

impl SegmentPublication {
    /// Enters before a segment is stored. The guard leaves when it is dropped.
    pub fn enter(&self) -> PublicationGuard {
        PublicationGuard { _entered: self.0.lock().entered.clone() }
    }

    /// Waits until all tasks that are inside now have left.
    pub async fn wait_for_grace_period(&self) {
        let Generation { entered, mut left } = std::mem::take(&mut *self.0.lock());
        drop(entered);
        while left.recv().await.is_some() {}
    }
}

/// Counters of a node's commits.
#[derive(Default, Debug)]
pub struct NodeStats {
    /// Commit records.
    pub records: AtomicU64,
    /// Their bytes.
    pub record_bytes: AtomicU64,
    /// Their pages.
    pub record_pages: AtomicU64,
}

impl Node {
    /// The open logs.
    pub fn logs(&self) -> impl Iterator<Item = &Arc<CommitLog>> {
        std::iter::once(&self.log).chain(self.shared_log.get())
    }

    /// Segments in use by exports.
    pub fn exported_segments(&self) -> Vec<SegmentId> {
        let mut exported = self.exported.lock();
        exported.retain(|segments| segments.strong_count() > 0);
        exported.iter().filter_map(Weak::upgrade).flat_map(|segments| segments.to_vec()).collect()
    }

    /// Lower bound of the numbers of new versions.
    pub(crate) fn first_number(&self) -> u64 {
        self.ownership.as_ref().map_or(0, StoreOwnership::first_number)
    }

    /// Counts a commit record.
    pub(crate) fn count_record(&self, bytes: usize, pages: usize) {
        self.stats.records.fetch_add(1, Ordering::Relaxed);
        self.stats.record_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.stats.record_pages.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Fails on a replica: the operation needs the primary.
    pub fn check_owner(&self) -> Result<()> {
        if self.is_replica { Err(replica_is_read_only()) } else { Ok(()) }
    }

    /// Fails if this process no longer owns the store. Called between listing objects and deleting
    /// them, and between storing objects and referencing them.
    pub async fn check_term(&self) -> Result<()> {
        match &self.ownership {
            Some(tenure) => tenure.check(&self.store, &self.clock).await,
            // This process owns the store alone, or is a replica.
            None => self.check_owner(),
        }
    }

    /// Like [`Self::check_term`], for the moment before a manifest is put: a confirmation within
    /// the last 5 minutes is enough. The process may have been suspended since an earlier check,
    /// for longer than its successor waits before it deletes segments.
    pub async fn check_term_confirmed(&self) -> Result<()> {
        match self.ownership.as_ref().is_some_and(|tenure| tenure.is_confirmed(&self.clock)) {
            true => Ok(()),
            false => self.check_term().await,
        }
    }

    /// Whether another process is known to own the store.
    pub fn is_taken_over(&self) -> bool {
        self.ownership.as_ref().is_some_and(StoreOwnership::is_fenced)
    }

    /// Ends the term. None of this process's requests to the store may be in flight.
    pub async fn end_term(&self) -> Result<()> {
        match &self.ownership {
            Some(tenure) => tenure.end(&self.store, &self.clock).await,
            None => Ok(()),
        }
    }
}

/// Pool of record buffers, so that commits do not allocate.
#[derive(Default)]
pub struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    const MAX_BUFFERS: usize = 16;
    const MAX_BUFFER_BYTES: usize = 64 << 10;

    /// Returns an empty buffer.
    pub fn take(&self) -> Vec<u8> {
        self.0.lock().pop().unwrap_or_default()
    }

    /// Returns a buffer to the pool.
    pub fn give(&self, buffer: Vec<u8>) {
        let mut kept = self.0.lock();
        if kept.len() < Self::MAX_BUFFERS && buffer.capacity() <= Self::MAX_BUFFER_BYTES {
            kept.push(buffer);
        }
    }
}

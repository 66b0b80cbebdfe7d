//! A partition: one SQLite database stored as multi-version pages.
//!
//! - [`table`]: the versions ([`version`]) of the pages. [`snapshots`]: which versions are pinned.
//!   [`buffer_residency`]: which pages are in memory.
//! - [`commits`], [`named`]: the state of commits and of the newest manifest.
//! - [`commit`]: validates a transaction's changes and makes them the next version, or reports a
//!   conflict.
//! - [`large_commit`]: writes the pages of large commits to the store before the commit. [`draft`]:
//!   those of a database that is not committed.
//! - [`turns`], [`rows`]: the write turn and the row locks, for which transactions wait.
//! - [`outcomes`]: the outcomes of transactions whose clients may ask for them.
//! - [`flush`]: the changes since the last manifest.
//! - [`replica_apply`]: a read replica; applies the commits of another process.
//! - [`load`]: opens a partition from the store and from the log's records ([`replay`]).
//! - [`readahead`]: read-ahead for scans. [`hot`]: prewarming after an opening. [`cached`]: the
//!   cached pages, and [`carried`]: the snapshots of open transactions, for a migration. [`holds`]:
//!   what a migration waits for.

mod buffer_residency;
mod cached;
mod carried;
mod commit;
mod commits;
mod draft;
mod evict;
mod flush;
mod holds;
mod hot;
mod large_commit;
mod load;
mod named;
mod outcomes;
mod readahead;
mod replay;
mod replica_apply;
mod rows;
mod snapshots;
mod table;
mod turns;
mod version;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fulmar_pages::{HotPages, Page, PageNo, PartitionId};
use fulmar_sqlite::{Error, Heap, NodeSpace, Quota, Result, TemporaryFiles, TenantSpace, sqlstate};
use fulmar_store::{CommitLog, HotPagesName, SingleFlight};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

pub(crate) use buffer_residency::{BufferResidency, EVICTION_CLASSES, Reader, TIERED_EVICTION_CLASSES};
pub use cached::CachedPage;
pub use carried::CarriedSnapshots;
pub use commit::page_one;
pub(crate) use commit::{CommitError, CommitResource, CommitWaiter};
pub use commits::LargeSegment;
pub use draft::Draft;
pub use flush::{CopiedFrame, Flush};
pub use holds::{HoldReason, MoveHold, MoveHolds, PendingMove};
pub use hot::PageRun;
pub(crate) use large_commit::LargeCommit;
pub use load::{Contents, read_frames};
pub use named::NamedSegment;
pub(crate) use outcomes::{Outcomes, Status};
pub(crate) use readahead::Readahead;
pub use replay::{Logged, Replay};
pub use replica_apply::{ApplyResult, LogSource, ReplicaState};
pub use rows::{Deadlock, RowLocks};
pub use snapshots::Snapshot;
pub use turns::{Turn, TurnQueue};
pub(crate) use version::PageVersion;

use crate::error::{
    dropped_error, historical_session_is_read_only, log_error, moved_error, replica_is_read_only,
    snapshot_deleted, taken_over,
};
use crate::node::Node;
use crate::ownership::StoreOwnership;
use crate::transaction::{Transaction, TransactionContext};

/// Statistics of one partition, the input to placement decisions, and its cache floor. They outlive
/// the closing of the partition.
#[derive(Default, Debug)]
pub struct PartitionStats {
    /// Commits.
    pub commits: AtomicU64,
    /// Transactions whose read set had changed at the commit.
    pub conflicts: AtomicU64,
    /// Replays.
    pub replays: AtomicU64,
    /// Turns granted before the current opening.
    pub turns: AtomicU64,
    /// Bytes of commit records.
    pub log_bytes: AtomicU64,
    /// Pages in commit records.
    pub log_pages: AtomicU64,
    /// Pages found in memory before the current opening.
    pub page_hits: AtomicU64,
    /// Pages that had to be read from the store.
    pub page_misses: AtomicU64,
    /// Pages read ahead, together with a page that was missed.
    pub pages_read_ahead: AtomicU64,
    /// Pages prewarmed: read because they were in use before the partition was closed.
    pub pages_warmed: AtomicU64,
    /// Prewarms that have ended, successfully or not.
    pub warmups_ended: AtomicU64,
    /// Pages evicted from memory.
    pub pages_evicted: AtomicU64,
    /// Memory for pages that evictions on behalf of other partitions leave to this one.
    pub cache_floor_bytes: AtomicU64,
    /// What it waits for before it moves to another node.
    pub holds: MoveHolds,
    /// SQLite's heap for the partition, current and historical sessions together.
    heap: OnceLock<Arc<Heap>>,
    /// Its temporary files.
    temporary: OnceLock<Arc<TenantSpace>>,
}

impl PartitionStats {
    /// The account that temporary files of the partition's sessions are charged to.
    pub fn temporary_space(&self, node: &Arc<NodeSpace>) -> Arc<TenantSpace> {
        self.temporary.get_or_init(|| TenantSpace::new(node)).clone()
    }
}

/// Bounds on old snapshots: their age, and the replaced pages that they retain.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotBounds {
    /// Bytes of replaced pages that the old snapshots of a partition may retain.
    pub bytes: u64,
    /// The maximum age of a snapshot; it expires after that.
    pub age: Duration,
    /// The maximum age of a snapshot while more than `bytes` are retained.
    pub age_if_large: Duration,
}

impl Default for SnapshotBounds {
    fn default() -> Self {
        SnapshotBounds { bytes: 32 << 20, age: Duration::from_secs(60), age_if_large: Duration::from_secs(1) }
    }
}

const OPEN: u8 = 0;
const RESTORING: u8 = 1;
const DROPPED: u8 = 2;
const STALE: u8 = 3;
/// Being handed over to another node. Flushes continue.
const MOVING: u8 = 4;
/// Handed over: nothing of it may reach the store any more.
const MOVED: u8 = 5;

/// State that the layer above keeps for a partition as long as that is open, such as its idle
/// connections. It may hold references to the partition; [`Attachment::close_idle`] drops them.
pub trait Attachment: Any + Send + Sync {
    /// The number of references to the partition that it holds.
    fn references(&self) -> usize;

    /// Closes idle connections, and thereby drops the references.
    fn close_idle(&self);
}

/// One partition, open on this node.
pub struct Partition {
    /// Its id.
    pub id: PartitionId,
    /// The lineage of its versions.
    pub lineage: u64,
    /// The epoch of its versions.
    pub epoch: u32,
    /// The node.
    pub node: Arc<Node>,
    /// The log that makes its commits durable.
    pub log: Arc<CommitLog>,
    pages: table::PageTable,
    pub(crate) residency: Arc<BufferResidency>,
    snapshots: Mutex<snapshots::Snapshots>,
    commits: Mutex<commits::Commits>,
    /// The write turn.
    pub turns: TurnQueue,
    /// The row locks.
    pub rows: RowLocks,
    pub(crate) outcomes: Outcomes,
    attachment: OnceLock<Box<dyn Attachment>>,
    /// Its statistics.
    pub stats: Arc<PartitionStats>,
    /// [`OPEN`], or the reason why commits are rejected.
    closed: AtomicU8,
    /// Ranges (after, up to) of versions that were discarded, and that a snapshot may still show.
    discarded: RwLock<Vec<(u64, u64)>>,
    any_discarded: AtomicBool,
    /// Loads in progress, so that concurrent readers of one absent page cause one read.
    loading: SingleFlight<usize, Result<()>>,
    named: Mutex<named::Named>,
    /// Snapshots below this version have expired; `expiry` notifies their holders.
    expired: AtomicU64,
    expiry: Notify,
    /// Notified when it starts to move to another node.
    moving: Notify,
    /// The list of hot pages that was found when the partition was opened.
    pub hot_name: OnceLock<HotPagesName>,
    /// Its content, once it has been read.
    pub hot_list: OnceLock<HotPages>,
    /// Set on a read replica: the position up to which the primary's log has been applied. Boxed,
    /// because the partitions of other nodes have none.
    pub replica_state: OnceLock<Box<ReplicaState>>,
    /// When it was last used (milliseconds on the node's monotonic clock).
    pub used_ms: AtomicU64,
}

impl Partition {
    /// Pins the current version.
    pub fn pin(&self) -> Snapshot {
        self.snapshots.lock().pin()
    }

    /// Pins the newest durable version.
    pub(crate) fn pin_durable(&self) -> Snapshot {
        self.snapshots.lock().pin_durable(self.log.durable())
    }

    /// Releases a pin.
    pub(crate) fn unpin(&self, snapshot: Snapshot) {
        self.snapshots.lock().unpin(snapshot.number);
    }

    /// Pins a snapshot for a transaction, see [`snapshots`].
    pub(crate) fn begin_snapshot(&self, transaction: &Transaction) -> snapshots::Begun {
        let durable = (!transaction.current).then(|| self.log.durable());
        self.snapshots.lock().begin(transaction.origin, transaction.context, durable)
    }

    /// Replaces a transaction's snapshot by a newer one, which is pinned. Returns false if the
    /// partition moves to another node.
    pub(crate) fn advance_snapshot(&self, transaction: &Transaction, old: Snapshot, new: Snapshot) -> bool {
        self.snapshots.lock().advance(transaction.origin, transaction.context, (old, new))
    }

    /// Releases a transaction's snapshot. If the transaction is being repeated at it, it can begin at
    /// it again.
    pub(crate) fn end_snapshot(&self, transaction: &Transaction, snapshot: Snapshot) {
        let mut snapshots = self.snapshots.lock();
        match transaction.is_repeated {
            true => snapshots.set_aside(transaction.origin, transaction.context, snapshot),
            false => snapshots.end(transaction.origin, snapshot.number),
        }
    }

    /// A transaction has ended for its client. If the partition moves, its snapshot is not carried
    /// over.
    pub fn transaction_ended(&self, origin: u64) {
        if origin != 0 && self.has_moved() {
            self.snapshots.lock().ended(origin);
        }
    }

    /// A transaction that was carried here is not repeated.
    pub fn forget_carried(&self, origin: u64) {
        if origin != 0 {
            self.snapshots.lock().forget_carried(origin);
        }
    }

    /// The context of a transaction that was carried here, and has not begun yet.
    pub fn carried_context(&self, origin: u64) -> Option<TransactionContext> {
        self.snapshots.lock().context(origin)
    }

    /// Expires old snapshots: those above the maximum age, which is lower while they retain too
    /// many bytes of replaced pages. Called periodically.
    pub fn bound_snapshots(&self, now_ms: u64, bounds: &SnapshotBounds) {
        self.snapshots.lock().drop_carried(now_ms, 0);
        let held_bytes = self.commits.lock().held_bytes();
        if held_bytes == 0 {
            return;
        }
        let age = if held_bytes > bounds.bytes { bounds.age_if_large } else { bounds.age };
        let old = self.snapshots.lock().older_than(self.log.durable(), now_ms, age.as_millis() as u64);
        if let Some(number) = old {
            self.snapshots.lock().drop_carried(now_ms, number);
            self.expired.fetch_max(number + 1, Ordering::AcqRel);
            self.expiry.notify_waiters();
        }
    }

    /// Returns true if the holder of this snapshot must release it.
    pub(crate) fn is_expired(&self, snapshot: &Snapshot) -> bool {
        snapshot.number < self.expired.load(Ordering::Acquire) || self.has_moved()
    }

    /// Waits until the holder of this snapshot must release it.
    pub async fn expired(&self, snapshot: Snapshot) {
        loop {
            let mut notified = std::pin::pin!(self.expiry.notified());
            // Enabled before the check, so that no notification is lost in between.
            notified.as_mut().enable();
            if self.is_expired(&snapshot) {
                return;
            }
            notified.await;
        }
    }

    /// The memory account of its connections.
    pub fn heap(&self) -> &Arc<Heap> {
        self.stats.heap.get_or_init(|| Arc::new(Heap::of_partition(&self.node.heap)))
    }

    /// The state that the layer above keeps for the partition, created on first use. All callers
    /// use the same type.
    pub fn attachment<T: Attachment + Default>(&self) -> &T {
        let attachment: &dyn Any = &**self.attachment.get_or_init(|| Box::<T>::default());
        match attachment.downcast_ref() {
            Some(attachment) => attachment,
            None => unreachable!("a partition has attachments of one type"),
        }
    }

    /// Closes idle connections.
    pub fn close_idle(&self) {
        if let Some(attachment) = self.attachment.get() {
            attachment.close_idle();
        }
    }

    /// The number of references to the partition that idle connections hold.
    fn idle_references(&self) -> usize {
        self.attachment.get().map_or(0, |attachment| attachment.references())
    }

    /// The temporary files for a new connection.
    pub fn temporary_files(&self) -> TemporaryFiles {
        let space = self.stats.temporary_space(&self.node.temporary);
        TemporaryFiles { area: self.node.spill.clone(), quota: Quota::new(space, u64::MAX) }
    }

    /// Pages that statements have found in memory since the partition was opened.
    pub fn page_hits(&self) -> u64 {
        self.residency.hits()
    }

    /// Bytes of its pages in memory.
    pub fn resident_bytes(&self) -> u64 {
        self.pages.account().resident_bytes()
    }

    /// Returns true if it is a historical version (`time_travel` in `fulmar_maintenance`), which is
    /// read-only.
    pub fn is_historical(&self) -> bool {
        self.log.is_read_only() && self.replica_state.get().is_none()
    }

    /// The error for a write if the partition is read-only here; `None` if it accepts writes.
    pub(crate) fn write_error(&self) -> Option<Error> {
        match (self.log.is_read_only(), self.replica_state.get()) {
            (false, _) => None,
            (true, None) => Some(historical_session_is_read_only()),
            (true, Some(_)) => Some(replica_is_read_only()),
        }
    }

    /// The current version, without pinning it.
    pub fn current(&self) -> Snapshot {
        self.snapshots.lock().current()
    }

    /// The version of a page that a pinned snapshot sees; `None` if the page was never written.
    ///
    /// # Safety
    /// `snapshot` is pinned for as long as the result is used.
    pub(crate) unsafe fn find(&self, page: PageNo, snapshot: &Snapshot) -> Option<&PageVersion> {
        if page > snapshot.page_count {
            return None;
        }
        // SAFETY: the caller's contract.
        unsafe { self.pages.find(page, snapshot.number) }
    }

    /// Returns true if a page has not changed since `snapshot`, which is pinned.
    pub(crate) fn unchanged_since(&self, page: PageNo, snapshot: &Snapshot) -> bool {
        self.pages.newest_number(page) <= snapshot.number
    }

    /// Returns true if the snapshot's version was discarded after a failed log write.
    pub fn is_discarded(&self, snapshot: &Snapshot) -> bool {
        self.any_discarded.load(Ordering::Acquire)
            && self
                .discarded
                .read()
                .iter()
                .any(|(after, upto)| snapshot.number > *after && snapshot.number <= *upto)
    }

    /// Closes the partition because the database was dropped. Commits are rejected from now on.
    pub fn close(&self) {
        let _commits = self.commits.lock();
        self.closed.store(DROPPED, Ordering::Release);
    }

    /// Rejects commits during a restore, until [`Partition::reopen`]. Returns true if the partition
    /// was open.
    pub fn close_to_restore(&self) -> bool {
        let _commits = self.commits.lock();
        self.closed.compare_exchange(OPEN, RESTORING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Accepts commits again after a restore that failed.
    pub fn reopen(&self) {
        let _was_dropped = self.closed.compare_exchange(RESTORING, OPEN, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Closes the partition permanently because it moves to another node. From now on commits are
    /// rejected, running statements end, and waiting ones are woken. Flushes continue. Returns false
    /// if it was closed for another reason.
    pub fn close_to_move(&self) -> bool {
        let commits = self.commits.lock();
        let closed = {
            // A transaction releases its snapshot when it finds the partition closed, so the
            // snapshots are noted under the lock under which it is closed.
            let mut snapshots = self.snapshots.lock();
            let closed = self.closed.compare_exchange(OPEN, MOVING, Ordering::AcqRel, Ordering::Acquire);
            if closed.is_ok() {
                snapshots.depart();
            }
            closed
        };
        drop(commits);
        self.expiry.notify_waiters();
        self.moving.notify_waiters();
        closed.is_ok() || self.has_moved()
    }

    /// Ends the move: the partition is not flushed any more. Callers hold the flush lock.
    pub fn end_move(&self) {
        let _was_dropped = self.closed.compare_exchange(MOVING, MOVED, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns true if it is moving to another node, or has moved there.
    pub fn has_moved(&self) -> bool {
        matches!(self.closed.load(Ordering::Acquire), MOVING | MOVED)
    }

    /// Fails if it is moving to another node, or has moved there.
    pub fn check_not_moved(&self) -> Result<()> {
        if self.has_moved() { Err(moved_error()) } else { Ok(()) }
    }

    /// Returns true if no manifest of it may be stored any more.
    pub fn is_gone(&self) -> bool {
        matches!(self.closed.load(Ordering::Acquire), DROPPED | MOVED)
    }

    /// Waits until it moves to another node.
    pub async fn wait_moved(&self) {
        let mut notified = std::pin::pin!(self.moving.notified());
        // Enabled before the check, so that no notification is lost in between.
        notified.as_mut().enable();
        if !self.has_moved() {
            notified.await;
        }
    }

    /// Sets a lower bound of the numbers of new versions. Called before the first commit.
    pub fn start_numbers_at(&self, first_number: u64) {
        let mut commits = self.commits.lock();
        commits.last_number = commits.last_number.max(first_number.saturating_sub(1));
    }

    /// Marks a replica's partition as stale: the primary has deleted or replaced what it was built
    /// from. The next session opens the partition again.
    pub fn mark_stale(&self) {
        let _was_closed = self.closed.compare_exchange(OPEN, STALE, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns true if it is stale ([`Partition::mark_stale`]).
    pub fn is_stale(&self) -> bool {
        self.closed.load(Ordering::Acquire) == STALE
    }

    /// Releases its resources after it was removed from the list of open partitions.
    pub fn release_resources(&self) {
        self.close_idle();
        self.stats.turns.fetch_add(self.turns.taken(), Ordering::Relaxed);
        self.stats.page_hits.fetch_add(self.residency.hits(), Ordering::Relaxed);
    }

    /// Returns true if commits are rejected.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != OPEN
    }

    /// Returns true if the database was dropped.
    pub fn is_dropped(&self) -> bool {
        self.closed.load(Ordering::Acquire) == DROPPED
    }

    /// The reason why commits are rejected: it is closed, or another process has taken over the
    /// store. `None` if they are accepted.
    pub(crate) fn commit_error(&self) -> Option<Error> {
        if self.is_closed() {
            return Some(self.closed_error());
        }
        self.node.ownership.as_ref().filter(|ownership| ownership.is_fenced()).map(|_| taken_over())
    }

    /// Rejects reads if another process is known to have taken over the store, or the log that the
    /// partition commits to.
    pub fn check_not_taken_over(&self) -> Result<()> {
        if self.node.ownership.as_ref().is_some_and(StoreOwnership::is_fenced) {
            return Err(taken_over());
        }
        // The failure counter is checked first: it is read without a lock, and a fenced log has
        // failed.
        match self.log.statistics().failures.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => self.log.fenced().map_or(Ok(()), |fenced| Err(log_error(fenced))),
        }
    }

    /// The reason why commits are rejected.
    pub fn closed_error(&self) -> Error {
        match self.closed.load(Ordering::Acquire) {
            DROPPED => dropped_error(),
            STALE => snapshot_deleted(),
            MOVING | MOVED => moved_error(),
            _ => Error::new(sqlstate::ADMIN_SHUTDOWN, "database is being restored to an earlier version")
                .hint("Reconnect in a moment, and check the data."),
        }
    }

    /// Returns true if no snapshot is pinned.
    pub(crate) fn current_is_unpinned(&self) -> bool {
        self.snapshots.lock().is_idle()
    }

    /// The schema cookie of the current version. Descriptions of statements are valid while it does
    /// not change.
    pub fn schema_cookie(&self) -> u32 {
        let snapshot = self.pin();
        // SAFETY: pinned until the bytes are copied, and page 1 is always in memory.
        let page = unsafe { self.resident(1, &snapshot) };
        let cookie = page.map_or(0, |page| u32::from_be_bytes([page[40], page[41], page[42], page[43]]));
        self.unpin(snapshot);
        cookie
    }

    /// The bytes of a page at a pinned snapshot; `None` if they are not in memory.
    ///
    /// # Safety
    /// As [`Partition::find`] and [`PageVersion::data`].
    pub(crate) unsafe fn resident(&self, page: PageNo, snapshot: &Snapshot) -> Option<&Page> {
        // SAFETY: the caller's contract.
        unsafe { self.find(page, snapshot).and_then(|version| version.data()) }
    }
}

//! A partition: one SQLite database held as versioned pages.
//!
//! - [`table`] holds the versions ([`version`]) of the pages, [`snapshots`] who sees which, [`residence`] which are in memory,
//! - [`commit`] makes the next version out of a transaction's changes, or says with what it conflicts,
//! - [`large`] puts the pages of large commits into the store first,
//! - [`turns`] and [`rows`] are where transactions wait for each other,
//! - [`outcomes`] remembers how transactions ended whose clients may ask,
//! - [`flush`] tells what has changed since the last manifest,
//! - [`follow`] makes versions of what another process has committed, for who reads beside it,
//! - [`error`] says why something cannot be done,
//! - [`load`] brings in what lies in the store and in the log ([`replay`]), [`ahead`] what a scan will want next, [`hot`] what was wanted before.

mod ahead;
mod commit;
mod error;
mod flush;
mod follow;
mod hot;
mod large;
mod load;
mod outcomes;
mod replay;
mod residence;
mod rows;
mod snapshots;
mod table;
mod turns;
mod version;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fulmar_pages::{HotPages, Page, PageNo, PartitionId};
use fulmar_store::{CommitLog, HotPagesName};
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

pub(crate) use ahead::Ahead;
pub(crate) use commit::{Refused, Room, TransactionStatus, Waits, page_one};
pub(crate) use error::{
    dropped_error, log_error, log_unreadable, opening, owner_writes, past_is_read_only, store_error,
    store_error_of,
};
pub(crate) use flush::{CopiedFrame, Flush, NamedSegment};
pub(crate) use follow::{Followed, Following};
pub(crate) use hot::Run;
pub(crate) use large::Large;
pub(crate) use load::read_frames;
pub(crate) use outcomes::{Outcomes, Status};
pub(crate) use replay::{Logged, Replay};
pub(crate) use residence::{CLASSES, CLASSES_OF_TIERS, Reader, Residence};
pub(crate) use rows::{RowLocks, RowName};
pub(crate) use snapshots::Snapshot;
pub(crate) use turns::{Turn, Turns};
pub(crate) use version::PageVersion;

use crate::connection::Pool;
use crate::heap::Heap;
use crate::node::Node;
use crate::spill::TemporaryFiles;
use crate::sql::StatementCache;
use crate::temporary::{NodeSpace, Quota, TenantSpace};
use crate::tenure::{Tenure, taken_over};
use crate::{Error, Result, sqlstate};

/// Counters of one partition, kept for those who decide where it should live, and its floor. They outlive its closing.
#[derive(Default, Debug)]
pub(crate) struct PartitionStats {
    pub commits: AtomicU64,
    pub conflicts: AtomicU64,
    pub replays: AtomicU64,
    /// Turns of its lives before this one.
    pub turns: AtomicU64,
    pub log_bytes: AtomicU64,
    pub log_pages: AtomicU64,
    /// Pages found in memory, in its lives before this one.
    pub page_hits: AtomicU64,
    /// Pages that had to be read from the store.
    pub page_misses: AtomicU64,
    /// Pages that were read with others.
    pub pages_read_ahead: AtomicU64,
    /// Pages that were read because a life of before had used them.
    pub pages_warmed: AtomicU64,
    /// Warm-ups that have ended, for whatever reason.
    pub warmups_ended: AtomicU64,
    pub pages_evicted: AtomicU64,
    /// What others leave it of the memory for pages.
    pub cache_floor_bytes: AtomicU64,
    /// What SQLite holds for it, of whatever time its sessions look at.
    heap: OnceLock<Arc<Heap>>,
    /// Its temporary files.
    temporary: OnceLock<Arc<TenantSpace>>,
}

impl PartitionStats {
    /// What the temporary files of its sessions are charged to.
    pub(crate) fn temporary_space(&self, node: &Arc<NodeSpace>) -> Arc<TenantSpace> {
        self.temporary.get_or_init(|| TenantSpace::new(node)).clone()
    }
}

/// How long snapshots are held, and how much of what was replaced since.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotBounds {
    /// Bytes of replaced pages that the old snapshots of a partition may hold back.
    pub bytes: u64,
    /// A snapshot that is older is let go of.
    pub age: Duration,
    /// The same while more than `bytes` are held back.
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
const LEFT_BEHIND: u8 = 3;

/// One partition, open on this node.
pub(crate) struct Partition {
    pub id: PartitionId,
    pub lineage: u64,
    pub epoch: u32,
    pub node: Arc<Node>,
    /// Where its commits are made durable.
    pub log: Arc<CommitLog>,
    pages: table::PageTable,
    pub residence: Arc<Residence>,
    snapshots: Mutex<snapshots::Snapshots>,
    commits: Mutex<commit::Commits>,
    pub turns: Turns,
    pub rows: RowLocks,
    pub outcomes: Outcomes,
    pub pool: Pool,
    pub statements: StatementCache,
    pub stats: Arc<PartitionStats>,
    /// [`OPEN`], or why nothing may be committed any more.
    closed: AtomicU8,
    /// Ranges (after, up to) of versions that were discarded while somebody may still see them.
    doomed: RwLock<Vec<(u64, u64)>>,
    any_doomed: AtomicBool,
    loading: load::Loading,
    named: Mutex<flush::Named>,
    /// Snapshots below this version are to be let go of; `expiry` tells who waits.
    expired: AtomicU64,
    expiry: Notify,
    /// The list of hot pages that it has opened with, if there is one; and what it says, once that is read.
    pub(crate) hot_name: OnceLock<HotPagesName>,
    pub(crate) hot_list: OnceLock<HotPages>,
    /// Of a partition that another process owns: how far it is known.
    pub(crate) following: OnceLock<Following>,
    /// Milliseconds on the node's clock when it was last used.
    pub(crate) used_ms: AtomicU64,
}

impl Partition {
    /// Pins the current version.
    pub(crate) fn pin(&self) -> Snapshot {
        self.snapshots.lock().pin()
    }

    /// Pins the newest durable version.
    pub(crate) fn pin_durable(&self) -> Snapshot {
        self.snapshots.lock().pin_durable(self.log.durable())
    }

    /// Gives a pin back.
    pub(crate) fn unpin(&self, snapshot: Snapshot) {
        self.snapshots.lock().unpin(snapshot.number);
    }

    /// Asks holders of old snapshots to let go, if what commits have replaced since takes too much memory or they are too
    /// old. Called now and then.
    pub(crate) fn bound_snapshots(&self, now_ms: u64, bounds: &SnapshotBounds) {
        let held_bytes = self.commits.lock().held_bytes();
        if held_bytes == 0 {
            return;
        }
        let age = if held_bytes > bounds.bytes { bounds.age_if_large } else { bounds.age };
        let old = self.snapshots.lock().older_than(self.log.durable(), now_ms, age.as_millis() as u64);
        if let Some(number) = old {
            self.expired.fetch_max(number + 1, Ordering::AcqRel);
            self.expiry.notify_waiters();
        }
    }

    /// Whether the holder of this snapshot is asked to let go of it.
    pub(crate) fn is_expired(&self, snapshot: &Snapshot) -> bool {
        snapshot.number < self.expired.load(Ordering::Acquire)
    }

    /// Waits until the holder of this snapshot is asked to let go of it.
    pub(crate) async fn expired(&self, snapshot: Snapshot) {
        loop {
            let mut notified = std::pin::pin!(self.expiry.notified());
            // Before the look, so that no notice falls between.
            notified.as_mut().enable();
            if self.is_expired(&snapshot) {
                return;
            }
            notified.await;
        }
    }

    /// What its connections may hold.
    pub(crate) fn heap(&self) -> &Arc<Heap> {
        self.stats.heap.get_or_init(|| Arc::new(Heap::of_partition(&self.node.heap)))
    }

    /// The temporary files of a new connection.
    pub(crate) fn temporary_files(&self) -> TemporaryFiles {
        let space = self.stats.temporary_space(&self.node.temporary);
        TemporaryFiles { area: self.node.spill.clone(), quota: Quota::new(space, u64::MAX) }
    }

    /// Bytes of its pages that are in memory.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.pages.account().resident_bytes()
    }

    /// Whether others are to take nothing of its memory.
    pub(crate) fn is_at_its_floor(&self) -> bool {
        // The floor is the database's as it is now.
        !self.is_past() && self.resident_bytes() <= self.stats.cache_floor_bytes.load(Ordering::Relaxed)
    }

    /// Whether it is a version of the past ([`crate::past`]), which nobody writes to.
    pub(crate) fn is_past(&self) -> bool {
        self.log.is_read_only() && self.following.get().is_none()
    }

    /// The error of who would write to what nobody can write to here; `None` where that can be done.
    pub(crate) fn refuses_writes(&self) -> Option<Error> {
        match (self.log.is_read_only(), self.following.get()) {
            (false, _) => None,
            (true, None) => Some(past_is_read_only()),
            (true, Some(_)) => Some(owner_writes()),
        }
    }

    /// Evicts pages whose turn it is by the node's clock. Answers how many, and whether there are more of those.
    pub(crate) fn evict(&self, clock: u64, most: usize) -> (usize, bool) {
        let _commits = self.commits.lock();
        let (evicted, more) = self.residence.evict(clock, most, &self.pages, |version| self.cost(version));
        self.stats.pages_evicted.fetch_add(evicted as u64, Ordering::Relaxed);
        (evicted, more)
    }

    /// What it costs to read a version back that lies in the store, see [`crate::cache`]. The caller holds the commit lock.
    fn cost(&self, version: &PageVersion) -> u64 {
        let Some(near) = self.node.store.disk_cache() else { return 1 };
        match self.pages.frame(version) {
            Ok(Some((segment, location))) => near.cost(segment, location),
            _ => 1,
        }
    }

    /// The current version, not pinned.
    pub(crate) fn current(&self) -> Snapshot {
        self.snapshots.lock().current()
    }

    /// The version of a page that a pinned snapshot sees; `None` if the page was never written.
    ///
    /// # Safety
    /// `snapshot` is pinned for as long as the answer is used.
    pub(crate) unsafe fn find(&self, page: PageNo, snapshot: &Snapshot) -> Option<&PageVersion> {
        if page > snapshot.page_count {
            return None;
        }
        // SAFETY: passed on to the caller.
        unsafe { self.pages.find(page, snapshot.number) }
    }

    /// Whether a page has not changed between `snapshot`, which is pinned, and now.
    pub(crate) fn unchanged_since(&self, page: PageNo, snapshot: &Snapshot) -> bool {
        self.pages.newest_number(page) <= snapshot.number
    }

    /// Whether the version that a snapshot shows was discarded after a failed log write.
    pub(crate) fn is_doomed(&self, snapshot: &Snapshot) -> bool {
        self.any_doomed.load(Ordering::Acquire)
            && self
                .doomed
                .read()
                .iter()
                .any(|(after, upto)| snapshot.number > *after && snapshot.number <= *upto)
    }

    /// It was dropped: from now on nothing is committed.
    pub(crate) fn close(&self) {
        let _commits = self.commits.lock();
        self.closed.store(DROPPED, Ordering::Release);
    }

    /// From now on nothing is committed, unless it opens again. Answers whether it was open.
    pub(crate) fn close_to_restore(&self) -> bool {
        let _commits = self.commits.lock();
        self.closed.compare_exchange(OPEN, RESTORING, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// It was not restored.
    pub(crate) fn reopen(&self) {
        let _was_dropped = self.closed.compare_exchange(RESTORING, OPEN, Ordering::AcqRel, Ordering::Acquire);
    }

    /// It is not to be opened by anybody any more as it is: its owner has gone on.
    pub(crate) fn leave(&self) {
        let _was_closed =
            self.closed.compare_exchange(OPEN, LEFT_BEHIND, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn is_left_behind(&self) -> bool {
        self.closed.load(Ordering::Acquire) == LEFT_BEHIND
    }

    /// Nobody finds it any more.
    pub(crate) fn let_go(&self) {
        self.pool.clear();
        self.stats.turns.fetch_add(self.turns.taken(), Ordering::Relaxed);
        self.stats.page_hits.fetch_add(self.residence.hits(), Ordering::Relaxed);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != OPEN
    }

    pub(crate) fn is_dropped(&self) -> bool {
        self.closed.load(Ordering::Acquire) == DROPPED
    }

    /// Why nothing can be committed, if that is so: it is closed, or another process owns the store.
    pub(crate) fn takes_nothing(&self) -> Option<Error> {
        if self.is_closed() {
            return Some(self.closed_error());
        }
        self.node.tenure.as_ref().filter(|tenure| tenure.is_over()).map(|_| taken_over())
    }

    /// Refuses to read it if another process is known to own it: the store, or the log that it commits to.
    pub(crate) fn check_not_taken_over(&self) -> Result<()> {
        if self.node.tenure.as_ref().is_some_and(Tenure::is_over) {
            return Err(taken_over());
        }
        // The counter of failures comes first: it is read without a lock, and a log that was taken over has failed.
        match self.log.statistics().failures.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => self.log.fenced().map_or(Ok(()), |fenced| Err(log_error(fenced))),
        }
    }

    /// Why nothing can be committed.
    pub(crate) fn closed_error(&self) -> Error {
        match self.closed.load(Ordering::Acquire) {
            DROPPED => dropped_error(),
            LEFT_BEHIND => error::left_behind(),
            _ => Error::new(sqlstate::ADMIN_SHUTDOWN, "the database is being restored to an earlier version")
                .hint("connect again, and look at what is there; it takes a moment"),
        }
    }

    /// Whether no snapshot is pinned.
    pub(crate) fn current_is_unpinned(&self) -> bool {
        self.snapshots.lock().is_idle()
    }

    /// The schema cookie of the current version: descriptions of statements are good while it stays.
    pub(crate) fn schema_cookie(&self) -> u32 {
        let snapshot = self.pin();
        // SAFETY: pinned until the bytes are copied; it is page 1.
        let page = unsafe { self.resident(1, &snapshot) };
        let cookie = page.map_or(0, |page| u32::from_be_bytes([page[40], page[41], page[42], page[43]]));
        self.unpin(snapshot);
        cookie
    }

    /// The bytes of a page at a pinned snapshot, if they are in memory.
    ///
    /// # Safety
    /// As [`Partition::find`] and [`PageVersion::data`].
    pub(crate) unsafe fn resident(&self, page: PageNo, snapshot: &Snapshot) -> Option<&Page> {
        // SAFETY: passed on to the caller.
        unsafe { self.find(page, snapshot).and_then(|version| version.data()) }
    }
}

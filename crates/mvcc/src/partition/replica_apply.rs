//! Read replica of a partition that another process owns: applies the primary's log records.
//!
//! ```text
//!  manifest at version 90     records 88 89 | 91 92 95 96    the manifest contains the first two
//!  current: 90 -------------------------------> 92 ---> 96   object by object, whole commits only
//! ```
//!
//! One task at a time applies records ([`ReplicaState`]), up to a position that a poll of the log
//! has returned. Other sessions continue to read at their snapshots. Several records of one batch
//! become one version, the last record's. So a reader always sees the primary's partition as it was
//! after some commit.
//!
//! # Memory
//! Pages made by records are in no known segment, so they stay in memory. After the primary has
//! flushed, a manifest names their segments. [`Partition::adopt_manifest`] takes their frames from
//! it, and they can be evicted. It also moves all other pages to the segments of the newest
//! manifest, so that segments which compaction has replaced are not needed any more when the
//! primary deletes them.
//!
//! # Stale partitions
//! If the log was truncated beyond the replica's position, or a segment was deleted from the store,
//! the partition is *stale*. The next session opens it again at the newest manifest.
//! Sessions that use the stale one can still read the pages in memory. For any other page they get
//! 40001, never a different version of it.
//!
//! # Cancellation
//! Applying can be cancelled at any await: a batch is installed as a whole, and the position
//! advances after that. A record that is applied again is skipped by its number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::{Durability, Manifest, PAGE_SIZE, PageNo, Record, RecordKind, diff};
use fulmar_sqlite::{Error, Result};
use fulmar_store::{LogObject, LogPosition, LogTail, Lsn, ManifestName, NextRecords, StoreError};
use hashbrown::HashMap;

use super::commit::NewPages;
use super::load::read_frames;
use super::{Partition, Snapshot};
use crate::error::{corrupt, log_unreadable, snapshot_deleted, store_error_of};
use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::store::Frame;

/// Pages changed by records, approximately, before a batch becomes a version.
const BATCH_PAGES: usize = 1024;

/// The log that a replica's partition follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LogSource {
    /// Names the logs of the owner.
    pub log_node: u128,
    /// The epoch of the ownership; 0 without a cluster.
    pub epoch: u32,
}

/// The replication state of a partition.
pub struct ReplicaState {
    /// The log that it follows.
    pub source: LogSource,
    /// The durability of its commits.
    pub durability: Durability,
    /// Everything before this position is applied.
    position: tokio::sync::Mutex<LogPosition>,
    /// When the manifest that it was opened with was made (milliseconds since 1970); `None` without
    /// one.
    pub manifest_unix_ms: Option<u64>,
    /// When it last checked for a newer manifest (monotonic milliseconds).
    checked_ms: AtomicU64,
}

/// The result of applying the primary's log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ApplyResult {
    /// Everything up to the position is applied.
    UpToDate,
    /// Some of it has been deleted.
    Stale,
    /// The primary has restored the partition, and continues with a new epoch.
    Restored,
}

/// Records that become one version.
struct Batch {
    number: u64,
    page_count: u32,
    /// The minimum of the partition's size during the batch. Pages beyond it have no base.
    least_pages: u32,
    pages: HashMap<PageNo, PageBytes>,
    frames: HashMap<PageNo, Frame>,
    outcomes: Vec<(u64, bool)>,
}

/// A pinned version.
struct PinnedSnapshot<'a>(&'a Partition, Snapshot);

impl Drop for PinnedSnapshot<'_> {
    fn drop(&mut self) {
        self.0.unpin(self.1);
    }
}

impl ReplicaState {
    /// Follows from a position in the log.
    pub fn new(
        source: LogSource,
        durability: Durability,
        position: LogPosition,
        manifest_unix_ms: Option<u64>,
        now_ms: u64,
    ) -> Self {
        let (position, checked_ms) = (position.into(), now_ms.into());
        ReplicaState { source, durability, position, manifest_unix_ms, checked_ms }
    }

    /// Returns true if the last check for a newer manifest was at least `period_ms` ago. The caller
    /// must then check: it counts as done.
    pub fn is_due(&self, now_ms: u64, period_ms: u64) -> bool {
        let checked_ms = self.checked_ms.load(Ordering::Relaxed);
        let exchange =
            || self.checked_ms.compare_exchange(checked_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed);
        now_ms.saturating_sub(checked_ms) >= period_ms && exchange().is_ok()
    }
}

impl Batch {
    fn after(current: &Snapshot) -> Self {
        Batch {
            number: current.number,
            page_count: current.page_count,
            least_pages: current.page_count,
            pages: HashMap::new(),
            frames: HashMap::new(),
            outcomes: Vec::new(),
        }
    }

    /// Pages that were cut off, are within the size again, and have not been written since.
    fn ended(&self, before: &Snapshot) -> Vec<PageNo> {
        let regrown = self.least_pages + 1..=before.page_count.min(self.page_count);
        regrown.filter(|no| !self.pages.contains_key(no) && !self.frames.contains_key(no)).collect()
    }
}

impl Partition {
    fn pinned(&self) -> PinnedSnapshot<'_> {
        PinnedSnapshot(self, self.pin())
    }

    /// Applies the primary's log up to a position.
    pub async fn catch_up(&self, tail: &LogTail, to: LogPosition) -> Result<ApplyResult> {
        let Some(following) = self.replica_state.get() else { return Ok(ApplyResult::UpToDate) };
        let mut position = following.position.lock().await;
        while *position < to {
            match tail.next(self.id, *position, to).await.map_err(log_unreadable)? {
                NextRecords::End => *position = to,
                NextRecords::Gone => return Ok(ApplyResult::Stale),
                NextRecords::Records(object, behind) => match self.apply(object.records(self.id)).await? {
                    ApplyResult::UpToDate => *position = behind,
                    other => return Ok(other),
                },
            }
        }
        Ok(ApplyResult::UpToDate)
    }

    /// Applies the records of objects of earlier logs, in order.
    pub async fn apply_objects(&self, objects: &[Arc<LogObject>]) -> Result<ApplyResult> {
        for object in objects {
            match self.apply(object.records(self.id)).await? {
                ApplyResult::UpToDate => {}
                other => return Ok(other),
            }
        }
        Ok(ApplyResult::UpToDate)
    }

    /// Applies records in order.
    async fn apply<'r>(&self, records: impl Iterator<Item = Record<'r>>) -> Result<ApplyResult> {
        let mut records = records.peekable();
        while records.peek().is_some() {
            let current = self.pinned();
            let mut batch = Batch::after(&current.1);
            while batch.pages.len() < BATCH_PAGES
                && let Some(record) = records.next()
            {
                match self.add(&mut batch, &record, &current.1).await {
                    Ok(ApplyResult::UpToDate) => {}
                    other => return other,
                }
            }
            self.install_batch(batch, current).await?;
        }
        Ok(ApplyResult::UpToDate)
    }

    /// Adds a record to a batch based on `current`. Skips records that are applied already, and
    /// those from before a restore.
    async fn add(&self, batch: &mut Batch, record: &Record<'_>, current: &Snapshot) -> Result<ApplyResult> {
        let version = &record.header.version;
        if !matches!(record.header.kind, RecordKind::Commit | RecordKind::Decide)
            || version.epoch < self.epoch
        {
            return Ok(ApplyResult::UpToDate);
        }
        if version.epoch > self.epoch {
            return Ok(ApplyResult::Restored);
        }
        if version.number <= batch.number {
            return Ok(ApplyResult::UpToDate);
        }
        // It is based on a version that the replica does not have: a newer manifest contains that
        // one.
        if record.header.previous.is_some_and(|previous| previous > batch.number) {
            return Ok(ApplyResult::Stale);
        }
        for segment in record.segments() {
            let index = match self.node.store.segment_index(segment).await {
                Err(StoreError::Missing { .. }) => return Ok(ApplyResult::Stale),
                index => index.map_err(|error| store_error_of(self.id, error))?,
            };
            let segment = self.pages.segments().index_of(segment);
            for (no, location) in index.frames(self.id) {
                batch.pages.remove(&no);
                batch.frames.insert(no, Frame { segment, location });
            }
        }
        for entry in record.pages() {
            if !batch.pages.contains_key(&entry.no) {
                let page = match diff::is_full(entry.diff) {
                    true => PageBytes::zeroed(),
                    false => self.base(batch, entry.no, current).await?,
                };
                batch.pages.insert(entry.no, page);
            }
            if let Some(page) = batch.pages.get_mut(&entry.no) {
                diff::apply(entry.diff, page).map_err(|error| corrupt(self.id, error))?;
            }
        }
        // Only after the whole record is applied: if a record fails, the batch is dropped.
        (batch.number, batch.page_count) = (version.number, record.header.page_count);
        if batch.page_count < batch.least_pages {
            batch.least_pages = batch.page_count;
        }
        let end = batch.page_count;
        batch.pages.retain(|no, _| *no <= end);
        batch.frames.retain(|no, _| *no <= end);
        batch.outcomes.extend(record.outcomes().map(|outcome| (outcome.transaction, outcome.committed)));
        Ok(ApplyResult::UpToDate)
    }

    /// A page as it is in the batch, otherwise at the base version.
    async fn base(&self, batch: &Batch, no: PageNo, current: &Snapshot) -> Result<PageBytes> {
        let mut page = PageBytes::zeroed();
        if let Some(Frame { segment, location }) = batch.frames.get(&no) {
            let segment = self.pages.segments().known(*segment)?;
            self.node
                .store
                .read_page(segment, *location, &mut page)
                .await
                .map_err(|error| self.read_error(error))?;
        } else if no <= batch.least_pages {
            self.copy_page(no, current, &mut page).await?;
        }
        Ok(page)
    }

    /// Installs a batch as the version after the pinned one.
    async fn install_batch(&self, batch: Batch, current: PinnedSnapshot<'_>) -> Result<()> {
        if batch.number == current.1.number {
            return Ok(());
        }
        let ended = batch.ended(&current.1);
        let bytes = (batch.pages.len() * PAGE_SIZE) as u64;
        let room = self.node.room(bytes).await?;
        let frames = batch.frames.into_iter().filter(|(no, _)| !batch.pages.contains_key(no)).collect();
        let new = NewPages { frames, ended, pages: batch.pages.into_iter().collect() };
        // Commits that the primary has made durable are durable here.
        let snapshot = Snapshot { number: batch.number, lsn: Lsn(0), page_count: batch.page_count };
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        // Unpinned first, so that the replaced version is freed now if no other reader sees it.
        drop(current);
        for (transaction, committed) in batch.outcomes {
            self.outcomes.decided(transaction, committed, Lsn(0));
        }
        self.put_version(&mut commits, snapshot, new, &mut tally);
        drop(commits);
        room.keep();
        self.pages.account().settle_reserved(tally, bytes);
        Ok(())
    }

    /// The number of the manifest that it reads its pages from.
    pub fn manifest_number(&self) -> u64 {
        self.named_number()
    }

    /// The name of that manifest; `None` if there is none.
    pub fn manifest_name(&self) -> Option<ManifestName> {
        let number = self.manifest_number();
        (number > 0).then_some(ManifestName { partition: self.id, epoch: self.epoch, number })
    }

    /// Moves its pages to the frames that a newer manifest names, as far as they are the manifest's
    /// versions. A manifest ahead of the applied position is ignored. (A page that is visible now
    /// and not newer than the manifest is the manifest's: a version in between would be visible.)
    pub async fn adopt_manifest(&self, manifest: &Manifest) -> Result<()> {
        let number = manifest.version.number;
        if number <= self.manifest_number() || number > self.current().number {
            return Ok(());
        }
        let (frames, pages) = read_frames(&self.node, self.pages.segments(), manifest).await?;
        let current = self.pinned();
        let (mut tally, mut placed) = (Tally::default(), Vec::new());
        for (no, frame) in frames {
            // SAFETY: pinned.
            let version = unsafe { self.find(no, &current.1) };
            if let Some(version) = version.filter(|version| version.number() <= number)
                && self.pages.set_frame_if_new(version, frame, &mut tally)
            {
                placed.push(no);
            }
        }
        self.pages.account().settle(tally);
        let mut commits = self.commits.lock();
        // Pages that were changed meanwhile stay dirty.
        for no in placed.iter().filter(|no| self.pages.newest_number(**no) <= number) {
            commits.dirty.remove(no);
        }
        drop(commits);
        drop(current);
        self.residency.queue(placed, self.node.cache.clock());
        self.set_named(manifest, &pages);
        Ok(())
    }

    /// The error for a page that could not be read. A missing segment makes a replica's partition
    /// stale.
    pub(super) fn read_error(&self, error: StoreError) -> Error {
        match error {
            StoreError::Missing { .. } if self.replica_state.get().is_some() => {
                self.mark_stale();
                snapshot_deleted()
            }
            error => store_error_of(self.id, error),
        }
    }
}

//! Opening a partition from its manifest and the log, and reading its pages from the store.
//!
//! - Opening reads only the manifest (the newest one, or a historical one, see `time_travel` in
//!   `fulmar_maintenance`) and
//!   the indexes of its segments.
//! - Pages are read on access, or prewarmed because they were in use before the partition was
//!   closed (`hot` in `fulmar_maintenance`). They can be evicted again.
//! - Log records beyond the manifest are applied when the partition is opened, not when the node
//!   starts. Recovery reads the log once and sorts its records by partition, so ten thousand idle
//!   tenants cost nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::record::{self, Record, RecordKind};
use fulmar_pages::{Outcome, PAGE_SIZE, Page, PageNo, PartitionId, Timeline, diff};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{CommitLog, Lsn, SingleFlight, StoreError};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;

use super::carried::CARRIED_MS;
use super::commits::{Commits, LargeSegment};
use super::{
    BufferResidency, CarriedSnapshots, Outcomes, PageVersion, Partition, Replay, RowLocks, Snapshot,
    TurnQueue, named, snapshots, table,
};
use crate::cache::Evictable;
use crate::error::{corrupt, store_error};
use crate::memory::{Account, Reservation, Tally};
use crate::node::Node;
use crate::page_memory::PageBytes;
use crate::store::{Frame, Segments};

/// What a partition is opened from.
#[derive(Clone, Copy, Default)]
pub struct Contents<'a> {
    /// The newest manifest.
    pub manifest: Option<&'a Manifest>,
    /// Log records beyond it.
    pub replay: Option<&'a Replay>,
    /// Snapshots that the previous owner has carried over, if there was no commit since.
    pub snapshots: Option<&'a CarriedSnapshots>,
}

impl<'a> Contents<'a> {
    /// The contents of a manifest.
    pub fn of(manifest: Option<&'a Manifest>) -> Self {
        Contents { manifest, ..Contents::default() }
    }
}

impl Partition {
    /// Opens a partition of this node from a manifest and the log records beyond it.
    pub async fn open(
        node: Arc<Node>,
        log: Arc<CommitLog>,
        stats: Arc<super::PartitionStats>,
        id: PartitionId,
        timeline: Timeline,
        contents: Contents<'_>,
    ) -> Result<Arc<Partition>> {
        let Contents { manifest, replay, snapshots } = contents;
        let Timeline { lineage, epoch } = timeline;
        let account = Account::new(node.memory.clone());
        let pages = table::PageTable::new(account.clone());
        let mut recovered = Recovered::new(epoch, manifest);
        if let Some(manifest) = manifest {
            node.clock.observe(manifest.timestamp);
            (recovered.frames, recovered.named_pages) =
                read_frames(&node, pages.segments(), manifest).await?;
        }
        let mut dirty_since = None;
        if let Some(replay) = replay {
            for logged in replay.records() {
                let record = record::decode(&logged.body).map_err(|e| corrupt(id, e))?;
                if !recovered.needs(&record) {
                    continue;
                }
                if logged.is_ambiguous {
                    return Err(ambiguous(id, record.header.version.number));
                }
                recovered.apply(&node, pages.segments(), id, &record).await?;
            }
            dirty_since = Some(replay.since());
        }
        let current = Snapshot { number: recovered.number, lsn: Lsn(0), page_count: recovered.page_count };
        let mut tally = Tally::default();
        // Only of the version that was released.
        let snapshots = snapshots.filter(|carried| {
            !carried.is_empty() && !recovered.applied && carried.released() <= recovered.base_number
        });
        for (no, frame) in recovered.frames.iter().filter(|(no, _)| !recovered.pages.contains_key(*no)) {
            let number = match snapshots {
                Some(carried) => carried.install_older(*no, &pages, &mut tally),
                None => recovered.base_number,
            };
            pages.install(*no, number, None, Some(*frame), &mut tally);
        }
        let mut commits = Commits::new(current, node.first_number());
        if let Some(carried) = snapshots {
            carried.install_rest(|no| recovered.frames.contains_key(&no), &pages, &mut tally);
            commits.push_recent(carried.replaced(current));
        }
        commits.large = std::mem::take(&mut recovered.large);
        for (no, page) in std::mem::take(&mut recovered.pages) {
            pages.install(no, recovered.number, Some(page), None, &mut tally);
            commits.dirty.insert(no);
        }
        // Settled without waiting for memory: the flush that frees memory may be waiting for this
        // opening.
        account.settle(tally);
        let now_ms = node.clock.monotonic_ms();
        let mut pinned = snapshots::Snapshots::new(current);
        if let Some(carried) = snapshots {
            pinned.expect(carried.transactions(), now_ms + CARRIED_MS);
        }
        commits.dirty_since = dirty_since.filter(|_| recovered.applied).map(|since| (since, now_ms));
        let known =
            recovered.outcomes.into_iter().map(|(transaction, committed)| Outcome { transaction, committed });
        let outcomes = Outcomes::new(recovered.horizon, known);
        let partition = Arc::new(Partition {
            id,
            lineage,
            epoch,
            pages,
            residency: BufferResidency::new(account, node.cache.classes()),
            snapshots: Mutex::new(pinned),
            commits: Mutex::new(commits),
            turns: TurnQueue::new(),
            rows: RowLocks::default(),
            outcomes,
            attachment: OnceLock::new(),
            stats,
            closed: AtomicU8::new(super::OPEN),
            discarded: RwLock::default(),
            any_discarded: AtomicBool::new(false),
            loading: SingleFlight::default(),
            expired: AtomicU64::new(0),
            expiry: Notify::new(),
            moving: Notify::new(),
            hot_name: OnceLock::new(),
            hot_list: OnceLock::new(),
            replica_state: OnceLock::new(),
            used_ms: AtomicU64::new(now_ms),
            named: Mutex::new(named::Named::new(manifest, &recovered.named_pages)),
            node,
            log,
        });
        partition.load_page_one().await?;
        let evictable: Arc<dyn Evictable> = partition.clone();
        partition.node.cache.add(Arc::downgrade(&evictable));
        Ok(partition)
    }

    /// Loads page 1. Validation reads page 1 of any version under the commit lock, so it must
    /// always be in memory. This does not wait for memory: the flush that frees some may be waiting
    /// for this opening.
    async fn load_page_one(&self) -> Result<()> {
        let snapshot = self.pin();
        // SAFETY: pinned until after the load.
        let loaded = match unsafe { self.find(1, &snapshot) } {
            Some(version) if !version.is_resident() => self.read(version).await.map(|page| {
                let room = Reservation::unconditional(self.node.memory.clone(), PAGE_SIZE as u64);
                self.arrived(1, version, page, room);
            }),
            _ => Ok(()),
        };
        self.unpin(snapshot);
        loaded
    }

    /// Reads the bytes of an absent version into memory. They may be evicted again before the
    /// caller reads them. The caller holds a pin on a snapshot that sees the version, and is
    /// outside the residency. `ahead` is the maximum number of pages to read, including this one.
    pub(crate) async fn load(
        &self,
        page: PageNo,
        version: &PageVersion,
        ahead: u32,
        snapshot: &Snapshot,
    ) -> Result<()> {
        if version.is_resident() {
            return Ok(());
        }
        let key = std::ptr::from_ref(version) as usize;
        self.loading.run(key, self.fill(page, version, ahead, snapshot)).await
    }

    fn fill<'a>(
        &'a self,
        page: PageNo,
        version: &'a PageVersion,
        ahead: u32,
        snapshot: &'a Snapshot,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            if version.is_resident() {
                return Ok(());
            }
            self.stats.page_misses.fetch_add(1, Ordering::Relaxed);
            let room = self.node.room(PAGE_SIZE as u64).await?;
            if ahead > 1
                && let Some((segment, location)) = self.pages.frame(version)?
            {
                let near =
                    self.readahead_candidates((segment, (page, version, location)), ahead, snapshot)?;
                // If that fails for any reason, read the one page.
                if near.len() > 1 && self.read_near(segment, &near).await.is_ok() && version.is_resident() {
                    version.touch();
                    return Ok(());
                }
            }
            let read = self.read(version).await?;
            self.arrived(page, version, read, room);
            Ok(())
        }
        .boxed()
    }

    /// Adds bytes that were read from the store, for which memory is reserved.
    pub(super) fn arrived(&self, no: PageNo, version: &PageVersion, page: PageBytes, room: Reservation) {
        if version.fill(page) {
            self.pages.account().keep(room);
            self.residency.queue([no], self.node.cache.clock());
        }
    }

    /// Reads the bytes of a version from the store. The caller holds a pin on a snapshot that sees
    /// it.
    async fn read(&self, version: &PageVersion) -> Result<PageBytes> {
        loop {
            let Some((segment, location)) = self.pages.frame(version)? else {
                return Err(Error::new(sqlstate::INTERNAL, "page is neither in memory nor in the store"));
            };
            let mut page = PageBytes::zeroed();
            match self.node.store.read_page(segment, location, &mut page).await {
                // The page has moved to another segment meanwhile, and the old one was deleted.
                Err(StoreError::Missing { .. })
                    if self.pages.frame(version)? != Some((segment, location)) => {}
                result => return result.map(|()| page).map_err(|error| self.read_error(error)),
            }
        }
    }

    /// Copies a page at a pinned snapshot without keeping it in memory. Returns false if there is
    /// no such page.
    pub async fn copy_page(&self, no: PageNo, snapshot: &Snapshot, out: &mut Page) -> Result<bool> {
        // SAFETY: pinned by the caller.
        let Some(version) = (unsafe { self.find(no, snapshot) }) else { return Ok(false) };
        // SAFETY: nothing is freed while it is copied.
        let copied = self
            .residency
            .with_eviction_blocked(|| unsafe { version.data() }.map(|page| *out = *page).is_some());
        if !copied {
            *out = *self.read(version).await?;
        }
        Ok(true)
    }
}

/// The error for a log record that is based on a version which no manifest has.
fn missing_manifest(id: PartitionId, epoch: u32, found: u64, previous: u64) -> Error {
    let message = format!(
        "manifest of this database is missing: manifests/{id}/{epoch:08x}/{previous:016x} or one near it"
    );
    Error::new(sqlstate::DATA_CORRUPTED, message)
        .detail(format!(
            "The next record in its log is based on version {previous}; the newest stored version is {found}."
        ))
        .hint("Restore the missing object from a copy of the store, or from an older version in the bucket.")
}

/// The error for a log with two different records of one version.
fn ambiguous(id: PartitionId, number: u64) -> Error {
    let message = format!("partition {id}: log contains two different records of version {number}");
    Error::new(sqlstate::DATA_CORRUPTED, message).hint("Restore the data directory from a backup.")
}

/// The state of a partition during recovery.
struct Recovered {
    epoch: u32,
    base_number: u64,
    number: u64,
    page_count: u32,
    frames: HashMap<PageNo, Frame>,
    /// The partition's pages in each of the segments that the manifest names, live or obsolete.
    named_pages: Vec<u64>,
    pages: HashMap<PageNo, PageBytes>,
    /// Segments of large commits. The next manifest names them as they are.
    large: Vec<LargeSegment>,
    horizon: u64,
    outcomes: BTreeMap<u64, bool>,
    applied: bool,
}

impl Recovered {
    fn new(epoch: u32, manifest: Option<&Manifest>) -> Self {
        let base_number = manifest.map_or(0, |m| m.version.number);
        Recovered {
            epoch,
            base_number,
            number: base_number,
            page_count: manifest.map_or(0, |m| m.page_count),
            frames: HashMap::new(),
            named_pages: Vec::new(),
            pages: HashMap::new(),
            large: Vec::new(),
            horizon: manifest.map_or(0, |m| m.outcomes_horizon),
            outcomes: BTreeMap::new(),
            applied: false,
        }
        .with_outcomes(manifest)
    }

    fn with_outcomes(mut self, manifest: Option<&Manifest>) -> Self {
        let known = manifest.map(|m| m.outcomes.as_slice()).unwrap_or_default();
        self.outcomes = known.iter().map(|o| (o.transaction, o.committed)).collect();
        self
    }

    /// Drops the pages beyond the end: a page that is added there later has no base for diffs.
    fn cut(&mut self) {
        let end = self.page_count;
        self.pages.retain(|no, _| *no <= end);
        self.frames.retain(|no, _| *no <= end);
    }

    /// Returns true if a record must be applied: the manifest does not contain it, and it is not
    /// from before a restore.
    fn needs(&self, record: &Record<'_>) -> bool {
        let version = &record.header.version;
        matches!(record.header.kind, RecordKind::Commit | RecordKind::Decide)
            && version.epoch == self.epoch
            && version.number > self.base_number
    }

    /// Applies the next record. Numbers may have gaps (a discarded commit's number is not reused),
    /// but a record must be based on a version that exists. Otherwise a manifest is missing, and
    /// the record's diffs are relative to pages that are not here.
    async fn apply(
        &mut self,
        node: &Node,
        segments: &Segments,
        id: PartitionId,
        record: &Record<'_>,
    ) -> Result<()> {
        if let Some(previous) = record.header.previous.filter(|previous| *previous > self.number) {
            return Err(missing_manifest(id, self.epoch, self.number, previous));
        }
        self.number = record.header.version.number;
        let before = std::mem::replace(&mut self.page_count, record.header.page_count);
        self.applied = true;
        for outcome in record.outcomes() {
            self.outcomes.insert(outcome.transaction, outcome.committed);
        }
        for large in record.segments() {
            let index = node.store.segment_index(large).await.map_err(store_error)?;
            let segment = segments.index_of(large);
            for (no, location) in index.frames(id) {
                self.pages.remove(&no);
                self.frames.insert(no, Frame { segment, location });
            }
            let segment = SegmentRef { id: large, partition: id };
            self.large.push(LargeSegment { number: self.number, segment, pages: index.pages_of(id) as u64 });
        }
        for entry in record.pages() {
            if !self.pages.contains_key(&entry.no) {
                let base = match self.frames.get(&entry.no) {
                    Some(frame) if !diff::is_full(entry.diff) => read_frame(node, segments, *frame).await?,
                    _ => PageBytes::zeroed(),
                };
                self.pages.insert(entry.no, base);
            }
            if let Some(page) = self.pages.get_mut(&entry.no) {
                diff::apply(entry.diff, page).map_err(|e| corrupt(id, e))?;
            }
        }
        if self.page_count < before {
            self.cut();
        }
        Ok(())
    }
}

/// Returns the frame of each page of the manifest's version (later segments override earlier ones),
/// and how many of the partition's pages each segment has.
pub async fn read_frames(
    node: &Node,
    segments: &Segments,
    manifest: &Manifest,
) -> Result<(HashMap<PageNo, Frame>, Vec<u64>)> {
    let mut pages = Vec::new();
    let reads: Vec<_> = manifest.segments.iter().map(|part| node.store.segment_index(part.id)).collect();
    let reads = stream::iter(reads).buffered(node.store.read_concurrency());
    let indexes: Vec<_> = reads.try_collect().await.map_err(store_error)?;
    // Allocated once: growing would need several times as much fresh memory, which is expensive.
    let most: usize =
        manifest.segments.iter().zip(&indexes).map(|(part, index)| index.pages_of(part.partition)).sum();
    let mut frames = HashMap::with_capacity(most.min(manifest.page_count as usize));
    for (part, index) in manifest.segments.iter().zip(indexes) {
        let segment = segments.index_of(part.id);
        pages.push(index.pages_of(part.partition) as u64);
        for (no, location) in index.frames(part.partition) {
            if no <= manifest.page_count {
                frames.insert(no, Frame { segment, location });
            }
        }
    }
    Ok((frames, pages))
}

async fn read_frame(node: &Node, segments: &Segments, frame: Frame) -> Result<PageBytes> {
    let segment = segments.known(frame.segment)?;
    let mut page = PageBytes::zeroed();
    node.store.read_page(segment, frame.location, &mut page).await.map_err(store_error)?;
    Ok(page)
}

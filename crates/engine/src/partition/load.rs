//! Bringing a partition in: from its manifest, from the log's records since, and page by page from the store.
//!
//! A partition opens with its manifest and the indexes of its segments alone; pages are read when they are touched.
//! What the log holds beyond the manifest is applied when the partition opens, not when the node starts: recovery
//! reads the log once and sorts its records by partition, and ten thousand idle tenants cost nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use fulmar_pages::manifest::Manifest;
use fulmar_pages::record::{self, Record, RecordKind};
use fulmar_pages::{FormatError, Outcome, PAGE_SIZE, Page, PageNo, PartitionId, diff};
use fulmar_store::{CommitLog, Lsn};
use futures::future::try_join_all;
use hashbrown::{HashMap, HashSet};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, OnceCell};

use super::{Outcomes, PageVersion, Partition, RowLocks, Snapshot, Turns, commit, flush, snapshots, table};
use crate::connection::Pool;
use crate::node::Node;
use crate::sql::StatementCache;
use crate::store::{Frame, Segments};
use crate::{Error, Result, sqlstate};

/// The log's records of one partition, in order.
#[derive(Default)]
pub(crate) struct Replay {
    /// At or before the beginning of the first one.
    pub since: Option<Lsn>,
    /// Bodies with the positions at which they end.
    pub records: Vec<(Lsn, Box<[u8]>)>,
}

impl Replay {
    pub(crate) fn push(&mut self, end: Lsn, body: &[u8]) {
        // The frame around a body is short.
        self.since.get_or_insert(Lsn(end.0.saturating_sub(body.len() as u64 + 64)));
        self.records.push((end, body.into()));
    }
}

/// Loads that are under way, so that many readers of one cold page cause one read.
pub(super) type Loading = Mutex<HashMap<usize, Arc<OnceCell<()>>>>;

impl Partition {
    /// Opens a partition of this node.
    pub(crate) async fn open(
        node: Arc<Node>,
        log: Arc<CommitLog>,
        stats: Arc<super::PartitionStats>,
        id: PartitionId,
        lineage: u64,
        epoch: u32,
        replay: Option<&Replay>,
    ) -> Result<Arc<Partition>> {
        let manifest = node.store.latest_manifest(id).await.map_err(store_error)?;
        let segments = Segments::default();
        let pages = table::PageTable::new();
        let mut recovered = Recovered::new(manifest.as_ref());
        if let Some(manifest) = &manifest {
            (recovered.frames, recovered.named_pages) = read_frames(&node, &segments, manifest).await?;
        }
        let mut dirty_since = None;
        if let Some(replay) = replay {
            for (_, body) in &replay.records {
                let record = record::decode(body).map_err(|e| corrupt(id, e))?;
                recovered.apply(&node, &segments, id, &record).await?;
            }
            dirty_since = replay.since;
        }
        let current = Snapshot { number: recovered.number, lsn: Lsn(0), page_count: recovered.page_count };
        let resident = recovered.pages.len() as u64 * PAGE_SIZE as u64;
        if !node.memory.reserve(resident) {
            return Err(node.memory.exhausted());
        }
        for (no, frame) in recovered.frames.iter().filter(|(no, _)| !recovered.pages.contains_key(*no)) {
            pages.install(*no, recovered.base_number, None, Some(*frame));
        }
        let mut commits = commit::Commits::new(current);
        commits.dirty.extend(recovered.from_log.iter().copied());
        for (no, page) in std::mem::take(&mut recovered.pages) {
            pages.install(no, recovered.number, Some(page), None);
            commits.dirty.insert(no);
        }
        let now_ms = node.clock.monotonic_ms();
        commits.dirty_since = dirty_since.filter(|_| recovered.applied).map(|since| (since, now_ms));
        let known =
            recovered.outcomes.into_iter().map(|(transaction, committed)| Outcome { transaction, committed });
        let outcomes = Outcomes::new(recovered.horizon, known);
        let partition = Arc::new(Partition {
            id,
            lineage,
            epoch,
            pages,
            segments,
            snapshots: Mutex::new(snapshots::Snapshots::new(current)),
            commits: Mutex::new(commits),
            turns: Turns::new(),
            rows: RowLocks::default(),
            outcomes,
            pool: Pool::default(),
            statements: StatementCache::default(),
            stats,
            closed: AtomicBool::new(false),
            doomed: RwLock::default(),
            any_doomed: AtomicBool::new(false),
            loading: Loading::default(),
            expired: AtomicU64::new(0),
            expiry: Notify::new(),
            used_ms: AtomicU64::new(now_ms),
            named: Mutex::new(flush::Named::new(
                manifest.map(|m| m.segments).unwrap_or_default(),
                recovered.named_pages,
            )),
            node,
            log,
        });
        partition.load_page_one().await?;
        Ok(partition)
    }

    /// Validation looks at page 1 of any version under the commit lock, so it is always in memory.
    async fn load_page_one(&self) -> Result<()> {
        let snapshot = self.pin();
        // SAFETY: pinned until after the load.
        let loaded = match unsafe { self.find(1, &snapshot) } {
            Some(version) => self.load(version).await,
            None => Ok(()),
        };
        self.unpin(snapshot);
        loaded
    }

    /// Brings the bytes of an absent version to memory. The caller holds a pin on a snapshot that sees it.
    pub(crate) async fn load(&self, version: &PageVersion) -> Result<()> {
        let (None, Some(frame)) = (version.data(), version.frame()) else { return Ok(()) };
        let key = std::ptr::from_ref(version) as usize;
        let cell = self.loading.lock().entry(key).or_default().clone();
        let result = cell.get_or_try_init(|| self.fill(version, frame)).await.map(|_| ());
        self.loading.lock().remove(&key);
        result
    }

    async fn fill(&self, version: &PageVersion, frame: Frame) -> Result<()> {
        if version.data().is_some() {
            return Ok(());
        }
        let page = read_frame(&self.node, &self.segments, frame).await?;
        if !self.node.memory.reserve(PAGE_SIZE as u64) {
            return Err(self.node.memory.exhausted());
        }
        if version.fill(page) {
            self.pages.filled();
        } else {
            self.node.memory.release(PAGE_SIZE as u64);
        }
        Ok(())
    }
}

/// A partition's state while records are applied to it.
struct Recovered {
    base_number: u64,
    number: u64,
    page_count: u32,
    frames: HashMap<PageNo, Frame>,
    /// Pages in the segments that the manifest names, live or not.
    named_pages: u64,
    pages: HashMap<PageNo, Box<Page>>,
    /// Pages whose frames the manifest does not know: they lie in the segments of large commits.
    from_log: HashSet<PageNo>,
    horizon: u64,
    outcomes: BTreeMap<u64, bool>,
    applied: bool,
}

impl Recovered {
    fn new(manifest: Option<&Manifest>) -> Self {
        let base_number = manifest.map_or(0, |m| m.version.number);
        Recovered {
            base_number,
            number: base_number,
            page_count: manifest.map_or(0, |m| m.page_count),
            frames: HashMap::new(),
            named_pages: 0,
            pages: HashMap::new(),
            from_log: HashSet::new(),
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

    /// Forgets what lies beyond the end: a page that comes back there has no base to differ from.
    fn cut(&mut self) {
        let end = self.page_count;
        self.pages.retain(|no, _| *no <= end);
        self.frames.retain(|no, _| *no <= end);
        self.from_log.retain(|no| *no <= end);
    }

    /// Applies a record. Numbers may have gaps (a discarded commit's number is not reused), but never go back; what
    /// the manifest covers is passed over.
    async fn apply(
        &mut self,
        node: &Node,
        segments: &Segments,
        id: PartitionId,
        record: &Record<'_>,
    ) -> Result<()> {
        let kept = matches!(record.header.kind, RecordKind::Commit | RecordKind::Decide);
        if !kept || record.header.version.number <= self.base_number {
            return Ok(());
        }
        if record.header.version.number <= self.number {
            let message = format!(
                "partition {id}: the log holds version {} after {}",
                record.header.version.number, self.number
            );
            return Err(Error::new(sqlstate::DATA_CORRUPTED, message)
                .hint("restore the data directory from a backup"));
        }
        self.number = record.header.version.number;
        let before = std::mem::replace(&mut self.page_count, record.header.page_count);
        self.applied = true;
        for outcome in record.outcomes() {
            self.outcomes.insert(outcome.transaction, outcome.committed);
        }
        for segment in record.segments() {
            let index = node.store.segment_index(segment).await.map_err(store_error)?;
            let segment = segments.index_of(segment);
            for (no, location) in index.frames(id) {
                self.pages.remove(&no);
                self.frames.insert(no, Frame { segment, location });
                self.from_log.insert(no);
            }
        }
        for entry in record.pages() {
            if !self.pages.contains_key(&entry.no) {
                let base = match self.frames.get(&entry.no) {
                    Some(frame) if !diff::is_full(entry.diff) => read_frame(node, segments, *frame).await?,
                    _ => Box::new([0; PAGE_SIZE]),
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

/// Where each page of a manifest's version lies: later segments override earlier ones.
pub(crate) async fn read_frames(
    node: &Node,
    segments: &Segments,
    manifest: &Manifest,
) -> Result<(HashMap<PageNo, Frame>, u64)> {
    let mut frames = HashMap::new();
    let mut pages = 0;
    // All at once: far away, each takes as long as all of them.
    let indexes = manifest.segments.iter().map(|part| node.store.segment_index(part.id));
    let indexes = try_join_all(indexes).await.map_err(store_error)?;
    for (part, index) in manifest.segments.iter().zip(indexes) {
        let segment = segments.index_of(part.id);
        for (no, location) in index.frames(part.partition) {
            pages += 1;
            if no <= manifest.page_count {
                frames.insert(no, Frame { segment, location });
            }
        }
    }
    Ok((frames, pages))
}

async fn read_frame(node: &Node, segments: &Segments, frame: Frame) -> Result<Box<Page>> {
    let segment = segments.known(frame.segment)?;
    node.store.read_page(segment, frame.location).await.map_err(store_error)
}

pub(crate) fn store_error(error: fulmar_store::StoreError) -> Error {
    Error::new(sqlstate::IO_ERROR, error.to_string())
        .hint("see to the store; `fulmar verify` reads all of it, and /metrics counts its failures")
}

fn corrupt(id: PartitionId, error: FormatError) -> Error {
    Error::new(sqlstate::DATA_CORRUPTED, format!("a log record of partition {id} is damaged: {error}"))
        .hint("restore the data directory from a backup")
}

//! A partition that another process owns: records of the owner's log become its versions.
//!
//! ```text
//!   manifest at version 90       records 88 89 | 91 92 95 96      the first two are in the manifest
//!   current: 90 ---------------------------------> 92 ---> 96     object by object, whole commits always
//! ```
//!
//! One at a time applies records ([`Following`]), up to a place in the log that a look has answered; everybody else goes on
//! reading at the snapshots that they have. Several records at once make one version: the last one's. So what is seen is always what
//! the owner's partition was after some commit.
//!
//! # Memory
//! Pages that records have made lie in no segment that is known, so they stay in memory. When the owner has flushed, a manifest
//! says where they lie: [`Partition::adopt`] learns it, and they may leave. It moves all others to the segments of the newest
//! manifest, too, so that those which compaction has replaced are not needed any more when the owner collects them.
//!
//! # What cannot go on
//! Where the log has been cut behind the partition's place, or a segment is gone from the store, the partition is *left behind*:
//! whoever comes next opens it anew, at the newest manifest. Who has it goes on with the pages that are in memory; a page that is not
//! gets 40001, and never another version of it.
//!
//! # Interruptions
//! Whoever applies may go away at any await: a batch is put in as a whole, and the place moves on after that. What is applied
//! again is passed over by its number.

use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::{Durability, Manifest, PAGE_SIZE, PageNo, Record, RecordKind, diff};
use fulmar_store::{Ahead, LogPlace, LogTail, Lsn, ManifestName, StoreError};
use hashbrown::HashMap;

use super::commit::NewPages;
use super::error::{corrupt, left_behind, log_unreadable, store_error_of};
use super::load::read_frames;
use super::{Partition, Snapshot};
use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::store::Frame;
use crate::{Error, Result};

/// Pages that are changed by records before they are made a version, about.
const BATCH_PAGES: usize = 1024;

/// How far a partition has followed its owner.
pub(crate) struct Following {
    pub durability: Durability,
    /// Everything before is applied.
    place: tokio::sync::Mutex<LogPlace>,
    /// When the manifest that it was opened with was made (milliseconds since 1970), if there was one.
    pub manifest_unix_ms: Option<u64>,
    /// When a newer one was looked for (monotonic milliseconds).
    looked_ms: AtomicU64,
}

/// What came of following the owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Followed {
    /// Everything up to the place is applied.
    Here,
    /// Some of it is not there any more.
    LeftBehind,
    /// The owner has restored it, and goes on with another one.
    Restored,
}

/// Records that become one version.
struct Batch {
    number: u64,
    page_count: u32,
    /// The fewest pages that the partition has had meanwhile: what lies beyond has no base.
    least_pages: u32,
    pages: HashMap<PageNo, PageBytes>,
    frames: HashMap<PageNo, Frame>,
    outcomes: Vec<(u64, bool)>,
}

/// A pinned version.
struct Pinned<'a>(&'a Partition, Snapshot);

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.0.unpin(self.1);
    }
}

impl Following {
    pub(crate) fn new(
        durability: Durability,
        place: LogPlace,
        manifest_unix_ms: Option<u64>,
        now_ms: u64,
    ) -> Self {
        Following { durability, place: place.into(), manifest_unix_ms, looked_ms: now_ms.into() }
    }

    /// Whether so much time has passed since a newer manifest was looked for. Then that counts as done.
    pub(crate) fn is_due(&self, now_ms: u64, period_ms: u64) -> bool {
        let looked_ms = self.looked_ms.load(Ordering::Relaxed);
        let exchange =
            || self.looked_ms.compare_exchange(looked_ms, now_ms, Ordering::Relaxed, Ordering::Relaxed);
        now_ms.saturating_sub(looked_ms) >= period_ms && exchange().is_ok()
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

    /// Pages that the partition had and has lost, which are there again and have not been written.
    fn ended(&self, before: &Snapshot) -> Vec<PageNo> {
        let there_again = self.least_pages + 1..=before.page_count.min(self.page_count);
        there_again.filter(|no| !self.pages.contains_key(no) && !self.frames.contains_key(no)).collect()
    }
}

impl Partition {
    fn pinned(&self) -> Pinned<'_> {
        Pinned(self, self.pin())
    }

    /// Applies what the owner's log holds up to a place.
    pub(crate) async fn catch_up(&self, tail: &LogTail, to: LogPlace) -> Result<Followed> {
        let Some(following) = self.following.get() else { return Ok(Followed::Here) };
        let mut place = following.place.lock().await;
        while *place < to {
            match tail.next(self.id, *place, to).await.map_err(log_unreadable)? {
                Ahead::End => *place = to,
                Ahead::Gone => return Ok(Followed::LeftBehind),
                Ahead::Records(object, behind) => match self.apply(object.records(self.id)).await? {
                    Followed::Here => *place = behind,
                    other => return Ok(other),
                },
            }
        }
        Ok(Followed::Here)
    }

    /// Applies records in their order.
    async fn apply<'r>(&self, records: impl Iterator<Item = Record<'r>>) -> Result<Followed> {
        let mut records = records.peekable();
        while records.peek().is_some() {
            let current = self.pinned();
            let mut batch = Batch::after(&current.1);
            while batch.pages.len() < BATCH_PAGES
                && let Some(record) = records.next()
            {
                match self.add(&mut batch, &record, &current.1).await {
                    Ok(Followed::Here) => {}
                    other => return other,
                }
            }
            self.put(batch, current).await?;
        }
        Ok(Followed::Here)
    }

    /// Adds a record to a batch upon `current`. What is covered is passed over, and so is what came before a restore.
    async fn add(&self, batch: &mut Batch, record: &Record<'_>, current: &Snapshot) -> Result<Followed> {
        let version = &record.header.version;
        if !matches!(record.header.kind, RecordKind::Commit | RecordKind::Decide)
            || version.epoch < self.epoch
        {
            return Ok(Followed::Here);
        }
        if version.epoch > self.epoch {
            return Ok(Followed::Restored);
        }
        if version.number <= batch.number {
            return Ok(Followed::Here);
        }
        // It goes on from what was never here: the manifest that has it is not the one that was found.
        if record.header.previous.is_some_and(|previous| previous > batch.number) {
            return Ok(Followed::LeftBehind);
        }
        for segment in record.segments() {
            let index = match self.node.store.segment_index(segment).await {
                Err(StoreError::Missing { .. }) => return Ok(Followed::LeftBehind),
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
        // Not before all of it is there: a record that fails leaves the batch to nobody.
        (batch.number, batch.page_count) = (version.number, record.header.page_count);
        if batch.page_count < batch.least_pages {
            batch.least_pages = batch.page_count;
        }
        let end = batch.page_count;
        batch.pages.retain(|no, _| *no <= end);
        batch.frames.retain(|no, _| *no <= end);
        batch.outcomes.extend(record.outcomes().map(|outcome| (outcome.transaction, outcome.committed)));
        Ok(Followed::Here)
    }

    /// A page as the batch has it, or as it was before.
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

    /// Makes a batch the version after the pinned one.
    async fn put(&self, batch: Batch, current: Pinned<'_>) -> Result<()> {
        if batch.number == current.1.number {
            return Ok(());
        }
        let ended = batch.ended(&current.1);
        let bytes = (batch.pages.len() * PAGE_SIZE) as u64;
        let room = self.node.room(bytes).await?;
        let frames = batch.frames.into_iter().filter(|(no, _)| !batch.pages.contains_key(no)).collect();
        let new = NewPages { frames, ended, pages: batch.pages.into_iter().collect() };
        // What was committed for good is durable at once.
        let snapshot = Snapshot { number: batch.number, lsn: Lsn(0), page_count: batch.page_count };
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        // What it replaces goes at once, if nobody else sees it.
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

    /// The number of the manifest whose segments its pages are read from.
    pub(crate) fn manifest_number(&self) -> u64 {
        self.named_number()
    }

    /// That manifest's name; `None` if there is none.
    pub(crate) fn manifest_name(&self) -> Option<ManifestName> {
        let number = self.manifest_number();
        (number > 0).then_some(ManifestName { partition: self.id, epoch: self.epoch, number })
    }

    /// Reads its pages from where a newer manifest says, as far as they are what that says. One that is ahead of what has been
    /// applied tells nothing yet. (A page that is visible now and not newer than the manifest is the manifest's: had
    /// another one come between, it would be visible.)
    pub(crate) async fn adopt(&self, manifest: &Manifest) -> Result<()> {
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
                && self.pages.place(version, frame, &mut tally)
            {
                placed.push(no);
            }
        }
        self.pages.account().settle(tally);
        let mut commits = self.commits.lock();
        // What has come meanwhile stays.
        for no in placed.iter().filter(|no| self.pages.newest_number(**no) <= number) {
            commits.dirty.remove(no);
        }
        drop(commits);
        drop(current);
        self.residence.queue(placed, self.node.cache.clock());
        self.set_named(manifest, &pages);
        Ok(())
    }

    /// What reading a page of a segment has failed with. A segment that is gone leaves a partition of somebody else's behind.
    pub(super) fn read_error(&self, error: StoreError) -> Error {
        match error {
            StoreError::Missing { .. } if self.following.get().is_some() => {
                self.leave();
                left_behind()
            }
            error => store_error_of(self.id, error),
        }
    }
}

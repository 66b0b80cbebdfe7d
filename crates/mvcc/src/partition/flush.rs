//! The partition's part of flushes and compaction: the changes since the last manifest, and the
//! segments that it names.

use fulmar_pages::manifest::Manifest;
use fulmar_pages::{Outcome, PAGE_SIZE, PageNo, SegmentId};
use fulmar_sqlite::Result;
use fulmar_store::{Lsn, ManifestName};
use hashbrown::HashSet;

use super::commits::LargeSegment;
use super::named::{Named, NamedSegment};
use super::{Partition, Snapshot};
use crate::error::store_error_of;
use crate::memory::Tally;
use crate::store::Frame;

/// A frame that was copied into another segment.
pub struct CopiedFrame {
    /// Its page.
    pub page: PageNo,
    /// The frame in the old segment.
    pub old: Frame,
    /// The frame in the new segment.
    pub new: Frame,
}

/// A running flush: a pinned snapshot and the pages to write.
pub struct Flush {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// The number of its manifest.
    pub number: u64,
    /// When the snapshot was current.
    pub timestamp: u64,
    /// The pages to write.
    pub pages: Vec<PageNo>,
    /// Segments of large commits since the last flush. The manifest names them as they are.
    pub large: Vec<LargeSegment>,
    /// All changed pages, including those that were cut off: a failed log write may bring them
    /// back.
    changed: HashSet<PageNo>,
}

impl Partition {
    /// Where in the log the first unflushed commit begins, and when it was made (monotonic
    /// milliseconds). Commits of a running flush count as unflushed.
    pub fn oldest_dirty(&self) -> Option<(Lsn, u64)> {
        let commits = self.commits.lock();
        commits.flushing_since.or(commits.dirty_since)
    }

    /// Begins a flush of the changes since the last one; `None` if there are none.
    pub fn begin_flush(&self) -> Option<Flush> {
        self.oldest_dirty().is_some().then(|| self.begin_forced_flush())
    }

    /// Begins a flush that stores a manifest even without changes.
    pub fn begin_forced_flush(&self) -> Flush {
        let mut commits = self.commits.lock();
        commits.flushing_since = commits.dirty_since.take();
        let changed = std::mem::take(&mut commits.dirty);
        let large = commits.large.clone();
        let snapshot = self.pin();
        let timestamp = self.node.clock.tick();
        // If there was no commit since the newest manifest, the next manifest needs a new number.
        let number =
            if snapshot.number > self.named.lock().number { snapshot.number } else { commits.take_number() };
        drop(commits);
        let mut pages: Vec<PageNo> =
            changed.iter().copied().filter(|page| *page <= snapshot.page_count).collect();
        pages.sort_unstable();
        Flush { snapshot, number, timestamp, pages, large, changed }
    }

    /// Releases the snapshot. If the flush failed, its pages are dirty again. Called once per flush.
    pub fn end_flush(&self, flush: &mut Flush, done: bool) {
        let mut commits = self.commits.lock();
        let since = commits.flushing_since.take();
        if !done {
            commits.dirty.extend(std::mem::take(&mut flush.changed));
            commits.dirty_since = since.or(commits.dirty_since);
        }
        drop(commits);
        self.unpin(flush.snapshot);
    }

    /// The number of the newest manifest.
    pub fn named_number(&self) -> u64 {
        self.named.lock().number
    }

    /// The newest manifest, if it was stored since the partition was opened.
    pub fn new_manifest(&self) -> Option<ManifestName> {
        let named = self.named.lock();
        let is_new = named.number > named.opened_number;
        is_new.then_some(ManifestName { partition: self.id, epoch: self.epoch, number: named.number })
    }

    /// Returns true if the partition has neither contents nor a manifest.
    pub fn is_blank(&self) -> bool {
        let has_segments = !self.named.lock().segments.is_empty();
        !has_segments && self.current().page_count == 0 && self.is_settled()
    }

    /// The segments that the newest manifest names, oldest first.
    pub fn named_segments(&self) -> Vec<NamedSegment> {
        self.named.lock().segments.clone()
    }

    /// Records that a manifest is about to be stored. If its put gets no answer, it may exist, or
    /// appear later. Therefore its segments are kept, and the next flush stores it first: then it
    /// exists, or never will.
    pub fn begin_manifest_put(&self, manifest: &Manifest, pages: &[u64]) {
        self.named.lock().uncertain = Some((manifest.clone(), pages.to_vec()));
    }

    /// Returns true if a manifest names all commits, and it is known which one.
    pub fn is_settled(&self) -> bool {
        self.oldest_dirty().is_none() && !self.has_uncertain_manifest()
    }

    /// Returns true if there is a manifest in doubt ([`Partition::uncertain_manifest`]).
    pub fn has_uncertain_manifest(&self) -> bool {
        self.named.lock().uncertain.is_some()
    }

    /// Drops the uncertain manifest: another one has its name, so it will never be stored.
    pub fn number_is_taken(&self, manifest: &Manifest) {
        let mut named = self.named.lock();
        named.uncertain = None;
        named.number = named.number.max(manifest.version.number);
    }

    /// The manifest whose put by an earlier flush is uncertain, and the partition's pages in each
    /// of its segments.
    pub fn uncertain_manifest(&self) -> Option<(Manifest, Vec<u64>)> {
        self.named.lock().uncertain.clone()
    }

    /// Records that the new manifest is durable. `pages` are the partition's pages in each of its
    /// segments.
    pub fn set_named(&self, manifest: &Manifest, pages: &[u64]) {
        let mut named = self.named.lock();
        let opened_number = named.opened_number;
        *named = Named { opened_number, ..Named::new(Some(manifest), pages) };
        drop(named);
        // Not earlier: until the manifest is durable, the collector finds the segments here.
        self.commits.lock().large.retain(|large| large.number > manifest.version.number);
    }

    /// Calls `read` with the segments that the newest manifest names, oldest first, and its size in
    /// pages.
    pub fn with_named<T>(&self, read: impl FnOnce(&[NamedSegment], u32) -> T) -> T {
        let named = self.named.lock();
        read(&named.segments, named.page_count)
    }

    /// Replaces adjacent segments by the one that they were merged into; the next manifest names
    /// that. Returns false if they are no longer in the list. Callers hold the flush lock.
    pub fn replace_named(&self, sources: &[NamedSegment], merged: NamedSegment) -> bool {
        let mut named = self.named.lock();
        let Some(begin) = named.segments.windows(sources.len()).position(|found| found == sources) else {
            return false;
        };
        named.segments.splice(begin..begin + sources.len(), [merged]);
        true
    }

    /// Records the frames of flushed pages, after a manifest that names the segment is durable. The
    /// pages can then be evicted.
    pub async fn set_flushed_frames(&self, flush: &Flush, segment: SegmentId) -> Result<()> {
        let index =
            self.node.store.segment_index(segment).await.map_err(|error| store_error_of(self.id, error))?;
        let segment = self.pages.segments().index_of(segment);
        let mut tally = Tally::default();
        for (no, location) in index.frames(self.id) {
            // SAFETY: the flush has pinned the snapshot.
            if let Some(version) = unsafe { self.find(no, &flush.snapshot) } {
                self.pages.set_frame(version, Frame { segment, location }, &mut tally);
            }
        }
        self.pages.account().settle(tally);
        self.residency.queue(index.frames(self.id).map(|(no, _)| no), self.node.cache.clock());
        Ok(())
    }

    /// Moves versions to the frames that compaction has copied. A version is moved only if its
    /// frame is the one that was copied, so the new frame has the same bytes, whatever was
    /// committed or flushed meanwhile. Versions that only older snapshots see keep their frames
    /// until those snapshots are released. A reader that has looked up the old frame, and finds its
    /// segment deleted, looks it up again ([`super::load`]).
    pub fn move_frames(&self, copied: impl Iterator<Item = CopiedFrame>) {
        let snapshot = self.pin();
        for CopiedFrame { page, old, new } in copied {
            // SAFETY: pinned.
            if let Some(version) = unsafe { self.find(page, &snapshot) } {
                self.pages.move_frame(version, old, new);
            }
        }
        self.unpin(snapshot);
    }

    /// The index of a segment in the partition's frames, for callers that need it for many frames.
    pub fn segment_number(&self, id: SegmentId) -> u32 {
        self.pages.segments().index_of(id)
    }

    /// Bytes that the next flush would write.
    pub fn changed_bytes(&self) -> u64 {
        (self.commits.lock().dirty.len() * PAGE_SIZE) as u64
    }

    /// The horizon and the durable outcomes, for the manifest.
    pub fn durable_outcomes(&self) -> (u64, Vec<Outcome>) {
        self.outcomes.durable(self.log.durable())
    }

    /// Segments that are needed in addition to those that the newest manifest names. Absent pages
    /// may be read from them, records in the log and the next manifest name them, or an uncertain
    /// manifest does.
    pub fn frame_segments(&self) -> Vec<SegmentId> {
        let mut segments = self.pages.segments().in_use();
        segments.extend(self.commits.lock().large.iter().map(|large| large.segment.id));
        let named = self.named.lock();
        segments
            .extend(named.uncertain.iter().flat_map(|(manifest, _)| &manifest.segments).map(|part| part.id));
        segments
    }

    /// Returns true if no session uses the partition, apart from `known` references, and nothing is
    /// pinned.
    pub fn is_unused(self: &std::sync::Arc<Self>, known: usize) -> bool {
        // Each idle connection holds one reference.
        std::sync::Arc::strong_count(self) <= known + self.idle_references() && self.current_is_unpinned()
    }
}

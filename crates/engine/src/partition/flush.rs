//! A partition's side of flushes and compaction: what has changed since the last manifest, and what that names.

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::{Outcome, PAGE_SIZE, PageNo, SegmentId};
use fulmar_store::{Lsn, ManifestName};
use hashbrown::HashSet;

use super::large::LargeSegment;
use super::{Partition, Snapshot, store_error_of};
use crate::Result;
use crate::compact::Work;
use crate::memory::Tally;
use crate::store::Frame;

/// A segment that the newest manifest names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedSegment {
    pub segment: SegmentRef,
    /// The partition's pages in it, live or not.
    pub pages: u64,
}

/// A page's frame that was copied into another segment.
pub(crate) struct CopiedFrame {
    pub page: PageNo,
    /// Where it was.
    pub old: Frame,
    /// Where it is in the other segment.
    pub new: Frame,
}

/// What the newest manifest says.
#[derive(Default)]
pub(super) struct Named {
    /// The oldest first.
    segments: Vec<NamedSegment>,
    number: u64,
    /// The number when the partition was opened.
    opened_number: u64,
    page_count: u32,
    /// A newer manifest that is being stored, or of which it is not known whether it was.
    unsure: Option<(Manifest, Vec<u64>)>,
}

impl Named {
    /// `pages` are those of the partition in each of the segments.
    pub(super) fn new(manifest: Option<&Manifest>, pages: &[u64]) -> Self {
        let Some(manifest) = manifest else { return Named::default() };
        let segments = manifest.segments.iter().zip(pages);
        Named {
            segments: segments
                .map(|(segment, pages)| NamedSegment { segment: *segment, pages: *pages })
                .collect(),
            number: manifest.version.number,
            opened_number: manifest.version.number,
            page_count: manifest.page_count,
            unsure: None,
        }
    }
}

/// A flush under way: a pinned snapshot and the pages to write.
pub(crate) struct Flush {
    pub snapshot: Snapshot,
    /// Of its manifest.
    pub number: u64,
    /// When the snapshot was current.
    pub timestamp: u64,
    pub pages: Vec<PageNo>,
    /// Segments of large commits since the last flush, which the manifest names as they are.
    pub large: Vec<LargeSegment>,
    /// All that had changed, those pages included that were cut off: a failed log write may bring them back.
    changed: HashSet<PageNo>,
}

impl Partition {
    /// Where in the log the first unflushed commit begins, and when it was made (monotonic milliseconds).
    /// A flush that is under way counts as not done.
    pub(crate) fn oldest_dirty(&self) -> Option<(Lsn, u64)> {
        let commits = self.commits.lock();
        commits.flushing_since.or(commits.dirty_since)
    }

    /// Takes over what has changed since the last flush; `None` if nothing has.
    pub(crate) fn begin_flush(&self) -> Option<Flush> {
        self.oldest_dirty().is_some().then(|| self.begin_any_flush())
    }

    /// The same for who wants a manifest in any case.
    pub(crate) fn begin_any_flush(&self) -> Flush {
        let mut commits = self.commits.lock();
        commits.flushing_since = commits.dirty_since.take();
        let changed = std::mem::take(&mut commits.dirty);
        let large = commits.large.clone();
        let snapshot = self.pin();
        let timestamp = self.node.clock.tick();
        // Where no commit has come since the newest manifest, the next one needs a number of its own.
        let number =
            if snapshot.number > self.named.lock().number { snapshot.number } else { commits.take_number() };
        drop(commits);
        let mut pages: Vec<PageNo> =
            changed.iter().copied().filter(|page| *page <= snapshot.page_count).collect();
        pages.sort_unstable();
        Flush { snapshot, number, timestamp, pages, large, changed }
    }

    /// Gives the snapshot back; after a failure what was to be flushed stays due.
    pub(crate) fn end_flush(&self, flush: Flush, done: bool) {
        let mut commits = self.commits.lock();
        let since = commits.flushing_since.take();
        if !done {
            commits.dirty.extend(flush.changed);
            commits.dirty_since = since.or(commits.dirty_since);
        }
        drop(commits);
        self.unpin(flush.snapshot);
    }

    /// The number of the newest manifest.
    pub(super) fn named_number(&self) -> u64 {
        self.named.lock().number
    }

    /// Its newest manifest, if that has come since it was opened.
    pub(crate) fn new_manifest(&self) -> Option<ManifestName> {
        let named = self.named.lock();
        let is_new = named.number > named.opened_number;
        is_new.then_some(ManifestName { partition: self.id, epoch: self.epoch, number: named.number })
    }

    pub(crate) fn named_segments(&self) -> Vec<NamedSegment> {
        self.named.lock().segments.clone()
    }

    /// A new manifest is about to be stored. If no answer comes it may be there nevertheless, or appear later. So its
    /// segments are kept, and it is the first to be stored by the next flush: then it is there, or never will be.
    pub(crate) fn begin_to_name(&self, manifest: &Manifest, pages: &[u64]) {
        self.named.lock().unsure = Some((manifest.clone(), pages.to_vec()));
    }

    /// Whether all that was committed is named by a manifest, and it is known by which.
    pub(crate) fn is_settled(&self) -> bool {
        self.oldest_dirty().is_none() && !self.is_unsure()
    }

    /// Whether there is an [`Partition::unsure_manifest`].
    pub(crate) fn is_unsure(&self) -> bool {
        self.named.lock().unsure.is_some()
    }

    /// Another manifest has the name of one that was to be stored, which therefore never will be.
    pub(crate) fn number_is_taken(&self, manifest: &Manifest) {
        let mut named = self.named.lock();
        named.unsure = None;
        named.number = named.number.max(manifest.version.number);
    }

    /// The manifest that an earlier flush began to store, and the partition's pages in each of its segments.
    pub(crate) fn unsure_manifest(&self) -> Option<(Manifest, Vec<u64>)> {
        self.named.lock().unsure.clone()
    }

    /// The new manifest is durable; `pages` are those of the partition in each of its segments.
    pub(crate) fn set_named(&self, manifest: &Manifest, pages: &[u64]) {
        let mut named = self.named.lock();
        let opened_number = named.opened_number;
        *named = Named { opened_number, ..Named::new(Some(manifest), pages) };
        drop(named);
        // Not before: until the manifest is durable it is here that the collector finds them.
        self.commits.lock().large.retain(|large| large.number > manifest.version.number);
    }

    /// What there is to compact.
    pub(crate) fn compaction(&self) -> Option<Work> {
        let named = self.named.lock();
        Work::of(&named.segments, named.page_count)
    }

    /// Neighbours have been merged: the next manifest names that segment in their place. Answers whether they were still
    /// there. Callers hold the flushes' lock.
    pub(crate) fn replace_named(&self, sources: &[NamedSegment], merged: NamedSegment) -> bool {
        let mut named = self.named.lock();
        let Some(begin) = named.segments.windows(sources.len()).position(|found| found == sources) else {
            return false;
        };
        named.segments.splice(begin..begin + sources.len(), [merged]);
        true
    }

    /// A manifest that names the segment is durable: the pages that the flush has written can be read from there, and may
    /// leave memory.
    pub(crate) async fn learn_frames(&self, flush: &Flush, segment: SegmentId) -> Result<()> {
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
        self.residence.queue(index.frames(self.id).map(|(no, _)| no), self.node.cache.clock());
        Ok(())
    }

    /// Frames have been copied into a segment: the versions that were read from the old places are read from the new ones from
    /// now on. A version is moved only if its frame is the very one that was copied, so it has the same bytes in the new
    /// place, whatever was committed or flushed meanwhile. Versions that only older snapshots see stay where they are,
    /// until those let go of them. Whoever has looked up the old place, and finds the segment collected, looks again
    /// ([`super::load`]).
    pub(crate) fn move_frames(&self, copied: impl Iterator<Item = CopiedFrame>) {
        let snapshot = self.pin();
        for CopiedFrame { page, old, new } in copied {
            // SAFETY: pinned.
            if let Some(version) = unsafe { self.find(page, &snapshot) } {
                self.pages.move_frame(version, old, new);
            }
        }
        self.unpin(snapshot);
    }

    /// What a segment is called in the partition's frames; looked up once for many of them.
    pub(crate) fn segment_number(&self, id: SegmentId) -> u32 {
        self.pages.segments().index_of(id)
    }

    /// Bytes of pages that the next flush would write.
    pub(crate) fn changed_bytes(&self) -> u64 {
        (self.commits.lock().dirty.len() * PAGE_SIZE) as u64
    }

    /// Outcomes for the manifest: the horizon, and what is durable.
    pub(crate) fn durable_outcomes(&self) -> (u64, Vec<Outcome>) {
        self.outcomes.durable(self.log.durable())
    }

    /// Segments that are needed besides those that the newest manifest names: absent pages may still be read from them,
    /// records in the log and the next manifest name them, or it is not known whether a manifest does.
    pub(crate) fn frame_segments(&self) -> Vec<SegmentId> {
        let mut segments = self.pages.segments().in_use();
        segments.extend(self.commits.lock().large.iter().map(|large| large.segment.id));
        let named = self.named.lock();
        segments.extend(named.unsure.iter().flat_map(|(manifest, _)| &manifest.segments).map(|part| part.id));
        segments
    }

    /// Whether nobody is attached, besides so many who are known, and nothing is pinned.
    pub(crate) fn is_unused(self: &std::sync::Arc<Self>, known: usize) -> bool {
        // Waiting connections hold one each.
        std::sync::Arc::strong_count(self) <= known + self.pool.len() && self.current_is_unpinned()
    }
}

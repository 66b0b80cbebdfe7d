//! A partition's side of flushes and compaction: what has changed since the last manifest, and what that names.

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::{Manifest, Outcome, PageNo, SegmentId};
use fulmar_store::Lsn;
use hashbrown::HashSet;

use super::large::LargeSegment;
use super::{Partition, Snapshot};
use crate::compact::Work;

/// A segment that the newest manifest names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedSegment {
    pub segment: SegmentRef,
    /// The partition's pages in it, live or not.
    pub pages: u64,
}

/// What the newest manifest says.
#[derive(Default)]
pub(super) struct Named {
    /// The oldest first.
    segments: Vec<NamedSegment>,
    number: u64,
    page_count: u32,
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
            page_count: manifest.page_count,
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
        let large = std::mem::take(&mut commits.large);
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
            let later = std::mem::take(&mut commits.large);
            commits.large = flush.large.into_iter().chain(later).collect();
            commits.dirty_since = since.or(commits.dirty_since);
        }
        drop(commits);
        self.unpin(flush.snapshot);
    }

    pub(crate) fn named_segments(&self) -> Vec<NamedSegment> {
        self.named.lock().segments.clone()
    }

    /// The new manifest is durable; `pages` are those of the partition in each of its segments.
    pub(crate) fn set_named(&self, manifest: &Manifest, pages: &[u64]) {
        *self.named.lock() = Named::new(Some(manifest), pages);
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

    /// Outcomes for the manifest: the horizon, and what is durable.
    pub(crate) fn durable_outcomes(&self) -> (u64, Vec<Outcome>) {
        self.outcomes.durable(self.node.log.durable())
    }

    /// Segments that absent pages may still be read from, besides those that the manifest names.
    pub(crate) fn frame_segments(&self) -> Vec<SegmentId> {
        self.segments.all()
    }

    /// Whether nobody is attached, besides so many who are known, and nothing is pinned.
    pub(crate) fn is_unused(self: &std::sync::Arc<Self>, known: usize) -> bool {
        // Waiting connections hold one each.
        std::sync::Arc::strong_count(self) <= known + self.pool.len() && self.current_is_unpinned()
    }
}

//! A partition's side of a flush: what has changed since the last one, and what the manifest names.

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::{Outcome, PageNo, SegmentId};
use fulmar_store::Lsn;
use hashbrown::HashSet;

use super::large::LargeSegment;
use super::{Partition, Snapshot};
use crate::flush::write_whole;

/// The segments that the newest manifest names.
#[derive(Default)]
pub(super) struct Named {
    segments: Vec<SegmentRef>,
    /// Pages in those segments, live or not.
    pages: u64,
}

impl Named {
    pub(super) fn new(segments: Vec<SegmentRef>, pages: u64) -> Self {
        Named { segments, pages }
    }
}

/// A flush under way: a pinned snapshot and the pages to write.
pub(crate) struct Flush {
    pub snapshot: Snapshot,
    pub pages: Vec<PageNo>,
    /// All pages of the partition are written: the manifest needs no older segment.
    pub whole: bool,
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
        let mut commits = self.commits.lock();
        let since = commits.dirty_since.take()?;
        commits.flushing_since = Some(since);
        let changed = std::mem::take(&mut commits.dirty);
        let large = std::mem::take(&mut commits.large);
        let large_pages: u64 = large.iter().map(|large| large.pages).sum();
        let snapshot = self.pin();
        drop(commits);
        let named = self.named.lock();
        let whole = write_whole(
            named.segments.len(),
            named.pages,
            changed.len() as u64 + large_pages,
            snapshot.page_count,
        );
        drop(named);
        let mut pages: Vec<PageNo> = match whole {
            true => (1..=snapshot.page_count).collect(),
            false => changed.iter().copied().filter(|page| *page <= snapshot.page_count).collect(),
        };
        pages.sort_unstable();
        Some(Flush { snapshot, pages, whole, large, changed })
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

    pub(crate) fn named_segments(&self) -> Vec<SegmentRef> {
        self.named.lock().segments.clone()
    }

    /// The new manifest is durable.
    pub(crate) fn set_named_segments(&self, segments: Vec<SegmentRef>, flush: &Flush) {
        let mut named = self.named.lock();
        let large: u64 = flush.large.iter().map(|large| large.pages).sum();
        let kept = if flush.whole { 0 } else { named.pages + large };
        *named = Named { segments, pages: kept + flush.pages.len() as u64 };
    }

    /// Outcomes for the manifest: the horizon, and what is durable.
    pub(crate) fn durable_outcomes(&self) -> (u64, Vec<Outcome>) {
        self.outcomes.durable(self.log.durable())
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

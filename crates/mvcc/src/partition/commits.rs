//! The state of a partition's commits, protected by the commit lock.

use std::collections::VecDeque;
use std::time::Duration;

use fulmar_pages::PageNo;
use fulmar_pages::manifest::SegmentRef;
use fulmar_store::{Lsn, Urgency};
use hashbrown::HashSet;

use super::snapshots::Snapshot;
use super::version::PageVersion;

/// The segment of a large commit, kept until a manifest names it. A flush adds it to the manifest
/// as it is, so it need not read the pages of the commit before the log is truncated.
#[derive(Clone)]
pub struct LargeSegment {
    /// The number of the commit.
    pub number: u64,
    /// The segment.
    pub segment: SegmentRef,
    /// The pages of the partition in it.
    pub pages: u64,
}

/// A commit whose replaced versions have not been freed.
pub(super) struct UncollectedCommit {
    pub snapshot: Snapshot,
    pub pages: Box<[PageNo]>,
    /// Pages that the partition had before; more than now if the commit shrank it.
    pub page_count_before: u32,
    /// Bytes of older versions that are retained until this commit is collected.
    pub replaced_bytes: u64,
}

/// State protected by the commit lock, in addition to the page chains.
pub(super) struct Commits {
    /// The last number that was assigned; never reused, not even after a discard.
    pub last_number: u64,
    /// The hybrid timestamp of the last commit since the partition was opened; 0 if there was none.
    pub last_timestamp: u64,
    pub recent: VecDeque<UncollectedCommit>,
    /// The sum over `recent`.
    pub replaced_bytes: u64,
    /// The newest version that is durable and below all of `recent`.
    pub settled: Snapshot,
    /// Pages changed since the last flush.
    pub dirty: HashSet<PageNo>,
    /// Segments of large commits that no manifest names yet, including those that a running flush
    /// is about to name.
    pub large: Vec<LargeSegment>,
    /// Where in the log the first commit since the last flush begins, and when it was made
    /// (monotonic milliseconds).
    pub dirty_since: Option<(Lsn, u64)>,
    /// The same for the commits that a running flush writes. The log is needed from there until the
    /// flush's manifest is durable.
    pub flushing_since: Option<(Lsn, u64)>,
    /// Versions that were discarded while readers may still hold pointers to them.
    #[expect(clippy::vec_box, reason = "readers may hold pointers to the versions")]
    pub graveyard: Vec<Box<PageVersion>>,
}

impl Commits {
    /// Creates the state of a partition whose next commits have numbers of at least `first_number`.
    pub(super) fn new(current: Snapshot, first_number: u64) -> Self {
        Commits {
            last_number: current.number.max(first_number.saturating_sub(1)),
            last_timestamp: 0,
            recent: VecDeque::new(),
            replaced_bytes: 0,
            settled: current,
            dirty: HashSet::new(),
            large: Vec::new(),
            dirty_since: None,
            flushing_since: None,
            graveyard: Vec::new(),
        }
    }

    /// Bytes of replaced pages that are retained because a snapshot or a discard may need them.
    pub(super) fn held_bytes(&self) -> u64 {
        self.replaced_bytes
    }

    /// How urgently a commit made now must be durable, by the time since the last one. A partition
    /// whose clients commit one transaction after the other, or concurrently, is not delayed.
    pub(super) fn urgency(&self, timestamp: u64) -> Urgency {
        let milliseconds = |timestamp: u64| timestamp >> 16;
        let since_ms = milliseconds(timestamp).saturating_sub(milliseconds(self.last_timestamp));
        Urgency::Deferred(Duration::from_millis(since_ms))
    }

    /// Assigns a number to a version that no commit makes.
    pub(super) fn take_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn push_recent(&mut self, recent: UncollectedCommit) {
        self.replaced_bytes += recent.replaced_bytes;
        self.recent.push_back(recent);
    }
}

//! What becomes of versions that were replaced: freed when nobody sees them and nobody may need them back, or current again when
//! the log has lost what replaced them.

use std::sync::atomic::Ordering;

use fulmar_store::Lsn;

use super::{Commits, Recent};
use crate::memory::Tally;
use crate::partition::Partition;

impl Partition {
    /// Frees what no snapshot sees and no discard can need.
    pub(super) fn collect_garbage(&self, commits: &mut Commits, tally: &mut Tally) {
        let durable = self.log.durable();
        // In this order: whoever pins from here on begins at a version that is durable up to there, or above; whoever
        // has pinned an older one is counted.
        let oldest = self.snapshots.lock().oldest_from(durable);
        while let Some(first) = commits.recent.front() {
            if first.snapshot.number > oldest || first.snapshot.lsn > durable {
                break;
            }
            for page in &first.pages {
                self.pages.prune(*page, first.snapshot.number, tally);
            }
            for page in first.snapshot.page_count + 1..=first.page_count_before {
                self.pages.remove(page, first.snapshot.number, tally);
            }
            commits.settled = first.snapshot;
            commits.replaced_bytes -= first.replaced_bytes;
            commits.recent.pop_front();
        }
    }

    /// Garbage collection for a partition that has gone quiet.
    pub(crate) fn sweep(&self) {
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        self.collect_garbage(&mut commits, &mut tally);
        let pinned_above = self.snapshots.lock().pinned_above(commits.settled.number);
        if !commits.graveyard.is_empty() && !pinned_above {
            commits.graveyard.drain(..).for_each(|version| self.pages.free(*version, &mut tally));
        }
        self.pages.account().settle(tally);
    }

    /// Discards every version that is not durable: the log lost them. Called by the log's thread, while appends are
    /// refused and before anybody is told.
    pub(crate) fn discard(&self, durable: Lsn) {
        let mut commits = self.commits.lock();
        let keep = commits.recent.partition_point(|commit| commit.snapshot.lsn <= durable);
        let lost: Vec<Recent> = commits.recent.split_off(keep).into();
        commits.replaced_bytes -= lost.iter().map(|commit| commit.replaced_bytes).sum::<u64>();
        if lost.is_empty() {
            return;
        }
        let last_good = commits.recent.back().map_or(commits.settled, |commit| commit.snapshot);
        let mut graveyard = std::mem::take(&mut commits.graveyard);
        for page in lost.iter().flat_map(|commit| commit.pages.iter()) {
            self.pages.discard_above(*page, last_good.number, &mut graveyard);
        }
        for page in lost.iter().flat_map(|commit| commit.snapshot.page_count + 1..=commit.page_count_before) {
            self.pages.discard_above(page, last_good.number, &mut graveyard);
        }
        commits.graveyard = graveyard;
        commits.large.retain(|large| large.number <= last_good.number);
        // A large one has taken its pages from what is to be flushed: what they were before may not lie in the store.
        commits.dirty.extend(lost.iter().flat_map(|commit| commit.pages.iter().copied()));
        self.outcomes.discard(durable);
        self.doomed.write().push((last_good.number, commits.last_number));
        self.any_doomed.store(true, Ordering::Release);
        self.snapshots.lock().fall_back(last_good);
    }
}

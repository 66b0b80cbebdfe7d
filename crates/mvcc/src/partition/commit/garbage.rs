//! Garbage collection and discards of page versions. A replaced version is freed when no snapshot
//! sees it and no discard may need it; it becomes current again if the log has lost the version
//! that replaced it.

use std::sync::atomic::Ordering;

use fulmar_store::Lsn;

use crate::memory::Tally;
use crate::partition::Partition;
use crate::partition::commits::{Commits, UncollectedCommit};

impl Partition {
    /// Frees the versions that no snapshot sees and no discard can need.
    pub(super) fn collect_garbage(&self, commits: &mut Commits, tally: &mut Tally) {
        let durable = self.log.durable();
        // In this order: a reader that pins from here on begins at a version that is durable up to
        // this position, or later. A reader that has pinned an older version is counted.
        let (oldest, current) = {
            let mut snapshots = self.snapshots.lock();
            (snapshots.oldest_from(durable), snapshots.current())
        };
        while let Some(first) = commits.recent.front() {
            if first.snapshot.number > oldest || first.snapshot.lsn > durable {
                break;
            }
            for page in &first.pages {
                self.pages.prune(*page, first.snapshot.number, tally);
            }
            for page in first.snapshot.page_count + 1..=first.page_count_before {
                // If the partition has grown again, lock-free readers may be at the head of the
                // chain. Its end marker stays until the page is written or cut off again.
                match page <= current.page_count {
                    true => self.pages.prune(page, first.snapshot.number, tally),
                    false => self.pages.remove(page, first.snapshot.number, tally),
                }
            }
            commits.settled = first.snapshot;
            commits.replaced_bytes -= first.replaced_bytes;
            commits.recent.pop_front();
        }
    }

    /// Runs garbage collection on a partition that has become idle.
    pub fn sweep(&self) {
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        self.collect_garbage(&mut commits, &mut tally);
        // A reader may have loaded a discarded version as the head of a chain, whatever version it
        // has pinned: it walks from the head to its own. Pins taken since the discard are on the
        // version that the partition has fallen back to, or on versions above all discarded ones.
        // So if all pins are above the discarded versions, none is older than the discard.
        let discarded = self.discarded.read().last().map_or(0, |(_, upto)| *upto);
        if !commits.graveyard.is_empty() && self.snapshots.lock().all_above(discarded) {
            commits.graveyard.drain(..).for_each(|version| self.pages.free(*version, &mut tally));
        }
        self.pages.account().settle(tally);
    }

    /// Discards every version that is not durable: the log has lost them. Called by the log's
    /// thread, while appends are refused and before any waiting commit is notified.
    pub fn discard(&self, durable: Lsn) {
        let mut commits = self.commits.lock();
        let keep = commits.recent.partition_point(|commit| commit.snapshot.lsn <= durable);
        let lost: Vec<UncollectedCommit> = commits.recent.split_off(keep).into();
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
        // A large commit removes its pages from the dirty set. Their previous versions may not be
        // in the store.
        commits.dirty.extend(lost.iter().flat_map(|commit| commit.pages.iter().copied()));
        self.outcomes.discard(durable);
        self.discarded.write().push((last_good.number, commits.last_number));
        self.any_discarded.store(true, Ordering::Release);
        self.snapshots.lock().fall_back(last_good);
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::Database;

    /// A reader at the newest settled version may be walking from the head of a discarded chain.
    #[tokio::test]
    async fn discarded_versions_stay_while_an_older_version_is_pinned() {
        let mut database = Database::new().await;
        database.run("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await;
        let partition = database.partition.clone();
        partition.sweep();
        let snapshot = partition.pin();
        assert_eq!(partition.commits.lock().settled.number, snapshot.number);
        database.run("UPDATE t SET x = 2").await;
        partition.discard(snapshot.lsn);
        assert!(!partition.commits.lock().graveyard.is_empty());
        partition.sweep();
        assert!(
            !partition.commits.lock().graveyard.is_empty(),
            "a reader may still hold a discarded version"
        );
        partition.unpin(snapshot);
        partition.sweep();
        assert!(
            partition.commits.lock().graveyard.is_empty(),
            "without readers the discarded versions must be freed"
        );
    }

    /// Pages that were cut off, and that the partition covers again without having written them,
    /// must be readable.
    #[tokio::test]
    async fn end_marker_stays_if_the_partition_grows_over_the_page_again() {
        let mut database = Database::new().await;
        database.run("CREATE TABLE t(x); INSERT INTO t VALUES (randomblob(400000)); DELETE FROM t").await;
        let partition = database.partition.clone();
        let before = partition.current();
        let held = partition.pin();
        database.run("VACUUM").await;
        let cut = partition.current();
        assert!(cut.page_count < before.page_count);
        // Freed by the transaction that allocated them: SQLite writes few of them.
        database.run("BEGIN; INSERT INTO t VALUES (randomblob(400000)); DELETE FROM t; COMMIT").await;
        let grown = partition.current();
        assert!(grown.page_count > cut.page_count);
        partition.unpin(held);
        partition.sweep();
        assert_eq!(partition.commits.lock().settled.number, grown.number);
        let is_end = |page: &u32| partition.pages.newest_number(*page) == cut.number;
        let covered = cut.page_count + 1..=grown.page_count.min(before.page_count);
        assert!(covered.clone().any(|page| is_end(&page)), "an end marker that readers may hold was freed");
        let missing = covered.filter(|page| partition.pages.newest_number(*page) == 0).count();
        assert_eq!(missing, 0);
        // No page beyond the end of the partition may be left.
        database.run("VACUUM").await;
        partition.sweep();
        let last = partition.current();
        assert!(
            (last.page_count + 1..=grown.page_count).all(|page| partition.pages.newest_number(page) == 0)
        );
    }
}

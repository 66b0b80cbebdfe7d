//! The pinned snapshots of a partition, its current version, and its durable version.
//!
//! Writers begin at the current version. Readers begin at the newest *durable* version: it includes
//! every acknowledged commit, and their answers need not wait for the disk.
//!
//! # Bounds
//! A snapshot retains the page versions that later commits have replaced. [`Snapshots::older_than`]
//! finds the snapshots that were held for too long, and [`super::Partition::bound_snapshots`] asks
//! their holders to release them. The holders release them themselves: SQLite may have pointers
//! into the pages, so a snapshot cannot be revoked from outside. The age of a pin is counted from
//! the first check that finds it below the newest durable version, so that pinning needs no clock.

use std::collections::VecDeque;

use fulmar_store::Lsn;

/// A version of a partition, mostly one that is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The number of the commit.
    pub number: u64,
    /// The commit is durable once the log is durable up to here.
    pub lsn: Lsn,
    /// The size of the partition at that version, in pages.
    pub page_count: u32,
}

/// The current version, and the pinned versions.
pub(crate) struct Snapshots {
    current: Snapshot,
    /// The newest version known to be durable.
    durable: Snapshot,
    /// Versions that are not known to be durable, oldest first.
    pending: VecDeque<Snapshot>,
    /// Oldest first. Short: one entry per pinned version.
    pinned: VecDeque<Pin>,
}

/// A pinned version.
struct Pin {
    number: u64,
    count: u32,
    /// When a check first found it old (monotonic milliseconds).
    seen_ms: Option<u64>,
}

impl Snapshots {
    pub(crate) fn new(current: Snapshot) -> Self {
        Snapshots { current, durable: current, pending: VecDeque::new(), pinned: VecDeque::new() }
    }

    pub(crate) fn current(&self) -> Snapshot {
        self.current
    }

    /// Adds the version of a commit.
    pub(crate) fn push(&mut self, snapshot: Snapshot) {
        self.current = snapshot;
        self.pending.push_back(snapshot);
    }

    /// Falls back to a version: the ones after it were discarded.
    pub(crate) fn fall_back(&mut self, snapshot: Snapshot) {
        self.current = snapshot;
        self.pending.retain(|pending| pending.number <= snapshot.number);
    }

    /// The newest durable version, if the log is durable up to `lsn`.
    pub(crate) fn durable(&mut self, lsn: Lsn) -> Snapshot {
        while let Some(next) = self.pending.front().filter(|next| next.lsn <= lsn) {
            self.durable = *next;
            self.pending.pop_front();
        }
        self.durable
    }

    /// Pins the current version.
    pub(crate) fn pin(&mut self) -> Snapshot {
        self.pin_one(self.current)
    }

    /// Pins the newest durable version.
    pub(crate) fn pin_durable(&mut self, lsn: Lsn) -> Snapshot {
        let durable = self.durable(lsn);
        self.pin_one(durable)
    }

    fn pin_one(&mut self, snapshot: Snapshot) -> Snapshot {
        match self.pinned.iter_mut().rev().find(|pin| pin.number == snapshot.number) {
            Some(pin) => pin.count += 1,
            None => {
                let at =
                    self.pinned.iter().rposition(|pin| pin.number < snapshot.number).map_or(0, |i| i + 1);
                self.pinned.insert(at, Pin { number: snapshot.number, count: 1, seen_ms: None });
            }
        }
        snapshot
    }

    /// Releases a pin.
    pub(crate) fn unpin(&mut self, number: u64) {
        let Some(at) = self.pinned.iter().rposition(|pin| pin.number == number) else {
            debug_assert!(false, "every unpinned snapshot must have been pinned");
            return;
        };
        self.pinned[at].count -= 1;
        if self.pinned[at].count == 0 {
            self.pinned.remove(at);
        }
    }

    /// The oldest version that a reader may see from now on, if the log is durable up to `lsn`.
    pub(crate) fn oldest_from(&mut self, lsn: Lsn) -> u64 {
        let durable = self.durable(lsn).number;
        self.pinned.front().map_or(durable, |pin| pin.number.min(durable))
    }

    /// Returns true if all pinned versions are above `number`.
    pub(crate) fn all_above(&self, number: u64) -> bool {
        self.pinned.front().is_none_or(|pin| pin.number > number)
    }

    /// The newest version that was held for at least `age_ms` since it was found old. A version is
    /// old if it is below the newest durable one, with the log durable up to `lsn`. So a snapshot
    /// that is pinned from now on does not expire with it.
    pub(crate) fn older_than(&mut self, lsn: Lsn, now_ms: u64, age_ms: u64) -> Option<u64> {
        let durable = self.durable(lsn).number;
        let old = self.pinned.iter_mut().take_while(|pin| pin.number < durable);
        old.filter_map(|pin| {
            let age = now_ms.saturating_sub(*pin.seen_ms.get_or_insert(now_ms));
            (age >= age_ms).then_some(pin.number)
        })
        .max()
    }

    /// Returns true if nothing is pinned.
    pub(crate) fn is_idle(&self) -> bool {
        self.pinned.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_visible_is_the_oldest_pin_or_the_newest_durable_version() {
        let at = |number| Snapshot { number, lsn: Lsn(number), page_count: 1 };
        let mut snapshots = Snapshots::new(at(5));
        assert_eq!(snapshots.pin().number, 5);
        snapshots.push(at(6));
        assert_eq!((snapshots.pin().number, snapshots.pin().number), (6, 6));
        assert_eq!(snapshots.oldest_from(Lsn(6)), 5);
        snapshots.unpin(5);
        assert_eq!(snapshots.oldest_from(Lsn(6)), 6);
        snapshots.push(at(9));
        snapshots.unpin(6);
        snapshots.unpin(6);
        assert!(snapshots.is_idle());
        assert_eq!(snapshots.pin_durable(Lsn(7)).number, 6);
        assert_eq!(snapshots.oldest_from(Lsn(9)), 6);
        snapshots.unpin(6);
        assert_eq!(snapshots.durable(Lsn(9)).number, 9);
        assert_eq!(snapshots.oldest_from(Lsn(9)), 9);
    }

    #[test]
    fn snapshot_is_old_if_held_for_the_age_and_not_current() {
        let at = |number| Snapshot { number, lsn: Lsn(number), page_count: 1 };
        let mut snapshots = Snapshots::new(at(5));
        snapshots.pin();
        assert_eq!(snapshots.older_than(Lsn(5), 1_000, 0), None, "the current version is not old");
        snapshots.push(at(6));
        assert_eq!(
            snapshots.older_than(Lsn(5), 1_100, 0),
            None,
            "without a newer durable version it is not old"
        );
        assert_eq!(snapshots.older_than(Lsn(6), 1_200, 400), None);
        snapshots.pin();
        snapshots.push(at(7));
        assert_eq!(snapshots.older_than(Lsn(7), 1_600, 400), Some(5));
        assert_eq!(snapshots.older_than(Lsn(7), 1_999, 400), Some(5));
        assert_eq!(snapshots.older_than(Lsn(7), 2_000, 400), Some(6));
        snapshots.unpin(5);
        snapshots.unpin(6);
        assert_eq!(snapshots.older_than(Lsn(7), 9_999, 0), None);
    }
}

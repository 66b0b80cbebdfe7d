//! Which snapshots of a partition are held, which version is current, and which is durable.
//!
//! Writers begin at the current version. Readers begin at the newest *durable* one: it shows everything that was ever
//! acknowledged, and their answers need not wait for the disk.
//!
//! # Bounds
//! A snapshot keeps in memory what commits have replaced since. [`Snapshots::older_than`] finds those that were held for
//! too long; their holders are asked to let go ([`super::Partition::bound_snapshots`]). They do it themselves: SQLite may have
//! pointers into the pages, so nobody can take a snapshot away from outside. Ages are counted from the first look at a
//! pin on a version that is not the newest any more, so that pinning needs no clock.

use std::collections::VecDeque;

use fulmar_store::Lsn;

/// A version of a partition that a reader holds on to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// The commit's number.
    pub number: u64,
    /// The commit is durable once the log is durable up to here.
    pub lsn: Lsn,
    /// Pages of the partition at that version.
    pub page_count: u32,
}

/// The current version and the pins on it and on older ones.
pub(crate) struct Snapshots {
    current: Snapshot,
    /// The newest version that was seen to be durable.
    durable: Snapshot,
    /// Versions after it, oldest first.
    pending: VecDeque<Snapshot>,
    /// Oldest first. Short: one entry for each version that somebody holds.
    pinned: VecDeque<Pin>,
}

/// A version that is held.
struct Pin {
    number: u64,
    count: u32,
    /// When who bounds snapshots first saw it to be old (monotonic milliseconds).
    seen_ms: Option<u64>,
}

impl Snapshots {
    pub(crate) fn new(current: Snapshot) -> Self {
        Snapshots { current, durable: current, pending: VecDeque::new(), pinned: VecDeque::new() }
    }

    pub(crate) fn current(&self) -> Snapshot {
        self.current
    }

    /// A commit has made a version.
    pub(crate) fn push(&mut self, snapshot: Snapshot) {
        self.current = snapshot;
        self.pending.push_back(snapshot);
    }

    /// The versions after this one were discarded.
    pub(crate) fn fall_back(&mut self, snapshot: Snapshot) {
        self.current = snapshot;
        self.pending.retain(|pending| pending.number <= snapshot.number);
    }

    /// The newest version that is durable, where the log is durable up to `lsn`.
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

    /// Gives a pin back.
    pub(crate) fn unpin(&mut self, number: u64) {
        let Some(at) = self.pinned.iter().rposition(|pin| pin.number == number) else {
            debug_assert!(false, "unpinned a snapshot that was not pinned");
            return;
        };
        self.pinned[at].count -= 1;
        if self.pinned[at].count == 0 {
            self.pinned.remove(at);
        }
    }

    /// The oldest version that anybody can see from now on, where the log is durable up to `lsn`.
    pub(crate) fn oldest_from(&mut self, lsn: Lsn) -> u64 {
        let durable = self.durable(lsn).number;
        self.pinned.front().map_or(durable, |pin| pin.number.min(durable))
    }

    /// Whether all pins were taken on versions above `number`, or there is none.
    pub(crate) fn all_above(&self, number: u64) -> bool {
        self.pinned.front().is_none_or(|pin| pin.number > number)
    }

    /// The newest version that has been held for `age_ms` at least since it was seen to be old: older than the newest
    /// durable one, where the log is durable up to `lsn`. So nobody who begins from now on can be asked to let go.
    pub(crate) fn older_than(&mut self, lsn: Lsn, now_ms: u64, age_ms: u64) -> Option<u64> {
        let durable = self.durable(lsn).number;
        let old = self.pinned.iter_mut().take_while(|pin| pin.number < durable);
        old.filter_map(|pin| {
            let age = now_ms.saturating_sub(*pin.seen_ms.get_or_insert(now_ms));
            (age >= age_ms).then_some(pin.number)
        })
        .max()
    }

    /// Whether nothing is pinned.
    pub(crate) fn is_idle(&self) -> bool {
        self.pinned.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_the_oldest_pin_or_the_newest_durable_version() {
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
    fn only_what_is_held_for_long_and_is_not_current_is_old() {
        let at = |number| Snapshot { number, lsn: Lsn(number), page_count: 1 };
        let mut snapshots = Snapshots::new(at(5));
        snapshots.pin();
        assert_eq!(snapshots.older_than(Lsn(5), 1_000, 0), None, "it is current");
        snapshots.push(at(6));
        assert_eq!(snapshots.older_than(Lsn(5), 1_100, 0), None, "what came after it is not durable");
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

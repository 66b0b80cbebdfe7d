//! Which snapshots of a partition are held, and which version is current.

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
    /// Pinned numbers with their counts, oldest first. Short: one entry for each version that somebody holds.
    pinned: VecDeque<(u64, u32)>,
}

impl Snapshots {
    pub(crate) fn new(current: Snapshot) -> Self {
        Snapshots { current, pinned: VecDeque::new() }
    }

    pub(crate) fn current(&self) -> Snapshot {
        self.current
    }

    pub(crate) fn set_current(&mut self, snapshot: Snapshot) {
        self.current = snapshot;
    }

    /// Pins the current version.
    pub(crate) fn pin(&mut self) -> Snapshot {
        match self.pinned.iter_mut().rev().find(|(number, _)| *number == self.current.number) {
            Some((_, count)) => *count += 1,
            None => {
                // Nearly always the newest; after a discard the current number may lie below a doomed pin.
                let at = self.pinned.iter().rposition(|(number, _)| *number < self.current.number).map_or(0, |i| i + 1);
                self.pinned.insert(at, (self.current.number, 1));
            }
        }
        self.current
    }

    /// Gives a pin back.
    pub(crate) fn unpin(&mut self, number: u64) {
        let Some(at) = self.pinned.iter().rposition(|(pinned, _)| *pinned == number) else {
            debug_assert!(false, "unpinned a snapshot that was not pinned");
            return;
        };
        self.pinned[at].1 -= 1;
        if self.pinned[at].1 == 0 {
            self.pinned.remove(at);
        }
    }

    /// The oldest version that anybody can still see.
    pub(crate) fn oldest(&self) -> u64 {
        self.pinned.front().map_or(self.current.number, |(number, _)| (*number).min(self.current.number))
    }

    /// Whether a version above `number` is pinned.
    pub(crate) fn pinned_above(&self, number: u64) -> bool {
        self.pinned.back().is_some_and(|(pinned, _)| *pinned > number)
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
    fn oldest_is_the_oldest_pin_or_the_current_version() {
        let at = |number| Snapshot { number, lsn: Lsn(number), page_count: 1 };
        let mut snapshots = Snapshots::new(at(5));
        assert_eq!(snapshots.pin().number, 5);
        snapshots.set_current(at(6));
        assert_eq!((snapshots.pin().number, snapshots.pin().number), (6, 6));
        assert_eq!(snapshots.oldest(), 5);
        snapshots.unpin(5);
        assert_eq!(snapshots.oldest(), 6);
        snapshots.set_current(at(9));
        snapshots.unpin(6);
        snapshots.unpin(6);
        assert!(snapshots.is_idle());
        assert_eq!(snapshots.oldest(), 9);
    }
}

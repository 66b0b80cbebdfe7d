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
//!
//! # Transactions
//! The snapshots of transactions that may have to be repeated at another node are known by the
//! *origin* of the transaction ([`crate::Transaction::origin`]). [`super::carried`] describes how a
//! move carries them over.

use std::collections::VecDeque;

use fulmar_store::Lsn;
use hashbrown::HashMap;

use crate::transaction::TransactionContext;

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
    /// The pinned snapshots of open transactions, by origin.
    transactions: HashMap<u64, (Snapshot, TransactionContext)>,
    /// Transactions that were carried here, by origin. The snapshot of each is pinned until it
    /// continues.
    carried: HashMap<u64, (Option<Snapshot>, TransactionContext)>,
    /// When `carried` is released (monotonic milliseconds).
    carried_until_ms: u64,
    /// The partition moves away: the snapshots of its transactions then, pinned for ever.
    departing: Option<Vec<CarriedTransaction>>,
}

/// A transaction that is carried over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CarriedTransaction {
    pub(super) origin: u64,
    /// Its snapshot; None if that is not carried over.
    pub(super) snapshot: Option<Snapshot>,
    pub(super) context: TransactionContext,
}

/// How a transaction has got its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    pub(crate) snapshot: Snapshot,
    /// It was carried here.
    pub(crate) is_carried: bool,
    /// The partition moves away, and does not carry the snapshot over.
    pub(crate) is_late: bool,
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
        Snapshots {
            current,
            durable: current,
            pending: VecDeque::new(),
            pinned: VecDeque::new(),
            transactions: HashMap::new(),
            carried: HashMap::new(),
            carried_until_ms: 0,
            departing: None,
        }
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

    /// Pins a snapshot for a transaction: the one that it had at another node, or in a session that
    /// has lost its client; else the current version, or the newest durable one if the log is durable
    /// up to `durable`. Without an origin (0) the transaction is not known.
    pub(crate) fn begin(&mut self, origin: u64, context: TransactionContext, durable: Option<Lsn>) -> Begun {
        let known = match origin {
            0 => None,
            _ => self.known(origin),
        };
        let snapshot = match (known, durable) {
            (Some(known), _) => known,
            (None, Some(lsn)) => self.pin_durable(lsn),
            (None, None) => self.pin(),
        };
        if origin != 0 {
            self.transactions.insert(origin, (snapshot, context));
        }
        let is_carried = known.is_some();
        Begun { snapshot, is_carried, is_late: !is_carried && self.departing.is_some() }
    }

    /// The snapshot of a transaction that begins again, pinned.
    fn known(&mut self, origin: u64) -> Option<Snapshot> {
        match self.carried.remove(&origin) {
            Some((carried, _)) => carried,
            None => {
                let (snapshot, _) = *self.transactions.get(&origin)?;
                Some(self.pin_one(snapshot))
            }
        }
    }

    /// Replaces the snapshot of a transaction by a newer one, which is pinned. Returns false if the
    /// partition moves away: the transaction keeps the snapshot that is carried over.
    pub(crate) fn advance(
        &mut self,
        origin: u64,
        context: TransactionContext,
        (old, new): (Snapshot, Snapshot),
    ) -> bool {
        if self.departing.is_some() {
            self.unpin(new.number);
            return false;
        }
        self.unpin(old.number);
        if origin != 0 {
            self.transactions.insert(origin, (new, context));
        }
        true
    }

    /// Releases the snapshot of a transaction.
    pub(crate) fn end(&mut self, origin: u64, number: u64) {
        if origin != 0 {
            self.transactions.remove(&origin);
        }
        self.unpin(number);
    }

    /// Keeps the snapshot of a transaction that is being repeated, for its next begin.
    pub(crate) fn set_aside(&mut self, origin: u64, context: TransactionContext, snapshot: Snapshot) {
        self.transactions.remove(&origin);
        if let Some((Some(other), _)) = self.carried.insert(origin, (Some(snapshot), context)) {
            self.unpin(other.number);
        }
    }

    /// The context of a transaction that begins again.
    pub(crate) fn context(&self, origin: u64) -> Option<TransactionContext> {
        let carried = self.carried.get(&origin).map(|(_, context)| *context);
        carried.or_else(|| self.transactions.get(&origin).map(|(_, context)| *context))
    }

    /// The partition moves away: pins the snapshots of all transactions once more.
    pub(crate) fn depart(&mut self) {
        if self.departing.is_some() {
            return;
        }
        let open = self
            .transactions
            .iter()
            .map(|(origin, (snapshot, context))| (*origin, Some(*snapshot), *context));
        let carried = self.carried.iter().map(|(origin, (snapshot, context))| (*origin, *snapshot, *context));
        let departing: Vec<CarriedTransaction> = open
            .chain(carried)
            .map(|(origin, snapshot, context)| CarriedTransaction { origin, snapshot, context })
            .collect();
        for snapshot in departing.iter().filter_map(|transaction| transaction.snapshot) {
            self.pin_one(snapshot);
        }
        self.departing = Some(departing);
    }

    /// A transaction that departs has ended: it is not repeated.
    pub(super) fn ended(&mut self, origin: u64) {
        if let Some(departing) = &mut self.departing {
            departing.retain(|transaction| transaction.origin != origin);
        }
    }

    /// Forgets a carried transaction that is not repeated.
    pub(super) fn forget_carried(&mut self, origin: u64) {
        if let Some((Some(snapshot), _)) = self.carried.remove(&origin) {
            self.unpin(snapshot.number);
        }
    }

    /// The transactions when the partition moved away, without those that have ended since.
    pub(super) fn departing(&self) -> &[CarriedTransaction] {
        self.departing.as_deref().unwrap_or_default()
    }

    /// Pins snapshots that were carried here, until `until_ms`.
    pub(super) fn expect(&mut self, carried: &[CarriedTransaction], until_ms: u64) {
        for CarriedTransaction { origin, snapshot, context } in carried {
            if self.carried.insert(*origin, (*snapshot, *context)).is_none()
                && let Some(snapshot) = snapshot
            {
                self.pin_one(*snapshot);
            }
        }
        self.carried_until_ms = until_ms;
    }

    /// Forgets carried transactions that have not continued: those with a snapshot up to version
    /// `number`, or all of them if their time is over.
    pub(crate) fn drop_carried(&mut self, now_ms: u64, number: u64) {
        if self.carried.is_empty() {
            return;
        }
        let is_over = now_ms >= self.carried_until_ms;
        let is_dropped =
            |snapshot: &Option<Snapshot>| is_over || snapshot.is_some_and(|it| it.number <= number);
        let dropped: Vec<_> = self.carried.extract_if(|_, (snapshot, _)| is_dropped(snapshot)).collect();
        for snapshot in dropped.into_iter().filter_map(|(_, (snapshot, _))| snapshot) {
            self.unpin(snapshot.number);
        }
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
    fn snapshots_of_transactions_depart_and_are_claimed_once() {
        let at = |number| Snapshot { number, lsn: Lsn(0), page_count: 1 };
        let context = |first| [first, 0, 0, 0, 0];
        let mut source = Snapshots::new(at(5));
        let begun = Begun { snapshot: at(5), is_carried: false, is_late: false };
        assert_eq!(source.begin(1, context(11), None), begun);
        source.begin(2, context(12), None);
        source.begin(0, context(0), None);
        source.push(at(6));
        source.pin();
        assert!(source.advance(2, context(12), (at(5), at(6))));
        source.depart();
        let mut departing = source.departing().to_vec();
        departing.sort_unstable_by_key(|transaction| transaction.origin);
        let expected = |origin, number| CarriedTransaction {
            origin,
            snapshot: Some(at(number)),
            context: context(10 + origin),
        };
        assert_eq!(departing, [expected(1, 5), expected(2, 6)]);
        // The transactions release theirs. What departs stays pinned.
        source.end(1, 5);
        source.end(0, 5);
        assert_eq!(source.oldest_from(Lsn(9)), 5);
        source.pin();
        let changed = source.advance(2, context(12), (at(6), at(6)));
        assert!(!changed, "a snapshot must not change after the close");
        assert!(source.begin(3, context(13), None).is_late);

        let mut destination = Snapshots::new(at(8));
        destination.expect(&departing, 100);
        assert_eq!(destination.oldest_from(Lsn(9)), 5);
        assert_eq!(destination.context(2), Some(context(12)));
        let carried = Begun { snapshot: at(6), is_carried: true, is_late: false };
        assert_eq!(destination.begin(2, context(12), None), carried);
        destination.set_aside(2, context(12), at(6));
        assert_eq!(destination.begin(2, context(12), None), carried, "until the repetition has ended");
        assert_eq!(destination.begin(2, context(12), None), carried, "also while another session has it");
        destination.end(2, 6);
        destination.end(2, 6);
        assert_eq!(destination.begin(2, context(12), None).snapshot, at(8), "it is released");
        destination.forget_carried(3);
        destination.drop_carried(99, 0);
        assert_eq!(destination.oldest_from(Lsn(9)), 5);
        destination.drop_carried(100, 0);
        assert_eq!(destination.oldest_from(Lsn(9)), 8, "unclaimed snapshots must be released");

        source.ended(2);
        assert_eq!(source.departing(), [expected(1, 5)]);
        destination.expect(source.departing(), 200);
        destination.forget_carried(1);
        assert_eq!(destination.oldest_from(Lsn(9)), 8);
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

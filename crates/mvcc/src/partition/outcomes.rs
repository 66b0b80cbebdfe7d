//! Transaction outcomes, for clients that ask (`pg_xact_status`) and gateways.
//!
//! A client that lost its connection around a COMMIT can ask any gateway for the outcome. Only
//! transactions whose id the client requested (`pg_current_xact_id()`), or a gateway assigned, can be
//! asked about, so only those are recorded.
//!
//! **Asking decides.** An undecided id becomes aborted, durably, before the answer. If the
//! transaction is still running, its commit fails. Both happen under the partition's commit lock,
//! so one of them comes first.
//!
//! An id contains the time when it was assigned (milliseconds since 2024, then a counter). The
//! oldest outcomes can therefore be dropped: an id below the [horizon](Inner::horizon) is answered
//! with NULL, never with a guess. Such a transaction may still commit, unless an outcome *aborted* of
//! a later id has been dropped: its own may have been answered, and dropped too.

use std::collections::BTreeMap;

use fulmar_pages::Outcome;
use fulmar_store::Lsn;
use parking_lot::Mutex;

/// Outcomes recorded for a partition; above this the oldest are dropped.
const MAX_OUTCOMES: usize = 20_000;

/// The recorded state of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Decided: committed or not. Durable once the log is durable up to the position.
    Decided(bool, Lsn),
    /// Not decided.
    Open,
    /// Older than the horizon.
    Forgotten,
}

struct Inner {
    decided: BTreeMap<u64, (bool, Lsn)>,
    /// Outcomes of lower ids have been dropped.
    horizon: u64,
    /// Outcomes *aborted* of lower ids may have been dropped.
    refused_below: u64,
}

/// The outcomes of one partition.
pub(crate) struct Outcomes(Mutex<Inner>);

impl Outcomes {
    pub(crate) fn new(horizon: u64, known: impl Iterator<Item = Outcome>) -> Self {
        let decided = known.map(|o| (o.transaction, (o.committed, Lsn(0)))).collect();
        Outcomes(Mutex::new(Inner { decided, horizon, refused_below: horizon }))
    }

    pub(crate) fn status(&self, id: u64) -> Status {
        let inner = self.0.lock();
        match inner.decided.get(&id) {
            Some((committed, lsn)) => Status::Decided(*committed, *lsn),
            None if id < inner.horizon => Status::Forgotten,
            None => Status::Open,
        }
    }

    /// Returns true if the transaction has not been decided. Callers hold the commit lock.
    pub(super) fn may_commit(&self, id: u64) -> bool {
        let inner = self.0.lock();
        id >= inner.refused_below && !inner.decided.contains_key(&id)
    }

    /// Records an outcome. Callers hold the commit lock.
    pub(super) fn decided(&self, id: u64, committed: bool, lsn: Lsn) {
        let mut inner = self.0.lock();
        inner.decided.insert(id, (committed, lsn));
        while inner.decided.len() > MAX_OUTCOMES {
            if let Some((oldest, (committed, _))) = inner.decided.pop_first() {
                inner.horizon = inner.horizon.max(oldest + 1);
                if !committed {
                    inner.refused_below = inner.refused_below.max(oldest + 1);
                }
            }
        }
    }

    /// Removes the outcomes beyond the log's durable end: they were lost, and their transactions
    /// are undecided again.
    pub(super) fn discard(&self, durable: Lsn) {
        self.0.lock().decided.retain(|_, (_, lsn)| *lsn <= durable);
    }

    /// The horizon and the durable outcomes, for the manifest.
    pub(super) fn durable(&self, durable: Lsn) -> (u64, Vec<Outcome>) {
        let inner = self.0.lock();
        let known = inner.decided.iter().filter(|(_, (_, lsn))| *lsn <= durable);
        (
            inner.horizon,
            known.map(|(id, (committed, _))| Outcome { transaction: *id, committed: *committed }).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_the_oldest_outcomes_and_reports_them_as_forgotten() {
        let outcomes = Outcomes::new(0, std::iter::once(Outcome { transaction: 5, committed: true }));
        assert_eq!(outcomes.status(5), Status::Decided(true, Lsn(0)));
        assert_eq!(outcomes.status(6), Status::Open);
        for id in 10..10 + MAX_OUTCOMES as u64 {
            outcomes.decided(id, false, Lsn(id));
        }
        assert_eq!(outcomes.status(5), Status::Forgotten);
        assert_eq!(outcomes.status(10), Status::Decided(false, Lsn(10)));
        assert!(!outcomes.may_commit(10));
        assert_eq!(outcomes.status(4), Status::Forgotten);
        assert!(outcomes.may_commit(4), "no outcome of an asked transaction was dropped");
        outcomes.decided(u64::MAX, true, Lsn(0));
        assert!(!outcomes.may_commit(4), "its outcome may have been asked, and dropped with that of 10");
    }
}

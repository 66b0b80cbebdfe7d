//! How transactions ended, for clients that ask (`pg_xact_status`).
//!
//! Only a transaction whose client asked for its id (`pg_current_xact_id()`) can be asked about, so only those are
//! kept: a client that lost its connection around a COMMIT can ask any gateway what became of it.
//!
//! **Asking decides.** An id that is not decided yet is made aborted, durably, before the answer; the transaction, should
//! it still be running somewhere, then fails at its commit. Both happen under the partition's commit lock, so one of
//! them comes first.
//!
//! An id tells when it was given (milliseconds since 2024, then a counter), so that the oldest outcomes can be
//! forgotten and an id from before the [horizon](Inner::horizon) is answered with NULL, never with a guess.

use std::collections::BTreeMap;

use fulmar_pages::Outcome;
use fulmar_store::Lsn;
use parking_lot::Mutex;

/// Outcomes kept for a partition; beyond, the oldest go.
const KEPT: usize = 20_000;

/// What is known of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Decided; durable once the log is durable up to the position.
    Decided(bool, Lsn),
    /// Not decided.
    Open,
    /// From before what is remembered.
    Forgotten,
}

struct Inner {
    decided: BTreeMap<u64, (bool, Lsn)>,
    /// Ids below are forgotten.
    horizon: u64,
}

/// The outcomes of one partition.
pub(crate) struct Outcomes(Mutex<Inner>);

impl Outcomes {
    pub(crate) fn new(horizon: u64, known: impl Iterator<Item = Outcome>) -> Self {
        let decided = known.map(|o| (o.transaction, (o.committed, Lsn(0)))).collect();
        Outcomes(Mutex::new(Inner { decided, horizon }))
    }

    pub(crate) fn status(&self, id: u64) -> Status {
        let inner = self.0.lock();
        match inner.decided.get(&id) {
            Some((committed, lsn)) => Status::Decided(*committed, *lsn),
            None if id < inner.horizon => Status::Forgotten,
            None => Status::Open,
        }
    }

    /// Whether nobody has decided otherwise. Callers hold the commit lock.
    pub(super) fn may_commit(&self, id: u64) -> bool {
        self.status(id) == Status::Open
    }

    /// Notes an outcome. Callers hold the commit lock.
    pub(super) fn decided(&self, id: u64, committed: bool, lsn: Lsn) {
        let mut inner = self.0.lock();
        inner.decided.insert(id, (committed, lsn));
        while inner.decided.len() > KEPT {
            if let Some((oldest, _)) = inner.decided.pop_first() {
                inner.horizon = inner.horizon.max(oldest + 1);
            }
        }
    }

    /// Forgets what was decided beyond the log's durable end: it was lost, and is open again.
    pub(super) fn discard(&self, durable: Lsn) {
        self.0.lock().decided.retain(|_, (_, lsn)| *lsn <= durable);
    }

    /// For the manifest: the horizon and what is durable.
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
    fn forgets_the_oldest_and_says_so() {
        let outcomes = Outcomes::new(0, std::iter::once(Outcome { transaction: 5, committed: true }));
        assert_eq!(outcomes.status(5), Status::Decided(true, Lsn(0)));
        assert_eq!(outcomes.status(6), Status::Open);
        for id in 10..10 + KEPT as u64 {
            outcomes.decided(id, false, Lsn(id));
        }
        assert_eq!(outcomes.status(5), Status::Forgotten);
        assert_eq!(outcomes.status(10), Status::Decided(false, Lsn(10)));
        assert!(!outcomes.may_commit(10));
        assert!(outcomes.may_commit(9));
    }
}

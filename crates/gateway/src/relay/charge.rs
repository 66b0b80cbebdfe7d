//! Charges the memory of a front to its tenant and to the node, as sessions do ([`crate::memory`]).

use std::sync::Arc;

use super::journal::Journal;
use crate::Result;
use crate::memory::Budget;
use crate::session::{Quota, Reservation};

/// The charge for a journal.
pub(super) struct Charge {
    quota: Arc<Quota>,
    reservation: Reservation,
}

impl Charge {
    pub(super) fn new(tenant: Arc<Budget>) -> Charge {
        Charge { quota: Quota::of_memory(tenant), reservation: Reservation::default() }
    }

    /// Charges what the journal holds, and `more` bytes that it is about to hold. If memory is short,
    /// the journal first drops the messages that it keeps only to repeat them.
    pub(super) fn cover(&mut self, journal: &mut Journal, more: usize) -> Result<()> {
        let bytes = |journal: &Journal| (journal.held_bytes() + more) as u64;
        if self.reservation.grow_to(&self.quota, bytes(journal)).is_ok() {
            return Ok(());
        }
        journal.give_up();
        self.reservation.grow_to(&self.quota, bytes(journal))
    }

    /// Like [`Charge::cover`], but drops nothing. Returns false if memory is short.
    pub(super) fn try_cover(&mut self, journal: &Journal, more: usize) -> bool {
        self.reservation.grow_to(&self.quota, (journal.held_bytes() + more) as u64).is_ok()
    }

    /// Adjusts the charge to what the journal holds. Returns false if memory is short.
    pub(super) fn adjust(&mut self, journal: &Journal) -> bool {
        let bytes = journal.held_bytes() as u64;
        self.reservation.shrink(bytes);
        self.reservation.try_grow_to(&self.quota, bytes)
    }
}

#[cfg(test)]
mod tests {
    use fulmar_engine::sqlstate;

    use super::*;
    use crate::relay::message;

    const MIB: u64 = 1 << 20;

    #[test]
    fn repetition_is_given_up_before_the_charge_is_rejected() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 * MIB));
        let (others, mut used) = (Quota::of_memory(tenant.clone()), Reservation::default());
        used.resize(&others, 31 * MIB).unwrap();
        let mut journal = Journal::new(Vec::new(), Box::new(|| 1));
        let mut charge = Charge::new(tenant.clone());
        let mut query = Vec::new();
        message::put(&mut query, b'Q', &vec![b'x'; 800 << 10]);
        charge.cover(&mut journal, query.len()).unwrap();
        assert!(tenant.used_bytes() > 31 * MIB, "the charge must precede the message");
        journal.feed(&query).unwrap();
        journal.unsent.clear();
        charge.cover(&mut journal, 0).unwrap();
        assert!(!journal.is_lost);
        charge.cover(&mut journal, 600 << 10).unwrap();
        assert!(journal.is_lost, "the message must make room for the next one");
        let error = charge.cover(&mut journal, 2 << 20).unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        assert!(charge.adjust(&journal));
        assert_eq!(tenant.used_bytes(), 31 * MIB);
    }
}

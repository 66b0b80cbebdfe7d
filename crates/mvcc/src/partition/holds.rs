//! What a partition waits for before it moves to another node.
//!
//! ```text
//!   session                         move
//!   COPY begins: a hold             about to move: no COPY begins from now on
//!   COPY ends: released    ----->   nothing is held: close, hand over
//! ```
//!
//! Open transactions are repeated at the destination. A COPY is not: its data is not kept.
//! Temporary tables are carried over up to a size. A session with either holds its partition, and a
//! move waits until nothing is held. The caller bounds the wait, and rolls the move back at the
//! bound: no transaction fails.
//!
//! A COPY that begins meanwhile waits, so that moves end under a stream of COPYs. It continues when
//! the move has ended, here or at the destination. Temporary tables may grow during the move: then
//! they are lost, and their session ends with an error.
//!
//! An exclusive move (`bulk` and `sql`; the partition lock of the thesis, 3.1.4) waits for open
//! transactions as well, and those that begin meanwhile wait for it. Single statements do not: they
//! are repeated.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::PartitionStats;

/// Why a session holds its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldReason {
    /// A COPY is in progress.
    Copy,
    /// Its temporary tables are too large to be carried over.
    TemporaryTables,
    /// A transaction is open. Only an exclusive move waits for it.
    Transaction,
}

/// The holds of a partition.
#[derive(Debug, Default)]
pub struct MoveHolds {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    copies: u32,
    temporary_tables: u32,
    transactions: u32,
    /// Moves that are about to begin, and the exclusive ones among them.
    moves: u32,
    exclusive: u32,
}

impl State {
    fn count(&mut self, reason: HoldReason) -> &mut u32 {
        match reason {
            HoldReason::Copy => &mut self.copies,
            HoldReason::TemporaryTables => &mut self.temporary_tables,
            HoldReason::Transaction => &mut self.transactions,
        }
    }

    /// Whether a hold for this reason may begin.
    fn admits(&self, reason: HoldReason) -> bool {
        match reason {
            HoldReason::Copy => self.moves == 0,
            HoldReason::TemporaryTables => true,
            HoldReason::Transaction => self.exclusive == 0,
        }
    }

    /// What a move waits for.
    fn held(&self, is_exclusive: bool) -> Option<HoldReason> {
        match (self.copies, self.temporary_tables, self.transactions) {
            (0, 0, 1..) if is_exclusive => Some(HoldReason::Transaction),
            (0, 0, _) => None,
            (0, ..) => Some(HoldReason::TemporaryTables),
            _ => Some(HoldReason::Copy),
        }
    }
}

/// Keeps a partition from moving, until it is dropped.
#[derive(Debug)]
pub struct MoveHold {
    stats: Arc<PartitionStats>,
    reason: HoldReason,
}

impl MoveHold {
    /// Holds a partition.
    pub fn new(stats: Arc<PartitionStats>, reason: HoldReason) -> MoveHold {
        *stats.holds.state.lock().count(reason) += 1;
        MoveHold { stats, reason }
    }

    /// Holds a partition unless it is about to move and the hold would have to wait.
    pub fn try_new(stats: &Arc<PartitionStats>, reason: HoldReason) -> Option<MoveHold> {
        let mut state = stats.holds.state.lock();
        state.admits(reason).then(|| {
            *state.count(reason) += 1;
            MoveHold { stats: stats.clone(), reason }
        })
    }

    /// The same, but waits.
    pub async fn admitted(stats: Arc<PartitionStats>, reason: HoldReason) -> MoveHold {
        loop {
            let mut changed = std::pin::pin!(stats.holds.changed.notified());
            // Enabled before the check, so that no notification is lost in between.
            changed.as_mut().enable();
            if let Some(hold) = MoveHold::try_new(&stats, reason) {
                return hold;
            }
            changed.await;
        }
    }
}

impl Drop for MoveHold {
    fn drop(&mut self) {
        let is_awaited = {
            let mut state = self.stats.holds.state.lock();
            *state.count(self.reason) -= 1;
            state.moves > 0
        };
        if is_awaited {
            self.stats.holds.changed.notify_waiters();
        }
    }
}

/// A partition that is about to move: until this is dropped no COPY begins, and, if the move is
/// exclusive, no transaction.
#[derive(Debug)]
pub struct PendingMove {
    stats: Arc<PartitionStats>,
    is_exclusive: bool,
}

impl PendingMove {
    /// Announces a move.
    pub fn new(stats: Arc<PartitionStats>, is_exclusive: bool) -> PendingMove {
        {
            let mut state = stats.holds.state.lock();
            state.moves += 1;
            state.exclusive += u32::from(is_exclusive);
        }
        PendingMove { stats, is_exclusive }
    }

    /// What is held.
    pub fn held(&self) -> Option<HoldReason> {
        self.stats.holds.state.lock().held(self.is_exclusive)
    }

    /// Waits until nothing is held.
    pub async fn released(&self) {
        loop {
            let mut changed = std::pin::pin!(self.stats.holds.changed.notified());
            changed.as_mut().enable();
            if self.held().is_none() {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for PendingMove {
    fn drop(&mut self) {
        {
            let mut state = self.stats.holds.state.lock();
            state.moves -= 1;
            state.exclusive -= u32::from(self.is_exclusive);
        }
        self.stats.holds.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn move_waits_for_holds_and_copies_wait_for_the_move() {
        let stats = Arc::new(PartitionStats::default());
        let copy = MoveHold::admitted(stats.clone(), HoldReason::Copy).await;
        let tables = MoveHold::new(stats.clone(), HoldReason::TemporaryTables);
        let open = MoveHold::try_new(&stats, HoldReason::Transaction);
        let pending = PendingMove::new(stats.clone(), false);
        let mut released = Box::pin(pending.released());
        assert_eq!((released.as_mut().now_or_never(), pending.held()), (None, Some(HoldReason::Copy)));
        let mut next = std::pin::pin!(MoveHold::admitted(stats.clone(), HoldReason::Copy));
        assert!(next.as_mut().now_or_never().is_none(), "no COPY may begin before the move has ended");
        drop(copy);
        assert_eq!(pending.held(), Some(HoldReason::TemporaryTables));
        assert!(released.as_mut().now_or_never().is_none());
        drop(tables);
        assert!(released.as_mut().now_or_never().is_some(), "the move must not wait for transactions");
        assert!(MoveHold::try_new(&stats, HoldReason::Transaction).is_some());
        drop(open);
        assert!(next.as_mut().now_or_never().is_none());
        drop(released);
        drop(pending);
        drop(next.await);
        assert_eq!(PendingMove::new(stats, false).held(), None);
    }

    #[tokio::test]
    async fn exclusive_move_waits_for_transactions_and_new_ones_wait_for_the_move() {
        let stats = Arc::new(PartitionStats::default());
        let open = MoveHold::try_new(&stats, HoldReason::Transaction);
        let pending = PendingMove::new(stats.clone(), true);
        let mut released = Box::pin(pending.released());
        assert_eq!((released.as_mut().now_or_never(), pending.held()), (None, Some(HoldReason::Transaction)));
        assert!(MoveHold::try_new(&stats, HoldReason::Transaction).is_none());
        let mut next = std::pin::pin!(MoveHold::admitted(stats.clone(), HoldReason::Transaction));
        assert!(next.as_mut().now_or_never().is_none());
        drop(open);
        assert!(released.as_mut().now_or_never().is_some());
        assert!(next.as_mut().now_or_never().is_none(), "no transaction may begin before the move has ended");
        drop(released);
        drop(pending);
        drop(next.await);
        assert_eq!(PendingMove::new(stats, true).held(), None);
    }
}

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
    /// Moves that are about to begin.
    moves: u32,
}

impl State {
    fn count(&mut self, reason: HoldReason) -> &mut u32 {
        match reason {
            HoldReason::Copy => &mut self.copies,
            HoldReason::TemporaryTables => &mut self.temporary_tables,
        }
    }

    fn held(&self) -> Option<HoldReason> {
        match (self.copies, self.temporary_tables) {
            (0, 0) => None,
            (0, _) => Some(HoldReason::TemporaryTables),
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

    /// Holds a partition for a COPY. Waits while the partition is about to move.
    pub async fn of_copy(stats: Arc<PartitionStats>) -> MoveHold {
        loop {
            let mut changed = std::pin::pin!(stats.holds.changed.notified());
            // Enabled before the check, so that no notification is lost in between.
            changed.as_mut().enable();
            {
                let mut state = stats.holds.state.lock();
                if state.moves == 0 {
                    state.copies += 1;
                    break;
                }
            }
            changed.await;
        }
        MoveHold { stats, reason: HoldReason::Copy }
    }
}

impl Drop for MoveHold {
    fn drop(&mut self) {
        *self.stats.holds.state.lock().count(self.reason) -= 1;
        self.stats.holds.changed.notify_waiters();
    }
}

/// A partition that is about to move: no COPY begins until this is dropped.
#[derive(Debug)]
pub struct PendingMove(Arc<PartitionStats>);

impl PendingMove {
    /// Announces a move.
    pub fn new(stats: Arc<PartitionStats>) -> PendingMove {
        stats.holds.state.lock().moves += 1;
        PendingMove(stats)
    }

    /// What is held.
    pub fn held(&self) -> Option<HoldReason> {
        self.0.holds.state.lock().held()
    }

    /// Waits until nothing is held.
    pub async fn released(&self) {
        loop {
            let mut changed = std::pin::pin!(self.0.holds.changed.notified());
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
        self.0.holds.state.lock().moves -= 1;
        self.0.holds.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn move_waits_for_holds_and_copies_wait_for_the_move() {
        let stats = Arc::new(PartitionStats::default());
        let copy = MoveHold::of_copy(stats.clone()).await;
        let tables = MoveHold::new(stats.clone(), HoldReason::TemporaryTables);
        let pending = PendingMove::new(stats.clone());
        let mut released = Box::pin(pending.released());
        assert_eq!((released.as_mut().now_or_never(), pending.held()), (None, Some(HoldReason::Copy)));
        let mut next = std::pin::pin!(MoveHold::of_copy(stats.clone()));
        assert!(next.as_mut().now_or_never().is_none(), "no COPY may begin before the move has ended");
        drop(copy);
        assert_eq!(pending.held(), Some(HoldReason::TemporaryTables));
        assert!(released.as_mut().now_or_never().is_none());
        drop(tables);
        assert!(released.as_mut().now_or_never().is_some());
        assert!(next.as_mut().now_or_never().is_none());
        drop(released);
        drop(pending);
        drop(next.await);
        assert_eq!(PendingMove::new(stats).held(), None);
    }
}

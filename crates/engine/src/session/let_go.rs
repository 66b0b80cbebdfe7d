//! Letting go of a snapshot that has been held for too long ("Bounds" in `partition/snapshots`).
//!
//! ```text
//!  open transaction, between statements            the partition
//!  ------------------------------------            -------------
//!  the gateway waits for the client,               the flusher looks around: too old, or too much
//!  or lock_row for a row: expired()  <------------ held back: asks everybody below a version
//!  retire(): ROLLBACK in SQLite, unpin ----------> what was held is freed at the next look
//!     ... the client speaks again ...
//!  a statement, or what is to be prepared: replay on a fresh snapshot; other answers: 40001
//!  COMMIT: the same, unless nothing was written: what was read is consistent as it is
//!  ROLLBACK: nothing left to do
//! ```
//!
//! A statement that runs cannot let go; the progress handler ends it (`Conflict::Expired`), with 40001 unless it is a lone
//! write, which is run again in its turn.

use std::sync::Arc;

use super::Session;
use super::open::Open;
use super::serialization_failure;
use crate::connection::Step;
use crate::partition::{Partition, Snapshot};
use crate::{Error, Result};

/// A transaction without its snapshot.
pub(super) struct Retired {
    /// Whether it had changed something: if not, there is nothing to commit.
    pub(super) wrote: bool,
}

impl Open {
    /// Rolls back in SQLite, while the pages that its cursors point to are still there, and with that gives the snapshot up.
    pub(super) async fn retire(&mut self) -> Result<()> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if connection.is_autocommit() {
            return Ok(());
        }
        let wrote = connection.has_changes();
        let (id, sql) = crate::connection::ROLLBACK;
        let step = connection.run(|c| c.control_here(id, sql))?.await;
        match connection.is_autocommit() {
            true => self.retired = Some(Retired { wrote }),
            false => self.lost = true,
        }
        match step {
            Step::Failed(error) => Err(error),
            Step::Done(_) | Step::Conflict => Ok(()),
        }
    }

    /// The snapshot that it holds between its statements.
    fn held_snapshot(&self) -> Option<(Arc<Partition>, Snapshot)> {
        let connection = self.connection.as_ref()?;
        let snapshot = connection.link.transaction.borrow().snapshot?;
        Some((connection.link.partition.clone(), snapshot))
    }

    /// Waits until it is asked to let its snapshot go; for ever if it holds none.
    pub(super) fn expired(&self) -> impl Future<Output = ()> + use<> {
        let held = self.held_snapshot();
        async {
            match held {
                Some((partition, snapshot)) => partition.expired(snapshot).await,
                None => std::future::pending().await,
            }
        }
    }
}

impl Session {
    /// Whether an open transaction holds a snapshot between its statements.
    pub fn holds_snapshot(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.held_snapshot().is_some())
    }

    /// Waits until the open transaction is asked to let go of its snapshot, since it has been held for too long. For ever
    /// if there is none.
    pub async fn snapshot_expired(&self) {
        match &self.open {
            Some(open) => open.expired().await,
            None => std::future::pending().await,
        }
    }

    /// Lets go of the open transaction's snapshot. Its next statement runs it again on a fresh one, unseen if the answers
    /// are the same; else that statement fails with 40001.
    pub async fn let_snapshot_go(&mut self) -> Result<()> {
        match &mut self.open {
            Some(open) => open.retire().await,
            None => Ok(()),
        }
    }

    /// Whether the open transaction has let its snapshot go and could go on from there.
    pub(super) fn has_let_go(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.retired.is_some() && !open.failed)
    }

    /// Rebuilds a transaction that let its snapshot go, before something is prepared that may depend on its own schema
    /// changes.
    pub(super) async fn rebuild(&mut self) -> Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        open.retired = None;
        let result = match self.begin_in(&mut open, true).await {
            Ok(()) => self.replay_in(&mut open).await,
            Err(error) => Err(error),
        };
        open.failed |= result.is_err();
        open.lost |= result.is_err();
        if let Some(turn) = &mut open.turn {
            turn.pause();
        }
        self.open = Some(open);
        result
    }
}

/// The error of a statement that ran for so long that its snapshot held back too much.
pub(crate) fn snapshot_too_old() -> Error {
    serialization_failure("its snapshot was too old: what others have replaced since takes too much memory")
}

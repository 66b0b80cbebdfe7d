//! Snapshot expiry: releases a snapshot that has been held for too long ("Bounds" in
//! `partition/snapshots`).
//!
//! ```text
//!  open transaction, between statements            the partition
//!  ------------------------------------            -------------
//!  the gateway waits for the client,               the flusher checks: too old, or too many bytes
//!  or lock_row for a row: expired()  <------------ retained: expires snapshots below a version
//!  retire(): ROLLBACK in SQLite, unpin ----------> retained versions are freed by the next check
//!     ... the client sends its next message ...
//!  statement, or prepare: replay on a fresh snapshot; if an answer differs: 40001
//!  COMMIT: the same, unless nothing was written: the reads were consistent
//!  ROLLBACK: nothing to do
//! ```
//!
//! A running statement cannot release its snapshot; the progress handler ends it
//! (`Conflict::Expired`) with 40001, unless it is an autocommitted write, which is run again in a
//! turn.

use std::sync::Arc;

use fulmar_mvcc::{Partition, Snapshot};
use fulmar_sqlite::{Result, Step};

use super::Session;
use super::state::{Open, Retired};

impl Open {
    /// Rolls back in SQLite, while the pages that its cursors reference still exist, and thereby
    /// releases the snapshot.
    pub(super) async fn retire(&mut self) -> Result<()> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if connection.is_autocommit() {
            return Ok(());
        }
        connection.pages.transaction().borrow_mut().is_repeated = false;
        let wrote = connection.has_changes();
        let (id, sql) = fulmar_sqlite::ROLLBACK;
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

    /// The snapshot that the transaction holds between statements.
    fn held_snapshot(&self) -> Option<(Arc<Partition>, Snapshot)> {
        let connection = self.connection.as_ref()?;
        let snapshot = connection.pages.transaction().borrow().snapshot?;
        Some((connection.partition().clone(), snapshot))
    }

    /// Waits until the snapshot expires. Never returns if the transaction holds none.
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
    /// Whether an open transaction holds a snapshot between statements.
    pub fn holds_snapshot(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.held_snapshot().is_some())
    }

    /// Waits until the open transaction's snapshot has been held for too long and must be released.
    /// Never returns if there is none.
    pub async fn snapshot_expired(&self) {
        match &self.open {
            Some(open) => open.expired().await,
            None => std::future::pending().await,
        }
    }

    /// Releases the open transaction's snapshot. Its next statement replays it on a fresh snapshot,
    /// invisibly if the answers are the same, and fails with 40001 otherwise.
    pub async fn release_snapshot(&mut self) -> Result<()> {
        match &mut self.open {
            Some(open) => open.retire().await,
            None => Ok(()),
        }
    }

    /// Whether the open transaction has released its snapshot and can continue with a replay.
    pub(super) fn has_retired(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.retired.is_some() && !open.failed)
    }

    /// Rebuilds a transaction that has released its snapshot, before a statement is prepared that
    /// may depend on the transaction's own schema changes.
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

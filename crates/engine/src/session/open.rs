//! Statements inside an open transaction.
//!
//! ```text
//!  statement -> row rules (wait for rows that another transaction has shown to its client)
//!            -> advance the snapshot, if nothing that was read has changed; a replay if the row
//!               rules require it
//!            -> run -> conflict? replay, run again
//!            -> journal (statement, parameters, hash of the answer)
//!            -> answer: immediately if the transaction has written or holds a turn, else when its
//!               snapshot is durable
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_mvcc::{Partition, moved_error, serialization_failure, snapshot_too_old};
use fulmar_sqlite::sql::RowName;
use fulmar_sqlite::{Completion, Error, Result, RowSink, Statement, StatementKind, Step, Value, sqlstate};
use futures::future::{Either, select};

use super::errors::{discarded, failed_transaction, no_transaction};
use super::held_turn::HeldTurn;
use super::journal::{End, HashingSink, Replayed, replay, run_statement};
use super::state::{Open, from_context, to_context};
use super::{MAX_ATTEMPTS, Session};

/// Maximum size of a read set that is checked before every statement.
const MAX_ADVANCE_READS: usize = 2000;

impl Session {
    /// Runs a statement in the open transaction.
    pub(super) async fn run_open(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        let Some(mut open) = self.open.take() else { return Err(no_transaction()) };
        let result = self.run_in(&mut open, statement, parameters, sink).await;
        open.failed |= result.is_err();
        if let Some(turn) = &mut open.turn {
            turn.pause();
        }
        self.open = Some(open);
        result
    }

    async fn run_in(
        &mut self,
        open: &mut Open,
        statement: &Arc<Statement>,
        parameters: &[Value],
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        if open.failed && statement.kind != StatementKind::RollbackTo {
            return Err(failed_transaction());
        }
        if let Some(partition) = open.seen_partition() {
            partition.check_not_moved()?;
        }
        let is_past = open.seen_partition().map_or(self.as_of().is_some(), |seen| seen.is_historical());
        if (open.read_only || is_past || self.engine.is_replica()) && statement.is_for_writers() {
            return Err(self.read_only_error(is_past));
        }
        if statement.plan.vacuum {
            return Err(Error::new(
                sqlstate::ACTIVE_TRANSACTION,
                "VACUUM cannot run inside a transaction block",
            ));
        }
        let current =
            open.is_provisional() || open.immediate || !statement.read_only || statement.plan.for_update;
        self.begin_in(open, current).await?;
        let retired = open.retired.take().is_some();
        if open.lost || retired {
            self.replay_in(open).await?;
        }
        if !open.journal.overflowed && !open.reserve_in_journal(statement, parameters) {
            self.settle_in_turn(open).await?;
        }
        self.apply_row_rules(open, statement, parameters).await?;

        let (end, answer) = self.attempt(open, statement, parameters, sink).await?;
        let stopped = matches!(&end, End::Failed(error) if self.flag.is_set() || error.is_of_resources());
        if !stopped {
            open.journal.push(statement, parameters, answer);
        }
        let Some(connection) = &open.connection else { return Err(no_transaction()) };
        open.lost = connection.is_autocommit();
        if statement.kind == StatementKind::RollbackTo && matches!(end, End::Done(_)) {
            open.failed = false;
        }
        if !open.is_provisional() {
            self.wait_for_snapshot(open).await?;
        }
        match end {
            End::Done(completion) => Ok(completion),
            End::Failed(error) => Err(error),
            End::Conflict => Err(serialization_failure("A page changed at every attempt.")),
        }
    }

    /// Runs the statement. After a conflict replays the earlier statements and runs it again.
    async fn attempt(
        &mut self,
        open: &mut Open,
        statement: &Arc<Statement>,
        parameters: &[Value],
        sink: &mut dyn RowSink,
    ) -> Result<(End, u64)> {
        for _ in 0..MAX_ATTEMPTS {
            let Some(connection) = &mut open.connection else { return Err(no_transaction()) };
            connection.pages.transaction().borrow_mut().conflict = None;
            let machines = self.engine.lua_pool();
            let mut hashing = HashingSink::new(Some(sink));
            let end =
                connection.run(|c| run_statement(c, machines, statement, parameters, &mut hashing))?.await;
            if connection.pages.has_expired() {
                (open.lost, self.turn_first) = (true, true);
                connection.partition().check_not_moved()?;
                return Err(snapshot_too_old());
            }
            if connection.pages.transaction().borrow().is_late {
                open.lost = true;
                return Err(moved_error());
            }
            if !matches!(end, End::Conflict) {
                let answer = hashing.answer(&end);
                return Ok((end, answer));
            }
            hashing.reset();
            self.replay_in(open).await?;
        }
        Ok((End::Conflict, 0))
    }

    /// Prepares for a statement. The first one gets a connection, the turn if it was requested, and
    /// a BEGIN.
    pub(super) async fn begin_in(&mut self, open: &mut Open, current: bool) -> Result<()> {
        if let Some(connection) = &open.connection {
            let mut transaction = connection.pages.transaction().borrow_mut();
            transaction.current = current;
            if let Some(turn) = &mut open.turn {
                transaction.turn = turn.resume();
            }
            return Ok(());
        }
        if open.hold.is_none() {
            open.hold = Some(self.hold_for_transaction().await?);
        }
        open.variables = self.variables();
        if open.ids.repeats()
            && let Some(context) = self.partition().await?.carried_context(open.ids.origin)
        {
            (open.variables, self.remembered) = from_context(context, open.variables.clone());
        }
        open.before = self.remembered;
        let connection = self.checkout(open.variables.clone()).await?;
        let partition = connection.partition().clone();
        partition.forget_carried(open.ids.abandoned);
        open.rows.partition = Some(partition.clone());
        open.connection = Some(connection);
        if open.immediate || std::mem::take(&mut self.turn_first) {
            self.exclude_others(open, &partition, false).await?;
        }
        let Some(connection) = &mut open.connection else { return Err(no_transaction()) };
        {
            let mut transaction = connection.pages.transaction().borrow_mut();
            transaction.current = current;
            (transaction.assigned_id, transaction.origin) = (open.ids.assigned, open.ids.origin);
            transaction.context = to_context(&open.variables, open.before);
        }
        let (id, sql) = fulmar_sqlite::BEGIN;
        match connection.run(|c| c.control_here(id, sql))?.await {
            Step::Done(_) => Ok(()),
            Step::Failed(error) => Err(error),
            Step::Conflict => Err(serialization_failure("BEGIN conflicted.")),
        }
    }

    pub(super) async fn take_turn(
        &mut self,
        open: &mut Open,
        partition: &Arc<Partition>,
        patient: bool,
    ) -> Result<()> {
        if open.turn.as_mut().is_some_and(|turn| turn.resume() != 0) {
            return Ok(());
        }
        let turn = self.wait_on(partition, partition.turns.take()).await?;
        if let Some(connection) = &open.connection {
            connection.pages.transaction().borrow_mut().turn = turn.ticket();
        }
        open.turn = Some(HeldTurn::new(turn, patient));
        Ok(())
    }

    /// Acquires the turn if it is not held, and prevents all other commits until it ends.
    pub(super) async fn exclude_others(
        &mut self,
        open: &mut Open,
        partition: &Arc<Partition>,
        patient: bool,
    ) -> Result<()> {
        self.take_turn(open, partition, patient).await?;
        if let Some(turn) = &open.turn {
            turn.exclude_others();
        }
        Ok(())
    }

    /// Called before the journal overflows: acquires the turn for the rest of the transaction, and
    /// checks that earlier answers still hold.
    async fn settle_in_turn(&mut self, open: &mut Open) -> Result<()> {
        let Some(partition) = open.rows.partition.clone() else { return Ok(()) };
        open.turn = None;
        self.exclude_others(open, &partition, true).await?;
        if !advance(open) {
            self.replay_in(open).await?;
        }
        Ok(())
    }

    /// Waits for rows that others have shown to their clients, and locks the rows that this
    /// transaction shows.
    async fn apply_row_rules(
        &mut self,
        open: &mut Open,
        statement: &Statement,
        parameters: &[Value],
    ) -> Result<()> {
        let Some(partition) = open.rows.partition.clone() else { return Ok(()) };
        let name = statement.plan.row.as_ref().and_then(|row| row.name(parameters));
        let fresh = match (statement.kind, name) {
            (StatementKind::Query, Some(row))
                if (statement.plan.for_update || open.rows.updated.contains(&row))
                    && (open.rows.locked.contains(&row) || open.admit_row()) =>
            {
                self.lock_row(open, &partition, row).await?
            }
            // The rows are not named individually, or there are too many: the whole partition is
            // locked, by its turn.
            (StatementKind::Query, _) if statement.plan.for_update => {
                self.exclude_others(open, &partition, false).await?;
                true
            }
            (StatementKind::Update | StatementKind::Delete, Some(row)) => {
                if !open.rows.updated.contains(&row) && open.admit_row() {
                    open.rows.updated.insert(row);
                }
                let held = partition.rows.held_by_other(row, open.rows.owner);
                held && self.lock_row(open, &partition, row).await?
            }
            _ => false,
        };
        let small = open.connection.as_ref().is_some_and(|c| c.pages.reads_at_most(MAX_ADVANCE_READS));
        if !fresh {
            if small {
                advance(open);
            }
            return Ok(());
        }
        let retired = open.retired.take().is_some();
        // A statement that is repeated has locked its rows at the other node.
        if !retired && open.is_repeated() {
            return Ok(());
        }
        if retired || !advance(open) {
            self.replay_in(open).await?;
        }
        Ok(())
    }

    /// Locks a row. Returns true if the transaction did not hold the lock before.
    pub(super) async fn lock_row(
        &mut self,
        open: &mut Open,
        partition: &Arc<Partition>,
        row: RowName,
    ) -> Result<bool> {
        if open.rows.locked.contains(&row) {
            return Ok(false);
        }
        if partition.rows.try_take(row, open.rows.owner) {
            open.rows.locked.push(row);
            return Ok(true);
        }
        // The holder may be waiting for the turn. A transaction that must keep its turn continues
        // without the row lock: no other transaction commits before it, and the holder gets 40001.
        if open.journal.overflowed {
            return Ok(false);
        }
        open.turn = None;
        if let Some(connection) = &open.connection {
            connection.pages.transaction().borrow_mut().turn = 0;
        }
        open.rows.locked.push(row);
        let owner = open.rows.owner;
        let mut taking = std::pin::pin!(partition.rows.take(row, owner));
        let taken = loop {
            // The row lock may be held indefinitely by its holder's client; the snapshot may not.
            let expired = std::pin::pin!(open.expired());
            let first = self.wait_on(partition, select(taking.as_mut(), expired)).await;
            match first {
                Ok(Either::Left((taken, _))) => break Ok(taken),
                Ok(Either::Right(_)) => {}
                Err(cancelled) => break Err(cancelled),
            }
            open.retire().await?;
        };
        match taken {
            Ok(Ok(())) => Ok(true),
            Err(cancelled) => {
                // Leaves the queue, so that deadlock checks of others do not see it.
                open.rows.locked.pop();
                partition.rows.release(row, open.rows.owner);
                Err(cancelled)
            }
            Ok(Err(_)) => Err(Error::new(sqlstate::DEADLOCK_DETECTED, "deadlock detected")
                .detail("This transaction and others wait for each other's row locks in a cycle.")
                .hint("Retry the transaction. Lock rows in a consistent order.")),
        }
    }

    /// Replays the transaction on a fresh snapshot. Until that is complete the transaction counts
    /// as lost: SQLite contains only a part of it, which must not be continued.
    pub(super) async fn replay_in(&mut self, open: &mut Open) -> Result<()> {
        let Some(partition) = open.rows.partition.clone() else { return Ok(()) };
        open.lost = true;
        open.end_repetition();
        if open.journal.overflowed {
            return Err(serialization_failure("The transaction is too large to be replayed."));
        }
        for _ in 0..MAX_ATTEMPTS {
            partition.check_not_moved()?;
            partition.stats.replays.fetch_add(1, Ordering::Relaxed);
            let Some(connection) = &mut open.connection else { return Err(no_transaction()) };
            connection.pages.transaction().borrow_mut().current = true;
            let before = &open.before;
            connection.restore(
                &open.variables,
                before.last_insert_rowid,
                before.changes,
                before.total_changes,
            );
            let (machines, entries) = (self.engine.lua_pool(), open.journal.entries());
            let replayed = connection.run(|c| replay(c, machines, entries))?.await?;
            let expired = connection.pages.has_expired();
            match replayed {
                Replayed::Same => {
                    open.lost = false;
                    return Ok(());
                }
                Replayed::Conflict if expired => {
                    // Other commits expire the replay's snapshot before it finishes, so it excludes
                    // them.
                    self.exclude_others(open, &partition, false).await?;
                }
                Replayed::Conflict => {}
                Replayed::Differs(index) => {
                    self.turn_first = true;
                    let detail = format!(
                        "Statement {} of the transaction would return a different result now.",
                        index + 1
                    );
                    return Err(serialization_failure(&detail));
                }
            }
        }
        self.turn_first = true;
        Err(serialization_failure("The partition changed at every attempt."))
    }

    /// Waits until the transaction's snapshot is durable.
    async fn wait_for_snapshot(&mut self, open: &mut Open) -> Result<()> {
        let Some(connection) = &open.connection else { return Ok(()) };
        let (snapshot, partition) = {
            let transaction = connection.pages.transaction().borrow();
            (transaction.snapshot.or(transaction.seen), connection.partition().clone())
        };
        let Some(snapshot) = snapshot else { return Ok(()) };
        self.wait_durable(snapshot.lsn).await?;
        if partition.is_discarded(&snapshot) {
            return Err(discarded(&partition.log));
        }
        Ok(())
    }
}

/// Moves the snapshot to the current version if nothing that the transaction read has changed.
/// Returns true if the transaction now sees the current version, or one that was current during the
/// call.
fn advance(open: &Open) -> bool {
    open.connection.as_ref().is_none_or(|connection| connection.pages.advance())
}

//! Autocommitted statements: each is its own transaction.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_mvcc::{Partition, Turn, serialization_failure, snapshot_too_old};
use fulmar_sqlite::sql::RowName;
use fulmar_sqlite::{Completion, Result, RowSink, Statement, Value};

use super::errors::discarded;
use super::journal::{End, run_statement};
use super::state::{Remembered, from_context, to_context};
use super::{MAX_ATTEMPTS, Session};
use crate::connection::Connection;

/// A row lock of an autocommitted statement, released on drop.
struct RowLock {
    partition: Arc<Partition>,
    row: RowName,
    owner: u64,
}

impl Drop for RowLock {
    fn drop(&mut self) {
        self.partition.rows.release(self.row, self.owner);
    }
}

impl Session {
    pub(super) async fn run_auto(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        if statement.is_for_writers() && self.begins_read_only() {
            return Err(self.read_only_error(self.historical_view.is_some()));
        }
        let mut variables = self.variables();
        let ids = std::mem::take(&mut self.next_ids);
        // The client may have got a part of the rows of a query.
        let origin = if statement.read_only { ids.origin } else { 0 };
        if ids.repeats()
            && let Some(context) = self.partition().await?.carried_context(origin)
        {
            (variables, self.remembered) = from_context(context, variables);
        }
        let context = to_context(&variables, self.remembered);
        let mut connection = self.checkout(variables).await?;
        connection.partition().forget_carried(ids.abandoned);
        {
            let mut transaction = connection.pages.transaction().borrow_mut();
            // A procedure runs several statements, so its reads are tracked page by page.
            transaction.single_statement = statement.plan.call.is_none();
            transaction.assigned_id = ids.assigned;
            (transaction.origin, transaction.context) = (origin, context);
        }
        let end = if statement.read_only {
            {
                let mut transaction = connection.pages.transaction().borrow_mut();
                transaction.track_reads = false;
                transaction.current = false;
            }
            let machines = self.engine.lua_pool();
            match connection.run(|c| run_statement(c, machines, statement, parameters, sink)) {
                Ok(running) => Ok(running.await),
                Err(error) => Err(error),
            }
        } else {
            self.write_auto(&mut connection, statement, parameters, sink).await
        };
        let end = match end {
            Ok(end) => end,
            // Cancelled while waiting. The connection may hold the session's temporary tables.
            Err(error) => {
                self.give_back(connection);
                return Err(error);
            }
        };
        let (seen, id, committed) = {
            let transaction = connection.pages.transaction().borrow();
            (transaction.seen, transaction.id, transaction.committed)
        };
        let partition = connection.partition().clone();
        if matches!(end, End::Done(_)) {
            partition.transaction_ended(origin);
        }
        self.give_back(connection);
        if id != 0 && committed.is_none() {
            partition.decide(id, matches!(end, End::Done(_))).await?;
        }
        if let (End::Done(completion), Some(_)) = (&end, committed) {
            sink.committed(completion);
        }
        if let Some(version) = committed.map(|c| c.snapshot).or(seen) {
            self.wait_durable(version.lsn).await?;
            if partition.is_discarded(&version) {
                return Err(discarded(&partition.log));
            }
        }
        match end {
            End::Done(completion) => Ok(completion),
            End::Failed(error) => Err(error),
            End::Conflict if statement.read_only => {
                partition.check_not_moved()?;
                Err(snapshot_too_old())
            }
            End::Conflict => {
                self.turn_first = true;
                Err(serialization_failure("The partition changed at every attempt."))
            }
        }
    }

    /// Runs a write: first without a turn, unless the partition is contended; after a conflict in a
    /// turn, and finally with all other commits excluded.
    async fn write_auto(
        &mut self,
        connection: &mut Box<Connection>,
        statement: &Arc<Statement>,
        parameters: &[Value],
        sink: &mut dyn RowSink,
    ) -> Result<End> {
        let partition = connection.partition().clone();
        let _row = self.wait_for_row(&partition, statement, parameters).await?;
        let mut turn: Option<Turn> = None;
        if statement.plan.vacuum || self.turn_first || partition.turns.contended() {
            turn = Some(self.wait_on(&partition, partition.turns.take()).await?);
        }
        if let Some(turn) = &turn
            && (statement.plan.vacuum || self.turn_first)
        {
            turn.make_exclusive();
        }
        self.turn_first = false;
        let begun = connection.link.variables.borrow().clone();
        for attempt in 0..MAX_ATTEMPTS {
            if attempt > 0 {
                let Remembered { last_insert_rowid, changes, total_changes } = self.remembered;
                connection.restore(&begun, last_insert_rowid, changes, total_changes);
            }
            {
                let mut transaction = connection.pages.transaction().borrow_mut();
                transaction.conflict = None;
                transaction.turn = turn.as_ref().map_or(0, Turn::ticket);
            }
            let machines = self.engine.lua_pool();
            let end = connection.run(|c| run_statement(c, machines, statement, parameters, sink))?.await;
            let conflicted = matches!(end, End::Conflict);
            match turn {
                None => partition.turns.record_commit(conflicted),
                Some(_) => partition.turns.decay_contention(),
            }
            if !conflicted {
                return Ok(end);
            }
            partition.check_not_moved()?;
            partition.stats.conflicts.fetch_add(1, Ordering::Relaxed);
            partition.stats.replays.fetch_add(1, Ordering::Relaxed);
            sink.reset();
            match &turn {
                None => turn = Some(self.wait_on(&partition, partition.turns.take()).await?),
                Some(turn) => turn.make_exclusive(),
            }
        }
        Ok(End::Conflict)
    }

    /// Waits for a row that an open transaction has shown to its client, so that it is not changed
    /// meanwhile.
    async fn wait_for_row(
        &mut self,
        partition: &Arc<Partition>,
        statement: &Statement,
        parameters: &[Value],
    ) -> Result<Option<RowLock>> {
        if !partition.rows.any() {
            return Ok(None);
        }
        let Some(row) = statement.plan.row.as_ref().and_then(|row| row.name(parameters)) else {
            return Ok(None);
        };
        let owner = self.engine.ticket();
        if !partition.rows.held_by_other(row, owner) {
            return Ok(None);
        }
        let lock = RowLock { partition: partition.clone(), row, owner };
        // An autocommitted statement holds no other lock, so it cannot be part of a deadlock.
        let _ = self.wait_on(partition, partition.rows.take(row, owner)).await?;
        Ok(Some(lock))
    }
}

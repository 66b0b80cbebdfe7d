//! Transaction control: BEGIN, COMMIT, ROLLBACK, savepoints.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_mvcc::{Partition, serialization_failure};
use fulmar_sqlite::sql::{Begin, RowName};
use fulmar_sqlite::{
    COMMIT, CommandTag, Completion, Error, ROLLBACK, Result, RowSink, Scope, Statement, StatementKind, Step,
    sqlstate,
};

use super::errors::{discarded, failed_transaction};
use super::state::Open;
use super::{MAX_ATTEMPTS, Session};

/// Outcome of a COMMIT in SQLite.
enum Outcome {
    Committed,
    Failed(Error),
}

impl Session {
    pub(super) fn begin(&mut self, begin: Begin) -> Result<Completion> {
        if begin.read_only == Some(false) && !self.writes.is_allowed() {
            return Err(Error::new(
                sqlstate::INSUFFICIENT_PRIVILEGE,
                "permission denied to begin a read-write transaction",
            )
            .hint(self.writes.hint()));
        }
        let notices = match &mut self.open {
            Some(open) if open.is_implicit() => {
                open.make_explicit();
                Vec::new()
            }
            Some(open) if open.has_failed() => return Err(failed_transaction()),
            Some(_) => {
                vec![(sqlstate::ACTIVE_TRANSACTION, "there is already a transaction in progress".to_owned())]
            }
            None => {
                let read_only = begin.read_only.unwrap_or(self.begins_read_only());
                // A read-only transaction does not need the turn.
                let immediate = begin.immediate && !read_only;
                let ids = std::mem::take(&mut self.next_ids);
                self.open = Some(Open::new(&self.engine, read_only, immediate, ids));
                Vec::new()
            }
        };
        Ok(Completion { tag: CommandTag::Plain("BEGIN"), notices })
    }

    pub(super) async fn commit(&mut self) -> Result<Completion> {
        let Some(mut open) = self.open.take() else { return Ok(none_in_progress("COMMIT")) };
        if open.has_failed() {
            self.roll_back_for_client(open).await?;
            return Ok(Completion { tag: CommandTag::Plain("ROLLBACK"), notices: Vec::new() });
        }
        if open.connection.is_none() {
            return Ok(Completion { tag: CommandTag::Plain("COMMIT"), notices: Vec::new() });
        }
        match self.commit_open(&mut open).await {
            Ok(Outcome::Committed) => self.conclude(open, true).await?,
            Ok(Outcome::Failed(error)) | Err(error) => {
                self.roll_back(open).await?;
                return Err(error);
            }
        }
        Ok(Completion { tag: CommandTag::Plain("COMMIT"), notices: Vec::new() })
    }

    async fn commit_open(&mut self, open: &mut Open) -> Result<Outcome> {
        let Some(partition) = open.connection.as_ref().map(|c| c.partition().clone()) else {
            return Ok(Outcome::Committed);
        };
        let has_retired = open.retired.as_ref().is_some_and(|retired| retired.wrote);
        if open.lost || open.has_written() || has_retired {
            partition.check_not_moved()?;
        }
        if open.lost {
            return Ok(Outcome::Failed(serialization_failure(
                "The transaction was rolled back by an earlier error.",
            )));
        }
        if let Some(retired) = open.retired.take() {
            if !retired.wrote {
                return Ok(Outcome::Committed);
            }
            self.replay_in(open).await?;
        }
        if open.has_written() {
            self.wait_for_shown_rows(open, &partition).await?;
            if open.retired.take().is_some() {
                self.replay_in(open).await?;
            }
            if open.connection.as_ref().is_some_and(|connection| connection.pages.is_stale()) {
                // A commit that is certain to conflict is replayed immediately.
                partition.stats.conflicts.fetch_add(1, Ordering::Relaxed);
                partition.turns.record_commit(true);
                self.take_turn(open, &partition, false).await?;
                self.replay_in(open).await?;
            }
        }
        let in_turn = open.turn.is_some();
        open.end_repetition();
        for attempt in 0..MAX_ATTEMPTS {
            let Some(connection) = &mut open.connection else { return Ok(Outcome::Committed) };
            {
                let mut transaction = connection.pages.transaction().borrow_mut();
                transaction.conflict = None;
                transaction.id = connection.link.variables.borrow().transaction_id;
                if let Some(turn) = &mut open.turn {
                    transaction.turn = turn.resume();
                }
            }
            let wrote = connection.is_writing();
            let step = connection.run(|c| c.control_here(COMMIT.0, COMMIT.1))?.await;
            if wrote && attempt == 0 && !in_turn {
                partition.turns.record_commit(matches!(step, Step::Conflict));
            } else if wrote {
                partition.turns.decay_contention();
            }
            match step {
                Step::Done(_) => return Ok(Outcome::Committed),
                Step::Failed(error) => return Ok(Outcome::Failed(error)),
                Step::Conflict => {
                    partition.stats.conflicts.fetch_add(1, Ordering::Relaxed);
                    match open.turn.is_some() {
                        true => self.exclude_others(open, &partition, false).await?,
                        false => self.take_turn(open, &partition, false).await?,
                    }
                    self.replay_in(open).await?;
                }
            }
        }
        Ok(Outcome::Failed(serialization_failure("The partition changed at every attempt.")))
    }

    /// Waits for row locks on rows that this transaction updated without reading them: another
    /// transaction that has shown such a row to its client goes first.
    async fn wait_for_shown_rows(&mut self, open: &mut Open, partition: &Arc<Partition>) -> Result<()> {
        if !partition.rows.any() {
            return Ok(());
        }
        let shown: Vec<RowName> =
            open.rows.updated.iter().copied().filter(|row| open.rows.is_held_by_other(*row)).collect();
        for row in shown {
            self.lock_row(open, partition, row).await?;
        }
        Ok(())
    }

    pub(super) async fn rollback(&mut self) -> Result<Completion> {
        // After a failed COMMIT clients send ROLLBACK although no transaction is open, so this is a
        // notice and not an error.
        let Some(open) = self.open.take() else { return Ok(none_in_progress("ROLLBACK")) };
        self.roll_back_for_client(open).await?;
        Ok(Completion { tag: CommandTag::Plain("ROLLBACK"), notices: Vec::new() })
    }

    /// Rolls a transaction back, which the client does not continue.
    async fn roll_back_for_client(&mut self, open: Open) -> Result<()> {
        let (partition, origin) = (open.seen_partition().cloned(), open.ids.origin);
        self.roll_back(open).await?;
        if let Some(partition) = partition {
            partition.transaction_ended(origin);
        }
        Ok(())
    }

    /// Rolls a transaction back. If the partition moves, it may continue at another node.
    pub(super) async fn roll_back(&mut self, mut open: Open) -> Result<()> {
        if let Some(connection) = &mut open.connection
            && !connection.is_autocommit()
        {
            connection.pages.transaction().borrow_mut().conflict = None;
            connection.run(|c| c.control_here(ROLLBACK.0, ROLLBACK.1))?.await;
        }
        self.conclude(open, false).await
    }

    /// Called when the transaction has ended in SQLite. Releases its resources, then waits until
    /// its answer is durable.
    async fn conclude(&mut self, mut open: Open, committed: bool) -> Result<()> {
        let Some(connection) = open.connection.take() else { return Ok(()) };
        let partition = connection.partition().clone();
        if committed {
            partition.transaction_ended(open.ids.origin);
        }
        let (seen, version) = {
            let transaction = connection.pages.transaction().borrow();
            (transaction.seen, transaction.committed.filter(|_| committed).map(|c| c.snapshot))
        };
        let id = connection.link.variables.borrow().transaction_id;
        connection.link.release(open.charged_bytes());
        self.give_back(connection);
        // Releases the turn and row locks before waiting for the disk.
        drop(open);
        if id != 0 && version.is_none() {
            partition.decide(id, committed).await?;
        }
        if let Some(version) = version.or(seen) {
            self.wait_durable(version.lsn).await?;
            if partition.is_discarded(&version) {
                return Err(discarded(&partition.log));
            }
        }
        Ok(())
    }

    /// SAVEPOINT, RELEASE and ROLLBACK TO outside of a transaction.
    pub(super) async fn savepoint_outside(
        &mut self,
        statement: &Arc<Statement>,
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        if scope == Scope::Implicit && statement.kind == StatementKind::Savepoint {
            let ids = std::mem::take(&mut self.next_ids);
            self.open = Some(Open::implicit(&self.engine, self.begins_read_only(), ids));
            return self.run_open(statement, &[], sink).await;
        }
        Err(Error::new(sqlstate::NO_ACTIVE_TRANSACTION, "savepoints can only be used in transaction blocks")
            .hint("Run BEGIN first."))
    }
}

fn none_in_progress(tag: &'static str) -> Completion {
    let notice = (sqlstate::NO_ACTIVE_TRANSACTION, "there is no transaction in progress".to_owned());
    Completion { tag: CommandTag::Plain(tag), notices: vec![notice] }
}

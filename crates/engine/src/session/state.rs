//! The state of an open transaction, and of a session between transactions.

use std::sync::Arc;

use fulmar_maintenance::PastVersion;
use fulmar_mvcc::{MoveHold, Partition, TransactionContext};
use fulmar_sqlite::sql::RowName;
use fulmar_sqlite::{Statement, Value, Variables};
use hashbrown::HashSet;

use super::held_turn::HeldTurn;
use super::journal::Journal;
use crate::connection::Connection;
use crate::engine::Engine;

/// Maximum number of rows updated by key that a transaction records; an unrecorded one may cost a
/// 40001. Also the maximum number of rows that it locks individually; beyond that it acquires the
/// turn.
const MAX_ROWS: usize = 10_000;

/// Session state that SQL functions read, kept between transactions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Remembered {
    pub(super) last_insert_rowid: i64,
    pub(super) changes: i64,
    pub(super) total_changes: i64,
}

/// What a transaction begins with, for its repetition at another node.
pub(super) fn to_context(variables: &Variables, before: Remembered) -> TransactionContext {
    let Remembered { last_insert_rowid, changes, total_changes } = before;
    let remembered = [last_insert_rowid, changes, total_changes].map(i64::cast_unsigned);
    [variables.clock_ms, variables.random, remembered[0], remembered[1], remembered[2]]
}

/// The reverse of [`to_context`]. `variables` are those of this session.
pub(super) fn from_context(context: TransactionContext, variables: Variables) -> (Variables, Remembered) {
    let [clock_ms, random, remembered @ ..] = context;
    let [last_insert_rowid, changes, total_changes] = remembered.map(u64::cast_signed);
    (Variables { clock_ms, random, ..variables }, Remembered { last_insert_rowid, changes, total_changes })
}

/// The historical version that a session reads.
pub(super) struct HistoricalView {
    pub(super) at_unix_ms: u64,
    /// Set once the version is open.
    pub(super) version: Option<PastVersion>,
}

/// A transaction that has released its snapshot.
pub(super) struct Retired {
    /// Whether it had written. If not, there is nothing to commit.
    pub(super) wrote: bool,
}

/// The ids that a gateway has given a transaction; 0 if it has not.
#[derive(Clone, Copy, Default)]
pub(super) struct TransactionIds {
    /// The id under which its outcome is recorded.
    pub(super) assigned: u64,
    /// The same, or the id under which the transaction has begun that it repeats.
    pub(super) origin: u64,
    /// The id under which it was sent before, if it is not repeated.
    pub(super) abandoned: u64,
}

impl TransactionIds {
    pub(super) fn repeats(&self) -> bool {
        self.origin != self.assigned
    }
}

/// An open transaction.
pub(super) struct Open {
    pub(super) implicit: bool,
    pub(super) failed: bool,
    pub(super) read_only: bool,
    /// BEGIN IMMEDIATE: acquire the turn before the snapshot.
    pub(super) immediate: bool,
    pub(super) ids: TransactionIds,
    /// Acquired with the first statement.
    pub(super) connection: Option<Box<Connection>>,
    pub(super) journal: Journal,
    pub(super) turn: Option<HeldTurn>,
    /// SQLite has rolled the transaction back by itself; it must be rebuilt before it continues.
    pub(super) lost: bool,
    /// Set after the transaction was rolled back to release its snapshot; it is rebuilt on a fresh
    /// one before it continues.
    pub(super) retired: Option<Retired>,
    /// The variables at the beginning, from which a replay starts.
    pub(super) variables: Variables,
    /// The session's state before the transaction.
    pub(super) before: Remembered,
    pub(super) rows: Rows,
    /// Set with the first statement.
    pub(super) hold: Option<MoveHold>,
}

/// The rows that a transaction has named.
pub(super) struct Rows {
    pub(super) partition: Option<Arc<Partition>>,
    pub(super) owner: u64,
    /// Rows updated by key.
    pub(super) updated: HashSet<RowName>,
    /// Rows locked or queued for.
    pub(super) locked: Vec<RowName>,
    /// Memory charged to the connection for both.
    pub(super) charged_bytes: u64,
}

/// Memory of a row that is updated by key or locked: its entry here and, for a lock, the
/// partition's entry.
const ROW_BYTES: u64 = 128;

impl Rows {
    pub(super) fn is_held_by_other(&self, row: RowName) -> bool {
        self.partition.as_ref().is_some_and(|partition| partition.rows.held_by_other(row, self.owner))
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if let Some(partition) = &self.partition {
            for row in self.locked.drain(..) {
                partition.rows.release(row, self.owner);
            }
        }
    }
}

impl Open {
    pub(super) fn new(engine: &Engine, read_only: bool, immediate: bool, ids: TransactionIds) -> Self {
        Open {
            implicit: false,
            failed: false,
            read_only,
            immediate,
            ids,
            connection: None,
            journal: Journal::default(),
            turn: None,
            lost: false,
            retired: None,
            variables: Variables::default(),
            before: Remembered::default(),
            rows: Rows {
                partition: None,
                owner: engine.ticket(),
                updated: HashSet::new(),
                locked: Vec::new(),
                charged_bytes: 0,
            },
            hold: None,
        }
    }

    pub(super) fn implicit(engine: &Engine, read_only: bool, ids: TransactionIds) -> Self {
        Open { implicit: true, ..Open::new(engine, read_only, false, ids) }
    }

    /// Makes the transaction read-only from its next statement on.
    pub(super) fn forbid_writes(&mut self) {
        self.read_only = true;
        self.variables.may_write = false;
        if let Some(connection) = &self.connection {
            connection.link.variables.borrow_mut().may_write = false;
        }
    }

    pub(super) fn is_implicit(&self) -> bool {
        self.implicit
    }

    /// BEGIN after other statements of the same query: the statements so far become part of the
    /// client's transaction.
    pub(super) fn make_explicit(&mut self) {
        self.implicit = false;
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Charges the memory of one more row to the connection. Returns false if a limit is reached.
    pub(super) fn admit_row(&mut self) -> bool {
        let rows = &mut self.rows;
        let below_limit = rows.updated.len() < MAX_ROWS && rows.locked.len() < MAX_ROWS;
        let Some(connection) = self.connection.as_ref().filter(|_| below_limit) else { return false };
        let admitted = connection.link.charge(ROW_BYTES);
        rows.charged_bytes += if admitted { ROW_BYTES } else { 0 };
        admitted
    }

    /// Memory charged to the connection for the journal and rows.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.journal.charged_bytes() + self.rows.charged_bytes
    }

    /// Reserves space in the journal for the next statement, charged to the connection.
    pub(super) fn reserve_in_journal(&mut self, statement: &Arc<Statement>, parameters: &[Value]) -> bool {
        let Some(connection) = &self.connection else { return true };
        let link = &connection.link;
        self.journal.reserve(statement, parameters, |bytes| link.charge(bytes))
    }

    /// The partition that the transaction reads; None before its first statement.
    pub(super) fn seen_partition(&self) -> Option<&Arc<Partition>> {
        self.connection.as_ref().map(|connection| connection.partition())
    }

    /// Whether the transaction's answers are valid only if it commits, since they may be based on
    /// versions that are not durable.
    pub(super) fn is_provisional(&self) -> bool {
        self.turn.is_some() || !self.rows.locked.is_empty() || self.has_written()
    }

    /// Whether the transaction is being repeated at the snapshot that it had at another node.
    pub(super) fn is_repeated(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.pages.transaction().borrow().is_repeated)
    }

    /// From now on the transaction may see other versions.
    pub(super) fn end_repetition(&self) {
        if let Some(connection) = &self.connection {
            connection.pages.transaction().borrow_mut().is_repeated = false;
        }
    }

    /// Whether the transaction has changed pages, or is about to: SQLite holds the write lock.
    pub(super) fn has_written(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.is_writing())
    }
}

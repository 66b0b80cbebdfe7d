//! The journal of an open transaction: its statements, their parameters, and a hash of everything that the client was
//! sent. After a conflict the transaction is run again from it; if every answer hashes the same, the client need not
//! know.
//!
//! The hash covers rows in order with the type and bytes of each value, the command tag, and errors with their
//! SQLSTATE and text. A statement that was cancelled is not kept: it has changed nothing, and whether a cancel comes in
//! time is not the data's doing. Nor is one for which memory, disk or a limit was too small.

use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use crate::connection::{BEGIN, Connection, ROLLBACK, Run, Step};
use crate::procedure::call_here;
use crate::statement::{CommandTag, Row, RowSink, StatementKind};
use crate::value::ValueRef;
use crate::{Error, Result, Statement, Value};

/// Bytes of statements and parameters that a transaction may keep for a replay; beyond, it takes its turn and holds it.
pub(super) const LARGEST_BYTES: usize = 1 << 20;

/// One statement of an open transaction.
pub(super) struct Entry {
    pub statement: Arc<Statement>,
    pub parameters: Box<[Value]>,
    /// The hash of what the client was sent.
    pub answer: u64,
}

/// What an open transaction has run so far.
#[derive(Default)]
pub(super) struct Journal {
    entries: Vec<Entry>,
    bytes: usize,
    /// It grew beyond its bound and was dropped: the transaction cannot be replayed.
    pub overflowed: bool,
}

impl Journal {
    pub(super) fn push(&mut self, statement: &Arc<Statement>, parameters: &[Value], answer: u64) {
        if self.overflowed {
            return;
        }
        self.bytes += 64 + parameters.iter().map(value_bytes).sum::<usize>();
        if self.bytes > LARGEST_BYTES {
            self.overflowed = true;
            self.entries = Vec::new();
            return;
        }
        self.entries.push(Entry { statement: statement.clone(), parameters: parameters.into(), answer });
    }

    /// Whether one more statement with these parameters would go beyond the bound.
    pub(super) fn would_overflow(&self, parameters: &[Value]) -> bool {
        !self.overflowed
            && self.bytes + 64 + parameters.iter().map(value_bytes).sum::<usize>() > LARGEST_BYTES
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

fn value_bytes(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::Text(t) => t.len(),
            Value::Blob(b) => b.len(),
            _ => 0,
        }
}

/// How a statement of an open transaction ended.
pub(super) enum End {
    Done(CommandTag),
    Conflict,
    Failed(Error),
}

/// Hashes what goes to the client on its way.
pub(super) struct HashingSink<'a> {
    inner: Option<&'a mut dyn RowSink>,
    hash: Xxh3,
}

impl<'a> HashingSink<'a> {
    /// Rows go on to `inner`, if there is one.
    pub(super) fn new(inner: Option<&'a mut dyn RowSink>) -> Self {
        HashingSink { inner, hash: Xxh3::new() }
    }

    /// The hash of rows and end.
    pub(super) fn answer(mut self, end: &End) -> u64 {
        match end {
            End::Done(tag) => self.hash.update(format!("T{tag}").as_bytes()),
            End::Failed(error) => {
                self.hash.update(format!("E{}{}", error.state(), error.message()).as_bytes())
            }
            End::Conflict => {}
        }
        self.hash.digest()
    }
}

impl RowSink for HashingSink<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        for column in 0..row.len() {
            let (kind, length) = match row.get(column) {
                ValueRef::Null => (0, 0),
                ValueRef::Integer(i) => {
                    self.hash.update(&i.to_le_bytes());
                    (1, 8)
                }
                ValueRef::Real(r) => {
                    self.hash.update(&r.to_bits().to_le_bytes());
                    (2, 8)
                }
                ValueRef::Text(t) => {
                    self.hash.update(t);
                    (3, t.len())
                }
                ValueRef::Blob(b) => {
                    self.hash.update(b);
                    (4, b.len())
                }
            };
            let mut end = (length as u64).to_le_bytes();
            end[7] = kind;
            self.hash.update(&end);
        }
        self.hash.update(b"R");
        match &mut self.inner {
            Some(inner) => inner.row(row),
            None => Ok(()),
        }
    }

    fn reset(&mut self) {
        self.hash.reset();
        if let Some(inner) = &mut self.inner {
            inner.reset();
        }
    }
}

/// Runs one statement on the fiber; tells its tag.
pub(super) fn run_statement(
    connection: &mut Connection,
    statement: &Statement,
    parameters: &[Value],
    sink: &mut dyn RowSink,
) -> End {
    let run =
        Run { id: statement.id, sql: &statement.sql, columns: Some(statement.columns.len()), parameters };
    connection.link.begin_statement();
    connection.link.trusted.set(statement.plan.vacuum || statement.plan.declares);
    connection.link.system.borrow_mut().active = false;
    if statement.plan.system
        && let Err(error) = connection.enter_system_here()
    {
        return End::Failed(error);
    }
    if statement.kind == StatementKind::Utility("ANALYZE") {
        connection.link.bump_schema.set(true);
    }
    if matches!(statement.kind, StatementKind::Insert | StatementKind::Update | StatementKind::Delete) {
        connection.link.variables.borrow_mut().changed = true;
    }
    // What is read-only, since it may be rolled back: a column may have such a name too.
    let step = match &statement.plan.call {
        Some(call) => call_here(connection, call, parameters, statement.columns.len(), sink),
        None if statement.plan.checks_integrity && statement.read_only => {
            connection.check_integrity_here(&run, sink)
        }
        None if statement.plan.explains => connection.explain_here(&run, sink),
        None if statement.plan.declares => connection.declare_here(&run, sink),
        None => connection.run_here(&run, sink),
    };
    connection.link.trusted.set(false);
    connection.tainted |= statement.plan.temporary;
    if connection.tainted && connection.link.transaction.borrow().beyond_limits {
        connection.recover_temporary_here();
    }
    match step {
        Step::Done(rows) => End::Done(tag(connection, statement.kind, rows)),
        Step::Conflict => End::Conflict,
        Step::Failed(error) => End::Failed(error),
    }
}

fn tag(connection: &mut Connection, kind: StatementKind, rows: u64) -> CommandTag {
    let changed = || connection.changes().0 as u64;
    match kind {
        StatementKind::Query => CommandTag::Select(rows),
        StatementKind::Insert => CommandTag::Insert(changed()),
        StatementKind::Update => CommandTag::Update(changed()),
        StatementKind::Delete => CommandTag::Delete(changed()),
        StatementKind::Savepoint => CommandTag::Plain("SAVEPOINT"),
        StatementKind::Release => CommandTag::Plain("RELEASE"),
        StatementKind::RollbackTo => CommandTag::Plain("ROLLBACK"),
        StatementKind::Utility(tag) => CommandTag::Plain(tag),
        StatementKind::Begin => CommandTag::Plain("BEGIN"),
        StatementKind::Commit => CommandTag::Plain("COMMIT"),
        StatementKind::Rollback => CommandTag::Plain("ROLLBACK"),
        StatementKind::Call => CommandTag::Plain("CALL"),
        StatementKind::Empty => CommandTag::Empty,
    }
}

/// How a replay went.
pub(super) enum Replayed {
    Same,
    /// The statement at this place answered something else.
    Differs(usize),
    Conflict,
}

/// Rolls back and runs the journal again on a fresh snapshot; on the fiber.
pub(super) fn replay(connection: &mut Connection, entries: &[Entry]) -> Result<Replayed> {
    if !connection.is_autocommit() {
        connection.control_here(ROLLBACK.0, ROLLBACK.1);
    }
    connection.link.transaction.borrow_mut().conflict = None;
    if let Step::Failed(error) = connection.control_here(BEGIN.0, BEGIN.1) {
        return Err(error);
    }
    for (place, entry) in entries.iter().enumerate() {
        // Here, since each statement may be too short to come to a checkpoint.
        if connection.link.checkpoint() {
            let cancel = connection.link.cancel.borrow();
            return if cancel.is_set() { Err(cancel.error()) } else { Ok(Replayed::Conflict) };
        }
        let mut sink = HashingSink::new(None);
        let end = run_statement(connection, &entry.statement, &entry.parameters, &mut sink);
        if let End::Conflict = end {
            return Ok(Replayed::Conflict);
        }
        if connection.link.cancel.borrow().is_set() {
            return Err(connection.link.cancel.borrow().error());
        }
        // It went well before, and may again when there is more room.
        if let End::Failed(error) = &end
            && error.is_of_resources()
        {
            return Err(error.clone());
        }
        if sink.answer(&end) != entry.answer {
            return Ok(Replayed::Differs(place));
        }
    }
    Ok(Replayed::Same)
}

//! The replay journal of an open transaction: its statements, their parameters, and a hash of
//! everything that the client was sent. After a conflict the transaction is replayed from it. If
//! every answer has the same hash the client does not notice.
//!
//! The hash covers everything sent to the client: rows in order with the type and bytes of each
//! value, the command tag, notices, and errors with all their fields. Cancelled statements are not
//! recorded: they have changed nothing, and the timing of a cancel does not depend on the data.
//! Neither are statements that failed for lack of memory, of disk space, or because of a limit.

use std::hash::Hash;
use std::sync::Arc;

use fulmar_sqlite::{
    BEGIN, CommandTag, Completion, Error, ROLLBACK, Result, Row, RowSink, Run, Statement, StatementKind,
    Step, Value, ValueRef,
};
use xxhash_rust::xxh3::Xxh3;

use crate::connection::Connection;
use crate::procedure::{LuaPool, call_here};

/// Maximum size of a transaction's journal. Beyond it, or if its connection reaches its memory
/// limit, the transaction acquires the turn and keeps it.
const MAX_BYTES: u64 = 4 << 20;
/// Number of recent entries that are searched for the same statement, so that a repeated text is
/// stored and counted once.
const RECENT_ENTRIES: usize = 16;

/// A statement of an open transaction.
pub(super) struct Entry {
    pub statement: Arc<Statement>,
    pub parameters: Box<[Value]>,
    /// Hash of everything that the client was sent.
    pub answer: u64,
}

/// The statements that an open transaction has run. Their memory is charged to the transaction's
/// connection.
#[derive(Default)]
pub(super) struct Journal {
    entries: Vec<Entry>,
    bytes: u64,
    charged_bytes: u64,
    /// The journal exceeded its limit and was discarded: the transaction cannot be replayed.
    pub overflowed: bool,
}

impl Journal {
    /// Reserves space for one more statement. `charge` charges memory to the connection. Returns
    /// false if there is no space: then the statement cannot be added.
    pub(super) fn reserve(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        charge: impl Fn(u64) -> bool,
    ) -> bool {
        let bytes = self.bytes + self.added_bytes(statement, parameters);
        let lacking = bytes.saturating_sub(self.charged_bytes);
        let fits = bytes <= MAX_BYTES && (lacking == 0 || charge(lacking));
        self.charged_bytes += if fits { lacking } else { 0 };
        fits
    }

    /// Adds a statement. If no space was reserved for it, the journal overflows.
    pub(super) fn push(&mut self, statement: &Arc<Statement>, parameters: &[Value], answer: u64) {
        if self.overflowed {
            return;
        }
        self.bytes += self.added_bytes(statement, parameters);
        if self.bytes > self.charged_bytes {
            self.overflowed = true;
            self.entries = Vec::new();
            return;
        }
        let statement = self.find_recent(statement).unwrap_or(statement).clone();
        self.entries.push(Entry { statement, parameters: parameters.into(), answer });
    }

    /// Memory of one more statement.
    fn added_bytes(&self, statement: &Arc<Statement>, parameters: &[Value]) -> u64 {
        // After a reallocation the vector has a capacity of twice its length.
        let entry = 2 * size_of::<Entry>() + parameters.iter().map(value_bytes).sum::<usize>();
        entry as u64 + if self.find_recent(statement).is_some() { 0 } else { statement.memory_bytes() }
    }

    /// The same statement, if it was run recently. A text with many statements creates a new object
    /// for each of them.
    fn find_recent(&self, statement: &Arc<Statement>) -> Option<&Arc<Statement>> {
        let mut recent = self.entries.iter().rev().take(RECENT_ENTRIES).map(|entry| &entry.statement);
        recent.find(|known| Arc::ptr_eq(known, statement) || known.is_same(statement))
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Memory charged to the connection.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.charged_bytes
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
    Done(Completion),
    Conflict,
    Failed(Error),
}

/// Hashes everything that passes through it to the client.
pub(super) struct HashingSink<'a> {
    inner: Option<&'a mut dyn RowSink>,
    hash: Xxh3,
}

impl<'a> HashingSink<'a> {
    /// Rows are passed on to `inner`, if there is one.
    pub(super) fn new(inner: Option<&'a mut dyn RowSink>) -> Self {
        HashingSink { inner, hash: Xxh3::new() }
    }

    /// The hash of the rows and the end.
    pub(super) fn answer(mut self, end: &End) -> u64 {
        // Derived hashes, so that fields added later are covered too.
        match end {
            End::Done(completion) => {
                self.hash.update(b"T");
                completion.hash(&mut self.hash);
            }
            End::Failed(error) => {
                self.hash.update(b"E");
                error.hash(&mut self.hash);
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

/// Runs one statement on the fiber, and determines its tag.
pub(super) fn run_statement(
    connection: &mut Connection,
    machines: &LuaPool,
    statement: &Statement,
    parameters: &[Value],
    sink: &mut dyn RowSink,
) -> End {
    let run =
        Run { id: statement.id, sql: &statement.sql, columns: Some(statement.columns.len()), parameters };
    connection.link.begin_statement();
    connection.link.trusted.set(statement.plan.vacuum || statement.plan.declares);
    connection.link.hide_system();
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
    // A read-only integrity check can be rolled back. The name alone does not decide: a column may
    // have it too.
    let step = match &statement.plan.call {
        Some(call) => call_here(connection, machines, call, parameters, statement.columns.len(), sink),
        None if statement.plan.checks_integrity && statement.read_only => {
            connection.check_integrity_here(&run, sink)
        }
        None if statement.plan.explains => connection.explain_here(&run, sink),
        None if statement.plan.declares => connection.declare_here(&run, sink),
        None => connection.run_here(&run, sink),
    };
    connection.link.trusted.set(false);
    connection.tainted |= statement.plan.temporary;
    if connection.tainted && connection.link.is_beyond_limits() {
        connection.recover_temporary_here();
    }
    match step {
        Step::Done(rows) => {
            End::Done(Completion { tag: tag(connection, statement.kind, rows), notices: Vec::new() })
        }
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

/// Outcome of a replay.
pub(super) enum Replayed {
    Same,
    /// The statement with this index returned a different answer.
    Differs(usize),
    Conflict,
}

/// Rolls back, and runs the journal again on a fresh snapshot. Runs on the fiber.
pub(super) fn replay(connection: &mut Connection, machines: &LuaPool, entries: &[Entry]) -> Result<Replayed> {
    if !connection.is_autocommit() {
        connection.control_here(ROLLBACK.0, ROLLBACK.1);
    }
    connection.pages.transaction().borrow_mut().conflict = None;
    if let Step::Failed(error) = connection.control_here(BEGIN.0, BEGIN.1) {
        return Err(error);
    }
    for (index, entry) in entries.iter().enumerate() {
        // Checked here because each statement may be too short to reach a checkpoint.
        if connection.link.checkpoint() {
            let cancel = connection.link.cancel.borrow();
            return if cancel.is_set() { Err(cancel.error()) } else { Ok(Replayed::Conflict) };
        }
        let mut sink = HashingSink::new(None);
        let end = run_statement(connection, machines, &entry.statement, &entry.parameters, &mut sink);
        if let End::Conflict = end {
            return Ok(Replayed::Conflict);
        }
        if connection.link.cancel.borrow().is_set() {
            return Err(connection.link.cancel.borrow().error());
        }
        // The statement succeeded before, and may again when resources are available.
        if let End::Failed(error) = &end
            && error.is_of_resources()
        {
            return Err(error.clone());
        }
        if sink.answer(&end) != entry.answer {
            return Ok(Replayed::Differs(index));
        }
    }
    Ok(Replayed::Same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulmar_sqlite::sql::Plan;
    use fulmar_sqlite::sqlstate;

    fn statement(sql: &str) -> Arc<Statement> {
        Arc::new(Statement {
            id: 1,
            sql: sql.into(),
            kind: StatementKind::Insert,
            read_only: false,
            parameters: Vec::new(),
            columns: Vec::new(),
            plan: Plan::default(),
            note: std::sync::OnceLock::new(),
        })
    }

    fn hash(end: End) -> u64 {
        HashingSink::new(None).answer(&end)
    }

    #[test]
    fn hash_covers_all_fields_of_an_error() {
        let error = || Error::new(sqlstate::SYNTAX_ERROR, "message").detail("detail").hint("hint");
        let base = hash(End::Failed(error()));
        assert_eq!(hash(End::Failed(error())), base);
        for other in [
            Error::new(sqlstate::INTERNAL, "message").detail("detail").hint("hint"),
            Error::new(sqlstate::SYNTAX_ERROR, "other").detail("detail").hint("hint"),
            error().detail("other"),
            error().hint("other"),
            error().position(1),
            Error::new(sqlstate::SYNTAX_ERROR, "message").hint("hint"),
            Error::new(sqlstate::SYNTAX_ERROR, "message").detail("detail"),
        ] {
            assert_ne!(hash(End::Failed(other.clone())), base, "{other:?}");
        }
    }

    #[test]
    fn hash_covers_the_tag_and_notices() {
        let done = |tag, notices: &[(&'static str, &str)]| {
            let notices = notices.iter().map(|(state, text)| (*state, (*text).to_owned())).collect();
            hash(End::Done(Completion { tag, notices }))
        };
        let base = done(CommandTag::Insert(1), &[("01000", "notice")]);
        assert_eq!(done(CommandTag::Insert(1), &[("01000", "notice")]), base);
        assert_ne!(done(CommandTag::Insert(2), &[("01000", "notice")]), base);
        assert_ne!(done(CommandTag::Update(1), &[("01000", "notice")]), base);
        assert_ne!(done(CommandTag::Insert(1), &[("01001", "notice")]), base);
        assert_ne!(done(CommandTag::Insert(1), &[("01000", "other")]), base);
        assert_ne!(done(CommandTag::Insert(1), &[]), base);
    }

    #[test]
    fn journal_counts_repeated_texts_once() {
        let mut journal = Journal::default();
        let (long, short) = (statement(&"x".repeat(100_000)), statement("y"));
        for _ in 0..1000 {
            for statement in [&long, &short] {
                assert!(journal.reserve(statement, &[], |_| true));
                journal.push(statement, &[], 0);
            }
        }
        assert!(!journal.overflowed && journal.charged_bytes() < 400_000, "{}", journal.charged_bytes());
        // A different object with the same text counts as the same statement.
        let before = journal.charged_bytes();
        assert!(journal.reserve(&statement(&"x".repeat(100_000)), &[], |_| true));
        assert!(journal.charged_bytes() - before < 1000);
        let mut texts = 0;
        let text = |number: i32| statement(&format!("{number}{}", "x".repeat(100_000)));
        while journal.reserve(&text(texts), &[], |_| true) {
            journal.push(&text(texts), &[], 0);
            texts += 1;
        }
        assert!((30..=41).contains(&texts), "{texts} texts of 100 kB in 4 MiB");
        journal.push(&statement(&"x".repeat(100_000)), &[], 0);
        assert!(journal.overflowed && journal.entries().is_empty() && journal.charged_bytes() <= MAX_BYTES);
    }

    #[test]
    fn journal_counts_parameters_and_overflows_without_memory() {
        let statement = statement("z");
        let mut journal = Journal::default();
        let parameters = [Value::Text("p".repeat(1000)), Value::Integer(1)];
        assert!(journal.reserve(&statement, &parameters, |bytes| bytes > 1000));
        journal.push(&statement, &parameters, 0);
        assert!(!journal.reserve(&statement, &parameters, |_| false));
        journal.push(&statement, &parameters, 0);
        assert!(journal.overflowed);
    }
}

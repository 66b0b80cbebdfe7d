//! What is known of a statement once it has been prepared.

use std::sync::Arc;

use crate::value::ValueRef;

/// What a statement does, as far as its answer to the client depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatementKind {
    /// Nothing but white space and comments.
    Empty,
    /// SELECT, VALUES, WITH ... SELECT, EXPLAIN, a PRAGMA that answers.
    Query,
    /// INSERT or REPLACE.
    Insert,
    /// UPDATE.
    Update,
    /// DELETE.
    Delete,
    /// BEGIN, START TRANSACTION.
    Begin,
    /// COMMIT, END.
    Commit,
    /// ROLLBACK without TO.
    Rollback,
    /// SAVEPOINT.
    Savepoint,
    /// RELEASE.
    Release,
    /// ROLLBACK TO.
    RollbackTo,
    /// CALL of a procedure.
    Call,
    /// CREATE, DROP, ALTER, VACUUM, ... with the tag that PostgreSQL would answer.
    Utility(&'static str),
}

/// One column of a statement's answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnInfo {
    /// Its name, as SQLite names it.
    pub name: String,
    /// The declared type of the column it comes from; nothing for an expression.
    pub declared_type: Option<String>,
}

/// One parameter of a statement.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ParameterInfo {
    /// The declared type of the column it is compared with or stored in, where that can be told.
    pub declared_type: Option<String>,
}

/// A prepared statement: text and description, not tied to a connection.
#[derive(Debug)]
pub struct Statement {
    /// Names it in connections' caches; never given twice.
    pub(crate) id: u64,
    /// The SQL text of this one statement, as it is given to SQLite.
    pub sql: Arc<str>,
    /// What it does.
    pub kind: StatementKind,
    /// Whether SQLite says that it writes nothing.
    pub read_only: bool,
    /// Its parameters: `$1` is the first.
    pub parameters: Vec<ParameterInfo>,
    /// The columns of its answer; empty if it answers no rows.
    pub columns: Vec<ColumnInfo>,
    /// What its text says to the engine.
    pub(crate) plan: crate::sql::Plan,
}

/// The message for a prepared statement whose columns have changed since: Postgres's, by which drivers know it.
pub const STALE_PLAN: &str = "cached plan must not change result type";

/// What is known of a statement beside its text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    /// It may name system tables and functions.
    pub system: bool,
    /// The declared types of some of its parameters; `[]` alone makes an array of what SQLite's text tells.
    pub parameters: &'a [(u16, String)],
    /// It changes the texts of `sqlite_schema`, which takes effect with the next statement. To be run in
    /// [`Scope::Implicit`], or in the client's transaction.
    pub declares: bool,
    /// It is asked about once, and not kept: another statement may have the same text.
    pub once: bool,
}

impl Statement {
    /// Whether another one has the same text and description.
    pub(crate) fn is_same(&self, other: &Statement) -> bool {
        self.sql == other.sql
            && (self.kind, self.read_only) == (other.kind, other.read_only)
            && self.columns == other.columns
            && self.parameters == other.parameters
            && (self.plan.system, self.plan.declares) == (other.plan.system, other.plan.declares)
    }

    /// Memory that it takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let column = |column: &ColumnInfo| column.name.capacity() + text(&column.declared_type);
        let columns = self.columns.capacity() * size_of::<ColumnInfo>()
            + self.columns.iter().map(column).sum::<usize>();
        let parameters = self.parameters.capacity() * size_of::<ParameterInfo>()
            + self.parameters.iter().map(|parameter| text(&parameter.declared_type)).sum::<usize>();
        let call = self.plan.call.as_ref().map_or(0, |call| call.name.capacity() + text(&call.arguments));
        (size_of::<Statement>() + self.sql.len() + columns + parameters + call) as u64
    }

    /// Whether it names system tables or functions.
    pub fn uses_system(&self) -> bool {
        self.plan.system
    }

    /// Whether a read-only transaction must not run it: it writes, or locks rows for somebody who will.
    pub(crate) fn is_for_writers(&self) -> bool {
        !self.read_only || self.plan.for_update
    }
}

/// Whether a session is in a transaction, as ReadyForQuery tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionStatus {
    /// `I`
    Idle,
    /// `T`
    InTransaction,
    /// `E`: only ROLLBACK (or ROLLBACK TO) is accepted.
    Failed,
}

/// In which transaction a statement runs when the client has not begun one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// In one of its own, durable before the answer.
    Auto,
    /// In the implicit transaction of a pipeline or of a query with several statements; the first opens it,
    /// [`crate::Session::finish_implicit`] ends it.
    Implicit,
}

/// How a statement ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// PostgreSQL's command tag: `SELECT 3`, `INSERT 0 1`, `CREATE TABLE`.
    pub tag: CommandTag,
    /// Warnings for the client: SQLSTATE and text.
    pub notices: Vec<(&'static str, String)>,
}

/// A command tag, formatted late so that nothing is allocated for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandTag {
    /// `SELECT n`
    Select(u64),
    /// `INSERT 0 n`
    Insert(u64),
    /// `UPDATE n`
    Update(u64),
    /// `DELETE n`
    Delete(u64),
    /// `COPY n`
    Copy(u64),
    /// A tag without a count.
    Plain(&'static str),
    /// Nothing was there to run.
    Empty,
}

impl std::fmt::Display for CommandTag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CommandTag::Select(n) => write!(f, "SELECT {n}"),
            CommandTag::Insert(n) => write!(f, "INSERT 0 {n}"),
            CommandTag::Update(n) => write!(f, "UPDATE {n}"),
            CommandTag::Delete(n) => write!(f, "DELETE {n}"),
            CommandTag::Copy(n) => write!(f, "COPY {n}"),
            CommandTag::Plain(tag) => f.write_str(tag),
            CommandTag::Empty => Ok(()),
        }
    }
}

/// A row that SQLite has just produced.
pub trait Row {
    /// How many columns it has.
    fn len(&self) -> usize;
    /// The value of a column, counted from 0. Panics if there is no such column.
    fn get(&self, column: usize) -> ValueRef<'_>;
    /// Whether it has no column.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Takes a statement's rows, in order. The rows of a statement that fails, or that is run again before its
/// answer is given, are withdrawn with [`RowSink::reset`].
pub trait RowSink: Send {
    /// One row. An error ends the statement.
    fn row(&mut self, row: &dyn Row) -> crate::Result<()>;
    /// Forget the rows so far: the statement starts over.
    fn reset(&mut self);
}

/// For whom the rows do not matter.
pub(crate) struct Nowhere;

impl RowSink for Nowhere {
    fn row(&mut self, _: &dyn Row) -> crate::Result<()> {
        Ok(())
    }

    fn reset(&mut self) {}
}

//! Prepared statements and their results: descriptions, command tags, rows.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use crate::sql::StatementKind;
use crate::value::ValueRef;

/// One column of a statement's result.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnInfo {
    /// The column's name as SQLite reports it.
    pub name: String,
    /// The declared type of the source column; `None` for an expression.
    pub declared_type: Option<String>,
}

/// One parameter of a statement.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct ParameterInfo {
    /// The declared type of the column it is compared with or stored in, if it can be determined.
    pub declared_type: Option<String>,
}

/// A prepared statement: text and description, not tied to a connection.
#[derive(Debug)]
pub struct Statement {
    /// The key in the statement caches of connections; never reused.
    pub id: u64,
    /// The SQL text of this one statement, as it is given to SQLite.
    pub sql: Arc<str>,
    /// What it does.
    pub kind: StatementKind,
    /// True if SQLite reports that the statement writes nothing.
    pub read_only: bool,
    /// Its parameters: `$1` is the first.
    pub parameters: Vec<ParameterInfo>,
    /// The columns of its result; empty if it returns no rows.
    pub columns: Vec<ColumnInfo>,
    /// What the engine has derived from its text.
    pub plan: crate::sql::Plan,
    /// What the caller keeps with the statement, set once.
    pub note: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// The message for a prepared statement whose result columns have changed. It is PostgreSQL's text:
/// drivers recognize it.
pub const STALE_PLAN: &str = "cached plan must not change result type";

/// What the caller knows about a statement in addition to its text.
#[derive(Clone, Copy, Debug, Default)]
pub struct StatementContext<'a> {
    /// It may reference system tables and functions.
    pub system: bool,
    /// The declared types of some of its parameters. `[]` alone stands for an array of the type
    /// that is derived from the SQL text.
    pub parameters: &'a [(u16, String)],
    /// It changes the text in `sqlite_schema`, which takes effect with the next statement. It must
    /// run in [`Scope::Implicit`], or in the client's transaction.
    pub declares: bool,
    /// It is prepared once and not cached: another statement may have the same text.
    pub once: bool,
}

impl Statement {
    /// Returns true if another statement has the same text and description.
    pub fn is_same(&self, other: &Statement) -> bool {
        self.sql == other.sql
            && (self.kind, self.read_only) == (other.kind, other.read_only)
            && self.columns == other.columns
            && self.parameters == other.parameters
            && (self.plan.system, self.plan.declares) == (other.plan.system, other.plan.declares)
    }

    /// The memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let column = |column: &ColumnInfo| column.name.capacity() + text(&column.declared_type);
        let columns = self.columns.capacity() * size_of::<ColumnInfo>()
            + self.columns.iter().map(column).sum::<usize>();
        let parameters = self.parameters.capacity() * size_of::<ParameterInfo>()
            + self.parameters.iter().map(|parameter| text(&parameter.declared_type)).sum::<usize>();
        let call = self.plan.call.as_ref().map_or(0, |call| call.name.capacity() + text(&call.arguments));
        let keys = self.plan.keys.as_ref().map_or(0, crate::sql::AccessedKeys::memory_bytes);
        (size_of::<Statement>() + self.sql.len() + columns + parameters + call + keys) as u64
    }

    /// Returns true if it references system tables or functions.
    pub fn uses_system(&self) -> bool {
        self.plan.system
    }

    /// Returns true if a read-only transaction must reject it: it writes, or locks rows for a later
    /// write.
    pub fn is_for_writers(&self) -> bool {
        !self.read_only || self.plan.for_update
    }
}

/// The transaction status of a session, as reported in ReadyForQuery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactionStatus {
    /// `I`
    Idle,
    /// `T`
    InTransaction,
    /// `E`: only ROLLBACK (or ROLLBACK TO) is accepted.
    Failed,
}

/// The transaction in which a statement runs if the client has not begun one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Its own transaction, durable before the answer.
    Auto,
    /// The implicit transaction of a pipeline or of a query with several statements. The first
    /// statement opens it, `finish_implicit` of the session ends it.
    Implicit,
}

/// The result of a statement that succeeded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// PostgreSQL's command tag: `SELECT 3`, `INSERT 0 1`, `CREATE TABLE`.
    pub tag: CommandTag,
    /// Warnings for the client: SQLSTATE and text.
    pub notices: Vec<(&'static str, String)>,
}

/// A command tag. It is formatted late, so that no memory is allocated for it.
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
    /// The query was empty.
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

/// A row that SQLite has just produced, valid until the next one.
pub trait Row {
    /// The number of columns.
    fn len(&self) -> usize;
    /// The value of a column, counted from 0. Panics if there is no such column.
    fn get(&self, column: usize) -> ValueRef<'_>;
    /// Returns true if the row has no columns.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Receives a statement's rows in order. If the statement fails, or is replayed before its answer
/// is sent, [`RowSink::reset`] withdraws the rows so far.
pub trait RowSink: Send {
    /// Receives one row. An error ends the statement.
    fn row(&mut self, row: &dyn Row) -> crate::Result<()>;
    /// Discards the rows received so far: the statement starts over.
    fn reset(&mut self);
    /// The changes of an autocommitted statement are visible to others and not durable yet. If they
    /// become durable, the statement ends with this completion. A gateway keeps the answer, in case
    /// that it learns of the durability from another node.
    fn committed(&mut self, _completion: &Completion) {}
}

/// Discards all rows.
pub struct DiscardRows;

impl RowSink for DiscardRows {
    fn row(&mut self, _: &dyn Row) -> crate::Result<()> {
        Ok(())
    }

    fn reset(&mut self) {}
}

//! SQL scanner: extracts from a statement's text what the engine needs before SQLite runs it.
//!
//! SQLite parses the SQL. This module only scans its tokens for:
//! - the statement's kind ([`classify`]);
//! - a trailing `FOR UPDATE`, which SQLite does not support;
//! - the row that the statement names by equality, and the columns that its parameters are compared
//!   with or assigned to ([`shape`]);
//! - the values that it gives to the columns of a primary key ([`KeyValues`]).
//!
//! Anything unrecognised is ignored. An unrecognised row costs concurrency, never correctness.

mod classify;
#[cfg(test)]
mod fuzz;
mod key;
mod kind;
mod shape;
mod token;

pub use classify::{Begin, classify};
pub use key::{AccessedKeys, Key, KeyValues, TableKey};
pub use kind::StatementKind;
pub use shape::{NamedRow, ParameterColumn, RowName, Shape, shape};
pub use token::{FirstStatement, Kind, Token, first_statement, tokens};

/// What the engine knows about a statement from its text.
#[derive(Debug, Default)]
pub struct Plan {
    /// The options of a BEGIN.
    pub begin: Begin,
    /// The row that the statement reads or changes, named by equality of columns.
    pub row: Option<NamedRow>,
    /// The primary keys that it accesses, if it names them.
    pub keys: Option<AccessedKeys>,
    /// `SELECT ... FOR UPDATE`.
    pub for_update: bool,
    /// VACUUM attaches a temporary database and needs exclusive use of the partition.
    pub vacuum: bool,
    /// `PRAGMA integrity_check` and similar: FTS5 tables must be refreshed first.
    pub checks_integrity: bool,
    /// Creates or drops temporary tables, so the connection stays with the session.
    pub temporary: bool,
    /// Uses system tables or functions.
    pub system: bool,
    /// EXPLAIN: SQLite answers it from its cached schema without reading the database.
    pub explains: bool,
    /// Changes the SQL texts in `sqlite_schema`.
    pub declares: bool,
    /// The procedure call of a CALL.
    pub call: Option<Call>,
}

/// A parsed CALL.
#[derive(Debug)]
pub struct Call {
    /// The name of the procedure.
    pub name: String,
    /// Identifies the query of the arguments in the connections' statement caches.
    pub arguments_id: u64,
    /// `SELECT` and the text of the arguments; None if there are none.
    pub arguments: Option<String>,
}

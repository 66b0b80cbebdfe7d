//! What the engine needs to know of a statement's text before SQLite runs it.
//!
//! SQLite parses the SQL; this module only reads its surface, token by token: what kind of statement it is
//! ([`classify`]), a trailing `FOR UPDATE` (which SQLite does not know), which row it names by equality and which
//! columns its parameters stand beside ([`shape`]). What it does not recognise it leaves alone: a row that is not
//! recognised costs concurrency, never correctness.

mod cache;
mod classify;
#[cfg(test)]
mod fuzz;
mod shape;
mod token;

pub(crate) use cache::StatementCache;
pub(crate) use classify::{Begin, classify};
pub(crate) use shape::{NamedRow, Shape, shape};
pub(crate) use token::{First, Token, first_statement, tokens};

/// What the text of a statement says to the engine.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Of a BEGIN: how the transaction is to begin.
    pub begin: Begin,
    /// The row that the statement reads or changes by equality of columns.
    pub row: Option<NamedRow>,
    /// `SELECT ... FOR UPDATE`.
    pub for_update: bool,
    /// VACUUM: it attaches a temporary database and wants the partition for itself.
    pub vacuum: bool,
    /// `PRAGMA integrity_check` and its like: FTS5 tables need a fresh look first.
    pub checks_integrity: bool,
    /// Makes or drops temporary tables: the connection stays with the session.
    pub temporary: bool,
    /// Uses system tables or functions.
    pub system: bool,
    /// EXPLAIN, which SQLite answers from what it knows of the schema without looking.
    pub explains: bool,
    /// Changes the texts of `sqlite_schema`.
    pub declares: bool,
    /// CALL: what it calls.
    pub call: Option<crate::procedure::Call>,
}

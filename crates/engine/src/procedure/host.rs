//! The functions of `db`, the database side: `db.query`, `db.exec`, `db.abort`.
//!
//! Each runs one statement on the transaction's connection. A failed statement is a Lua error,
//! which the procedure may catch. Whatever ends the whole transaction is recorded here as well
//! ([`Host::end`]), and cannot be undone by catching the error.

use fulmar_sqlite::sql::{classify, tokens};
use fulmar_sqlite::{
    DiscardRows, Error, Result, RowSink, Run, StatementKind, Step, Suspender, Value, sqlstate,
};
use mlua::Lua;

use super::rows::Rows;
use crate::connection::Connection;

/// Maximum length of a statement's text.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// The database, as seen by a running procedure.
pub(super) struct Host<'c> {
    connection: &'c mut Connection,
    /// Memory limit of a call.
    memory_bytes: usize,
    /// How the transaction has ended, if it cannot continue.
    end: Option<Step>,
    /// The rows of the last query.
    rows: Rows,
}

impl<'c> Host<'c> {
    pub(super) fn new(connection: &'c mut Connection, memory_bytes: usize) -> Self {
        Host { connection, memory_bytes, end: None, rows: Rows::default() }
    }

    /// The connection's suspender, valid as long as the connection.
    pub(super) fn suspender(&self) -> *const Suspender {
        &raw const self.connection.link.suspender
    }

    /// Memory limit of a call.
    pub(super) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Runs a statement, and stores its rows in [`Host::rows`].
    pub(super) fn query(&mut self, lua: &Lua, sql: &str, parameters: &[Value]) -> mlua::Result<()> {
        let mut rows = std::mem::take(&mut self.rows);
        rows.begin(lua.used_memory(), self.memory_bytes());
        let ran = self.run(sql, parameters, &mut rows);
        let named = ran.map(|id| self.connection.column_names_here(id, |name| rows.name(name)));
        self.rows = rows;
        named
    }

    /// The rows of the last query.
    pub(super) fn rows(&mut self) -> &mut Rows {
        &mut self.rows
    }

    /// Runs a statement, and returns the number of changed rows.
    pub(super) fn exec(&mut self, sql: &str, parameters: &[Value]) -> mlua::Result<i64> {
        let (_, before) = self.connection.changes();
        self.run(sql, parameters, &mut DiscardRows)?;
        let (changed, after) = self.connection.changes();
        // A statement without changes leaves SQLite's counter of the previous one unchanged.
        Ok(if after == before { 0 } else { changed })
    }

    /// Ends the procedure and its transaction with a user-defined error.
    pub(super) fn abort(&mut self, message: &str) -> mlua::Error {
        const RAISED: &str = "P0001";
        self.finish(Step::Failed(Error::new(RAISED, message)))
    }

    fn finish(&mut self, end: Step) -> mlua::Error {
        self.end.get_or_insert(end);
        mlua::Error::runtime("the transaction has ended")
    }

    /// Runs a statement, and returns its id.
    fn run(&mut self, sql: &str, parameters: &[Value], sink: &mut dyn RowSink) -> mlua::Result<u64> {
        if self.end.is_some() {
            return Err(mlua::Error::runtime("the transaction has ended"));
        }
        // Many short statements can take as long as one long one.
        if self.connection.link.checkpoint() {
            let conflict = self.connection.pages.transaction().borrow().conflict.is_some();
            let cancelled = self.connection.link.cancel.borrow().error();
            return Err(self.finish(if conflict { Step::Conflict } else { Step::Failed(cancelled) }));
        }
        let id = match self.connection.cached_text_id(sql) {
            Some(id) => id,
            None => {
                check(sql).map_err(mlua::Error::external)?;
                self.connection.cache_text(sql)
            }
        };
        let run = Run { id, sql, columns: None, parameters };
        self.connection.link.variables.borrow_mut().changed = true;
        // The procedure may have caught the error of a statement that exceeded a limit: its
        // overdraft ends here.
        self.connection.link.begin_statement();
        match self.connection.run_here(&run, sink) {
            Step::Done(_) => Ok(id),
            Step::Conflict => Err(self.finish(Step::Conflict)),
            // SQLite has rolled back the transaction, or the statement was cancelled.
            Step::Failed(error)
                if self.connection.is_autocommit() || error.state() == sqlstate::QUERY_CANCELED =>
            {
                Err(self.finish(Step::Failed(error)))
            }
            Step::Failed(error) => Err(mlua::Error::external(error)),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.connection.link.cancel.borrow().is_set()
    }

    /// The outcome of the CALL, given the outcome of the Lua code.
    pub(super) fn settle(self, outcome: Result<u64>) -> Step {
        if let Some(end) = self.end {
            return end;
        }
        match outcome {
            Ok(rows) => Step::Done(rows),
            Err(_) if self.is_cancelled() => Step::Failed(self.connection.link.cancel.borrow().error()),
            Err(_) if self.connection.pages.transaction().borrow().conflict.is_some() => Step::Conflict,
            Err(error) => Step::Failed(error),
        }
    }
}

/// Accepts only statements that read and change data: a procedure cannot control transactions,
/// schema and settings.
fn check(sql: &str) -> Result<()> {
    if sql.len() > MAX_TEXT_BYTES {
        let message = format!("a statement in a procedure exceeds the limit of {} KiB", MAX_TEXT_BYTES >> 10);
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Pass values as parameters."));
    }
    let all: Vec<_> = tokens(sql).collect();
    let end = all.iter().position(|token| token.is_symbol(";")).unwrap_or(all.len());
    if all[end..].iter().any(|token| !token.is_symbol(";")) {
        return Err(Error::new(sqlstate::SYNTAX_ERROR, "cannot run multiple statements in one call"));
    }
    let first = &all[..end];
    use StatementKind::{Delete, Insert, Query, Update};
    let (kind, _) = classify(first);
    if matches!(kind, Query | Insert | Update | Delete) && !first.first().is_some_and(|t| t.is("PRAGMA")) {
        return Ok(());
    }
    Err(Error::new(
        sqlstate::FEATURE_NOT_SUPPORTED,
        "only SELECT, INSERT, UPDATE and DELETE are supported in a procedure",
    ))
}

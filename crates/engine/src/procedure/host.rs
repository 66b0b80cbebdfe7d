//! What a procedure can ask of the database: `db.query`, `db.exec`, `db.abort`.
//!
//! Each runs one statement on the transaction's connection. What goes wrong with a statement is an error of Lua's, which
//! a procedure may catch; what ends the whole transaction is remembered here as well ([`Host::end`]), and no catching
//! undoes it.

use mlua::Lua;

use super::rows::Rows;
use crate::connection::{Connection, Run, Step};
use crate::fiber::Suspender;
use crate::sql::{classify, tokens};
use crate::statement::{Nowhere, RowSink};
use crate::{Error, Result, StatementKind, Value, sqlstate};

/// Length of a statement's text.
const LONGEST_TEXT_BYTES: usize = 1 << 20;

/// The side of the database.
pub(super) struct Host<'c> {
    connection: &'c mut Connection,
    /// The transaction cannot go on: how it ends.
    end: Option<Step>,
    /// Of the last query.
    rows: Rows,
}

impl<'c> Host<'c> {
    pub(super) fn new(connection: &'c mut Connection) -> Self {
        Host { connection, end: None, rows: Rows::default() }
    }

    /// Of the connection; valid as long as it.
    pub(super) fn suspender(&self) -> *const Suspender {
        &raw const self.connection.link.suspender
    }

    /// Memory that a call may use.
    pub(super) fn memory_bytes(&self) -> usize {
        self.connection.link.partition.node.machines.memory_bytes()
    }

    /// Runs a statement; its rows are in [`Host::rows`] then.
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

    /// Runs a statement and answers how many rows it has changed.
    pub(super) fn exec(&mut self, sql: &str, parameters: &[Value]) -> mlua::Result<i64> {
        let (_, before) = self.connection.changes();
        self.run(sql, parameters, &mut Nowhere)?;
        let (changed, after) = self.connection.changes();
        // A statement that changes nothing leaves the count of the one before.
        Ok(if after == before { 0 } else { changed })
    }

    /// Ends the procedure and its transaction with an error of its own.
    pub(super) fn abort(&mut self, message: &str) -> mlua::Error {
        const RAISED: &str = "P0001";
        self.finish(Step::Failed(Error::new(RAISED, message)))
    }

    fn finish(&mut self, end: Step) -> mlua::Error {
        self.end.get_or_insert(end);
        mlua::Error::runtime("the transaction has ended")
    }

    /// Answers the id of the statement.
    fn run(&mut self, sql: &str, parameters: &[Value], sink: &mut dyn RowSink) -> mlua::Result<u64> {
        if self.end.is_some() {
            return Err(mlua::Error::runtime("the transaction has ended"));
        }
        // Many short statements take as long as a long one.
        if self.connection.link.checkpoint() {
            let conflict = self.connection.link.transaction.borrow().conflict.is_some();
            let cancelled = self.connection.link.cancel.borrow().error();
            return Err(self.finish(if conflict { Step::Conflict } else { Step::Failed(cancelled) }));
        }
        let id = match self.connection.known_text(sql) {
            Some(id) => id,
            None => {
                check(sql).map_err(mlua::Error::external)?;
                self.connection.know_text(sql)
            }
        };
        let run = Run { id, sql, columns: None, parameters };
        self.connection.link.variables.borrow_mut().changed = true;
        // The procedure may have caught the error of a statement that was refused: its overdraft
        // ends here.
        self.connection.link.begin_statement();
        match self.connection.run_here(&run, sink) {
            Step::Done(_) => Ok(id),
            Step::Conflict => Err(self.finish(Step::Conflict)),
            // SQLite has rolled everything back, or nobody wants to go on.
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

    /// How the CALL ends, after Lua has ended with `outcome`.
    pub(super) fn settle(self, outcome: Result<u64>) -> Step {
        if let Some(end) = self.end {
            return end;
        }
        match outcome {
            Ok(rows) => Step::Done(rows),
            Err(_) if self.is_cancelled() => Step::Failed(self.connection.link.cancel.borrow().error()),
            Err(_) if self.connection.link.transaction.borrow().conflict.is_some() => Step::Conflict,
            Err(error) => Step::Failed(error),
        }
    }
}

/// Only statements that read and change data: a procedure has no say in transactions, schema and settings.
fn check(sql: &str) -> Result<()> {
    if sql.len() > LONGEST_TEXT_BYTES {
        let message = format!("a statement of a procedure has at most {} KiB", LONGEST_TEXT_BYTES >> 10);
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint("pass values as parameters"));
    }
    let all: Vec<_> = tokens(sql).collect();
    let end = all.iter().position(|token| token.is_symbol(";")).unwrap_or(all.len());
    if all[end..].iter().any(|token| !token.is_symbol(";")) {
        return Err(Error::new(sqlstate::SYNTAX_ERROR, "a procedure runs one statement at a time"));
    }
    let first = &all[..end];
    use StatementKind::{Delete, Insert, Query, Update};
    let (kind, _) = classify(first);
    if matches!(kind, Query | Insert | Update | Delete) && !first.first().is_some_and(|t| t.is("PRAGMA")) {
        return Ok(());
    }
    Err(Error::new(
        sqlstate::FEATURE_NOT_SUPPORTED,
        "a procedure can run SELECT, INSERT, UPDATE and DELETE only",
    ))
}

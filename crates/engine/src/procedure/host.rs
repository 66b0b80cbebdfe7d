//! What a procedure can ask of the database: `db.query`, `db.exec`, `db.abort`.
//!
//! Each runs one statement on the transaction's connection. What goes wrong with a statement is an error of Lua's, which
//! a procedure may catch; what ends the whole transaction is remembered here as well ([`Host::end`]), and no catching
//! undoes it.

use mlua::{Lua, Table, Variadic};

use super::MEMORY_BYTES;
use super::values::{Room, to_lua, to_sql, too_much};
use crate::connection::{Connection, Run, Step};
use crate::sql::{classify, tokens};
use crate::statement::{Row, RowSink};
use crate::value::ValueRef;
use crate::{Error, Result, StatementKind, Value, sqlstate};

/// Length of a statement's text.
const LONGEST_TEXT_BYTES: usize = 1 << 20;
/// What a field takes in a table of Lua's.
const LUA_FIELD_BYTES: usize = 32;

/// The side of the database.
pub(super) struct Host<'c> {
    connection: &'c mut Connection,
    /// The transaction cannot go on: how it ends.
    end: Option<Step>,
}

type Arguments = Variadic<mlua::Value>;

impl<'c> Host<'c> {
    pub(super) fn new(connection: &'c mut Connection) -> Self {
        Host { connection, end: None }
    }

    /// Runs a statement and answers its rows: a list of tables with a field for each column.
    pub(super) fn query(&mut self, lua: &Lua, sql: &str, arguments: &Arguments) -> mlua::Result<Table> {
        let _trusted = Trusted::new(lua)?;
        let mut rows = LuaRows { lua: Confined(lua), values: Confined(Vec::new()) };
        let (id, count) = self.run(sql, arguments, &mut rows)?;
        let mut names = Vec::new();
        self.connection.column_names_here(id, |name| names.push(lua.create_string(name)));
        let names = names.into_iter().collect::<mlua::Result<Vec<_>>>()?;
        let table = lua.create_table_with_capacity(count as usize, 0)?;
        let mut values = rows.values.0.into_iter();
        for _ in 0..count {
            let row = lua.create_table_with_capacity(0, names.len())?;
            for (name, value) in names.iter().zip(&mut values) {
                row.raw_set(name, value)?;
            }
            table.raw_push(row)?;
        }
        Ok(table)
    }

    /// Runs a statement and answers how many rows it has changed.
    pub(super) fn exec(&mut self, sql: &str, arguments: &Arguments) -> mlua::Result<i64> {
        struct Nowhere;
        impl RowSink for Nowhere {
            fn row(&mut self, _: &dyn Row) -> Result<()> {
                Ok(())
            }
            fn reset(&mut self) {}
        }
        let (_, before) = self.connection.changes();
        self.run(sql, arguments, &mut Nowhere)?;
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

    fn run(&mut self, sql: &str, arguments: &Arguments, sink: &mut dyn RowSink) -> mlua::Result<(u64, u64)> {
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
        let mut room = Room::new();
        let parameters: Result<Vec<Value>> = (1..)
            .zip(arguments.iter())
            .map(|(number, value)| to_sql(value, &mut room, || format!("argument ${number}")))
            .collect();
        let parameters = parameters.map_err(mlua::Error::external)?;
        let run = Run { id, sql, columns: None, parameters: &parameters };
        self.connection.link.variables.borrow_mut().changed = true;
        match self.connection.run_here(&run, sink) {
            Step::Done(rows) => Ok((id, rows)),
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

/// Values of rows, one after the other.
struct LuaRows<'l> {
    lua: Confined<&'l Lua>,
    values: Confined<Vec<mlua::Value>>,
}

impl RowSink for LuaRows<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        for column in 0..row.len() {
            let value = row.get(column);
            let made = match value {
                ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len(),
                _ => 0,
            };
            // The values, and the tables that they will be in.
            let held = (self.values.0.len() + 1) * (size_of::<mlua::Value>() + LUA_FIELD_BYTES);
            if self.lua.0.used_memory() + made + held > MEMORY_BYTES {
                return Err(too_much());
            }
            self.values.0.push(to_lua(self.lua.0, value)?);
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.values.0.clear();
    }
}

/// While it lives, Lua's memory is not limited: with a limit each string and field that we make is made in a protected
/// call, which costs more than the query. What we make is counted in [`LuaRows`].
pub(super) struct Trusted<'l>(&'l Lua);

impl<'l> Trusted<'l> {
    pub(super) fn new(lua: &'l Lua) -> mlua::Result<Self> {
        lua.set_memory_limit(0)?;
        Ok(Trusted(lua))
    }
}

impl Drop for Trusted<'_> {
    fn drop(&mut self) {
        // It cannot fail: the machine's memory is ours, and was limited before.
        let _ = self.0.set_memory_limit(MEMORY_BYTES);
    }
}

/// What stays with its machine.
struct Confined<T>(T);

// SAFETY: rows are made and used on the fiber that runs the machine, which moves between threads as a whole.
unsafe impl<T> Send for Confined<T> {}

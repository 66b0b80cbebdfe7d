//! Stored procedures: a transaction in one round trip, written in Lua (Luau), executed next to the
//! data.
//!
//! ```text
//! CREATE PROCEDURE transfer(source INTEGER, target INTEGER, amount INTEGER) LANGUAGE lua AS $$
//!     local rows = db.query("SELECT balance FROM account WHERE id = $1", source)
//!     if #rows == 0 then db.abort("no such account: " .. source) end
//!     db.exec("UPDATE account SET balance = balance - $2 WHERE id = $1", source, amount)
//!     db.exec("UPDATE account SET balance = balance + $2 WHERE id = $1", target, amount)
//! $$
//! ```
//!
//! A definition is a row of the ordinary table [`TABLE`] in the tenant's database, so it is
//! committed, replayed, moved and copied like all data. CALL is a normal statement ([`call_here`]):
//! it runs on the statement's fiber, its queries run on the transaction's connection, and after a
//! conflict it is run again as a whole.
//!
//! | module | contents |
//! | --- | --- |
//! | [`answer`] | returned rows |
//! | [`definition`] | stored definitions |
//! | [`functions`] | `db.query`, `db.exec`, `db.abort`: the Lua side |
//! | [`host`] | the same: the database side |
//! | [`limits`] | limits of a call |
//! | [`loaded`] | definitions as read in a transaction, and their cache |
//! | [`rows`] | query rows as Lua tables |
//! | [`values`] | conversion between SQL and Lua values |
//! | [`vm`] | Lua machines: sandbox, reuse |
//!
//! # What a procedure can do
//! A procedure can compute, and use `db`. It has no files, clock, randomness, coroutines or
//! writable globals; SQL's `now()` and `random()` are those of the transaction. It may use 64 MiB
//! (less on a small node) and [`limits::MAX_STEPS`]; `statement_timeout` and a cancel end it like
//! any statement. `pcall` can catch an SQL error (the failed statement has changed nothing), but
//! not an abort, a conflict or a cancel: from then on all calls of `db` fail.

mod answer;
mod definition;
mod functions;
mod host;
mod limits;
mod loaded;
mod rows;
mod values;
mod vm;

pub(crate) use definition::describe_here;
pub use definition::{CREATE_TABLE, Definition, TABLE};
pub(crate) use loaded::Known;
pub(crate) use vm::{LuaPool, check};

use std::sync::Arc;

use host::Host;
use loaded::Loaded;
use values::ValueBudget;

use fulmar_sqlite::sql::Call;
use fulmar_sqlite::{
    BEGIN, COMMIT, Error, Lease, ROLLBACK, Result, Row, RowSink, Run, Step, Value, ValueRef, sqlstate,
};

use crate::connection::Connection;

/// Runs a CALL, on the fiber. Outside of a transaction it begins one, which is
/// committed or rolled back as a whole.
pub(crate) fn call_here(
    connection: &mut Connection,
    pool: &LuaPool,
    call: &Call,
    parameters: &[Value],
    columns: usize,
    sink: &mut dyn RowSink,
) -> Step {
    if !connection.is_autocommit() {
        return run(connection, pool, call, parameters, columns, sink);
    }
    match connection.control_here(BEGIN.0, BEGIN.1) {
        Step::Done(_) => {}
        other => return other,
    }
    let mut end = run(connection, pool, call, parameters, columns, sink);
    if let Step::Done(rows) = end {
        end = match connection.control_here(COMMIT.0, COMMIT.1) {
            Step::Done(_) => Step::Done(rows),
            other => other,
        };
    }
    if !connection.is_autocommit() {
        connection.control_here(ROLLBACK.0, ROLLBACK.1);
    }
    end
}

fn run(
    connection: &mut Connection,
    pool: &LuaPool,
    call: &Call,
    parameters: &[Value],
    columns: usize,
    sink: &mut dyn RowSink,
) -> Step {
    match prepare(connection, pool.memory_bytes(), call, parameters) {
        Ok(Ok((loaded, arguments))) => {
            if loaded.returns().len() != columns {
                return Step::Failed(
                    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, fulmar_sqlite::STALE_PLAN)
                        .hint("The procedure was replaced after the CALL was prepared. Prepare it again."),
                );
            }
            execute(connection, pool, call, &loaded, arguments, sink)
        }
        Ok(Err(step)) => step,
        Err(error) => Step::Failed(error),
    }
}

/// The definition, and the values of the arguments.
type Ready = (Arc<Loaded>, Vec<Value>);

fn prepare(
    connection: &mut Connection,
    memory_bytes: usize,
    call: &Call,
    parameters: &[Value],
) -> Result<std::result::Result<Ready, Step>> {
    let loaded = match definition::find(connection, &call.name) {
        Ok(Some(loaded)) => loaded,
        Ok(None) => return Err(definition::unknown(&call.name)),
        Err(step) => return Ok(Err(step)),
    };
    let mut arguments = OneRow { row: None, memory_bytes };
    if let Some(sql) = &call.arguments {
        let run = Run { id: call.arguments_id, sql, columns: None, parameters };
        match connection.run_here(&run, &mut arguments) {
            Step::Done(_) => {}
            other => return Ok(Err(other)),
        }
    }
    let arguments = arguments.row.unwrap_or_default();
    definition::check_count(&call.name, loaded.parameter_count(), arguments.len())?;
    Ok(Ok((loaded, arguments)))
}

fn execute(
    connection: &mut Connection,
    pool: &LuaPool,
    call: &Call,
    loaded: &Loaded,
    arguments: Vec<Value>,
    sink: &mut dyn RowSink,
) -> Step {
    let _held = match Lease::new(loaded.memory_bytes() + arguments.iter().map(value_bytes).sum::<u64>()) {
        Ok(lease) => lease,
        Err(error) => return Step::Failed(error),
    };
    let outcome = pool.take().map(|mut machine| {
        let mut host = Host::new(connection, pool.memory_bytes());
        let outcome = machine.run(&call.name, loaded, &arguments, &mut host, sink);
        let outcome = host.settle(outcome);
        pool.give(machine);
        outcome
    });
    outcome.unwrap_or_else(Step::Failed)
}

fn value_bytes(value: &Value) -> u64 {
    let bytes = match value {
        Value::Text(text) => text.capacity(),
        Value::Blob(blob) => blob.capacity(),
        _ => 0,
    };
    (size_of::<Value>() + bytes) as u64
}

/// Receives the row of the arguments.
struct OneRow {
    row: Option<Vec<Value>>,
    memory_bytes: usize,
}

impl RowSink for OneRow {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if self.row.is_some() {
            return Err(Error::new(sqlstate::SYNTAX_ERROR, "the arguments of CALL must be a single row"));
        }
        let mut budget = ValueBudget::new(self.memory_bytes);
        let values = (0..row.len()).map(|column| {
            let value = row.get(column);
            budget.take(match value {
                ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len(),
                _ => 0,
            })?;
            Ok(value.to_owned())
        });
        self.row = Some(values.collect::<Result<_>>()?);
        Ok(())
    }

    fn reset(&mut self) {
        self.row = None;
    }
}

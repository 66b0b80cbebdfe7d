//! Procedures: a transaction in one round trip, written in Lua (Luau), run beside the data.
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
//! A definition is a row of the ordinary table [`TABLE`] in the tenant's own database, so it commits, replays, moves and
//! is copied like all data. CALL is a statement like any other ([`call_here`]): it runs on the statement's fiber, its
//! queries run on the transaction's connection, and after a conflict it is run again as a whole.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`answer`] | what a procedure returns, as rows |
//! | [`definition`] | what is kept of a procedure |
//! | [`functions`] | `db.query`, `db.exec`, `db.abort`, as Lua calls them |
//! | [`host`] | what they do |
//! | [`limits`] | what a call may use |
//! | [`rows`] | the rows of a query as tables of Lua's |
//! | [`values`] | SQL's values as Lua's, and back |
//! | [`vm`] | the machines: sandbox, what they keep |
//!
//! # What a procedure can do
//! Compute, and use `db`. It has no files, clock, randomness, coroutines or globals of its own; SQL's `now()` and
//! `random()` are the transaction's. It may use 64 MiB (less on a small node) and [`limits::MOST_STEPS`]; `statement_timeout` and a
//! cancel end it like any statement. An error of SQL's can be caught with `pcall` (the statement that failed has changed
//! nothing); an abort, a conflict or a cancel cannot: `db` answers nothing else from then on.

mod answer;
mod definition;
mod functions;
mod host;
mod limits;
mod rows;
mod values;
mod vm;

pub use definition::{CREATE_TABLE, Definition, TABLE};
pub(crate) use definition::{Known, describe_here};
pub(crate) use vm::{Machines, check};

use std::sync::Arc;

use definition::Loaded;
use host::Host;
use values::Room;

use crate::connection::{BEGIN, COMMIT, Connection, ROLLBACK, Run, Step};
use crate::heap::Lease;
use crate::statement::{Row, RowSink};
use crate::value::ValueRef;
use crate::{Error, Result, Value, sqlstate};

/// What a CALL says.
#[derive(Debug)]
pub(crate) struct Call {
    pub name: String,
    /// Names the query for the arguments in connections' caches.
    pub arguments_id: u64,
    /// `SELECT` and the arguments, as they were written; `None` if there are none.
    pub arguments: Option<String>,
}

/// Runs a CALL; on the fiber. Outside a transaction it is one of its own: what it did is committed, or nothing is.
pub(crate) fn call_here(
    connection: &mut Connection,
    call: &Call,
    parameters: &[Value],
    columns: usize,
    sink: &mut dyn RowSink,
) -> Step {
    if !connection.is_autocommit() {
        return run(connection, call, parameters, columns, sink);
    }
    match connection.control_here(BEGIN.0, BEGIN.1) {
        Step::Done(_) => {}
        other => return other,
    }
    let mut end = run(connection, call, parameters, columns, sink);
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
    call: &Call,
    parameters: &[Value],
    columns: usize,
    sink: &mut dyn RowSink,
) -> Step {
    match prepare(connection, call, parameters) {
        Ok(Ok((loaded, arguments))) => {
            if loaded.returns().len() != columns {
                return Step::Failed(
                    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, crate::STALE_PLAN)
                        .hint("the procedure was replaced since the CALL was prepared: prepare it again"),
                );
            }
            execute(connection, call, &loaded, arguments, sink)
        }
        Ok(Err(step)) => step,
        Err(error) => Step::Failed(error),
    }
}

/// The definition, and the values of the arguments.
type Ready = (Arc<Loaded>, Vec<Value>);

fn prepare(
    connection: &mut Connection,
    call: &Call,
    parameters: &[Value],
) -> Result<std::result::Result<Ready, Step>> {
    let loaded = match Loaded::find(connection, &call.name) {
        Ok(Some(loaded)) => loaded,
        Ok(None) => return Err(definition::unknown(&call.name)),
        Err(step) => return Ok(Err(step)),
    };
    let memory_bytes = connection.link.partition.node.machines.memory_bytes();
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
    call: &Call,
    loaded: &Loaded,
    arguments: Vec<Value>,
    sink: &mut dyn RowSink,
) -> Step {
    let machines = connection.link.partition.node.machines.clone();
    let _held = match Lease::new(loaded.memory_bytes() + arguments.iter().map(value_bytes).sum::<u64>()) {
        Ok(lease) => lease,
        Err(error) => return Step::Failed(error),
    };
    let outcome = machines.take().map(|mut machine| {
        let mut host = Host::new(connection);
        let outcome = machine.run(&call.name, loaded, &arguments, &mut host, sink);
        let outcome = host.settle(outcome);
        machines.give(machine);
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

/// Keeps the one row that the arguments are.
struct OneRow {
    row: Option<Vec<Value>>,
    memory_bytes: usize,
}

impl RowSink for OneRow {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if self.row.is_some() {
            return Err(Error::new(sqlstate::SYNTAX_ERROR, "the arguments of a CALL are one row"));
        }
        let mut room = Room::new(self.memory_bytes);
        let values = (0..row.len()).map(|column| {
            let value = row.get(column);
            room.take(match value {
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

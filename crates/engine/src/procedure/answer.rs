//! Sends the rows that a procedure returns to the client. The result is a list of rows, or one row.
//! A row is a table with named fields or with values in order.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use fulmar_sqlite::{Error, Row, RowSink, Value, ValueRef, checkpoint_here, sqlstate};
use mlua::{Lua, ffi};

use super::functions::Trusted;
use super::values::{ValueBudget, ended, from_stack};

/// Sends the rows, and returns their number.
pub(super) fn send_rows(
    lua: &Lua,
    memory_bytes: usize,
    answer: mlua::Value,
    returns: &[(String, String)],
    sink: &mut dyn RowSink,
) -> mlua::Result<u64> {
    match &answer {
        mlua::Value::Nil => return Ok(0),
        mlua::Value::Table(_) => {}
        other => {
            let message = format!("procedure must return a table of rows, not a {}", other.type_name());
            return Err(mlua::Error::external(Error::new(sqlstate::DATATYPE_MISMATCH, message)));
        }
    }
    let mut sent = Ok(Ok(0));
    let trusted = Trusted::new(lua, memory_bytes)?;
    // SAFETY: the table is the function's only argument. Lua's memory limit is disabled, so the
    // called Lua functions raise no errors, and panics are caught before they reach Lua.
    unsafe {
        lua.exec_raw::<()>(answer, |state| {
            sent = catch_unwind(AssertUnwindSafe(|| send_all(state, memory_bytes, returns, sink)));
            ffi::lua_settop(state, 0);
        })?;
    }
    drop(trusted);
    sent.unwrap_or_else(|panic| resume_unwind(panic))
}

/// # Safety
/// The stack must contain the table and nothing else. Lua's memory limit must be disabled.
unsafe fn send_all(
    state: *mut ffi::lua_State,
    memory_bytes: usize,
    returns: &[(String, String)],
    sink: &mut dyn RowSink,
) -> mlua::Result<u64> {
    const TABLE: c_int = 1;
    // SAFETY: guaranteed by the caller; a C function has space for 20 values, and at most three are
    // used at a time.
    unsafe {
        let count = ffi::lua_rawlen(state, TABLE);
        let is_one_row = if count == 0 {
            has_fields(state, TABLE)
        } else {
            ffi::lua_rawgeti(state, TABLE, 1);
            let first = ffi::lua_type(state, -1);
            ffi::lua_pop(state, 1);
            first != ffi::LUA_TTABLE
        };
        if is_one_row {
            send_row(state, TABLE, memory_bytes, returns, sink)?;
            return Ok(1);
        }
        for index in 1..=count as c_int {
            ffi::lua_rawgeti(state, TABLE, index.into());
            if ffi::lua_type(state, -1) != ffi::LUA_TTABLE {
                let message = format!("row {index} returned by the procedure is not a table");
                return Err(mlua::Error::external(Error::new(sqlstate::DATATYPE_MISMATCH, message)));
            }
            send_row(state, TABLE + 1, memory_bytes, returns, sink)?;
            ffi::lua_pop(state, 1);
        }
        Ok(count as u64)
    }
}

/// # Safety
/// There must be a table at the index, and space for two values.
unsafe fn has_fields(state: *mut ffi::lua_State, table: c_int) -> bool {
    // SAFETY: guaranteed by the caller; `nil` starts the iteration.
    unsafe {
        ffi::lua_pushnil(state);
        let found = ffi::lua_next(state, table) != 0;
        if found {
            ffi::lua_pop(state, 2);
        }
        found
    }
}

/// # Safety
/// There must be a table at the index, and space for one value. Lua's memory limit must be
/// disabled.
unsafe fn send_row(
    state: *mut ffi::lua_State,
    row: c_int,
    memory_bytes: usize,
    returns: &[(String, String)],
    sink: &mut dyn RowSink,
) -> mlua::Result<()> {
    if checkpoint_here() {
        return Err(ended());
    }
    let mut budget = ValueBudget::new(memory_bytes);
    let mut values = Vec::with_capacity(returns.len());
    for (index, (name, _)) in returns.iter().enumerate() {
        // SAFETY: guaranteed by the caller; each pushed value is popped.
        let value = unsafe {
            ffi::lua_pushlstring(state, name.as_ptr().cast(), name.len());
            ffi::lua_rawget(state, row);
            if ffi::lua_type(state, -1) == ffi::LUA_TNIL {
                ffi::lua_pop(state, 1);
                ffi::lua_rawgeti(state, row, (index + 1) as _);
            }
            let value = from_stack(state, -1, &mut budget, || format!("column \"{name}\""));
            ffi::lua_pop(state, 1);
            value
        };
        values.push(value.map_err(mlua::Error::external)?);
    }
    sink.row(&Values(values)).map_err(mlua::Error::external)
}

struct Values(Vec<Value>);

impl Row for Values {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, column: usize) -> ValueRef<'_> {
        self.0[column].as_ref()
    }
}

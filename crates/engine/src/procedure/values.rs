//! Conversion between SQL and Lua values.
//!
//! | SQL | Lua |
//! | --- | --- |
//! | NULL | `nil` (in a row: no such field) |
//! | INTEGER, REAL | a number (double); integers beyond 2^53 fail instead of being rounded |
//! | TEXT | a string |
//! | BLOB | a buffer |
//! | (1, 0) | `true`, `false`: only from Lua to SQL |

use std::ffi::{CStr, c_int};

use mlua::{Lua, ffi};

use fulmar_sqlite::{Error, Result, Value, ValueRef, sqlstate};

/// Every integer up to this is exactly representable as a double.
const MAX_EXACT_INTEGER: i64 = 1 << 53;

/// Remaining memory for values in bytes. They are Rust values, outside of the memory that Lua
/// counts.
pub(super) struct ValueBudget {
    left: usize,
    /// Memory limit of the call.
    memory_bytes: usize,
}

impl ValueBudget {
    pub(super) fn new(memory_bytes: usize) -> Self {
        ValueBudget { left: memory_bytes, memory_bytes }
    }

    pub(super) fn take(&mut self, bytes: usize) -> Result<()> {
        let left = self.left.checked_sub(bytes + size_of::<Value>());
        self.left = left.ok_or_else(|| memory_exceeded(self.memory_bytes))?;
        Ok(())
    }

    /// Memory taken so far.
    pub(super) fn taken(&self) -> u64 {
        (self.memory_bytes - self.left) as u64
    }
}

pub(super) fn memory_exceeded(memory_bytes: usize) -> Error {
    let message = format!("values exceed the procedure's memory limit of {} MiB", memory_bytes >> 20);
    Error::new(sqlstate::OUT_OF_MEMORY, message).hint("Process large numbers of rows in SQL.")
}

/// Converts an SQL value to Lua.
pub(super) fn to_lua(lua: &Lua, value: ValueRef<'_>) -> Result<mlua::Value> {
    Ok(match value {
        ValueRef::Text(text) => mlua::Value::String(lua.create_string(text).map_err(no_memory)?),
        ValueRef::Blob(blob) => mlua::Value::Buffer(lua.create_buffer(blob).map_err(no_memory)?),
        number => number_of(number)?.map_or(mlua::Value::Nil, mlua::Value::Number),
    })
}

/// Converts an SQL number to a Lua number; None if the value is not a number.
pub(super) fn number_of(value: ValueRef<'_>) -> Result<Option<f64>> {
    match value {
        ValueRef::Integer(i) if (-MAX_EXACT_INTEGER..=MAX_EXACT_INTEGER).contains(&i) => Ok(Some(i as f64)),
        ValueRef::Integer(i) => {
            let message = format!("integer {i} cannot be represented exactly as a Lua number");
            Err(Error::new(sqlstate::NUMERIC_OUT_OF_RANGE, message)
                .hint("Lua numbers are exact up to 2^53. CAST(... AS TEXT) preserves all digits."))
        }
        ValueRef::Real(r) => Ok(Some(r)),
        ValueRef::Null | ValueRef::Text(_) | ValueRef::Blob(_) => Ok(None),
    }
}

fn no_memory(cause: mlua::Error) -> Error {
    Error::new(sqlstate::OUT_OF_MEMORY, format!("procedure out of memory: {cause}"))
}

/// Converts the Lua value at a stack index to SQL. `what` names it in errors.
///
/// # Safety
/// There must be a value at the index.
pub(super) unsafe fn from_stack(
    state: *mut ffi::lua_State,
    index: c_int,
    budget: &mut ValueBudget,
    what: impl Fn() -> String,
) -> Result<Value> {
    // SAFETY: guaranteed by the caller; each value is read as its actual type. The contents of a
    // string or buffer do not move while it is on the stack.
    unsafe {
        let value = match ffi::lua_type(state, index) {
            ffi::LUA_TNIL => Value::Null,
            ffi::LUA_TBOOLEAN => Value::Integer((ffi::lua_toboolean(state, index) != 0).into()),
            ffi::LUA_TNUMBER => match ffi::lua_tonumber(state, index) {
                n if n.fract() == 0.0 && n.abs() <= MAX_EXACT_INTEGER as f64 => Value::Integer(n as i64),
                n => Value::Real(n),
            },
            ffi::LUA_TSTRING => {
                let text = text_at(state, index, what)?;
                budget.take(text.len())?;
                return Ok(Value::Text(text.to_owned()));
            }
            ffi::LUA_TBUFFER => {
                let mut length = 0;
                let bytes = ffi::lua_tobuffer(state, index, &raw mut length).cast::<u8>();
                budget.take(length)?;
                return Ok(Value::Blob(std::slice::from_raw_parts(bytes, length).to_vec()));
            }
            other => {
                let name = CStr::from_ptr(ffi::lua_typename(state, other)).to_string_lossy();
                let message = format!("{} is a {name}, which has no SQL equivalent", what());
                return Err(Error::new(sqlstate::DATATYPE_MISMATCH, message)
                    .hint("Supported types are nil, boolean, number, string and buffer."));
            }
        };
        budget.take(0)?;
        Ok(value)
    }
}

/// The text of the string at a stack index. Fails if it is not UTF-8.
///
/// # Safety
/// There must be a string, which must stay on the stack while the text is used.
pub(super) unsafe fn text_at<'s>(
    state: *mut ffi::lua_State,
    index: c_int,
    what: impl Fn() -> String,
) -> Result<&'s str> {
    let mut length = 0;
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe {
        let start = ffi::lua_tolstring(state, index, &raw mut length).cast::<u8>();
        std::slice::from_raw_parts(start, length)
    };
    str::from_utf8(bytes).map_err(|_| {
        Error::new(sqlstate::INVALID_TEXT, format!("{} is not valid UTF-8", what()))
            .hint("Pass binary data as a buffer: buffer.fromstring(...).")
    })
}

/// The Lua error that ends a call because of a limit, a cancel or a conflict. The client receives
/// the actual reason.
pub(super) fn ended() -> mlua::Error {
    mlua::Error::runtime("procedure was terminated")
}

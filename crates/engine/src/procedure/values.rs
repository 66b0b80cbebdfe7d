//! SQL's values as Lua's, and back.
//!
//! | SQL | Lua |
//! | --- | --- |
//! | NULL | `nil` (in a row: no such field) |
//! | INTEGER, REAL | a number, which is a double: integers beyond 2^53 are refused, not rounded |
//! | TEXT | a string |
//! | BLOB | a buffer |
//! | (1, 0) | `true`, `false`: only on their way to SQL |

use std::ffi::{CStr, c_int};

use mlua::{Lua, ffi};

use crate::value::ValueRef;
use crate::{Error, Result, Value, sqlstate};

/// Up to here every integer is a double.
const EXACT: i64 = 1 << 53;

/// What values may still take, bytes: they are ours, outside of the memory that Lua counts.
pub(super) struct Room {
    left: usize,
    /// What a call may use.
    memory_bytes: usize,
}

impl Room {
    pub(super) fn new(memory_bytes: usize) -> Self {
        Room { left: memory_bytes, memory_bytes }
    }

    pub(super) fn take(&mut self, bytes: usize) -> Result<()> {
        let left = self.left.checked_sub(bytes + size_of::<Value>());
        self.left = left.ok_or_else(|| too_much(self.memory_bytes))?;
        Ok(())
    }

    /// What has been taken.
    pub(super) fn taken(&self) -> u64 {
        (self.memory_bytes - self.left) as u64
    }
}

pub(super) fn too_much(memory_bytes: usize) -> Error {
    let message = format!("the values take more than the {} MiB of a procedure", memory_bytes >> 20);
    Error::new(sqlstate::OUT_OF_MEMORY, message).hint("let SQL do the work on many rows")
}

/// A value of SQL's for Lua.
pub(super) fn to_lua(lua: &Lua, value: ValueRef<'_>) -> Result<mlua::Value> {
    Ok(match value {
        ValueRef::Text(text) => mlua::Value::String(lua.create_string(text).map_err(no_memory)?),
        ValueRef::Blob(blob) => mlua::Value::Buffer(lua.create_buffer(blob).map_err(no_memory)?),
        number => number_of(number)?.map_or(mlua::Value::Nil, mlua::Value::Number),
    })
}

/// A number of SQL's as Lua has it; `None` if it is no number.
pub(super) fn number_of(value: ValueRef<'_>) -> Result<Option<f64>> {
    match value {
        ValueRef::Integer(i) if (-EXACT..=EXACT).contains(&i) => Ok(Some(i as f64)),
        ValueRef::Integer(i) => {
            let message = format!("the integer {i} does not fit a number of Lua's");
            Err(Error::new(sqlstate::NUMERIC_OUT_OF_RANGE, message)
                .hint("numbers of Lua's are exact up to 2^53; CAST(... AS TEXT) keeps all digits"))
        }
        ValueRef::Real(r) => Ok(Some(r)),
        ValueRef::Null | ValueRef::Text(_) | ValueRef::Blob(_) => Ok(None),
    }
}

fn no_memory(cause: mlua::Error) -> Error {
    Error::new(sqlstate::OUT_OF_MEMORY, format!("a procedure's memory is full: {cause}"))
}

/// A value of Lua's for SQL: that at an index of the stack. `what` names it in the error.
///
/// # Safety
/// There is a value at the index.
pub(super) unsafe fn from_stack(
    state: *mut ffi::lua_State,
    index: c_int,
    room: &mut Room,
    what: impl Fn() -> String,
) -> Result<Value> {
    // SAFETY: the caller's promise; each is asked for as what it is. What a string or a buffer holds stays where it is
    // while it is on the stack.
    unsafe {
        let value = match ffi::lua_type(state, index) {
            ffi::LUA_TNIL => Value::Null,
            ffi::LUA_TBOOLEAN => Value::Integer((ffi::lua_toboolean(state, index) != 0).into()),
            ffi::LUA_TNUMBER => match ffi::lua_tonumber(state, index) {
                n if n.fract() == 0.0 && n.abs() <= EXACT as f64 => Value::Integer(n as i64),
                n => Value::Real(n),
            },
            ffi::LUA_TSTRING => {
                let text = text_at(state, index, what)?;
                room.take(text.len())?;
                return Ok(Value::Text(text.to_owned()));
            }
            ffi::LUA_TBUFFER => {
                let mut length = 0;
                let bytes = ffi::lua_tobuffer(state, index, &raw mut length).cast::<u8>();
                room.take(length)?;
                return Ok(Value::Blob(std::slice::from_raw_parts(bytes, length).to_vec()));
            }
            other => {
                let name = CStr::from_ptr(ffi::lua_typename(state, other)).to_string_lossy();
                let message = format!("{} is a {name}, which SQL has no value for", what());
                return Err(Error::new(sqlstate::DATATYPE_MISMATCH, message)
                    .hint("nil, booleans, numbers, strings and buffers are values"));
            }
        };
        room.take(0)?;
        Ok(value)
    }
}

/// The text of the string at an index of the stack, if it is UTF-8.
///
/// # Safety
/// There is a string, and it stays on the stack while the text is used.
pub(super) unsafe fn text_at<'s>(
    state: *mut ffi::lua_State,
    index: c_int,
    what: impl Fn() -> String,
) -> Result<&'s str> {
    let mut length = 0;
    // SAFETY: the caller's promise.
    let bytes = unsafe {
        let start = ffi::lua_tolstring(state, index, &raw mut length).cast::<u8>();
        std::slice::from_raw_parts(start, length)
    };
    str::from_utf8(bytes).map_err(|_| {
        Error::new(sqlstate::INVALID_TEXT, format!("{} is a string that is not UTF-8", what()))
            .hint("bytes that are no text are buffers: buffer.fromstring(...)")
    })
}

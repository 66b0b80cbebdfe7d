//! SQL's values as Lua's, and back.
//!
//! | SQL | Lua |
//! | --- | --- |
//! | NULL | `nil` (in a row: no such field) |
//! | INTEGER, REAL | a number, which is a double: integers beyond 2^53 are refused, not rounded |
//! | TEXT | a string |
//! | BLOB | a buffer |
//! | (1, 0) | `true`, `false`: only on their way to SQL |

use mlua::Lua;

use super::limits::MEMORY_BYTES;
use crate::value::ValueRef;
use crate::{Error, Result, Value, sqlstate};

/// Up to here every integer is a double.
const EXACT: i64 = 1 << 53;

/// What values may still take, bytes: they are ours, outside of the memory that Lua counts.
pub(super) struct Room(usize);

impl Room {
    pub(super) fn new() -> Self {
        Room(MEMORY_BYTES)
    }

    pub(super) fn take(&mut self, bytes: usize) -> Result<()> {
        self.0 = self.0.checked_sub(bytes + size_of::<Value>()).ok_or_else(too_much)?;
        Ok(())
    }
}

pub(super) fn too_much() -> Error {
    let message = format!("the values take more than the {} MiB of a procedure", MEMORY_BYTES >> 20);
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

/// A value of Lua's for SQL; `what` names it in the error.
pub(super) fn to_sql(value: &mlua::Value, room: &mut Room, what: impl Fn() -> String) -> Result<Value> {
    room.take(match value {
        mlua::Value::String(text) => text.as_bytes().len(),
        mlua::Value::Buffer(bytes) => bytes.len(),
        _ => 0,
    })?;
    Ok(match value {
        mlua::Value::Nil => Value::Null,
        mlua::Value::Boolean(b) => Value::Integer((*b).into()),
        mlua::Value::Integer(i) => Value::Integer(*i),
        mlua::Value::Number(n) if n.fract() == 0.0 && n.abs() <= EXACT as f64 => Value::Integer(*n as i64),
        mlua::Value::Number(n) => Value::Real(*n),
        mlua::Value::String(text) => match text.to_str() {
            Ok(text) => Value::Text(text.to_owned()),
            Err(_) => {
                let message = format!("{} is a string that is not UTF-8", what());
                return Err(Error::new(sqlstate::INVALID_TEXT, message)
                    .hint("bytes that are no text are buffers: buffer.fromstring(...)"));
            }
        },
        mlua::Value::Buffer(bytes) => Value::Blob(bytes.to_vec()),
        other => {
            let message = format!("{} is a {}, which SQL has no value for", what(), other.type_name());
            return Err(Error::new(sqlstate::DATATYPE_MISMATCH, message)
                .hint("nil, booleans, numbers, strings and buffers are values"));
        }
    })
}

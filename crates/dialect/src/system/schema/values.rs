//! Conversion of SQLite's values to text and numbers.

use fulmar_sqlite::{Value, ValueRef};

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Integer(integer) => integer.to_string(),
        _ => String::new(),
    }
}

pub(super) fn integer(value: &Value) -> i64 {
    match value {
        Value::Integer(integer) => *integer,
        _ => 0,
    }
}

pub(super) fn text_of_ref(value: ValueRef<'_>) -> String {
    match value {
        ValueRef::Text(text) => String::from_utf8_lossy(text).into_owned(),
        _ => String::new(),
    }
}

pub(super) fn number(value: ValueRef<'_>) -> i64 {
    match value {
        ValueRef::Integer(integer) => integer,
        _ => 0,
    }
}

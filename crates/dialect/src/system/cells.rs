//! Conversion of Rust values to the SQL values of system tables.

use fulmar_sqlite::Value;

/// A value of a row.
pub trait Cell {
    /// Converts the value.
    fn cell(self) -> Value;
}

impl Cell for i64 {
    fn cell(self) -> Value {
        Value::Integer(self)
    }
}

impl Cell for f64 {
    fn cell(self) -> Value {
        Value::Real(self)
    }
}

impl Cell for bool {
    fn cell(self) -> Value {
        Value::Integer(self.into())
    }
}

impl Cell for &str {
    fn cell(self) -> Value {
        Value::Text(self.to_owned())
    }
}

impl Cell for String {
    fn cell(self) -> Value {
        Value::Text(self)
    }
}

impl Cell for () {
    fn cell(self) -> Value {
        Value::Null
    }
}

impl Cell for Value {
    fn cell(self) -> Value {
        self
    }
}

impl<T: Cell> Cell for Option<T> {
    fn cell(self) -> Value {
        self.map_or(Value::Null, Cell::cell)
    }
}

/// Creates a row from values of any type that implements [`Cell`].
#[macro_export]
macro_rules! row {
    ($($value:expr),* $(,)?) => {
        vec![$($crate::system::Cell::cell($value)),*]
    };
}

//! SQL values of SQLite's five storage classes.

/// An owned value: a bound parameter, or a value kept beyond its row.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// A 64-bit integer.
    Integer(i64),
    /// A 64-bit float.
    Real(f64),
    /// UTF-8 text.
    Text(String),
    /// Bytes.
    Blob(Vec<u8>),
}

/// A value inside a row that SQLite has just produced; valid until the next row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueRef<'a> {
    /// SQL NULL.
    Null,
    /// A 64-bit integer.
    Integer(i64),
    /// A 64-bit float.
    Real(f64),
    /// Text. SQLite does not promise that it is valid UTF-8.
    Text(&'a [u8]),
    /// Bytes.
    Blob(&'a [u8]),
}

impl Value {
    /// Bytes of a text or blob; 0 for other values.
    pub fn bytes(&self) -> usize {
        match self {
            Value::Null | Value::Integer(_) | Value::Real(_) => 0,
            Value::Text(value) => value.len(),
            Value::Blob(value) => value.len(),
        }
    }

    /// The value, borrowed.
    pub fn as_ref(&self) -> ValueRef<'_> {
        match self {
            Value::Null => ValueRef::Null,
            Value::Integer(value) => ValueRef::Integer(*value),
            Value::Real(value) => ValueRef::Real(*value),
            Value::Text(value) => ValueRef::Text(value.as_bytes()),
            Value::Blob(value) => ValueRef::Blob(value),
        }
    }
}

impl ValueRef<'_> {
    /// Bytes of a text or blob; 0 for other values.
    pub fn bytes(&self) -> usize {
        match self {
            ValueRef::Null | ValueRef::Integer(_) | ValueRef::Real(_) => 0,
            ValueRef::Text(value) | ValueRef::Blob(value) => value.len(),
        }
    }

    /// A copy that outlives the row. Invalid UTF-8 is replaced.
    pub fn to_owned(self) -> Value {
        match self {
            ValueRef::Null => Value::Null,
            ValueRef::Integer(i) => Value::Integer(i),
            ValueRef::Real(r) => Value::Real(r),
            ValueRef::Text(t) => Value::Text(String::from_utf8_lossy(t).into_owned()),
            ValueRef::Blob(b) => Value::Blob(b.to_vec()),
        }
    }
}

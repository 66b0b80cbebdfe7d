//! PostgreSQL types of columns and parameters, and the conversion of values.
//!
//! SQLite gives each *value* a type (integer, real, text, blob). PostgreSQL clients expect a type
//! for each *column*. It is derived from the declared type of the column, which SQLite stores as
//! text and mostly ignores:
//!
//! ```text
//! CREATE TABLE t (price NUMERIC(10,2), ...)   SQLite stores 9.5 as a REAL
//!    described as: numeric, modifier (10,2)   sent as the text "9.5", or in the binary format
//! ```
//!
//! A column without a declared type (an expression) takes its type from the values of the first
//! row, which is available before anything is sent. If a client asks for a description before
//! execution, the caller infers the type from the text of the statement. `docs/sql.md` has the
//! complete table for users.
//!
//! SQLite has no arrays. They are stored as text in PostgreSQL's format, `{1,2}` ([`array`]).
//!
//! [`encode`] converts values to bytes, [`decode`] converts parameters to values.

mod array;
pub mod datetime;
pub mod decode;
pub mod encode;
pub(crate) mod number;
mod numeric;

use fulmar_sqlite::ValueRef;

/// A supported PostgreSQL type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// `boolean`.
    Bool,
    /// `bytea`.
    Bytea,
    /// `name`.
    Name,
    /// `bigint`.
    Int8,
    /// `smallint`.
    Int2,
    /// `integer`.
    Int4,
    /// `text`.
    Text,
    /// `oid`.
    Oid,
    /// `json`.
    Json,
    /// `real`.
    Float4,
    /// `double precision`.
    Float8,
    /// `unknown`: the type of a parameter is left to the server.
    Unknown,
    /// `char(n)`.
    Bpchar,
    /// `varchar(n)`.
    Varchar,
    /// `date`.
    Date,
    /// `time`.
    Time,
    /// `timestamp`.
    Timestamp,
    /// `timestamp with time zone`.
    Timestamptz,
    /// `numeric`.
    Numeric,
    /// `uuid`.
    Uuid,
    /// `jsonb`.
    Jsonb,
    /// An array of `boolean`.
    BoolArray,
    /// An array of `bytea`.
    ByteaArray,
    /// An array of `name`.
    NameArray,
    /// An array of `bigint`.
    Int8Array,
    /// An array of `smallint`.
    Int2Array,
    /// An array of `integer`.
    Int4Array,
    /// An array of `text`.
    TextArray,
    /// An array of `oid`.
    OidArray,
    /// An array of `json`.
    JsonArray,
    /// An array of `real`.
    Float4Array,
    /// An array of `double precision`.
    Float8Array,
    /// An array of `char(n)`.
    BpcharArray,
    /// An array of `varchar(n)`.
    VarcharArray,
    /// An array of `date`.
    DateArray,
    /// An array of `time`.
    TimeArray,
    /// An array of `timestamp`.
    TimestampArray,
    /// An array of `timestamp with time zone`.
    TimestamptzArray,
    /// An array of `numeric`.
    NumericArray,
    /// An array of `uuid`.
    UuidArray,
    /// An array of `jsonb`.
    JsonbArray,
}

/// Every type with its OID in `pg_type` and its size in bytes (-1: variable).
const TYPES: [(Type, u32, i16); 41] = [
    (Type::Bool, 16, 1),
    (Type::Bytea, 17, -1),
    (Type::Name, 19, 64),
    (Type::Int8, 20, 8),
    (Type::Int2, 21, 2),
    (Type::Int4, 23, 4),
    (Type::Text, 25, -1),
    (Type::Oid, 26, 4),
    (Type::Json, 114, -1),
    (Type::Float4, 700, 4),
    (Type::Float8, 701, 8),
    (Type::Unknown, 705, -2),
    (Type::Bpchar, 1042, -1),
    (Type::Varchar, 1043, -1),
    (Type::Date, 1082, 4),
    (Type::Time, 1083, 8),
    (Type::Timestamp, 1114, 8),
    (Type::Timestamptz, 1184, 8),
    (Type::Numeric, 1700, -1),
    (Type::Uuid, 2950, 16),
    (Type::Jsonb, 3802, -1),
    (Type::BoolArray, 1000, -1),
    (Type::ByteaArray, 1001, -1),
    (Type::NameArray, 1003, -1),
    (Type::Int8Array, 1016, -1),
    (Type::Int2Array, 1005, -1),
    (Type::Int4Array, 1007, -1),
    (Type::TextArray, 1009, -1),
    (Type::OidArray, 1028, -1),
    (Type::JsonArray, 199, -1),
    (Type::Float4Array, 1021, -1),
    (Type::Float8Array, 1022, -1),
    (Type::BpcharArray, 1014, -1),
    (Type::VarcharArray, 1015, -1),
    (Type::DateArray, 1182, -1),
    (Type::TimeArray, 1183, -1),
    (Type::TimestampArray, 1115, -1),
    (Type::TimestamptzArray, 1185, -1),
    (Type::NumericArray, 1231, -1),
    (Type::UuidArray, 2951, -1),
    (Type::JsonbArray, 3807, -1),
];

/// The array types with their element types, in the order of the enumeration and without gaps.
const ARRAYS: [(Type, Type); 20] = [
    (Type::BoolArray, Type::Bool),
    (Type::ByteaArray, Type::Bytea),
    (Type::NameArray, Type::Name),
    (Type::Int8Array, Type::Int8),
    (Type::Int2Array, Type::Int2),
    (Type::Int4Array, Type::Int4),
    (Type::TextArray, Type::Text),
    (Type::OidArray, Type::Oid),
    (Type::JsonArray, Type::Json),
    (Type::Float4Array, Type::Float4),
    (Type::Float8Array, Type::Float8),
    (Type::BpcharArray, Type::Bpchar),
    (Type::VarcharArray, Type::Varchar),
    (Type::DateArray, Type::Date),
    (Type::TimeArray, Type::Time),
    (Type::TimestampArray, Type::Timestamp),
    (Type::TimestamptzArray, Type::Timestamptz),
    (Type::NumericArray, Type::Numeric),
    (Type::UuidArray, Type::Uuid),
    (Type::JsonbArray, Type::Jsonb),
];

impl Type {
    /// Its OID in `pg_type`.
    pub fn oid(self) -> u32 {
        TYPES[self as usize].1
    }

    /// Its size in bytes in `pg_type`. Negative if variable.
    pub fn size(self) -> i16 {
        TYPES[self as usize].2
    }

    /// The type with this OID, if it is supported.
    pub fn from_oid(oid: u32) -> Option<Type> {
        TYPES.iter().find(|entry| entry.1 == oid).map(|entry| entry.0)
    }

    /// The element type, if this is an array type.
    pub fn element(self) -> Option<Type> {
        let index = (self as usize).checked_sub(ARRAYS[0].0 as usize)?;
        ARRAYS.get(index).map(|entry| entry.1)
    }

    /// The type of arrays of this type. `None` for array types and `unknown`.
    pub fn array(self) -> Option<Type> {
        ARRAYS.iter().find(|entry| entry.1 == self).map(|entry| entry.0)
    }

    /// Returns true if SQLite stores its values as text.
    pub fn is_text(self) -> bool {
        use Type::{Bool, Bytea, Float4, Float8, Int2, Int4, Int8, Numeric, Oid};
        !matches!(self, Bool | Bytea | Int2 | Int4 | Int8 | Oid | Float4 | Float8 | Numeric)
    }

    /// Returns true if its binary format is its text.
    pub fn is_textual(self) -> bool {
        use Type::{Bpchar, Json, Name, Text, Unknown, Varchar};
        matches!(self, Text | Varchar | Bpchar | Name | Unknown | Json)
    }

    /// Its name in PostgreSQL.
    pub fn name(self) -> &'static str {
        match self {
            Type::Bool => "boolean",
            Type::Bytea => "bytea",
            Type::Name => "name",
            Type::Int8 => "bigint",
            Type::Int2 => "smallint",
            Type::Int4 => "integer",
            Type::Text => "text",
            Type::Oid => "oid",
            Type::Json => "json",
            Type::Float4 => "real",
            Type::Float8 => "double precision",
            Type::Unknown => "unknown",
            Type::Bpchar => "character",
            Type::Varchar => "character varying",
            Type::Date => "date",
            Type::Time => "time without time zone",
            Type::Timestamp => "timestamp without time zone",
            Type::Timestamptz => "timestamp with time zone",
            Type::Numeric => "numeric",
            Type::Uuid => "uuid",
            Type::Jsonb => "jsonb",
            Type::BoolArray => "boolean[]",
            Type::ByteaArray => "bytea[]",
            Type::NameArray => "name[]",
            Type::Int8Array => "bigint[]",
            Type::Int2Array => "smallint[]",
            Type::Int4Array => "integer[]",
            Type::TextArray => "text[]",
            Type::OidArray => "oid[]",
            Type::JsonArray => "json[]",
            Type::Float4Array => "real[]",
            Type::Float8Array => "double precision[]",
            Type::BpcharArray => "character[]",
            Type::VarcharArray => "character varying[]",
            Type::DateArray => "date[]",
            Type::TimeArray => "time without time zone[]",
            Type::TimestampArray => "timestamp without time zone[]",
            Type::TimestamptzArray => "timestamp with time zone[]",
            Type::NumericArray => "numeric[]",
            Type::UuidArray => "uuid[]",
            Type::JsonbArray => "jsonb[]",
        }
    }

    /// The type for a value of a column without a type.
    pub fn of_value(value: ValueRef<'_>) -> Type {
        match value {
            ValueRef::Integer(_) => Type::Int8,
            ValueRef::Real(_) => Type::Float8,
            ValueRef::Blob(_) => Type::Bytea,
            ValueRef::Null | ValueRef::Text(_) => Type::Text,
        }
    }
}

/// The type of a column, derived from its declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclaredType {
    /// The type.
    pub kind: Type,
    /// `atttypmod`: length or precision as PostgreSQL encodes it, or -1.
    pub modifier: i32,
}

/// A column of a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// `None`: derived from the column's first value.
    pub kind: Option<Type>,
    /// PostgreSQL's type modifier; -1 for none.
    pub modifier: i32,
}

impl Column {
    /// A column of a result that the gateway produces itself.
    pub fn new(name: impl Into<String>, kind: Type) -> Column {
        Column { name: name.into(), kind: Some(kind), modifier: -1 }
    }
}

/// The supported type of that name. The suffix `[]` selects its array type.
pub fn type_by_name(name: &str) -> Option<Type> {
    match name.strip_suffix("[]") {
        Some(element) => by_name(element)?.array(),
        None => by_name(name),
    }
}

/// The type for a declaration such as `VARCHAR(20)`: by name, otherwise by SQLite's affinity rules.
/// `None` if the declaration is empty.
pub fn declared_type(declaration: &str) -> Option<DeclaredType> {
    let (name, arguments) = match declaration.split_once('(') {
        Some((name, rest)) => (name, rest.split(')').next().unwrap_or("")),
        None => (declaration, ""),
    };
    let name = name.trim();
    if name.is_empty() {
        return None;
    }
    if let Some(element) = declaration.trim_end().strip_suffix("[]") {
        // Multidimensional arrays are text. Only the last `[]` is removed, so the recursion is at
        // most one level deep.
        let nested = element.trim_end().ends_with("[]");
        let element = if nested { None } else { declared_type(element) };
        let kind = element.and_then(|element| element.kind.array()).unwrap_or(Type::Text);
        return Some(DeclaredType { kind, modifier: -1 });
    }
    let tail = declaration.rsplit_once(')').map_or("", |(_, tail)| tail.trim());
    let kind = if tail.eq_ignore_ascii_case("with time zone") && name.eq_ignore_ascii_case("timestamp") {
        Type::Timestamptz
    } else {
        by_name(name).unwrap_or_else(|| by_affinity(name))
    };
    Some(DeclaredType { kind, modifier: modifier(kind, arguments) })
}

fn by_name(name: &str) -> Option<Type> {
    const NAMES: [(&str, Type); 37] = [
        ("INTEGER", Type::Int8),
        ("INT", Type::Int8),
        ("BIGINT", Type::Int8),
        ("INT8", Type::Int8),
        ("INT4", Type::Int4),
        ("SMALLINT", Type::Int2),
        ("INT2", Type::Int2),
        ("REAL", Type::Float8),
        ("DOUBLE", Type::Float8),
        ("DOUBLE PRECISION", Type::Float8),
        ("FLOAT", Type::Float8),
        ("FLOAT8", Type::Float8),
        ("FLOAT4", Type::Float4),
        ("TEXT", Type::Text),
        ("VARCHAR", Type::Varchar),
        ("CHARACTER VARYING", Type::Varchar),
        ("CHAR", Type::Bpchar),
        ("CHARACTER", Type::Bpchar),
        ("NAME", Type::Name),
        ("OID", Type::Oid),
        ("BLOB", Type::Bytea),
        ("BYTEA", Type::Bytea),
        ("BOOLEAN", Type::Bool),
        ("BOOL", Type::Bool),
        ("DATE", Type::Date),
        ("TIME", Type::Time),
        ("TIME WITHOUT TIME ZONE", Type::Time),
        ("TIMESTAMP", Type::Timestamp),
        ("TIMESTAMP WITHOUT TIME ZONE", Type::Timestamp),
        ("DATETIME", Type::Timestamp),
        ("TIMESTAMPTZ", Type::Timestamptz),
        ("TIMESTAMP WITH TIME ZONE", Type::Timestamptz),
        ("NUMERIC", Type::Numeric),
        ("DECIMAL", Type::Numeric),
        ("UUID", Type::Uuid),
        ("JSON", Type::Json),
        ("JSONB", Type::Jsonb),
    ];
    NAMES.iter().find(|entry| entry.0.eq_ignore_ascii_case(name)).map(|entry| entry.1)
}

/// SQLite's rules in their order: https://sqlite.org/datatype3.html, section 3.1.
fn by_affinity(name: &str) -> Type {
    let name = name.to_ascii_uppercase();
    let has = |part: &str| name.contains(part);
    if has("INT") {
        Type::Int8
    } else if has("CHAR") || has("CLOB") || has("TEXT") {
        Type::Text
    } else if has("BLOB") {
        Type::Bytea
    } else if has("REAL") || has("FLOA") || has("DOUB") {
        Type::Float8
    } else {
        Type::Numeric
    }
}

fn modifier(kind: Type, arguments: &str) -> i32 {
    let mut numbers = arguments.split(',').map(|number| number.trim().parse::<i32>());
    let (Some(Ok(first)), second) = (numbers.next(), numbers.next()) else { return -1 };
    match kind {
        Type::Varchar | Type::Bpchar if (1..10_485_760).contains(&first) => first + 4,
        Type::Numeric if (1..=1000).contains(&first) => {
            let scale = second.and_then(Result::ok).unwrap_or(0).clamp(0, first);
            ((first << 16) | scale) + 4
        }
        _ => -1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_the_order_of_the_enumeration() {
        for (index, (kind, oid, _)) in TYPES.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
            assert_eq!(Type::from_oid(oid), Some(kind));
        }
        for (array, element) in ARRAYS {
            assert_eq!((array.element(), element.array()), (Some(element), Some(array)));
            assert_eq!(array.name().strip_suffix("[]"), Some(element.name()));
        }
        assert_eq!(Type::Jsonb.element(), None);
        assert_eq!(Type::from_oid(0), None);
    }

    #[test]
    fn derives_types_from_declarations() {
        let kind = |text| declared_type(text).map(|declared| declared.kind);
        assert_eq!(kind("integer"), Some(Type::Int8));
        assert_eq!(kind("int"), Some(Type::Int8));
        assert_eq!(kind("double precision"), Some(Type::Float8));
        assert_eq!(kind("Timestamp(3) with time zone"), Some(Type::Timestamptz));
        assert_eq!(kind("UNSIGNED BIG INT"), Some(Type::Int8));
        assert_eq!(kind("NATIVE CHARACTER(70)"), Some(Type::Text));
        assert_eq!(kind("MONEY"), Some(Type::Numeric));
        assert_eq!(kind(""), None);
        assert_eq!(kind("varchar(3)[]"), Some(Type::VarcharArray));
        assert_eq!(kind("INT[][]"), Some(Type::Text));
        assert_eq!(declared_type("char(84)"), Some(DeclaredType { kind: Type::Bpchar, modifier: 88 }));
        let money = DeclaredType { kind: Type::Numeric, modifier: ((10 << 16) | 2) + 4 };
        assert_eq!(declared_type("numeric(10, 2)"), Some(money));
        assert_eq!(declared_type("varchar(").map(|declared| declared.modifier), Some(-1));
    }
}

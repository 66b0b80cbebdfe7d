//! `pg_type`, `pg_collation` and `pg_am`, and the names of types.

use fulmar_pgwire::types::Type;
use fulmar_sqlite::{Value, ValueRef};

use super::asked::{CatalogRequest, Filled, Rows, table};
use crate::{Result, row};

pub(crate) const TABLES: &[Filled] = &[
    (
        table(
            "pg_type",
            &[
                ("oid", "OID"),
                ("typname", "NAME"),
                ("typnamespace", "OID"),
                ("typowner", "OID"),
                ("typlen", "INT2"),
                ("typbyval", "BOOLEAN"),
                ("typtype", "TEXT"),
                ("typcategory", "TEXT"),
                ("typispreferred", "BOOLEAN"),
                ("typisdefined", "BOOLEAN"),
                ("typdelim", "TEXT"),
                ("typrelid", "OID"),
                ("typsubscript", "TEXT"),
                ("typelem", "OID"),
                ("typarray", "OID"),
                ("typinput", "TEXT"),
                ("typoutput", "TEXT"),
                ("typreceive", "TEXT"),
                ("typsend", "TEXT"),
                ("typmodin", "TEXT"),
                ("typmodout", "TEXT"),
                ("typanalyze", "TEXT"),
                ("typalign", "TEXT"),
                ("typstorage", "TEXT"),
                ("typnotnull", "BOOLEAN"),
                ("typbasetype", "OID"),
                ("typtypmod", "INT4"),
                ("typndims", "INT4"),
                ("typcollation", "OID"),
                ("typdefaultbin", "TEXT"),
                ("typdefault", "TEXT"),
                ("typacl", "TEXT"),
            ],
        ),
        types,
    ),
    (
        table(
            "pg_collation",
            &[("oid", "OID"), ("collname", "NAME"), ("collnamespace", "OID"), ("collencoding", "INT4")],
        ),
        |_| Ok(vec![row![DEFAULT_COLLATION, "default", 11i64, -1i64], row![950i64, "C", 11i64, -1i64]]),
    ),
    (
        table("pg_am", &[("oid", "OID"), ("amname", "NAME"), ("amhandler", "TEXT"), ("amtype", "TEXT")]),
        |_| {
            Ok(vec![row![2i64, "heap", "heap_tableam_handler", "t"], row![403i64, "btree", "bthandler", "i"]])
        },
    ),
];

/// All types except arrays, with PostgreSQL's short name and category.
const TYPES: [(Type, &str, &str); 21] = [
    (Type::Bool, "bool", "B"),
    (Type::Bytea, "bytea", "U"),
    (Type::Name, "name", "S"),
    (Type::Int8, "int8", "N"),
    (Type::Int2, "int2", "N"),
    (Type::Int4, "int4", "N"),
    (Type::Text, "text", "S"),
    (Type::Oid, "oid", "N"),
    (Type::Json, "json", "U"),
    (Type::Float4, "float4", "N"),
    (Type::Float8, "float8", "N"),
    (Type::Unknown, "unknown", "X"),
    (Type::Bpchar, "bpchar", "S"),
    (Type::Varchar, "varchar", "S"),
    (Type::Date, "date", "D"),
    (Type::Time, "time", "D"),
    (Type::Timestamp, "timestamp", "D"),
    (Type::Timestamptz, "timestamptz", "D"),
    (Type::Numeric, "numeric", "N"),
    (Type::Uuid, "uuid", "U"),
    (Type::Jsonb, "jsonb", "U"),
];

/// The OID of the default collation.
pub(crate) const DEFAULT_COLLATION: i64 = 100;

fn types(_: CatalogRequest<'_>) -> Result<Rows> {
    let mut rows = Vec::new();
    for (kind, name, category) in TYPES {
        let array = kind.array().map_or(0, |array| i64::from(array.oid()));
        let element =
            TypeEntry { oid: kind.oid().into(), name: name.to_owned(), length: kind.size().into(), category };
        let oid = element.oid;
        rows.push(element.row(kind, 0, array));
        if array != 0 {
            let array = TypeEntry { oid: array, name: format!("_{name}"), length: -1, category: "A" };
            rows.push(array.row(kind, oid, 0));
        }
    }
    Ok(rows)
}

/// The columns of a `pg_type` row that differ between a type and its array type.
struct TypeEntry {
    oid: i64,
    name: String,
    length: i64,
    category: &'static str,
}

impl TypeEntry {
    fn row(self, kind: Type, element: i64, array: i64) -> Vec<Value> {
        let TypeEntry { oid, name, length, category } = self;
        let prefix = if element == 0 { name.as_str() } else { "array_" };
        let function = |suffix: &str| format!("{prefix}{suffix}");
        let (by_value, align) = match length {
            1 => (true, "c"),
            2 => (true, "s"),
            4 => (true, "i"),
            8 => (true, "d"),
            _ => (false, "i"),
        };
        let preferred =
            matches!(kind, Type::Text | Type::Float8 | Type::Bool | Type::Timestamptz) && element == 0;
        let collation = if is_text(kind) { DEFAULT_COLLATION } else { 0 };
        let (input, output) = (function("in"), function("out"));
        let (receive, send) = (function("recv"), function("send"));
        row![
            oid,
            name,
            11i64,
            10i64,
            length,
            by_value,
            "b",
            category,
            preferred,
            true,
            ",",
            0i64,
            if element == 0 { "-" } else { "array_subscript_handler" },
            element,
            array,
            input,
            output,
            receive,
            send,
            "-",
            "-",
            "-",
            align,
            if length < 0 { "x" } else { "p" },
            false,
            0i64,
            -1i64,
            0i64,
            collation,
            (),
            (),
            (),
        ]
    }
}

/// Returns true if values of the type are compared by a collation.
pub(crate) fn is_text(kind: Type) -> bool {
    matches!(kind, Type::Text | Type::Varchar | Type::Bpchar | Type::Name)
}

/// PostgreSQL's short name of a type.
pub(crate) fn short_name(kind: Type) -> String {
    let name = |kind| TYPES.iter().find(|entry| entry.0 == kind).map_or("text", |entry| entry.1);
    kind.element().map_or_else(|| name(kind).to_owned(), |element| format!("_{}", name(element)))
}

/// The result of `format_type`. `modifier` is `atttypmod`.
pub(crate) fn format_type(oid: i64, modifier: i64) -> String {
    let Some(kind) = u32::try_from(oid).ok().and_then(Type::from_oid) else {
        return match oid {
            0 => "-".to_owned(),
            18 => "\"char\"".to_owned(),
            2205 => "regclass".to_owned(),
            2278 => "void".to_owned(),
            _ => "???".to_owned(),
        };
    };
    match kind {
        Type::Varchar | Type::Bpchar if modifier >= 4 => format!("{}({})", kind.name(), modifier - 4),
        Type::Numeric if modifier >= 4 => {
            let packed = modifier - 4;
            format!("numeric({},{})", packed >> 16 & 0xffff, packed & 0xffff)
        }
        _ => kind.name().to_owned(),
    }
}

/// The OID of the type with this name, in any of its spellings.
pub(crate) fn type_oid(name: &str) -> Option<i64> {
    let name = name.trim().trim_start_matches("pg_catalog.").to_ascii_lowercase();
    let (element, is_array) = match name.strip_suffix("[]") {
        Some(element) => (element, true),
        None => (name.as_str(), false),
    };
    let base = element.split('(').next().unwrap_or(element).trim();
    let (base, is_array) = match base.strip_prefix('_') {
        Some(element) => (element, true),
        None => (base, is_array),
    };
    let (kind, ..) = TYPES.iter().find(|(kind, short, _)| *short == base || kind.name() == base)?;
    let kind = if is_array { kind.array()? } else { *kind };
    Some(kind.oid().into())
}

/// `pg_regtype`: converts an OID to a name, or a name to an OID.
pub(crate) fn regtype(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Integer(oid) => Value::Text(format_type(oid, -1)),
        ValueRef::Text(name) => {
            let name = String::from_utf8_lossy(name);
            let number = name.parse().ok().or_else(|| type_oid(&name));
            number.map_or(Value::Null, Value::Integer)
        }
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_names_convert_to_oids_and_back() {
        assert_eq!(format_type(1043, 44), "character varying(40)");
        assert_eq!(format_type(1700, ((10 << 16) | 2) + 4), "numeric(10,2)");
        assert_eq!(format_type(1007, -1), "integer[]");
        assert_eq!(format_type(99, -1), "???");
        for name in ["int4", "integer", "INTEGER", "pg_catalog.int4"] {
            assert_eq!(type_oid(name), Some(23), "{name}");
        }
        assert_eq!((type_oid("_int4"), type_oid("integer[]")), (Some(1007), Some(1007)));
        assert_eq!(type_oid("nothing"), None);
    }
}

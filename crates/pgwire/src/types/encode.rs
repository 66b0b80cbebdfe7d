//! Encodes values for DataRow messages.
//!
//! SQLite stores any value in any column. The text format can represent all of them. The binary
//! format depends on the type: a value is converted if the conversion is lossless (an integer in a
//! float column, digits in a text). Otherwise encoding fails with an error, instead of sending
//! bytes that the client would misread.

use bytes::BufMut;
use fulmar_sqlite::{Error, ValueRef, sqlstate};

use super::{Type, array, datetime, number, numeric};
use crate::Result;
use crate::protocol::Format;

/// Writes a value, preceded by its length.
pub fn put_value(out: &mut Vec<u8>, value: ValueRef<'_>, kind: Type, format: Format) -> Result<()> {
    if value == ValueRef::Null {
        out.put_i32(-1);
        return Ok(());
    }
    let at = out.len();
    out.put_u32(0);
    match format {
        Format::Text => put_text(out, value, kind),
        Format::Binary => {
            put_binary(out, value, kind).ok_or_else(|| conversion_error(value, kind))?;
        }
    }
    let length = u32::try_from(out.len() - at - 4)
        .map_err(|_| Error::new(sqlstate::PROGRAM_LIMIT, "value too long for a protocol message"))?;
    out[at..at + 4].copy_from_slice(&length.to_be_bytes());
    Ok(())
}

/// The error for a value that cannot be sent as the type of its column.
fn conversion_error(value: ValueRef<'_>, kind: Type) -> Error {
    let found = match value {
        ValueRef::Null => "NULL",
        ValueRef::Integer(_) => "an integer",
        ValueRef::Real(_) => "a real",
        ValueRef::Text(_) => "a text",
        ValueRef::Blob(_) => "a blob",
    };
    let message = format!("cannot send {found} in a column of type {}", kind.name());
    Error::new(sqlstate::DATATYPE_MISMATCH, message)
        .hint("SQLite stores any value in any column. Use CAST in the query, or the text format.")
}

pub(super) fn put_text(out: &mut Vec<u8>, value: ValueRef<'_>, kind: Type) {
    match (kind, value) {
        (_, ValueRef::Null) => {}
        (Type::Bool, ValueRef::Integer(value)) => out.put_u8(if value == 0 { b'f' } else { b't' }),
        (_, ValueRef::Integer(value)) => number::put_i64(out, value),
        (Type::Float4, ValueRef::Real(value)) => number::put_f32(out, value as f32),
        (Type::Numeric, ValueRef::Real(value)) if value.is_finite() => put_without_exponent(out, value),
        (Type::Text | Type::Varchar | Type::Bpchar | Type::Name | Type::Unknown, ValueRef::Real(value)) => {
            number::put_real(out, value);
        }
        (_, ValueRef::Real(value)) => number::put_f64(out, value),
        (Type::Bytea, ValueRef::Text(bytes) | ValueRef::Blob(bytes)) => put_hex(out, bytes),
        (Type::BoolArray, ValueRef::Text(text)) => put_booleans(out, &String::from_utf8_lossy(text)),
        (Type::Timestamptz, ValueRef::Text(text)) => match datetime::parse_timestamp(text) {
            Some(timestamp_us) if datetime::put_timestamp(out, timestamp_us) => out.put_slice(b"+00"),
            _ => put_utf8(out, text),
        },
        (_, ValueRef::Text(text)) => put_utf8(out, text),
        (_, ValueRef::Blob(bytes)) if std::str::from_utf8(bytes).is_ok() => out.put_slice(bytes),
        (_, ValueRef::Blob(bytes)) => put_hex(out, bytes),
    }
}

/// Writes an array of booleans, which SQLite stores as numbers.
fn put_booleans(out: &mut Vec<u8>, array: &str) {
    let letters = fulmar_sqlite::array::read(array).map(|element| match element.as_deref() {
        Some("1" | "t" | "true") => Some("t"),
        Some(_) => Some("f"),
        None => None,
    });
    put_utf8(out, fulmar_sqlite::array::write(letters, false).as_bytes());
}

/// Writes the binary format. Returns `None` if the value cannot be converted to the type.
fn put_binary(out: &mut Vec<u8>, value: ValueRef<'_>, kind: Type) -> Option<()> {
    match kind {
        Type::Bool => out.put_u8((integer(value)? != 0).into()),
        Type::Int2 => out.put_i16(integer(value)?.try_into().ok()?),
        Type::Int4 => out.put_i32(integer(value)?.try_into().ok()?),
        Type::Int8 => out.put_i64(integer(value)?),
        Type::Oid => out.put_u32(integer(value)?.try_into().ok()?),
        Type::Float4 => out.put_f32(float(value)? as f32),
        Type::Float8 => out.put_f64(float(value)?),
        Type::Text | Type::Varchar | Type::Bpchar | Type::Name | Type::Unknown | Type::Json => {
            put_text(out, value, kind);
        }
        Type::Jsonb => {
            out.put_u8(1); // format version
            put_text(out, value, kind);
        }
        Type::Bytea => out.put_slice(bytes(value)?),
        Type::Date => out.put_i32(datetime::parse_date(text(value)?)?.try_into().ok()?),
        Type::Time => out.put_i64(datetime::parse_time(text(value)?)?),
        Type::Timestamp | Type::Timestamptz => out.put_i64(datetime::parse_timestamp(text(value)?)?),
        Type::Numeric => put_numeric(out, value)?,
        Type::Uuid => put_uuid(out, value)?,
        array => array::put_binary(out, std::str::from_utf8(text(value)?).ok()?, array.element()?)?,
    }
    Some(())
}

fn integer(value: ValueRef<'_>) -> Option<i64> {
    /// Floats from -2^63 to below 2^63 fit an i64.
    const RANGE: std::ops::Range<f64> = -9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0;
    match value {
        ValueRef::Integer(value) => Some(value),
        ValueRef::Real(value) if value.fract() == 0.0 && RANGE.contains(&value) => Some(value as i64),
        ValueRef::Text(text) => std::str::from_utf8(text).ok()?.trim().parse().ok(),
        _ => None,
    }
}

fn float(value: ValueRef<'_>) -> Option<f64> {
    match value {
        ValueRef::Integer(value) => Some(value as f64),
        ValueRef::Real(value) => Some(value),
        ValueRef::Text(text) => std::str::from_utf8(text).ok()?.trim().parse().ok(),
        _ => None,
    }
}

fn text(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(text) => Some(text),
        _ => None,
    }
}

fn bytes(value: ValueRef<'_>) -> Option<&[u8]> {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => Some(bytes),
        _ => None,
    }
}

fn put_numeric(out: &mut Vec<u8>, value: ValueRef<'_>) -> Option<()> {
    let mut text = Vec::new();
    match value {
        ValueRef::Integer(value) => number::put_i64(&mut text, value),
        ValueRef::Real(value) => number::put_f64(&mut text, value),
        ValueRef::Text(value) => text.put_slice(value.trim_ascii()),
        _ => return None,
    }
    numeric::put(out, std::str::from_utf8(&text).ok()?).then_some(())
}

fn put_uuid(out: &mut Vec<u8>, value: ValueRef<'_>) -> Option<()> {
    match value {
        ValueRef::Blob(bytes) if bytes.len() == 16 => out.put_slice(bytes),
        ValueRef::Text(text) => out.put_slice(&super::decode::uuid(text)?),
        _ => return None,
    }
    Some(())
}

/// Writes text as UTF-8. SQLite does not guarantee valid UTF-8; invalid bytes are replaced.
fn put_utf8(out: &mut Vec<u8>, text: &[u8]) {
    match std::str::from_utf8(text) {
        Ok(_) => out.put_slice(text),
        Err(_) => out.put_slice(String::from_utf8_lossy(text).as_bytes()),
    }
}

fn put_hex(out: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.reserve(2 + bytes.len() * 2);
    out.put_slice(b"\\x");
    for byte in bytes {
        out.put_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
}

/// Writes a number without an exponent, as PostgreSQL writes `numeric`.
fn put_without_exponent(out: &mut Vec<u8>, value: f64) {
    use std::io::Write;
    let _ = write!(out, "{value}"); // writing to memory cannot fail
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(value: ValueRef<'_>, kind: Type, format: Format) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        put_value(&mut out, value, kind, format)?;
        Ok(out[4..].to_vec())
    }

    fn as_text(value: ValueRef<'_>, kind: Type) -> String {
        String::from_utf8(sent(value, kind, Format::Text).unwrap()).unwrap()
    }

    #[test]
    fn text_format_accepts_any_value() {
        assert_eq!(as_text(ValueRef::Integer(1), Type::Bool), "t");
        assert_eq!(as_text(ValueRef::Text(b"many"), Type::Int8), "many");
        assert_eq!(as_text(ValueRef::Real(2.0), Type::Float8), "2");
        assert_eq!(as_text(ValueRef::Real(2.0), Type::Text), "2.0");
        assert_eq!(as_text(ValueRef::Real(1e20), Type::Numeric), "100000000000000000000");
        assert_eq!(as_text(ValueRef::Blob(&[0, 255]), Type::Bytea), "\\x00ff");
        assert_eq!(as_text(ValueRef::Blob(&[0xff]), Type::Text), "\\xff");
        assert_eq!(
            as_text(ValueRef::Text(b"2026-11-20 10:00:00"), Type::Timestamptz),
            "2026-11-20 10:00:00+00"
        );
        assert_eq!(as_text(ValueRef::Text(&[b'a', 0xff]), Type::Text), "a\u{fffd}");
    }

    #[test]
    fn binary_format_converts_or_fails() {
        let binary = |value, kind| sent(value, kind, Format::Binary);
        assert_eq!(binary(ValueRef::Real(7.0), Type::Int2).unwrap(), [0, 7]);
        assert_eq!(binary(ValueRef::Text(b"7"), Type::Int4).unwrap(), [0, 0, 0, 7]);
        assert_eq!(binary(ValueRef::Integer(2), Type::Float8).unwrap(), 2f64.to_be_bytes());
        assert_eq!(binary(ValueRef::Integer(7), Type::Text).unwrap(), b"7");
        assert_eq!(binary(ValueRef::Text(b"{}"), Type::Jsonb).unwrap(), b"\x01{}");
        assert_eq!(binary(ValueRef::Text(b"2000-01-02"), Type::Date).unwrap(), [0, 0, 0, 1]);
        let rejected = [
            (ValueRef::Integer(40_000), Type::Int2),
            (ValueRef::Real(1.5), Type::Int8),
            (ValueRef::Real(9.3e18), Type::Int8),
            (ValueRef::Text(b"many"), Type::Int8),
            (ValueRef::Integer(5), Type::Timestamp),
            (ValueRef::Text(b"yes"), Type::Uuid),
            (ValueRef::Text(b"1.x"), Type::Numeric),
        ];
        for (value, kind) in rejected {
            assert_eq!(
                binary(value, kind).unwrap_err().state(),
                sqlstate::DATATYPE_MISMATCH,
                "{value:?} {kind:?}"
            );
        }
    }

    #[test]
    fn null_has_length_minus_one() {
        let mut out = Vec::new();
        put_value(&mut out, ValueRef::Null, Type::Int8, Format::Binary).unwrap();
        assert_eq!(&out[..], [255; 4]);
    }
}

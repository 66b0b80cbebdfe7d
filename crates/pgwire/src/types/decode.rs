//! Decodes parameters into values.
//!
//! A parameter is sent as text or in the binary format of its type. It becomes the value that
//! SQLite would have stored: booleans are 0 and 1, dates and times are canonical text (which sorts
//! correctly), and numerics are numbers if that is exact.

use fulmar_sqlite::{Error, Value, sqlstate};

use super::{Type, array, datetime, numeric};
use crate::Result;
use crate::protocol::Format;

/// Decodes a parameter that is not NULL.
pub fn value(bytes: &[u8], kind: Type, format: Format) -> Result<Value> {
    if format == Format::Binary && !kind.is_textual() {
        let is_too_large = || kind.element().is_some() && array::is_too_large(bytes);
        return from_binary(bytes, kind)
            .ok_or_else(|| if is_too_large() { too_many_elements() } else { bad_binary(kind) });
    }
    let text = utf8(bytes)?;
    if kind.element().is_some_and(Type::is_text) && is_array(text) {
        return text_array(text);
    }
    from_text(text, kind).ok_or_else(|| bad_text(text, kind))
}

/// Decodes a client's text. Invalid UTF-8 is rejected with PostgreSQL's error.
pub fn utf8(bytes: &[u8]) -> Result<&str> {
    const CHARACTER_NOT_IN_REPERTOIRE: &str = "22021";
    std::str::from_utf8(bytes).map_err(|cause| {
        let message = format!("invalid byte sequence for encoding \"UTF8\" at byte {}", cause.valid_up_to());
        Error::new(CHARACTER_NOT_IN_REPERTOIRE, message)
    })
}

fn bad_text(text: &str, kind: Type) -> Error {
    let state = match kind {
        Type::Date | Type::Time | Type::Timestamp | Type::Timestamptz => sqlstate::INVALID_DATETIME,
        Type::Int2 | Type::Int4 | Type::Int8 | Type::Oid if is_integer(text) => {
            sqlstate::NUMERIC_OUT_OF_RANGE
        }
        _ => sqlstate::INVALID_TEXT,
    };
    let excerpt: String = text.chars().take(100).collect();
    let message = match state {
        sqlstate::NUMERIC_OUT_OF_RANGE => {
            format!("value \"{excerpt}\" is out of range for type {}", kind.name())
        }
        _ => format!("invalid input syntax for type {}: \"{excerpt}\"", kind.name()),
    };
    Error::new(state, message)
}

fn is_integer(text: &str) -> bool {
    let digits = text.trim().trim_start_matches(['-', '+']);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

fn bad_binary(kind: Type) -> Error {
    Error::new(
        sqlstate::INVALID_BINARY,
        format!("incorrect binary data for a parameter of type {}", kind.name()),
    )
}

fn is_array(text: &str) -> bool {
    text.trim_start().starts_with('{') && text.trim_end().ends_with('}')
}

/// Quotes the elements, since texts may look like numbers.
fn text_array(text: &str) -> Result<Value> {
    let mut elements = fulmar_sqlite::array::read(text);
    let quoted = fulmar_sqlite::array::write(elements.by_ref().take(array::MAX_ELEMENTS), true);
    match elements.next() {
        None => Ok(Value::Text(quoted)),
        Some(_) => Err(too_many_elements()),
    }
}

fn too_many_elements() -> Error {
    let message = format!("array parameter exceeds {} elements", array::MAX_ELEMENTS);
    Error::new(sqlstate::PROGRAM_LIMIT, message)
        .hint("Use several statements, or copy the elements into a table.")
}

fn from_text(text: &str, kind: Type) -> Option<Value> {
    if kind.element().is_some() {
        return is_array(text).then(|| Value::Text(text.trim().to_owned()));
    }
    Some(match kind {
        Type::Text | Type::Varchar | Type::Bpchar | Type::Name | Type::Unknown | Type::Json | Type::Jsonb => {
            Value::Text(text.to_owned())
        }
        Type::Int2 => Value::Integer(text.trim().parse::<i16>().ok()?.into()),
        Type::Int4 => Value::Integer(text.trim().parse::<i32>().ok()?.into()),
        Type::Int8 => Value::Integer(text.trim().parse().ok()?),
        Type::Oid => Value::Integer(text.trim().parse::<u32>().ok()?.into()),
        Type::Float4 | Type::Float8 => Value::Real(float(text.trim())?),
        Type::Bool => Value::Integer(boolean(text)?.into()),
        Type::Bytea => Value::Blob(bytea(text)?),
        Type::Numeric => number(text.trim())?,
        Type::Uuid => Value::Text(uuid_text(&uuid(text.as_bytes())?)),
        // As in PostgreSQL, a timestamp is accepted, and its time is dropped.
        Type::Date => {
            let day = datetime::parse_date(text.trim().as_bytes());
            let timestamp = || datetime::parse_timestamp(text.trim().as_bytes());
            date(day.or_else(|| Some(timestamp()?.div_euclid(86_400_000_000)))?)?
        }
        Type::Time => time(datetime::parse_time(text.trim().as_bytes())?)?,
        Type::Timestamp | Type::Timestamptz => timestamp(datetime::parse_timestamp(text.trim().as_bytes())?)?,
        _ => return None,
    })
}

fn from_binary(bytes: &[u8], kind: Type) -> Option<Value> {
    fn fixed<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
        bytes.try_into().ok()
    }
    Some(match kind {
        Type::Bool => Value::Integer((fixed::<1>(bytes)? != [0]).into()),
        Type::Int2 => Value::Integer(i16::from_be_bytes(fixed(bytes)?).into()),
        Type::Int4 => Value::Integer(i32::from_be_bytes(fixed(bytes)?).into()),
        Type::Int8 => Value::Integer(i64::from_be_bytes(fixed(bytes)?)),
        Type::Oid => Value::Integer(u32::from_be_bytes(fixed(bytes)?).into()),
        Type::Float4 => Value::Real(f32::from_be_bytes(fixed(bytes)?).into()),
        Type::Float8 => Value::Real(f64::from_be_bytes(fixed(bytes)?)),
        Type::Text | Type::Varchar | Type::Bpchar | Type::Name | Type::Unknown | Type::Json => return None,
        Type::Jsonb => Value::Text(std::str::from_utf8(bytes.strip_prefix(&[1])?).ok()?.to_owned()),
        Type::Bytea => Value::Blob(bytes.to_vec()),
        Type::Date => date(i32::from_be_bytes(fixed(bytes)?).into())?,
        Type::Time => time(i64::from_be_bytes(fixed(bytes)?))?,
        Type::Timestamp | Type::Timestamptz => timestamp(i64::from_be_bytes(fixed(bytes)?))?,
        Type::Numeric => number(&numeric::to_text(bytes)?)?,
        Type::Uuid => Value::Text(uuid_text(&fixed(bytes)?)),
        array => Value::Text(array::from_binary(bytes, array.element()?)?),
    })
}

fn date(days: i64) -> Option<Value> {
    written(|out| datetime::put_date(out, days))
}

fn time(time_us: i64) -> Option<Value> {
    written(|out| datetime::put_time(out, time_us))
}

fn timestamp(timestamp_us: i64) -> Option<Value> {
    written(|out| datetime::put_timestamp(out, timestamp_us))
}

fn written(write: impl FnOnce(&mut Vec<u8>) -> bool) -> Option<Value> {
    let mut out = Vec::new();
    if !write(&mut out) {
        return None;
    }
    String::from_utf8(out).ok().map(Value::Text)
}

/// Rust accepts many spellings of `inf` and `NaN`, including PostgreSQL's.
fn float(text: &str) -> Option<f64> {
    text.parse().ok()
}

fn boolean(text: &str) -> Option<bool> {
    let text = text.trim();
    let any = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    if any(&["t", "true", "y", "yes", "on", "1"]) {
        Some(true)
    } else if any(&["f", "false", "n", "no", "off", "0"]) {
        Some(false)
    } else {
        None
    }
}

/// An integer if possible, a real if it represents all digits, otherwise the text, to which SQLite
/// applies the column's affinity.
fn number(text: &str) -> Option<Value> {
    if let Ok(integer) = text.parse() {
        return Some(Value::Integer(integer));
    }
    if !numeric::is_valid(text) {
        return None;
    }
    let mantissa = text.split(['e', 'E']).next().unwrap_or(text);
    let digits = mantissa.bytes().filter(u8::is_ascii_digit).count();
    match text.parse::<f64>() {
        Ok(real) if real.is_finite() && digits <= 15 => Some(Value::Real(real)),
        _ => Some(Value::Text(text.to_owned())),
    }
}

/// Decodes `\x` and hexadecimal digits, or the older escape format (a backslash and three octal
/// digits).
fn bytea(text: &str) -> Option<Vec<u8>> {
    let Some(hex) = text.strip_prefix("\\x") else { return escaped(text.as_bytes()) };
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let pairs = digits.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs.map(|pair| Some((hex_digit(pair[0])? << 4) | hex_digit(pair[1])?)).collect()
}

fn escaped(mut text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    while let Some((&byte, rest)) = text.split_first() {
        text = rest;
        match (byte, rest) {
            (b'\\', [b'\\', rest @ ..]) => {
                bytes.push(b'\\');
                text = rest;
            }
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                text = rest;
            }
            (b'\\', _) => return None,
            _ => bytes.push(byte),
        }
    }
    Some(bytes)
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

/// Parses a UUID: 32 hexadecimal digits, with hyphens and braces in any position.
pub fn uuid(text: &[u8]) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    let mut count = 0;
    for &byte in text.trim_ascii().iter().filter(|byte| !matches!(byte, b'-' | b'{' | b'}')) {
        let digit = hex_digit(byte)?;
        *uuid.get_mut(count / 2)? |= if count % 2 == 0 { digit << 4 } else { digit };
        count += 1;
    }
    (count == 32).then_some(uuid)
}

/// A UUID in canonical form: lower case, with hyphens after 8, 12, 16 and 20 digits.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use fulmar_sqlite::ValueRef;
    use proptest::prelude::*;

    use super::*;
    use crate::types::encode;

    fn text(input: &str, kind: Type) -> Result<Value> {
        value(input.as_bytes(), kind, Format::Text)
    }

    fn borrowed(value: &Value) -> ValueRef<'_> {
        match value {
            Value::Integer(value) => ValueRef::Integer(*value),
            Value::Real(value) => ValueRef::Real(*value),
            Value::Text(value) => ValueRef::Text(value.as_bytes()),
            Value::Blob(value) => ValueRef::Blob(value),
            Value::Null => ValueRef::Null,
        }
    }

    #[test]
    fn arrays_with_too_many_elements_are_rejected_and_not_cut() {
        let array = |count: usize| format!("{{1{}}}", ",1".repeat(count - 1));
        let decoded = text(&array(array::MAX_ELEMENTS), Type::TextArray).unwrap();
        let Value::Text(decoded) = decoded else { panic!("{decoded:?}") };
        assert_eq!(decoded.matches("\"1\"").count(), array::MAX_ELEMENTS);
        let binary = |count: u32| {
            let header = [1, 1, Type::Int8.oid(), count, 1].map(u32::to_be_bytes).concat();
            [header, vec![0xff; 4 * count as usize]].concat()
        };
        let limit = array::MAX_ELEMENTS as u32;
        value(&binary(limit), Type::Int8Array, Format::Binary).unwrap();
        for error in [
            text(&array(array::MAX_ELEMENTS + 1), Type::TextArray).unwrap_err(),
            value(&binary(limit + 1), Type::Int8Array, Format::Binary).unwrap_err(),
        ] {
            assert_eq!(error.state(), sqlstate::PROGRAM_LIMIT, "{error}");
        }
    }

    #[test]
    fn text_parameters_become_stored_values() {
        assert_eq!(text(" 7 ", Type::Int8).unwrap(), Value::Integer(7));
        assert_eq!(text("True", Type::Bool).unwrap(), Value::Integer(1));
        assert_eq!(text("1.50", Type::Numeric).unwrap(), Value::Real(1.5));
        assert_eq!(text("12", Type::Numeric).unwrap(), Value::Integer(12));
        let long = "0.1234567890123456789";
        assert_eq!(text(long, Type::Numeric).unwrap(), Value::Text(long.into()));
        assert_eq!(text("\\x00ff", Type::Bytea).unwrap(), Value::Blob(vec![0, 255]));
        assert_eq!(text("a\\\\\\001", Type::Bytea).unwrap(), Value::Blob(vec![b'a', b'\\', 1]));
        let instant = text("2026-11-20T12:00:00+02:00", Type::Timestamptz).unwrap();
        assert_eq!(instant, Value::Text("2026-11-20 10:00:00".into()));
        let uuid = text("A0EEBC99-9C0B4EF8-BB6D6BB9BD380A11", Type::Uuid).unwrap();
        assert_eq!(uuid, Value::Text("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11".into()));
    }

    #[test]
    fn errors_have_the_sqlstates_of_postgres() {
        let state = |input, kind| text(input, kind).unwrap_err().state();
        assert_eq!(state("x", Type::Int8), sqlstate::INVALID_TEXT);
        assert_eq!(state("40000", Type::Int2), sqlstate::NUMERIC_OUT_OF_RANGE);
        assert_eq!(state("2026-02-30", Type::Date), sqlstate::INVALID_DATETIME);
        assert_eq!(state("\\xf", Type::Bytea), sqlstate::INVALID_TEXT);
        assert_eq!(value(&[1], Type::Int4, Format::Binary).unwrap_err().state(), sqlstate::INVALID_BINARY);
        assert_eq!(value(&[0xff], Type::Text, Format::Text).unwrap_err().state(), "22021");
        assert_eq!(value(&[0xff], Type::Text, Format::Binary).unwrap_err().state(), "22021");
    }

    /// The binary format of every type, decoded as a parameter and encoded again, yields the same
    /// bytes.
    #[test]
    fn binary_format_round_trips() {
        let timestamp = 845_000_000_123_456i64.to_be_bytes();
        let cases: [(Type, &[u8]); 15] = [
            (Type::Bool, &[1]),
            (Type::Int2, &[255, 254]),
            (Type::Int4, &[1, 2, 3, 4]),
            (Type::Int8, &[1, 2, 3, 4, 5, 6, 7, 8]),
            (Type::Oid, &[255, 2, 3, 4]),
            (Type::Float4, &[0x40, 0x49, 0x0f, 0xdb]),
            (Type::Float8, &[0x40, 0x09, 0x21, 0xfb, 0x54, 0x44, 0x2d, 0x18]),
            (Type::Varchar, b"text"),
            (Type::Jsonb, b"\x01{\"a\": 1}"),
            (Type::Bytea, &[0, 255]),
            (Type::Date, &[0, 0, 0x20, 1]),
            (Type::Timestamp, &timestamp),
            (Type::Timestamptz, &timestamp),
            (Type::Numeric, &[0, 2, 0, 0, 0, 0, 0, 2, 0, 7, 0x13, 0x88]),
            (Type::Uuid, &[9; 16]),
        ];
        for (kind, bytes) in cases {
            let stored = value(bytes, kind, Format::Binary).unwrap();
            let mut out = Vec::new();
            encode::put_value(&mut out, borrowed(&stored), kind, Format::Binary).unwrap();
            if kind == Type::Numeric {
                // 7.50 is stored as the real 7.5, which is equal but has one decimal place.
                assert_eq!(numeric::to_text(&out[4..]).unwrap(), "7.5");
            } else {
                assert_eq!(&out[4..], bytes, "{kind:?} {stored:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_rejected_or_read_back(
            bytes in prop_oneof![
                "[-+0-9a-f:. {},\\\\xtrueNaInfiy]{0,40}".prop_map(String::into_bytes),
                proptest::collection::vec(any::<u8>(), 0..40),
            ],
            index in 0..crate::types::TYPES.len(),
        ) {
            let kind = crate::types::TYPES[index].0;
            for format in [Format::Text, Format::Binary] {
                let Ok(decoded) = value(&bytes, kind, format) else { continue };
                let mut out = Vec::new();
                encode::put_value(&mut out, borrowed(&decoded), kind, format).unwrap();
                // Encoding does not parse the elements of an array in text format.
                let is_read = format == Format::Binary || kind.element().is_none();
                if decoded != Value::Null && is_read {
                    prop_assert_eq!(value(&out[4..], kind, format).unwrap(), decoded, "{:?} {:?}", kind, format);
                }
            }
        }
    }
}

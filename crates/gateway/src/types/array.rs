//! Arrays of one dimension, in Postgres's text: `{a,"b c",NULL}`; and its binary form.
//!
//! ```text
//! binary: dimensions u32 (0 or 1), has NULLs u32, type of the elements u32; length u32, first index u32; then for
//!         each element its length i32 (-1: NULL) and its bytes
//! ```
//!
//! What Postgres keeps as a vector (`1 2 3`, the columns of an index) can be read as an array too.

use bytes::{Buf, BufMut};
use fulmar_engine::{Value, ValueRef};

use super::{Type, decode, encode};
use crate::protocol::Format;

/// An element; `None` is NULL.
pub(crate) type Element = Option<String>;

/// The array of these elements.
pub(crate) fn write<'a>(elements: impl Iterator<Item = Option<&'a str>>) -> String {
    let written: Vec<String> = elements
        .map(|element| match element {
            None => "NULL".to_owned(),
            Some(text) => {
                let special = |byte: u8| b"{}\",\\".contains(&byte) || byte.is_ascii_whitespace();
                let quoted =
                    text.is_empty() || text.eq_ignore_ascii_case("null") || text.bytes().any(special);
                if quoted {
                    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
                } else {
                    text.into()
                }
            }
        })
        .collect();
    format!("{{{}}}", written.join(","))
}

/// The elements of an array of one dimension, or of a vector.
pub(crate) fn read(text: &str) -> Vec<Element> {
    let text = text.trim();
    let Some(inner) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) else {
        return text.split_ascii_whitespace().map(|element| Some(element.to_owned())).collect();
    };
    let mut elements = Vec::new();
    let (mut element, mut quoted, mut inside) = (String::new(), false, false);
    let mut characters = inner.chars();
    let mut end = |element: &mut String, quoted: &mut bool| {
        let text = std::mem::take(element);
        let was_quoted = std::mem::take(quoted);
        elements.push((was_quoted || !text.eq_ignore_ascii_case("null")).then_some(text));
    };
    while let Some(character) = characters.next() {
        match character {
            '\\' => element.extend(characters.next()),
            '"' => (inside, quoted) = (!inside, true),
            ',' if !inside => end(&mut element, &mut quoted),
            other => element.push(other),
        }
    }
    if !inner.is_empty() {
        end(&mut element, &mut quoted);
    }
    elements
}

/// The text of an array that came in binary; `None` if the bytes are no array of one dimension of that type.
pub(crate) fn from_binary(mut bytes: &[u8], element: Type) -> Option<String> {
    let next = |bytes: &mut &[u8]| bytes.try_get_u32().ok();
    let dimensions = next(&mut bytes)?;
    let (_has_null, oid) = (next(&mut bytes)?, next(&mut bytes)?);
    if oid != element.oid() || dimensions > 1 {
        return None;
    }
    let count = if dimensions == 0 { 0 } else { next(&mut bytes)? };
    if dimensions == 1 {
        next(&mut bytes)?;
    }
    let mut elements: Vec<Element> = Vec::new();
    for _ in 0..count {
        let length = bytes.try_get_i32().ok()?;
        if length == -1 {
            elements.push(None);
            continue;
        }
        let (value, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
        bytes = rest;
        elements.push(Some(text(&decode::value(value, element, Format::Binary).ok()?, element)?));
    }
    bytes.is_empty().then(|| write(elements.iter().map(Option::as_deref)))
}

/// Writes the binary form of an array that is there as text; `None` if an element is not of that type.
pub(crate) fn put_binary(out: &mut Vec<u8>, array: &str, element: Type) -> Option<()> {
    let elements = read(array);
    out.put_u32(u32::from(!elements.is_empty()));
    out.put_u32(u32::from(elements.contains(&None)));
    out.put_u32(element.oid());
    if elements.is_empty() {
        return Some(());
    }
    out.put_u32(elements.len().try_into().ok()?);
    out.put_u32(1);
    for value in elements {
        let Some(text) = value else {
            out.put_i32(-1);
            continue;
        };
        let value = decode::value(text.as_bytes(), element, Format::Text).ok()?;
        encode::put_value(out, value.as_ref(), element, Format::Binary).ok()?;
    }
    Some(())
}

/// A value as it stands in an array.
fn text(value: &Value, kind: Type) -> Option<String> {
    let mut out = Vec::new();
    encode::put_text(&mut out, value.as_ref(), kind);
    debug_assert!(value.as_ref() != ValueRef::Null);
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn arrays_are_written_and_read() {
        let elements = [Some("a"), Some("b c"), None, Some(""), Some("null"), Some("q\"\\")];
        let text = write(elements.into_iter());
        assert_eq!(text, r#"{a,"b c",NULL,"","null","q\"\\"}"#);
        let owned: Vec<Element> = elements.iter().map(|element| element.map(str::to_owned)).collect();
        assert_eq!(read(&text), owned);
        assert_eq!(read("{}"), []);
        assert_eq!(read("1 2"), [Some("1".to_owned()), Some("2".to_owned())]);
    }

    #[test]
    fn the_binary_form() {
        for (array, element) in [
            ("{1,NULL,-3}", Type::Int4),
            ("{}", Type::Int8),
            (r#"{a,"b c"}"#, Type::Text),
            ("{t,f}", Type::Bool),
            ("{2026-11-20}", Type::Date),
        ] {
            let mut bytes = Vec::new();
            put_binary(&mut bytes, array, element).unwrap();
            assert_eq!(from_binary(&bytes, element).as_deref(), Some(array));
            assert_eq!(from_binary(&bytes, Type::Uuid), None);
        }
        assert_eq!(put_binary(&mut Vec::new(), "{x}", Type::Int4), None);
    }

    proptest! {
        #[test]
        fn survives_anything(bytes in proptest::collection::vec(any::<u8>(), 0..60), text in "[{},\"\\\\a ]{0,20}") {
            from_binary(&bytes, Type::Int4);
            read(&text);
        }
    }
}

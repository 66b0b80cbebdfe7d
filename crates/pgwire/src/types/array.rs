//! Converts one-dimensional arrays between PostgreSQL's binary format and its text format
//! ([`fulmar_sqlite::array`]).
//!
//! ```text
//! binary: dimensions u32 (0 or 1), has NULLs u32, element type u32; length u32, first index u32;
//!         then for each element its length i32 (-1: NULL) and its bytes
//! ```

use bytes::{Buf, BufMut};
use fulmar_sqlite::array::{read, write};
use fulmar_sqlite::{Value, ValueRef};

use super::{Type, decode, encode};
use crate::protocol::Format;

/// Maximum number of elements of a parameter whose elements are decoded. A worker decodes a
/// parameter at once, while its other sessions wait.
pub const MAX_ELEMENTS: usize = 1_000_000;

/// Whether an array in binary format has more than [`MAX_ELEMENTS`].
pub fn is_too_large(bytes: &[u8]) -> bool {
    let count = bytes.get(12..).and_then(|mut bytes| bytes.try_get_u32().ok());
    count.is_some_and(|count| count as usize > MAX_ELEMENTS)
}

/// The text of an array in binary format. `None` if the bytes are not a one-dimensional array of
/// that element type, or [`is_too_large`].
pub fn from_binary(mut bytes: &[u8], element: Type) -> Option<String> {
    let is_large = is_too_large(bytes);
    let next = |bytes: &mut &[u8]| bytes.try_get_u32().ok();
    let dimensions = next(&mut bytes)?;
    let (_has_null, oid) = (next(&mut bytes)?, next(&mut bytes)?);
    if oid != element.oid() || dimensions > 1 || is_large {
        return None;
    }
    let count = if dimensions == 0 { 0 } else { next(&mut bytes)? };
    if dimensions == 1 {
        next(&mut bytes)?;
    }
    let mut next_element = || {
        let length = bytes.try_get_i32().ok()?;
        if length == -1 {
            return Some(None);
        }
        let (value, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
        bytes = rest;
        text(&decode::value(value, element, Format::Binary).ok()?, element).map(Some)
    };
    // Written one after another, because NULLs in memory are many times larger than in the message.
    let mut read = 0;
    let elements = (0..count).map_while(|_| next_element().inspect(|_| read += 1));
    let array = write(elements, element.is_text());
    (read == count && bytes.is_empty()).then_some(array)
}

/// Writes the binary format of an array in text format. Returns `None` if an element is not of that
/// type.
pub fn put_binary(out: &mut Vec<u8>, array: &str, element: Type) -> Option<()> {
    let (count, nulls) = read(array).fold((0_u32, false), |(count, nulls), element| {
        (count.saturating_add(1), nulls || element.is_none())
    });
    out.put_u32(u32::from(count > 0));
    out.put_u32(u32::from(nulls));
    out.put_u32(element.oid());
    if count == 0 {
        return Some(());
    }
    out.put_u32(count);
    out.put_u32(1);
    for value in read(array) {
        let Some(text) = value else {
            out.put_i32(-1);
            continue;
        };
        let value = decode::value(text.as_bytes(), element, Format::Text).ok()?;
        encode::put_value(out, value.as_ref(), element, Format::Binary).ok()?;
    }
    Some(())
}

/// The text of an element.
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
    fn binary_format_round_trips() {
        for (array, element) in [
            ("{1,NULL,-3}", Type::Int4),
            ("{}", Type::Int8),
            (r#"{"a","b c"}"#, Type::Text),
            ("{t,f}", Type::Bool),
            (r#"{"2026-11-20"}"#, Type::Date),
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
        fn any_bytes_are_rejected_or_read_back(
            header in proptest::collection::vec(0..3u8, 12..24),
            bytes in proptest::collection::vec(prop_oneof![0..6u8, any::<u8>()], 0..40),
        ) {
            let bytes = [header, bytes].concat();
            if let Some(array) = from_binary(&bytes, Type::Int4) {
                let mut written = Vec::new();
                prop_assert_eq!(put_binary(&mut written, &array, Type::Int4), Some(()));
                prop_assert_eq!(from_binary(&written, Type::Int4), Some(array));
            }
        }

        #[test]
        fn any_text_is_rejected_or_reads_back(text in "[{},\"\\\\a ]{0,20}") {
            let mut written = Vec::new();
            if put_binary(&mut written, &text, Type::Text).is_some() {
                let array = from_binary(&written, Type::Text);
                prop_assert!(array.is_some());
                let mut again = Vec::new();
                prop_assert_eq!(put_binary(&mut again, &array.unwrap(), Type::Text), Some(()));
                prop_assert_eq!(again, written);
            }
        }
    }
}

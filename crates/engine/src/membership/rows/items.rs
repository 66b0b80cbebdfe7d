//! Encoding of a copy as rows, on its way between nodes: a stream of items, cut into messages anywhere.
//!
//! ```text
//!   length of the values (4 bytes) | kind (1 byte) | values | length | kind | values | ...
//!   value: tag (1 byte) | integer or float (8 bytes), or length (4 bytes) and bytes, or nothing
//! ```

use fulmar_sqlite::{Result, ValueRef};

use super::damaged;

const HEAD_BYTES: usize = 5;

const NULL: u8 = 0;
const INTEGER: u8 = 1;
const REAL: u8 = 2;
const TEXT: u8 = 3;
const BLOB: u8 = 4;

/// What an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `user_version`, `application_id`, whether `sqlite_sequence` exists.
    Settings,
    /// The SQL text of a table or index.
    Create,
    /// The table of the rows that follow: name, name of the rowid, number of columns that are inserted,
    /// names of all columns.
    Table,
    /// A row.
    Row,
    /// The hash of the table's rows.
    EndOfTable,
    /// An entry of the schema without pages: type, name, table, SQL text.
    Entry,
    /// The hash of the schema.
    End,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Settings, Kind::Create, Kind::Table, Kind::Row, Kind::EndOfTable, Kind::Entry, Kind::End];
}

/// Appends an item.
pub(super) fn append<'a>(out: &mut Vec<u8>, kind: Kind, values: impl IntoIterator<Item = ValueRef<'a>>) {
    let start = out.len();
    out.extend_from_slice(&[0, 0, 0, 0, kind as u8]);
    values.into_iter().for_each(|value| append_value(out, value));
    // SQLite's rows have less than 2^31 bytes.
    let length = (out.len() - start - HEAD_BYTES) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// Appends a value.
pub(super) fn append_value(out: &mut Vec<u8>, value: ValueRef<'_>) {
    let mut bytes = |tag, bytes: &[u8]| {
        out.push(tag);
        out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        out.extend_from_slice(bytes);
    };
    match value {
        ValueRef::Text(text) => bytes(TEXT, text),
        ValueRef::Blob(blob) => bytes(BLOB, blob),
        ValueRef::Null => out.push(NULL),
        ValueRef::Integer(integer) => {
            out.push(INTEGER);
            out.extend_from_slice(&integer.to_le_bytes());
        }
        ValueRef::Real(real) => {
            out.push(REAL);
            out.extend_from_slice(&real.to_bits().to_le_bytes());
        }
    }
}

/// The first item of a buffer.
pub(super) enum First<'a> {
    /// Its kind, its values, and the bytes after it.
    Whole(Kind, &'a [u8], &'a [u8]),
    /// It is not complete. Its length, if that is known.
    Partial(Option<usize>),
}

/// Splits the first item off.
pub(super) fn first(buffer: &[u8]) -> Result<First<'_>> {
    let Some((head, rest)) = buffer.split_first_chunk::<HEAD_BYTES>() else {
        return Ok(First::Partial(None));
    };
    let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
    let kind = *Kind::ALL.get(usize::from(head[4])).ok_or_else(damaged)?;
    Ok(match rest.split_at_checked(length) {
        Some((values, rest)) => First::Whole(kind, values, rest),
        None => First::Partial(Some(HEAD_BYTES + length)),
    })
}

/// Appends the values of an item to `out`.
pub(super) fn decode<'a>(mut values: &'a [u8], out: &mut Vec<ValueRef<'a>>) -> Result<()> {
    while let Some((tag, rest)) = values.split_first() {
        let (value, rest) = match *tag {
            NULL => (ValueRef::Null, rest),
            INTEGER | REAL => {
                let (bits, rest) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
                let bits = u64::from_le_bytes(*bits);
                let is_real = *tag == REAL;
                let real = || ValueRef::Real(f64::from_bits(bits));
                (if is_real { real() } else { ValueRef::Integer(bits as i64) }, rest)
            }
            TEXT | BLOB => {
                let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(damaged)?;
                let length = u32::from_le_bytes(*length) as usize;
                let (bytes, rest) = rest.split_at_checked(length).ok_or_else(damaged)?;
                (if *tag == TEXT { ValueRef::Text(bytes) } else { ValueRef::Blob(bytes) }, rest)
            }
            _ => return Err(damaged()),
        };
        out.push(value);
        values = rest;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_back_and_incomplete_ones_are_not() {
        let row = [
            ValueRef::Null,
            ValueRef::Integer(-7),
            ValueRef::Real(-0.0),
            ValueRef::Text(b"\xff"),
            ValueRef::Blob(&[0; 300]),
        ];
        let mut buffer = Vec::new();
        append(&mut buffer, Kind::Row, row);
        append(&mut buffer, Kind::End, []);
        let Ok(First::Whole(Kind::Row, values, rest)) = first(&buffer) else { panic!("no item") };
        let mut read = Vec::new();
        decode(values, &mut read).unwrap();
        assert_eq!(format!("{read:?}"), format!("{row:?}"));
        assert!(matches!(first(rest), Ok(First::Whole(Kind::End, [], []))));
        let length = buffer.len() - rest.len();
        for at in 0..length {
            let expected = (at >= HEAD_BYTES).then_some(length);
            assert!(matches!(first(&buffer[..at]), Ok(First::Partial(known)) if known == expected), "{at}");
        }
        for at in (1..values.len()).filter(|at| ![1, 10, 19, 25].contains(at)) {
            assert!(decode(&values[..at], &mut Vec::new()).is_err(), "{at}");
        }
        assert!(first(&[0, 0, 0, 0, 9]).is_err());
    }
}

//! Formats rows as lines of COPY data.

use fulmar_sqlite::ValueRef;

use super::{Format, Header};
use crate::Result;
use crate::protocol;
use crate::types::{Column, Type, encode};

/// Writes rows as lines of a format.
pub struct Writer {
    format: Format,
    names: Vec<String>,
    /// The declared column types. `None`: the type follows from each value.
    kinds: Vec<Option<Type>>,
    quoted: Vec<bool>,
    /// The current value in PostgreSQL's text format.
    value: Vec<u8>,
}

impl Writer {
    /// Creates a writer of rows with these columns.
    pub fn new(format: &Format, columns: &[Column]) -> Writer {
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        Writer {
            quoted: format.force_quote.of(&names),
            kinds: columns.iter().map(|column| column.kind).collect(),
            names,
            format: format.clone(),
            value: Vec::new(),
        }
    }

    /// The number of columns.
    pub fn columns(&self) -> usize {
        self.names.len()
    }

    /// Writes the header line. Returns false if the format has none.
    pub fn header(&mut self, out: &mut Vec<u8>) -> bool {
        if self.format.header == Header::None {
            return false;
        }
        for index in 0..self.names.len() {
            self.value.clear();
            self.value.extend_from_slice(self.names[index].as_bytes());
            self.field(index, false, out);
        }
        out.push(b'\n');
        true
    }

    /// Writes a value of a row. [`Writer::end_line`] ends the row.
    pub fn value(&mut self, index: usize, value: ValueRef<'_>, out: &mut Vec<u8>) -> Result<()> {
        /// Buffer capacity retained for the next value.
        const RETAINED_BYTES: usize = 64 << 10;
        let kind = self.kinds.get(index).copied().flatten().unwrap_or_else(|| Type::of_value(value));
        self.value.clear();
        self.value.shrink_to(RETAINED_BYTES);
        encode::put_value(&mut self.value, value, kind, protocol::Format::Text)?;
        /// The length prefix of a value in the protocol. It is negative for NULL.
        const LENGTH_BYTES: usize = 4;
        let null = self.value.first().is_some_and(|byte| byte & 0x80 != 0);
        self.value.drain(..LENGTH_BYTES);
        if null {
            self.separate(index, out);
            out.extend_from_slice(self.format.null.as_bytes());
        } else {
            self.field(index, self.quoted.get(index).is_some_and(|quoted| *quoted), out);
        }
        Ok(())
    }

    /// Ends a row.
    pub fn end_line(&self, out: &mut Vec<u8>) {
        out.push(b'\n');
    }

    fn separate(&self, index: usize, out: &mut Vec<u8>) {
        if index > 0 {
            out.push(self.format.delimiter);
        }
    }

    /// Writes the current value, which is not NULL.
    fn field(&self, index: usize, quoted: bool, out: &mut Vec<u8>) {
        self.separate(index, out);
        let Format { csv, delimiter, quote, escape, .. } = self.format;
        let value = &self.value[..];
        if !csv {
            return put_escaped(out, value, delimiter);
        }
        let special = |byte: &u8| *byte == delimiter || *byte == quote || matches!(byte, b'\n' | b'\r');
        // A line that consists of `\.` would end the data.
        let end = self.names.len() == 1 && value == b"\\.";
        if !quoted && !end && value != self.format.null.as_bytes() && !value.iter().any(special) {
            return out.extend_from_slice(value);
        }
        out.push(quote);
        for &byte in value {
            if byte == quote || byte == escape {
                out.push(escape);
            }
            out.push(byte);
        }
        out.push(quote);
    }
}

/// Writes a field of the text format.
fn put_escaped(out: &mut Vec<u8>, value: &[u8], delimiter: u8) {
    let letter = |byte: u8| match byte {
        8 => Some(b'b'),
        b'\t' => Some(b't'),
        b'\n' => Some(b'n'),
        11 => Some(b'v'),
        12 => Some(b'f'),
        b'\r' => Some(b'r'),
        b'\\' => Some(b'\\'),
        other => (other == delimiter).then_some(other),
    };
    let mut rest = value;
    while let Some(at) = rest.iter().position(|byte| letter(*byte).is_some()) {
        out.extend_from_slice(&rest[..at]);
        out.extend([b'\\', letter(rest[at]).unwrap_or(rest[at])]);
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
}

//! Incremental parser of COPY data.
//!
//! The data arrives in chunks of any size. [`Reader::take`] returns each row as soon as it is
//! complete. The rest of a chunk is kept for the next call, together with the position up to which
//! it has been scanned, so that each byte is scanned once, independent of the chunk size.
//!
//! As in PostgreSQL, the first line determines the line end of all lines: a line feed, a carriage
//! return followed by a line feed, or (classic Mac OS) a carriage return.

use fulmar_sqlite::{Error, Value, sqlstate};

use super::{Format, Header};
use crate::Result;
use crate::protocol;
use crate::types::{Type, decode};

/// Maximum size of a row's text.
const MAX_ROW_BYTES: usize = protocol::MAX_MESSAGE_BYTES;

/// Buffer capacity retained for the next row.
const RETAINED_BYTES: usize = 64 << 10;

/// Reads rows of a format.
pub struct Reader {
    format: Format,
    names: Vec<String>,
    /// The declared column types.
    kinds: Vec<Type>,
    force_null: Vec<bool>,
    force_not_null: Vec<bool>,
    /// The start of an incomplete row.
    partial: Vec<u8>,
    line_end: LineEnd,
    scan: Scan,
    /// The number of lines that have been read.
    pub lines: u64,
    /// The first line (the header, if there is one) has been read.
    begun: bool,
    /// The end marker `\.` has been read. The rest of the data is ignored.
    ended: bool,
    /// The current CSV field, without quotes.
    field: Vec<u8>,
}

/// The line end of the data.
#[derive(Clone, Copy, PartialEq)]
enum LineEnd {
    /// No line end has been found yet.
    Unknown,
    /// A line feed, optionally preceded by a carriage return.
    LineFeed,
    CarriageReturn,
}

impl LineEnd {
    /// Returns true if a line ends with this unescaped byte. `None` if this depends on the next
    /// byte, which has not arrived.
    fn is_at(&mut self, byte: u8, next: Option<u8>) -> Result<Option<bool>> {
        match (byte, *self) {
            (b'\r', LineEnd::Unknown) if next.is_none() => return Ok(None),
            (b'\r', LineEnd::Unknown) if next != Some(b'\n') => *self = LineEnd::CarriageReturn,
            (b'\n', LineEnd::Unknown) => *self = LineEnd::LineFeed,
            (b'\r', LineEnd::CarriageReturn) | (b'\n', LineEnd::LineFeed) => {}
            (b'\n', LineEnd::CarriageReturn) => {
                return Err(bad_format("literal newline found in data").hint(
                    "The first line ends with a carriage return only. Use \"\\n\" to represent a \
                     newline, or a quoted CSV field.",
                ));
            }
            _ => return Ok(Some(false)),
        }
        Ok(Some(true))
    }
}

/// The progress of the search for the end of a row.
#[derive(Default)]
struct Scan {
    at: usize,
    /// The position is inside quotes.
    quoted: bool,
    /// Line ends inside quotes.
    line_ends: u64,
}

impl Reader {
    /// Creates a reader of rows with these columns and types.
    pub fn new(format: &Format, names: Vec<String>, kinds: Vec<Type>) -> Reader {
        Reader {
            force_null: format.force_null.of(&names),
            force_not_null: format.force_not_null.of(&names),
            format: format.clone(),
            names,
            kinds,
            partial: Vec::new(),
            line_end: LineEnd::Unknown,
            scan: Scan::default(),
            lines: 0,
            begun: false,
            ended: false,
            field: Vec::new(),
        }
    }

    /// Reads the next row: removes it from `bytes`, and appends its values to `values`. Returns
    /// false if the row is incomplete; `bytes` is empty then.
    pub fn take(&mut self, bytes: &mut &[u8], values: &mut Vec<Value>) -> Result<bool> {
        loop {
            if self.ended {
                *bytes = &[];
                return Ok(false);
            }
            if self.partial.is_empty() {
                let Some(end) = self.scan.find(bytes, &self.format, &mut self.line_end)? else {
                    self.partial.extend_from_slice(bytes);
                    *bytes = &[];
                    return Ok(false);
                };
                let (row, rest) = bytes.split_at(end);
                *bytes = rest;
                if self.row(row, values)? {
                    return Ok(true);
                }
                continue;
            }
            let before = self.partial.len();
            self.partial.extend_from_slice(bytes);
            let Some(end) = self.scan.find(&self.partial, &self.format, &mut self.line_end)? else {
                *bytes = &[];
                if self.partial.len() > MAX_ROW_BYTES {
                    let message = format!("row exceeds {} MiB", MAX_ROW_BYTES >> 20);
                    return Err(Error::new(sqlstate::PROGRAM_LIMIT, message).hint(
                        "Check for an unterminated quote: all data after it belongs to the same row.",
                    ));
                }
                return Ok(false);
            };
            *bytes = &bytes[end - before..];
            let mut row = std::mem::take(&mut self.partial);
            row.truncate(end);
            let is_row = self.row(&row, values);
            row.clear();
            row.shrink_to(RETAINED_BYTES);
            self.partial = row;
            if is_row? {
                return Ok(true);
            }
        }
    }

    /// Memory held for the incomplete row.
    pub fn held_bytes(&self) -> usize {
        self.partial.capacity() + self.field.capacity()
    }

    /// Ends the data. Reads the last row if it has no line end. Returns false if there is none.
    pub fn finish(&mut self, values: &mut Vec<Value>) -> Result<bool> {
        let row = std::mem::take(&mut self.partial);
        if self.scan.quoted && !self.ended {
            self.lines += 1;
            return Err(bad_format("unterminated CSV quoted field"));
        }
        Ok(!row.is_empty() && self.row(&row, values)?)
    }

    /// Parses a line. Returns false if it is not a row, but the header or the end marker.
    fn row(&mut self, row: &[u8], values: &mut Vec<Value>) -> Result<bool> {
        self.lines += 1 + std::mem::take(&mut self.scan).line_ends;
        let row = row.strip_suffix(b"\n").unwrap_or(row);
        let row = row.strip_suffix(b"\r").unwrap_or(row);
        self.ended |= row == b"\\.";
        if self.ended {
            return Ok(false);
        }
        if !std::mem::replace(&mut self.begun, true) && self.format.header != Header::None {
            self.check_header(row)?;
            return Ok(false);
        }
        let before = values.len();
        let wanted = self.names.len();
        if self.format.csv { self.split_csv(row, values) } else { self.split_text(row, values) }?;
        let found = values.len() - before;
        if found < wanted {
            let name = &self.names[found];
            return Err(bad_format(&format!("missing data for column \"{name}\"")));
        }
        Ok(true)
    }

    fn check_header(&mut self, row: &[u8]) -> Result<()> {
        if self.format.header != Header::Match {
            return Ok(());
        }
        let mut found = Vec::new();
        let kinds = std::mem::replace(&mut self.kinds, vec![Type::Text; self.names.len()]);
        let split =
            if self.format.csv { self.split_csv(row, &mut found) } else { self.split_text(row, &mut found) };
        self.kinds = kinds;
        split?;
        let same = |(value, name): (&Value, &String)| matches!(value, Value::Text(text) if text.eq_ignore_ascii_case(name));
        if found.len() == self.names.len() && found.iter().zip(&self.names).all(same) {
            return Ok(());
        }
        let header = self.names.join(&char::from(self.format.delimiter).to_string());
        Err(bad_format("header line does not match the column names")
            .hint(format!("The expected header line is \"{header}\".")))
    }

    /// Fails if a row has more columns than are copied. Checked for each column, so that a long row
    /// cannot create an unlimited number of values.
    fn check_index(&self, index: usize) -> Result<()> {
        if index < self.names.len() {
            return Ok(());
        }
        Err(bad_format("extra data after last expected column"))
    }

    fn kind(&self, index: usize) -> Type {
        self.kinds.get(index).copied().unwrap_or(Type::Text)
    }

    /// Splits a row of the text format at its delimiters, and unescapes the fields.
    fn split_text(&self, row: &[u8], values: &mut Vec<Value>) -> Result<()> {
        let delimiter = self.format.delimiter;
        let (mut start, mut at, mut escaped, mut index) = (0, 0, false, 0);
        loop {
            at = find(row, at, |byte| byte == delimiter || byte == b'\\').unwrap_or(row.len());
            if row.get(at) == Some(&b'\\') {
                escaped = true;
                at = (at + 2).min(row.len());
                continue;
            }
            let field = &row[start..at];
            values.push(if field == self.format.null.as_bytes() {
                Value::Null
            } else if escaped {
                decode::value(&unescape(field)?, self.kind(index), protocol::Format::Text)?
            } else {
                decode::value(field, self.kind(index), protocol::Format::Text)?
            });
            if at == row.len() {
                return Ok(());
            }
            at += 1;
            (start, escaped, index) = (at, false, index + 1);
            self.check_index(index)?;
        }
    }

    /// Splits a row of CSV. Quotes can begin and end anywhere in a field.
    fn split_csv(&mut self, row: &[u8], values: &mut Vec<Value>) -> Result<()> {
        let Format { delimiter, quote, escape, .. } = self.format;
        let mut field = std::mem::take(&mut self.field);
        let (mut at, mut index) = (0, 0);
        loop {
            field.clear();
            let (mut inside, mut quoted) = (false, false);
            let ended = loop {
                let Some(&byte) = row.get(at) else { break true };
                at += 1;
                let next = row.get(at).copied();
                if inside && byte == escape && next.is_some_and(|next| next == quote || next == escape) {
                    field.extend(next);
                    at += 1;
                } else if byte == quote {
                    inside = !inside;
                    quoted = true;
                } else if !inside && byte == delimiter {
                    break false;
                } else {
                    field.push(byte);
                }
            };
            let is = |columns: &[bool]| columns.get(index).is_some_and(|column| *column);
            let may_be_null = (!quoted || is(&self.force_null)) && !is(&self.force_not_null);
            values.push(match may_be_null && field == self.format.null.as_bytes() {
                true => Value::Null,
                false => decode::value(&field, self.kind(index), protocol::Format::Text)?,
            });
            if ended {
                field.shrink_to(RETAINED_BYTES);
                self.field = field;
                return Ok(());
            }
            index += 1;
            self.check_index(index)?;
        }
    }
}

impl Scan {
    /// The end of the row at the start of `bytes`, including its line end. `None` if it is
    /// incomplete.
    fn find(&mut self, bytes: &[u8], format: &Format, line_end: &mut LineEnd) -> Result<Option<usize>> {
        loop {
            let found = match format.csv {
                true => find(bytes, self.at, |byte| {
                    byte == b'\n' || byte == b'\r' || byte == format.quote || byte == format.escape
                }),
                false => find(bytes, self.at, |byte| byte == b'\n' || byte == b'\r' || byte == b'\\'),
            };
            self.at = found.unwrap_or(bytes.len());
            let Some(&byte) = bytes.get(self.at) else { return Ok(None) };
            let next = bytes.get(self.at + 1).copied();
            match byte {
                b'\\' if !format.csv => match next {
                    // The escaped byte has not arrived yet.
                    None => return Ok(None),
                    // The end marker. Its line ends normally.
                    Some(b'.') => {}
                    // An escaped byte is not a line end.
                    Some(_) => self.at += 1,
                },
                _ if self.quoted && byte == format.escape && format.escape != format.quote => match next {
                    None => return Ok(None),
                    Some(next) if next == format.quote || next == format.escape => self.at += 1,
                    Some(_) => {}
                },
                // A doubled quote ends and restarts the quoted part, which makes no difference
                // here.
                _ if format.csv && byte == format.quote => self.quoted = !self.quoted,
                _ if self.quoted => self.line_ends += u64::from(byte == b'\n'),
                _ => match line_end.is_at(byte, next)? {
                    None => return Ok(None),
                    Some(false) => {}
                    Some(true) => {
                        self.at += 1;
                        return Ok(Some(self.at));
                    }
                },
            }
            self.at += 1;
        }
    }
}

/// The position of the first wanted byte at or after `from`. Wanted bytes are rare, so blocks are
/// checked by a loop without early exit, which the compiler vectorizes.
fn find(bytes: &[u8], from: usize, is_wanted: impl Fn(u8) -> bool) -> Option<usize> {
    const BLOCK_BYTES: usize = 32;
    let rest = bytes.get(from..)?;
    let has_none = |block: &&[u8]| !block.iter().fold(false, |any, byte| any | is_wanted(*byte));
    let skipped = BLOCK_BYTES * rest.chunks_exact(BLOCK_BYTES).take_while(has_none).count();
    rest[skipped..].iter().position(|byte| is_wanted(*byte)).map(|at| from + skipped + at)
}

fn bad_format(message: &str) -> Error {
    Error::new(sqlstate::BAD_COPY_FILE, message)
}

fn unescape(field: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        match rest.next() {
            Some(b'b') => bytes.push(8),
            Some(b'f') => bytes.push(12),
            Some(b'n') => bytes.push(b'\n'),
            Some(b'r') => bytes.push(b'\r'),
            Some(b't') => bytes.push(b'\t'),
            Some(b'v') => bytes.push(11),
            Some(digit @ b'0'..=b'7') => {
                let mut code = u32::from(digit - b'0');
                for _ in 0..2 {
                    if let Some(digit) = rest.next_if(|byte| (b'0'..=b'7').contains(byte)) {
                        code = code * 8 + u32::from(digit - b'0');
                    }
                }
                bytes.push(code as u8);
            }
            Some(b'x') => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let mut code = None;
                for _ in 0..2 {
                    if let Some(value) = rest.peek().copied().and_then(digit) {
                        rest.next();
                        code = Some(code.unwrap_or(0) * 16 + value);
                    }
                }
                bytes.push(code.map_or(b'x', |code| code as u8));
            }
            Some(b'.') => {
                return Err(bad_format("end-of-copy marker is not alone on its line")
                    .hint("Write a backslash in a value as \"\\\\\"."));
            }
            Some(other) => bytes.push(other),
            None => bytes.push(b'\\'),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Columns;
    use super::*;

    fn reader(format: Format, kinds: &[Type]) -> Reader {
        let names = (0..kinds.len()).map(|index| format!("c{index}")).collect();
        Reader::new(&format, names, kinds.to_vec())
    }

    /// Parses all rows of `text` in chunks of `chunk` bytes.
    fn rows(format: Format, kinds: &[Type], text: &[u8], chunk: usize) -> Result<Vec<Vec<Value>>> {
        let mut reader = reader(format, kinds);
        let mut values = Vec::new();
        for mut bytes in text.chunks(chunk) {
            while reader.take(&mut bytes, &mut values)? {}
            assert!(bytes.is_empty());
        }
        reader.finish(&mut values)?;
        Ok(values.chunks(kinds.len()).map(<[Value]>::to_vec).collect())
    }

    fn text(text: &str) -> Value {
        Value::Text(text.into())
    }

    const TWO: [Type; 2] = [Type::Text; 2];

    #[test]
    fn parses_the_text_format() {
        for chunk in [1, 2, 3, 100] {
            let input = b"1\tone\n\\N\t\n\\\\N\ta\\tb\\nc\\\td\\101\\x41\\q\r\nx\ttwo\\\nlines\n";
            let read = rows(Format::text(), &TWO, input, chunk).unwrap();
            let expected = [
                [text("1"), text("one")],
                [Value::Null, text("")],
                [text("\\N"), text("a\tb\nc\td\u{41}\u{41}q")],
                [text("x"), text("two\nlines")],
            ];
            assert_eq!(read, expected, "{chunk}");
        }
        let kinds = [Type::Int8, Type::Bytea, Type::Bool];
        let read = rows(Format::text(), &kinds, b"7\t\\\\x01\tt\n\\.\nnot a row\n", 5).unwrap();
        assert_eq!(read, [[Value::Integer(7), Value::Blob(vec![1]), Value::Integer(1)]]);
    }

    #[test]
    fn first_line_determines_the_line_end() {
        for chunk in [1, 2, 3, 100] {
            let old = rows(Format::text(), &TWO, b"1\ta\\\rb\r2\tc\\nd\r3\t", chunk).unwrap();
            let expected = [[text("1"), text("a\rb")], [text("2"), text("c\nd")], [text("3"), text("")]];
            assert_eq!(old, expected, "{chunk}");
            let old = rows(Format::csv(), &TWO, b"1,\"a\nb\r\"\r2,c\r", chunk).unwrap();
            assert_eq!(old, [[text("1"), text("a\nb\r")], [text("2"), text("c")]], "{chunk}");
            let new = rows(Format::csv(), &TWO, b"1,\"\r\"\n2,c\rd\n3,e\r\n4,f\r", chunk).unwrap();
            let expected = ["\r", "c\rd", "e", "f"].map(text);
            assert_eq!(new.into_iter().map(|row| row[1].clone()).collect::<Vec<_>>(), expected, "{chunk}");
            for format in [Format::text(), Format::csv()] {
                let both = rows(Format { delimiter: b';', ..format }, &TWO, b"1;a\r2;b\n3;c\r", chunk);
                assert!(both.unwrap_err().to_string().contains("newline"), "{chunk}");
            }
        }
    }

    #[test]
    fn end_marker_must_be_alone_on_its_line() {
        for line in ["1\tabc\\.\n", "\\.abc\tx\n", "1\t\\.\n"] {
            let error = rows(Format::text(), &TWO, line.as_bytes(), 2).unwrap_err();
            assert!(error.to_string().contains("end-of-copy marker"), "{error}");
        }
        let csv = rows(Format::csv(), &TWO, b"1,abc\\.\n", 2).unwrap();
        assert_eq!(csv, [[text("1"), text("abc\\.")]]);
    }

    #[test]
    fn find_returns_the_first_wanted_byte() {
        for length in [0, 1, 31, 32, 33, 64, 100] {
            for from in 0..=length {
                let mut bytes = vec![b'a'; length];
                assert_eq!(find(&bytes, from, |byte| byte == b'x'), None);
                for at in from..length {
                    bytes[at..].fill(b'x');
                    assert_eq!(find(&bytes, from, |byte| byte == b'x'), Some(at));
                    bytes[at..].fill(b'a');
                }
            }
        }
    }

    #[test]
    fn csv() {
        for chunk in [1, 2, 3, 100] {
            let input = b"c0,c1\n1,\"a,\"\"b\"\"\nc\"\r\n,\"\"\nx\"y\"z, \n\"end\",of";
            let format = Format { header: Header::Match, ..Format::csv() };
            let expected = [
                [text("1"), text("a,\"b\"\nc")],
                [Value::Null, text("")],
                [text("xyz"), text(" ")],
                [text("end"), text("of")],
            ];
            assert_eq!(rows(format, &TWO, input, chunk).unwrap(), expected, "{chunk}");
        }
        let other =
            Format { delimiter: b';', quote: b'\'', escape: b'\\', null: "NULL".into(), ..Format::csv() };
        let read = rows(other.clone(), &TWO, b"'it\\'s; \\\\ \\n';NULL\n'NULL';\n", 1).unwrap();
        assert_eq!(read, [[text("it's; \\ \\n"), Value::Null], [text("NULL"), text("")]]);
        let forced = Format {
            force_null: Columns::Named(vec!["c0".into()]),
            force_not_null: Columns::Named(vec!["c1".into()]),
            ..other
        };
        let read = rows(forced, &TWO, b"'NULL';NULL\n", 4).unwrap();
        assert_eq!(read, [[Value::Null, text("NULL")]]);
    }

    #[test]
    fn invalid_data_is_reported() {
        let message = |format: Format, input: &[u8]| {
            let error = rows(format, &TWO, input, 7).unwrap_err();
            assert_eq!(error.state(), sqlstate::BAD_COPY_FILE);
            error.message().to_owned()
        };
        assert_eq!(message(Format::text(), b"1\n"), "missing data for column \"c1\"");
        assert_eq!(message(Format::csv(), b"1,2,3"), "extra data after last expected column");
        assert_eq!(message(Format::csv(), b"1,\"2\n3,4\n"), "unterminated CSV quoted field");
        let header = Format { header: Header::Match, ..Format::csv() };
        assert_eq!(message(header, b"c1,c0\n"), "header line does not match the column names");
    }

    proptest! {
        #[test]
        fn rows_do_not_depend_on_chunk_boundaries(
            csv: bool,
            input in proptest::collection::vec(
                prop_oneof![proptest::sample::select(b"\t\n\r\\,\".N01".to_vec()), any::<u8>()],
                0..80,
            ),
            chunk in 1usize..9,
        ) {
            let format = || if csv { Format::csv() } else { Format::text() };
            let read = |chunk| format!("{:?}", rows(format(), &[Type::Bytea, Type::Int8], &input, chunk));
            prop_assert_eq!(read(chunk), read(100));
        }

        /// Values that [`super::super::write`] has written are read back unchanged.
        #[test]
        fn written_rows_are_read_back(
            csv: bool,
            values in proptest::collection::vec(proptest::option::of("[ -~\t\n\r\\\\\"é]{0,12}"), 2..12),
            chunk in 1usize..40,
        ) {
            use crate::types::Column;
            let format = if csv { Format::csv() } else { Format::text() };
            let columns = [Column::new("c0", Type::Text), Column::new("c1", Type::Text)];
            let mut writer = super::super::write::Writer::new(&format, &columns);
            let mut written = Vec::new();
            let value = |value: &Option<String>| value.clone().map_or(Value::Null, Value::Text);
            let expected: Vec<Vec<Value>> =
                values.chunks_exact(2).map(|row| row.iter().map(value).collect()).collect();
            for row in &expected {
                for (index, value) in row.iter().enumerate() {
                    writer.value(index, value.as_ref(), &mut written).unwrap();
                }
                writer.end_line(&mut written);
            }
            prop_assert_eq!(rows(format, &TWO, &written, chunk).unwrap(), expected);
        }
    }
}

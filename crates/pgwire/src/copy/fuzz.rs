//! Fuzz target: parses arbitrary bytes as COPY data. The parser must not panic, and must produce
//! the same rows for every division of the bytes into chunks.

use fulmar_fuzz::{Choices, Target};
use fulmar_sqlite::Value;

use super::read::Reader;
use super::{Columns, Format, Header};
use crate::types::Type;

const SEEDS: [&str; 12] = [
    "\x00\x001\ttext\t1.5\n2\t\\N\t-1e300\n\\.\nignored",
    "\x00\x05a\\tb\\nc\\\\d\\x41\\101\ttext\\\n",
    "\x01\x00a,b,c\n1,\"x,\"\"y\"\"\",\"2\n3\"\n4,,\n",
    "\x11\x03a,b,c\r\n1,\"x\",2\r\n",
    "\x21\x01'a;b',NULL,''\n",
    "\x00\x007\tx\t2024-01-02\n",
    "\x03\x02\"open",
    "\x05\x04t\tf\t\\N\n",
    "\x07\x06,,\n\n,,\n",
    "\x09\x00\\.\n",
    "\x00\x00\\",
    "\x01\x01\"a\"b\"c\",d,e\n",
];

const WORDS: &[&str] = &[
    "\n",
    "\r\n",
    "\r",
    "\t",
    ",",
    ";",
    "\"",
    "\"\"",
    "'",
    "\\",
    "\\N",
    "\\.",
    "\\.\n",
    "\\x",
    "\\0",
    "NULL",
    "1",
    "t",
    "f",
    "1e400",
    "NaN",
    "2024-01-02",
    "12:30:00",
    "\\x00ff",
    "{\"a\":1}",
    "9223372036854775808",
    "\u{e9}",
    "\0",
];

const KINDS: [Type; 14] = [
    Type::Text,
    Type::Int8,
    Type::Int2,
    Type::Bool,
    Type::Bytea,
    Type::Float8,
    Type::Float4,
    Type::Numeric,
    Type::Date,
    Type::Time,
    Type::Timestamp,
    Type::Timestamptz,
    Type::Uuid,
    Type::Jsonb,
];

fn format(choices: &mut Choices<'_>) -> Format {
    let bits = choices.byte();
    let mut format = if bits & 1 == 0 { Format::text() } else { Format::csv() };
    format.header = [Header::None, Header::None, Header::Names, Header::Match][usize::from(bits >> 1 & 3)];
    if format.csv {
        (format.quote, format.escape) = [(b'"', b'"'), (b'\'', b'\\')][usize::from(bits >> 3 & 1)];
        format.delimiter = [b',', b';'][usize::from(bits >> 4 & 1)];
        format.force_null = [Columns::None, Columns::All][usize::from(bits >> 5 & 1)].clone();
        format.force_not_null =
            [Columns::None, Columns::Named(vec!["b".into()])][usize::from(bits >> 6 & 1)].clone();
        format.null = ["", "NULL"][usize::from(bits >> 7)].into();
    }
    format
}

/// The values of all rows, and the error that ended parsing.
fn read(format: &Format, kinds: &[Type], text: &[u8], chunk: usize) -> (Vec<Value>, Option<String>) {
    let names = ["a", "b", "c"].map(String::from).to_vec();
    let mut reader = Reader::new(format, names, kinds.to_vec());
    let mut values = Vec::new();
    let mut rows = || -> crate::Result<()> {
        for mut bytes in text.chunks(chunk) {
            while reader.take(&mut bytes, &mut values)? {}
        }
        reader.finish(&mut values).map(|_| ())
    };
    let error = rows().err().map(|error| error.to_string());
    (values, error)
}

#[test]
fn fuzz_copy() {
    Target::new("copy", env!("CARGO_MANIFEST_DIR")).seeds(SEEDS).words(WORDS).run(|input| {
        let mut choices = Choices::new(input);
        let format = format(&mut choices);
        let first = choices.below(KINDS.len());
        let kinds = [0, 5, 9].map(|step| KINDS[(first + step) % KINDS.len()]);
        let text = choices.rest();
        let whole = read(&format, &kinds, text, text.len().max(1));
        // After an error the values are not compared: part of the failed row may have been read.
        for chunk in [1, 7] {
            let (values, error) = read(&format, &kinds, text, chunk);
            assert_eq!(error, whole.1, "chunks of {chunk} bytes must give the same error");
            assert!(
                error.is_some() || format!("{values:?}") == format!("{:?}", whole.0),
                "chunks of {chunk} bytes must give the same rows"
            );
        }
    });
}

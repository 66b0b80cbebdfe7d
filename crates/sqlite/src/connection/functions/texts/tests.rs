//! Compares each function with SQLite's own, on short random texts, some of them invalid UTF-8.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rusqlite::types::{ToSqlOutput, Value, ValueRef};
use rusqlite::{Connection, params_from_iter};

use super::*;

const CASES: u32 = 20_000;

/// Digits and letters, a space, zero; first bytes of characters of two, three, four and more bytes,
/// continuation bytes, and bytes that are invalid in UTF-8.
const BYTES: [u8; 16] =
    [b'a', b'a', b'b', b'B', b'1', b' ', 0, 0xc3, 0xa9, 0x80, 0xe2, 0xed, 0xa0, 0xf0, 0xf8, 0xff];

struct Stock {
    connection: Connection,
}

impl Stock {
    fn new() -> Stock {
        Stock { connection: Connection::open_in_memory().unwrap() }
    }

    fn answer<const N: usize>(&self, sql: &str, arguments: [Argument<'_>; N]) -> Value {
        let mut statement = self.connection.prepare_cached(sql).unwrap();
        statement.query_row(params_from_iter(arguments), |row| row.get_ref(0).map(bytes)).unwrap()
    }
}

/// Texts as blobs: rusqlite does not support texts with invalid UTF-8.
fn bytes(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Text(text) => Value::Blob(text.to_vec()),
        value => Value::try_from(value).unwrap(),
    }
}

#[derive(Clone, Copy)]
enum Argument<'a> {
    Text(&'a [u8]),
    Blob(&'a [u8]),
}

impl rusqlite::ToSql for Argument<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Argument::Text(bytes) => ValueRef::Text(bytes),
            Argument::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

fn random_text(random: &mut StdRng, longest: usize) -> Vec<u8> {
    let length = random.random_range(0..=longest);
    (0..length).map(|_| *BYTES.choose(random).unwrap()).collect()
}

#[test]
fn instr_matches_sqlite() {
    let (stock, mut random) = (Stock::new(), StdRng::seed_from_u64(1));
    let mut found = 0;
    for _ in 0..CASES {
        let (hay, needle) = (random_text(&mut random, 12), random_text(&mut random, 3));
        let of_texts = stock.answer("SELECT instr(?, ?)", [Argument::Text(&hay), Argument::Text(&needle)]);
        assert_eq!(Value::Integer(place(&hay, &needle) as i64), of_texts, "{hay:x?} {needle:x?}");
        let of_blobs = stock.answer("SELECT instr(?, ?)", [Argument::Blob(&hay), Argument::Blob(&needle)]);
        assert_eq!(Value::Integer(byte_place(&hay, &needle) as i64), of_blobs, "{hay:x?} {needle:x?}");
        found += u32::from(of_texts != of_blobs);
    }
    assert!(found > 100, "too few matches behind multi-byte characters: {found}");
}

#[test]
fn replace_matches_sqlite() {
    let (stock, mut random) = (Stock::new(), StdRng::seed_from_u64(2));
    for _ in 0..CASES {
        let [old, pattern, new] = [12, 2, 3].map(|longest| random_text(&mut random, longest));
        if pattern.first().is_none_or(|first| *first == 0) {
            continue;
        }
        let ours = replaced(&old, &memmem::Finder::new(&pattern), &new).collect::<Vec<_>>().concat();
        let arguments = [&old, &pattern, &new].map(|bytes| Argument::Text(bytes));
        assert_eq!(
            Value::Blob(ours),
            stock.answer("SELECT replace(?, ?, ?)", arguments),
            "{old:x?} {pattern:x?}"
        );
    }
}

#[test]
fn trim_matches_sqlite() {
    let (stock, mut random) = (Stock::new(), StdRng::seed_from_u64(3));
    for _ in 0..CASES {
        let (whole, set) = (random_text(&mut random, 8), random_text(&mut random, 5));
        for (name, left, right) in [("trim", true, true), ("ltrim", true, false), ("rtrim", false, true)] {
            let ours = trimmed(&whole, &set, left, right).unwrap().to_vec();
            let arguments = [Argument::Text(&whole), Argument::Text(&set)];
            let stock = stock.answer(&format!("SELECT {name}(?, ?)"), arguments);
            assert_eq!(Value::Blob(ours), stock, "{name} {whole:x?} {set:x?}");
        }
    }
    let many: String = ('\u{4e00}'..'\u{9000}').collect();
    assert!(trimmed("\u{8fff}".repeat(100_000).as_bytes(), many.as_bytes(), true, true).is_none());
}

#[test]
fn unhex_matches_sqlite() {
    let (stock, mut random) = (Stock::new(), StdRng::seed_from_u64(4));
    let mut decoded_texts = 0;
    for _ in 0..CASES {
        let (hex, passed) = (random_text(&mut random, 8), random_text(&mut random, 6));
        let (mut rest, mut set) = (&passed[..], HashSet::new());
        while let Some(character) = next_character(&mut rest) {
            set.insert(character);
        }
        let ours = decoded(&hex, &set).collect::<Option<Vec<u8>>>();
        decoded_texts += u32::from(ours.as_ref().is_some_and(|bytes| !bytes.is_empty()));
        let stock = stock.answer("SELECT unhex(?, ?)", [Argument::Text(&hex), Argument::Text(&passed)]);
        assert_eq!(ours.map_or(Value::Null, Value::Blob), stock, "{hex:x?} {passed:x?}");
    }
    assert!(decoded_texts > 100, "{decoded_texts}");
}

//! The initial rows, as the specification draws them: each subscriber's from a generator of its own.

use std::fmt::Write;

use rand::RngExt;

use super::schema::{FLAGS, TABLES};
use crate::workload::{Loading, Random, generator};

/// Twice the rows that a subscriber has in all tables on average: itself, 2.5 accesses, 2.5 facilities, each with 1.5
/// forwardings.
pub(super) const ROWS_PER_SUBSCRIBER_HALVES: u64 = 19;

/// Subscribers of one COPY, and of what is sent at once.
const PER_COPY: u32 = 50_000;
const PER_PIECE: u32 = 200;

/// A subscriber's number: 15 digits.
pub(super) type Number = [u8; 15];

/// The number of a subscriber.
pub(super) fn number(subscriber: i32) -> Number {
    let mut digits = [b'0'; 15];
    let mut rest = subscriber.unsigned_abs();
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    digits
}

/// Loads all tables if there is nothing; all that is there must be of as many subscribers.
pub(super) async fn load(loading: &mut Loading<'_>, subscribers: u32) -> anyhow::Result<()> {
    for (table_number, table) in TABLES.into_iter().enumerate() {
        // Children are written in the order of their subscribers too: the last one says how far they have come.
        let answer = loading.client.query(&format!("SELECT coalesce(max(s_id), 0) FROM {table}")).await?;
        let text = answer.into_iter().flatten().flatten().next().unwrap_or_default();
        let mut next = text.parse::<u32>()? + 1;
        anyhow::ensure!(
            next <= subscribers + 1,
            "table {table} has {} subscribers already; run with --subscribers {0}, or drop TATP's four tables",
            next - 1
        );
        while next <= subscribers {
            let end = subscribers.min(next + PER_COPY - 1);
            let copy = |piece: &mut Vec<u8>| {
                let (begin, until) = (next, end.min(next.saturating_add(PER_PIECE - 1)));
                let mut text = String::new();
                let rows = (begin..=until).map(|id| rows(loading.seed, table_number, id, &mut text)).sum();
                piece.extend_from_slice(text.as_bytes());
                (loading.loaded)(rows);
                next = until + 1;
                begin <= until
            };
            loading.client.copy_in(&format!("COPY {table} FROM STDIN"), copy).await?;
        }
    }
    Ok(())
}

/// Writes a subscriber's rows of a table; answers how many.
fn rows(seed: u64, table: usize, id: u32, text: &mut String) -> u64 {
    // Which facilities there are is drawn alike for their own table and for the forwardings.
    let mut random = generator(seed, &[table.min(2) as u64, u64::from(id)]);
    match table {
        0 => subscriber(id, &mut random, text),
        1 => accesses(id, &mut random, text),
        2 => facilities(id, &mut random, text),
        _ => forwardings(id, &mut random, text),
    }
}

fn subscriber(id: u32, random: &mut Random, text: &mut String) -> u64 {
    // Writing to a string cannot fail, here and below.
    let _ = write!(text, "{id}\t{id:015}");
    for most in [1, 15, 255] {
        for _ in 0..FLAGS {
            let _ = write!(text, "\t{}", random.random_range(0..=most));
        }
    }
    let _ = writeln!(text, "\t{}\t{}", location(random), location(random));
    1
}

/// A location.
pub(super) fn location(random: &mut Random) -> i32 {
    random.random_range(1..=i32::MAX)
}

fn accesses(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let types = some_of(&[1, 2, 3, 4], 1, random);
    for kind in &types {
        let (one, two) = (random.random_range(0..=255), random.random_range(0..=255));
        let _ = writeln!(text, "{id}\t{kind}\t{one}\t{two}\t{}\t{}", letters(3, random), letters(5, random));
    }
    types.len() as u64
}

fn facilities(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let types = some_of(&[1, 2, 3, 4], 1, random);
    for kind in &types {
        let active = u8::from(random.random::<f64>() < 0.85);
        let (control, data) = (random.random_range(0..=255), random.random_range(0..=255));
        let _ = writeln!(text, "{id}\t{kind}\t{active}\t{control}\t{data}\t{}", letters(5, random));
    }
    types.len() as u64
}

fn forwardings(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let mut rows = 0;
    for kind in some_of(&[1, 2, 3, 4], 1, random) {
        for start in some_of(&[0, 8, 16], 0, random) {
            let (end, target) = (start + random.random_range(1..=8), random.random_range(1..=999_999_999));
            let _ = writeln!(text, "{id}\t{kind}\t{start}\t{end}\t{target:015}");
            rows += 1;
        }
    }
    rows
}

/// At least `least` of these, each number of them alike, in order.
fn some_of(all: &[u8], least: usize, random: &mut Random) -> Vec<u8> {
    let mut left = random.random_range(least..=all.len());
    let mut chosen = Vec::new();
    for (place, kind) in all.iter().enumerate() {
        if random.random_range(0..all.len() - place) < left {
            chosen.push(*kind);
            left -= 1;
        }
    }
    chosen
}

fn letters(count: usize, random: &mut Random) -> String {
    (0..count).map(|_| char::from(random.random_range(b'A'..=b'Z'))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn lines(table: usize) -> Vec<Vec<String>> {
        let mut text = String::new();
        let rows: u64 = (1..=5_000).map(|id| rows(7, table, id, &mut text)).sum();
        let lines: Vec<_> = text.lines().map(|line| line.split('\t').map(str::to_owned).collect()).collect();
        assert_eq!(lines.len() as u64, rows);
        lines
    }

    #[test]
    fn there_are_as_many_rows_as_the_specification_says() {
        let counts: Vec<usize> = (0..4).map(|table| lines(table).len()).collect();
        let expected = [5_000.0, 12_500.0, 12_500.0, 18_750.0];
        for (count, expected) in counts.iter().zip(expected) {
            assert!((*count as f64 / expected - 1.0).abs() < 0.03, "{counts:?}");
        }
        let active = lines(2).iter().filter(|line| line[2] == "1").count() as f64 / counts[2] as f64;
        assert!((active - 0.85).abs() < 0.02, "{active}");
    }

    #[test]
    fn every_forwarding_has_its_facility() {
        let key = |line: &Vec<String>| (line[0].clone(), line[1].clone());
        let facilities: HashSet<_> = lines(2).iter().map(key).collect();
        assert!(lines(3).iter().all(|line| facilities.contains(&key(line))));
    }

    #[test]
    fn a_number_is_fifteen_digits() {
        assert_eq!(&number(i32::MAX), b"000002147483647");
        assert_eq!(lines(0)[41][1].as_bytes(), number(42));
    }
}

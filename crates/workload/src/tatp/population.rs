//! The initial rows as the specification defines them. Each subscriber has its own random
//! generators.

use std::fmt::Write;

use rand::RngExt;

use super::schema::{FLAGS, TABLES};
use crate::workload::{LoadContext, Random, generator};

/// Twice the mean number of rows per subscriber in all tables: 1 subscriber, 2.5 accesses, and 2.5
/// facilities with 1.5 forwardings each.
pub(super) const ROWS_PER_SUBSCRIBER_HALVES: u64 = 19;

/// Subscribers per COPY, and per CopyData message.
const SUBSCRIBERS_PER_COPY: u32 = 50_000;
const SUBSCRIBERS_PER_MESSAGE: u32 = 200;

/// The number of a subscriber as 15 digits.
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

/// Loads the missing rows of all tables. Existing tables must not have more subscribers than
/// requested.
pub(super) async fn load(loading: &mut LoadContext<'_>, subscribers: u32) -> anyhow::Result<()> {
    for (table_number, table) in TABLES.into_iter().enumerate() {
        // All tables are written in the order of the subscribers, so the last subscriber of a table
        // shows how far its load has come.
        let answer = loading.client.query(&format!("SELECT coalesce(max(s_id), 0) FROM {table}")).await?;
        let text = answer.into_iter().flatten().flatten().next().unwrap_or_default();
        let mut next = text.parse::<u32>()? + 1;
        anyhow::ensure!(
            next <= subscribers + 1,
            "table {table} already has {} subscribers; run with --subscribers {0}, \
             or drop the four TATP tables",
            next - 1
        );
        while next <= subscribers {
            let end = subscribers.min(next + SUBSCRIBERS_PER_COPY - 1);
            let copy = |message: &mut Vec<u8>| {
                let until = end.min(next.saturating_add(SUBSCRIBERS_PER_MESSAGE - 1));
                let begin = next;
                let mut text = String::new();
                let rows = (begin..=until).map(|id| rows(loading.seed, table_number, id, &mut text)).sum();
                message.extend_from_slice(text.as_bytes());
                (loading.loaded)(rows);
                next = until + 1;
                begin <= until
            };
            loading.client.copy_in(&format!("COPY {table} FROM STDIN"), copy).await?;
        }
    }
    Ok(())
}

/// Writes the rows of a subscriber in a table, and returns their number.
fn rows(seed: u64, table: usize, id: u32, text: &mut String) -> u64 {
    // The same generator draws the facilities for their own table and for the forwardings.
    let mut random = generator(seed, &[table.min(2) as u64, u64::from(id)]);
    match table {
        0 => subscriber(id, &mut random, text),
        1 => accesses(id, &mut random, text),
        2 => facilities(id, &mut random, text),
        _ => forwardings(id, &mut random, text),
    }
}

fn subscriber(id: u32, random: &mut Random, text: &mut String) -> u64 {
    // Writing to a string cannot fail. The same applies below.
    let _ = write!(text, "{id}\t{id:015}");
    for max in [1, 15, 255] {
        for _ in 0..FLAGS {
            let _ = write!(text, "\t{}", random.random_range(0..=max));
        }
    }
    let _ = writeln!(text, "\t{}\t{}", location(random), location(random));
    1
}

/// Draws a location.
pub(super) fn location(random: &mut Random) -> i32 {
    random.random_range(1..=i32::MAX)
}

fn accesses(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let types = random_subset(&[1, 2, 3, 4], 1, random);
    for kind in &types {
        let (one, two) = (random.random_range(0..=255), random.random_range(0..=255));
        let _ = writeln!(text, "{id}\t{kind}\t{one}\t{two}\t{}\t{}", letters(3, random), letters(5, random));
    }
    types.len() as u64
}

fn facilities(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let types = random_subset(&[1, 2, 3, 4], 1, random);
    for kind in &types {
        let active = u8::from(random.random::<f64>() < 0.85);
        let (control, data) = (random.random_range(0..=255), random.random_range(0..=255));
        let _ = writeln!(text, "{id}\t{kind}\t{active}\t{control}\t{data}\t{}", letters(5, random));
    }
    types.len() as u64
}

fn forwardings(id: u32, random: &mut Random, text: &mut String) -> u64 {
    let mut rows = 0;
    for kind in random_subset(&[1, 2, 3, 4], 1, random) {
        for start in random_subset(&[0, 8, 16], 0, random) {
            let (end, target) = (start + random.random_range(1..=8), random.random_range(1..=999_999_999));
            let _ = writeln!(text, "{id}\t{kind}\t{start}\t{end}\t{target:015}");
            rows += 1;
        }
    }
    rows
}

/// Draws a subset of `all` with at least `min` elements, in order. Each size is equally likely.
fn random_subset(all: &[u8], min: usize, random: &mut Random) -> Vec<u8> {
    let mut left = random.random_range(min..=all.len());
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
    fn row_counts_match_the_specification() {
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
    fn numbers_have_fifteen_digits() {
        assert_eq!(&number(i32::MAX), b"000002147483647");
        assert_eq!(lines(0)[41][1].as_bytes(), number(42));
    }
}

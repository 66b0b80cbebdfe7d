//! Converts dates and times between text, as SQLite stores them, and PostgreSQL's binary format.
//!
//! SQLite has no date type; its functions and Fulmar use text such as `2026-11-20 23:05:00.25`.
//! PostgreSQL counts days or microseconds from the start of 2000. A timestamp with time zone is
//! stored in UTC without a suffix, so that it compares with `CURRENT_TIMESTAMP`. On the wire it has
//! the suffix `+00`.

use bytes::BufMut;
use fulmar_sqlite::Value;
use fulmar_sqlite::calendar::{civil, days_from_civil};

use super::number;

/// Microseconds in a day.
pub const DAY_US: i64 = 86_400_000_000;
/// Days from 1970-01-01 to 2000-01-01.
const EPOCH_OFFSET_DAYS: i64 = 10_957;
/// 0001-01-01 and 10000-01-01, in days since 2000: the range of the text format.
const DATE_RANGE_DAYS: std::ops::Range<i64> = -730_119..2_921_940;

/// Parses a date into days since 2000-01-01.
pub fn parse_date(text: &[u8]) -> Option<i64> {
    let mut scanner = Scanner(text);
    let days = scanner.date()?;
    scanner.0.is_empty().then_some(days)
}

/// Parses a time of day into microseconds since midnight.
pub fn parse_time(text: &[u8]) -> Option<i64> {
    let mut scanner = Scanner(text);
    let time_us = scanner.time()?;
    scanner.0.is_empty().then_some(time_us)
}

/// Parses a timestamp into microseconds since 2000-01-01 00:00 UTC. An offset is applied if
/// present. A date alone is its midnight.
pub fn parse_timestamp(text: &[u8]) -> Option<i64> {
    let mut scanner = Scanner(text);
    let mut timestamp_us = scanner.date()? * DAY_US;
    if !scanner.0.is_empty() {
        if !scanner.take(b' ') && !scanner.take(b'T') {
            return None;
        }
        timestamp_us += scanner.time()?;
        timestamp_us -= scanner.zone()?;
    }
    scanner.0.is_empty().then_some(timestamp_us)
}

/// Writes `YYYY-MM-DD`. Returns false if the year does not have four digits.
pub fn put_date(out: &mut Vec<u8>, days: i64) -> bool {
    if !DATE_RANGE_DAYS.contains(&days) {
        return false;
    }
    let (year, month, day) = civil(days + EPOCH_OFFSET_DAYS);
    put_padded(out, year, 4);
    out.put_u8(b'-');
    put_padded(out, month, 2);
    out.put_u8(b'-');
    put_padded(out, day, 2);
    true
}

/// Writes `HH:MM:SS`, with the significant digits of the fraction. Returns false if the value is
/// not a time of day.
pub fn put_time(out: &mut Vec<u8>, time_us: i64) -> bool {
    if !(0..=DAY_US).contains(&time_us) {
        return false;
    }
    let seconds = time_us / 1_000_000;
    put_padded(out, seconds / 3600, 2);
    out.put_u8(b':');
    put_padded(out, seconds / 60 % 60, 2);
    out.put_u8(b':');
    put_padded(out, seconds % 60, 2);
    let (mut fraction, mut width) = (time_us % 1_000_000, 6);
    if fraction > 0 {
        while fraction % 10 == 0 {
            fraction /= 10;
            width -= 1;
        }
        out.put_u8(b'.');
        put_padded(out, fraction, width);
    }
    true
}

/// Writes `YYYY-MM-DD HH:MM:SS[.ffffff]`. Returns false if the year does not have four digits.
pub fn put_timestamp(out: &mut Vec<u8>, timestamp_us: i64) -> bool {
    if !put_date(out, timestamp_us.div_euclid(DAY_US)) {
        return false;
    }
    out.put_u8(b' ');
    put_time(out, timestamp_us.rem_euclid(DAY_US))
}

fn put_padded(out: &mut Vec<u8>, value: i64, width: u32) {
    for position in 1..width {
        if value < 10i64.pow(width - position) {
            out.put_u8(b'0');
        }
    }
    number::put_i64(out, value);
}

/// Reads fields from the front of a text.
struct Scanner<'a>(&'a [u8]);

impl Scanner<'_> {
    fn take(&mut self, byte: u8) -> bool {
        let found = self.0.first() == Some(&byte);
        if found {
            self.0 = &self.0[1..];
        }
        found
    }

    fn digits(&mut self, count: usize) -> Option<i64> {
        let (digits, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        digits
            .iter()
            .try_fold(0, |value, digit| digit.is_ascii_digit().then(|| value * 10 + i64::from(digit - b'0')))
    }

    fn date(&mut self) -> Option<i64> {
        let year = self.digits(4)?;
        let month = self.take(b'-').then(|| self.digits(2))??;
        let day = self.take(b'-').then(|| self.digits(2))??;
        let days = days_from_civil(year, month, day);
        // The round trip rejects dates such as February 31.
        (year >= 1 && (1..=12).contains(&month) && civil(days) == (year, month, day))
            .then(|| days - EPOCH_OFFSET_DAYS)
    }

    fn time(&mut self) -> Option<i64> {
        let hour = self.digits(2)?;
        let minute = self.take(b':').then(|| self.digits(2))??;
        let second = if self.take(b':') { self.digits(2)? } else { 0 };
        let fraction_us = if self.take(b'.') { self.fraction()? } else { 0 };
        let time_us = (hour * 3600 + minute * 60 + second) * 1_000_000 + fraction_us;
        (minute < 60 && second <= 60 && time_us <= DAY_US).then_some(time_us)
    }

    /// The digits after the point, in microseconds. Further digits are truncated.
    fn fraction(&mut self) -> Option<i64> {
        let count = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return None;
        }
        let (digits, rest) = self.0.split_at(count);
        self.0 = rest;
        let digits = digits.iter().map(|digit| i64::from(digit - b'0'));
        Some(digits.chain(std::iter::repeat(0)).take(6).fold(0, |value, digit| value * 10 + digit))
    }

    /// `Z`, `+HH`, `+HH:MM`, `+HHMM` or nothing, in microseconds east of Greenwich.
    fn zone(&mut self) -> Option<i64> {
        if self.0.is_empty() || (self.0.len() == 1 && self.take(b'Z')) {
            return Some(0);
        }
        let sign = if self.take(b'+') {
            1
        } else if self.take(b'-') {
            -1
        } else {
            return None;
        };
        let hours = self.digits(2)?;
        self.take(b':');
        let minutes = if self.0.is_empty() { 0 } else { self.digits(2)? };
        (hours <= 15 && minutes < 60).then_some(sign * (hours * 60 + minutes) * 60_000_000)
    }
}

/// A point in time, in milliseconds since 1970, as SQLite text. It is converted to the client's
/// format when it is sent.
pub fn timestamp_text(unix_ms: u64) -> Value {
    let mut text = Vec::new();
    let since_1970_us = i64::try_from(unix_ms).unwrap_or(i64::MAX).saturating_mul(1000);
    let since_2000_us = since_1970_us.saturating_sub(946_684_800_000_000);
    let written = put_timestamp(&mut text, since_2000_us);
    String::from_utf8(text).ok().filter(|_| written).map_or(Value::Null, Value::Text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(timestamp_us: i64) -> String {
        let mut out = Vec::new();
        assert!(put_timestamp(&mut out, timestamp_us));
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn converts_known_timestamps() {
        assert_eq!(parse_timestamp(b"2000-01-01 00:00:00"), Some(0));
        assert_eq!(parse_timestamp(b"1999-12-31T23:59:59.5Z"), Some(-500_000));
        assert_eq!(parse_timestamp(b"2000-01-01 02:00:00+02"), Some(0));
        assert_eq!(parse_timestamp(b"2000-01-01 02:30+02:30"), Some(0));
        assert_eq!(parse_timestamp(b"2000-01-02"), Some(DAY_US));
        assert_eq!(parse_date(b"2024-02-29"), Some(8825));
        assert_eq!(parse_time(b"23:05"), Some((23 * 60 + 5) * 60_000_000));
        assert_eq!(written(-500_000), "1999-12-31 23:59:59.5");
        assert_eq!(written(250_000 * 86_400_000_000), "2684-06-23 00:00:00");
    }

    #[test]
    fn rejects_invalid_dates_and_times() {
        for text in ["", "2023-02-29", "2023-13-01", "0000-01-01", "2023-1-1", "2023-01-01x", "20x3-01-01"] {
            assert_eq!(parse_date(text.as_bytes()), None, "{text}");
        }
        for text in [
            "2023-01-01 ",
            "2023-01-01 25:00",
            "2023-01-01 10:60",
            "2023-01-01 10:00+99",
            "2023-01-01 10:00:00.",
        ] {
            assert_eq!(parse_timestamp(text.as_bytes()), None, "{text}");
        }
        assert!(!put_date(&mut Vec::new(), i64::MAX));
        assert!(!put_timestamp(&mut Vec::new(), i64::MIN));
        assert!(!put_time(&mut Vec::new(), -1));
    }

    proptest! {
        #[test]
        fn written_timestamps_parse_to_the_same_value(
            timestamp_us in DATE_RANGE_DAYS.start * DAY_US..DATE_RANGE_DAYS.end * DAY_US,
        ) {
            prop_assert_eq!(parse_timestamp(written(timestamp_us).as_bytes()), Some(timestamp_us));
        }

        #[test]
        fn any_text_is_rejected_or_reads_back(text in "[0-9]{1,5}-[0-9]{1,2}-[0-9]{1,2}[ T]?[0-9:.+-]{0,20}|[0-9:.+-]{0,30}|.{0,40}") {
            if let Some(timestamp_us) = parse_timestamp(text.as_bytes()) {
                prop_assert_eq!(parse_timestamp(written(timestamp_us).as_bytes()), Some(timestamp_us));
            }
            if let Some(time_us) = parse_time(text.as_bytes()) {
                let mut out = Vec::new();
                prop_assert!(put_time(&mut out, time_us));
                prop_assert_eq!(parse_time(&out), Some(time_us));
            }
        }
    }
}

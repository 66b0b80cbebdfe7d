//! Converts PostgreSQL's `numeric` between its binary format and decimal text.
//!
//! The binary format consists of the number of base-10,000 digits, the weight of the first one, the
//! sign, the number of decimal places to show, and the digits:
//!
//! ```text
//! 12345.6   ->   3 digits, weight 1, sign +, scale 1:   1 | 2345 | 6000
//! ```

use bytes::BufMut;

const POSITIVE: u16 = 0;
const NEGATIVE: u16 = 0x4000;
const NAN: u16 = 0xC000;
const INFINITY: u16 = 0xD000;
const NEGATIVE_INFINITY: u16 = 0xF000;
/// Maximum number of decimal digits before the point. The same limit as in PostgreSQL.
const MAX_WHOLE_DIGITS: i32 = 131_072;

/// Converts the binary format to decimal text. Returns `None` if it is malformed.
pub fn to_text(binary: &[u8]) -> Option<String> {
    let (header, digits) = binary.split_first_chunk::<8>()?;
    let field = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let (count, weight, sign, scale) =
        (usize::from(field(0)), field(2) as i16, field(4), usize::from(field(6)));
    match sign {
        NAN => return Some("NaN".to_owned()),
        INFINITY => return Some("Infinity".to_owned()),
        NEGATIVE_INFINITY => return Some("-Infinity".to_owned()),
        POSITIVE | NEGATIVE => {}
        _ => return None,
    }
    if digits.len() != count * 2 || scale > 16_383 {
        return None;
    }
    let digit = |position: i32| -> Option<u16> {
        let at = usize::try_from(position).ok().filter(|at| *at < count);
        let value = at.map_or(0, |at| u16::from_be_bytes([digits[at * 2], digits[at * 2 + 1]]));
        (value < 10_000).then_some(value)
    };
    let weight = i32::from(weight);
    let mut text = String::new();
    for position in 0..=weight.max(-1) {
        let value = digit(position)?;
        match text.is_empty() {
            true if value == 0 => {}
            true => text = value.to_string(),
            false => text.push_str(&format!("{value:04}")),
        }
    }
    if text.is_empty() {
        text.push('0');
    }
    if scale > 0 {
        text.push('.');
        let start = text.len();
        let mut position = weight + 1;
        if weight < -1 {
            let zeros = (((-1 - weight) * 4) as usize).min(scale);
            text.extend(std::iter::repeat_n('0', zeros));
            position = 0;
        }
        while text.len() - start < scale {
            text.push_str(&format!("{:04}", digit(position)?));
            position += 1;
        }
        text.truncate(start + scale);
    }
    if sign == NEGATIVE && text.bytes().any(|byte| byte.is_ascii_digit() && byte != b'0') {
        text.insert(0, '-');
    }
    Some(text)
}

/// Whether `put` accepts a text.
pub fn is_valid(text: &str) -> bool {
    matches!(text, "NaN" | "Infinity" | "-Infinity") || Decimal::parse(text).is_some()
}

/// Writes decimal text, optionally with an exponent, in the binary format. Returns false and writes
/// nothing if the text is not a number, or exceeds PostgreSQL's range.
pub fn put(out: &mut Vec<u8>, text: &str) -> bool {
    let special = match text {
        "NaN" => Some(NAN),
        "Infinity" => Some(INFINITY),
        "-Infinity" => Some(NEGATIVE_INFINITY),
        _ => None,
    };
    if let Some(sign) = special {
        put_header(out, 0, 0, sign, 0);
        return true;
    }
    let Some(decimal) = Decimal::parse(text) else { return false };
    decimal.put(out);
    true
}

fn put_header(out: &mut Vec<u8>, count: u16, weight: i16, sign: u16, scale: u16) {
    out.put_u16(count);
    out.put_i16(weight);
    out.put_u16(sign);
    out.put_u16(scale);
}

/// The components of a decimal text.
struct Decimal<'a> {
    negative: bool,
    whole: &'a [u8],
    fraction: &'a [u8],
    /// The power of ten by which the digits are multiplied.
    exponent: i32,
}

impl<'a> Decimal<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
        let (digits, exponent) = match unsigned.find(['e', 'E']) {
            Some(at) => (&unsigned[..at], unsigned[at + 1..].parse::<i32>().ok()?),
            None => (unsigned, 0),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.len() + fraction.len() == 0 || !all_digits(whole) || !all_digits(fraction) {
            return None;
        }
        let whole_length = i32::try_from(whole.len()).ok()?;
        let size = whole_length.checked_add(exponent)?;
        let scale = i32::try_from(fraction.len()).ok()?.checked_sub(exponent)?;
        if size > MAX_WHOLE_DIGITS || scale > 16_383 {
            return None;
        }
        let (whole, fraction) = (whole.as_bytes(), fraction.as_bytes());
        Some(Decimal { negative: text.starts_with('-'), whole, fraction, exponent })
    }

    /// The decimal digit for 10^power.
    fn digit(&self, power: i32) -> u16 {
        let index = self.whole.len() as i32 - 1 - (power - self.exponent);
        let Ok(index) = usize::try_from(index) else { return 0 };
        let digit = match index.checked_sub(self.whole.len()) {
            None => self.whole.get(index),
            Some(index) => self.fraction.get(index),
        };
        digit.map_or(0, |digit| u16::from(digit - b'0'))
    }

    /// The base-10,000 digit of this weight.
    fn group(&self, weight: i32) -> u16 {
        (0..4).rev().fold(0, |value, power| value * 10 + self.digit(weight * 4 + power))
    }

    fn put(&self, out: &mut Vec<u8>) {
        let scale = (self.fraction.len() as i32 - self.exponent).max(0);
        let mut first = (self.whole.len() as i32 + self.exponent - 1).div_euclid(4);
        // Groups below the last digit are zero. There are thousands of them in 9e131071.
        let mut last = (self.exponent - self.fraction.len() as i32).div_euclid(4);
        while first >= last && self.group(first) == 0 {
            first -= 1;
        }
        while last <= first && self.group(last) == 0 {
            last += 1;
        }
        if first < last {
            return put_header(out, 0, 0, POSITIVE, scale as u16);
        }
        let sign = if self.negative { NEGATIVE } else { POSITIVE };
        put_header(out, (first - last + 1) as u16, first as i16, sign, scale as u16);
        for weight in (last..=first).rev() {
            out.put_u16(self.group(weight));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(text: &str) -> String {
        let mut out = Vec::new();
        assert!(put(&mut out, text), "{text}");
        to_text(&out).unwrap()
    }

    #[test]
    fn converts_known_numbers() {
        let mut out = Vec::new();
        assert!(put(&mut out, "12345.6"));
        assert_eq!(&out[..], [0, 3, 0, 1, 0, 0, 0, 1, 0, 1, 0x09, 0x29, 0x17, 0x70]);
        for text in [
            "0",
            "1",
            "-1",
            "0.5",
            "-0.0001",
            "0.00000000012",
            "10000",
            "99999999.9999",
            "1000000000000",
            "0.00",
            "NaN",
        ] {
            assert_eq!(round_trip(text), text);
        }
        assert_eq!(round_trip("1e3"), "1000");
        assert_eq!(round_trip("1.5e-3"), "0.0015");
        assert_eq!(round_trip("-0"), "0");
        assert_eq!(round_trip("007"), "7");
        assert_eq!(round_trip("1.2300e6"), "1230000");
        assert_eq!(round_trip("9e131071"), format!("9{}", "0".repeat(131_071)));
    }

    #[test]
    fn rejects_invalid_numbers() {
        for text in ["", ".", "-", "1.2.3", "1e", "1e999999999", "1e-999999999", "abc", "1 "] {
            assert!(!put(&mut Vec::new(), text) && !is_valid(text), "{text}");
        }
        assert_eq!(to_text(&[]), None);
        assert_eq!(to_text(&[0, 1, 0, 0, 0, 0, 0, 0, 0x27, 0x10]), None);
        assert_eq!(to_text(&[0, 2, 0, 0, 0, 0, 0, 0, 0, 1]), None);
    }

    proptest! {
        #[test]
        fn written_numbers_read_back_unchanged(whole in "0|[1-9][0-9]{0,30}", fraction in "[0-9]{1,30}") {
            let text = format!("{whole}.{fraction}");
            prop_assert_eq!(round_trip(&text), text);
        }

        #[test]
        fn any_bytes_are_rejected_or_read_back(
            header in proptest::collection::vec(0..4u8, 8),
            digits in proptest::collection::vec(prop_oneof![0..40u8, any::<u8>()], 0..20),
        ) {
            if let Some(text) = to_text(&[header, digits].concat()) {
                prop_assert_eq!(round_trip(&text), text);
            }
        }

        #[test]
        fn any_text_is_rejected_or_reads_back(text in "[-+0-9eE.]{0,20}") {
            let mut out = Vec::new();
            prop_assert_eq!(put(&mut Vec::new(), &text), is_valid(&text));
            if put(&mut out, &text) {
                let read = to_text(&out);
                prop_assert!(read.is_some());
                let read = read.unwrap();
                prop_assert_eq!(round_trip(&read), read);
            }
        }
    }
}

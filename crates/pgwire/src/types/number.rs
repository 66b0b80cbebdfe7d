//! Formats numbers as text, as PostgreSQL does.

use std::fmt::{Display, LowerExp};
use std::io::Write;

use bytes::BufMut;

/// Writes an unsigned integer in decimal.
pub fn put_u64(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.put_slice(&digits[at..]);
}

/// Writes an integer in decimal.
pub fn put_i64(out: &mut Vec<u8>, value: i64) {
    if value < 0 {
        out.put_u8(b'-');
    }
    put_u64(out, value.unsigned_abs());
}

/// Writes a float with the fewest digits that parse to the same float. Very large and very small
/// ones have an exponent, as in PostgreSQL (`1e+15`, `1e-05`).
pub fn put_f64(out: &mut Vec<u8>, value: f64) {
    put_float(out, value, value, 1e15);
}

/// As [`put_f64`], for a single-precision float.
pub fn put_f32(out: &mut Vec<u8>, value: f32) {
    put_float(out, value, value.into(), 1e6);
}

/// `value` formats itself with the fewest digits of its own precision. `wide` is the same number as
/// f64, for comparisons.
fn put_float(out: &mut Vec<u8>, value: impl Display + LowerExp, wide: f64, exponent_from: f64) {
    if wide.is_nan() {
        out.put_slice(b"NaN");
    } else if wide.is_infinite() {
        out.put_slice(if wide > 0.0 { b"Infinity" } else { b"-Infinity" });
    } else if wide == 0.0 || (1e-4..exponent_from).contains(&wide.abs()) {
        let _ = write!(out, "{value}"); // writing to memory cannot fail
    } else {
        let text = format!("{value:e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
        let _ = write!(out, "{mantissa}e{sign}{digits:0>2}");
    }
}

/// Writes a float of a column that is not a float column, so that it remains recognizable as one:
/// `1.0`, as SQLite shows it.
pub fn put_real(out: &mut Vec<u8>, value: f64) {
    let start = out.len();
    put_f64(out, value);
    if out[start..].iter().all(|byte| byte.is_ascii_digit() || *byte == b'-') {
        out.put_slice(b".0");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out.to_vec()).unwrap()
    }

    #[test]
    fn formats_integers() {
        for value in [0, 7, -1, 1234567890, i64::MAX, i64::MIN] {
            assert_eq!(written(|out| put_i64(out, value)), value.to_string());
        }
    }

    /// The expected texts are the output of PostgreSQL 15.
    #[test]
    fn formats_floats_as_postgres_does() {
        let cases = [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.0, "1"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (123456789012345.0, "123456789012345"),
            (1e15, "1e+15"),
            (1.5e300, "1.5e+300"),
            (-2.5e-310, "-2.5e-310"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (value, text) in cases {
            assert_eq!(written(|out| put_f64(out, value)), text);
        }
        assert_eq!(written(|out| put_f32(out, 0.1)), "0.1");
        assert_eq!(written(|out| put_f32(out, 1e6)), "1e+06");
        assert_eq!(written(|out| put_real(out, 1.0)), "1.0");
    }
}

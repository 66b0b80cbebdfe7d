//! Parses and formats byte sizes: `256MB`, `1GiB`, `4096`.
//!
//! `MB` and `MiB` both mean 2^20 bytes, as in PostgreSQL's configuration: a user that configures
//! 256MB of memory does not mean 12 MB less.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const UNITS: [(&str, u32); 14] = [
    ("", 0),
    ("b", 0),
    ("k", 10),
    ("kb", 10),
    ("kib", 10),
    ("m", 20),
    ("mb", 20),
    ("mib", 20),
    ("g", 30),
    ("gb", 30),
    ("gib", 30),
    ("t", 40),
    ("tb", 40),
    ("tib", 40),
];

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("invalid size \"{text}\"; use bytes or a number with a unit: 256MB, 1GiB");
        let text = text.trim();
        let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (_, shift) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
        number.checked_mul(1 << shift).map(Bytes).ok_or_else(invalid)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        match units.iter().find(|(_, shift)| self.0 >= 1 << shift) {
            Some((unit, shift)) => write!(f, "{:.1} {unit}", self.0 as f64 / f64::from(1_u32 << shift)),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn parses_units_in_any_case_and_rejects_invalid_sizes() {
        for (text, bytes) in [
            ("4096", 4096),
            ("256MB", 256 << 20),
            ("256mb", 256 << 20),
            ("1GiB", 1 << 30),
            ("1 g", 1 << 30),
            ("2TB", 2 << 40),
            ("7k", 7 << 10),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "MB", "-1", "1.5GB", "1XB", "99999999999999999999", "18014398509481985KB"] {
            assert!(text.parse::<Bytes>().unwrap_err().contains("256MB"), "{text}");
        }
    }

    #[test]
    fn displays_sizes_in_the_largest_unit_that_fits() {
        assert_eq!(Bytes(1000).to_string(), "1000 bytes");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(3 << 30).to_string(), "3.0 GiB");
    }
}

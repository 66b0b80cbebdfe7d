//! Times and sizes as PostgreSQL writes them: `5s`, `1.5 h`, `64MB`; without a unit they are milliseconds or kilobytes.

/// A unit with what one of it is in the unit that counts.
type Scale = &'static [(&'static str, f64)];

/// The largest first.
const TIMES: Scale =
    &[("d", 86_400_000.0), ("h", 3_600_000.0), ("min", 60_000.0), ("s", 1000.0), ("ms", 1.0), ("us", 0.001)];
const SIZES: Scale =
    &[("TB", 1_073_741_824.0), ("GB", 1_048_576.0), ("MB", 1024.0), ("kB", 1.0), ("B", 1.0 / 1024.0)];

/// Beyond this a number is not exact.
const LARGEST: f64 = 9_007_199_254_740_992.0;

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Time.
    Milliseconds,
    /// Memory, or space on a disk.
    Kilobytes,
}

impl Unit {
    /// What a text says, rounded to whole units; nothing if it says nothing. As in PostgreSQL, units are in the case in
    /// which they are written here.
    pub fn parse(self, text: &str) -> Option<u64> {
        let text = text.trim();
        let number_ends = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(number_ends);
        let unit = unit.trim_start();
        let scale = match unit {
            "" => 1.0,
            unit => self.scale().iter().find(|(name, _)| *name == unit)?.1,
        };
        let value = (number.parse::<f64>().ok()? * scale).round();
        (value <= LARGEST).then_some(value as u64)
    }

    /// A number with the largest unit of which it is a whole multiple.
    pub fn write(self, value: u64) -> String {
        let largest = self.scale().iter().find(|(_, scale)| value != 0 && value as f64 % scale == 0.0);
        match largest {
            Some((name, scale)) => format!("{}{name}", value as f64 / scale),
            None => value.to_string(),
        }
    }

    /// How a value is written, for who wrote it otherwise.
    pub fn rule(self) -> &'static str {
        match self {
            Unit::Count => "a whole number",
            Unit::Milliseconds => {
                "a number with one of the units us, ms, s, min, h, d; milliseconds without a unit"
            }
            Unit::Kilobytes => "a number with one of the units B, kB, MB, GB, TB; kilobytes without a unit",
        }
    }

    fn scale(self) -> Scale {
        match self {
            Unit::Count => &[],
            Unit::Milliseconds => TIMES,
            Unit::Kilobytes => SIZES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_postgres_reads_them() {
        use Unit::{Count, Kilobytes, Milliseconds};
        for (unit, text, value) in [
            (Milliseconds, "250", Some(250)),
            (Milliseconds, " 2 min ", Some(120_000)),
            (Milliseconds, "1.5h", Some(5_400_000)),
            (Milliseconds, "1600us", Some(2)),
            (Milliseconds, "5 S", None),
            (Milliseconds, "soon", None),
            (Milliseconds, "", None),
            (Milliseconds, "-1", None),
            (Milliseconds, "1e3", None),
            (Milliseconds, "1.2.3s", None),
            (Kilobytes, "64", Some(64)),
            (Kilobytes, "64MB", Some(65_536)),
            (Kilobytes, "64mb", None),
            (Kilobytes, "2048B", Some(2)),
            (Kilobytes, "0.5GB", Some(524_288)),
            (Kilobytes, "99999999999999999999TB", None),
            (Count, "7", Some(7)),
            (Count, "7s", None),
        ] {
            assert_eq!(unit.parse(text), value, "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for (unit, value, text) in [
            (Unit::Milliseconds, 0, "0"),
            (Unit::Milliseconds, 90_000, "90s"),
            (Unit::Milliseconds, 172_800_000, "2d"),
            (Unit::Kilobytes, 65_536, "64MB"),
            (Unit::Kilobytes, 1025, "1025kB"),
            (Unit::Count, 100, "100"),
        ] {
            assert_eq!(unit.write(value), text);
            assert_eq!(unit.parse(text), Some(value));
        }
    }
}

//! Parses and formats times and sizes in PostgreSQL's notation: `5s`, `1.5 h`, `64MB`. Numbers
//! without a unit are milliseconds or kilobytes.

/// Names of units, each with its size in the base unit (milliseconds or kilobytes).
type Scale = &'static [(&'static str, f64)];

/// Largest first.
const TIMES: Scale =
    &[("d", 86_400_000.0), ("h", 3_600_000.0), ("min", 60_000.0), ("s", 1000.0), ("ms", 1.0), ("us", 0.001)];
const SIZES: Scale =
    &[("TB", 1_073_741_824.0), ("GB", 1_048_576.0), ("MB", 1024.0), ("kB", 1.0), ("B", 1.0 / 1024.0)];

/// 2^53: larger integers are not exact as `f64`.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A count without a unit.
    Count,
    /// A time.
    Milliseconds,
    /// A size in memory or on disk.
    Kilobytes,
}

impl Unit {
    /// Parses a text and rounds to whole base units. `None` if it is invalid. As in PostgreSQL,
    /// unit names are case-sensitive.
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
        (value <= MAX_EXACT).then_some(value as u64)
    }

    /// Formats a number with the largest unit of which it is a whole multiple.
    pub fn write(self, value: u64) -> String {
        let largest = self.scale().iter().find(|(_, scale)| value != 0 && value as f64 % scale == 0.0);
        match largest {
            Some((name, scale)) => format!("{}{name}", value as f64 / scale),
            None => value.to_string(),
        }
    }

    /// Describes valid values, for error messages.
    pub fn rule(self) -> &'static str {
        match self {
            Unit::Count => "a whole number",
            Unit::Milliseconds => "a number with unit us, ms, s, min, h or d (default: milliseconds)",
            Unit::Kilobytes => "a number with unit B, kB, MB, GB or TB (default: kilobytes)",
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
    fn parses_values_as_postgres_does() {
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
    fn formatted_value_parses_to_the_same_value() {
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

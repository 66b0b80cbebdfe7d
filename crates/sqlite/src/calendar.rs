//! Conversions between Unix time and Gregorian calendar dates.

/// Milliseconds of a minute.
pub const MINUTE_MS: u64 = 60_000;
/// Milliseconds of an hour.
pub const HOUR_MS: u64 = 60 * MINUTE_MS;
/// Milliseconds of a day.
pub const DAY_MS: u64 = 24 * HOUR_MS;

/// Formats a time as PostgreSQL does, in UTC: `2026-11-20 23:05:01.123+00`.
pub fn timestamp(unix_ms: u64) -> String {
    let (days, ms) = ((unix_ms / DAY_MS) as i64, unix_ms % DAY_MS);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (ms / HOUR_MS, ms / MINUTE_MS % 60, ms / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{:03}+00", ms % 1000)
}

/// Days since 1970-01-01 of a date (H. Hinnant, "chrono-compatible low-level date algorithms").
pub fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The inverse of [`days_from_civil`]: year, month, day.
pub fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    #[test]
    fn formats_timestamps() {
        assert_eq!(super::timestamp(0), "1970-01-01 00:00:00.000+00");
        assert_eq!(super::timestamp(951_782_399_999), "2000-02-28 23:59:59.999+00");
        assert_eq!(super::timestamp(951_782_400_000), "2000-02-29 00:00:00.000+00");
        assert_eq!(super::timestamp(1_795_215_901_123), "2026-11-20 23:05:01.123+00");
    }
}

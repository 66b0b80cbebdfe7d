//! A series as a short text, for the next controller.
//!
//! Values are shares of the largest one in steps of 1/8280, two characters each. The characters are
//! the printable ones of ASCII that JSON does not escape. A series can be stored with one value for
//! several steps, their mean; restoring interpolates between these.
//!
//! A text that is damaged is no series. The controller then begins without its history.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::series::{Series, SeriesKind};
use super::{KnownError, SelectorSettings};

/// The number of characters, and of values of a pair of them.
const DIGITS: u32 = 91;
const LEVELS: u32 = DIGITS * DIGITS;

/// A series as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredSeries {
    /// What it is about.
    pub kind: SeriesKind,
    /// The name of the node or tenant; empty for the cluster.
    pub name: String,
    /// The newest step.
    pub last: u64,
    /// The largest value.
    max: f32,
    /// The values, the oldest one first.
    values: String,
    /// By method: its mean error, and how many forecasts were judged.
    errors: BTreeMap<String, (f32, u64)>,
}

impl StoredSeries {
    /// Stores a series: its newest values, at most `limit`, each the mean of `factor` steps. `None`
    /// if it is empty.
    pub fn of(
        series: &Series,
        kind: SeriesKind,
        name: &str,
        (factor, limit): (usize, usize),
    ) -> Option<StoredSeries> {
        let factor = factor.max(1);
        let history = series.selector().history();
        let newest = &history[history.len().saturating_sub(factor * limit)..];
        // Means are aligned to the newest value.
        let (oldest, rest) = newest.split_at(newest.len() % factor);
        let means: Vec<f64> = [oldest]
            .into_iter()
            .chain(rest.chunks(factor))
            .filter(|values| !values.is_empty())
            .map(|values| values.iter().sum::<f64>() / values.len() as f64)
            .collect();
        let max = means.iter().copied().fold(0.0, f64::max) as f32;
        let mut values = String::with_capacity(2 * means.len());
        for mean in means {
            let share = if max > 0.0 { (mean / f64::from(max)).clamp(0.0, 1.0) } else { 0.0 };
            let level = (share * f64::from(LEVELS - 1)).round() as u32;
            values.extend([digit(level / DIGITS), digit(level % DIGITS)]);
        }
        let errors = series.selector().errors().into_iter();
        let errors = errors.filter_map(|of| Some((of.method.to_owned(), (of.error? as f32, of.judged))));
        let (last, errors) = (series.last()?, errors.collect());
        Some(StoredSeries { kind, name: name.to_owned(), last, max, values, errors })
    }

    /// The series, without steps after `now`. `None` if the text is damaged or nothing is left.
    pub fn restore(
        &self,
        settings: SelectorSettings,
        shown: usize,
        factor: usize,
        now: u64,
    ) -> Option<Series> {
        let max = f64::from(self.max);
        if !max.is_finite() || max < 0.0 || !self.values.len().is_multiple_of(2) {
            return None;
        }
        let level = |pair: &[u8]| Some(value(pair[0])? * DIGITS + value(pair[1])?);
        let levels: Option<Vec<u32>> = self.values.as_bytes().chunks(2).map(level).collect();
        let shares = levels?.into_iter().map(|level| f64::from(level) / f64::from(LEVELS - 1));
        let coarse: Vec<f64> = shares.map(|share| share.min(1.0) * max).collect();
        let mut history = interpolated(&coarse, factor.max(1));
        let late = usize::try_from(self.last.saturating_sub(now)).unwrap_or(usize::MAX);
        history.truncate(history.len().saturating_sub(late));
        let surplus = history.len().saturating_sub(settings.max_history);
        history.drain(..surplus);
        let errors = |method: &str| {
            let (error, judged) = self.errors.get(method).copied()?;
            (error.is_finite() && error >= 0.0).then_some(KnownError { error: f64::from(error), judged })
        };
        let last = self.last.min(now);
        (!history.is_empty()).then(|| Series::restored(settings, shown, (last, history), errors))
    }
}

/// `factor` values for each, linearly between the middles of their times.
fn interpolated(coarse: &[f64], factor: usize) -> Vec<f64> {
    let at = |step: usize| {
        let position = (step as f64 + 0.5) / factor as f64 - 0.5;
        let position = position.clamp(0.0, coarse.len().saturating_sub(1) as f64);
        let (before, share) = (position.floor() as usize, position.fract());
        let after = (before + 1).min(coarse.len() - 1);
        coarse[before] + (coarse[after] - coarse[before]) * share
    };
    (0..coarse.len() * factor).map(at).collect()
}

/// `#` to `~` without the backslash, which JSON escapes.
fn digit(value: u32) -> char {
    let code = b'#' + value as u8;
    char::from(if code < b'\\' { code } else { code + 1 })
}

fn value(code: u8) -> Option<u32> {
    match code {
        b'#'..=b'[' => Some(u32::from(code - b'#')),
        b']'..=b'~' => Some(u32::from(code - b'#') - 1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> SelectorSettings {
        SelectorSettings::new(3, 24)
    }

    /// A daily pattern of 24 steps.
    fn series(steps: u64) -> Series {
        let mut series = Series::new(settings(), 10);
        for step in 0..steps {
            series.add(2.0 + (step as f64 * std::f64::consts::TAU / 24.0).sin());
            series.end_step(step);
        }
        series
    }

    fn stored(series: &Series, factor: usize, limit: usize) -> StoredSeries {
        StoredSeries::of(series, SeriesKind::Tenant, "shop", (factor, limit)).expect("it has values")
    }

    fn restored(stored: &StoredSeries, factor: usize, now: u64) -> Vec<f64> {
        let series = stored.restore(settings(), 10, factor, now).expect("the text is valid");
        series.selector().history().to_vec()
    }

    #[test]
    fn every_digit_is_read_back_and_not_escaped() {
        let text: String = (0..DIGITS).map(digit).collect();
        assert!(text.bytes().zip(0..).all(|(code, number)| value(code) == Some(number)), "{text}");
        assert_eq!(serde_json::to_string(&text).expect("it is text").len(), text.len() + 2);
    }

    #[test]
    fn series_survives_with_its_errors() {
        let before = series(100);
        let text = serde_json::to_string(&stored(&before, 1, 1000)).expect("it can be written");
        assert!(text.len() < 2 * 100 + 400, "{} bytes", text.len());
        let stored: StoredSeries = serde_json::from_str(&text).expect("it can be read");
        let after = stored.restore(settings(), 10, 1, 1000).expect("the text is valid");
        assert_eq!(after.last(), Some(99));
        let (old, new) = (before.selector().history(), after.selector().history());
        assert!(old.len() == new.len() && old.iter().zip(new).all(|(old, new)| (old - new).abs() < 3e-4));
        for (old, new) in before.selector().errors().iter().zip(after.selector().errors()) {
            assert_eq!((old.method, old.judged), (new.method, new.judged));
            let near = old.error.zip(new.error).is_none_or(|(old, new)| (old - new).abs() < 1e-6);
            assert!(near && old.error.is_some() == new.error.is_some(), "{old:?} {new:?}");
        }
    }

    #[test]
    fn coarse_values_are_interpolated() {
        let middles = interpolated(&[1.0, 4.0], 3);
        let expected = [1.0, 1.0, 2.0, 3.0, 4.0, 4.0];
        assert!(
            middles.iter().zip(expected).all(|(found, value)| (found - value).abs() < 1e-9),
            "{middles:?}"
        );
        let before = series(95);
        let stored = stored(&before, 3, 20);
        let history = restored(&stored, 3, 1000);
        assert_eq!(history.len(), 60, "20 values of three steps");
        let old = &before.selector().history()[35..];
        let worst = old.iter().zip(&history).map(|(old, new)| (old - new).abs()).fold(0.0, f64::max);
        assert!(worst < 0.3, "{worst}");
    }

    #[test]
    fn values_after_now_are_dropped() {
        let stored = stored(&series(50), 1, 1000);
        assert_eq!(restored(&stored, 1, 39).len(), 40);
        let series = stored.restore(settings(), 10, 1, 39).expect("the text is valid");
        assert_eq!(series.last(), Some(39));
    }

    #[test]
    fn damaged_texts_are_no_series() {
        let good = stored(&series(50), 1, 1000);
        for values in ["", "#", "##\\#", "\u{e4}", "## #"] {
            let bad = StoredSeries { values: values.to_owned(), ..good.clone() };
            assert!(bad.restore(settings(), 10, 1, 1000).is_none(), "{values:?}");
        }
        let bad = StoredSeries { max: f32::NAN, ..good.clone() };
        assert!(bad.restore(settings(), 10, 1, 1000).is_none());
        let old = StoredSeries { last: u64::MAX, ..good };
        assert!(old.restore(settings(), 10, 1, 1000).is_none(), "all of it is after now");
    }
}

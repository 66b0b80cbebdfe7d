//! What a run counts: transactions, their latencies, their errors.
//!
//! One [`Meter`] serves all connections of a driver thread; it counts only what ends inside the measured window, so
//! that warm-up and wind-down distort nothing. A second histogram is emptied at every tick, for live display.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::workload::Done;

/// Latencies are kept in microseconds, to three digits, up to an hour.
const LONGEST_MICROSECONDS: u64 = 3_600_000_000;
const DIGITS: u8 = 3;

/// The most different SQLSTATEs that are told apart.
const MAX_SQLSTATES: usize = 64;

/// Latencies of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// How many were measured.
    pub count: u64,
    /// Arithmetic mean, in milliseconds.
    pub mean_ms: f64,
    /// Median, in milliseconds.
    pub p50_ms: f64,
    /// 95th percentile, in milliseconds.
    pub p95_ms: f64,
    /// 99th percentile, in milliseconds.
    pub p99_ms: f64,
    /// 99.9th percentile, in milliseconds.
    pub p999_ms: f64,
    /// The longest, in milliseconds.
    pub max_ms: f64,
}

/// A histogram of latencies whose recording cannot fail.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Latencies {
        // Bounds and digits are constants that the library accepts.
        Latencies(
            Histogram::new_with_bounds(1, LONGEST_MICROSECONDS, DIGITS).expect("constant bounds are valid"),
        )
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX).max(1));
    }

    pub(crate) fn summary(&self) -> Latency {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        Latency {
            count: self.0.len(),
            mean_ms: self.0.mean() / 1e3,
            p50_ms: at(0.5),
            p95_ms: at(0.95),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: self.0.max() as f64 / 1e3,
        }
    }

    fn reset(&mut self) {
        self.0.reset();
    }
}

/// When a run begins to measure and when it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) opens: Instant,
    pub(crate) closes: Instant,
}

impl Window {
    fn contains(&self, moment: Instant) -> bool {
        (self.opens..=self.closes).contains(&moment)
    }
}

/// Counts of one run.
pub(crate) struct Meter {
    window: Window,
    latencies: Latencies,
    recent: Latencies,
    pub(crate) statements: u64,
    pub(crate) lost_connections: u64,
    pub(crate) failed: u64,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
}

impl Meter {
    pub(crate) fn new(window: Window) -> Meter {
        Meter {
            window,
            latencies: Latencies::new(),
            recent: Latencies::new(),
            statements: 0,
            lost_connections: 0,
            failed: 0,
            errors: BTreeMap::new(),
            first_error: None,
        }
    }

    /// A transaction ended as it should: its first statement was due at `due`, its last was answered at `end`.
    pub(crate) fn done(&mut self, _kind: usize, _done: Done, due: Instant, end: Instant, statements: u64) {
        let latency = end.saturating_duration_since(due);
        self.recent.record(latency);
        if self.window.contains(end) {
            self.latencies.record(latency);
            self.statements += statements;
        }
    }

    /// The server refused a statement (a retry may follow).
    pub(crate) fn refused(&mut self, sqlstate: &str) {
        if self.errors.len() < MAX_SQLSTATES || self.errors.contains_key(sqlstate) {
            *self.errors.entry(sqlstate.to_owned()).or_default() += 1;
        }
    }

    /// A transaction was given up.
    pub(crate) fn gave_up(&mut self, error: &dyn std::error::Error) {
        self.failed += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }

    /// The latencies of the measured window.
    pub(crate) fn latency(&self) -> Latency {
        self.latencies.summary()
    }

    /// The latencies since the last call.
    pub(crate) fn take_recent(&mut self) -> Latency {
        let summary = self.recent.summary();
        self.recent.reset();
        summary
    }
}

/// The median of rounds, and how far they spread.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one (the mean of the two middle ones).
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// All, in the order in which they were measured.
    pub rounds: Vec<f64>,
}

impl Spread {
    /// `None` if there are no rounds, or one of them is not a number.
    pub fn of(rounds: Vec<f64>) -> Option<Spread> {
        if rounds.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Spread { median, min, max, rounds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_window_is_measured() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut meter = Meter::new(Window { opens: at(100), closes: at(200) });
        meter.done(0, Done::Committed, at(90), at(99), 12);
        meter.done(0, Done::Committed, at(95), at(105), 12);
        meter.done(0, Done::Committed, at(150), at(170), 12);
        meter.done(0, Done::Committed, at(190), at(201), 12);
        let latency = meter.latency();
        assert_eq!((latency.count, meter.statements), (2, 24));
        assert!((latency.mean_ms - 15.0).abs() < 0.1, "{latency:?}");
        assert!((latency.max_ms - 20.0).abs() < 0.1, "{latency:?}");
        assert_eq!(meter.take_recent().count, 4);
        assert_eq!(meter.take_recent().count, 0);
    }

    #[test]
    fn percentiles_are_of_all_latencies() {
        let mut latencies = Latencies::new();
        for ms in 1..=1000 {
            latencies.record(Duration::from_millis(ms));
        }
        let summary = latencies.summary();
        assert!((summary.p50_ms - 500.0).abs() < 1.0, "{summary:?}");
        assert!((summary.p99_ms - 990.0).abs() < 1.0, "{summary:?}");
        assert!((summary.mean_ms - 500.5).abs() < 1.0, "{summary:?}");
    }

    #[test]
    fn medians_of_odd_and_even_rounds() {
        let spread = Spread::of(vec![3.0, 1.0, 10.0]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (3.0, 1.0, 10.0));
        assert_eq!(spread.rounds, [3.0, 1.0, 10.0]);
        assert_eq!(Spread::of(vec![4.0, 1.0]).unwrap().median, 2.5);
        assert_eq!(Spread::of(vec![]), None);
        assert_eq!(Spread::of(vec![1.0, f64::NAN]), None);
    }

    #[test]
    fn errors_are_counted_by_sqlstate_within_bounds() {
        let now = Instant::now();
        let mut meter = Meter::new(Window { opens: now, closes: now });
        meter.refused("40001");
        meter.refused("40001");
        (0..200).for_each(|n| meter.refused(&format!("{n:05}")));
        assert_eq!(meter.errors["40001"], 2);
        assert_eq!(meter.errors.len(), MAX_SQLSTATES);
    }
}

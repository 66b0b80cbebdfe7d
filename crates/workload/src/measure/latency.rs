//! Latency histograms. Recording a value cannot fail.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Latencies are recorded in microseconds with three significant digits, up to one hour.
const MAX_MICROSECONDS: u64 = 3_600_000_000;
const DIGITS: u8 = 3;

/// Summary of a set of latencies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Number of latencies.
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
    /// Maximum, in milliseconds.
    pub max_ms: f64,
}

/// A recorded value in microseconds, rounded to three significant digits, and its count.
pub type Sample = (u64, u64);

/// A histogram of latencies.
#[derive(Clone)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Latencies {
        // The bounds and digits are constants that the library accepts.
        Latencies(Histogram::new_with_bounds(1, MAX_MICROSECONDS, DIGITS).expect("constant bounds are valid"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.add(&[(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX), 1)]);
    }

    pub(crate) fn add(&mut self, samples: &[Sample]) {
        for (microseconds, count) in samples {
            self.0.saturating_record_n((*microseconds).max(1), *count);
        }
    }

    pub(crate) fn merge(&mut self, other: &Latencies) {
        // All histograms are created with the same bounds.
        self.0.add(&other.0).expect("bounds are equal");
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

    /// All recorded values.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let values = self.0.iter_recorded();
        values.map(|value| (value.value_iterated_to(), value.count_at_value())).collect()
    }

    /// Removes and returns all recorded values.
    pub(crate) fn take(&mut self) -> Vec<Sample> {
        let samples = self.samples();
        self.0.reset();
        samples
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_cover_all_latencies() {
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
    fn samples_round_trip() {
        let mut one = Latencies::new();
        for microseconds in [0, 1, 17, 2_047, 2_049, 123_456, 9_999_999, u64::MAX] {
            one.add(&[(microseconds, 3)]);
        }
        let before = one.summary();
        let mut other = Latencies::new();
        other.add(&one.take());
        assert_eq!((one.summary().count, other.summary()), (0, before));
        one.merge(&other);
        assert_eq!(one.summary(), before);
    }
}

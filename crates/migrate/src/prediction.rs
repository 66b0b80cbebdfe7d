//! What a migration will cost, from what the earlier ones of this node have cost.

use crate::report::{Prediction, Report};

/// Bytes per second before anything was measured.
const FIRST_RATE: f64 = 64e6;
/// The pause before anything was measured.
const FIRST_PAUSE_MS: f64 = 100.0;
/// The weight of a new measurement.
const WEIGHT: f64 = 0.3;
/// Copies that took less say nothing about the rate.
const MIN_COPY_MS: u64 = 20;

/// Smoothed costs of the migrations away from this node.
#[derive(Clone, Copy, Debug)]
pub struct Predictor {
    bytes_per_s: f64,
    pause_ms: f64,
}

impl Default for Predictor {
    fn default() -> Self {
        Predictor { bytes_per_s: FIRST_RATE, pause_ms: FIRST_PAUSE_MS }
    }
}

impl Predictor {
    /// The cost of copying this number of bytes, at most at a rate.
    pub fn predict(&self, bytes: u64, max_bytes_per_s: Option<u64>) -> Prediction {
        let rate = max_bytes_per_s.map_or(self.bytes_per_s, |max| self.bytes_per_s.min(max as f64));
        Prediction {
            bytes,
            copy_ms: (bytes as f64 * 1e3 / rate.max(1.0)) as u64,
            pause_ms: self.pause_ms as u64,
        }
    }

    /// Learns from a migration that has moved its partition. The rates of copies with a limit do not
    /// count.
    pub fn learn(&mut self, report: &Report, is_limited: bool) {
        let smooth = |value: &mut f64, new: f64| *value += WEIGHT * (new - *value);
        smooth(&mut self.pause_ms, report.freeze_ms as f64);
        if !is_limited && report.throttled_ms == 0 && report.copy_ms >= MIN_COPY_MS && report.bytes > 0 {
            smooth(&mut self.bytes_per_s, report.bytes as f64 * 1e3 / report.copy_ms as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_follow_what_was_measured() {
        let mut predictor = Predictor::default();
        let report = Report { bytes: 10_000_000, copy_ms: 1_000, freeze_ms: 40, ..Report::default() };
        for _ in 0..50 {
            predictor.learn(&report, false);
        }
        let prediction = predictor.predict(20_000_000, None);
        assert_eq!(prediction.bytes, 20_000_000);
        assert!((1_990..=2_010).contains(&prediction.copy_ms), "{prediction:?}");
        assert!((39..=41).contains(&prediction.pause_ms), "{prediction:?}");
        assert_eq!(predictor.predict(20_000_000, Some(1_000_000)).copy_ms, 20_000);
        let slow = Report { bytes: 1_000, copy_ms: 60_000, freeze_ms: 40, ..Report::default() };
        predictor.learn(&slow, true);
        assert!((1_990..=2_010).contains(&predictor.predict(20_000_000, None).copy_ms));
    }
}

//! What a migration will cost, from what the earlier ones of this node have cost.
//!
//! A copy takes a fixed time, for its rounds, and then a time in proportion to its pages. Both are
//! learned from the mechanisms that copy all pages while the source serves: the fixed time from
//! copies of less than [`SMALL_BYTES`], the rate from the others. Bytes are those of whole pages,
//! also where fewer are sent. Copies within a site and between sites are measured separately.

use fulmar_pages::PAGE_SIZE;

use crate::report::{Prediction, Report};

// Before anything was measured. The cost model of the controller has the same values.

/// Bytes per second, within a site and between sites.
const FIRST_RATES: [f64; 2] = [100e6, 10e6];
/// The fixed time of a copy.
const FIRST_FIXED_MS: f64 = 100.0;
/// The pause.
const FIRST_PAUSE_MS: f64 = 100.0;

/// The weight of a new measurement.
const WEIGHT: f64 = 0.3;
/// A copy of fewer bytes takes the fixed time.
const SMALL_BYTES: u64 = 1 << 20;
/// The mechanisms that migrations are learned from.
const MECHANISMS: [&str; 2] = ["albatross", "live"];

/// Smoothed costs of the migrations away from this node over one kind of link, as far as they were
/// measured.
#[derive(Clone, Copy, Debug)]
pub struct Predictor {
    first_rate: f64,
    bytes_per_s: Option<f64>,
    fixed_ms: Option<f64>,
    pause_ms: Option<f64>,
}

impl Predictor {
    fn new(first_rate: f64) -> Predictor {
        Predictor { first_rate, bytes_per_s: None, fixed_ms: None, pause_ms: None }
    }

    /// The cost of copying pages of this number of bytes, at most at a rate.
    pub fn predict(&self, bytes: u64, max_bytes_per_s: Option<u64>) -> Prediction {
        let rate = self.bytes_per_s.unwrap_or(self.first_rate);
        let rate = max_bytes_per_s.map_or(rate, |max| rate.min(max as f64));
        let fixed_ms = self.fixed_ms.unwrap_or(FIRST_FIXED_MS);
        Prediction {
            bytes,
            copy_ms: (fixed_ms + bytes as f64 * 1e3 / rate.max(1.0)) as u64,
            pause_ms: self.pause_ms.unwrap_or(FIRST_PAUSE_MS) as u64,
        }
    }

    fn learn(&mut self, report: &Report, is_limited: bool) {
        smooth(&mut self.pause_ms, report.freeze_ms as f64);
        if is_limited || report.throttled_ms > 0 || report.copy_ms == 0 {
            return;
        }
        let copy_ms = report.copy_ms as f64;
        let bytes = report.rounds.iter().map(|round| round.pages).sum::<u64>() * PAGE_SIZE as u64;
        if bytes < SMALL_BYTES {
            smooth(&mut self.fixed_ms, copy_ms);
            return;
        }
        // At most half of the time of a larger copy is fixed.
        let fixed_ms = self.fixed_ms.unwrap_or(FIRST_FIXED_MS).min(copy_ms / 2.0);
        smooth(&mut self.bytes_per_s, bytes as f64 * 1e3 / (copy_ms - fixed_ms));
    }
}

fn smooth(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + WEIGHT * (new - old)));
}

/// The predictors of a node: within a site, and between sites.
#[derive(Clone, Copy, Debug)]
pub struct Predictors {
    links: [Predictor; 2],
}

/// What migrations away from a node take, as far as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Duration of a migration of no bytes within a site, in milliseconds.
    pub fixed_ms: Option<f64>,
    /// Rate within a site, in bytes per second.
    pub site_bytes_per_s: Option<f64>,
    /// Rate between sites, in bytes per second.
    pub wan_bytes_per_s: Option<f64>,
}

impl Default for Predictors {
    fn default() -> Self {
        Predictors { links: FIRST_RATES.map(Predictor::new) }
    }
}

impl Predictors {
    /// The predictor of a link.
    pub fn link(&self, crosses_sites: bool) -> Predictor {
        self.links[usize::from(crosses_sites)]
    }

    /// Learns from a migration that has moved its partition. The durations of copies that a limit or
    /// their clients' latency has slowed down do not count.
    pub fn learn(&mut self, report: &Report, is_limited: bool, crosses_sites: bool) {
        if MECHANISMS.contains(&report.mechanism.as_str()) {
            self.links[usize::from(crosses_sites)].learn(report, is_limited);
        }
    }

    /// What migrations take.
    pub fn costs(&self) -> Costs {
        let [site, wan] = &self.links;
        let is_fixed_known = site.fixed_ms.is_some() || site.pause_ms.is_some();
        let fixed_ms = site.fixed_ms.unwrap_or(FIRST_FIXED_MS) + site.pause_ms.unwrap_or(FIRST_PAUSE_MS);
        Costs {
            fixed_ms: is_fixed_known.then_some(fixed_ms),
            site_bytes_per_s: site.bytes_per_s,
            wan_bytes_per_s: wan.bytes_per_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Round;

    /// A migration of this number of pages, which were compressed to a third.
    fn report(pages: u64, copy_ms: u64) -> Report {
        let bytes = pages * PAGE_SIZE as u64 / 3;
        Report {
            mechanism: "live".to_owned(),
            bytes,
            copy_ms,
            freeze_ms: 40,
            rounds: vec![Round { pages, bytes, ms: copy_ms }],
            ..Report::default()
        }
    }

    /// Pages of 10 MiB.
    const PAGES: u64 = (10 << 20) / PAGE_SIZE as u64;

    fn is_near(value: u64, expected: u64) -> bool {
        value.abs_diff(expected) * 100 <= expected
    }

    #[test]
    fn predictions_follow_what_was_measured() {
        let mut predictors = Predictors::default();
        assert_eq!(
            predictors.costs(),
            Costs { fixed_ms: None, site_bytes_per_s: None, wan_bytes_per_s: None }
        );
        for _ in 0..50 {
            predictors.learn(&report(10, 80), false, false);
            predictors.learn(&report(PAGES, 1_080), false, false);
        }
        let predicted = |predictors: &Predictors| predictors.link(false).predict(20 << 20, None);
        let prediction = predicted(&predictors);
        assert_eq!(prediction.bytes, 20 << 20);
        assert!(is_near(prediction.copy_ms, 2_080), "{prediction:?}");
        assert!(is_near(prediction.pause_ms, 40), "{prediction:?}");
        assert!(is_near(predictors.link(false).predict(0, None).copy_ms, 80), "a fixed time");
        assert!(is_near(predictors.link(false).predict(20_000_000, Some(1_000_000)).copy_ms, 20_080));

        // What was slowed down, and what is no copy of all pages, says nothing about the rate.
        let slow = report(PAGES, 60_000);
        predictors.learn(&slow, true, false);
        predictors.learn(&Report { throttled_ms: 10, ..slow.clone() }, false, false);
        for mechanism in ["bulk", "delta"] {
            let other = Report { mechanism: mechanism.to_owned(), freeze_ms: 20_000, ..slow.clone() };
            predictors.learn(&other, false, false);
        }
        assert_eq!(predicted(&predictors), prediction);
    }

    #[test]
    fn links_between_sites_have_a_separate_rate() {
        let mut predictors = Predictors::default();
        predictors.learn(&report(PAGES, 10_100), false, true);
        let costs = predictors.costs();
        assert_eq!(
            (costs.fixed_ms, costs.site_bytes_per_s),
            (None, None),
            "only the other link was measured"
        );
        let rate = (10 << 20) as f64 / 10.0;
        assert!((costs.wan_bytes_per_s.unwrap() / rate - 1.0).abs() < 1e-6, "{costs:?}");
        // A copy that is faster than the fixed time.
        predictors.learn(&report(PAGES, 100), false, false);
        let costs = predictors.costs();
        let rate = (10 << 20) as f64 / 0.05;
        assert!((costs.site_bytes_per_s.unwrap() / rate - 1.0).abs() < 1e-6, "{costs:?}");
        assert_eq!(costs.fixed_ms, Some(140.0));
    }
}

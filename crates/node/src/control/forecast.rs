//! The forecast of the total load, from its history since the controller was elected.

use std::time::Duration;

use fulmar_control::forecast::{Selector, SelectorSettings};
use fulmar_control::policy::Outlook;
use fulmar_elastic::settings::ControlSettings;

/// The horizon in starts of a node: a plan over time adds a node only if that pays within the horizon,
/// and a change takes the start of a node, and then the moves to it.
const STARTS: f64 = 4.0;
/// Bounds of the horizon, in steps.
const MIN_HORIZON: f64 = 15.0;
const MAX_HORIZON: f64 = 60.0;
/// One season, and the maximum of its steps.
const SEASON_S: f64 = 86_400.0;
const MAX_PERIOD: f64 = 2880.0;

/// A series of the mean load of each step.
pub(super) struct Forecast {
    selector: Selector,
    step_s: f64,
    /// Of the current step: when it began, and its samples.
    began_s: Option<f64>,
    sum: f64,
    count: u32,
    outlook: Outlook,
}

impl Forecast {
    /// An empty series.
    pub fn new(settings: &ControlSettings) -> Forecast {
        let step_s = step_s(settings);
        let horizon = (STARTS * settings.policy.node_start_s / step_s).ceil();
        let horizon = horizon.clamp(MIN_HORIZON, MAX_HORIZON) as usize;
        let period = (SEASON_S / step_s).clamp(1.0, MAX_PERIOD) as usize;
        let selector = Selector::new(SelectorSettings::new(horizon, period));
        let outlook = Outlook { step_s, ..Outlook::default() };
        Forecast { selector, step_s, began_s: None, sum: 0.0, count: 0, outlook }
    }

    /// Adds the load of one round. Values of a step that has ended become one value of the series.
    pub fn observe(&mut self, load: f64, at_s: f64) {
        let began_s = *self.began_s.get_or_insert(at_s);
        self.sum += load;
        self.count += 1;
        if at_s - began_s >= self.step_s {
            self.selector.observe(self.sum / f64::from(self.count));
            self.outlook = Outlook::from_selector(&self.selector, self.step_s);
            (self.began_s, self.sum, self.count) = (Some(at_s), 0.0, 0);
        }
    }

    /// The forecast of the newest step. Empty before the first one.
    pub fn outlook(&self) -> &Outlook {
        &self.outlook
    }
}

/// A step is at least a round, because a round adds one sample.
fn step_s(settings: &ControlSettings) -> f64 {
    settings.step.max(settings.round).max(Duration::from_millis(1)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_is_the_mean_of_its_rounds() {
        let settings = ControlSettings::default();
        let mut forecast = Forecast::new(&settings);
        for round in 0..12 {
            forecast.observe(if round % 2 == 0 { 1.0 } else { 3.0 }, f64::from(round) * 5.0);
        }
        assert!(forecast.outlook().loads.is_empty(), "the first step has not ended");
        forecast.observe(2.0, 60.0);
        let outlook = forecast.outlook();
        assert_eq!((outlook.loads.len(), outlook.step_s), (15, 60.0));
        assert!((outlook.loads[0] - 2.0).abs() < 0.2, "{outlook:?}");
    }
}

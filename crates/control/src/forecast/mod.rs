//! Forecasts of load: what it will be when an action takes effect.
//!
//! A forecast is made for the *horizon*: the time that acting takes, which is the start of a node
//! plus the moves to it. Series are samples at equal intervals.
//!
//! name | method
//! --- | ---
//! `last-value` | the newest value
//! `moving-average` | the mean of the newest values
//! `holt-winters` | exponential smoothing of level, trend and season
//! `arima` | [`arima`]: ShuttleDB's choice (4, step 1), order by AIC
//! `spar` | [`spar`]: P-Store's, for loads with a period
//!
//! No method is best for all loads. The [`Selector`] runs all of them and compares each forecast
//! with what happened. The policy gets the forecast of the method with the smallest error so far at
//! the horizon; [`Selector::errors`] are the metrics.

pub mod arima;
mod numeric;
mod smoothing;
pub mod spar;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use serde::Serialize;

pub use arima::Arima;
pub use smoothing::{HoltWinters, LastValue, MovingAverage};
pub use spar::Spar;

/// A forecasting method.
pub trait Method: Send {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Fits the method's parameters to a history, the oldest value first. Methods without
    /// parameters, and those for which the history is too short, keep what they have.
    fn fit(&mut self, _history: &[f64]) {}

    /// Forecasts the next `horizon` values. `None` if the history is too short.
    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>>;
}

/// Settings of a [`Selector`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelectorSettings {
    /// Steps from a forecast to the value that it is judged by.
    pub horizon: usize,
    /// Steps of one season, such as a day.
    pub period: usize,
    /// Steps between two fits.
    pub refit_every: usize,
    /// Values that are kept.
    pub max_history: usize,
    /// The weight of an error after one more step, from 0 to 1: errors of long ago count less.
    pub memory: f64,
}

impl SelectorSettings {
    /// Settings for a horizon and a period in steps: a fit per hour of minutes, four periods of
    /// history, and errors that lose half of their weight in 700 steps.
    pub fn new(horizon: usize, period: usize) -> SelectorSettings {
        let (horizon, period) = (horizon.max(1), period.max(1));
        SelectorSettings { horizon, period, refit_every: 60, max_history: 4 * period + 500, memory: 0.999 }
    }
}

/// The error of a method.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MethodError {
    /// The method.
    pub method: &'static str,
    /// Weighted mean of the absolute error at the horizon, in the unit of the series. `None` before
    /// the first forecast could be judged.
    pub error: Option<f64>,
    /// How many forecasts were judged.
    pub judged: u64,
}

struct Candidate {
    method: Box<dyn Method>,
    /// Forecasts that wait for their value, with the step that they are for.
    pending: VecDeque<(u64, f64)>,
    /// Weighted sums of errors and of weights.
    error: f64,
    weight: f64,
    judged: u64,
}

impl Candidate {
    fn mean_error(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.error / self.weight)
    }
}

/// Runs several methods on one series, and uses the one that has been best.
pub struct Selector {
    settings: SelectorSettings,
    history: Vec<f64>,
    step: u64,
    candidates: Vec<Candidate>,
}

impl Selector {
    /// All methods of the table above.
    pub fn new(settings: SelectorSettings) -> Selector {
        let SelectorSettings { horizon, period, .. } = settings;
        let methods: Vec<Box<dyn Method>> = vec![
            Box::new(LastValue),
            Box::new(MovingAverage { window: horizon.max(2) }),
            Box::new(HoltWinters::new(period)),
            Box::new(Arima::default()),
            Box::new(Spar::new(period, 2, 8, horizon)),
        ];
        Selector::with_methods(settings, methods)
    }

    /// Chosen methods. The first one is used until another one has been judged better.
    pub fn with_methods(settings: SelectorSettings, methods: Vec<Box<dyn Method>>) -> Selector {
        let candidate =
            |method| Candidate { method, pending: VecDeque::new(), error: 0.0, weight: 0.0, judged: 0 };
        let candidates = methods.into_iter().map(candidate).collect();
        Selector { settings, history: Vec::new(), step: 0, candidates }
    }

    /// Records the next value of the series, and judges the forecasts that were made for it.
    pub fn observe(&mut self, value: f64) {
        let settings = self.settings;
        self.step += 1;
        self.history.push(value);
        // Trimming by a quarter at a time keeps the cost per step constant.
        if self.history.len() > settings.max_history + settings.max_history / 4 {
            self.history.drain(..self.history.len() - settings.max_history);
        }
        let fits = self.step.is_multiple_of(settings.refit_every as u64);
        for candidate in &mut self.candidates {
            while candidate.pending.front().is_some_and(|(due, _)| *due <= self.step) {
                let Some((_, forecast)) = candidate.pending.pop_front() else { break };
                candidate.error = candidate.error * settings.memory + (forecast - value).abs();
                candidate.weight = candidate.weight * settings.memory + 1.0;
                candidate.judged += 1;
            }
            if fits {
                candidate.method.fit(&self.history);
            }
            let forecast = candidate.method.forecast(&self.history, settings.horizon);
            let at_horizon = forecast.and_then(|path| path.last().copied()).filter(|value| value.is_finite());
            if let Some(value) = at_horizon {
                candidate.pending.push_back((self.step + settings.horizon as u64, value));
            }
        }
    }

    /// The method with the smallest error so far at the horizon that can forecast now, and its
    /// forecast of the next `horizon` values. `None` before the first value.
    pub fn forecast(&self) -> Option<(&'static str, Vec<f64>)> {
        let mut order: Vec<&Candidate> = self.candidates.iter().collect();
        let error = |candidate: &Candidate| candidate.mean_error().unwrap_or(f64::INFINITY);
        order.sort_by(|left, right| error(left).total_cmp(&error(right)));
        order.into_iter().find_map(|candidate| {
            let path = candidate.method.forecast(&self.history, self.settings.horizon)?;
            path.iter().all(|value| value.is_finite()).then_some((candidate.method.name(), path))
        })
    }

    /// The error of each method.
    pub fn errors(&self) -> Vec<MethodError> {
        let error = |candidate: &Candidate| MethodError {
            method: candidate.method.name(),
            error: candidate.mean_error(),
            judged: candidate.judged,
        };
        self.candidates.iter().map(error).collect()
    }
}

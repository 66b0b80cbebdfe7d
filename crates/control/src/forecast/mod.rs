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
//!
//! module | what
//! --- | ---
//! [`series`] | a series in steps of the clock: holes, past forecasts, fits
//! [`set`] | the series of a cluster, its nodes and its busiest tenants
//! [`stored`] | a series as a short text, for the next controller

pub mod arima;
mod numeric;
pub mod series;
pub mod set;
mod smoothing;
pub mod spar;
pub mod stored;
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

/// The error of a method as it is kept for the next controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KnownError {
    /// The mean error.
    pub error: f64,
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
        Selector::with_methods(settings, all_methods(settings))
    }

    /// Chosen methods. The first one is used until another one has been judged better.
    pub fn with_methods(settings: SelectorSettings, methods: Vec<Box<dyn Method>>) -> Selector {
        let candidate =
            |method| Candidate { method, pending: VecDeque::new(), error: 0.0, weight: 0.0, judged: 0 };
        let candidates = methods.into_iter().map(candidate).collect();
        Selector { settings, history: Vec::new(), step: 0, candidates }
    }

    /// All methods, with a history and the errors of methods by name. Nothing is fitted yet.
    pub fn restored(
        settings: SelectorSettings,
        history: Vec<f64>,
        errors: impl Fn(&str) -> Option<KnownError>,
    ) -> Selector {
        let mut selector = Selector::new(settings);
        selector.step = history.len() as u64;
        selector.history = history;
        let max_weight = 1.0 / (1.0 - settings.memory).max(f64::MIN_POSITIVE);
        for candidate in &mut selector.candidates {
            let Some(KnownError { error, judged }) = errors(candidate.method.name()) else { continue };
            candidate.judged = judged;
            candidate.weight = (judged as f64).min(max_weight);
            candidate.error = error * candidate.weight;
        }
        selector
    }

    /// Forecasts for another horizon from now on, by all methods. Their errors so far are kept.
    /// Nothing is fitted yet.
    pub fn set_horizon(&mut self, horizon: usize) {
        self.settings.horizon = horizon.max(1);
        for (candidate, method) in self.candidates.iter_mut().zip(all_methods(self.settings)) {
            candidate.method = method;
            candidate.pending.clear();
        }
    }

    /// The settings.
    pub fn settings(&self) -> SelectorSettings {
        self.settings
    }

    /// The newest values, the oldest one first.
    pub fn history(&self) -> &[f64] {
        &self.history
    }

    /// Records the next value of the series, and judges the forecasts that were made for it. Fits
    /// the methods if it is time to.
    pub fn observe(&mut self, value: f64) {
        self.push(value, true);
        if self.step.is_multiple_of(self.settings.refit_every as u64) {
            self.fit();
        }
        self.predict();
    }

    /// [`Selector::observe`] without fits: the caller calls [`Selector::fit`].
    pub fn record(&mut self, value: f64) {
        self.push(value, true);
        self.predict();
    }

    /// Adds an estimate of a value that was not observed. No forecast is judged by it.
    pub fn fill(&mut self, value: f64) {
        self.push(value, false);
    }

    /// Fits all methods to the history.
    pub fn fit(&mut self) {
        for candidate in &mut self.candidates {
            candidate.method.fit(&self.history);
        }
    }

    fn push(&mut self, value: f64, judges: bool) {
        let settings = self.settings;
        self.step += 1;
        self.history.push(value);
        // Trimming by a quarter at a time keeps the cost per step constant.
        if self.history.len() > settings.max_history + settings.max_history / 4 {
            self.history.drain(..self.history.len() - settings.max_history);
        }
        for candidate in &mut self.candidates {
            while candidate.pending.front().is_some_and(|(due, _)| *due <= self.step) {
                let Some((_, forecast)) = candidate.pending.pop_front() else { break };
                if judges {
                    candidate.error = candidate.error * settings.memory + (forecast - value).abs();
                    candidate.weight = candidate.weight * settings.memory + 1.0;
                    candidate.judged += 1;
                }
            }
        }
    }

    /// Makes the forecasts that later values are compared with.
    fn predict(&mut self) {
        let horizon = self.settings.horizon;
        for candidate in &mut self.candidates {
            let forecast = candidate.method.forecast(&self.history, horizon);
            let at_horizon = forecast.and_then(|path| path.last().copied()).filter(|value| value.is_finite());
            if let Some(value) = at_horizon {
                candidate.pending.push_back((self.step + horizon as u64, value));
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

fn all_methods(settings: SelectorSettings) -> Vec<Box<dyn Method>> {
    let SelectorSettings { horizon, period, .. } = settings;
    vec![
        Box::new(LastValue),
        Box::new(MovingAverage { window: horizon.max(2) }),
        Box::new(HoltWinters::new(period)),
        Box::new(Arima::default()),
        Box::new(Spar::new(period, 2, 8, horizon)),
    ]
}

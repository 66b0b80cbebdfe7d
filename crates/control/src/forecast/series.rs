//! A series of loads in steps of the clock, with its past forecasts.
//!
//! Step `n` covers the time from `n` to `n + 1` times its length since 1970, at every controller.
//! Values that are added within a step become one: their mean.
//!
//! **Holes.** A step without values is interpolated when the next one ends. No forecast is judged by
//! an interpolated value. After a hole of more than a period the series starts again, because methods
//! that expect the values of the last period have none. A step that is not later than the newest one
//! (a clock that was set back) is dropped.
//!
//! **Fits** take milliseconds, so [`Series::end_step`] does not fit. A fit is due when half as many
//! values again have been recorded as at the last one, and every `refit_every` steps.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{KnownError, Selector, SelectorSettings};

/// A first fit needs this many values.
const MIN_FIT_VALUES: usize = 40;
/// Forecasts beyond this are cut, so that they fit into a 32-bit number.
const MAX_LOAD: f64 = 1e9;

/// What a series is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SeriesKind {
    /// The load of all partitions.
    Cluster,
    /// The load of the partitions of a node.
    Node,
    /// The load of a tenant.
    Tenant,
}

impl SeriesKind {
    /// Its name, as in `fulmar.forecast`.
    pub fn name(self) -> &'static str {
        match self {
            SeriesKind::Cluster => "cluster",
            SeriesKind::Node => "node",
            SeriesKind::Tenant => "tenant",
        }
    }
}

/// The error of a method at the horizon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MethodReport {
    /// The method.
    pub method: String,
    /// Its mean absolute error in CPUs; `None` before a forecast could be judged.
    pub error: Option<f64>,
    /// How many forecasts were judged.
    pub judged: u64,
}

/// A series with its forecasts, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesReport {
    /// What it is about.
    pub kind: SeriesKind,
    /// The name of the node or tenant; empty for the cluster.
    pub name: String,
    /// The method that is used.
    pub method: String,
    /// Length of a step in seconds.
    pub step_s: f64,
    /// The end of the newest step, in seconds since 1970.
    pub at_s: f64,
    /// Steps from a past forecast to the value that it was made for.
    pub horizon: usize,
    /// The loads of the newest steps, the oldest one first.
    pub loads: Vec<f32>,
    /// What was forecast for each of these steps, at the horizon before it.
    pub forecasts: Vec<Option<f32>>,
    /// The forecasts of the next steps.
    pub ahead: Vec<f32>,
    /// The mean load, for comparison with the errors.
    pub mean: f64,
    /// The error of each method.
    pub methods: Vec<MethodReport>,
}

impl SeriesReport {
    /// The mean absolute error of the method that is used.
    pub fn error(&self) -> Option<f64> {
        self.methods.iter().find(|of| of.method == self.method)?.error
    }

    /// An error as a share of the mean load. `None` without load.
    pub fn ratio(&self, error: Option<f64>) -> Option<f64> {
        error.filter(|_| self.mean > 0.0).map(|error| error / self.mean)
    }
}

/// A series.
pub struct Series {
    selector: Selector,
    /// The newest step.
    last: Option<u64>,
    /// The values of the current step.
    sum: f64,
    count: u32,
    /// The forecasts at the horizon that were made for steps, oldest first, at most `shown` of the
    /// past.
    past: VecDeque<(u64, f32)>,
    shown: usize,
    recorded: usize,
    /// `recorded` at the last fit.
    fitted: Option<usize>,
}

impl Series {
    /// An empty series. `shown` is the number of steps of a report.
    pub fn new(settings: SelectorSettings, shown: usize) -> Series {
        Series::with(Selector::new(settings), None, shown)
    }

    /// A series with a history that ends with the step `last`.
    pub fn restored(
        settings: SelectorSettings,
        shown: usize,
        (last, history): (u64, Vec<f64>),
        errors: impl Fn(&str) -> Option<KnownError>,
    ) -> Series {
        Series::with(Selector::restored(settings, history, errors), Some(last), shown)
    }

    fn with(selector: Selector, last: Option<u64>, shown: usize) -> Series {
        let recorded = selector.history().len();
        let past = VecDeque::new();
        Series { selector, last, sum: 0.0, count: 0, past, shown, recorded, fitted: None }
    }

    /// Adds a value to the current step.
    pub fn add(&mut self, load: f64) {
        if load.is_finite() {
            self.sum += load;
            self.count += 1;
        }
    }

    /// Ends a step: the values since the last end are its own. Returns true if there were any.
    pub fn end_step(&mut self, step: u64) -> bool {
        let (sum, count) = (std::mem::take(&mut self.sum), std::mem::take(&mut self.count));
        if count == 0 {
            return false;
        }
        self.push(step, sum / f64::from(count));
        true
    }

    fn push(&mut self, step: u64, value: f64) {
        if self.last.is_some_and(|last| step <= last) {
            return;
        }
        let settings = self.selector.settings();
        let missing = self.last.map_or(0, |last| step - last - 1);
        if missing > settings.period as u64 {
            *self = Series::new(settings, self.shown);
        } else if missing > 0 {
            let before = self.selector.history().last().copied().unwrap_or(value);
            for filled in 1..=missing {
                let share = filled as f64 / (missing + 1) as f64;
                self.selector.fill(before + (value - before) * share);
            }
        }
        self.selector.record(value);
        self.last = Some(step);
        self.recorded += 1;
        if let Some(forecast) = self.forecast().and_then(|(_, path)| path.last().copied()) {
            self.past.push_back((step + settings.horizon as u64, cut(forecast)));
        }
        while self.past.front().is_some_and(|(due, _)| due + (self.shown as u64) <= step) {
            self.past.pop_front();
        }
    }

    /// Forecasts for another horizon from now on.
    pub fn set_horizon(&mut self, horizon: usize) {
        self.selector.set_horizon(horizon);
        self.past.retain(|(due, _)| self.last.is_some_and(|last| *due <= last));
        self.fitted = None;
    }

    /// Returns true if the methods should be fitted again.
    pub fn is_fit_due(&self) -> bool {
        match self.fitted {
            None => self.selector.history().len() >= MIN_FIT_VALUES,
            Some(fitted) => {
                let new = self.recorded - fitted;
                new >= self.selector.settings().refit_every || 2 * new >= fitted
            }
        }
    }

    /// Fits the methods.
    pub fn fit(&mut self) {
        self.selector.fit();
        self.fitted = Some(self.recorded);
    }

    /// The method that has been best, and its forecast. `None` before the first value.
    pub fn forecast(&self) -> Option<(&'static str, Vec<f64>)> {
        self.selector.forecast()
    }

    /// The methods on the series.
    pub fn selector(&self) -> &Selector {
        &self.selector
    }

    /// The newest step.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// The newest value.
    pub fn newest(&self) -> Option<f64> {
        self.selector.history().last().copied()
    }

    /// The mean of the newest period.
    pub fn mean(&self) -> f64 {
        let history = self.selector.history();
        let newest = &history[history.len().saturating_sub(self.selector.settings().period)..];
        newest.iter().sum::<f64>() / newest.len().max(1) as f64
    }

    /// What is shown of the series. `None` before the first value.
    pub fn report(&self, kind: SeriesKind, name: &str, step_s: f64) -> Option<SeriesReport> {
        let last = self.last?;
        let (method, path) = self.forecast()?;
        let history = self.selector.history();
        let loads: Vec<f32> =
            history[history.len().saturating_sub(self.shown)..].iter().map(|load| *load as f32).collect();
        let first = (last + 1).saturating_sub(loads.len() as u64);
        let mut forecasts = vec![None; loads.len()];
        for (due, forecast) in &self.past {
            let index = due.checked_sub(first).and_then(|index| usize::try_from(index).ok());
            if let Some(place) = index.and_then(|index| forecasts.get_mut(index)) {
                *place = Some(*forecast);
            }
        }
        let methods = self.selector.errors().into_iter().map(|of| MethodReport {
            method: of.method.to_owned(),
            error: of.error,
            judged: of.judged,
        });
        Some(SeriesReport {
            kind,
            name: name.to_owned(),
            method: method.to_owned(),
            step_s,
            at_s: (last + 1) as f64 * step_s,
            horizon: self.selector.settings().horizon,
            loads,
            forecasts,
            ahead: path.into_iter().map(cut).collect(),
            mean: self.mean(),
            methods: methods.collect(),
        })
    }
}

/// A load is not negative.
fn cut(load: f64) -> f32 {
    load.clamp(0.0, MAX_LOAD) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> SelectorSettings {
        SelectorSettings::new(2, 10)
    }

    fn put(series: &mut Series, step: u64, load: f64) {
        series.add(load);
        assert!(series.end_step(step));
    }

    #[test]
    fn holes_are_interpolated_and_long_ones_start_the_series_again() {
        let mut series = Series::new(settings(), 20);
        put(&mut series, 100, 1.0);
        assert!(!series.end_step(101), "a step without values is a hole");
        assert!(!series.end_step(102));
        put(&mut series, 103, 4.0);
        assert_eq!(series.selector().history(), [1.0, 2.0, 3.0, 4.0]);
        let judged = |series: &Series| series.selector().errors().iter().map(|of| of.judged).sum::<u64>();
        assert_eq!(judged(&series), 0, "the forecast for step 102 is not judged by an interpolation");
        put(&mut series, 104, 4.0);
        put(&mut series, 105, 4.0);
        assert!(judged(&series) > 0);
        put(&mut series, 116, 7.0);
        assert_eq!(series.selector().history().len(), 6 + 11, "a hole of one period is interpolated");
        put(&mut series, 128, 7.0);
        assert_eq!(series.selector().history(), [7.0], "a longer hole is not");
    }

    #[test]
    fn steps_of_a_clock_that_was_set_back_are_dropped() {
        let mut series = Series::new(settings(), 20);
        put(&mut series, 100, 1.0);
        put(&mut series, 90, 9.0);
        put(&mut series, 100, 9.0);
        assert_eq!((series.selector().history(), series.last()), ([1.0].as_slice(), Some(100)));
        put(&mut series, 101, 2.0);
        assert_eq!(series.selector().history(), [1.0, 2.0]);
    }

    #[test]
    fn report_has_past_forecasts_with_what_happened() {
        let mut series = Series::new(settings(), 4);
        for step in 0..10 {
            put(&mut series, step, step as f64);
        }
        let report = series.report(SeriesKind::Node, "n1", 60.0).expect("it has values");
        assert_eq!((report.at_s, report.horizon, report.method.as_str()), (600.0, 2, "last-value"));
        assert_eq!(report.loads, [6.0, 7.0, 8.0, 9.0]);
        assert_eq!(report.forecasts, [4.0, 5.0, 6.0, 7.0].map(Some), "the last value, two steps before");
        assert_eq!(report.ahead, [9.0, 9.0]);
        assert_eq!((report.error(), report.mean), (Some(2.0), 4.5));
        assert_eq!(report.ratio(report.error()), Some(2.0 / 4.5));
    }

    #[test]
    fn fits_are_due_as_the_series_grows() {
        let mut series = Series::new(SelectorSettings::new(2, 1000), 4);
        let mut fits = Vec::new();
        for step in 0..250 {
            put(&mut series, step, 1.0);
            if series.is_fit_due() {
                series.fit();
                fits.push(step + 1);
            }
        }
        assert_eq!(fits, [40, 60, 90, 135, 195], "half as many again, and then every 60 steps");
    }
}

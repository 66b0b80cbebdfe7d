//! The baselines: last value, moving average, and Holt-Winters.

use super::Method;
use super::numeric::nelder_mead;

/// The forecast is the newest value.
#[derive(Debug, Default)]
pub struct LastValue;

impl Method for LastValue {
    fn name(&self) -> &'static str {
        "last-value"
    }

    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        history.last().map(|last| vec![*last; horizon])
    }
}

/// The forecast is the mean of the newest values.
#[derive(Debug)]
pub struct MovingAverage {
    /// How many values.
    pub window: usize,
}

impl Method for MovingAverage {
    fn name(&self) -> &'static str {
        "moving-average"
    }

    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        let window = &history[history.len().saturating_sub(self.window)..];
        let mean = window.iter().sum::<f64>() / window.len() as f64;
        (!window.is_empty()).then(|| vec![mean; horizon])
    }
}

/// Holt-Winters: exponential smoothing of level, trend and additive season.
///
/// ```text
/// level(t)  = alpha (y(t) - season(t - T)) + (1 - alpha) (level(t - 1) + trend(t - 1))
/// trend(t)  = beta (level(t) - level(t - 1)) + (1 - beta) trend(t - 1)
/// season(t) = gamma (y(t) - level(t)) + (1 - gamma) season(t - T)
/// y(t + h)  = level(t) + h trend(t) + season(t + h - T)
/// ```
///
/// The factors minimise the squared error of the forecasts of one step over the history. The method
/// needs two periods.
#[derive(Debug)]
pub struct HoltWinters {
    period: usize,
    /// alpha, beta, gamma, each from 0 to 1.
    factors: [f64; 3],
}

struct Smoothed {
    level: f64,
    trend: f64,
    /// One value per position in the period.
    season: Vec<f64>,
    squared_error: f64,
}

/// Evaluations of a fit.
const FIT_CALLS: usize = 60;

impl HoltWinters {
    /// A period in samples, at least 1.
    pub fn new(period: usize) -> HoltWinters {
        HoltWinters { period: period.max(1), factors: [0.3, 0.01, 0.2] }
    }

    /// Runs the recursion. It starts with the mean of the first period, no trend, and the first
    /// period's deviations from the mean.
    fn smooth(&self, [alpha, beta, gamma]: [f64; 3], history: &[f64]) -> Smoothed {
        let (first, rest) = history.split_at(self.period);
        let mean = first.iter().sum::<f64>() / self.period as f64;
        let season = first.iter().map(|value| value - mean).collect();
        let mut state = Smoothed { level: mean, trend: 0.0, season, squared_error: 0.0 };
        for (index, value) in rest.iter().enumerate() {
            let season = state.season[index % self.period];
            let expected = state.level + state.trend;
            state.squared_error += (value - expected - season).powi(2);
            let level = alpha * (value - season) + (1.0 - alpha) * expected;
            state.trend = beta * (level - state.level) + (1.0 - beta) * state.trend;
            state.season[index % self.period] = gamma * (value - level) + (1.0 - gamma) * season;
            state.level = level;
        }
        state
    }
}

/// Maps any number to (0, 1), and back.
fn logistic(value: f64) -> f64 {
    1.0 / (1.0 + (-value).exp())
}

fn logit(share: f64) -> f64 {
    (share / (1.0 - share)).ln()
}

impl Method for HoltWinters {
    fn name(&self) -> &'static str {
        "holt-winters"
    }

    fn fit(&mut self, history: &[f64]) {
        if history.len() < 2 * self.period {
            return;
        }
        let factors = |point: &[f64]| [logistic(point[0]), logistic(point[1]), logistic(point[2])];
        let start: Vec<f64> =
            self.factors.iter().map(|factor| logit(factor.clamp(1e-4, 1.0 - 1e-4))).collect();
        let (best, _) =
            nelder_mead(&start, 1.0, FIT_CALLS, |point| self.smooth(factors(point), history).squared_error);
        self.factors = factors(&best);
    }

    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        if history.len() < 2 * self.period {
            return None;
        }
        let state = self.smooth(self.factors, history);
        let next = history.len() - self.period;
        let ahead = |step: usize| {
            state.level + step as f64 * state.trend + state.season[(next + step - 1) % self.period]
        };
        Some((1..=horizon).map(ahead).collect())
    }
}

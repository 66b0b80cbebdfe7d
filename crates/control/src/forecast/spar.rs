//! SPAR: sparse periodic auto-regression, P-Store's forecast.
//!
//! ```text
//! y(t + tau) = sum over k = 1..n of a(k) y(t + tau - k T)  +  sum over j = 0..m-1 of b(j) d(t - j)
//! d(t - j)   = y(t - j) - 1/n sum over k = 1..n of y(t - j - k T)
//! ```
//!
//! The first sum is the long-term pattern: the same time in the last `n` periods of length `T`. The
//! second is how far the newest `m` values are off that pattern. The coefficients are fitted by
//! linear least squares for each `tau`. The first forecast needs `n` periods of history and enough
//! more for the fit.

use super::Method;
use super::numeric::least_squares;

/// At most this many rows are used for a fit; older ones are thinned out.
const MAX_ROWS: usize = 1500;

/// Rows per coefficient that a fit needs.
const MIN_ROWS_PER_COEFFICIENT: usize = 3;

/// A small ridge, because neighbouring values are almost equal.
const RIDGE: f64 = 1e-6;

/// Sparse periodic auto-regression.
#[derive(Debug)]
pub struct Spar {
    period: usize,
    periods: usize,
    recent: usize,
    horizon: usize,
    /// The coefficients `a`, `b` for each number of steps ahead.
    coefficients: Vec<Vec<f64>>,
}

impl Spar {
    /// A period of `period` samples, `periods` of them (`n`), and `recent` newest values (`m`), for
    /// forecasts of at most `horizon` steps.
    pub fn new(period: usize, periods: usize, recent: usize, horizon: usize) -> Spar {
        let (period, periods, recent) = (period.max(1), periods.max(1), recent.max(1));
        Spar { period, periods, recent, horizon, coefficients: Vec::new() }
    }

    /// Deviation of the value at `at` from the mean of the same time in earlier periods.
    fn deviation(&self, history: &[f64], at: usize) -> f64 {
        let past = (1..=self.periods).map(|k| history[at - k * self.period]).sum::<f64>();
        history[at] - past / self.periods as f64
    }

    /// The earliest time for which all regressors exist.
    fn first(&self) -> usize {
        self.periods * self.period + self.recent - 1
    }

    /// The regressors of `y(now + ahead)`.
    fn regressors(&self, history: &[f64], now: usize, ahead: usize) -> Vec<f64> {
        let long = (1..=self.periods).map(|k| history[now + ahead - k * self.period]);
        let short = (0..self.recent).map(|j| self.deviation(history, now - j));
        long.chain(short).collect()
    }
}

impl Method for Spar {
    fn name(&self) -> &'static str {
        "spar"
    }

    fn fit(&mut self, history: &[f64]) {
        let columns = self.periods + self.recent;
        let first = self.first();
        let horizon = self.horizon.min(self.period);
        let rows = history.len().saturating_sub(first + horizon);
        if rows < MIN_ROWS_PER_COEFFICIENT * columns {
            return;
        }
        let stride = rows.div_ceil(MAX_ROWS);
        let fit_one = |ahead: usize| {
            let times = (first..history.len() - ahead).rev().step_by(stride);
            let rows = times.map(|now| (self.regressors(history, now, ahead), history[now + ahead]));
            least_squares(columns, rows, RIDGE)
        };
        let fitted: Option<Vec<_>> = (1..=horizon).map(fit_one).collect();
        if let Some(fitted) = fitted {
            self.coefficients = fitted;
        }
    }

    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        let now = history.len().checked_sub(1)?;
        if now < self.first() || self.coefficients.len() < horizon {
            return None;
        }
        let ahead = |(step, coefficients): (usize, &Vec<f64>)| {
            let regressors = self.regressors(history, now, step);
            coefficients.iter().zip(regressors).map(|(coefficient, value)| coefficient * value).sum()
        };
        Some((1..).zip(self.coefficients.iter().take(horizon)).map(ahead).collect())
    }
}

//! ARIMA(p, d, q), fitted by conditional sum of squares, with the order chosen by AIC.
//!
//! ```text
//! w(t) = y(t) differenced d times, minus its mean if d = 0
//! w(t) = phi(1) w(t-1) + ... + phi(p) w(t-p) + e(t) + theta(1) e(t-1) + ... + theta(q) e(t-q)
//! ```
//!
//! The residuals `e` before the first `p` values are taken as zero, and the sum of the squared
//! later ones is minimised. The search is over partial autocorrelations in (-1, 1), which a
//! recursion of Durbin and Levinson maps to coefficients: every point of the search is a stationary
//! and invertible model, so forecasts cannot explode.
//!
//! `p` and `q` have the least AIC, `n ln(S / n) + 2 (p + q + 1)`, where all orders are compared on
//! the same `n` values. AIC does not compare different `d`, so `d` is chosen before, by the test of
//! Kwiatkowski, Phillips, Schmidt and Shin (as in Hyndman and Khandakar's algorithm).

use super::Method;
use super::numeric::nelder_mead;

/// An order of ARIMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Auto-regressive coefficients.
    pub p: usize,
    /// Differences.
    pub d: usize,
    /// Moving-average coefficients.
    pub q: usize,
}

/// A fitted model.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Its order.
    pub order: Order,
    /// Auto-regressive coefficients.
    pub phi: Vec<f64>,
    /// Moving-average coefficients.
    pub theta: Vec<f64>,
    /// The mean of the series, 0 if it is differenced.
    pub mean: f64,
    /// Akaike's information criterion.
    pub aic: f64,
}

/// The values that a fit uses: the newest ones.
const MAX_FIT_VALUES: usize = 400;

/// A fit needs this many values beyond those that it is conditioned on.
const MIN_FIT_VALUES: usize = 30;

const MAX_P: usize = 3;

/// KPSS: a series whose statistic is above this is differenced (the 5 % level).
const KPSS_CRITICAL: f64 = 0.463;
const MAX_Q: usize = 2;

/// Evaluations of a fit, per coefficient.
const FIT_CALLS: usize = 250;

/// Coefficients from partial autocorrelations.
fn coefficients(partial: &[f64]) -> Vec<f64> {
    let mut result: Vec<f64> = Vec::with_capacity(partial.len());
    for (k, last) in partial.iter().enumerate() {
        let previous = result.clone();
        for (value, mirrored) in result.iter_mut().zip(previous.iter().rev()) {
            *value -= last * mirrored;
        }
        debug_assert_eq!(result.len(), k, "one coefficient per step");
        result.push(*last);
    }
    result
}

fn difference(values: &[f64], times: usize) -> Vec<f64> {
    let mut values = values.to_vec();
    for _ in 0..times {
        values = values.windows(2).map(|pair| pair[1] - pair[0]).collect();
    }
    values
}

/// The statistic of KPSS for a constant mean: the squared partial sums of the deviations, over the
/// long-run variance with Bartlett's weights up to the lag `4 (n / 100)^(1/4)`.
fn kpss(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let deviations: Vec<f64> = values.iter().map(|value| value - mean).collect();
    let sums = deviations.iter().scan(0.0, |sum: &mut f64, deviation| {
        *sum += deviation;
        Some(*sum * *sum)
    });
    let lags = (4.0 * (n / 100.0).powf(0.25)) as usize;
    let covariance = |lag: usize| {
        deviations.iter().zip(deviations.iter().skip(lag)).map(|(left, right)| left * right).sum::<f64>() / n
    };
    let weighted = |lag: usize| 2.0 * (1.0 - lag as f64 / (lags as f64 + 1.0)) * covariance(lag);
    let variance = covariance(0) + (1..=lags).map(weighted).sum::<f64>();
    if variance > 0.0 { sums.sum::<f64>() / (n * n * variance) } else { 0.0 }
}

/// The residuals; zero for the first `p` values.
fn residuals(values: &[f64], phi: &[f64], theta: &[f64]) -> Vec<f64> {
    let mut errors: Vec<f64> = vec![0.0; values.len()];
    for t in phi.len()..values.len() {
        let past: f64 = phi.iter().enumerate().map(|(i, phi)| phi * values[t - 1 - i]).sum();
        let shocks: f64 = theta.iter().enumerate().take(t).map(|(j, theta)| theta * errors[t - 1 - j]).sum();
        errors[t] = values[t] - past - shocks;
    }
    errors
}

impl Model {
    /// Fits a model of an order. The first `skip` residuals of the differenced series do not count,
    /// at least `p`. `None` if the history is too short.
    fn fit(history: &[f64], order: Order, skip: usize) -> Option<Model> {
        let mut values = difference(history, order.d);
        let skip = skip.max(order.p);
        if values.len() < skip + MIN_FIT_VALUES {
            return None;
        }
        let mean = if order.d == 0 { values.iter().sum::<f64>() / values.len() as f64 } else { 0.0 };
        values.iter_mut().for_each(|value| *value -= mean);
        let split = |point: &[f64]| {
            let partial: Vec<f64> = point.iter().map(|value| value.tanh()).collect();
            let phi = coefficients(&partial[..order.p]);
            // An invertible moving average is a stationary process with the signs turned.
            let theta: Vec<f64> = coefficients(&partial[order.p..]).into_iter().map(|value| -value).collect();
            (phi, theta)
        };
        let sum_of_squares = |point: &[f64]| {
            let (phi, theta) = split(point);
            residuals(&values, &phi, &theta)[skip..].iter().map(|error| error * error).sum::<f64>()
        };
        let dimensions = order.p + order.q;
        let (point, sum) =
            nelder_mead(&vec![0.1; dimensions], 0.3, FIT_CALLS * dimensions.max(1), sum_of_squares);
        let (phi, theta) = split(&point);
        let n = (values.len() - skip) as f64;
        let aic = n * (sum / n).max(f64::MIN_POSITIVE).ln() + 2.0 * (dimensions + 1) as f64;
        Some(Model { order, phi, theta, mean, aic })
    }

    /// Fits a model of a given order.
    pub fn of_order(history: &[f64], order: Order) -> Option<Model> {
        Model::fit(history, order, 0)
    }

    /// Fits models with `p` up to 3, `d` up to 1 and `q` up to 2, and returns the one with the
    /// least AIC.
    pub fn of_least_aic(history: &[f64]) -> Option<Model> {
        let history = &history[history.len().saturating_sub(MAX_FIT_VALUES)..];
        let d = usize::from(kpss(history) > KPSS_CRITICAL);
        let orders = (0..=MAX_P).flat_map(|p| (0..=MAX_Q).map(move |q| Order { p, d, q }));
        let models = orders.filter_map(|order| Model::fit(history, order, MAX_P));
        models.min_by(|left, right| left.aic.total_cmp(&right.aic))
    }

    /// Forecasts the next values. `None` if the history is shorter than the order needs.
    pub fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        let Order { p, d, q } = self.order;
        // Old residuals are forgotten exponentially: a window is as good as the whole history.
        let history = &history[history.len().saturating_sub(MAX_FIT_VALUES)..];
        if history.len() < d + p.max(q) + 1 {
            return None;
        }
        let mut values = difference(history, d);
        values.iter_mut().for_each(|value| *value -= self.mean);
        let mut errors = residuals(&values, &self.phi, &self.theta);
        for _ in 0..horizon {
            let t = values.len();
            let past: f64 = self.phi.iter().enumerate().map(|(i, phi)| phi * values[t - 1 - i]).sum();
            let shocks: f64 = self.theta.iter().enumerate().map(|(j, theta)| theta * errors[t - 1 - j]).sum();
            values.push(past + shocks);
            errors.push(0.0);
        }
        let mut ahead: Vec<f64> =
            values[values.len() - horizon..].iter().map(|value| value + self.mean).collect();
        // Each difference is undone from the newest value of the series one difference below.
        for level in (0..d).rev() {
            let mut last = *difference(history, level).last()?;
            for value in &mut ahead {
                last += *value;
                *value = last;
            }
        }
        Some(ahead)
    }
}

/// ARIMA whose order and coefficients are fitted again now and then.
#[derive(Debug, Default)]
pub struct Arima {
    model: Option<Model>,
}

impl Method for Arima {
    fn name(&self) -> &'static str {
        "arima"
    }

    fn fit(&mut self, history: &[f64]) {
        self.model = Model::of_least_aic(history).or(self.model.take());
    }

    fn forecast(&self, history: &[f64], horizon: usize) -> Option<Vec<f64>> {
        self.model.as_ref()?.forecast(history, horizon)
    }
}

//! ARIMA against golden values of statsmodels 0.15, and the methods on series with known behaviour.

use super::arima::{Model, Order};
use super::*;

/// Noise of mean 0 and variance 1, the same as in the script that made the golden values: the sum
/// of 12 uniform values of a linear congruential generator, minus 6.
fn noise(count: usize) -> Vec<f64> {
    let mut state: u64 = 42;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f64>() - 6.0).collect()
}

fn arma(phi: &[f64], theta: &[f64]) -> Vec<f64> {
    let errors = noise(400);
    let mut values: Vec<f64> = Vec::new();
    for t in 0..errors.len() {
        let past: f64 =
            phi.iter().enumerate().filter(|(i, _)| t > *i).map(|(i, phi)| phi * values[t - 1 - i]).sum();
        let shocks: f64 = theta
            .iter()
            .enumerate()
            .filter(|(j, _)| t > *j)
            .map(|(j, theta)| theta * errors[t - 1 - j])
            .sum();
        values.push(errors[t] + past + shocks);
    }
    values
}

fn assert_near(found: &[f64], golden: &[f64], tolerance: f64) {
    let is_near = |(found, golden): (&f64, &f64)| (found - golden).abs() <= tolerance;
    assert!(
        found.len() == golden.len() && found.iter().zip(golden).all(is_near),
        "{found:?} is not {golden:?}"
    );
}

#[test]
fn pure_auto_regression_equals_least_squares() {
    // AutoReg(w, 2, trend='n').fit(): conditional least squares, the same criterion.
    let series: Vec<f64> = arma(&[0.6, 0.2], &[]).into_iter().map(|value| value + 10.0).collect();
    let model = Model::of_order(&series, Order { p: 2, d: 0, q: 0 }).expect("the series is long enough");
    assert_near(&model.phi, &[0.586_315_77, 0.185_013_4], 1e-4);
    let forecast = model.forecast(&series, 3).expect("the series is long enough");
    assert_near(&forecast, &[8.365_645_02, 8.620_125_7, 8.890_542_24], 1e-3);
}

#[test]
fn moving_averages_are_near_the_exact_likelihood() {
    // ARIMA(...).fit(): the exact likelihood, which differs from the conditional one by O(1 / n).
    let fit = |phi: &[f64], theta: &[f64], order: Order| {
        let mut series = arma(phi, theta);
        if order.d == 1 {
            series = series
                .iter()
                .scan(0.0, |sum, value| {
                    *sum += value;
                    Some(*sum)
                })
                .collect();
        }
        let model = Model::of_order(&series, order).expect("the series is long enough");
        let forecast = model.forecast(&series, 3).expect("the series is long enough");
        (model, forecast)
    };
    let (model, forecast) = fit(&[0.7], &[0.4], Order { p: 1, d: 0, q: 1 });
    assert_near(&[model.phi[0], model.theta[0]], &[0.687_749, 0.403_291], 0.01);
    assert_near(&forecast, &[-2.609_056, -1.792_846, -1.231_498], 0.05);

    let (model, forecast) = fit(&[0.5], &[0.3], Order { p: 1, d: 1, q: 1 });
    assert_near(&[model.phi[0], model.theta[0]], &[0.494_522, 0.298_552], 0.01);
    assert_near(&forecast, &[-2.307_824, -3.036_202, -3.396_4], 0.05);

    let (model, forecast) = fit(&[], &[0.5], Order { p: 0, d: 0, q: 1 });
    assert_near(&model.theta, &[0.497_163], 0.01);
    assert_near(&forecast, &[-0.537_096, -0.004_144, -0.004_144], 0.02);
}

#[test]
fn aic_chooses_a_small_order_that_explains_the_series() {
    let model = Model::of_least_aic(&arma(&[0.6], &[])).expect("the series is long enough");
    assert!(model.order.d == 0 && model.order.p >= 1, "{:?}", model.order);
    let walk: Vec<f64> = noise(400)
        .iter()
        .scan(0.0, |sum, value| {
            *sum += value;
            Some(*sum)
        })
        .collect();
    let model = Model::of_least_aic(&walk).expect("the series is long enough");
    assert!(
        model.order.d == 1 || model.phi.iter().sum::<f64>() > 0.95,
        "a random walk has a unit root: {model:?}"
    );
    assert_eq!(Model::of_least_aic(&[1.0; 20]), None, "20 values are too few");
}

/// A daily pattern of 48 samples with noise.
fn daily(days: usize) -> Vec<f64> {
    let noise = noise(days * 48);
    let at = |(t, noise): (usize, f64)| {
        let angle = std::f64::consts::TAU * (t % 48) as f64 / 48.0;
        100.0 + 50.0 * angle.sin() + 20.0 * (3.0 * angle).cos() + noise
    };
    noise.into_iter().enumerate().map(at).collect()
}

#[test]
fn seasonal_methods_learn_the_pattern() {
    let series = daily(12);
    let (history, future) = series.split_at(11 * 48);
    let error = |mut method: Box<dyn Method>| {
        method.fit(history);
        let forecast = method.forecast(history, 12).expect("eleven days are enough");
        forecast.iter().zip(future).map(|(forecast, value)| (forecast - value).abs()).sum::<f64>() / 12.0
    };
    let last = error(Box::new(LastValue));
    for seasonal in [error(Box::new(HoltWinters::new(48))), error(Box::new(Spar::new(48, 3, 4, 12)))] {
        assert!(seasonal < 3.0 && seasonal < last / 5.0, "{seasonal} against {last}");
    }
}

#[test]
fn methods_with_too_little_history_do_not_forecast() {
    let settings = SelectorSettings::new(12, 48);
    let selector = Selector::new(settings);
    assert!(selector.forecast().is_none(), "nothing was observed yet");
    let mut spar = Spar::new(48, 3, 4, 12);
    spar.fit(&daily(2));
    assert_eq!(spar.forecast(&daily(2), 12), None);
    assert_eq!(HoltWinters::new(48).forecast(&daily(1), 12), None);
    assert_eq!(Arima::default().forecast(&daily(1), 12), None);
}

#[test]
fn the_selector_uses_the_method_that_has_been_best() {
    let mut selector = Selector::new(SelectorSettings::new(12, 48));
    let series = daily(14);
    for value in &series[..10] {
        selector.observe(*value);
    }
    assert!(selector.forecast().is_some(), "the last value is a forecast from the first value on");
    for value in &series[10..] {
        selector.observe(*value);
    }
    let (method, path) = selector.forecast().expect("it has a history");
    assert!(["spar", "holt-winters"].contains(&method), "{method}: {:?}", selector.errors());
    assert_eq!(path.len(), 12);
    let error = |name: &str| {
        let errors = selector.errors();
        errors.iter().find(|error| error.method == name).and_then(|error| error.error).expect("it was judged")
    };
    assert!(error(method) <= 0.2 * error("last-value"), "{:?}", selector.errors());
}

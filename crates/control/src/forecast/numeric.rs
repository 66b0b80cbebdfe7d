//! The two numerical methods that the fits need: least squares, and a minimum without derivatives.

/// Solves `min |A x - b|^2 + ridge |x|^2` by the normal equations and Cholesky's decomposition.
/// Rows are visited once. `None` without rows, or if the values are not finite.
pub(super) fn least_squares(
    columns: usize,
    rows: impl Iterator<Item = (Vec<f64>, f64)>,
    ridge: f64,
) -> Option<Vec<f64>> {
    let mut normal = vec![vec![0.0; columns]; columns];
    let mut right = vec![0.0; columns];
    let mut count = 0;
    for (row, value) in rows {
        count += 1;
        for (i, left) in row.iter().enumerate() {
            right[i] += left * value;
            for (j, other) in row.iter().enumerate().take(i + 1) {
                normal[i][j] += left * other;
            }
        }
    }
    if count == 0 {
        return None;
    }
    // The ridge is relative to the size of the values, so that units do not matter.
    let trace: f64 = (0..columns).map(|i| normal[i][i]).sum();
    let extra = ridge * (trace / columns as f64).max(f64::MIN_POSITIVE);
    for (i, row) in normal.iter_mut().enumerate() {
        row[i] += extra;
    }
    cholesky_solve(normal, right)
}

fn cholesky_solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Option<Vec<f64>> {
    let n = right.len();
    for i in 0..n {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|k| matrix[i][k] * matrix[j][k]).sum();
            let value = matrix[i][j] - dot;
            if i == j {
                if value <= 0.0 || !value.is_finite() {
                    return None;
                }
                matrix[i][i] = value.sqrt();
            } else {
                matrix[i][j] = value / matrix[j][j];
            }
        }
    }
    for i in 0..n {
        let dot: f64 = (0..i).map(|k| matrix[i][k] * right[k]).sum();
        right[i] = (right[i] - dot) / matrix[i][i];
    }
    for i in (0..n).rev() {
        let dot: f64 = (i + 1..n).map(|k| matrix[k][i] * right[k]).sum();
        right[i] = (right[i] - dot) / matrix[i][i];
    }
    right.iter().all(|value| value.is_finite()).then_some(right)
}

/// Minimises a function with the simplex method of Nelder and Mead, from a start and with a first
/// step per dimension. Ends after `max_calls` evaluations, or when the values of the
/// simplex differ by less than 1e-12 of the least.
pub(super) fn nelder_mead(
    start: &[f64],
    step: f64,
    max_calls: usize,
    function: impl Fn(&[f64]) -> f64,
) -> (Vec<f64>, f64) {
    let value = |point: &[f64]| {
        let value = function(point);
        if value.is_nan() { f64::INFINITY } else { value }
    };
    let n = start.len();
    let mut simplex: Vec<(Vec<f64>, f64)> = vec![(start.to_vec(), value(start))];
    for dimension in 0..n {
        let mut point = start.to_vec();
        point[dimension] += step;
        let at = value(&point);
        simplex.push((point, at));
    }
    let mut calls = n + 1;
    while calls < max_calls && n > 0 {
        simplex.sort_by(|left, right| left.1.total_cmp(&right.1));
        let (best, worst) = (simplex[0].1, simplex[n].1);
        if (worst - best).abs() <= 1e-12 * (best.abs() + 1e-300) {
            break;
        }
        let mean = |i: usize| simplex[..n].iter().map(|(point, _)| point[i]).sum::<f64>() / n as f64;
        let centre: Vec<f64> = (0..n).map(mean).collect();
        let along = |factor: f64| -> (Vec<f64>, f64) {
            let point: Vec<f64> = centre
                .iter()
                .zip(&simplex[n].0)
                .map(|(centre, worst)| centre + factor * (worst - centre))
                .collect();
            let at = value(&point);
            (point, at)
        };
        let reflected = along(-1.0);
        calls += 1;
        if reflected.1 < best {
            let expanded = along(-2.0);
            calls += 1;
            simplex[n] = if expanded.1 < reflected.1 { expanded } else { reflected };
        } else if reflected.1 < simplex[n - 1].1 {
            simplex[n] = reflected;
        } else {
            let contracted = along(if reflected.1 < worst { -0.5 } else { 0.5 });
            calls += 1;
            if contracted.1 < worst.min(reflected.1) {
                simplex[n] = contracted;
            } else {
                let first = simplex[0].0.clone();
                for (point, at) in &mut simplex[1..] {
                    for (coordinate, first) in point.iter_mut().zip(&first) {
                        *coordinate = first + 0.5 * (*coordinate - first);
                    }
                    *at = value(point);
                }
                calls += n;
            }
        }
    }
    simplex.sort_by(|left, right| left.1.total_cmp(&right.1));
    simplex.swap_remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_squares_finds_a_plane() {
        let rows = (0..20).map(|i| {
            let (x, y) = (f64::from(i), f64::from(i * i % 7));
            (vec![x, y], 3.0 * x - 2.0 * y)
        });
        let solution = least_squares(2, rows, 0.0).expect("the rows are independent");
        assert!((solution[0] - 3.0).abs() < 1e-9 && (solution[1] + 2.0).abs() < 1e-9, "{solution:?}");
        assert_eq!(least_squares(2, std::iter::empty(), 0.0), None);
    }

    #[test]
    fn nelder_mead_finds_rosenbrocks_minimum() {
        let rosenbrock = |p: &[f64]| (1.0 - p[0]).powi(2) + 100.0 * (p[1] - p[0] * p[0]).powi(2);
        let (point, value) = nelder_mead(&[-1.2, 1.0], 0.5, 2000, rosenbrock);
        assert!(value < 1e-8 && (point[0] - 1.0).abs() < 1e-3, "{point:?} {value}");
    }
}

//! `model-late-percent`: at what utilisation tenants of one real node get late, which the simulator's
//! model puts at 80 %. The notes have the mean latency at some utilisations beside the model's.
//!
//! The utilisation is that of the CPU, as in the policy. Under load a node serves more transactions for
//! the same CPU time, because it commits them in groups.

use std::time::{Duration, Instant};

use super::elastic::{CPUS, Elastic, GATEWAY, Placement, Watched};
use super::{Bench, MODEL, case};
use crate::arrival::Arrival;
use crate::compare::result::CaseResult;

const TENANTS: u32 = 10;
/// Rates, in shares of the capacity. The latency at the first one is the unit.
const RATES: [f64; 7] = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95];
/// A tenant is late from this multiple of the service time on, as in the model.
const LATE: f64 = 5.0;
const MAX_ROUNDS: u32 = 3;

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let rounds = bench.arguments.rounds.min(MAX_ROUNDS);
    let (mut knees, mut notes) = (Vec::new(), Vec::new());
    let time = Duration::from_secs(bench.arguments.seconds);
    for round in 1..=rounds {
        let elastic = Elastic::start(
            bench.binary,
            &|text| bench.progress.step(text),
            (1, Placement::Spread),
            TENANTS,
            None,
        )
        .await?;
        let mut points = Vec::new();
        let processes = elastic.cluster.processes(GATEWAY + 1)?;
        for share in RATES {
            bench.progress.step(&format!("{MODEL}: round {round} of {rounds}, {:.0} %", share * 100.0));
            let rate = Arrival::poisson(elastic.capacity_tps * share);
            let (begun, before) = (Instant::now(), processes.cpu()?);
            let report = elastic.load(&elastic.databases, rate, time, &Watched::default()).await?;
            let used = processes.cpu()?.saturating_sub(before).as_secs_f64();
            points.push((used / begun.elapsed().as_secs_f64() / CPUS, report.latency.mean_ms));
        }
        // The model's latency is the service time divided by the idle share.
        let service_ms = points[0].1 * (1.0 - points[0].0);
        let text = |(utilisation, mean_ms): &(f64, f64)| {
            let model_ms = service_ms / (1.0 - utilisation);
            format!("{:.0} %: {mean_ms:.1} ms (model {model_ms:.1})", utilisation * 100.0)
        };
        let points_text: Vec<String> = points.iter().map(text).collect();
        notes.push(format!(
            "round {round}: capacity {:.0} tx/s; {}",
            elastic.capacity_tps,
            points_text.join(", ")
        ));
        knees.push(knee(&points, LATE * service_ms) * 100.0);
    }
    let result = CaseResult::value(case(MODEL)?, knees);
    Ok(vec![notes.into_iter().fold(result, CaseResult::with_note)])
}

/// The utilisation at which the latency reaches a bound, between the points around it.
fn knee(points: &[(f64, f64)], bound_ms: f64) -> f64 {
    for pair in points.windows(2) {
        let [(left, below_ms), (right, above_ms)] = [pair[0], pair[1]];
        if above_ms >= bound_ms {
            let share = ((bound_ms - below_ms) / (above_ms - below_ms)).clamp(0.0, 1.0);
            return left + (right - left) * share;
        }
    }
    points.last().map_or(1.0, |(utilisation, _)| *utilisation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knee_is_between_points() {
        let points = [(0.2, 1.0), (0.6, 2.0), (0.8, 6.0)];
        assert!((knee(&points, 4.0) - 0.7).abs() < 1e-9);
        assert!((knee(&points, 9.0) - 0.8).abs() < 1e-9, "never reached");
        assert!((knee(&points, 0.5) - 0.2).abs() < 1e-9);
    }
}

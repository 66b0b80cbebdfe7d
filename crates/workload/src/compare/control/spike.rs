//! `spike-relief-s` and `spike-failed`: the load of one of 30 tenants jumps to five times, which
//! overloads its node. The controller moves tenants away.

use std::time::Duration;

use tokio::time::Instant;

use super::elastic::{Elastic, Placement, Second, Watched};
use super::{Bench, FAILED, RELIEF, case};
use crate::arrival::Arrival;
use crate::compare::result::CaseResult;

const OWNERS: usize = 3;
const TENANTS: u32 = 30;
/// The share of the capacity that all tenants together need before the jump, and the share of its node's
/// load that the tenant has. With the jump its node needs 94 % of what it can serve at most, 72 % of it
/// for the tenant alone, and all nodes together need 55 % of theirs. (Below its limit a node needs more
/// CPU time per transaction, because fewer share an object of the log.)
const BASE_LOAD: f64 = 0.36;
const SHARE: f64 = 0.4;
/// By how much the load of the tenant grows, in multiples of what it was.
const GROWTH: f64 = 4.0;
/// Before the jump.
const QUIET: Duration = Duration::from_secs(15);
/// From the jump to the end.
const WATCH: Duration = Duration::from_secs(75);
const MAX_ROUNDS: u32 = 3;

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let rounds = bench.arguments.rounds.min(MAX_ROUNDS);
    let (mut reliefs, mut failures, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        let elastic = Elastic::start(
            bench.binary,
            &|text| bench.progress.step(text),
            (OWNERS, Placement::Spread),
            TENANTS,
            None,
        )
        .await?;
        bench.progress.step(&format!("{RELIEF}: round {round} of {rounds}"));
        let nodes = OWNERS.to_string();
        let settings = [
            ("mode", "on"),
            ("policy", "thresholds"),
            ("min_nodes", &*nodes),
            ("max_nodes", &*nodes),
            ("round", "1 s"),
            ("hold_up", "3 s"),
            ("cool_down", "30 s"),
        ];
        elastic.configure(&settings).await?;
        let spiking = elastic.databases[..1].to_vec();
        // The first tenant is at the first owner, as is each third one.
        let is_neighbour = |(number, _): &(usize, &String)| number % OWNERS == 0 && *number > 0;
        let neighbours: Vec<String> =
            elastic.databases.iter().enumerate().filter(is_neighbour).map(name).collect();
        let is_other = |(number, _): &(usize, &String)| number % OWNERS != 0;
        let others: Vec<String> = elastic.databases.iter().enumerate().filter(is_other).map(name).collect();
        let of_node = elastic.capacity_tps * BASE_LOAD / OWNERS as f64;
        let rate = of_node * SHARE;
        let (spike, near, far) = (Watched::default(), Watched::default(), Watched::default());
        let (begun, time) = (Instant::now(), QUIET + WATCH);
        let jump = async {
            tokio::time::sleep(QUIET).await;
            let jumped = Instant::now();
            let report = elastic.load(&spiking, Arrival::poisson(rate * GROWTH), WATCH, &spike).await?;
            anyhow::Ok((jumped, report))
        };
        let ((jumped, first), second, third, fourth) = tokio::try_join!(
            jump,
            elastic.load(&spiking, Arrival::poisson(rate), time, &spike),
            elastic.load(&neighbours, Arrival::poisson(of_node - rate), time, &near),
            elastic.load(&others, Arrival::poisson(of_node * (OWNERS - 1) as f64), time, &far),
        )?;
        let last_late = |watched: &Watched| {
            let late = watched.since(jumped).into_iter().filter(Second::is_late);
            late.map(|second| second.at.duration_since(jumped).as_secs_f64()).fold(0.0, f64::max)
        };
        let late_before = |watched: &Watched| {
            let before = |second: &Second| second.at < jumped && second.is_late();
            watched.since(begun).iter().filter(|second| before(second)).count()
        };
        let relief = last_late(&spike).max(last_late(&near));
        let reports = [first, second, third, fourth];
        let failed: u64 = reports.iter().map(|report| report.failed + report.lost_connections).sum();
        let sql = "SELECT count(*) FROM fulmar.migrations WHERE step = 'moved' AND mechanism <> 'flush'";
        let moves = elastic.column(sql).await?.pop().unwrap_or_default();
        notes.push(format!(
            "round {round}: capacity {:.0} tx/s; last late second of the tenant {:.0} s, of its neighbours \
             {:.0} s, of the others {:.0} s after the jump; {} late seconds before it; {moves} moves; \
             {failed} failed",
            elastic.capacity_tps,
            last_late(&spike),
            last_late(&near),
            last_late(&far),
            late_before(&spike) + late_before(&near) + late_before(&far),
        ));
        for (whose, watched) in [("tenant", &spike), ("neighbours", &near), ("others", &far)] {
            notes.push(format!("p99 of the {whose} in ms, each 5 s: {}", watched.timeline(begun)));
        }
        notes.extend(elastic.decisions().await?);
        reliefs.push(relief);
        failures.push(failed as f64);
    }
    let relief = CaseResult::value(case(RELIEF)?, reliefs);
    let relief = notes.into_iter().fold(relief, CaseResult::with_note);
    Ok(vec![relief, CaseResult::value(case(FAILED)?, failures)])
}

fn name((_, name): (usize, &String)) -> String {
    name.clone()
}

//! The cases without servers: how fast and how good planners, policies and forecasts are. All but the
//! times are the same in each run.

use std::time::Instant;

use anyhow::Context;
use fulmar_control::planners::{self, PLANNERS, Planner, cases};
use fulmar_control::policy::{Settings, when::RULES};
use fulmar_control::simulator::{Report, STATIC, Simulation, Trace, trace::TRACES};

use super::{Bench, case};
use crate::compare::result::CaseResult;

pub(super) const PLANNER_MS: &str = "planner-ms";
pub(super) const PLANNER_GAP: &str = "planner-gap-percent";
pub(super) const ROUND: &str = "simulate-round-s";
pub(super) const COST: &str = "simulate-cost-ratio";
pub(super) const LATE: &str = "simulate-late-percent";
pub(super) const GAIN: &str = "forecast-gain";

/// The traces that the bounds are for, and the policy.
const BOUND_TRACES: [&str; 2] = ["sine", "worldcup"];
const POLICY: &str = "planned";
/// The simulated cluster of the policies.
const NODES: usize = 20;
const TENANTS: usize = 1000;
const MINUTES: usize = 4 * 24 * 60;
/// Time limit of the integer programs, in seconds. Ours takes far less.
const TIME_LIMIT_S: f64 = 5.0;
/// Simulated minutes of the large cluster: the load rises in the last third of them.
const LARGE_MINUTES: usize = 30;

/// Time of our planner for 1,000 partitions and 10,000 hot keys on 100 nodes, and its distance to
/// the bound in E-Store's nine cases (its figure 9).
pub(super) fn planners(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let settings = planners::Settings { time_limit_s: TIME_LIMIT_S, ..planners::Settings::default() };
    let ours = planners::planner(Settings::default().planner).context("the planner does not exist")?;
    let large = cases::large(100, 1000, 10_000);
    let mut times = Vec::new();
    for round in 1..=bench.arguments.rounds {
        bench.progress.step(&format!("{PLANNER_MS}: round {round} of {}", bench.arguments.rounds));
        let start = Instant::now();
        planners::plan(&large, ours, &settings);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut highest = 0.0_f64;
    let mut notes = Vec::new();
    for (name, picture) in cases::estore() {
        bench.progress.step(&format!("{PLANNER_GAP}: {name}"));
        let gap = |planner: &dyn Planner| planners::plan(&picture, planner, &settings).evaluation.gap_percent;
        highest = highest.max(gap(ours));
        let gaps = PLANNERS.map(|planner| format!("{} {:.1} %", planner.name(), gap(planner)));
        notes.push(format!("{name}: {}", gaps.join(", ")));
    }
    let gap = CaseResult::value(case(PLANNER_GAP)?, vec![highest]);
    Ok(vec![CaseResult::value(case(PLANNER_MS)?, times), notes.into_iter().fold(gap, CaseResult::with_note)])
}

/// Policies on all traces, and the forecasts that they get. The values are the worse ones of sine and
/// World Cup; the notes have all.
pub(super) fn policies(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let names: Vec<&str> = RULES.into_iter().chain([STATIC]).collect();
    let (mut cost, mut late, mut gain) = (0.0_f64, 0.0_f64, 0.0_f64);
    let (mut costs, mut gains) = (Vec::new(), Vec::new());
    for name in TRACES {
        bench.progress.step(&format!("{COST}: {name}"));
        let settings = Settings::default();
        let trace = Trace::named(name, MINUTES)?;
        let simulation = Simulation { nodes: NODES, tenants: TENANTS, trace, settings };
        let report = simulation.run(&names).context("a policy does not exist")?;
        let ours = report.policies.iter().find(|policy| policy.policy == POLICY);
        if let Some(ours) = ours.filter(|_| BOUND_TRACES.contains(&name)) {
            (cost, late) = (cost.max(ours.cost_ratio), late.max(ours.late_percent));
            gain = gain.max(report.forecast.gain);
        }
        costs.extend(policy_notes(name, &report));
        gains.push(format!("{name}: {:.3}", report.forecast.gain));
    }
    let cost = CaseResult::value(case(COST)?, vec![cost]);
    Ok(vec![
        costs.into_iter().fold(cost, CaseResult::with_note),
        CaseResult::value(case(LATE)?, vec![late]),
        gains.into_iter().fold(CaseResult::value(case(GAIN)?, vec![gain]), CaseResult::with_note),
    ])
}

fn policy_notes(trace: &str, report: &Report) -> Vec<String> {
    let note = |of: &fulmar_control::simulator::PolicyReport| {
        format!(
            "{trace}, {}: cost {:.3} ({:.2} of static), late {:.3} %, {} moves, +{} -{} nodes",
            of.policy,
            of.cost_ratio,
            of.over_static,
            of.late_percent,
            of.moves,
            of.nodes_added,
            of.nodes_removed
        )
    };
    report.policies.iter().map(note).collect()
}

/// A control round for 10,000 nodes and a million tenants, while the load rises.
pub(super) fn round(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    bench.progress.step(&format!("{ROUND}: {LARGE_MINUTES} rounds"));
    let trace = Trace::named("hockey-stick", LARGE_MINUTES)?;
    let settings = Settings::default();
    let simulation = Simulation { nodes: 10_000, tenants: 1_000_000, trace, settings };
    let start = Instant::now();
    let report = simulation.run(&[POLICY]).context("the policy does not exist")?;
    let seconds = start.elapsed().as_secs_f64() / LARGE_MINUTES as f64;
    let moves: usize = report.policies.iter().map(|policy| policy.moves).sum();
    let result = CaseResult::value(case(ROUND)?, vec![seconds]);
    Ok(vec![result.with_note(format!("with the simulation itself; {moves} moves"))])
}

//! Prints the figures of planners and policies.
//!
//! `cargo run --release -p fulmar-control --example figures -- planners|policies|round`

use std::time::Instant;

use fulmar_control::planners::{PLANNERS, Settings, cases, plan};
use fulmar_control::policy::{self, when::RULES};
use fulmar_control::simulator::{STATIC, Simulation, Trace, trace::TRACES};

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("planners") => planners(),
        Some("policies") => policies(),
        Some("round") => round(),
        _ => eprintln!("usage: figures planners|policies|round"),
    }
}

/// All policies on all traces: 20 nodes, 1,000 tenants, four days.
fn policies() {
    for name in TRACES {
        let trace = Trace::named(name, 96 * 60).expect("it is a trace");
        let simulation =
            Simulation { nodes: 20, tenants: 1000, trace, settings: policy::Settings::default() };
        let start = Instant::now();
        let names: Vec<&str> = RULES.into_iter().chain([STATIC]).collect();
        let report = simulation.run(&names).expect("the policies exist");
        println!("{name}: forecast gain {:.3}, {:.1} s", report.forecast.gain, start.elapsed().as_secs_f64());
        for error in &report.forecast.methods {
            println!("    {:16} {:?}", error.method, error.error);
        }
        for policy in &report.policies {
            println!(
                "  {:12} cost {:.3}  of static {:.3}  late {:7.3} %  {:6} moves  +{} -{} nodes  {} violations",
                policy.policy,
                policy.cost_ratio,
                policy.over_static,
                policy.late_percent,
                policy.moves,
                policy.nodes_added,
                policy.nodes_removed,
                policy.cool_down_violations,
            );
        }
    }
}

/// Control rounds for 10,000 nodes and a million tenants, while the load rises.
fn round() {
    let minutes = 120;
    let trace = Trace::named("hockey-stick", minutes).expect("it is a trace");
    let settings = policy::Settings::default();
    let simulation = Simulation { nodes: 10_000, tenants: 1_000_000, trace, settings };
    let start = Instant::now();
    let report = simulation.run(&["planned"]).expect("the policy exists");
    let seconds = start.elapsed().as_secs_f64();
    let policy = &report.policies[0];
    println!(
        "{minutes} rounds in {seconds:.1} s, {:.2} s each; {} moves, {} nodes added, {:.2} % late",
        seconds / minutes as f64,
        policy.moves,
        policy.nodes_added,
        policy.late_percent
    );
}

/// All planners on E-Store's nine cases, and on the large case.
fn planners() {
    let settings = Settings { time_limit_s: 5.0, ..Settings::default() };
    let mut pictures = cases::estore();
    pictures.push(("large".to_owned(), cases::large(100, 1000, 10_000)));
    for (name, picture) in pictures {
        for planner in PLANNERS {
            let start = Instant::now();
            let plan = plan(&picture, planner, &settings);
            let evaluation = plan.evaluation;
            println!(
                "{name:11} {:16} {:8.1} ms  gap {:6.1} %  {:6} moves  {:8.1} MB  {:7.1} s",
                plan.planner,
                start.elapsed().as_secs_f64() * 1e3,
                evaluation.gap_percent,
                evaluation.moves,
                evaluation.bytes as f64 / 1e6,
                evaluation.seconds,
            );
        }
    }
}

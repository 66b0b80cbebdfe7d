//! `fulmar simulate`: runs policies on a load trace on virtual time, and compares what they cost.

use std::path::Path;

use anyhow::Context;
use fulmar_control::planners;
use fulmar_control::policy::Settings;
use fulmar_control::policy::when::RULES;
use fulmar_control::simulator::{Report, STATIC, Simulation, Trace};
use fulmar_workload::report::line_chart;

use crate::cli::SimulateArgs;
use crate::output;
use crate::plan::align_numbers;
use crate::size::Bytes;

/// Runs `fulmar simulate`.
pub fn run(arguments: SimulateArgs) -> anyhow::Result<()> {
    let trace = trace(&arguments)?;
    let planner = planners::planner(&arguments.planner).context("unknown planner")?.name();
    let simulation = Simulation {
        nodes: arguments.nodes as usize,
        tenants: arguments.tenants as usize,
        trace,
        settings: Settings { planner, ..Settings::default() },
    };
    let policies: Vec<&str> = match arguments.policy.as_str() {
        "all" => RULES.into_iter().chain([STATIC]).collect(),
        policy => vec![policy],
    };
    let report = simulation.run(&policies).context("unknown policy")?;
    if let Some(file) = &arguments.svg {
        write_chart(&report, file)?;
    }
    if arguments.json {
        return output::json(&report);
    }
    print(&report)
}

fn trace(arguments: &SimulateArgs) -> anyhow::Result<Trace> {
    let name = &arguments.trace;
    if !name.ends_with(".csv") {
        return Ok(Trace::named(name, arguments.hours as usize * 60)?);
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("cannot read {name}"))?;
    Trace::from_csv(&text).with_context(|| name.clone())
}

fn print(report: &Report) -> anyhow::Result<()> {
    let mut table = output::table([
        "policy",
        "node-hours",
        "cost",
        "of static",
        "late %",
        "moves",
        "bytes",
        "added",
        "removed",
    ]);
    let clairvoyant = report.clairvoyant_node_hours;
    let static_hours = report.static_nodes as f64 * report.hours;
    table.add_row([
        "clairvoyant".to_owned(),
        format!("{clairvoyant:.1}"),
        "1.000".to_owned(),
        format!("{:.3}", clairvoyant / static_hours),
    ]);
    for policy in &report.policies {
        table.add_row([
            policy.policy.clone(),
            format!("{:.1}", policy.node_hours),
            format!("{:.3}", policy.cost_ratio),
            format!("{:.3}", policy.over_static),
            format!("{:.3}", policy.late_percent),
            policy.moves.to_string(),
            Bytes(policy.bytes).to_string(),
            policy.nodes_added.to_string(),
            policy.nodes_removed.to_string(),
        ]);
    }
    align_numbers(&mut table, 1);
    output::line(&table.to_string())?;
    let forecast = &report.forecast;
    output::line(&format!(
        "{:.0} hours, {} tenants; forecast {} minutes ahead: error {:.3} times that of the last value",
        report.hours, report.tenants, forecast.horizon, forecast.gain
    ))?;
    for hole in &report.holes {
        let (line, from, to) = (hole.line, hole.from_s, hole.to_s);
        output::line(&format!("hole after line {line}: {from} s to {to} s was interpolated"))?;
    }
    Ok(())
}

fn write_chart(report: &Report, file: &Path) -> anyhow::Result<()> {
    let hours = |nodes: &[usize]| -> Vec<(f64, f64)> {
        nodes.iter().enumerate().map(|(minute, nodes)| (minute as f64 / 60.0, *nodes as f64)).collect()
    };
    let mut series = vec![("clairvoyant".to_owned(), hours(&report.clairvoyant_nodes))];
    series.extend(report.policies.iter().map(|policy| (policy.policy.clone(), hours(&policy.nodes))));
    let chart = line_chart("Nodes over time", ("hours", "nodes"), series);
    std::fs::write(file, chart).with_context(|| format!("cannot write {}", file.display()))
}

//! `fulmar plan`: runs planners on a picture of a cluster, and compares their plans.

use std::time::{Duration, Instant};

use anyhow::Context;
use comfy_table::{CellAlignment, Table};
use fulmar_control::picture::Picture;
use fulmar_control::plan::Plan;
use fulmar_control::planners::{self, PLANNERS, Planner, Resize, Settings, cases};

use crate::cli::PlanArgs;
use crate::output;
use crate::size::Bytes;

/// How many moves of a plan are listed. `--json` has all of them.
const MAX_LISTED_MOVES: usize = 50;

/// Runs `fulmar plan`.
pub fn run(arguments: PlanArgs) -> anyhow::Result<()> {
    let picture = picture(&arguments)?;
    let add = arguments.add.map(|count| Resize::Add(count as usize));
    let change = add.or(arguments.remove.map(|count| Resize::Remove(count as usize)));
    let picture = change.map_or_else(|| picture.clone(), |change| planners::resize(&picture, change));
    let settings = settings(&arguments)?;
    let chosen: Vec<&dyn Planner> = match planners::planner(&arguments.planner) {
        Some(planner) => vec![planner],
        None => PLANNERS.to_vec(),
    };
    let mut plans = Vec::new();
    for planner in chosen {
        let start = Instant::now();
        let plan = planners::plan(&picture, planner, &settings);
        plans.push((plan, start.elapsed()));
    }
    if arguments.json {
        let with_time = |(plan, time): &(Plan, Duration)| serde_json::json!({ "plan": plan, "plan_ms": time.as_secs_f64() * 1e3 });
        return output::json(&plans.iter().map(with_time).collect::<Vec<_>>());
    }
    output::line(&comparison(&plans).to_string())?;
    for (plan, _) in &plans {
        for note in &plan.notes {
            output::line(&format!("{}: {note}", plan.planner))?;
        }
    }
    match plans.as_slice() {
        [(plan, _)] if !plan.moves.is_empty() => list_moves(plan),
        _ => Ok(()),
    }
}

fn picture(arguments: &PlanArgs) -> anyhow::Result<Picture> {
    if let Some(file) = &arguments.from {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        return Picture::from_json(&text).with_context(|| file.display().to_string());
    }
    let name = arguments.case.as_deref().unwrap_or_default();
    if name == "large" {
        return Ok(cases::large(100, 1000, 10_000));
    }
    let cases = cases::estore();
    let names: Vec<String> = cases.iter().map(|(name, _)| name.clone()).collect();
    let found = cases.into_iter().find(|(case, _)| case == name).map(|(_, picture)| picture);
    found.with_context(|| format!("unknown case \"{name}\"; use large, {}", names.join(", ")))
}

fn settings(arguments: &PlanArgs) -> anyhow::Result<Settings> {
    let in_range = |flag: &str, value: f64, limit: f64| {
        anyhow::ensure!((0.0..=limit).contains(&value), "{flag} must be between 0 and {limit}");
        Ok(value)
    };
    Ok(Settings {
        epsilon: in_range("--tolerance", arguments.tolerance, 1000.0)? / 100.0,
        cool_down_s: in_range("--cool-down", arguments.cool_down, 1e9)?,
        time_limit_s: in_range("--time-limit", arguments.time_limit, 86_400.0)?,
        ..Settings::default()
    })
}

fn comparison(plans: &[(Plan, Duration)]) -> Table {
    let mut table = output::table([
        "planner",
        "before %",
        "highest %",
        "bound %",
        "gap %",
        "moves",
        "bytes",
        "moving s",
        "stranded",
        "plan ms",
    ]);
    for (plan, time) in plans {
        let evaluation = &plan.evaluation;
        let percent = |share: f64| format!("{:.1}", share * 100.0);
        table.add_row([
            plan.planner.to_owned(),
            percent(evaluation.highest_before),
            percent(evaluation.highest),
            percent(evaluation.bound),
            format!("{:.1}", evaluation.gap_percent),
            evaluation.moves.to_string(),
            Bytes(evaluation.bytes).to_string(),
            format!("{:.1}", evaluation.seconds),
            evaluation.stranded.to_string(),
            format!("{:.1}", time.as_secs_f64() * 1e3),
        ]);
    }
    align_numbers(&mut table, 1);
    table
}

/// Aligns all columns from a first one to the right.
pub fn align_numbers(table: &mut Table, first: usize) {
    for column in table.column_iter_mut().skip(first) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn list_moves(plan: &Plan) -> anyhow::Result<()> {
    let mut table = output::table(["partition", "part", "from", "to", "load", "bytes", "seconds"]);
    for step in plan.moves.iter().take(MAX_LISTED_MOVES) {
        table.add_row([
            step.partition.clone(),
            step.piece.clone().unwrap_or_default(),
            step.from.clone(),
            step.to.clone(),
            format!("{:.3}", step.load),
            Bytes(step.bytes).to_string(),
            format!("{:.1}", step.seconds),
        ]);
    }
    align_numbers(&mut table, 4);
    output::line(&table.to_string())?;
    match plan.moves.len().saturating_sub(MAX_LISTED_MOVES) {
        0 => Ok(()),
        more => output::line(&format!("... and {more} more moves (--json lists all)")),
    }
}

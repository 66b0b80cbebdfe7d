//! `fulmar bench`: the workloads of the crate `fulmar-workload`, with a progress bar and a way to print.

use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_workload::compare::{self, CompareArgs};
use fulmar_workload::run::{RunEvent, run as run_against};
use fulmar_workload::workload::Workload;
use indicatif::ProgressBar;

use crate::cli::{BenchAction, BenchArgs, Comparison, Workload as Chosen, WorkloadArgs};
use crate::output;

/// Runs `fulmar bench`.
pub async fn run(arguments: BenchArgs) -> anyhow::Result<()> {
    match arguments.action {
        BenchAction::Run(Chosen::Ycsb(arguments)) => run_workload(arguments).await,
        BenchAction::Compare(Comparison::Node(arguments)) => compare_node(arguments).await,
    }
}

/// Prints by itself, while and after it measures. A case that could not be measured is an error; one that was
/// slower than hoped for is a result.
async fn compare_node(arguments: CompareArgs) -> anyhow::Result<()> {
    let binary = std::env::current_exe().context("cannot find this very command to start a node")?;
    let results = compare::node(arguments.into_options(binary)).await?;
    let failed = results.iter().filter(|result| result.is_failed()).count();
    ensure!(failed == 0, "{failed} of {} cases could not be measured", results.len());
    Ok(())
}

async fn run_workload<W: Workload>(arguments: WorkloadArgs<W>) -> anyhow::Result<()> {
    let WorkloadArgs { workload, run, json } = arguments;
    let bar = output::progress("loading", 0);
    let mut options = run.into_options::<W>().await?;
    let watched = bar.clone();
    options.watcher = Some(Arc::new(move |event| show(&watched, event)));
    let report = run_against(workload, options).await;
    bar.finish_and_clear();
    let report = report?;
    if json { output::json(&report) } else { output::line(&report.to_string()) }
}

fn show(bar: &ProgressBar, event: &RunEvent) {
    match event {
        RunEvent::Loading { rows, of } => {
            bar.set_length(*of);
            bar.set_position(*rows);
        }
        RunEvent::WarmUp => bar.set_message("warming up"),
        RunEvent::Opens | RunEvent::Closes => {}
        RunEvent::Tick(tick) => {
            bar.set_length(tick.of.as_secs());
            bar.set_position(tick.elapsed.as_secs());
            bar.set_message(format!(
                "{:.0} transactions/s, p50 {:.1} ms, p99 {:.1} ms",
                tick.throughput_tps, tick.p50_ms, tick.p99_ms
            ));
        }
    }
}

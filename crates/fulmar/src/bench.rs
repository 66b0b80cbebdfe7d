//! `fulmar bench`: the workloads of the crate `fulmar-workload`, with a progress bar and a way to print.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_workload::compare::{self, CaseResult, CompareArgs, StoreArgs};
use fulmar_workload::ycsb::{self, YcsbArgs, YcsbEvent};
use indicatif::ProgressBar;

use crate::cli::{BenchAction, BenchArgs, Comparison, Workload};
use crate::output;

/// Runs `fulmar bench`.
pub async fn run(arguments: BenchArgs) -> anyhow::Result<()> {
    match arguments.action {
        BenchAction::Run(Workload::Ycsb { arguments, json }) => run_ycsb(arguments, json).await,
        BenchAction::Compare(Comparison::Node(arguments)) => compare_node(arguments).await,
        BenchAction::Store(arguments) => measure_store(arguments).await,
    }
}

/// Prints by itself, while and after it measures. A case that could not be measured is an error; one that was
/// slower than hoped for is a result.
async fn compare_node(arguments: CompareArgs) -> anyhow::Result<()> {
    check(&compare::node(arguments.into_options(this_binary()?)).await?)
}

/// The same, of the store's cases.
async fn measure_store(arguments: StoreArgs) -> anyhow::Result<()> {
    check(&compare::store(&arguments, this_binary()?).await?)
}

fn this_binary() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this very command to start a node")
}

fn check(results: &[CaseResult]) -> anyhow::Result<()> {
    let failed = results.iter().filter(|result| result.is_failed()).count();
    ensure!(failed == 0, "{failed} of {} cases could not be measured", results.len());
    Ok(())
}

async fn run_ycsb(arguments: YcsbArgs, json: bool) -> anyhow::Result<()> {
    let bar = output::progress("loading", 0);
    let mut options = arguments.into_options().await?;
    let watched = bar.clone();
    options.watcher = Some(Arc::new(move |event| show(&watched, event)));
    let report = ycsb::run(options).await;
    bar.finish_and_clear();
    let report = report?;
    if json { output::json(&report) } else { output::line(&report.to_string()) }
}

fn show(bar: &ProgressBar, event: &YcsbEvent) {
    match event {
        YcsbEvent::Loading { rows, of } => {
            bar.set_length(*of);
            bar.set_position(*rows);
        }
        YcsbEvent::WarmUp => bar.set_message("warming up"),
        YcsbEvent::Opens | YcsbEvent::Closes => {}
        YcsbEvent::Tick(tick) => {
            bar.set_length(tick.of.as_secs());
            bar.set_position(tick.elapsed.as_secs());
            bar.set_message(format!(
                "{:.0} transactions/s, p50 {:.1} ms, p99 {:.1} ms",
                tick.throughput_tps, tick.p50_ms, tick.p99_ms
            ));
        }
    }
}

//! `fulmar bench`: runs the workloads of the crate `fulmar-workload` and prints their results.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, ensure};
use fulmar_workload::compare::{
    self, CaseResult, ClusterBenchArgs, CompareArgs, ControlBenchArgs, MigrateArgs, StoreArgs, Suite,
};
use fulmar_workload::paper_figures::figure;
use fulmar_workload::report::RunFile;
use fulmar_workload::run::{Processes, RunEvent, run as run_against, run_part};
use fulmar_workload::workload::Workload;
use indicatif::ProgressBar;

use crate::cli::{BenchAction, BenchArgs, Comparison, ReportArgs, Workload as WorkloadCommand, WorkloadArgs};
use crate::output;
use crate::start::raise_open_files;

/// Runs `fulmar bench`.
pub async fn run(arguments: BenchArgs) -> anyhow::Result<()> {
    match arguments.action {
        BenchAction::Run(workload) => match *workload {
            WorkloadCommand::Ycsb(arguments) => run_workload(arguments).await,
            WorkloadCommand::Voter(arguments) => run_workload(arguments).await,
            WorkloadCommand::Tatp(arguments) => run_workload(arguments).await,
            WorkloadCommand::Tpcc(arguments) => run_workload(arguments).await,
            WorkloadCommand::Tpcw(arguments) => run_workload(arguments).await,
        },
        BenchAction::Report(arguments) => report(&arguments),
        BenchAction::Figure(arguments) => {
            let rows = figure(&arguments, this_binary()?, |step| eprintln!("{step}")).await?;
            output::line(rows.trim_end())
        }
        BenchAction::Compare(Comparison::Node(arguments)) => compare(Suite::Node, arguments).await,
        BenchAction::Compare(Comparison::Tpcc(arguments)) => compare(Suite::Tpcc, arguments).await,
        BenchAction::Compare(Comparison::Consolidation(arguments)) => {
            compare(Suite::Consolidation, arguments).await
        }
        BenchAction::Store(arguments) => measure_store(arguments).await,
        BenchAction::Cluster(arguments) => measure_cluster(arguments).await,
        BenchAction::Control(arguments) => measure_control(arguments).await,
        BenchAction::Migrate(arguments) => measure_migrations(arguments).await,
    }
}

fn this_binary() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot determine the path of the fulmar executable")
}

/// The version and, if built from a repository, the commit.
const BUILD: &str = match option_env!("FULMAR_COMMIT") {
    Some(commit) => commit,
    None => env!("CARGO_PKG_VERSION"),
};

fn report(arguments: &ReportArgs) -> anyhow::Result<()> {
    let ReportArgs { lines, output } = arguments;
    let file = File::open(lines).with_context(|| format!("cannot open {}", lines.display()))?;
    let run =
        RunFile::read(BufReader::new(file)).with_context(|| format!("cannot read {}", lines.display()))?;
    std::fs::write(output, run.html()).with_context(|| format!("cannot write {}", output.display()))
}

/// Runs a comparison, which prints its own results. Returns an error if a case could not be
/// measured. A slow case is not an error.
async fn compare(suite: Suite, arguments: CompareArgs) -> anyhow::Result<()> {
    check(&compare::run(arguments.into_options(suite, this_binary()?)).await?)
}

/// Runs the store benchmarks, with the same error rule as [`compare`].
async fn measure_store(arguments: StoreArgs) -> anyhow::Result<()> {
    check(&compare::store(&arguments, this_binary()?).await?)
}

async fn measure_cluster(arguments: ClusterBenchArgs) -> anyhow::Result<()> {
    check(&compare::cluster(&arguments, this_binary()?).await?)
}

async fn measure_control(arguments: ControlBenchArgs) -> anyhow::Result<()> {
    check(&compare::control(&arguments, this_binary()?).await?)
}

async fn measure_migrations(arguments: MigrateArgs) -> anyhow::Result<()> {
    check(&compare::migrate(&arguments, this_binary()?).await?)
}

fn check(results: &[CaseResult]) -> anyhow::Result<()> {
    let failed = results.iter().filter(|result| result.is_failed()).count();
    ensure!(failed == 0, "{failed} of {} cases could not be measured", results.len());
    Ok(())
}

async fn run_workload<W: Workload>(arguments: WorkloadArgs<W>) -> anyhow::Result<()> {
    let WorkloadArgs { workload, run, json } = arguments;
    // Each of the workload's connections needs a file descriptor.
    raise_open_files();
    let mut options = run.into_options::<W>().await?;
    if let Processes::Part { .. } = options.processes {
        return run_part(workload, options).await;
    }
    let bar = output::progress("loading", 0);
    let shared_bar = bar.clone();
    options.watcher = Some(Arc::new(move |event| update(&shared_bar, event)));
    options.build = BUILD;
    let report = run_against(workload, options).await;
    bar.finish_and_clear();
    let report = report?;
    if !json {
        return output::line(&report.to_string());
    }
    if report.driver.is_bottleneck() {
        eprintln!("fulmar: the driver may be the bottleneck, not the server; raise --threads or --processes");
    }
    output::json(&report)
}

fn update(bar: &ProgressBar, event: &RunEvent) {
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

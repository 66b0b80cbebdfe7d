//! `bench control`: what elasticity costs and does, on this machine. `docs/benchmarks.md` describes
//! each case.

mod monitor;

use std::path::{Path, PathBuf};

use clap::Args;
use futures::FutureExt;

use super::cases::Case;
use super::print_results;
use super::result::{Bound, CaseResult};
use super::rounds::Progress;

/// Arguments of `fulmar bench control`.
#[derive(Args, Clone, Debug)]
pub struct ControlBenchArgs {
    /// Run only this case (repeatable): monitor-cost-percent
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// Length of each measurement in seconds
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Measurements of each server, alternating
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

const MONITOR: &str = "monitor-cost-percent";

static CASES: [Case; 1] = [Case {
    name: MONITOR,
    group: None,
    what: "CPU per transaction of ycsb-8 with both levels of the load monitor, above without",
    unit: "%",
    must_be: Bound::AtMost(10.0),
}];

fn case(name: &str) -> anyhow::Result<&'static Case> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        let names = CASES.each_ref().map(|case| case.name).join(", ");
        anyhow::anyhow!("unknown case \"{name}\"; the cases are {names}")
    })
}

struct Bench<'a> {
    arguments: &'a ControlBenchArgs,
    binary: &'a Path,
    progress: Progress,
}

/// Runs the cases, prints the results to stdout and returns them. `binary` is the `fulmar`
/// executable to start.
pub async fn control(arguments: &ControlBenchArgs, binary: PathBuf) -> anyhow::Result<Vec<CaseResult>> {
    let wanted: Vec<&'static Case> = match arguments.case.as_slice() {
        [] => CASES.iter().collect(),
        names => names.iter().map(|name| case(name)).collect::<anyhow::Result<_>>()?,
    };
    let measuring = async {
        let bench = Bench { arguments, binary: &binary, progress: Progress::new() };
        let mut results = Vec::new();
        for case in wanted {
            let measured = monitor::measure(&bench, case).await;
            results.push(measured.unwrap_or_else(|error| CaseResult::failed(case, format!("{error:#}"))));
        }
        Ok(results)
    };
    // Boxed, because a future is compiled where it is polled.
    print_results(measuring.boxed_local(), arguments.json).await
}

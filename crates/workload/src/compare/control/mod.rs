//! `bench control`: what elasticity costs and does, on this machine. `docs/benchmarks.md` describes
//! each case.

pub(crate) mod elastic;
mod model;
mod monitor;
mod planning;
pub(crate) mod scale;
mod spike;

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
    /// Run only this case (repeatable): monitor-cost-percent, spike-relief-s (with spike-failed),
    /// scale-out-in, model-late-percent; without servers: planner-ms, planner-gap-percent,
    /// simulate-round-s, simulate-cost-ratio, simulate-late-percent, forecast-gain
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

const fn row(name: &'static str, what: &'static str, unit: &'static str, most: f64) -> Case {
    Case { name, group: None, what, unit, must_be: Bound::AtMost(most) }
}

const MONITOR: &str = "monitor-cost-percent";
const RELIEF: &str = "spike-relief-s";
const FAILED: &str = "spike-failed";
const SCALE: &str = "scale-out-in";
const MODEL: &str = "model-late-percent";

static CASES: [Case; 11] = [
    row(
        MONITOR,
        "CPU per transaction of ycsb-8 with both levels of the load monitor, above without",
        "%",
        10.0,
    ),
    row(
        RELIEF,
        "from a jump of one tenant's load to five times until the latency is below the objective",
        "s",
        60.0,
    ),
    row(FAILED, "failed transactions meanwhile", "", 0.0),
    row(SCALE, "tenant-seconds above the objective while the load doubles, then halves", "%", 10.0),
    Case {
        name: MODEL,
        group: None,
        what: "utilisation at which the latency is five times the service time (simulator: 80 %)",
        unit: "%",
        // Nodes are filled to this by default.
        must_be: Bound::AtLeast(72.0),
    },
    row(
        planning::PLANNER_MS,
        "time of our planner for 1,000 partitions and 10,000 hot keys on 100 nodes",
        "ms",
        500.0,
    ),
    row(
        planning::PLANNER_GAP,
        "highest node load above the bound, in the worst of E-Store's nine cases",
        "%",
        10.0,
    ),
    row(planning::ROUND, "a control round for 10,000 nodes and 1,000,000 tenants", "s", 10.0),
    row(planning::COST, "node-hours over the clairvoyant plan's, worse of sine and World Cup", "", 1.4),
    row(planning::LATE, "tenant-minutes above the objective, worse of sine and World Cup", "%", 1.0),
    row(planning::GAIN, "forecast error over that of the last value, worse of the two", "", 0.8),
];

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
        let mut results: Vec<CaseResult> = Vec::new();
        for case in wanted {
            // Some runs measure several cases.
            if results.iter().any(|result| result.name == case.name) {
                continue;
            }
            let measured = match case.name {
                MONITOR => monitor::measure(&bench, case).await.map(|result| vec![result]),
                SCALE => scale::measure(&bench).await,
                MODEL => model::measure(&bench).await,
                planning::PLANNER_MS | planning::PLANNER_GAP => planning::planners(&bench),
                planning::ROUND => planning::round(&bench),
                planning::COST | planning::LATE | planning::GAIN => planning::policies(&bench),
                _ => spike::measure(&bench).await,
            };
            results.extend(
                measured.unwrap_or_else(|error| vec![CaseResult::failed(case, format!("{error:#}"))]),
            );
        }
        results.retain(|result| {
            arguments.case.is_empty() || arguments.case.iter().any(|name| name == result.name)
        });
        Ok(results)
    };
    // Boxed, because a future is compiled where it is polled.
    print_results(measuring.boxed_local(), arguments.json).await
}

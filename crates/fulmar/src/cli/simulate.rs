//! Arguments of `fulmar simulate`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use fulmar_control::planners::PLANNERS;
use fulmar_control::policy::when::RULES;

const SIMULATE_EXAMPLES: &str = "\
Examples:
  fulmar simulate                                               four days of World Cup load, all policies
  fulmar simulate --trace sine --policy planned --svg nodes.svg
  fulmar simulate --trace load.csv --nodes 100 --tenants 10000
  fulmar simulate --nodes 10000 --tenants 1000000 --trace hockey-stick --hours 2 --policy planned

Traces:
  worldcup, sine, steps, hockey-stick, spike, or a file with lines of `seconds,load`. Holes of a file
  are interpolated and reported.

Policies (when nodes are added and removed):
  watermarks   one node when the mean utilisation is above 90 % or below 50 % (E-Store)
  node-share   when 10 % of the nodes are above 77 % (ElasTraS)
  thresholds   when the mean utilisation or the latency is beyond a threshold for a time (ShuttleDB)
  forecast     the same, ahead of a forecast crossing (ShuttleDB)
  planned      the cheapest plan over time that serves the forecast load (P-Store)
  static       nodes for the peak, all the time

`cost` is the node-hours over those of the clairvoyant plan, which has the nodes for 80 % utilisation
in every minute. `late` is the share of tenant-minutes above the latency objective.";

/// `fulmar simulate`
#[derive(Args, Debug)]
#[command(after_help = SIMULATE_EXAMPLES)]
pub struct SimulateArgs {
    /// Nodes of static provisioning: the peak load is 80 % of their capacity
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub nodes: u32,
    /// Number of tenants
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub tenants: u32,
    /// Load trace: worldcup, sine, steps, hockey-stick, spike or FILE.csv
    #[arg(long, value_name = "TRACE", default_value = "worldcup")]
    pub trace: String,
    /// Hours to simulate. A file is simulated to its end
    #[arg(long, value_name = "HOURS", default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..=17_520))]
    pub hours: u32,
    /// Policy, or `all`
    #[arg(long, value_name = "NAME", default_value = "all", value_parser = policy_names())]
    pub policy: String,
    /// Planner of all moves
    #[arg(long, value_name = "NAME", default_value = "local-search", value_parser = planner_names())]
    pub planner: String,
    /// Write a chart of the nodes over time
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Print the report as JSON, with the first decisions of each policy
    #[arg(long)]
    pub json: bool,
}

fn policy_names() -> PossibleValuesParser {
    PossibleValuesParser::new(RULES.into_iter().chain([fulmar_control::simulator::STATIC, "all"]))
}

fn planner_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PLANNERS.iter().map(|planner| planner.name()))
}

//! Arguments of `fulmar plan`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, RangedI64ValueParser};
use clap::{ArgGroup, Args};
use fulmar_control::planners::PLANNERS;

const PLAN_EXAMPLES: &str = "\
Examples:
  fulmar plan --from picture.json                          the moves of our planner
  fulmar plan --from picture.json --planner all            compare all planners
  fulmar plan --from picture.json --add 2                  with two more nodes
  fulmar plan --from picture.json --remove 1 --json        with the least loaded node drained
  fulmar plan --case ycsb-high --planner all               E-Store's case of high skew

A picture is a JSON file:
  {\"nodes\": [{\"name\": \"n1\", \"capacity\": 8, \"memory\": 17179869184, \"site\": \"eu\", \"rack\": \"r1\"}],
   \"partitions\": [{\"name\": \"shop\", \"owner\": \"n1\", \"load\": 2.5, \"bytes\": 1000000, \"memory\": 500000,
                   \"hot_keys\": [{\"name\": \"42\", \"load\": 1.5, \"bytes\": 200}]}]}
Load and capacity are in CPUs. Nothing is moved.

greedy, greedy-extended, first-fit   E-Store's heuristics
one-tier, two-tier                   E-Store's integer programs
local-search                         the cheapest moves that balance load and memory";

/// `fulmar plan`
#[derive(Args, Debug)]
#[command(after_help = PLAN_EXAMPLES, group = ArgGroup::new("input").args(["from", "case"]).required(true))]
pub struct PlanArgs {
    /// Picture of a cluster (JSON)
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// A built-in picture: ycsb, voter or tpcc with -none, -low or -high (skew), or `large`
    #[arg(long, value_name = "CASE")]
    pub case: Option<String>,
    /// Planner, or `all`
    #[arg(long, value_name = "NAME", default_value = "local-search", value_parser = planner_names())]
    pub planner: String,
    /// Add this many nodes like the largest one
    #[arg(long, value_name = "N", conflicts_with = "remove", value_parser = node_count())]
    pub add: Option<u32>,
    /// Drain this many nodes, the least loaded ones
    #[arg(long, value_name = "N", value_parser = node_count())]
    pub remove: Option<u32>,
    /// Tolerated distance of a node from the mean utilisation, in percent of it
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0)]
    pub tolerance: f64,
    /// Do not move a partition again within this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub cool_down: f64,
    /// Time limit of an integer program, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    pub time_limit: f64,
    /// Print the plans as JSON, with all moves
    #[arg(long)]
    pub json: bool,
}

fn node_count() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=100_000)
}

fn planner_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PLANNERS.iter().map(|planner| planner.name()).chain(["all"]))
}

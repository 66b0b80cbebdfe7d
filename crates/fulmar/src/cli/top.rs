//! Arguments of `fulmar top`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::ServerArgs;

const TOP_EXAMPLES: &str = "\
Examples:
  fulmar top --server postgres://fulmar@127.0.0.1:5433
  fulmar top --sort conflicts -n 5
  fulmar top --once --json | jq '.tenants[0].tenant'

Superusers see all tenants. Other users see the tenants that they may connect to, and must name one
of them in the URL:
  fulmar top --server postgres://ada@127.0.0.1:5433/shop

Statements that take the most time, in SQL:
  SELECT tenant, calls, total_ms, statement FROM fulmar.statements ORDER BY total_ms DESC LIMIT 10;

Press Ctrl-C to exit. If stdout is not a terminal, one table is printed per interval (with --json,
one line).";

/// `fulmar top`
#[derive(Args, Debug)]
#[command(after_help = TOP_EXAMPLES)]
pub struct TopArgs {
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Seconds between updates
    #[arg(long, default_value = "2", value_name = "SECONDS", value_parser = seconds)]
    pub interval: Duration,
    /// Column to sort by
    #[arg(long, value_enum, default_value_t = Sort::Busy, value_name = "COLUMN")]
    pub sort: Sort,
    /// Maximum number of tenants to show [default: as many as fit the terminal, 20 without one]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub rows: Option<u16>,
    /// Show one interval and exit
    #[arg(long)]
    pub once: bool,
    /// Print each interval as JSON, one per line
    #[arg(long)]
    pub json: bool,
}

/// A sort column. Numbers are sorted in descending order, names in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Name.
    Tenant,
    /// Open sessions.
    Sessions,
    /// Statements per second.
    Statements,
    /// CPU time.
    Busy,
    /// Commits per second.
    Commits,
    /// Conflicts per second.
    Conflicts,
    /// Errors per second.
    Errors,
    /// 99th percentile of statement latency since the node started.
    P99,
    /// Size of the database.
    Size,
    /// Memory used by cached pages.
    Memory,
}

/// Parses `--interval`: 0.1 s to 1 h.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "must be between 0.1 and 3600 seconds".to_owned())
}

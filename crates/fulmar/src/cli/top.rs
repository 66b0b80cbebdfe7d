//! What can be asked of `fulmar top`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::ServerArgs;

const TOP_EXAMPLES: &str = "\
Examples:
  fulmar top --server postgres://fulmar@127.0.0.1:5433
  fulmar top --sort conflicts -n 5
  fulmar top --once --json | jq '.tenants[0].tenant'

Superusers see all tenants, others those that they may connect to, of which the URL has to name one:
  fulmar top --server postgres://ada@127.0.0.1:5433/shop

Ctrl-C ends it. When stdout is no terminal one table is printed after the other (with --json: one line).";

/// `fulmar top`
#[derive(Args, Debug)]
#[command(after_help = TOP_EXAMPLES)]
pub struct TopArgs {
    /// The node to ask.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Seconds from one look to the next
    #[arg(long, default_value = "2", value_name = "SECONDS", value_parser = seconds)]
    pub interval: Duration,
    /// What the tenants are sorted by
    #[arg(long, value_enum, default_value_t = Sort::Busy, value_name = "COLUMN")]
    pub sort: Sort,
    /// How many tenants are shown [default: as many as the screen has room for; else 20]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub rows: Option<u16>,
    /// Show one interval, then end
    #[arg(long)]
    pub once: bool,
    /// Print each interval as JSON, on a line
    #[arg(long)]
    pub json: bool,
}

/// A column of the table; most comes first, names in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// By name.
    Tenant,
    /// Sessions.
    Sessions,
    /// Statements a second.
    Statements,
    /// Time on processors.
    Busy,
    /// Commits a second.
    Commits,
    /// Conflicts a second.
    Conflicts,
    /// Errors a second.
    Errors,
    /// The time of 99 % of the statements.
    P99,
    /// Size of the database.
    Size,
    /// Memory of its pages.
    Memory,
}

/// A time that is no busy loop and comes to an end.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write seconds, from 0.1 to 3600".to_owned())
}

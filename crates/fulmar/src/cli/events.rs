//! Arguments of `fulmar events`.

use clap::Args;

use super::ServerArgs;

const EVENTS_EXAMPLES: &str = "\
Examples:
  fulmar events -n 50
  fulmar events --follow --tenant shop
  fulmar events --json | jq 'select(.severity != \"info\")'

Superusers see all events. The owner of a tenant sees the events of that tenant, and must name it in
the URL (--server postgres://ada@db.example:5433/shop).";

/// `fulmar events`
#[derive(Args, Debug)]
#[command(after_help = EVENTS_EXAMPLES)]
pub struct EventsArgs {
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Number of past events to show: the newest ones
    #[arg(short = 'n', long = "last", default_value_t = 20, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub last: u32,
    /// Show only the events of this tenant
    #[arg(long, alias = "database", value_name = "TENANT")]
    pub tenant: Option<String>,
    /// Stream new events until interrupted with Ctrl-C
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// Print each event as JSON, one per line
    #[arg(long)]
    pub json: bool,
}

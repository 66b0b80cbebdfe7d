//! What can be asked of `fulmar events`.

use clap::Args;

use super::ServerArgs;

const EVENTS_EXAMPLES: &str = "\
Examples:
  fulmar events -n 50
  fulmar events --follow --tenant shop
  fulmar events --json | jq 'select(.severity != \"info\")'

Superusers see everything. The owner of a tenant sees what happened to it; the URL has to name it then
(--server postgres://ada@db.example:5433/shop).";

/// `fulmar events`
#[derive(Args, Debug)]
#[command(after_help = EVENTS_EXAMPLES)]
pub struct EventsArgs {
    /// The node to ask.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Events to begin with: the newest
    #[arg(short = 'n', long = "last", default_value_t = 20, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub last: u32,
    /// Only those of this tenant
    #[arg(long, alias = "database", value_name = "TENANT")]
    pub tenant: Option<String>,
    /// Go on with what happens, until Ctrl-C
    #[arg(long, short = 'f')]
    pub follow: bool,
    /// Print each event as JSON, on a line of its own
    #[arg(long)]
    pub json: bool,
}

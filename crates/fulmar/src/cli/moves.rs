//! Arguments of `fulmar move` and `fulmar moves`.

use clap::{ArgGroup, Args, ValueEnum};

use super::ServerArgs;
use crate::size::Bytes;

const MOVE_EXAMPLES: &str = "\
Examples:
  fulmar move shop --to n2
  fulmar move shop --to n2 --max-rate 20MiB     copy at most 20 MiB per second
  fulmar move shop --cancel                     until the handover
  fulmar moves                                  what the newest moves have cost

In SQL, in the database `fulmar`:
  ALTER DATABASE shop MOVE TO 'n2' USING albatross LIMIT '20MB';
  ALTER DATABASE shop CANCEL MOVE;
  SELECT * FROM fulmar.migrations;

albatross: the other node reads the pages that this one has cached, then takes the tenant over.
flush:     the other node takes the tenant over with an empty cache. Open transactions fail.
stop:      the same, without a flush before the tenant is stopped.";

/// How a tenant is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MoveMechanism {
    /// The other node reads the cached pages before it takes the tenant over
    Albatross,
    /// The other node starts with an empty cache, and open transactions fail
    Flush,
    /// Like flush, but the tenant is stopped first
    Stop,
    /// Between stores: copy all pages, and then those that have changed, before the handover
    Live,
    /// Between stores: copy the pages that differ from what the other node has kept (--archives)
    Delta,
    /// Between stores: hand over first, and copy pages when they are needed
    OnDemand,
    /// Between stores: copy all pages while the tenant waits, after open transactions have ended
    Bulk,
    /// The same, but copy all rows with SQL
    Sql,
}

/// `fulmar move`
#[derive(Args, Debug)]
#[command(after_help = MOVE_EXAMPLES, group = ArgGroup::new("what").args(["to", "cancel"]).required(true))]
pub struct MoveArgs {
    /// Name of the tenant
    pub name: String,
    /// Name of the node
    #[arg(long, value_name = "NODE")]
    pub to: Option<String>,
    /// How to move the tenant [default: albatross]
    #[arg(long, value_name = "MECHANISM", requires = "to")]
    pub using: Option<MoveMechanism>,
    /// Maximum number of bytes copied per second. Less while latencies at either node are too high
    #[arg(long, value_name = "SIZE", requires = "to")]
    pub max_rate: Option<Bytes>,
    /// Cancel the tenant's move. It stays at its node
    #[arg(long)]
    pub cancel: bool,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `fulmar moves`
#[derive(Args, Debug)]
pub struct MovesArgs {
    /// Show the newest moves of this tenant only
    pub name: Option<String>,
    /// Number of moves to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: u32,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the reports as JSON
    #[arg(long)]
    pub json: bool,
}

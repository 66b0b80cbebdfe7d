//! Arguments of `fulmar control` and `fulmar decisions`.

use clap::{Args, Subcommand};

use super::ServerArgs;

const CONTROL_EXAMPLES: &str = "\
Examples:
  fulmar control show                       settings, controller, plan, pinned tenants
  fulmar control set mode advise            decide and record, and do nothing
  fulmar control set mode on
  fulmar control set high 80%
  fulmar control pin shop                   is not moved
  fulmar control forbid n3                  nothing is moved to n3
  fulmar control cancel                     give up the plan in progress

In SQL, in the database `fulmar`:
  SELECT * FROM fulmar.control;
  ALTER SYSTEM SET control.mode = 'on';
  ALTER DATABASE shop PIN;
  ALTER NODE n3 FORBID;
  ALTER SYSTEM CANCEL PLAN;
  ALTER DATABASE shop SET latency_objective = '20ms';";

/// `fulmar control`
#[derive(Args, Debug)]
#[command(after_help = CONTROL_EXAMPLES)]
pub struct ControlArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub action: ControlAction,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
}

/// A subcommand of `fulmar control`.
#[derive(Debug, Subcommand)]
pub enum ControlAction {
    /// Show the settings and the state of the controller
    Show,
    /// Change a setting
    Set {
        /// Name of the setting: see `fulmar control show`
        name: String,
        /// The new value
        value: String,
    },
    /// Reset a setting to its default
    Reset {
        /// Name of the setting
        name: String,
    },
    /// Keep a tenant at its node
    Pin {
        /// Name of the tenant
        tenant: String,
    },
    /// Let a tenant be moved again
    Unpin {
        /// Name of the tenant
        tenant: String,
    },
    /// Move nothing to a node. What it has stays
    Forbid {
        /// Name of the node
        node: String,
    },
    /// Let tenants be moved to a node again
    Allow {
        /// Name of the node
        node: String,
    },
    /// Give up the plan in progress, and decide nothing for the time `cool_down`
    Cancel,
}

const DECISIONS_EXAMPLES: &str = "\
Examples:
  fulmar decisions                          the newest ones
  fulmar decisions --why                    with reasons and predicted effects
  fulmar decisions --json | jq '.[].decision'

In SQL, in the database `fulmar`:
  SELECT * FROM fulmar.decisions;";

/// `fulmar decisions`
#[derive(Args, Debug)]
#[command(after_help = DECISIONS_EXAMPLES)]
pub struct DecisionsArgs {
    /// Show the reasons and the predicted effects
    #[arg(long)]
    pub why: bool,
    /// Number of decisions to show
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: u32,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the decisions as JSON
    #[arg(long)]
    pub json: bool,
}

//! Arguments of `fulmar control`, `fulmar decisions` and `fulmar forecast`.

use std::path::PathBuf;

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

const FORECAST_EXAMPLES: &str = "\
Examples:
  fulmar forecast                           the load of the cluster
  fulmar forecast shop --svg shop.svg       a tenant, and a chart
  fulmar forecast --node n1 --json

The controller keeps the series of the cluster, its nodes and the 1,000 busiest tenants, and uses the
method with the smallest error so far. A forecast of the past is what was expected at the horizon,
which is what starting a node and moving tenants to it take, twice.

In SQL, in the database `fulmar`:
  SELECT * FROM fulmar.forecast WHERE series = 'cluster';
  SELECT * FROM fulmar.forecast_errors;";

/// `fulmar forecast`
#[derive(Args, Debug)]
#[command(after_help = FORECAST_EXAMPLES)]
pub struct ForecastArgs {
    /// Show the load of this tenant [default: the cluster's]
    #[arg(value_name = "TENANT", conflicts_with_all = ["node", "cluster"])]
    pub tenant: Option<String>,
    /// Show the load of this node
    #[arg(long, value_name = "NAME", conflicts_with = "cluster")]
    pub node: Option<String>,
    /// Show the load of the cluster
    #[arg(long)]
    pub cluster: bool,
    /// Write a chart of the load and its forecast
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// The node to connect to.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print the series as JSON
    #[arg(long)]
    pub json: bool,
}

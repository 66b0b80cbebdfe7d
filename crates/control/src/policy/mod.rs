//! Policy: when to act, for which tenants, on which nodes, and by which mechanism (ShuttleDB 4).
//!
//! step | module | what
//! --- | --- | ---
//! when | [`when`] | thresholds with hysteresis, forecasts, and a plan over time ([`node_plan`])
//! ahead | [`outlook`] | the loads within the horizon, by partition
//! tenants | [`tenants`] | benefit over cost
//! where | [`place`] | site, rack, load
//! which | [`which`] | ShuttleDB's Table 1
//!
//! [`Controller::decide`] combines them: one call per round with a picture and a forecast returns
//! [`Decision`]s. A decision is data: what to do, why, and what it is predicted to change, so that
//! an operator can read it, and compare it later with what came of it. Nothing is done here.
//!
//! What an operator can set: pinned partitions and forbidden nodes (in the picture), the minimum
//! and maximum of nodes, the cool-down per tenant, and a maintenance window, outside of which no
//! nodes are removed.

mod controller;
pub mod node_plan;
pub mod outlook;
pub mod place;
mod slow;
pub mod tenants;
#[cfg(test)]
mod tests;
pub mod when;
pub mod which;

use serde::Serialize;

pub use controller::Controller;
pub use outlook::Outlook;

use crate::picture::Picture;
use crate::plan::{CostModel, Evaluation, Move};
use crate::planners;

/// Moves must lower the utilisation of the node that they relieve by this much. Loads vary more from
/// round to round than a smaller gain, so that tenants would be moved to and fro.
const MIN_GAIN: f64 = 0.05;

/// Settings of a policy. Utilisations are shares of a node's capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// A node above this is overloaded.
    pub high: f64,
    /// A cluster whose mean is below this has too many nodes.
    pub low: f64,
    /// The mean utilisation that nodes are added or removed for.
    pub target: f64,
    /// How long a threshold must be exceeded before nodes are added, in seconds.
    pub hold_up_s: f64,
    /// How long the mean must be below `low` before nodes are removed, in seconds.
    pub hold_down_s: f64,
    /// ElasTraS's rule: nodes are added if this share of the nodes is above `high`.
    pub overloaded_share: f64,
    /// What a node takes from its request until it accepts moves, in seconds.
    pub node_start_s: f64,
    /// The smallest number of nodes.
    pub min_nodes: usize,
    /// The largest number of nodes.
    pub max_nodes: usize,
    /// When nodes may be removed.
    pub maintenance: Option<Window>,
    /// The planner of all moves, by name.
    pub planner: &'static str,
    /// Settings of the planner; its `cool_down_s` is the cool-down per tenant.
    pub planning: planners::Settings,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            high: 0.77,
            low: 0.5,
            target: 0.72,
            hold_up_s: 60.0,
            hold_down_s: 600.0,
            overloaded_share: 0.1,
            node_start_s: 60.0,
            min_nodes: 1,
            max_nodes: usize::MAX,
            maintenance: None,
            planner: "local-search",
            planning: planners::Settings { epsilon: 0.05, ..planners::Settings::default() },
        }
    }
}

/// A daily maintenance window, in seconds after midnight on the clock of the pictures. A window
/// whose end is before its start spans midnight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Its start.
    pub from_s: f64,
    /// Its end.
    pub to_s: f64,
}

impl Window {
    /// Returns true if a time is within the window.
    pub fn contains(&self, at_s: f64) -> bool {
        let time = at_s.rem_euclid(86_400.0);
        match self.from_s <= self.to_s {
            true => (self.from_s..self.to_s).contains(&time),
            false => time >= self.from_s || time < self.to_s,
        }
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "action")]
pub enum Action {
    /// Start nodes.
    AddNodes {
        /// How many.
        count: usize,
    },
    /// Empty nodes and stop them.
    Drain {
        /// Their names, the least loaded first.
        nodes: Vec<String>,
    },
    /// Keep nodes that are being drained.
    KeepNodes {
        /// Their names.
        nodes: Vec<String>,
    },
    /// Move items.
    Move {
        /// The planner.
        planner: &'static str,
        /// The moves, in order.
        moves: Vec<Move>,
    },
    /// Give one tenant more or less, by a mechanism of Table 1.
    Tenant {
        /// The tenant.
        tenant: String,
        /// The node that gets it, if it moves.
        #[serde(skip_serializing_if = "Option::is_none")]
        to: Option<String>,
        /// The mechanisms, in order.
        steps: Vec<which::Step>,
    },
}

/// Why.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "reason")]
pub enum Reason {
    /// A measured value is above or below a threshold, and has been for a time.
    Threshold {
        /// What was measured.
        quantity: &'static str,
        /// Its value.
        value: f64,
        /// The threshold.
        threshold: f64,
        /// For how long, in seconds.
        for_s: f64,
    },
    /// The load is forecast to cross what the nodes can serve.
    Forecast {
        /// The forecasting method.
        method: &'static str,
        /// The load in CPUs.
        load: f64,
        /// What the nodes can serve at the target utilisation, in CPUs.
        capacity: f64,
        /// When, in seconds from now.
        in_s: f64,
    },
    /// A tenant's load is forecast to grow.
    Growth {
        /// The tenant.
        tenant: String,
        /// Its load now, in CPUs.
        load: f64,
        /// Its load then, in CPUs.
        forecast: f64,
        /// When, in seconds from now.
        in_s: f64,
    },
    /// A plan over time asks for a number of nodes.
    NodePlan {
        /// Nodes now.
        from: usize,
        /// Nodes after the first move.
        to: usize,
        /// Node-seconds until the horizon.
        node_seconds: f64,
        /// Seconds until the horizon during which the load exceeds what can be served.
        short_s: f64,
    },
    /// There are fewer nodes than the minimum, or more than the maximum.
    NodeLimit {
        /// Nodes now.
        nodes: usize,
        /// The minimum or maximum.
        limit: usize,
    },
    /// Nodes do not serve, or are being drained.
    NodesLeave {
        /// Their names.
        nodes: Vec<String>,
    },
    /// A node has been much slower than the others for a long time.
    SlowNode {
        /// Its name.
        node: String,
    },
    /// A node needs more memory than it has.
    Memory {
        /// How many nodes.
        nodes: usize,
    },
    /// A tenant's latency is above its objective.
    Latency {
        /// Its smoothed latency in milliseconds.
        latency_ms: f64,
        /// Its objective in milliseconds.
        objective_ms: f64,
    },
    /// Moving this tenant frees enough for a late one of its node at a lower cost.
    CheaperTenant {
        /// The late tenant.
        late: String,
        /// The load that leaves, in CPUs.
        load: f64,
        /// The predicted duration of the move, in seconds.
        seconds: f64,
    },
    /// A tenant on an overloaded node has hot keys (E-Store).
    HotKeys {
        /// The tenant.
        tenant: String,
        /// The keys, the hottest first.
        keys: Vec<HotKey>,
        /// The highest utilisation of a node that the planner would reach if it could move them.
        highest: f64,
    },
    /// Nodes were added and are empty.
    NewNodes {
        /// How many.
        nodes: usize,
    },
    /// The cell of ShuttleDB's Table 1 that was used.
    Table1(which::Cell),
    /// A mechanism that the choice needs does not exist yet; the step was replaced or left out.
    MissingMechanism {
        /// The mechanism.
        mechanism: which::Mechanism,
    },
}

/// A key that is accessed often.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HotKey {
    /// Its table and value.
    pub key: String,
    /// Its load in CPUs.
    pub load: f64,
}

/// The predicted effect of a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Effect {
    /// Serving nodes before.
    pub nodes_before: usize,
    /// Serving nodes after.
    pub nodes_after: usize,
    /// Mean utilisation before, at the forecast load.
    pub mean_before: f64,
    /// Mean utilisation after, at the forecast load.
    pub mean_after: f64,
    /// Of moves: the highest utilisation before and after, the bytes and the duration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moves: Option<Evaluation>,
}

/// A decision: what, why, and what it is predicted to change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// When it was made, on the clock of the picture, in seconds.
    pub at_s: f64,
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
    /// Why, the main reason first.
    pub reasons: Vec<Reason>,
    /// What it is predicted to change.
    pub predicted: Effect,
}

/// The time to move all partitions over one pair of nodes, in seconds.
pub fn full_s(picture: &Picture, cost: &CostModel) -> f64 {
    let bytes: f64 = picture.partitions.iter().map(|partition| partition.bytes as f64).sum();
    bytes / cost.site_bytes_per_s + cost.fixed_s * picture.partitions.len() as f64
}

/// Forecasts reach this many changes of the number of nodes ahead. P-Store needs two: a node that is
/// removed now may have to be added again.
const HORIZON_CHANGES: f64 = 2.0;

/// The horizon of forecasts, in seconds: twice what it takes to start one more node and to move its
/// share of the data to it ([`node_plan::Model::duration`]).
pub fn horizon_s(picture: &Picture, settings: &Settings) -> f64 {
    let nodes = picture.nodes.len().max(1) as f64;
    let moves_s = full_s(picture, &settings.planning.cost) / (nodes + 1.0);
    HORIZON_CHANGES * (settings.node_start_s + moves_s)
}

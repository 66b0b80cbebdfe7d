//! What a simulation reports.

use serde::Serialize;

use super::trace::{Hole, STEP_S};
use crate::forecast::MethodError;
use crate::policy::Decision;

/// What one policy did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PolicyReport {
    /// The policy; `static` is static provisioning for the peak.
    pub policy: String,
    /// Nodes times hours.
    pub node_hours: f64,
    /// Node-hours over those of the clairvoyant plan.
    pub cost_ratio: f64,
    /// Node-hours over those of static provisioning for the peak.
    pub over_static: f64,
    /// Tenant-minutes above the objective, in percent of all.
    pub late_percent: f64,
    /// Moves that were completed.
    pub moves: usize,
    /// Bytes that were moved.
    pub bytes: u64,
    /// Nodes that were added.
    pub nodes_added: usize,
    /// Nodes that were drained.
    pub nodes_removed: usize,
    /// Of these, nodes that were kept because they were needed again.
    pub nodes_kept: usize,
    /// Balancing moves of a tenant within its cool-down. Must be 0.
    pub cool_down_violations: usize,
    /// The nodes of each minute, for plots.
    #[serde(skip)]
    pub nodes: Vec<usize>,
    /// The first decisions, without moves.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<Decision>,
    #[serde(skip)]
    late_minutes: u64,
    #[serde(skip)]
    tenant_minutes: u64,
}

/// What one minute adds to a report.
pub(super) struct Minute {
    pub(super) nodes: usize,
    pub(super) late: usize,
    pub(super) tenants: usize,
}

impl PolicyReport {
    pub(super) fn record(&mut self, minute: Minute) {
        self.nodes.push(minute.nodes);
        self.node_hours += minute.nodes as f64 * STEP_S / 3600.0;
        self.late_minutes += minute.late as u64;
        self.tenant_minutes += minute.tenants as u64;
        self.late_percent = 100.0 * self.late_minutes as f64 / self.tenant_minutes.max(1) as f64;
    }
}

/// How good the forecasts were.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ForecastReport {
    /// Steps from a forecast to the value that it is judged by.
    pub horizon: usize,
    /// The mean absolute error of the forecasts that the policies got, in CPUs.
    pub error: f64,
    /// The mean absolute error of the last value, in CPUs.
    pub last_value_error: f64,
    /// The first over the second: below 1 is a gain.
    pub gain: f64,
    /// The errors of all methods at the end.
    pub methods: Vec<MethodError>,
}

/// The report of a simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Hours that were simulated.
    pub hours: f64,
    /// Tenants.
    pub tenants: usize,
    /// Nodes of static provisioning for the peak.
    pub static_nodes: usize,
    /// Node-hours of the clairvoyant plan: per minute, the load over 80 % of a node's capacity,
    /// rounded up.
    pub clairvoyant_node_hours: f64,
    /// The nodes of the clairvoyant plan per minute, for plots.
    #[serde(skip)]
    pub clairvoyant_nodes: Vec<usize>,
    /// How good the forecasts were.
    pub forecast: ForecastReport,
    /// Holes of the trace file, which were interpolated.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holes: Vec<Hole>,
    /// The policies.
    pub policies: Vec<PolicyReport>,
}

//! The simulator: forecasts, policies and planners on virtual time, with a model of nodes.
//!
//! ```text
//!   trace --> tenants' loads --> total load --> Selector --> forecasts (the same for all policies)
//!                  |                                             |
//!                  v                                             v
//!               picture  ---------------------------------> Controller  --> decisions
//!                  ^                                                            |
//!                  +---- nodes start, moves take time, latency follows load <---+
//! ```
//!
//! The code that decides is the code of the cluster; [`model`] replaces nodes and tenants, and
//! [`trace`] their clients. A step is one minute.
//!
//! Each policy starts with the nodes that its target utilisation needs. It is compared with the
//! *clairvoyant* plan, which has the nodes for 80 % utilisation in every minute and moves for free,
//! and with `static` provisioning for the peak.

pub mod model;
mod reconfiguration;
mod report;
mod run;
#[cfg(test)]
mod tests;
pub mod trace;

pub use reconfiguration::{Reconfiguration, Second, monitored};
pub use report::{ForecastReport, PolicyReport, Report};
pub use trace::{Trace, TraceError};

use crate::forecast::{Selector, SelectorSettings};
use crate::policy::{Controller, Outlook, Settings};
use model::{CLAIRVOYANT_UTILISATION, Tenants};
use run::Run;
use trace::STEP_S;

/// The horizon of forecasts: the start of a node and the moves to it, in steps.
pub const HORIZON: usize = 15;

/// The name of static provisioning for the peak among the policies.
pub const STATIC: &str = "static";

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// Nodes of static provisioning: the peak load is 80 % of their capacity.
    pub nodes: usize,
    /// Tenants.
    pub tenants: usize,
    /// The load over time.
    pub trace: Trace,
    /// Settings of all policies. The maximum of nodes applies to all but static provisioning.
    pub settings: Settings,
}

/// The forecasts of all steps.
struct Forecasts {
    outlooks: Vec<Outlook>,
    report: ForecastReport,
}

impl Simulation {
    /// Runs policies (of [`crate::policy::when::RULES`], or [`STATIC`]) on the trace. `None` if a
    /// policy or the planner is unknown.
    pub fn run(&self, policies: &[&str]) -> Option<Report> {
        let capacity = 1.0;
        let peak = self.nodes as f64 * CLAIRVOYANT_UTILISATION * capacity;
        let tenants = Tenants::new(self.tenants, peak, capacity);
        let totals = self.totals(&tenants);
        let forecasts = self.forecasts(&totals);
        let nodes_for =
            |load: f64, utilisation: f64| ((load / (utilisation * capacity)).ceil() as usize).max(1);
        let clairvoyant: Vec<usize> =
            totals.iter().map(|load| nodes_for(*load, CLAIRVOYANT_UTILISATION)).collect();
        let hours = |nodes: usize| nodes as f64 * STEP_S / 3600.0;
        let clairvoyant_node_hours: f64 = clairvoyant.iter().map(|nodes| hours(*nodes)).sum();
        // Noise and drift can raise the peak above that of the trace.
        let static_nodes = self.nodes.max(clairvoyant.iter().copied().max().unwrap_or(1));
        let static_node_hours = hours(static_nodes) * totals.len() as f64;

        let mut reports = Vec::new();
        for policy in policies {
            let is_static = *policy == STATIC;
            let mut settings = self.settings.clone();
            let start = nodes_for(totals[0], settings.target).max(settings.min_nodes).min(settings.max_nodes);
            if is_static {
                (settings.min_nodes, settings.max_nodes) = (static_nodes, static_nodes);
            }
            let rule = if is_static { "thresholds" } else { policy };
            let controller = Controller::new(rule, settings.clone())?;
            let nodes = if is_static { static_nodes } else { start };
            let mut run = Run::new(&tenants, nodes, capacity, controller, settings);
            for (step, (share, outlook)) in self.trace.load.iter().zip(&forecasts.outlooks).enumerate() {
                run.step(step, *share, outlook);
            }
            let mut report = run.finish(policy);
            report.cost_ratio = report.node_hours / clairvoyant_node_hours;
            report.over_static = report.node_hours / static_node_hours;
            reports.push(report);
        }
        Some(Report {
            hours: totals.len() as f64 * STEP_S / 3600.0,
            tenants: self.tenants,
            static_nodes,
            clairvoyant_node_hours,
            clairvoyant_nodes: clairvoyant,
            forecast: forecasts.report,
            holes: self.trace.holes.clone(),
            policies: reports,
        })
    }

    /// The load of all tenants at each step, in CPUs.
    fn totals(&self, tenants: &Tenants) -> Vec<f64> {
        let total = |(step, share): (usize, &f64)| {
            let at_s = step as f64 * STEP_S;
            (0..tenants.len()).map(|tenant| tenants.load(tenant, step, at_s, *share)).sum()
        };
        self.trace.load.iter().enumerate().map(total).collect()
    }

    fn forecasts(&self, totals: &[f64]) -> Forecasts {
        let mut selector = Selector::new(SelectorSettings::new(HORIZON, self.trace.period));
        let mut outlooks: Vec<Outlook> = Vec::with_capacity(totals.len());
        let (mut error, mut last_error, mut judged) = (0.0, 0.0, 0.0);
        let mut waiting: Vec<f64> = Vec::with_capacity(totals.len());
        for (step, load) in totals.iter().enumerate() {
            selector.observe(*load);
            if let Some(made) = step.checked_sub(HORIZON) {
                error += (waiting[made] - load).abs();
                last_error += (totals[made] - load).abs();
                judged += 1.0;
            }
            let (_, path) = selector.forecast().unwrap_or(("last-value", vec![*load; HORIZON]));
            waiting.push(path.last().copied().unwrap_or(*load));
            outlooks.push(Outlook::from_selector(&selector, STEP_S));
        }
        let mean = |sum: f64| if judged > 0.0 { sum / judged } else { 0.0 };
        let (error, last_value_error) = (mean(error), mean(last_error));
        let gain = if last_value_error > 0.0 { error / last_value_error } else { 1.0 };
        let methods = selector.errors();
        let report = ForecastReport { horizon: HORIZON, error, last_value_error, gain, methods };
        Forecasts { outlooks, report }
    }
}

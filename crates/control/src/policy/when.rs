//! When to add or remove nodes, and how many: five rules, by name.
//!
//! name | rule | from
//! --- | --- | ---
//! `watermarks` | mean above 90 % or below 50 %: one node more or less | E-Store 4.1, 5.1
//! `node-share` | a share of the nodes above the high threshold; the mean below `low` | ElasTraS 6.5
//! `thresholds` | mean utilisation or latency beyond a threshold for a time | ShuttleDB 4, step 1
//! `forecast` | the same, or the forecast crosses within the horizon | ShuttleDB 4, step 1
//! `planned` | the first change of the cheapest plan over time | P-Store, [`super::node_plan`]
//!
//! The two thresholds are apart, and both must be exceeded for a time: hysteresis in level and
//! time.

use super::node_plan::{self, Model};
use super::{Reason, Settings};

/// Rounds in which a plan over time must ask for fewer nodes, at least, before any is removed (P-Store).
const CONFIRM_ROUNDS: u32 = 3;

/// E-Store's watermarks (4.1).
const HIGH_WATERMARK: f64 = 0.9;
const LOW_WATERMARK: f64 = 0.5;

/// What a rule sees.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// The time of the picture, in seconds.
    pub at_s: f64,
    /// Nodes that serve or start, without those that leave.
    pub nodes: usize,
    /// The nodes of these that start, and serve nothing yet.
    pub joining: usize,
    /// The load of all partitions, in CPUs.
    pub load: f64,
    /// The mean capacity of a node, in CPUs.
    pub node_capacity: f64,
    /// The share of the serving nodes that are above the high threshold.
    pub share_above: f64,
    /// The share of the tenants with an objective whose latency is above it.
    pub late_share: f64,
    /// The forecasting method.
    pub method: &'static str,
    /// The forecast loads, one per step, in CPUs.
    pub forecast: Vec<f64>,
    /// Length of a step, in seconds.
    pub step_s: f64,
    /// The time to move all partitions over one pair of nodes, in seconds.
    pub full_s: f64,
}

/// A wanted number of nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// Nodes.
    pub nodes: usize,
    /// Why.
    pub reasons: Vec<Reason>,
}

/// A rule for the number of nodes.
pub trait Rule: Send {
    /// Its name, as in `fulmar simulate --policy NAME`.
    fn name(&self) -> &'static str;

    /// Called once per round. Returns the wanted number of nodes if it should change.
    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish>;
}

/// The names of all rules.
pub const RULES: [&str; 5] = ["watermarks", "node-share", "thresholds", "forecast", "planned"];

/// Makes a rule by its name.
pub fn rule(name: &str) -> Option<Box<dyn Rule>> {
    match name {
        "watermarks" => Some(Box::new(Watermarks)),
        "node-share" => Some(Box::new(NodeShare::default())),
        "thresholds" => Some(Box::new(Thresholds::default())),
        "forecast" => Some(Box::new(Ahead::default())),
        "planned" => Some(Box::new(Planned::default())),
        _ => None,
    }
}

/// Remembers since when a condition has held.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hold {
    since_s: Option<f64>,
}

impl Hold {
    /// For how long a condition has held without interruption, in seconds; `None` if it does not.
    pub fn update(&mut self, holds: bool, at_s: f64) -> Option<f64> {
        self.since_s = holds.then(|| self.since_s.unwrap_or(at_s));
        self.since_s.map(|since| at_s - since)
    }
}

impl View {
    fn mean(&self) -> f64 {
        self.load / (self.nodes as f64 * self.node_capacity).max(f64::MIN_POSITIVE)
    }

    /// The nodes that serve a load at the target utilisation.
    fn nodes_for(&self, load: f64, settings: &Settings) -> usize {
        self.model(settings).nodes_for(load)
    }

    /// The nodes for a load that is too high for the present ones: at least one more. Nodes that start
    /// may be enough, which shows only when they serve.
    fn more_nodes_for(&self, load: f64, settings: &Settings) -> usize {
        let least = if self.joining > 0 { self.nodes } else { self.nodes + 1 };
        self.nodes_for(load, settings).max(least)
    }

    fn model(&self, settings: &Settings) -> Model {
        let step_s = self.step_s.max(f64::MIN_POSITIVE);
        Model {
            node_load: (self.node_capacity * settings.target).max(f64::MIN_POSITIVE),
            full_steps: self.full_s / step_s,
            start_steps: settings.node_start_s / step_s,
            min_nodes: settings.min_nodes,
            max_nodes: settings.max_nodes,
        }
    }
}

fn threshold(quantity: &'static str, value: f64, threshold: f64, for_s: f64) -> Reason {
    Reason::Threshold { quantity, value, threshold, for_s }
}

fn wish(nodes: usize, view: &View, settings: &Settings, reason: Reason) -> Option<Wish> {
    let nodes = nodes.max(settings.min_nodes.max(1)).min(settings.max_nodes);
    (nodes != view.nodes).then(|| Wish { nodes, reasons: vec![reason] })
}

struct Watermarks;

impl Rule for Watermarks {
    fn name(&self) -> &'static str {
        "watermarks"
    }

    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish> {
        let mean = view.mean();
        let reason = |limit| threshold("mean utilisation", mean, limit, 0.0);
        if mean > HIGH_WATERMARK {
            // One node at a time.
            let nodes = if view.joining > 0 { view.nodes } else { view.nodes + 1 };
            return wish(nodes, view, settings, reason(HIGH_WATERMARK));
        }
        (mean < LOW_WATERMARK)
            .then(|| wish(view.nodes.saturating_sub(1), view, settings, reason(LOW_WATERMARK)))
            .flatten()
    }
}

#[derive(Default)]
struct NodeShare {
    low: Hold,
}

impl Rule for NodeShare {
    fn name(&self) -> &'static str {
        "node-share"
    }

    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish> {
        let low_for = self.low.update(view.mean() < settings.low, view.at_s);
        if view.share_above >= settings.overloaded_share {
            let reason = threshold("overloaded nodes", view.share_above, settings.overloaded_share, 0.0);
            return wish(view.more_nodes_for(view.load, settings), view, settings, reason);
        }
        let for_s = low_for.filter(|for_s| *for_s >= settings.hold_down_s)?;
        let nodes = view.nodes_for(view.load, settings).min(view.nodes);
        wish(nodes, view, settings, threshold("mean utilisation", view.mean(), settings.low, for_s))
    }
}

#[derive(Default)]
struct Thresholds {
    high: Hold,
    late: Hold,
    low: Hold,
}

impl Rule for Thresholds {
    fn name(&self) -> &'static str {
        "thresholds"
    }

    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish> {
        let mean = view.mean();
        let high = self.high.update(mean > settings.high, view.at_s);
        // A few late tenants are a matter of balance; many are one of capacity. If there is plenty of
        // it, or is about to be, more does not help.
        let are_late = view.late_share >= settings.overloaded_share;
        let has_plenty = mean < settings.low || view.joining > 0;
        let late = self.late.update(are_late && !has_plenty, view.at_s);
        let low = self.low.update(mean < settings.low && !are_late, view.at_s);
        if let Some(for_s) = high.filter(|for_s| *for_s >= settings.hold_up_s) {
            let reason = threshold("mean utilisation", mean, settings.high, for_s);
            return wish(view.more_nodes_for(view.load, settings), view, settings, reason);
        }
        if let Some(for_s) = late.filter(|for_s| *for_s >= settings.hold_up_s) {
            let reason = threshold("late tenants", view.late_share, settings.overloaded_share, for_s);
            let wish = wish(view.more_nodes_for(view.load, settings), view, settings, reason)?;
            // Tenants are late until the new nodes have taken over some of the load.
            self.late = Hold::default();
            return Some(wish);
        }
        let for_s = low.filter(|for_s| *for_s >= settings.hold_down_s)?;
        let reason = threshold("mean utilisation", mean, settings.low, for_s);
        wish(view.nodes_for(view.load, settings).min(view.nodes), view, settings, reason)
    }
}

/// Thresholds, and the forecast for what they see too late.
#[derive(Default)]
struct Ahead {
    now: Thresholds,
    low: Hold,
}

impl Rule for Ahead {
    fn name(&self) -> &'static str {
        "forecast"
    }

    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish> {
        let reactive = self.now.wish(view, settings);
        let capacity = view.nodes as f64 * view.node_capacity;
        let peak = view.forecast.iter().copied().fold(view.load, f64::max);
        let are_late = view.late_share >= settings.overloaded_share;
        let low_for = self.low.update(peak < settings.low * capacity && !are_late, view.at_s);
        let crossing = view.forecast.iter().position(|load| *load > settings.high * capacity);
        if let Some(at) = crossing {
            let (load, capacity) = (view.forecast[at], settings.high * capacity);
            let in_s = (at + 1) as f64 * view.step_s;
            let reason = Reason::Forecast { method: view.method, load, capacity, in_s };
            return wish(view.more_nodes_for(peak, settings), view, settings, reason);
        }
        if let Some(up) = reactive.filter(|wish| wish.nodes > view.nodes) {
            return Some(up);
        }
        let for_s = low_for.filter(|for_s| *for_s >= settings.hold_down_s)?;
        let reason = threshold("forecast mean utilisation", peak / capacity, settings.low, for_s);
        wish(view.nodes_for(peak, settings).min(view.nodes), view, settings, reason)
    }
}

/// Rounds in succession in which the plan began with a removal.
#[derive(Clone, Copy)]
struct Removals {
    since_s: f64,
    rounds: u32,
    /// The most nodes that a plan kept.
    most: usize,
}

#[derive(Default)]
struct Planned {
    removals: Option<Removals>,
}

impl Rule for Planned {
    fn name(&self) -> &'static str {
        "planned"
    }

    fn wish(&mut self, view: &View, settings: &Settings) -> Option<Wish> {
        let mut loads = view.forecast.clone();
        if loads.is_empty() {
            loads.push(view.load);
        }
        // During an overload that was not forecast, a forecast that it ends is not believed either.
        let high = settings.high * view.nodes as f64 * view.node_capacity;
        if view.load > high {
            loads.iter_mut().for_each(|load| *load = load.max(view.load));
        }
        let model = view.model(settings);
        let plan = node_plan::plan(&loads, view.nodes, &model);
        let first = plan.changes.first().filter(|change| change.at == 0).copied();
        let removals = self.removals.take();
        let change = first?;
        let nodes = match change.to < change.from {
            true => {
                let before = removals.unwrap_or(Removals { since_s: view.at_s, rounds: 0, most: 0 });
                let (rounds, most) = (before.rounds + 1, before.most.max(change.to));
                if rounds < CONFIRM_ROUNDS || view.at_s - before.since_s < settings.hold_down_s {
                    self.removals = Some(Removals { rounds, most, ..before });
                    return None;
                }
                most
            }
            false => change.to,
        };
        let reason = Reason::NodePlan {
            from: change.from,
            to: nodes,
            node_seconds: plan.node_steps * view.step_s,
            short_s: plan.short_steps as f64 * view.step_s,
        };
        let peak = loads.iter().copied().enumerate().max_by(|left, right| left.1.total_cmp(&right.1));
        let mut wish = wish(nodes, view, settings, reason)?;
        wish.reasons.extend(peak.map(|(at, load)| Reason::Forecast {
            method: view.method,
            load,
            capacity: model.node_load * view.nodes as f64,
            in_s: (at + 1) as f64 * view.step_s,
        }));
        Some(wish)
    }
}

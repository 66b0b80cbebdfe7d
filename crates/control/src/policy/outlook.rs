//! The loads within the horizon: of all partitions together, and of those that have a forecast of
//! their own.
//!
//! The load of a partition in a step ahead is
//!
//! ```text
//! load * factor + growth
//! growth   the forecast change of the partition, if it has a forecast and the change is above 0
//! factor   (forecast load of all - forecast changes of single partitions) / load of all, at least 1
//! ```
//!
//! Growth that is known to be one tenant's is therefore counted at that tenant, and the rest, with
//! the margin of error, at all. Loads never count for less than they are now. Moves are planned for
//! the step in which the highest utilisation of a node is the highest.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::Reason;
use crate::forecast::Selector;
use crate::forecast::set::SeriesSet;
use crate::picture::{NodeState, Picture};

/// Forecasts are raised by this many mean errors at the horizon, and less before it.
const ERROR_MARGIN: f64 = 1.5;

/// The forecast of a round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outlook {
    /// The method.
    pub method: &'static str,
    /// The load of all partitions in the next steps, in CPUs. Empty if nothing is forecast.
    pub loads: Vec<f64>,
    /// Length of a step, in seconds.
    pub step_s: f64,
    /// How the loads of single partitions change in these steps, in CPUs, by name.
    pub changes: Arc<HashMap<String, Vec<f64>>>,
}

impl Outlook {
    /// The forecast of the method that has been best. It is raised by a margin of its own error,
    /// because a node too few costs more than a node too many.
    pub fn from_selector(selector: &Selector, step_s: f64) -> Outlook {
        let Some((method, mut loads)) = selector.forecast() else {
            return Outlook { step_s, ..Outlook::default() };
        };
        let errors = selector.errors();
        let error =
            errors.iter().find(|error| error.method == method).and_then(|error| error.error).unwrap_or(0.0);
        let horizon = loads.len() as f64;
        for (step, load) in (1..).zip(&mut loads) {
            *load = (*load + ERROR_MARGIN * error * f64::from(step) / horizon).max(0.0);
        }
        Outlook { method, loads, step_s, changes: Arc::default() }
    }

    /// The forecasts of a cluster. `changes` are those of its tenants ([`SeriesSet::changes`]).
    pub fn from_set(set: &SeriesSet, changes: Arc<HashMap<String, Vec<f64>>>) -> Outlook {
        Outlook { changes, ..Outlook::from_selector(set.cluster().selector(), set.step_s()) }
    }

    fn change(&self, partition: &str, step: usize) -> f64 {
        let path = self.changes.get(partition);
        path.and_then(|path| path.get(step)).copied().filter(|change| change.is_finite()).unwrap_or(0.0)
    }
}

/// A picture in the step ahead that moves are planned for.
pub(super) struct Ahead<'a> {
    picture: &'a Picture,
    outlook: &'a Outlook,
    /// The step; `None` for now.
    step: Option<usize>,
    /// The growth of the partitions without a forecast of their own.
    pub factor: f64,
    /// The highest utilisation of an active node.
    pub highest: f64,
}

impl<'a> Ahead<'a> {
    /// Finds the step in which the utilisation of an active node is the highest. `loads` are those of
    /// the nodes now.
    pub fn new(picture: &'a Picture, outlook: &'a Outlook, loads: &[f64]) -> Ahead<'a> {
        let highest = |factor: f64, growth: &[f64]| {
            let nodes = picture.nodes.iter().zip(loads).zip(growth);
            let active = nodes.filter(|((node, _), _)| node.state == NodeState::Active);
            let utilisation = active.map(|((node, load), growth)| (load * factor + growth) / node.capacity);
            utilisation.fold(0.0, f64::max)
        };
        let mut growth = vec![0.0; picture.nodes.len()];
        let now = highest(1.0, &growth);
        let mut ahead = Ahead { picture, outlook, step: None, factor: 1.0, highest: now };
        let total = picture.load();
        if total <= 0.0 {
            return ahead;
        }
        let by_name: HashMap<&str, usize> =
            picture.nodes.iter().enumerate().map(|(index, node)| (node.name.as_str(), index)).collect();
        // Few partitions have a forecast of their own.
        let known: Vec<(&str, Option<usize>)> = match outlook.changes.is_empty() {
            true => Vec::new(),
            false => {
                let known = |name: &str| outlook.changes.contains_key(name);
                let partitions = picture.partitions.iter().filter(|partition| known(&partition.name));
                partitions
                    .map(|partition| {
                        (partition.name.as_str(), by_name.get(partition.owner.as_str()).copied())
                    })
                    .collect()
            }
        };
        for (step, load) in outlook.loads.iter().enumerate() {
            growth.fill(0.0);
            let mut known_change = 0.0;
            for (name, owner) in &known {
                let change = outlook.change(name, step);
                known_change += change;
                if let Some(growth) = owner.and_then(|owner| growth.get_mut(owner)) {
                    *growth += change.max(0.0);
                }
            }
            let factor = ((load - known_change) / total).max(1.0);
            let then = highest(factor, &growth);
            // Without active nodes, the growth counts alone.
            if then >= ahead.highest && (then > ahead.highest || factor > ahead.factor) {
                (ahead.step, ahead.factor, ahead.highest) = (Some(step), factor, then);
            }
        }
        ahead
    }

    /// The picture with the growth of partitions that have a forecast of their own. The factor is not
    /// applied: what is acceptable is divided by it.
    pub fn picture(&self) -> Cow<'a, Picture> {
        let grown = |name: &str| self.growth(name) > 0.0;
        if !self.picture.partitions.iter().any(|partition| grown(&partition.name)) {
            return Cow::Borrowed(self.picture);
        }
        let mut picture = self.picture.clone();
        for partition in &mut picture.partitions {
            partition.load += self.growth(&partition.name) / self.factor;
        }
        Cow::Owned(picture)
    }

    fn growth(&self, partition: &str) -> f64 {
        let Some(step) = self.step.filter(|_| !self.outlook.changes.is_empty()) else { return 0.0 };
        self.outlook.change(partition, step).max(0.0)
    }

    /// The tenant with the greatest growth, if one grows.
    pub fn reason(&self) -> Option<Reason> {
        let step = self.step?;
        let growth = |name: &String| self.growth(name);
        let names = self.outlook.changes.keys();
        let most =
            names.max_by(|left, right| growth(left).total_cmp(&growth(right)).then(right.cmp(left)))?;
        let partition = self.picture.partitions.iter().find(|partition| partition.name == *most)?;
        let (tenant, load) = (most.clone(), partition.load);
        let forecast = load + growth(most);
        let in_s = (step + 1) as f64 * self.outlook.step_s;
        (forecast > load).then_some(Reason::Growth { tenant, load, forecast, in_s })
    }
}

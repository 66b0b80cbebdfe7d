//! The number of nodes over time: P-Store's dynamic program.
//!
//! Given the forecast load of the next steps, find the cheapest series of node counts that can
//! always serve it. Changing the count from `b` to `a` takes time, because data has to move, and
//! during that time the cluster can serve less than it will have nodes for:
//!
//! ```text
//! moved share     1 - min(a, b) / max(a, b)
//! parallel moves  min(a, b, |a - b|)                    a node takes part in one move at a time
//! duration        start of nodes (if a > b) + full_s * moved share / parallel moves
//! capacity        Q / ((1 - f) / b + f / a)             after a share f of the move
//! ```
//!
//! `Q` is what one node serves, `full_s` the time to move all partitions over one pair of nodes. The
//! load on a node falls with the data that has left it, which gives the *effective capacity* of the
//! last line. A change costs the larger count of nodes for its whole duration.
//!
//! Beyond P-Store:
//!
//! - Each node that is added or removed has a price in node-steps, so that a node is not removed
//!   for a saving of a few minutes.
//! - A load that exceeds the capacity has a price per node-second that is missing, instead of being
//!   infeasible. If a forecast rises faster than data can move, the answer is the least bad one.
//! - Only node counts that suffice exactly for some step are candidates. The work is `O(steps^4)`,
//!   whatever the number of nodes; with 15 steps that is less than a millisecond.

/// What the program knows about the cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// What a node serves, in CPUs: capacity times target utilisation.
    pub node_load: f64,
    /// The time to move all partitions over one pair of nodes, in steps.
    pub full_steps: f64,
    /// The time until a requested node accepts moves, in steps.
    pub start_steps: f64,
    /// The smallest number of nodes.
    pub min_nodes: usize,
    /// The largest number of nodes.
    pub max_nodes: usize,
}

/// One change of the number of nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// When it starts, in steps from now.
    pub at: usize,
    /// Nodes before.
    pub from: usize,
    /// Nodes after.
    pub to: usize,
    /// How long it takes, in steps.
    pub steps: usize,
}

/// The cheapest series of node counts.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePlan {
    /// The changes in order. Empty if the present number suffices and fewer do not.
    pub changes: Vec<Change>,
    /// Node-steps until the end of the forecast.
    pub node_steps: f64,
    /// Steps in which the load exceeds the effective capacity.
    pub short_steps: usize,
}

/// The price of a missing node-step, in node-steps: serving the load comes first.
const SHORT_PRICE: f64 = 1000.0;

impl Model {
    /// The nodes that serve a load, within the minimum and maximum.
    pub fn nodes_for(&self, load: f64) -> usize {
        let needed = (load / self.node_load - 1e-9).ceil().max(0.0) as usize;
        needed.max(self.min_nodes.max(1)).min(self.max_nodes.max(1))
    }

    /// The duration of a change, in whole steps.
    pub fn duration(&self, from: usize, to: usize) -> usize {
        let (small, large) = (from.min(to), from.max(to));
        if small == large {
            return 0;
        }
        let share = 1.0 - small as f64 / large as f64;
        let parallel = small.min(large - small).max(1);
        let moving = self.full_steps * share / parallel as f64;
        let start = if to > from { self.start_steps } else { 0.0 };
        ((start + moving).ceil() as usize).max(1)
    }

    /// The load that can be served after `done` of `steps` steps of a change, in CPUs.
    fn effective_load(&self, from: usize, to: usize, done: f64, steps: usize) -> f64 {
        let start = if to > from { self.start_steps } else { 0.0 };
        let moving = (steps as f64 - start).max(f64::MIN_POSITIVE);
        let share = ((done - start) / moving).clamp(0.0, 1.0);
        self.node_load / ((1.0 - share) / from.max(1) as f64 + share / to.max(1) as f64)
    }
}

/// The price of adding or removing one node, in node-steps.
const CHANGE_PRICE: f64 = 5.0;

#[derive(Clone, Copy)]
struct Best {
    cost: f64,
    node_steps: f64,
    short_steps: usize,
    /// The step and candidate before.
    from: (usize, usize),
}

/// Plans for the loads of the next steps; `loads[0]` is the load one step from now.
pub fn plan(loads: &[f64], nodes: usize, model: &Model) -> NodePlan {
    let steps = loads.len();
    let mut counts: Vec<usize> =
        loads.iter().map(|load| model.nodes_for(*load)).chain([nodes.max(1)]).collect();
    counts.sort_unstable();
    counts.dedup();
    let start = counts.iter().position(|count| *count == nodes.max(1)).unwrap_or(0);
    let mut best: Vec<Vec<Option<Best>>> = vec![vec![None; counts.len()]; steps + 1];
    best[0][start] = Some(Best { cost: 0.0, node_steps: 0.0, short_steps: 0, from: (0, start) });
    for at in 0..steps {
        for from in 0..counts.len() {
            let Some(so_far) = best[at][from] else { continue };
            for to in 0..counts.len() {
                let next = transition(model, loads, at, (counts[from], counts[to]));
                let until = at + next.steps;
                let total = Best {
                    cost: so_far.cost + next.cost,
                    node_steps: so_far.node_steps + next.node_steps,
                    short_steps: so_far.short_steps + next.short_steps,
                    from: (at, from),
                };
                let place = &mut best[until][to];
                if place.is_none_or(|other| total.cost < other.cost - 1e-9) {
                    *place = Some(total);
                }
            }
        }
    }
    let ends = (0..counts.len()).filter_map(|to| best[steps][to].map(|end| (to, end)));
    let Some((last, end)) = ends.min_by(|left, right| left.1.cost.total_cmp(&right.1.cost)) else {
        return NodePlan { changes: Vec::new(), node_steps: 0.0, short_steps: 0 };
    };
    let mut changes = Vec::new();
    let mut place = (steps, last);
    while place.0 > 0 {
        let Some(Best { from, .. }) = best[place.0][place.1] else { break };
        if from.1 != place.1 {
            let (before, after) = (counts[from.1], counts[place.1]);
            let steps = model.duration(before, after);
            changes.push(Change { at: from.0, from: before, to: after, steps });
        }
        place = from;
    }
    changes.reverse();
    NodePlan { changes, node_steps: end.node_steps, short_steps: end.short_steps }
}

struct Transition {
    steps: usize,
    cost: f64,
    node_steps: f64,
    short_steps: usize,
}

/// Staying at a count for one step, or a change until it is complete or the forecast ends.
fn transition(model: &Model, loads: &[f64], at: usize, (from, to): (usize, usize)) -> Transition {
    let duration = model.duration(from, to);
    let steps = duration.max(1).min(loads.len() - at);
    let mut result = Transition { steps, cost: 0.0, node_steps: 0.0, short_steps: 0 };
    for step in 1..=steps {
        let (earlier, later) = ((step - 1) as f64, step as f64);
        let capacity = match from == to {
            true => model.node_load * from as f64,
            // The lower capacity of both ends of the step.
            false => model
                .effective_load(from, to, earlier, duration)
                .min(model.effective_load(from, to, later, duration)),
        };
        let missing = (loads[at + step - 1] - capacity) / model.node_load;
        if missing > 1e-9 {
            result.short_steps += 1;
            result.cost += missing * SHORT_PRICE;
        }
        result.node_steps += from.max(to) as f64;
    }
    result.cost += result.node_steps + CHANGE_PRICE * from.abs_diff(to) as f64;
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Model =
        Model { node_load: 1.0, full_steps: 8.0, start_steps: 1.0, min_nodes: 1, max_nodes: 100 };

    #[test]
    fn durations_and_effective_capacity_follow_the_formulas() {
        // From 2 to 4: half of the data, two moves in parallel, after one step of starting.
        assert_eq!(MODEL.duration(2, 4), 1 + 2);
        assert_eq!(MODEL.duration(4, 2), 2, "removing needs no start");
        assert_eq!(MODEL.duration(3, 3), 0);
        assert_eq!(MODEL.effective_load(2, 4, 1.0, 3), 2.0, "nothing has moved while nodes start");
        assert!(
            (MODEL.effective_load(2, 4, 2.0, 3) - 8.0 / 3.0).abs() < 1e-9,
            "half of the move: 1 / (1/4 + 1/8)"
        );
        assert_eq!(MODEL.effective_load(2, 4, 3.0, 3), 4.0);
    }

    #[test]
    fn nodes_are_added_just_in_time() {
        let mut loads = vec![1.9; 6];
        loads.extend([3.9; 4]);
        let plan = plan(&loads, 2, &MODEL);
        assert_eq!(plan.changes, [Change { at: 3, from: 2, to: 4, steps: 3 }], "3 steps before the rise");
        assert_eq!(plan.short_steps, 0);
        assert_eq!(plan.node_steps, 3.0 * 2.0 + 7.0 * 4.0);
    }

    #[test]
    fn a_rise_that_is_too_fast_starts_now() {
        let plan = plan(&[3.9; 6], 2, &MODEL);
        assert_eq!((plan.changes[0].at, plan.changes[0].to), (0, 4));
        assert!(plan.short_steps > 0, "the move takes three steps");
    }

    #[test]
    fn nodes_are_removed_when_the_load_falls_for_long_enough() {
        let low = plan(&[1.5; 10], 4, &MODEL);
        assert_eq!((low.changes[0].at, low.changes[0].to), (0, 2));
        assert_eq!(low.short_steps, 0);
        let mut dip = vec![3.9, 3.9, 1.5, 1.5];
        dip.extend([3.9; 6]);
        assert!(plan(&dip, 4, &MODEL).changes.is_empty(), "a dip shorter than the moves is no reason");
    }

    #[test]
    fn the_minimum_and_maximum_are_kept() {
        let bounded = Model { min_nodes: 3, max_nodes: 5, ..MODEL };
        assert_eq!(plan(&[0.1; 8], 4, &bounded).changes[0].to, 3);
        assert_eq!(plan(&[50.0; 8], 4, &bounded).changes[0].to, 5);
    }
}

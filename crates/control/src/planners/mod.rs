//! Planners: from a picture to a plan.
//!
//! name | what | from
//! --- | --- | ---
//! `greedy` | hot keys of overloaded nodes go to the least loaded node | E-Store 5.3
//! `greedy-extended` | then the hottest blocks of overloaded nodes | E-Store 5.3
//! `first-fit` | everything is placed again, node by node | E-Store 5.3
//! `one-tier` | integer program over blocks | E-Store 5.2
//! `two-tier` | integer program over hot keys and blocks | E-Store 5.2
//! `local-search` | ours: the cheapest moves that reach the target | [`local_search`]
//!
//! A planner maps a [`Problem`] to an owner for each item. E-Store's *partitions* are our nodes:
//! the bins. Its tuples are hot keys. Blocks, and partitions without blocks, are its blocks. Its
//! load `L(p)` is the utilisation here, because nodes may differ in capacity, `A` is the mean
//! utilisation, and its `A ± ε` is `A * (1 ± epsilon)`.
//!
//! [`plan`] holds for all planners what the paper leaves open:
//!
//! - Pinned partitions and those in their cool-down are no choice of a planner. (A leaving node's
//!   items are exempt from the cool-down.)
//! - An item moves only to a node that accepts moves and has memory for it.
//! - Before anything else, the items of leaving nodes are moved to the least utilised nodes.
//! - An answer that is worse than that first step alone is dropped, and the plan's notes say so.

mod bin_packing;
pub mod cases;
mod estore;
pub mod local_search;
mod problem;
mod scale;
mod state;
#[cfg(test)]
mod tests;

pub use problem::{Item, ItemKind, Problem, Target};
pub(crate) use scale::least_loaded;
pub use scale::{Resize, resize};

use crate::picture::Picture;
use crate::plan::{self, CostModel, Plan};
use state::State;

/// Settings of all planners.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The tolerance around the mean utilisation, as a share of it (E-Store's ε).
    pub epsilon: f64,
    /// A utilisation that needs no relief, even if the mean is lower. Only `local-search` uses it.
    pub acceptable: f64,
    /// A partition that was moved is not moved again for this long, in seconds. Leaving nodes are
    /// exempt.
    pub cool_down_s: f64,
    /// Hot keys and blocks stay with their partition: there is no mechanism that moves them.
    pub whole_partitions: bool,
    /// The time limit of an integer program, in seconds.
    pub time_limit_s: f64,
    /// How long moves take.
    pub cost: CostModel,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            epsilon: 0.02,
            acceptable: 0.0,
            cool_down_s: 600.0,
            whole_partitions: false,
            time_limit_s: 60.0,
            cost: CostModel::default(),
        }
    }
}

/// A planner's placement: the owner of each item, and notes for the plan.
pub struct Placement {
    owners: Vec<u32>,
    notes: Vec<String>,
}

impl From<State<'_>> for Placement {
    fn from(state: State<'_>) -> Placement {
        Placement { owners: state.owners, notes: Vec::new() }
    }
}

/// A planning algorithm.
pub trait Planner: Sync {
    /// Its name, as in `fulmar plan --planner NAME`.
    fn name(&self) -> &'static str;

    /// Places all items.
    fn place(&self, problem: &Problem) -> Placement;
}

/// All planners, in the order of the table above.
pub const PLANNERS: [&dyn Planner; 6] = [
    &estore::Greedy,
    &estore::GreedyExtended,
    &estore::FirstFit,
    &bin_packing::BinPacking::ONE_TIER,
    &bin_packing::BinPacking::TWO_TIER,
    &local_search::LocalSearch,
];

/// Finds a planner by its name.
pub fn planner(name: &str) -> Option<&'static dyn Planner> {
    PLANNERS.into_iter().find(|planner| planner.name() == name)
}

/// Plans with a planner. The picture must be valid.
pub fn plan(picture: &Picture, planner: &dyn Planner, settings: &Settings) -> Plan {
    let problem = Problem::new(picture, settings);
    let Placement { mut owners, mut notes } = planner.place(&problem);
    let evaluation = plan::evaluate(&problem, &owners);
    let mut nothing = State::new(&problem);
    nothing.evacuate(problem.bound);
    let baseline = plan::evaluate(&problem, &nothing.owners);
    let is_worse = evaluation.highest > baseline.highest * (1.0 + 1e-9)
        || evaluation.stranded > baseline.stranded
        || exceeds_memory(&problem, &owners);
    let evaluation = match is_worse {
        true => {
            owners = nothing.owners;
            notes.push("the planner's answer was worse than no balancing moves or exceeded a node's memory; it was dropped".to_owned());
            baseline
        }
        false => evaluation,
    };
    Plan { planner: planner.name(), moves: plan::moves(&problem, &owners), evaluation, notes }
}

/// Returns true if a node lacks memory for its items in a placement, and lacks more than it does
/// now.
fn exceeds_memory(problem: &Problem, owners: &[u32]) -> bool {
    let mut before = vec![0_u64; problem.nodes.len()];
    let mut after = before.clone();
    for (item, owner) in problem.items.iter().zip(owners) {
        for (memory, owner) in [(&mut before, item.owner), (&mut after, *owner)] {
            let needs = &mut memory[owner as usize];
            *needs = needs.saturating_add(item.memory);
        }
    }
    let limits = problem.nodes.iter().zip(before).map(|(node, before)| node.memory.max(before));
    after.into_iter().zip(limits).any(|(after, limit)| after > limit)
}

//! Plans: which items move where, and how good the result is.
//!
//! A plan is judged by its [`Evaluation`]: the highest utilisation before and after it, and what it
//! costs. The highest utilisation is compared with a lower bound that no placement can beat: the
//! mean utilisation, or the largest item on the largest node, whichever is higher.

use serde::Serialize;

use crate::planners::{ItemKind, Problem};

/// How long a move takes: `fixed_s + bytes / rate`, with the rate of the link.
///
/// The defaults are what a move of a tenant in a cluster on one switch was measured to take, and a
/// tenth of its rate between sites.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Time of a move of no bytes, in seconds.
    pub fixed_s: f64,
    /// Rate within a site, in bytes per second.
    pub site_bytes_per_s: f64,
    /// Rate between sites, in bytes per second.
    pub wan_bytes_per_s: f64,
}

impl Default for CostModel {
    fn default() -> CostModel {
        CostModel { fixed_s: 0.2, site_bytes_per_s: 100e6, wan_bytes_per_s: 10e6 }
    }
}

impl CostModel {
    /// The duration of a move, in seconds.
    pub fn seconds(&self, bytes: u64, crosses_sites: bool) -> f64 {
        let rate = if crosses_sites { self.wan_bytes_per_s } else { self.site_bytes_per_s };
        self.fixed_s + bytes as f64 / rate
    }
}

/// The move of one item.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// The partition.
    pub partition: String,
    /// What of it moves.
    pub kind: ItemKind,
    /// The name of the hot key or block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub piece: Option<String>,
    /// The node that has it.
    pub from: String,
    /// The node that gets it.
    pub to: String,
    /// Its load, in CPUs.
    pub load: f64,
    /// What it copies, in bytes.
    pub bytes: u64,
    /// The predicted duration, in seconds.
    pub seconds: f64,
}

/// How good a plan is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Evaluation {
    /// Highest utilisation of a serving node before the plan (1 = its capacity).
    pub highest_before: f64,
    /// Highest utilisation of a serving node after the plan.
    pub highest: f64,
    /// Lower bound of `highest`: the mean utilisation, or the largest item on the largest node.
    pub bound: f64,
    /// Distance of `highest` to the bound, in percent of the bound.
    pub gap_percent: f64,
    /// Number of moves.
    pub moves: usize,
    /// Bytes moved.
    pub bytes: u64,
    /// Predicted duration in seconds: the longest sum of moves from or to one node, because a node
    /// takes part in one move at a time.
    pub seconds: f64,
    /// Number of nodes with less memory than their items need.
    pub nodes_over_memory: usize,
    /// Items that are still at a node that is leaving.
    pub stranded: usize,
}

/// A planner's answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The planner.
    pub planner: &'static str,
    /// The moves, from the most utilised nodes first (E-Store 3.1).
    pub moves: Vec<Move>,
    /// How good it is.
    pub evaluation: Evaluation,
    /// What else is known about the answer, such as the bound of an interrupted integer program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Returns the moves of a placement: `owners[i]` is the node of item `i`.
pub(crate) fn moves(problem: &Problem, owners: &[u32]) -> Vec<Move> {
    let before = utilisations(problem, &problem.owners());
    let moved = |(item, owner): &(usize, &u32)| problem.items[*item].owner != **owner;
    let mut moved: Vec<(usize, &u32)> = owners.iter().enumerate().filter(moved).collect();
    let source = |item: usize| before[problem.items[item].owner as usize];
    moved.sort_by(|(left, _), (right, _)| source(*right).total_cmp(&source(*left)));
    let describe = |(index, owner): (usize, &u32)| {
        let item = &problem.items[index];
        let (partition, piece) = problem.names(index);
        Move {
            partition: partition.to_owned(),
            kind: item.kind,
            piece: piece.map(str::to_owned),
            from: problem.picture.nodes[item.owner as usize].name.clone(),
            to: problem.picture.nodes[*owner as usize].name.clone(),
            load: item.load,
            bytes: item.bytes,
            seconds: problem.move_seconds(index, *owner),
        }
    };
    moved.into_iter().map(describe).collect()
}

/// Evaluates a placement.
pub(crate) fn evaluate(problem: &Problem, owners: &[u32]) -> Evaluation {
    let highest = |owners: &[u32]| {
        let of_serving = |(node, utilisation): (usize, f64)| match problem.nodes[node].leaving {
            true => 0.0,
            false => utilisation,
        };
        utilisations(problem, owners).into_iter().enumerate().map(of_serving).fold(0.0, f64::max)
    };
    let mut evaluation = Evaluation {
        highest_before: highest(&problem.owners()),
        highest: highest(owners),
        bound: problem.bound,
        ..Evaluation::default()
    };
    evaluation.gap_percent = match problem.bound > 0.0 {
        true => (evaluation.highest / problem.bound - 1.0).max(0.0) * 100.0,
        false => 0.0,
    };
    let mut busy_s = vec![0.0; problem.nodes.len()];
    let mut memory = vec![0_u64; problem.nodes.len()];
    for (index, (item, owner)) in problem.items.iter().zip(owners).enumerate() {
        let needs = &mut memory[*owner as usize];
        *needs = needs.saturating_add(item.memory);
        evaluation.stranded += usize::from(problem.nodes[*owner as usize].leaving);
        if item.owner != *owner {
            evaluation.moves += 1;
            evaluation.bytes = evaluation.bytes.saturating_add(item.bytes);
            let seconds = problem.move_seconds(index, *owner);
            busy_s[*owner as usize] += seconds;
            busy_s[item.owner as usize] += seconds;
        }
    }
    evaluation.seconds = busy_s.into_iter().fold(0.0, f64::max);
    let over = memory.iter().zip(&problem.nodes).filter(|(needs, node)| **needs > node.memory);
    evaluation.nodes_over_memory = over.count();
    evaluation
}

fn utilisations(problem: &Problem, owners: &[u32]) -> Vec<f64> {
    let mut load = vec![0.0; problem.nodes.len()];
    for (item, owner) in problem.items.iter().zip(owners) {
        load[*owner as usize] += item.load;
    }
    load.iter().zip(&problem.nodes).map(|(load, node)| load / node.capacity).collect()
}

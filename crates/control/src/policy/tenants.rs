//! Which tenants to move away from a node: ShuttleDB's cost-benefit analysis (4, step 2).
//!
//! The benefit of moving a tenant is the load that leaves, of the resource that is short at its
//! node. The cost is the time that a move within the site takes, by the migrations that were
//! measured. Tenants are chosen greedily by benefit over cost, so the tenant that causes an overload
//! stays if it is cheaper to move others away.

use std::cmp::Ordering;

use crate::picture::{Partition, Picture};
use crate::planners;

/// The resource that is short at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// CPU.
    Cpu,
    /// Memory.
    Memory,
}

/// No move takes less, in seconds.
const MIN_COST_S: f64 = 1e-3;

/// A tenant that could move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate<'a> {
    /// Its partition.
    pub partition: &'a Partition,
    /// What would leave: CPUs, or bytes of memory.
    pub benefit: f64,
    /// The predicted duration of the move, in seconds.
    pub cost: f64,
}

impl Candidate<'_> {
    /// Benefit over cost.
    pub fn ratio(&self) -> f64 {
        self.benefit / self.cost.max(MIN_COST_S)
    }
}

/// The movable tenants of a node, the greatest ratio first. Pinned tenants, and those that were
/// moved within the cool-down, are not among them.
pub fn candidates<'a>(
    picture: &'a Picture,
    node: &str,
    bottleneck: Bottleneck,
    planning: &planners::Settings,
) -> Vec<Candidate<'a>> {
    let is_movable = |partition: &&Partition| {
        let cools = partition.moved_at_s.is_some_and(|at| picture.at_s - at < planning.cool_down_s);
        partition.owner == node && !partition.pinned && !cools
    };
    let candidate = |partition: &'a Partition| {
        let benefit = match bottleneck {
            Bottleneck::Cpu => partition.load,
            Bottleneck::Memory => partition.memory as f64,
        };
        Candidate { partition, benefit, cost: planning.cost.seconds(partition.bytes, false) }
    };
    let mut candidates: Vec<Candidate> =
        picture.partitions.iter().filter(is_movable).map(candidate).collect();
    candidates.sort_by(compare);
    candidates
}

fn compare(left: &Candidate, right: &Candidate) -> Ordering {
    right.ratio().total_cmp(&left.ratio()).then_with(|| left.partition.name.cmp(&right.partition.name))
}

/// The first candidates whose benefits add up to what is needed, or all of them.
pub fn choose<'a>(candidates: &[Candidate<'a>], needed: f64) -> Vec<Candidate<'a>> {
    let mut sum = 0.0;
    let is_needed = |candidate: &&Candidate| {
        let needed = sum < needed;
        sum += candidate.benefit;
        needed
    };
    candidates.iter().take_while(is_needed).copied().collect()
}

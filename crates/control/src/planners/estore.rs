//! E-Store's approximate planners (5.3), step by step.
//!
//! All three first empty leaving nodes (see [`super`]), and skip a destination without memory,
//! which the paper leaves as future work (5).

use super::problem::{ItemKind, Problem};
use super::state::{State, sort_by_load};
use super::{Placement, Planner};

/// "Greedy" (5.3).
pub(super) struct Greedy;

/// "Greedy Extended" (5.3).
pub(super) struct GreedyExtended;

/// "First Fit" (5.3).
pub(super) struct FirstFit;

/// `A + ε` of section 5.2, as a utilisation.
pub(super) fn upper_limit(problem: &Problem) -> f64 {
    problem.mean * (1.0 + problem.settings.epsilon)
}

fn movable_items(problem: &Problem, is_of: impl Fn(ItemKind) -> bool) -> Vec<u32> {
    let items = (0..).zip(&problem.items);
    items.filter(|(_, item)| item.movable && is_of(item.kind)).map(|(index, _)| index).collect()
}

/// Greedy's steps: iterate through the hot tuples, the most frequently accessed one first. If the
/// partition that holds the tuple has a load above `A + ε`, send the tuple to the least loaded
/// partition. End when all tuples were visited, or no partition is above `A + ε`.
fn greedy<'p>(problem: &'p Problem<'p>) -> State<'p> {
    let limit = upper_limit(problem);
    let mut state = State::new(problem);
    state.evacuate(limit);
    let mut hot = movable_items(problem, |kind| kind == ItemKind::HotKey);
    sort_by_load(problem, &mut hot);
    let mut overloaded = state.above(limit).len();
    for item in hot {
        if overloaded == 0 {
            break;
        }
        let from = state.owners[item as usize];
        if state.utilisation(from) <= limit {
            continue;
        }
        let Some(to) = state.least_utilised(item) else { continue };
        let was_above = usize::from(state.utilisation(to) > limit);
        state.assign(item, to);
        overloaded -= usize::from(state.utilisation(from) <= limit);
        overloaded = overloaded - was_above + usize::from(state.utilisation(to) > limit);
    }
    state
}

/// Greedy Extended's second part: one at a time, in order of decreasing load, each overloaded
/// partition sends its hottest block to the partition with the lowest load, until all are within
/// `A ± ε`.
///
/// The paper does not say what ends the loop if that cannot be reached. Here a block is sent only
/// if its destination stays below the source's load before the move; the loop ends when no
/// overloaded node has such a block.
pub(super) fn greedy_extended<'p>(problem: &'p Problem<'p>) -> State<'p> {
    let limit = upper_limit(problem);
    let mut state = greedy(problem);
    let mut blocks = state.items_by_node();
    for list in &mut blocks {
        list.retain(|item| problem.items[*item as usize].kind != ItemKind::HotKey);
        sort_by_load(problem, list);
    }
    loop {
        let mut has_moved = false;
        for from in state.above(limit) {
            let before = state.utilisation(from);
            let destination = |item: &u32| {
                let to = state.least_utilised(*item)?;
                (state.utilisation_with(to, *item) < before).then_some(to)
            };
            let list = &blocks[from as usize];
            let found = (0..list.len()).find_map(|at| destination(&list[at]).map(|to| (at, to)));
            if let Some((at, to)) = found {
                let item = blocks[from as usize].remove(at);
                state.assign(item, to);
                let load = |item: u32| problem.items[item as usize].load;
                let list = &mut blocks[to as usize];
                let place = list.partition_point(|other| load(*other) >= load(item));
                list.insert(place, item);
                has_moved = true;
            }
        }
        if !has_moved {
            return state;
        }
    }
}

/// First Fit's steps: place the hottest tuple at partition 0, and further ones while it has
/// capacity, then go on with partition 1. Then place the cold blocks, from the last partition that
/// received a tuple. The capacity of a partition is `A + ε`.
///
/// Items that cannot move keep their place and count. What fits nowhere goes to the least utilised
/// node with memory for it.
fn first_fit<'p>(problem: &'p Problem<'p>) -> Placement {
    let limit = upper_limit(problem);
    let nodes: Vec<u32> =
        (0..).zip(&problem.nodes).filter(|(_, node)| node.accepts).map(|(index, _)| index).collect();
    let mut hot = movable_items(problem, |kind| kind == ItemKind::HotKey);
    sort_by_load(problem, &mut hot);
    let blocks = movable_items(problem, |kind| kind != ItemKind::HotKey);

    let mut load = vec![0.0; problem.nodes.len()];
    let mut memory = vec![0_u64; problem.nodes.len()];
    for item in problem.items.iter().filter(|item| !item.movable) {
        load[item.owner as usize] += item.load;
        memory[item.owner as usize] += item.memory;
    }
    let mut owners = problem.owners();
    let mut current = 0;
    for index in hot.into_iter().chain(blocks) {
        let item = &problem.items[index as usize];
        let has_memory = |node: u32, memory: &[u64]| {
            memory[node as usize].saturating_add(item.memory) <= problem.nodes[node as usize].memory
        };
        let with = |node: u32, load: &[f64]| {
            (load[node as usize] + item.load) / problem.nodes[node as usize].capacity
        };
        // A node is full when an item does not fit, unless the node is empty and the item is larger
        // than any node's share.
        let fits = |node: u32| {
            (with(node, &load) <= limit || load[node as usize] == 0.0) && has_memory(node, &memory)
        };
        while current < nodes.len() && !fits(nodes[current]) {
            current += 1;
        }
        let chosen = nodes.get(current).copied().or_else(|| {
            let roomy = nodes.iter().copied().filter(|node| has_memory(*node, &memory));
            roomy.min_by(|left, right| with(*left, &load).total_cmp(&with(*right, &load)))
        });
        let to = chosen.unwrap_or(item.owner);
        load[to as usize] += item.load;
        memory[to as usize] = memory[to as usize].saturating_add(item.memory);
        owners[index as usize] = to;
    }
    Placement { owners, notes: Vec::new() }
}

impl Planner for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn place(&self, problem: &Problem) -> Placement {
        greedy(problem).into()
    }
}

impl Planner for GreedyExtended {
    fn name(&self) -> &'static str {
        "greedy-extended"
    }

    fn place(&self, problem: &Problem) -> Placement {
        greedy_extended(problem).into()
    }
}

impl Planner for FirstFit {
    fn name(&self) -> &'static str {
        "first-fit"
    }

    fn place(&self, problem: &Problem) -> Placement {
        first_fit(problem)
    }
}

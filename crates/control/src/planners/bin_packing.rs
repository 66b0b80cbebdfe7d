//! E-Store's integer programs (5.2), solved with `microlp` by branch and bound.
//!
//! - Variables: `x[i][j]`, `y[k][j]`: 1 if a hot key or block is placed on node `j`.
//! - (1), (2): each hot key and each block is on exactly one node.
//! - (3) and its counterpart: the load of each node is within `A ± ε`.
//! - (4): minimise the movement. The paper's cost is 1 per hot tuple and `B` per block; here it is
//!   the predicted duration of the move, which is a constant plus a multiple of the bytes.
//!
//! Additions: a constraint on memory, which the paper leaves as future work. (3) is soft: `z >= 0`
//! is what any node is above `A + ε` or below `A - ε`, and its weight is above the cost of all
//! moves together. An item larger than `A + ε` would make the program infeasible otherwise.
//!
//! *Two-tier* places hot keys and blocks one by one. *One-tier* has no hot keys: each stays with
//! the block that it was extracted from, or with its partition's rest.
//!
//! The search starts with the answer of greedy extended and ends at the time limit with the best
//! answer so far; the plan's notes have its proven bound. Programs of more than [`MAX_VARIABLES`]
//! are not started: a single relaxation takes longer than the limit.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use good_lp::{
    Expression, ProblemVariables, Solution, SolverModel, Variable, WithInitialSolution, WithTimeLimit,
    constraint, solvers::microlp::microlp, variable,
};

use super::estore::{greedy_extended, upper_limit};
use super::problem::{ItemKind, Problem};
use super::state::State;
use super::{Item, Placement, Planner, Target};

/// The maximum number of binary variables: (hot keys + blocks) * nodes.
const MAX_VARIABLES: usize = 20_000;

/// An integer program.
pub(super) struct BinPacking {
    name: &'static str,
    has_hot_keys: bool,
}

impl BinPacking {
    pub(super) const ONE_TIER: BinPacking = BinPacking { name: "one-tier", has_hot_keys: false };
    pub(super) const TWO_TIER: BinPacking = BinPacking { name: "two-tier", has_hot_keys: true };
}

/// Items that are placed together. The first one is the block or rest.
type Group = Vec<u32>;

/// The movable items: one by one, or hot keys with their blocks.
fn groups(problem: &Problem, has_hot_keys: bool) -> Vec<Group> {
    let movable = (0..).zip(&problem.items).filter(|(_, item)| item.movable);
    if has_hot_keys {
        return movable.map(|(index, _)| vec![index]).collect();
    }
    let mut groups: Vec<Group> = Vec::new();
    // By partition and block; `None` is the partition's rest, or all of its lone hot keys.
    let mut by_block: HashMap<(u32, Option<&str>), usize> = HashMap::new();
    let mut hot = Vec::new();
    for (index, item) in movable {
        let (_, piece) = problem.names(index as usize);
        match item.kind {
            ItemKind::HotKey => hot.push((index, item)),
            ItemKind::Block | ItemKind::Partition => {
                by_block.insert((item.partition, piece), groups.len());
                groups.push(vec![index]);
            }
        }
    }
    for (index, item) in hot {
        let key = &problem.picture.partitions[item.partition as usize].hot_keys[item.piece as usize];
        let group = *by_block.entry((item.partition, key.block.as_deref())).or_insert_with(|| {
            groups.push(Vec::new());
            groups.len() - 1
        });
        groups[group].push(index);
    }
    groups
}

/// The nodes that a group may be placed on: those that accept moves, and the one that has all of it
/// already, unless that one leaves.
fn choices(problem: &Problem, group: &Group) -> Vec<u32> {
    let has_all = |node: u32| group.iter().all(|item| problem.items[*item as usize].owner == node);
    let is_choice = |(index, node): &(u32, &Target)| node.accepts || (!node.leaving && has_all(*index));
    (0..).zip(&problem.nodes).filter(is_choice).map(|(index, _)| index).collect()
}

impl Planner for BinPacking {
    fn name(&self) -> &'static str {
        self.name
    }

    fn place(&self, problem: &Problem) -> Placement {
        let groups = groups(problem, self.has_hot_keys);
        let start = start(problem, &groups, self.has_hot_keys);
        let count: usize = groups.iter().map(|group| choices(problem, group).len()).sum();
        if count > MAX_VARIABLES {
            let note = format!(
                "the program has {count} variables, more than {MAX_VARIABLES}; this is the answer of greedy \
                 extended"
            );
            return Placement { notes: vec![note], owners: start.owners };
        }
        // The solver asserts that its answers are integers within a tolerance.
        let solved = catch_unwind(AssertUnwindSafe(|| solve(problem, &groups, &start)));
        let error = match solved {
            Ok(Ok((owners, note))) => return Placement { owners, notes: vec![note] },
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the solver failed".to_owned(),
        };
        let note = format!("no answer ({error}); this is the answer of greedy extended");
        Placement { owners: start.owners, notes: vec![note] }
    }
}

/// Greedy extended's answer. With one tier, what it does with the blocks.
fn start<'p>(problem: &'p Problem<'p>, groups: &[Group], has_hot_keys: bool) -> State<'p> {
    let mut state = greedy_extended(problem);
    if !has_hot_keys {
        for group in groups {
            let home = state.owners[group[0] as usize];
            for item in group {
                if state.has_memory(home, *item, 0) {
                    state.assign(*item, home);
                }
            }
        }
    }
    state
}

struct Choice {
    group: usize,
    node: u32,
    variable: Variable,
}

fn solve(
    problem: &Problem,
    groups: &[Group],
    start: &State,
) -> Result<(Vec<u32>, String), good_lp::ResolutionError> {
    let cost = |group: &Group, node: u32| -> f64 {
        let moved = group.iter().filter(|item| problem.items[**item as usize].owner != node);
        moved.map(|item| problem.move_seconds(*item as usize, node)).sum()
    };
    let mut variables = ProblemVariables::new();
    let mut choices_of_all = Vec::new();
    let mut objective = Expression::default();
    let mut weight = 1.0;
    for (number, group) in groups.iter().enumerate() {
        let mut highest: f64 = 0.0;
        for node in choices(problem, group) {
            let variable = variables.add(variable().binary());
            let cost = cost(group, node);
            highest = highest.max(cost);
            objective += cost * variable;
            choices_of_all.push(Choice { group: number, node, variable });
        }
        weight += highest;
    }
    // A violation of (3) by one percent of the mean outweighs all moves.
    let violation = variables.add(variable().min(0.0));
    objective += 100.0 * weight * violation;
    let mut model =
        variables.minimise(objective).using(microlp).with_time_limit(problem.settings.time_limit_s);

    let mut once = vec![Expression::default(); groups.len()];
    let mut load = fixed(problem, |item| item.load);
    let mut memory = fixed(problem, |item| item.memory as f64);
    for Choice { group, node, variable } in &choices_of_all {
        once[*group] += *variable;
        let sum = |value: fn(&Item) -> f64| -> f64 {
            groups[*group].iter().map(|item| value(&problem.items[*item as usize])).sum()
        };
        load[*node as usize] += sum(|item| item.load) * *variable;
        memory[*node as usize] += sum(|item| item.memory as f64) * *variable;
    }
    for (expression, group) in once.into_iter().zip(groups) {
        if !choices(problem, group).is_empty() {
            model.add_constraint(constraint!(expression == 1.0));
        }
    }
    let (mean, upper) = (problem.mean, upper_limit(problem));
    let lower = mean * (1.0 - problem.settings.epsilon);
    let mean = if mean > 0.0 { mean } else { 1.0 };
    for ((node, load), memory) in problem.nodes.iter().zip(load).zip(memory) {
        if !node.serves {
            continue;
        }
        // Loads are divided by the node's share, which keeps the program well scaled.
        let share = node.capacity * mean;
        let relative = load * (1.0 / share);
        model.add_constraint(constraint!(relative.clone() - violation <= upper / mean));
        if node.accepts {
            model.add_constraint(constraint!(relative + violation >= lower / mean));
        }
        if node.memory < u64::MAX {
            model.add_constraint(constraint!(memory * (1.0 / node.memory.max(1) as f64) <= 1.0));
        }
    }
    let initial = choices_of_all.iter().map(|choice| {
        let is_chosen = start.owners[groups[choice.group][0] as usize] == choice.node;
        (choice.variable, f64::from(u8::from(is_chosen)))
    });
    let initial: Vec<_> = initial.chain([(violation, start_violation(problem, start))]).collect();
    let solution = model.with_initial_solution(initial).solve()?;

    let mut owners = problem.owners();
    for choice in choices_of_all.iter().filter(|choice| solution.value(choice.variable) > 0.5) {
        groups[choice.group].iter().for_each(|item| owners[*item as usize] = choice.node);
    }
    let status = format!("{:?}", solution.status()).to_lowercase();
    let stats = solution.into_inner().stats();
    let note = match (stats.gap, stats.best_bound) {
        (Some(gap), Some(bound)) => {
            format!("{status}: cost within {:.1} % of the proven bound {bound:.3}", gap * 100.0)
        }
        _ => format!("{status}: no bound was proven"),
    };
    Ok((owners, note))
}

/// What the items that cannot move contribute to each node.
fn fixed(problem: &Problem, value: impl Fn(&Item) -> f64) -> Vec<Expression> {
    let mut sums = vec![0.0; problem.nodes.len()];
    for item in problem.items.iter().filter(|item| !item.movable) {
        sums[item.owner as usize] += value(item);
    }
    sums.into_iter().map(Expression::from).collect()
}

/// The smallest `z` with which the start satisfies (3).
fn start_violation(problem: &Problem, start: &State) -> f64 {
    if problem.mean <= 0.0 {
        return 0.0;
    }
    let epsilon = problem.settings.epsilon;
    let distance = |(index, node): (u32, &Target)| {
        let relative = start.utilisation(index) / problem.mean;
        let below = if node.accepts { 1.0 - epsilon - relative } else { 0.0 };
        if node.serves { below.max(relative - 1.0 - epsilon) } else { 0.0 }
    };
    (0..).zip(&problem.nodes).map(distance).fold(0.0, f64::max)
}

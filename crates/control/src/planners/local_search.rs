//! Our planner: the cheapest moves that bring every node below a target.
//!
//! E-Store's planners send the hottest item to the least loaded node until the loads are even. They
//! weigh neither bytes nor memory nor sites, and stop where one item is too large. This one starts
//! with the current placement and repeats, for a limit on the utilisation:
//!
//! 1. **Memory**: a node with too little memory sheds items, those with the most memory per second
//!    of moving first.
//! 2. **Moves**: a node above the limit sheds items in the order of benefit over cost, the benefit
//!    being the excess load that leaves and the cost the predicted duration of the move. An item
//!    goes to the nearest node that stays below the limit: same rack, same site, another site.
//! 3. **Swaps**: if no single item fits anywhere, two items change places.
//! 4. **Returns**: a moved item goes back, the most expensive first, if its old node has room by
//!    now.
//!
//! The first limit is the lower bound plus the tolerance, or what the settings call acceptable if
//! that is higher. A search that fails to reach it continues from there with the next of
//! [`SLACKS`]. It stops with the first limit that all nodes meet, so a cluster that is in balance
//! gets a plan without moves.
//!
//! The work is `O(items * log items)` per limit: each node's items are sorted once per visit, and a
//! node is visited at most [`MAX_VISITS`] times.

use super::problem::Problem;
use super::state::{State, sort_by_load};
use super::{Placement, Planner};

/// How far above the bound and the tolerance the limits are.
const SLACKS: [f64; 8] = [0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0];

/// How often all nodes above a limit are visited.
const MAX_VISITS: usize = 8;

/// How many items of a node are tried for a swap, and how many swaps it makes per visit.
const MAX_SWAPS: usize = 64;

/// Loads below this are rounding errors, in CPUs.
const ROUNDING: f64 = 1e-9;

/// The planner `local-search`.
pub struct LocalSearch;

impl Planner for LocalSearch {
    fn name(&self) -> &'static str {
        "local-search"
    }

    fn place(&self, problem: &Problem) -> Placement {
        let target = target(problem);
        let mut state = State::new(problem);
        state.evacuate(target);
        let mut search = Search { lists: state.items_by_node(), state };
        search.shed_memory();
        for slack in SLACKS {
            let limit = target * (1.0 + slack);
            if search.relieve_all(limit) {
                break;
            }
        }
        // Not the limit that was reached: one node that cannot be relieved raises that for all.
        search.return_items(target);
        search.state.into()
    }
}

/// The first limit: the lower bound and the tolerance, or what is acceptable.
fn target(problem: &Problem) -> f64 {
    (problem.bound * (1.0 + problem.settings.epsilon)).max(problem.settings.acceptable)
}

struct Search<'p> {
    state: State<'p>,
    /// The movable items of each node. An entry is stale if the item has moved on.
    lists: Vec<Vec<u32>>,
}

impl Search<'_> {
    /// The movable items that a node has now.
    fn items_of(&mut self, node: u32) -> Vec<u32> {
        let list = &mut self.lists[node as usize];
        list.retain(|item| self.state.owners[*item as usize] == node);
        list.sort_unstable();
        list.dedup();
        list.clone()
    }

    fn assign(&mut self, item: u32, to: u32) {
        self.state.assign(item, to);
        self.lists[to as usize].push(item);
    }

    /// The predicted duration of an item's move within its site, in seconds. An item that has moved
    /// already moves on for free: only its first and last node count.
    fn cost(&self, item: u32) -> f64 {
        let problem = self.state.problem;
        let is_moved = self.state.owners[item as usize] != problem.items[item as usize].owner;
        let seconds = problem.settings.cost.seconds(problem.items[item as usize].bytes, false);
        if is_moved { seconds * 1e-3 } else { seconds }
    }

    /// Sorts items by descending benefit over cost.
    fn sort_by_benefit(&self, items: &mut Vec<u32>, benefit: impl Fn(u32) -> f64) {
        let score = |item: u32| benefit(item) / self.cost(item).max(f64::MIN_POSITIVE);
        let mut scored: Vec<(f64, u32)> = items.iter().map(|item| (score(*item), *item)).collect();
        scored.sort_by(|left, right| right.0.total_cmp(&left.0).then(left.1.cmp(&right.1)));
        *items = scored.into_iter().map(|(_, item)| item).collect();
    }

    fn shed_memory(&mut self) {
        for node in 0..self.state.problem.nodes.len() as u32 {
            if self.state.memory_excess(node) == 0 {
                continue;
            }
            let problem = self.state.problem;
            let mut items = self.items_of(node);
            self.sort_by_benefit(&mut items, |item| problem.items[item as usize].memory as f64);
            for item in items {
                if self.state.memory_excess(node) == 0 {
                    break;
                }
                let to = self
                    .state
                    .nearest_below(item, target(problem))
                    .or_else(|| self.state.least_utilised(item));
                if let Some(to) = to {
                    self.assign(item, to);
                }
            }
        }
    }

    /// Relieves the nodes above a limit. Returns true if none is left.
    fn relieve_all(&mut self, limit: f64) -> bool {
        for _ in 0..MAX_VISITS {
            let above = self.state.above(limit * (1.0 + ROUNDING));
            if above.is_empty() {
                return true;
            }
            let mut has_changed = false;
            for node in above {
                has_changed |= self.shed_load(node, limit);
                if self.state.excess(node, limit) > ROUNDING {
                    has_changed |= self.swap(node, limit);
                }
            }
            if !has_changed {
                return false;
            }
        }
        self.state.above(limit * (1.0 + ROUNDING)).is_empty()
    }

    fn shed_load(&mut self, node: u32, limit: f64) -> bool {
        let problem = self.state.problem;
        let load = |item: u32| problem.items[item as usize].load;
        let excess = self.state.excess(node, limit);
        let mut items = self.items_of(node);
        items.retain(|item| load(*item) > 0.0);
        self.sort_by_benefit(&mut items, |item| load(item).min(excess));
        let mut has_moved = false;
        // Of items that are equally loaded, if one fits nowhere, the others do not either.
        let mut smallest_without_place = f64::INFINITY;
        for item in items {
            if self.state.excess(node, limit) <= ROUNDING {
                break;
            }
            if load(item) >= smallest_without_place && problem.items[item as usize].memory == 0 {
                continue;
            }
            match self.state.nearest_below(item, limit) {
                Some(to) => {
                    self.assign(item, to);
                    has_moved = true;
                }
                None => smallest_without_place = smallest_without_place.min(load(item)),
            }
        }
        has_moved
    }

    /// Exchanges items of a node for smaller ones of others.
    fn swap(&mut self, node: u32, limit: f64) -> bool {
        let mut has_swapped = false;
        for _ in 0..MAX_SWAPS {
            if self.state.excess(node, limit) <= ROUNDING {
                break;
            }
            let Some((item, other)) = self.best_swap(node, limit) else { break };
            let to = self.state.owners[other as usize];
            self.assign(item, to);
            self.assign(other, node);
            has_swapped = true;
        }
        has_swapped
    }

    /// The swap that relieves a node the most: at most its excess if possible, and no more than the
    /// other node has room for.
    fn best_swap(&mut self, node: u32, limit: f64) -> Option<(u32, u32)> {
        let problem = self.state.problem;
        let load = |item: u32| problem.items[item as usize].load;
        let memory = |item: u32| problem.items[item as usize].memory;
        if !problem.nodes[node as usize].accepts {
            return None;
        }
        let excess = self.state.excess(node, limit);
        let mut items = self.items_of(node);
        sort_by_load(problem, &mut items);
        items.truncate(MAX_SWAPS);
        let mut best: Option<(f64, u32, u32)> = None;
        let others: Vec<u32> = (0..self.state.sites())
            .flat_map(|site| self.state.candidates(site).collect::<Vec<_>>())
            .collect();
        for to in others.into_iter().filter(|to| *to != node) {
            let room = -self.state.excess(to, limit);
            if room <= ROUNDING {
                continue;
            }
            let mut theirs = self.items_of(to);
            sort_by_load(problem, &mut theirs);
            for item in &items {
                // The largest relief within the room: the first of theirs at or below this load is
                // the one with the largest relief that still fits when read backwards.
                let at = theirs.partition_point(|other| load(*other) > load(*item) - ROUNDING);
                let fitting = theirs[at..].iter().take_while(|other| load(*item) - load(**other) <= room);
                let fits = |other: &&u32| {
                    self.state.has_memory(to, *item, memory(**other))
                        && self.state.has_memory(node, **other, memory(*item))
                };
                let Some(other) = fitting.filter(fits).last() else { continue };
                let relief = (load(*item) - load(*other)).min(excess);
                if best.is_none_or(|(most, _, _)| relief > most) {
                    best = Some((relief, *item, *other));
                }
            }
        }
        best.filter(|(relief, _, _)| *relief > ROUNDING).map(|(_, item, other)| (item, other))
    }

    /// Moves items back to the nodes that they came from, if these have room.
    fn return_items(&mut self, limit: f64) {
        let problem = self.state.problem;
        let home = |item: u32| problem.items[item as usize].owner;
        let is_away = |item: &u32| self.state.owners[*item as usize] != home(*item);
        let mut away: Vec<u32> = (0..problem.items.len() as u32).filter(is_away).collect();
        let seconds = |item: u32| problem.move_seconds(item as usize, self.state.owners[item as usize]);
        away.sort_by(|left, right| seconds(*right).total_cmp(&seconds(*left)).then(left.cmp(right)));
        for item in away {
            let to = home(item);
            let has_room =
                self.state.utilisation_with(to, item) <= limit && self.state.has_memory(to, item, 0);
            if has_room {
                self.state.assign(item, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::picture::{Node, Partition, Picture};
    use crate::planners::{Settings, plan, planner};

    use super::*;

    fn picture(nodes: usize, partitions: &[(&str, f64, u64)]) -> Picture {
        let nodes = (1..=nodes).map(|number| Node::new(format!("n{number}"), 1.0)).collect();
        let partitions = partitions.iter().enumerate().map(|(index, (owner, load, bytes))| Partition {
            bytes: *bytes,
            ..Partition::new(format!("t{index}"), *owner, *load)
        });
        Picture { at_s: 0.0, nodes, partitions: partitions.collect() }
    }

    #[test]
    fn moves_the_cheaper_of_two_equal_loads() {
        let large_and_small = [("n1", 0.4, 10_000_000_000), ("n1", 0.4, 5_000_000_000)];
        let plan = plan(&picture(2, &large_and_small), &LocalSearch, &Settings::default());
        assert_eq!(plan.moves.len(), 1, "one move balances the nodes");
        assert_eq!(plan.moves[0].partition, "t1", "ShuttleDB's example: the smaller tenant moves");
    }

    #[test]
    fn a_balanced_cluster_gets_no_moves() {
        let plan = plan(&picture(2, &[("n1", 0.5, 1), ("n2", 0.495, 1)]), &LocalSearch, &Settings::default());
        assert!(plan.moves.is_empty(), "within the tolerance no move is worth its cost");
    }

    #[test]
    fn swaps_where_no_single_item_fits() {
        let loads = [("n1", 0.6, 1), ("n1", 0.3, 1), ("n2", 0.5, 1), ("n2", 0.2, 1)];
        let picture = picture(2, &loads);
        let ours = plan(&picture, &LocalSearch, &Settings::default());
        assert!(ours.evaluation.gap_percent <= 2.0, "{:?}", ours.evaluation);
        assert_eq!(ours.moves.len(), 2, "one swap balances the nodes");
        let greedy = planner("greedy-extended").expect("it is registered");
        let greedy = plan(&picture, greedy, &Settings::default());
        assert!(greedy.evaluation.highest > ours.evaluation.highest, "single moves cannot balance these");
    }

    #[test]
    fn a_node_that_cannot_be_relieved_does_not_stop_the_others() {
        let loads = [("n1", 0.5, 1), ("n1", 0.5, 1), ("n2", 0.4, 1), ("n2", 0.4, 1)];
        let mut picture = picture(3, &loads);
        picture.partitions[..2].iter_mut().for_each(|partition| partition.pinned = true);
        let plan = plan(&picture, &LocalSearch, &Settings::default());
        assert_eq!(plan.moves.len(), 1, "n2 is relieved although n1 is not: {:?}", plan.evaluation);
    }

    #[test]
    fn prefers_the_same_rack_and_site() {
        let mut picture = picture(4, &[("n1", 0.45, 1), ("n1", 0.45, 1)]);
        for (node, (site, rack)) in
            picture.nodes.iter_mut().zip([("eu", "a"), ("us", "a"), ("eu", "b"), ("eu", "a")])
        {
            (node.site, node.rack) = (site.to_owned(), rack.to_owned());
        }
        let first = plan(&picture, &LocalSearch, &Settings::default());
        assert_eq!(first.moves.len(), 1);
        assert_eq!(first.moves[0].to, "n4", "the node in the same rack is the nearest");
        picture.nodes[3].forbidden = true;
        let second = plan(&picture, &LocalSearch, &Settings::default());
        assert_eq!(second.moves[0].to, "n3", "the other rack of the site is nearer than the other site");
    }
}

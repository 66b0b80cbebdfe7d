//! A placement that is being changed: owners of items, loads and memory of nodes.
//!
//! The nodes that accept moves are kept in the order of their utilisation, per site, so that the
//! least utilised node with room is found in logarithmic time at 10,000 nodes.

use std::collections::BTreeSet;

use super::problem::Problem;

/// How many of a site's least utilised nodes are considered as the destination of an item.
const MAX_CANDIDATES: usize = 16;

/// A placement that is being changed.
pub(crate) struct State<'p> {
    pub(crate) problem: &'p Problem<'p>,
    /// The owner of each item.
    pub(crate) owners: Vec<u32>,
    load: Vec<f64>,
    memory: Vec<u64>,
    /// Per site: utilisation (as ordered bits) and node, of the nodes that accept moves.
    by_utilisation: Vec<BTreeSet<(u64, u32)>>,
}

/// Utilisations are not negative, so their bits have the same order.
fn ordered(utilisation: f64) -> u64 {
    utilisation.max(0.0).to_bits()
}

impl<'p> State<'p> {
    pub(crate) fn new(problem: &'p Problem<'p>) -> State<'p> {
        let mut load = vec![0.0; problem.nodes.len()];
        let mut memory = vec![0_u64; problem.nodes.len()];
        for item in &problem.items {
            load[item.owner as usize] += item.load;
            let needs = &mut memory[item.owner as usize];
            *needs = needs.saturating_add(item.memory);
        }
        let sites = problem.nodes.iter().map(|node| node.site as usize + 1).max().unwrap_or(0);
        let mut by_utilisation = vec![BTreeSet::new(); sites];
        for (index, node) in (0..).zip(&problem.nodes).filter(|(_, node)| node.accepts) {
            by_utilisation[node.site as usize].insert((ordered(load[index as usize] / node.capacity), index));
        }
        State { problem, owners: problem.owners(), load, memory, by_utilisation }
    }

    pub(crate) fn utilisation(&self, node: u32) -> f64 {
        self.load[node as usize] / self.problem.nodes[node as usize].capacity
    }

    /// The load above a utilisation, in CPUs. Negative if there is room.
    pub(crate) fn excess(&self, node: u32, utilisation: f64) -> f64 {
        self.load[node as usize] - utilisation * self.problem.nodes[node as usize].capacity
    }

    /// The memory that a node lacks for its items, in bytes.
    pub(crate) fn memory_excess(&self, node: u32) -> u64 {
        self.memory[node as usize].saturating_sub(self.problem.nodes[node as usize].memory)
    }

    /// The utilisation of a node with an additional item.
    pub(crate) fn utilisation_with(&self, node: u32, item: u32) -> f64 {
        let load = self.load[node as usize] + self.problem.items[item as usize].load;
        load / self.problem.nodes[node as usize].capacity
    }

    /// Returns true if a node accepts moves and has memory for an item in place of `without` bytes
    /// of others.
    pub(crate) fn has_memory(&self, node: u32, item: u32, without: u64) -> bool {
        let target = &self.problem.nodes[node as usize];
        let others = self.memory[node as usize].saturating_sub(without);
        target.accepts && others.saturating_add(self.problem.items[item as usize].memory) <= target.memory
    }

    /// Moves an item.
    pub(crate) fn assign(&mut self, item: u32, to: u32) {
        let from = self.owners[item as usize];
        if from == to {
            return;
        }
        let moved = &self.problem.items[item as usize];
        self.change(from, -moved.load, |memory| memory.saturating_sub(moved.memory));
        self.change(to, moved.load, |memory| memory.saturating_add(moved.memory));
        self.owners[item as usize] = to;
    }

    fn change(&mut self, node: u32, load: f64, memory: impl Fn(u64) -> u64) {
        let target = &self.problem.nodes[node as usize];
        let old = self.utilisation(node);
        self.load[node as usize] = (self.load[node as usize] + load).max(0.0);
        self.memory[node as usize] = memory(self.memory[node as usize]);
        if target.accepts {
            let new = self.utilisation(node);
            let order = &mut self.by_utilisation[target.site as usize];
            order.remove(&(ordered(old), node));
            order.insert((ordered(new), node));
        }
    }

    /// The least utilised node with memory for an item, other than its owner.
    pub(crate) fn least_utilised(&self, item: u32) -> Option<u32> {
        let owner = self.owners[item as usize];
        let fits = |node: &u32| *node != owner && self.has_memory(*node, item, 0);
        let of_sites =
            self.by_utilisation.iter().filter_map(|site| site.iter().find(|(_, node)| fits(node)).copied());
        of_sites.min().map(|(_, node)| node)
    }

    /// The nearest node that stays at or below a utilisation with an item, other than its owner:
    /// in the owner's rack, else in its site, else in another one; the least utilised one of those.
    pub(crate) fn nearest_below(&self, item: u32, limit: f64) -> Option<u32> {
        let owner = self.owners[item as usize];
        let home = self.problem.nodes[owner as usize];
        let fits = |node: &u32| {
            *node != owner && self.utilisation_with(*node, item) <= limit && self.has_memory(*node, item, 0)
        };
        let in_site = |site: usize| self.candidates(site).filter(fits);
        let own_site = in_site(home.site as usize);
        let is_remote = |node: &u32| self.problem.nodes[*node as usize].rack != home.rack;
        // The first of those with the smallest key is the least utilised one.
        own_site.min_by_key(is_remote).or_else(|| {
            let others = (0..self.by_utilisation.len()).filter(|site| *site != home.site as usize);
            others
                .flat_map(in_site)
                .min_by(|left, right| self.utilisation(*left).total_cmp(&self.utilisation(*right)))
        })
    }

    /// The least utilised nodes of a site that accept moves.
    pub(crate) fn candidates(&self, site: usize) -> impl Iterator<Item = u32> + '_ {
        self.by_utilisation[site].iter().map(|(_, node)| *node).take(MAX_CANDIDATES)
    }

    /// The number of sites.
    pub(crate) fn sites(&self) -> usize {
        self.by_utilisation.len()
    }

    /// The nodes whose utilisation is above a limit, the highest first. Leaving nodes are not
    /// among them.
    pub(crate) fn above(&self, limit: f64) -> Vec<u32> {
        let nodes = (0..self.problem.nodes.len() as u32)
            .filter(|node| !self.problem.nodes[*node as usize].leaving && self.utilisation(*node) > limit);
        let mut nodes: Vec<u32> = nodes.collect();
        nodes.sort_by(|left, right| self.utilisation(*right).total_cmp(&self.utilisation(*left)));
        nodes
    }

    /// The movable items of each node, without those of zero load.
    pub(crate) fn items_by_node(&self) -> Vec<Vec<u32>> {
        let mut lists = vec![Vec::new(); self.problem.nodes.len()];
        for (index, (item, owner)) in (0..).zip(self.problem.items.iter().zip(&self.owners)) {
            if item.movable {
                lists[*owner as usize].push(index);
            }
        }
        lists
    }

    /// Moves the items of leaving nodes, the largest load first, to the least utilised nodes: in
    /// the same site if a node there stays below `limit`, else anywhere.
    pub(crate) fn evacuate(&mut self, limit: f64) {
        let leaves = |item: &u32| {
            let item = &self.problem.items[*item as usize];
            item.movable && self.problem.nodes[item.owner as usize].leaving
        };
        let mut items: Vec<u32> = (0..self.problem.items.len() as u32).filter(leaves).collect();
        sort_by_load(self.problem, &mut items);
        for item in items {
            let to = self.nearest_below(item, limit).or_else(|| self.least_utilised(item));
            if let Some(to) = to {
                self.assign(item, to);
            }
        }
    }
}

/// Sorts items by descending load; equal loads by number, so that plans are deterministic.
pub(crate) fn sort_by_load(problem: &Problem, items: &mut [u32]) {
    let load = |item: u32| problem.items[item as usize].load;
    items.sort_by(|left, right| load(*right).total_cmp(&load(*left)).then(left.cmp(right)));
}

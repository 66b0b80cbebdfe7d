//! A dependency graph, and the search for its cycles.

use std::collections::VecDeque;

/// Nodes are numbered from 0. The first ones are transactions, later ones moments in time.
pub struct Graph {
    transactions: usize,
    edges: Vec<Vec<(usize, String)>>,
}

/// The state of Tarjan's algorithm, without recursion.
struct Search {
    /// The order in which nodes were found. 0: not found yet.
    found: Vec<usize>,
    /// The earliest node on the stack that can be reached.
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    count: usize,
}

impl Graph {
    /// A graph of transactions, without edges.
    pub fn new(transactions: usize) -> Graph {
        Graph { transactions, edges: vec![Vec::new(); transactions] }
    }

    /// Adds a node that is not a transaction.
    pub fn node(&mut self) -> usize {
        self.edges.push(Vec::new());
        self.edges.len() - 1
    }

    /// Adds an edge: `from` precedes `to`, for this reason. An edge from a node to itself is
    /// ignored.
    pub fn edge(&mut self, from: usize, to: usize, reason: String) {
        if from != to {
            self.edges[from].push((to, reason));
        }
    }

    /// Describes a shortest cycle in a strongly connected component, if there is one.
    pub fn cycle(&self) -> Option<String> {
        let component = self.component_with_cycle()?;
        component.iter().filter_map(|node| self.cycle_through(*node, &component)).min_by_key(Vec::len).map(
            |cycle| {
                let mut text = String::new();
                for (node, reason) in cycle {
                    // Moments only connect transactions, and are not printed.
                    if node < self.transactions {
                        text += &format!("T{node} -{reason}-> ");
                    }
                }
                text + "back"
            },
        )
    }

    /// Tarjan's algorithm: finds a strongly connected component with more than one node.
    fn component_with_cycle(&self) -> Option<Vec<usize>> {
        let nodes = self.edges.len();
        let mut search = Search {
            found: vec![0; nodes],
            low: vec![0; nodes],
            on_stack: vec![false; nodes],
            stack: Vec::new(),
            count: 0,
        };
        (0..nodes)
            .find_map(|root| if search.found[root] == 0 { self.search_from(root, &mut search) } else { None })
    }

    fn search_from(&self, root: usize, search: &mut Search) -> Option<Vec<usize>> {
        search.enter(root);
        let mut path = vec![(root, 0)];
        while let Some((node, next)) = path.last_mut() {
            let node = *node;
            if let Some((to, _)) = self.edges[node].get(*next) {
                *next += 1;
                if search.found[*to] == 0 {
                    search.enter(*to);
                    path.push((*to, 0));
                } else if search.on_stack[*to] {
                    search.low[node] = search.low[node].min(search.found[*to]);
                }
                continue;
            }
            path.pop();
            if let Some((parent, _)) = path.last() {
                search.low[*parent] = search.low[*parent].min(search.low[node]);
            }
            if search.low[node] == search.found[node] {
                let component = search.leave(node);
                if component.len() > 1 {
                    return Some(component);
                }
            }
        }
        None
    }

    /// Breadth-first search for a shortest cycle through a node within a component. Returns the
    /// nodes, each with the reason of its outgoing edge.
    fn cycle_through(&self, start: usize, component: &[usize]) -> Option<Vec<(usize, &str)>> {
        let mut came_from: Vec<Option<(usize, &str)>> = vec![None; self.edges.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for (to, reason) in &self.edges[node] {
                if came_from[*to].is_some() || !component.contains(to) {
                    continue;
                }
                came_from[*to] = Some((node, reason));
                if *to != start {
                    queue.push_back(*to);
                    continue;
                }
                let mut cycle: Vec<(usize, &str)> = Vec::new();
                let mut at = start;
                while cycle.is_empty() || at != start {
                    let (from, reason) = came_from[at]?;
                    cycle.push((from, reason));
                    at = from;
                }
                cycle.reverse();
                return Some(cycle);
            }
        }
        None
    }
}

impl Search {
    fn enter(&mut self, node: usize) {
        self.count += 1;
        self.found[node] = self.count;
        self.low[node] = self.count;
        self.on_stack[node] = true;
        self.stack.push(node);
    }

    /// Removes a finished component, whose first node is `node`, from the stack.
    fn leave(&mut self, node: usize) -> Vec<usize> {
        let at = self.stack.iter().rposition(|other| *other == node).unwrap_or(0);
        let component = self.stack.split_off(at);
        component.iter().for_each(|node| self.on_stack[*node] = false);
        component
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_shortest_cycle_and_none_in_an_acyclic_graph() {
        let mut graph = Graph::new(5);
        for (from, to) in [(0, 1), (1, 2), (0, 2), (2, 3), (3, 3)] {
            graph.edge(from, to, "x".to_owned());
        }
        assert_eq!(graph.cycle(), None);
        graph.edge(3, 4, "y".to_owned());
        graph.edge(4, 1, "z".to_owned());
        graph.edge(3, 2, "w".to_owned());
        let cycle = graph.cycle().unwrap();
        assert!(["T2 -x-> T3 -w-> back", "T3 -w-> T2 -x-> back"].contains(&cycle.as_str()), "{cycle}");
    }
}

//! A graph of what comes before what, and its circles.

use std::collections::VecDeque;

/// Nodes are numbers from 0; the first ones are transactions, later ones moments in time.
pub struct Graph {
    transactions: usize,
    edges: Vec<Vec<(usize, String)>>,
}

/// The state of Tarjan's search, without recursion.
struct Search {
    /// When a node was found; 0: not yet.
    found: Vec<usize>,
    /// The earliest node on the stack that can be reached.
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    count: usize,
}

impl Graph {
    pub fn new(transactions: usize) -> Graph {
        Graph { transactions, edges: vec![Vec::new(); transactions] }
    }

    /// One more node, which is no transaction.
    pub fn node(&mut self) -> usize {
        self.edges.push(Vec::new());
        self.edges.len() - 1
    }

    /// `from` comes before `to`, and why. Nothing comes before itself: such an edge is left out.
    pub fn edge(&mut self, from: usize, to: usize, why: String) {
        if from != to {
            self.edges[from].push((to, why));
        }
    }

    /// A shortest circle in some strongly connected component, if there is one, in words.
    pub fn circle(&self) -> Option<String> {
        let component = self.component_with_circle()?;
        component.iter().filter_map(|node| self.circle_through(*node, &component)).min_by_key(Vec::len).map(
            |circle| {
                let mut text = String::new();
                for (node, why) in circle {
                    // Moments only carry the order of time on.
                    if node < self.transactions {
                        text += &format!("T{node} -{why}-> ");
                    }
                }
                text + "back"
            },
        )
    }

    /// Tarjan: the first strongly connected component with more than one node.
    fn component_with_circle(&self) -> Option<Vec<usize>> {
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

    /// Breadth first from a node back to it, inside a component: nodes, each with the edge that leaves it.
    fn circle_through(&self, start: usize, component: &[usize]) -> Option<Vec<(usize, &str)>> {
        let mut came_from: Vec<Option<(usize, &str)>> = vec![None; self.edges.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for (to, why) in &self.edges[node] {
                if came_from[*to].is_some() || !component.contains(to) {
                    continue;
                }
                came_from[*to] = Some((node, why));
                if *to != start {
                    queue.push_back(*to);
                    continue;
                }
                let mut circle: Vec<(usize, &str)> = Vec::new();
                let mut at = start;
                while circle.is_empty() || at != start {
                    let (from, why) = came_from[at]?;
                    circle.push((from, why));
                    at = from;
                }
                circle.reverse();
                return Some(circle);
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

    /// Takes a finished component, whose first node is `node`, off the stack.
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
    fn finds_the_shortest_circle_and_nothing_in_a_line() {
        let mut graph = Graph::new(5);
        for (from, to) in [(0, 1), (1, 2), (0, 2), (2, 3), (3, 3)] {
            graph.edge(from, to, "x".to_owned());
        }
        assert_eq!(graph.circle(), None);
        graph.edge(3, 4, "y".to_owned());
        graph.edge(4, 1, "z".to_owned());
        graph.edge(3, 2, "w".to_owned());
        let circle = graph.circle().unwrap();
        assert!(["T2 -x-> T3 -w-> back", "T3 -w-> T2 -x-> back"].contains(&circle.as_str()), "{circle}");
    }
}

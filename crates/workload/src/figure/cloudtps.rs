//! Figure 13 of CloudTPS: how much of the data has to be in memory for TPC-W's shopping path.
//!
//! There twenty transaction managers keep items in memory, 397 or 741 each at the least, 100,000 when nothing is evicted, over a store that
//! is slow, under 4,800 transactions a second. Here it is one node with a twentieth of the load, whose memory is a part of the
//! data.

use super::point::{Load, Point};
use super::{Figure, Scaled};
use crate::tpcw::Tpcw;

/// Of one of twenty.
const RATE_TPS: f64 = 4_800.0 / 20.0;

const CONNECTIONS: usize = 32;

/// What a row takes, about: an item's with its title, an order's with its lines and its payment.
const ITEM_BYTES: f64 = 75.0;
const ORDER_BYTES: f64 = 250.0;

pub(super) const FIGURES: [Figure; 1] = [Figure {
    name: "cloudtps/13",
    title: "Response time and memory (CloudTPS, figure 13)",
    x: "memory, % of the data",
    points,
    papers_x: Some("items in memory at each of 20 nodes"),
    ..Figure::PLAIN
}];

fn points(scaled: &Scaled) -> Vec<Point> {
    let sizes = [("10,000 items", 10_000.0), ("1,000,000 items", 1_000_000.0)];
    sizes.into_iter().flat_map(|(line, items)| of_size(scaled, line, items)).collect()
}

/// With more and more memory.
fn of_size(scaled: &Scaled, line: &str, items: f64) -> Vec<Point> {
    let count = |count: f64| (count * scaled.scale).max(100.0) as u32;
    let workload = Tpcw { items: count(items), customers: count(144_000.0), ..Tpcw::default() };
    let orders = f64::from(workload.customers) * 0.9;
    let data = f64::from(workload.items) * ITEM_BYTES + orders * ORDER_BYTES;
    let point = |part: f64| {
        let memory_bytes = scaled.memory_bytes(data * part / scaled.scale);
        let x = (memory_bytes as f64 / data * 100.0).round();
        let load = Load::Tpcw(workload.clone());
        Point { rate_tps: Some(RATE_TPS), ..Point::alone(line, x, memory_bytes, load, CONNECTIONS) }
    };
    let mut points: Vec<_> = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0].map(point).into_iter().collect();
    // A node cannot do with less than some memory.
    points.dedup_by_key(|point| point.memory_bytes);
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_grows_from_what_a_node_needs_to_twice_the_data() {
        let points = of_size(&Scaled { scale: 1.0, memory_bytes: None }, "1,000,000 items", 1_000_000.0);
        assert!(points.is_sorted_by(|a, b| a.memory_bytes < b.memory_bytes));
        assert_eq!((points[0].memory_bytes, points.last().unwrap().x), (64 << 20, 200.0));
        let small = of_size(&Scaled { scale: 0.01, memory_bytes: None }, "10,000 items", 10_000.0);
        assert_eq!(small.len(), 1, "all of it fits into the least that a node has");
    }
}

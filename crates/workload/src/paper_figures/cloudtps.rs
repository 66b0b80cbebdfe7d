//! Figures 7 and 8 of CloudTPS: the throughput of TPC-W's shopping path through the death of a node
//! and through a partition, with 500 browsers (DAS-3) and with 50 (EC2). See [`super::timeline`].
//!
//! Figure 13: how much of the data must be in memory for the shopping path. In the paper, 20
//! transaction managers run 4,800 transactions/s over a slow store. Each keeps items in memory: at
//! least 397 or 741 of them, and 100,000 when none is evicted. Here a single node gets a twentieth
//! of the load, and its memory is a share of the data.

use super::point::{Load, Point, Points};
use super::timeline::Timeline;
use super::{Figure, Scaling};
use crate::tpcw::Tpcw;

/// The rate of one of the paper's 20 transaction managers.
const RATE_TPS: f64 = 4_800.0 / 20.0;

const CONNECTIONS: usize = 32;

/// Approximate bytes per row: an item with its title, and an order with its lines and payment.
const ITEM_BYTES: f64 = 75.0;
const ORDER_BYTES: f64 = 250.0;

/// What differs in the figures over time.
const LENGTHS: &str = "the death is at 30 s and the partition lasts 60 s instead of 300 s";

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "cloudtps/7",
        title: "Death of a node and partition, 500 browsers (CloudTPS, figure 7)",
        x: "time, s",
        experiment: &Timeline { browsers: 500, databases: 20 },
        minutes: 4,
        notes: &[LENGTHS],
        ..Figure::DEFAULT
    },
    Figure {
        name: "cloudtps/8",
        title: "Death of a node and partition, 50 browsers (CloudTPS, figure 8)",
        x: "time, s",
        experiment: &Timeline { browsers: 50, databases: 10 },
        minutes: 4,
        notes: &[LENGTHS],
        ..Figure::DEFAULT
    },
    Figure {
        name: "cloudtps/13",
        title: "Response time and memory (CloudTPS, figure 13)",
        x: "memory, % of the data",
        experiment: &Points { points, kinds: &[] },
        minutes: 3,
        paper_x_label: Some("items in memory at each of 20 nodes"),
        ..Figure::DEFAULT
    },
];

fn points(scaled: &Scaling) -> Vec<Point> {
    let sizes = [("10,000 items", 10_000.0), ("1,000,000 items", 1_000_000.0)];
    sizes.into_iter().flat_map(|(line, items)| of_size(scaled, line, items)).collect()
}

/// The points of one data size, with increasing memory.
fn of_size(scaled: &Scaling, line: &str, items: f64) -> Vec<Point> {
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
    // Sizes below a node's minimum memory yield the same point.
    points.dedup_by_key(|point| point.memory_bytes);
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ranges_from_the_minimum_to_twice_the_data() {
        let points = of_size(&Scaling { scale: 1.0, memory_bytes: None }, "1,000,000 items", 1_000_000.0);
        assert!(points.is_sorted_by(|a, b| a.memory_bytes < b.memory_bytes));
        assert_eq!((points[0].memory_bytes, points.last().unwrap().x), (64 << 20, 200.0));
        let small = of_size(&Scaling { scale: 0.01, memory_bytes: None }, "10,000 items", 10_000.0);
        assert_eq!(small.len(), 1, "all sizes are below a node's minimum memory");
    }
}

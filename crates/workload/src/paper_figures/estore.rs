//! The figure of E-Store's section 2.2: the cost of skew.
//!
//! In the paper, five nodes with 30 partitions lose a factor of 4 in throughput and respond 10
//! times as slowly, because one partition has most of the work. Here a single node has a fifth of
//! the data, and keys are not assigned to partitions: the remaining loss is the contention on equal
//! keys.

use super::point::{Load, Point};
use super::{Figure, Scaling};
use crate::keys::Distribution;
use crate::ycsb::Ycsb;

/// Data per node: 60 million rows of 1 KB on 5 nodes.
const NODE_BYTES: f64 = 12e9;

const CONNECTIONS: usize = 64;

pub(super) const FIGURES: [Figure; 1] = [Figure {
    name: "estore/3",
    title: "Skew (E-Store, figures 3a and 3b)",
    x: "skew: 0 none, 1 low, 2 high",
    points,
    over_first: true,
    ..Figure::DEFAULT
}];

fn points(scaled: &Scaling) -> Vec<Point> {
    let skews = [
        Distribution::Uniform,
        Distribution::LowSkew,
        Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 },
    ];
    let point = |(x, distribution): (i32, Distribution)| {
        let ycsb = Ycsb { tables: 1, operations: 1, reads: 85.0, distribution, ..Ycsb::default() };
        // H-Store keeps all data in memory.
        let memory_bytes = scaled.memory_bytes(NODE_BYTES * 1.5);
        let load = Load::Ycsb(ycsb.of_bytes(scaled.bytes(NODE_BYTES)));
        Point::alone("YCSB, 85 % reads", f64::from(x), memory_bytes, load, CONNECTIONS)
    };
    (0..).zip(skews).map(point).collect()
}

//! Pictures to compare planners with: E-Store's nine cases (6.1, figures 9, 11 and 13), and a large
//! one.
//!
//! Each case has five nodes with equal parts of the key space, and 80 % mean utilisation.
//!
//! workload | keys | block | hot keys | high skew
//! --- | --- | --- | --- | ---
//! `ycsb` | 60 million of 1 KB | 100,000 keys | the 1,000 most accessed | 60 % on 40 keys
//! `voter` | 6 million of 100 B | 100,000 keys | the 1,000 most accessed | 80 % on 30 keys
//! `tpcc` | 100 warehouses of 100 MB | 1 key | none: a block is a key | 60 % on 3 warehouses
//!
//! Low skew sends two thirds of the accesses to one third of the keys: a Zipfian distribution by
//! rank, whose first share `x` of the keys gets `x^0.369` of the accesses (`(1/3)^0.369 = 2/3`).
//! High skew applies it to the remaining accesses. Hot spots are on the first keys, which are on
//! the first node. The paper does not state the number of Voter's keys.

use crate::picture::{Node, Partition, Picture, Piece};

/// `ln(2/3) / ln(1/3)`.
const LOW_SKEW: f64 = 0.369_070_246_428_542_6;

const NODES: usize = 5;
const UTILISATION: f64 = 0.8;

#[derive(Clone)]
struct Workload {
    name: &'static str,
    keys: f64,
    key_bytes: u64,
    block_keys: f64,
    hot_keys: u32,
    /// The share of the accesses that high skew sends to this number of keys.
    hot_spot: (f64, f64),
}

const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "ycsb",
        keys: 60e6,
        key_bytes: 1000,
        block_keys: 1e5,
        hot_keys: 1000,
        hot_spot: (0.6, 40.0),
    },
    Workload {
        name: "voter",
        keys: 6e6,
        key_bytes: 100,
        block_keys: 1e5,
        hot_keys: 1000,
        hot_spot: (0.8, 30.0),
    },
    Workload {
        name: "tpcc",
        keys: 100.0,
        key_bytes: 100_000_000,
        block_keys: 1.0,
        hot_keys: 0,
        hot_spot: (0.6, 3.0),
    },
];

/// A distribution of accesses over the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skew {
    /// Uniform.
    None,
    /// Two thirds of the accesses go to one third of the keys.
    Low,
    /// Low skew, and a hot spot on a few keys.
    High,
}

impl Workload {
    /// The share of the accesses that the first `keys` keys get.
    fn share(&self, skew: Skew, keys: f64) -> f64 {
        let position = keys / self.keys;
        match skew {
            Skew::None => position,
            Skew::Low => position.powf(LOW_SKEW),
            Skew::High => {
                let (share, spot) = self.hot_spot;
                share * (keys / spot).min(1.0) + (1.0 - share) * position.powf(LOW_SKEW)
            }
        }
    }

    fn picture(&self, skew: Skew) -> Picture {
        let total = UTILISATION * NODES as f64;
        let load = |from: f64, to: f64| (self.share(skew, to) - self.share(skew, from)) * total;
        let nodes = (0..NODES).map(|node| Node::new(format!("n{node}"), 1.0)).collect();
        let blocks = (self.keys / self.block_keys) as usize;
        let per_node = blocks / NODES;
        let partition = |node: usize| {
            let bounds =
                |block: usize| (block as f64 * self.block_keys, (block + 1) as f64 * self.block_keys);
            let (first, last) = (node * per_node, (node + 1) * per_node);
            let whole = load(bounds(first).0, bounds(last - 1).1);
            let mut partition = Partition::new(format!("p{node}"), format!("n{node}"), whole);
            for block in first..last {
                let (from, to) = bounds(block);
                let piece =
                    Piece::new(format!("b{block}"), load(from, to), self.key_bytes * self.block_keys as u64);
                partition.bytes += piece.bytes;
                partition.blocks.push(piece);
            }
            partition
        };
        let mut partitions: Vec<Partition> = (0..NODES).map(partition).collect();
        // The most accessed keys are the first ones, all in the first block or two.
        for key in 0..self.hot_keys {
            let block = (f64::from(key) / self.block_keys) as usize;
            let home = &mut partitions[0].blocks[block];
            let load = load(f64::from(key), f64::from(key) + 1.0);
            home.load = (home.load - load).max(0.0);
            home.bytes -= self.key_bytes;
            let block = Some(home.name.clone());
            let piece = Piece { block, ..Piece::new(format!("k{key}"), load, self.key_bytes) };
            partitions[0].hot_keys.push(piece);
        }
        Picture { at_s: 0.0, nodes, partitions }
    }
}

const SKEWS: [(&str, Skew); 3] = [("none", Skew::None), ("low", Skew::Low), ("high", Skew::High)];

/// E-Store's nine cases: the name, and the picture before a plan.
pub fn estore() -> Vec<(String, Picture)> {
    let cases = WORKLOADS.iter().flat_map(|workload| {
        let of_skew = move |(name, skew)| (format!("{}-{name}", workload.name), workload.picture(skew));
        SKEWS.into_iter().map(of_skew)
    });
    cases.collect()
}

/// One of E-Store's nine cases (such as `ycsb-high`), with this number of hot keys if its workload
/// has any.
pub fn estore_case(name: &str, hot_keys: u32) -> Option<Picture> {
    let (workload, skew) = name.split_once('-')?;
    let workload = WORKLOADS.iter().find(|of| of.name == workload)?;
    let (_, skew) = SKEWS.into_iter().find(|(name, _)| *name == skew)?;
    let hot_keys = hot_keys.min(if workload.hot_keys > 0 { u32::MAX } else { 0 });
    Some(Workload { hot_keys, ..workload.clone() }.picture(skew))
}

/// A cluster of equal nodes, whose partitions' loads follow a Zipfian distribution, and whose
/// busiest tenth of the partitions has hot keys with half of its load. Mean utilisation: 60 %.
pub fn large(nodes: usize, partitions: usize, hot_keys: usize) -> Picture {
    let total = 0.6 * nodes as f64;
    let share = |rank: usize| (rank as f64 / partitions as f64).powf(LOW_SKEW);
    let owners = (0..nodes).map(|node| Node { memory: 64 << 30, ..Node::new(format!("n{node}"), 1.0) });
    let hot_partitions = (partitions / 10).max(1);
    let keys_each = hot_keys / hot_partitions;
    let partition = |rank: usize| {
        let load = (share(rank + 1) - share(rank)) * total;
        // A fixed permutation that spreads sizes over ranks.
        let bytes = (1 + (rank * 7919) % 1000) as u64 * 1_000_000;
        let owner = format!("n{}", (rank * 31 / 7) % nodes);
        let mut partition =
            Partition { bytes, memory: bytes / 10, ..Partition::new(format!("t{rank}"), owner, load) };
        if rank < hot_partitions {
            let key = |key| Piece::new(format!("k{key}"), load / 2.0 / keys_each as f64, 1000);
            partition.hot_keys = (0..keys_each).map(key).collect();
        }
        partition
    };
    Picture { at_s: 0.0, nodes: owners.collect(), partitions: (0..partitions).map(partition).collect() }
}

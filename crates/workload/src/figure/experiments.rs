//! The figures and their parameters.
//!
//! ElasTraS 4 to 8 (7.3.1): a single tenant, transactional YCSB, one parameter after the other with the rest as in table III:
//! ten operations, nine of which read, 4 GB, 200 transactions a second, Hot90-20, a cache of 1 GB.

use crate::keys::Distribution;
use crate::ycsb::Ycsb;

const GB: f64 = 1e9;
const MB: f64 = 1e6;

/// A key names a row of ten 100-byte columns in each of three tables.
const BYTES_PER_KEY: f64 = 3_000.0;

/// A node cannot do with less.
const LEAST_MEMORY_BYTES: u64 = 64 << 20;

/// A figure of a paper.
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// What the x axis shows.
    pub(super) x: &'static str,
    /// The values of the x axis.
    values: &'static [f64],
    lines: &'static [Distribution],
    /// Sets the parameter that is varied.
    vary: fn(&mut Parameters, f64),
}

/// Table III and the cache, in the paper's units.
struct Parameters {
    operations: f64,
    read_percent: f64,
    database_bytes: f64,
    rate_tps: f64,
    cache_bytes: f64,
}

const TABLE_III: Parameters = Parameters {
    operations: 10.0,
    read_percent: 90.0,
    database_bytes: 4.0 * GB,
    rate_tps: 200.0,
    cache_bytes: GB,
};

const HOT_80_20: Distribution = Distribution::Hotspot { operations_percent: 80.0, keys_percent: 20.0 };
const ZIPFIAN: Distribution = Distribution::Zipfian { exponent: 1.0 };
const ALL: &[Distribution] = &[Distribution::Uniform, ZIPFIAN, HOT_80_20, Distribution::HOT_90_20];
const REPRESENTATIVE: &[Distribution] = &[Distribution::Uniform, Distribution::HOT_90_20];

pub(super) const FIGURES: [Figure; 5] = [
    Figure {
        name: "elastras/4",
        title: "Offered load (ElasTraS, figure 4)",
        x: "offered transactions/s",
        values: &[20.0, 100.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0, 1400.0],
        lines: ALL,
        vary: |parameters, x| parameters.rate_tps = x,
    },
    Figure {
        name: "elastras/5",
        title: "Transaction size (ElasTraS, figure 5)",
        x: "operations of a transaction",
        values: &[5.0, 10.0, 15.0, 20.0, 25.0, 30.0],
        lines: REPRESENTATIVE,
        vary: |parameters, x| parameters.operations = x,
    },
    Figure {
        name: "elastras/6",
        title: "Share of updates (ElasTraS, figure 6)",
        x: "% of the operations that read",
        values: &[50.0, 60.0, 70.0, 80.0, 90.0],
        lines: REPRESENTATIVE,
        vary: |parameters, x| parameters.read_percent = x,
    },
    Figure {
        name: "elastras/7",
        title: "Database size (ElasTraS, figure 7)",
        x: "MB of data in the paper",
        values: &[500.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0],
        lines: REPRESENTATIVE,
        vary: |parameters, x| parameters.database_bytes = x * MB,
    },
    Figure {
        name: "elastras/8",
        title: "Cache size (ElasTraS, figure 8)",
        x: "MB of cache in the paper",
        values: &[200.0, 400.0, 600.0, 800.0, 1000.0],
        lines: REPRESENTATIVE,
        vary: |parameters, x| parameters.cache_bytes = x * MB,
    },
];

/// A point of a figure.
pub(super) struct Point {
    pub(super) line: String,
    pub(super) x: f64,
    pub(super) workload: Ycsb,
    pub(super) rate_tps: f64,
    pub(super) memory_bytes: u64,
}

impl Figure {
    /// Those with the same data and memory stand together.
    pub(super) fn points(&self, scale: f64, memory_bytes: Option<u64>) -> Vec<Point> {
        let points = self.values.iter().flat_map(|x| {
            self.lines.iter().map(move |distribution| {
                let mut parameters = Parameters { ..TABLE_III };
                (self.vary)(&mut parameters, *x);
                point(&parameters, *distribution, *x, scale, memory_bytes)
            })
        });
        points.collect()
    }
}

fn point(
    parameters: &Parameters,
    distribution: Distribution,
    x: f64,
    scale: f64,
    memory_bytes: Option<u64>,
) -> Point {
    let records = (parameters.database_bytes * scale / BYTES_PER_KEY).max(1.0) as u32;
    let cache = (parameters.cache_bytes * scale) as u64;
    Point {
        line: distribution.to_string(),
        x,
        workload: Ycsb {
            records,
            distribution,
            operations: parameters.operations as u32,
            reads: parameters.read_percent,
            ..Ycsb::default()
        },
        rate_tps: parameters.rate_tps,
        memory_bytes: memory_bytes.unwrap_or(cache.max(LEAST_MEMORY_BYTES)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(name: &str) -> Vec<Point> {
        FIGURES.iter().find(|figure| figure.name == name).unwrap().points(0.1, None)
    }

    #[test]
    fn one_parameter_is_varied_and_the_rest_is_table_iii() {
        let load = points("elastras/4");
        assert_eq!(load.len(), 9 * 4);
        assert!(load.iter().all(|point| point.workload.operations == 10 && point.workload.reads == 90.0));
        assert!(load.iter().all(|point| point.workload.records == 133_333), "0.4 GB");
        assert_eq!((load[0].rate_tps, load[35].rate_tps), (20.0, 1400.0));
        let size = points("elastras/7");
        assert!(size.iter().all(|point| point.rate_tps == 200.0 && point.memory_bytes == 100_000_000));
        assert_eq!((size[0].workload.records, size[11].workload.records), (16_666, 166_666));
    }

    #[test]
    fn points_of_one_node_stand_together() {
        for figure in &FIGURES {
            let points = figure.points(1.0, None);
            let mut sizes: Vec<_> =
                points.iter().map(|point| (point.workload.records, point.memory_bytes)).collect();
            sizes.dedup();
            let number = sizes.len();
            sizes.sort_unstable();
            sizes.dedup();
            assert_eq!(sizes.len(), number, "{}", figure.name);
        }
    }
}

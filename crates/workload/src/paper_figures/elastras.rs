//! The figures of ElasTraS.
//!
//! - 4 to 8 (7.3.1): a single tenant with transactional YCSB. One parameter varies and the others
//!   are those of table III: 10 operations per transaction, 9 of them reads, 4 GB of data, 200
//!   transactions/s, Hot90-20, and a cache of 1 GB. The table of 7.3.2 has the peak throughput of
//!   other servers under the same load.
//! - 9 (7.3.3): TPC-C as procedures with 10 warehouses, 2.5 GB of data and a cache of 1 GB.
//! - 10 to 12 (7.4): many tenants on one node, and one noisy tenant.

use super::point::{Load, Point, Points, ServerName};
use super::{Figure, SERVED_BY_TENANT, Scaling};
use crate::keys::Distribution;
use crate::tpcc::Tpcc;
use crate::ycsb::Ycsb;

const GB: f64 = 1e9;
const MB: f64 = 1e6;

/// Connections of a single tenant: enough for the paper's rates at about 10 ms per transaction.
const CONNECTIONS: usize = 32;

/// Connections of each tenant if there are about ten, or a hundred.
const CONNECTIONS_OF_TEN: usize = 8;
const CONNECTIONS_OF_MANY: usize = 2;

/// Data per tenant, and cache (7.4), of figure 10. The text does not state them for figure 12,
/// which uses the same.
const TENANT_BYTES: f64 = 500.0 * MB;
const SHARED_CACHE_BYTES: f64 = 2.4 * GB;

/// Figure 11: 50 to 100 MB per tenant.
const SMALL_TENANTS: u32 = 100;
const SMALL_TENANT_BYTES: f64 = 75.0 * MB;

/// Figure 12.
const NEIGHBOURS: u32 = 10;
const NEIGHBOUR_TPS: f64 = 25.0;

const HOT_80_20: Distribution = Distribution::Hotspot { operations_percent: 80.0, keys_percent: 20.0 };
const ZIPFIAN: Distribution = Distribution::Zipfian { exponent: 1.0 };
const ALL: &[Distribution] = &[Distribution::Uniform, ZIPFIAN, HOT_80_20, Distribution::HOT_90_20];
const REPRESENTATIVE: &[Distribution] = &[Distribution::Uniform, Distribution::HOT_90_20];

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "elastras/4",
        title: "Offered load (ElasTraS, figure 4)",
        x: "offered transactions/s",
        minutes: 9,
        experiment: &Points {
            points: |scaled| {
                let loads = [20.0, 100.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0, 1400.0];
                sweep(scaled, &loads, ALL, |parameters, x| parameters.rate_tps = x)
            },
            kinds: &[],
        },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/5",
        title: "Transaction size (ElasTraS, figure 5)",
        x: "operations per transaction",
        minutes: 4,
        experiment: &Points {
            points: |scaled| {
                let sizes = [5.0, 10.0, 15.0, 20.0, 25.0, 30.0];
                sweep(scaled, &sizes, REPRESENTATIVE, |parameters, x| parameters.operations = x)
            },
            kinds: &[],
        },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/6",
        title: "Share of updates (ElasTraS, figure 6)",
        x: "reads, % of the operations",
        minutes: 3,
        experiment: &Points {
            points: |scaled| {
                let reads = [50.0, 60.0, 70.0, 80.0, 90.0];
                sweep(scaled, &reads, REPRESENTATIVE, |parameters, x| parameters.read_percent = x)
            },
            kinds: &[],
        },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/7",
        title: "Database size (ElasTraS, figure 7)",
        x: "MB of data in the paper",
        minutes: 4,
        experiment: &Points {
            points: |scaled| {
                let sizes = [500.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0];
                sweep(scaled, &sizes, REPRESENTATIVE, |parameters, x| parameters.database_bytes = x * MB)
            },
            kinds: &[],
        },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/8",
        title: "Cache size (ElasTraS, figure 8)",
        x: "MB of cache in the paper",
        minutes: 4,
        experiment: &Points {
            points: |scaled| {
                let caches = [200.0, 400.0, 600.0, 800.0, 1000.0];
                sweep(scaled, &caches, REPRESENTATIVE, |parameters, x| parameters.cache_bytes = x * MB)
            },
            kinds: &[],
        },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/7.3.2",
        title: "Peak throughput of one tenant (ElasTraS, table of 7.3.2)",
        x: "connections",
        minutes: 1,
        experiment: &Points { points: peaks, kinds: &[] },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/9",
        title: "TPC-C with one tenant (ElasTraS, figure 9)",
        x: "offered transactions/s",
        minutes: 3,
        experiment: &Points { points: tpcc, kinds: &["new-order", "payment"] },
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/10",
        title: "Tenants of 500 MB on one node (ElasTraS, figure 10)",
        x: "tenants, 100 transactions/s each",
        minutes: 6,
        experiment: &Points {
            points: |scaled| {
                let tenants = [1, 2, 4, 6, 8, 10, 12, 14].into_iter();
                let both = |tenants| {
                    let line = move |distribution| Point {
                        tenants,
                        connections: CONNECTIONS_OF_TEN,
                        rate_tps: Some(f64::from(tenants) * 100.0),
                        ..many(scaled, distribution, f64::from(tenants), TENANT_BYTES)
                    };
                    REPRESENTATIVE.iter().copied().map(line)
                };
                tenants.flat_map(both).collect()
            },
            kinds: &[],
        },
        measures: &SERVED_BY_TENANT,
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/11",
        title: "100 small tenants on one node (ElasTraS, figure 11)",
        x: "offered transactions/s, all tenants",
        minutes: 5,
        experiment: &Points {
            points: |scaled| {
                let loads = [100.0, 200.0, 400.0, 600.0, 800.0, 1000.0, 1200.0].into_iter();
                let both = |load| {
                    let line = move |distribution| Point {
                        tenants: SMALL_TENANTS,
                        connections: CONNECTIONS_OF_MANY,
                        rate_tps: Some(load),
                        ..many(scaled, distribution, load, SMALL_TENANT_BYTES)
                    };
                    REPRESENTATIVE.iter().copied().map(line)
                };
                loads.flat_map(both).collect()
            },
            kinds: &[],
        },
        measures: &SERVED_BY_TENANT,
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/12",
        title: "Nine tenants with a noisy neighbour (ElasTraS, figure 12)",
        x: "load of the noisy tenant, times 25 transactions/s",
        minutes: 2,
        experiment: &Points {
            points: |scaled| {
                let noisier = |factor: f64| Point {
                    tenants: NEIGHBOURS,
                    connections: CONNECTIONS_OF_TEN,
                    rate_tps: Some(f64::from(NEIGHBOURS - 1) * NEIGHBOUR_TPS),
                    noisy_tps: Some(factor * NEIGHBOUR_TPS),
                    ..many(scaled, Distribution::HOT_90_20, factor, TENANT_BYTES)
                };
                [1.0, 5.0, 10.0].map(noisier).into_iter().collect()
            },
            kinds: &[],
        },
        measures: &SERVED_BY_TENANT,
        over_first: true,
        ..Figure::DEFAULT
    },
];

/// The parameters of table III and the cache size, in the paper's units.
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

/// The points of a figure that varies one parameter. Points with the same data and memory are
/// adjacent.
fn sweep(
    scaled: &Scaling,
    values: &[f64],
    lines: &[Distribution],
    vary: fn(&mut Parameters, f64),
) -> Vec<Point> {
    let points = values.iter().flat_map(|x| {
        lines.iter().map(move |distribution| {
            let mut parameters = Parameters { ..TABLE_III };
            vary(&mut parameters, *x);
            single(scaled, &parameters, *distribution, *x)
        })
    });
    points.collect()
}

fn single(scaled: &Scaling, parameters: &Parameters, distribution: Distribution, x: f64) -> Point {
    let Parameters { rate_tps, operations, read_percent: reads, .. } = *parameters;
    let ycsb = Ycsb { distribution, operations: operations as u32, reads, ..Ycsb::default() };
    let load = Load::Ycsb(ycsb.of_bytes(scaled.bytes(parameters.database_bytes)));
    let (line, memory_bytes) = (distribution.to_string(), scaled.memory_bytes(parameters.cache_bytes));
    Point { rate_tps: Some(rate_tps), ..Point::alone(&line, x, memory_bytes, load, CONNECTIONS) }
}

/// A point with tenants of `tenant_bytes` each. The figure sets their number and their rate.
fn many(scaled: &Scaling, distribution: Distribution, x: f64, tenant_bytes: f64) -> Point {
    let parameters =
        Parameters { database_bytes: tenant_bytes, cache_bytes: SHARED_CACHE_BYTES, ..TABLE_III };
    single(scaled, &parameters, distribution, x)
}

/// Peak throughput in a closed loop. In the paper, MySQL and H2 had the same cache size as
/// ElasTraS, and so has PostgreSQL here.
fn peaks(scaled: &Scaling) -> Vec<Point> {
    let servers = [(ServerName::Fulmar, "fulmar"), (ServerName::Postgres, "postgres")];
    let peak = |(server, line): (ServerName, &str)| Point {
        line: line.to_owned(),
        server,
        rate_tps: None,
        ..single(scaled, &TABLE_III, Distribution::HOT_90_20, CONNECTIONS as f64)
    };
    servers.map(peak).into_iter().collect()
}

fn tpcc(scaled: &Scaling) -> Vec<Point> {
    const WAREHOUSES: f64 = 10.0;
    let part = WAREHOUSES * scaled.scale;
    // Below one warehouse, its tables become smaller instead.
    let rows = |count: f64| (count * part.min(1.0)).max(100.0) as u32;
    let workload = Tpcc {
        warehouses: part.round().max(1.0) as u32,
        items: rows(100_000.0),
        customers: rows(3_000.0),
        procedure: true,
        ..Tpcc::default()
    };
    let point = |rate_tps: f64| Point {
        line: "tpcc".to_owned(),
        x: rate_tps,
        load: Load::Tpcc(workload.clone()),
        rate_tps: Some(rate_tps),
        ..single(scaled, &TABLE_III, Distribution::Uniform, rate_tps)
    };
    [25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1200.0, 1600.0].map(point).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(name: &str) -> Vec<Point> {
        let figure = FIGURES.iter().find(|figure| figure.name == name).unwrap();
        figure.experiment.points(&Scaling { scale: 0.1, memory_bytes: None })
    }

    fn ycsb(point: &Point) -> &Ycsb {
        let Load::Ycsb(workload) = &point.load else { panic!("{} is of YCSB", point.line) };
        workload
    }

    #[test]
    fn one_parameter_varies_and_the_others_are_table_iii() {
        let load = points("elastras/4");
        assert_eq!(load.len(), 9 * 4);
        assert!(load.iter().all(|point| ycsb(point).operations == 10 && ycsb(point).reads == 90.0));
        assert!(load.iter().all(|point| ycsb(point).records == 133_333), "0.4 GB");
        assert_eq!((load[0].rate_tps, load[35].rate_tps), (Some(20.0), Some(1400.0)));
        let size = points("elastras/7");
        assert!(size.iter().all(|point| point.rate_tps == Some(200.0) && point.memory_bytes == 100_000_000));
        assert_eq!((ycsb(&size[0]).records, ycsb(&size[11]).records), (16_666, 166_666));
    }

    #[test]
    fn tenants_have_the_rates_of_the_paper() {
        let ten = points("elastras/10");
        assert!(ten.iter().all(|point| point.rate_tps == Some(f64::from(point.tenants) * 100.0)));
        let loud: Vec<_> = points("elastras/12").iter().map(|point| point.noisy_tps).collect();
        assert_eq!(loud, [Some(25.0), Some(125.0), Some(250.0)]);
        assert!(points("elastras/12").iter().all(|point| point.rate_tps == Some(225.0)));
    }

    #[test]
    fn scale_reduces_warehouses_and_then_their_size() {
        let of = |scale| match tpcc(&Scaling { scale, memory_bytes: None }).remove(0).load {
            Load::Tpcc(tpcc) => (tpcc.warehouses, tpcc.items, tpcc.customers),
            _ => panic!("not TPC-C"),
        };
        assert_eq!(of(1.0), (10, 100_000, 3_000));
        assert_eq!(of(0.1), (1, 100_000, 3_000));
        assert_eq!(of(0.01), (1, 10_000, 300));
    }
}

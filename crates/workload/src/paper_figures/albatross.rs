//! The figures of ElasTraS about moves (7.7): each mechanism moves a loaded tenant, and one
//! parameter varies, at two points. Figures that show the same moves have the same experiment.

use super::Figure;
use super::overload::{CHANGE, Overload};
use super::trials::{COSTS, LATENCIES, OVER_TIME, Trials, View, WITH_NORMAL};
use crate::keys::Distribution;

/// Megabytes of data of which 64 MiB, the minimum memory of a node, are 10 %.
const LARGE_BYTES: f64 = 10.0 * 64.0 * 1_048_576.0;
const MB: f64 = 1e6;
/// Sizes of which 64 MiB are 25 %, and of twice that.
const SIZES_MB: [f64; 2] = [269.0, 537.0];

const LOAD: Trials =
    Trials { values: &[20.0, 100.0], vary: |parameters, x| parameters.rate_tps = Some(x), ..Trials::DEFAULT };
const READS: Trials =
    Trials { values: &[50.0, 90.0], vary: |parameters, x| parameters.read_percent = x, ..Trials::DEFAULT };
const OPERATIONS: Trials = Trials {
    values: &[8.0, 24.0],
    vary: |parameters, x| parameters.operations = x as u32,
    ..Trials::DEFAULT
};
const ACCESS: Trials = Trials {
    values: &[1.0, 2.0],
    vary: |parameters, x| {
        let distributions = [Distribution::Uniform, Distribution::HOT_90_20];
        parameters.distribution = distributions[(x as usize - 1).min(1)];
    },
    ..Trials::DEFAULT
};
const CACHE: Trials = Trials {
    values: &[10.0, 50.0],
    vary: |parameters, x| {
        parameters.least_bytes = LARGE_BYTES;
        parameters.cache = x / 100.0;
    },
    ..Trials::DEFAULT
};
const TPCC: Trials = Trials {
    values: &[500.0, 2500.0],
    vary: |parameters, tpm| {
        parameters.warehouses = 4;
        parameters.cache = 0.5;
        // 45 % of the transactions are new orders.
        parameters.rate_tps = Some(tpm / 60.0 / 0.45);
    },
    ..Trials::DEFAULT
};

const LOAD_AXIS: &str = "transactions/s";
const READS_AXIS: &str = "reads, %";
const OPERATIONS_AXIS: &str = "operations per transaction";
const ACCESS_AXIS: &str = "distribution: 1 uniform, 2 hotspot 90:20";
const TIME: &str = "time, s";

const SWEEP: Figure = Figure { measures: &COSTS, minutes: 7, ..Figure::DEFAULT };
const ABSOLUTE: &str = "the sizes are those of this run, whatever --scale is";

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "elastras/16",
        title: "Distribution of latencies with a move (ElasTraS, figure 16)",
        x: "",
        experiment: &Trials { mechanisms: WITH_NORMAL, view: View::Latencies, ..Trials::DEFAULT },
        measures: &LATENCIES,
        minutes: 4,
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/17",
        title: "Latency while a tenant is moved (ElasTraS, figure 17a)",
        x: TIME,
        experiment: &Trials { mechanisms: WITH_NORMAL, view: View::Time, ..Trials::DEFAULT },
        measures: &OVER_TIME,
        minutes: 4,
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/17b",
        title: "Throughput of four clients while their tenant is moved (ElasTraS, figure 17b)",
        x: TIME,
        experiment: &Trials {
            mechanisms: WITH_NORMAL,
            vary: |parameters, _| (parameters.rate_tps, parameters.connections) = (None, 4),
            view: View::Time,
            ..Trials::DEFAULT
        },
        measures: &OVER_TIME,
        minutes: 4,
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/18",
        title: "Load: unavailability and failures (ElasTraS, figure 18)",
        x: LOAD_AXIS,
        experiment: &LOAD,
        ..SWEEP
    },
    Figure {
        name: "elastras/19",
        title: "Load: latency and data transferred (ElasTraS, figure 19)",
        x: LOAD_AXIS,
        experiment: &LOAD,
        ..SWEEP
    },
    Figure {
        name: "elastras/20",
        title: "Share of reads: unavailability and failures (ElasTraS, figure 20)",
        x: READS_AXIS,
        experiment: &READS,
        ..SWEEP
    },
    Figure {
        name: "elastras/21",
        title: "Share of reads: latency and duration (ElasTraS, figure 21)",
        x: READS_AXIS,
        experiment: &READS,
        ..SWEEP
    },
    Figure {
        name: "elastras/22",
        title: "Transaction size: unavailability and failures (ElasTraS, figure 22)",
        x: OPERATIONS_AXIS,
        experiment: &OPERATIONS,
        ..SWEEP
    },
    Figure {
        name: "elastras/23",
        title: "Transaction size: latency and duration (ElasTraS, figure 23)",
        x: OPERATIONS_AXIS,
        experiment: &OPERATIONS,
        notes: &["the paper also divides the duration by phase"],
        ..SWEEP
    },
    Figure {
        name: "elastras/24",
        title: "Access distribution: unavailability and failures (ElasTraS, figure 24)",
        x: ACCESS_AXIS,
        experiment: &ACCESS,
        ..SWEEP
    },
    Figure {
        name: "elastras/25",
        title: "Access distribution: latency and data transferred (ElasTraS, figure 25)",
        x: ACCESS_AXIS,
        experiment: &ACCESS,
        ..SWEEP
    },
    Figure {
        name: "elastras/26",
        title: "Cache size: unavailability and latency (ElasTraS, figure 26)",
        x: "cache, % of the data",
        experiment: &CACHE,
        minutes: 10,
        notes: &[ABSOLUTE],
        ..SWEEP
    },
    Figure {
        name: "elastras/27",
        title: "Latency while a tenant is moved whose working set exceeds the cache (ElasTraS, figure 27)",
        x: TIME,
        experiment: &Trials { values: &[10.0], view: View::Time, ..CACHE },
        measures: &OVER_TIME,
        minutes: 5,
        notes: &[ABSOLUTE],
        ..Figure::DEFAULT
    },
    Figure {
        name: "elastras/28",
        title: "Database size: unavailability and data transferred (ElasTraS, figure 28)",
        x: "MB of data",
        experiment: &Trials {
            values: &SIZES_MB,
            vary: |parameters, x| parameters.database_bytes = x * MB * 10.0,
            ..Trials::DEFAULT
        },
        minutes: 9,
        notes: &["with --scale 0.1; the paper has no sizes in its text"],
        ..SWEEP
    },
    Figure {
        name: "elastras/29",
        title: "TPC-C: unavailability and failures (ElasTraS, figure 29)",
        x: "new orders/min",
        experiment: &TPCC,
        minutes: 8,
        ..SWEEP
    },
    Figure {
        name: "elastras/30",
        title: "Away from an overloaded node (ElasTraS, figure 30)",
        x: "1 stop, 2 flush, 3 albatross",
        experiment: &Overload,
        measures: &CHANGE,
        minutes: 5,
        notes: &[
            "each node has a third of a core (cfs_period_us 10000); the source is overloaded by clients of \
             three tenants that do not pause, not by 20 tenants",
        ],
        ..Figure::DEFAULT
    },
];

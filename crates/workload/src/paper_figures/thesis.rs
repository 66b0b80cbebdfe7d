//! The figures of Karyakin's thesis (5.2, 5.3).
//!
//! Its mechanisms are, in our words: Snowflock clones a machine and fetches pages when they are
//! needed (`on-demand`), the DBMS-level one transfers partitions in bulk under a lock (`bulk`), the
//! application-level one copies rows by SQL (`sql`).

use super::Figure;
use super::scale_out::{
    Bound, DOWN, MIGRATING, NETWORK, RESPONSE, STAYING, ScaleOut, THROUGHPUT, View, WORST,
};

const DISK_MECHANISMS: &[&str] = &["on-demand", "bulk", "live"];
const CPU_MECHANISMS: &[&str] = &["on-demand", "bulk", "sql", "live"];

const DISK: ScaleOut = ScaleOut { bound: Bound::Disk, mechanisms: DISK_MECHANISMS, view: View::Time };
const CPU: ScaleOut = ScaleOut { bound: Bound::Cpu, mechanisms: CPU_MECHANISMS, view: View::Time };
const MAXIMUM: ScaleOut = ScaleOut { bound: Bound::CpuMaximum, ..CPU };

const SMALL: &str = "eight tenants of a part of a warehouse each; two nodes with a third of a core \
                     (cfs_period_us 10000); minutes became phases of --seconds (10). The node is there \
                     before the moves begin";
const CACHED: &str = "a node's memory is a quarter of the data, but the kernel may cache its files, too";
const FASTER: &str = "on-demand: only the tenants that are moved fetch pages, not a clone of the machine";
const CONSTANT: &str = "clients do not pause, and their number is constant";

const DISK_BOUND: Figure = Figure {
    x: "time, s",
    experiment: &DISK,
    measures: &[THROUGHPUT],
    minutes: 7,
    notes: &[SMALL, CACHED, FASTER],
    ..Figure::DEFAULT
};
const CPU_BOUND: Figure = Figure {
    x: "time, s",
    experiment: &CPU,
    measures: &[THROUGHPUT],
    minutes: 7,
    notes: &[SMALL, FASTER],
    ..Figure::DEFAULT
};

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "thesis/11",
        title: "Throughput, disk-bound (thesis, figure 11; lost work: tables 5 and 6)",
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/12",
        title: "Network throughput, disk-bound (thesis, figure 12)",
        measures: &[NETWORK],
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/13",
        title: "Throughput and network of the bulk transfer, disk-bound (thesis, figure 13)",
        experiment: &ScaleOut { mechanisms: &["bulk"], ..DISK },
        measures: &[THROUGHPUT, NETWORK],
        minutes: 3,
        notes: &[SMALL, CACHED],
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/14",
        title: "Intervals of 5 s without a transaction, by tenant, disk-bound (thesis, figure 14)",
        x: "tenants, the worst first",
        experiment: &ScaleOut { view: View::Down, ..DISK },
        measures: &[DOWN],
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/15",
        title: "Throughput of the tenants that are moved, disk-bound (thesis, figure 15)",
        measures: &[MIGRATING],
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/16",
        title: "Throughput of the tenants that stay, disk-bound (thesis, figure 16)",
        measures: &[STAYING],
        ..DISK_BOUND
    },
    Figure {
        name: "thesis/17",
        title: "Distribution of the throughput of one node at its maximum, CPU-bound (thesis, figure 17)",
        x: "share of the seconds, %",
        experiment: &ScaleOut { mechanisms: &["live"], view: View::Distribution, ..MAXIMUM },
        minutes: 2,
        notes: &[SMALL, CONSTANT],
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/18",
        title: "Throughput at the maximum load, CPU-bound (thesis, figure 18)",
        experiment: &MAXIMUM,
        notes: &[SMALL, FASTER, CONSTANT],
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/19",
        title: "Throughput, CPU-bound (thesis, figure 19; lost work: table 9)",
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/20",
        title: "Response times, CPU-bound (thesis, figure 20)",
        measures: &[RESPONSE],
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/21",
        title: "Network throughput, CPU-bound (thesis, figure 21)",
        measures: &[NETWORK],
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/22",
        title: "Seconds without a transaction, by tenant, CPU-bound (thesis, figure 22)",
        x: "tenants, the worst first",
        experiment: &ScaleOut { view: View::Down, ..CPU },
        measures: &[DOWN],
        ..CPU_BOUND
    },
    Figure {
        name: "thesis/23",
        title: "Throughput of the slowest tenant, CPU-bound (thesis, figure 23)",
        experiment: &ScaleOut { view: View::Worst, ..CPU },
        measures: &[WORST],
        ..CPU_BOUND
    },
];

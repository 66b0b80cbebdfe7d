//! The figures of E-Store.
//!
//! - 2, 3 and 6: real nodes. A tenant takes the place of a partition of the paper's.
//! - 7 to 15, and table 1: planners and the model of nodes ([`super::planned`]), until keys of a
//!   tenant can be moved.

use fulmar_control::planners::Resize;

use super::Figure;
use super::planned::{ALL, IMPROVEMENT, OVER_TIME, PLANNING, Planned, View};
use super::skew::{Counting, Skew, UTILISATION};

const TIME: &str = "time, s";
const SKEW: &str = "skew: 1 low, 2 high";

/// The note of all figures without servers.
const MODEL: &str = "computed: Fulmar's planners on E-Store's workloads, with a model of five nodes at 80 % \
                     mean utilisation and of the moves; keys of a tenant cannot be moved yet";
/// The note of the figures with a skew of tenants.
const REAL: &str = "30 tenants on three nodes with a third of a core each (cfs_period_us 10000), in place of 30 \
                    partitions on five nodes; the load is 80 % of the capacity without skew";
const SOLVER: &str = "the integer programs stop after --seconds (10) with their best answer; in the paper \
                      after 20 hours";

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "estore/2",
        title: "CPU utilisation of the nodes (E-Store, figure 2)",
        x: "node",
        experiment: &Skew { by_node: true },
        measures: &UTILISATION,
        notes: &[REAL],
        ..Figure::DEFAULT
    },
    Figure {
        name: "estore/3",
        title: "Throughput and latency of a skewed load (E-Store, figures 3a and 3b)",
        x: "skew: 0 none, 1 low, 2 high",
        experiment: &Skew { by_node: false },
        over_first: true,
        notes: &[REAL],
        ..Figure::DEFAULT
    },
    Figure {
        name: "estore/6",
        title: "Cost of counting accesses per key (E-Store, figure 6)",
        x: TIME,
        experiment: &Counting,
        minutes: 3,
        notes: &[
            "off: no counting; on: a sample with SpaceSaving; full: every access, as in the paper, where \
             counting begins at 5 s and takes 25 % (high skew) or 33 % (low skew) of the throughput",
        ],
        ..Figure::DEFAULT
    },
    Figure {
        name: "estore/7",
        title: "Length of the monitoring window (E-Store, figure 7)",
        x: "window, s",
        experiment: &Planned {
            planners: &["greedy", "greedy-extended"],
            view: View::Windows(&[1.0, 5.0, 10.0, 20.0]),
            ..Planned::DEFAULT
        },
        ..IMPROVED
    },
    Figure {
        name: "estore/8",
        title: "Number of keys that are monitored (E-Store, figure 8)",
        x: "top k, %",
        experiment: &Planned {
            planners: &["greedy", "greedy-extended"],
            view: View::Top(&[0.5, 1.0, 2.0]),
            ..Planned::DEFAULT
        },
        ..IMPROVED
    },
    Figure {
        name: "estore/9",
        title: "All planners, YCSB (E-Store, figure 9)",
        experiment: &Planned { planners: ALL, ..Planned::DEFAULT },
        notes: &[MODEL, SOLVER],
        ..SIMULATED
    },
    Figure {
        name: "estore/10",
        title: "All planners, YCSB, averages from the start of monitoring (E-Store, figure 10)",
        x: SKEW,
        experiment: &Planned { planners: ALL, view: View::Average, ..Planned::DEFAULT },
        notes: &[MODEL, SOLVER],
        ..IMPROVED
    },
    Figure {
        name: "estore/11",
        title: "Planners, Voter (E-Store, figure 11)",
        experiment: &Planned { workload: "voter", ..Planned::DEFAULT },
        ..SIMULATED
    },
    Figure {
        name: "estore/12",
        title: "Planners, Voter, averages from the start of monitoring (E-Store, figure 12)",
        x: SKEW,
        experiment: &Planned { workload: "voter", view: View::Average, ..Planned::DEFAULT },
        ..IMPROVED
    },
    Figure {
        name: "estore/13",
        title: "TPC-C (E-Store, figure 13)",
        experiment: &Planned {
            workload: "tpcc",
            planners: &["greedy-extended", "local-search"],
            ..Planned::DEFAULT
        },
        notes: &[
            MODEL,
            "five nodes instead of three; each warehouse is a block of one key, which only greedy-extended \
             moves (in the paper greedy)",
        ],
        ..SIMULATED
    },
    Figure {
        name: "estore/14",
        title: "Scaling out from five nodes to six, YCSB (E-Store, figure 14)",
        experiment: &Planned { load: 1.35, resize: Some(Resize::Add(1)), ..EXTENDED },
        ..SIMULATED
    },
    Figure {
        name: "estore/14-voter",
        title: "Scaling out from five nodes to six, Voter (E-Store, figure 14)",
        experiment: &Planned { workload: "voter", load: 1.35, resize: Some(Resize::Add(1)), ..EXTENDED },
        ..SIMULATED
    },
    Figure {
        name: "estore/15",
        title: "Scaling in from five nodes to four, YCSB (E-Store, figure 15)",
        experiment: &Planned { load: 0.5, resize: Some(Resize::Remove(1)), ..EXTENDED },
        ..SIMULATED
    },
    Figure {
        name: "estore/15-voter",
        title: "Scaling in from five nodes to four, Voter (E-Store, figure 15)",
        experiment: &Planned { workload: "voter", load: 0.5, resize: Some(Resize::Remove(1)), ..EXTENDED },
        ..SIMULATED
    },
    Figure {
        name: "estore/table-1",
        title: "Execution time of the planners, YCSB (E-Store, table 1)",
        x: SKEW,
        experiment: &Planned { planners: ALL, view: View::Plan, ..Planned::DEFAULT },
        measures: &PLANNING,
        notes: &[MODEL, SOLVER],
        ..IMPROVED
    },
];

/// The defaults of figures over time, and of averages.
const SIMULATED: Figure = Figure {
    x: TIME,
    experiment: &Planned::DEFAULT,
    measures: &OVER_TIME,
    minutes: 1,
    notes: &[MODEL],
    ..Figure::DEFAULT
};
const IMPROVED: Figure = Figure { measures: &IMPROVEMENT, ..SIMULATED };
const EXTENDED: Planned = Planned { planners: &["greedy-extended", "local-search"], ..Planned::DEFAULT };

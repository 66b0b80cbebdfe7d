//! The figures of ShuttleDB.
//!
//! Its "VM migration" moves a whole virtual machine. Here that is the move of all tenants of a
//! node.

use super::Figure;
use super::trials::{COSTS, OVER_TIME, Trials, View};
use crate::compare::migrate::laboratory::MACHINE;

/// Ten transactions of ten queries per second, 20 % of them updates (6.2).
fn queries(parameters: &mut super::trials::Parameters) {
    parameters.rate_tps = Some(10.0);
    parameters.read_percent = 80.0;
}

const WHOLE_NODE: &str = "machine: all tenants of the node are moved one after the other; in the paper its \
                          virtual machine";

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "shuttledb/6",
        title: "Move of a large tenant with a node of its own (ShuttleDB, figure 6)",
        x: "tenants on the node",
        experiment: &Trials {
            mechanisms: &["live", MACHINE],
            vary: |parameters, _| {
                queries(parameters);
                parameters.database_bytes = 5e9;
            },
            ..Trials::DEFAULT
        },
        measures: &COSTS,
        minutes: 3,
        notes: &[WHOLE_NODE],
        ..Figure::DEFAULT
    },
    Figure {
        name: "shuttledb/7",
        title: "Move of a small tenant of a shared node (ShuttleDB, figure 7)",
        x: "tenants on the node",
        experiment: &Trials {
            mechanisms: &["live", "delta", MACHINE],
            values: &[20.0],
            vary: |parameters, tenants| {
                queries(parameters);
                parameters.database_bytes = 0.5e9;
                parameters.cache = 1.0;
                parameters.others = tenants as u32 - 1;
            },
            ..Trials::DEFAULT
        },
        measures: &COSTS,
        minutes: 5,
        notes: &[WHOLE_NODE],
        ..Figure::DEFAULT
    },
    Figure {
        name: "shuttledb/8",
        title: "Live move of a tenant with ten transactions/s (ShuttleDB, figure 8)",
        x: "time, s",
        experiment: &Trials {
            mechanisms: &["live"],
            vary: |parameters, _| {
                queries(parameters);
                parameters.database_bytes = 1.5e9;
            },
            view: View::Time,
            ..Trials::DEFAULT
        },
        measures: &OVER_TIME,
        minutes: 1,
        ..Figure::DEFAULT
    },
    Figure {
        name: "shuttledb/9",
        title: "To another site, and back with the pages that changed (ShuttleDB, figure 9)",
        x: "",
        experiment: &Trials {
            mechanisms: &["delta"],
            vary: |parameters, _| {
                // 50 queries/s.
                parameters.rate_tps = Some(5.0);
                parameters.read_percent = 80.0;
                parameters.database_bytes = 512e6;
                parameters.is_wide = true;
            },
            ..Trials::DEFAULT
        },
        measures: &COSTS,
        minutes: 3,
        notes: &[
            "as root; between the sites 80 ms for a round trip and 6 MB/s per connection (toxiproxy), which \
             the paper does not state; a copy is limited to 4.5 MB/s",
            "one tenant instead of ten; it is moved out without load, and back under load",
        ],
        ..Figure::DEFAULT
    },
];

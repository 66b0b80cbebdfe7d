//! The figures of a controller at work ([`super::scenario`]).

use super::Figure;
use super::scenario::{ELASTIC, Group, Scenario, Settled};
use crate::compare::control::elastic::Placement;

/// Settings of the controller for phases of ten seconds.
const POLICY: (&str, &str) = ("policy", "thresholds");
const ROUND: (&str, &str) = ("round", "1 s");
const NODE_START: (&str, &str) = ("node_start", "3 s");
const HOLD_UP: (&str, &str) = ("hold_up", "2 s");
const HOLD_DOWN: (&str, &str) = ("hold_down", "15 s");
const COOL_DOWN: (&str, &str) = ("cool_down", "30 s");

const TIME: &str = "time, s";

pub(super) static FIGURES: &[Figure] = &[
    Figure {
        name: "elastras/31",
        title: "Nodes added and removed, and operating cost (ElasTraS, figure 31)",
        x: TIME,
        experiment: &Scenario {
            owners: 1,
            settled: Some(Settled { nodes: 2, phases: 4 }),
            placement: Placement::First,
            groups: &[Group {
                line: "all tenants",
                tenants: 200,
                load: 0.35,
                trace: "steps:1,1,1,1,1,1,1.2,1.5,1.8,2.1,2.4,2.4,2.4,2.4,2.4,2.4,1.6,1,0.4,0.4,0.4,0.4,0.4,0.4",
            }],
            phases: 20,
            variants: &[(
                "on",
                &[
                    POLICY,
                    ROUND,
                    NODE_START,
                    HOLD_UP,
                    HOLD_DOWN,
                    COOL_DOWN,
                    ("min_nodes", "2"),
                    ("max_nodes", "3"),
                    ("mode", "on"),
                ],
            )],
        },
        measures: &ELASTIC,
        minutes: 5,
        notes: &["2, 3 and 1 nodes in 200 s, instead of 10, 15 and 7 in two hours"],
        ..Figure::DEFAULT
    },
    Figure {
        name: "shuttledb/10",
        title: "A hot spot, with and without a controller (ShuttleDB, figure 10)",
        x: TIME,
        experiment: &Scenario {
            owners: 2,
            settled: None,
            placement: Placement::First,
            groups: &[
                Group { line: "the bursting tenant", tenants: 1, load: 0.05, trace: "world-cup:14" },
                Group { line: "the other tenants", tenants: 9, load: 0.45, trace: "constant" },
            ],
            phases: 18,
            variants: &[
                ("off", &[("mode", "off")]),
                (
                    "on",
                    &[
                        POLICY,
                        ROUND,
                        HOLD_UP,
                        COOL_DOWN,
                        ("hold_down", "1 h"),
                        ("min_nodes", "2"),
                        ("max_nodes", "2"),
                        ("mode", "on"),
                    ],
                ),
            ],
        },
        measures: &ELASTIC,
        minutes: 8,
        notes: &[
            "a match day in 180 s instead of 90 min; the second node is empty at first; nodes of one site \
             only",
        ],
        ..Figure::DEFAULT
    },
];

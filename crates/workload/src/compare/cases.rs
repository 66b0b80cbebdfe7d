//! The cases of `bench compare`: names, descriptions, units and required results.

use super::result::Bound;

/// A group of cases that share servers and data and are therefore measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    Reads,
    Ycsb,
    Log,
    Driver,
    Tpcb,
    Tenants,
    Idle,
    Connections,
    Copy,
    Fair,
    Tpcc,
    Noisy,
    Hundred,
}

/// A set of cases that `bench compare` runs with one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// A single node, from point reads to thousands of tenants.
    Node,
    /// TPC-C.
    Tpcc,
    /// Many tenants on one node.
    Consolidation,
}

impl Group {
    pub(super) const ALL: [Group; 13] = [
        Group::Reads,
        Group::Ycsb,
        Group::Tpcb,
        Group::Tenants,
        Group::Idle,
        Group::Log,
        Group::Driver,
        Group::Connections,
        Group::Copy,
        Group::Fair,
        Group::Tpcc,
        Group::Noisy,
        Group::Hundred,
    ];

    pub(super) fn suite(self) -> Suite {
        match self {
            Group::Tpcc => Suite::Tpcc,
            Group::Noisy | Group::Hundred => Suite::Consolidation,
            _ => Suite::Node,
        }
    }

    /// Returns true if the cases of this group measure one server, instead of the ratio of two.
    pub(super) fn measures_single_server(self) -> bool {
        use Group::{Connections, Driver, Fair, Hundred, Idle, Log, Noisy};
        matches!(self, Connections | Driver | Fair | Hundred | Idle | Log | Noisy)
    }

    /// Returns true if the load comes from the workload driver, which draws it from a seed.
    pub(super) fn is_seeded(self) -> bool {
        use Group::{Driver, Fair, Hundred, Log, Noisy, Tenants, Tpcc, Ycsb};
        matches!(self, Ycsb | Log | Driver | Tenants | Fair | Tpcc | Noisy | Hundred)
    }
}

/// A case: one row of the results table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    /// The group in `bench compare`. `None` for the cases of `bench store`, which are measured one
    /// by one.
    pub(super) group: Option<Group>,
    pub(super) what: &'static str,
    pub(super) unit: &'static str,
    pub(super) must_be: Bound,
}

const fn row(
    name: &'static str,
    group: Group,
    what: &'static str,
    unit: &'static str,
    must_be: Bound,
) -> Case {
    Case { name, group: Some(group), what, unit, must_be }
}

use Bound::{AtLeast, AtMost};

/// All cases of `bench compare`, in the order of the results table.
#[rustfmt::skip]
pub(super) const CASES: &[Case] = &[
    row("read-1", Group::Reads, "point reads, prepared, 1 connection", "reads/s", AtLeast(1.5)),
    row("read-8", Group::Reads, "point reads, prepared, 8 connections", "reads/s", AtLeast(1.1)),
    row("read-32", Group::Reads, "point reads, prepared, 32 connections", "reads/s", AtLeast(1.3)),
    row("cpu-read-8", Group::Reads, "server CPU time per point read, 8 connections", "us", AtMost(0.6)),
    row("ycsb-8", Group::Ycsb, "YCSB transactions, durable, 8 connections", "transactions/s", AtLeast(1.1)),
    row("ycsb-32", Group::Ycsb, "YCSB transactions, durable, 32 connections", "transactions/s", AtLeast(1.6)),
    row("proc-8", Group::Ycsb, "YCSB transactions as one procedure call each, durable, 8 connections", "transactions/s", AtLeast(1.5)),
    row("proc-32", Group::Ycsb, "YCSB transactions as one procedure call each, durable, 32 connections", "transactions/s", AtLeast(2.0)),
    row("tpcb-8", Group::Tpcb, "pgbench TPC-B at scale 1, 8 connections", "transactions/s", AtLeast(1.5)),
    row("tpcb-32", Group::Tpcb, "pgbench TPC-B at scale 1, 32 connections", "transactions/s", AtLeast(2.0)),
    row("tenants-500-cpu", Group::Tenants, "server CPU time per transaction, 500 tenants at a fixed rate", "us", AtMost(1.0 / 3.0)),
    row("tenants-500-memory", Group::Tenants, "server memory (PSS), 500 tenants at a fixed rate", "MiB", AtMost(0.2)),
    row("idle-tenant-kib", Group::Idle, "memory (PSS) per idle tenant, 10,000 tenants", "KiB", AtMost(40.0)),
    row("restart-ms", Group::Idle, "start to first response with 10,000 tenants", "ms", AtMost(2000.0)),
    row("idle-connection-kib", Group::Connections, "memory (PSS) per idle connection, 3,000 connections", "KiB", AtMost(24.0)),
    row("copy-in", Group::Copy, "COPY of 1,000,000 rows of 1 KB", "rows/s", AtLeast(1.0)),
    row("fair-share", Group::Fair, "p99 of a small tenant with another at full load, over its p99 alone", "ratio", AtMost(2.0)),
    row("log-bytes-ratio", Group::Log, "log bytes per YCSB transaction, over full page images", "ratio", AtMost(0.1)),
    row("driver-us", Group::Driver, "driver CPU time per point-read statement, 32 connections", "us", AtMost(15.0)),
    row("tpcc-16", Group::Tpcc, "TPC-C statement by statement, 10 warehouses, 16 terminals", "transactions/s", AtLeast(1.2)),
    row("tpcc-proc-16", Group::Tpcc, "TPC-C as procedures, 10 warehouses, 16 terminals", "transactions/s", AtLeast(2.0)),
    row("noisy-neighbour", Group::Noisy, "mean latency of nine tenants while a tenth overloads the node, over a calm run", "ratio", AtMost(1.15)),
    row("hundred-tenants", Group::Hundred, "throughput with 100 tenants of 50 MB, over throughput with one", "ratio", AtLeast(0.9)),
];

/// Returns the case with this name, which must exist.
pub(super) fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).unwrap_or_else(|| unreachable!("no case is named {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_every_group_has_a_case() {
        let names: BTreeSet<_> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), CASES.len());
        assert!(Group::ALL.iter().all(|group| CASES.iter().any(|case| case.group == Some(*group))));
    }
}

//! The cases: their names, what they measure, what they must come to.

use super::result::Bound;

/// Cases that share servers and data, and so are measured together.
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

/// What `bench compare` measures together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// A node, from point reads to thousands of tenants.
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

    /// Its cases come to values of one server, not to ratios of two.
    pub(super) fn measures_one(self) -> bool {
        use Group::{Connections, Driver, Fair, Hundred, Idle, Log, Noisy};
        matches!(self, Connections | Driver | Fair | Hundred | Idle | Log | Noisy)
    }

    /// Its load is drawn by our own driver, from seeds.
    pub(super) fn has_seeds(self) -> bool {
        use Group::{Driver, Fair, Hundred, Log, Noisy, Tenants, Tpcc, Ycsb};
        matches!(self, Ycsb | Log | Driver | Tenants | Fair | Tpcc | Noisy | Hundred)
    }
}

/// One row of an issue's table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    /// Of `bench compare`; the store's cases are measured one by one.
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

/// All cases, in the order of the issues' tables.
#[rustfmt::skip]
pub(super) const CASES: &[Case] = &[
    row("read-1", Group::Reads, "point reads, prepared, 1 connection", "reads/s", AtLeast(1.5)),
    row("read-8", Group::Reads, "point reads, prepared, 8 connections", "reads/s", AtLeast(1.1)),
    row("read-32", Group::Reads, "point reads, prepared, 32 connections", "reads/s", AtLeast(1.3)),
    row("cpu-read-8", Group::Reads, "server CPU per point read, 8 connections", "us", AtMost(0.6)),
    row("ycsb-8", Group::Ycsb, "YCSB transactions, durable, 8 connections", "transactions/s", AtLeast(1.1)),
    row("ycsb-32", Group::Ycsb, "YCSB transactions, durable, 32 connections", "transactions/s", AtLeast(1.6)),
    row("proc-8", Group::Ycsb, "YCSB transactions as one procedure call, durable, 8 connections", "transactions/s", AtLeast(1.5)),
    row("proc-32", Group::Ycsb, "YCSB transactions as one procedure call, durable, 32 connections", "transactions/s", AtLeast(2.0)),
    row("tpcb-8", Group::Tpcb, "pgbench's TPC-B at scale 1, 8 connections", "transactions/s", AtLeast(1.5)),
    row("tpcb-32", Group::Tpcb, "pgbench's TPC-B at scale 1, 32 connections", "transactions/s", AtLeast(2.0)),
    row("tenants-500-cpu", Group::Tenants, "500 tenants at a fixed rate: server CPU per transaction", "us", AtMost(1.0 / 3.0)),
    row("tenants-500-memory", Group::Tenants, "500 tenants at a fixed rate: server memory (PSS)", "MiB", AtMost(0.2)),
    row("idle-tenant-kib", Group::Idle, "memory (PSS) per idle tenant, 10,000 of them", "KiB", AtMost(40.0)),
    row("restart-ms", Group::Idle, "start to first answer with 10,000 tenants", "ms", AtMost(2000.0)),
    row("idle-connection-kib", Group::Connections, "memory (PSS) per idle connection, 3,000 of them", "KiB", AtMost(24.0)),
    row("copy-in", Group::Copy, "COPY of 1,000,000 rows of 1 KB", "rows/s", AtLeast(1.0)),
    row("fair-share", Group::Fair, "a small tenant's p99 beside one at full load, over its p99 alone", "ratio", AtMost(2.0)),
    row("log-bytes-ratio", Group::Log, "log bytes per YCSB transaction over full page images", "ratio", AtMost(0.1)),
    row("driver-us", Group::Driver, "the driver's own CPU per point-read statement, 32 connections", "us", AtMost(15.0)),
    row("tpcc-16", Group::Tpcc, "TPC-C statement by statement, 10 warehouses, 16 terminals", "transactions/s", AtLeast(1.2)),
    row("tpcc-proc-16", Group::Tpcc, "TPC-C as procedures, 10 warehouses, 16 terminals", "transactions/s", AtLeast(2.0)),
    row("noisy-neighbour", Group::Noisy, "mean latency of nine tenants beside one beyond the capacity, over calm times", "ratio", AtMost(1.15)),
    row("hundred-tenants", Group::Hundred, "throughput with 100 tenants of 50 MB over that with one", "ratio", AtLeast(0.9)),
];

/// The case of this name, which one of ours always has.
pub(super) fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).unwrap_or_else(|| unreachable!("no case is named {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_differ_and_every_group_has_a_case() {
        let names: BTreeSet<_> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names.len(), CASES.len());
        assert!(Group::ALL.iter().all(|group| CASES.iter().any(|case| case.group == Some(*group))));
    }
}

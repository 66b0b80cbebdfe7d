//! A point of a figure: its load, its server, and its measured values.

use std::time::Duration;

use futures::FutureExt;
use futures::future::LocalBoxFuture;
use serde::Serialize;

use crate::arrival::Arrival;
use crate::run::{KindReport, Report, RunOptions, run, run_with_background_load};
use crate::server::Server;
use crate::tenants;
use crate::tpcc::Tpcc;
use crate::tpcw::Tpcw;
use crate::workload::Workload;
use crate::ycsb::Ycsb;

/// The maximum warm-up before each point. If a point is shorter, the warm-up is as long as the
/// point.
const MAX_WARM_UP: Duration = Duration::from_secs(5);

/// The prefix of the names of databases.
const DATABASE_PREFIX: &str = "figure_";

/// A point of a figure.
pub(super) struct Point {
    /// The line of the point.
    pub(super) line: String,
    pub(super) x: f64,
    pub(super) server: ServerName,
    pub(super) memory_bytes: u64,
    pub(super) load: Load,
    pub(super) tenants: u32,
    /// Connections per tenant.
    pub(super) connections: usize,
    /// The rate of all tenants together, without the noisy one. `None` is a closed loop, which
    /// shows the peak throughput.
    pub(super) rate_tps: Option<f64>,
    /// The rate of the first tenant, which is then the noisy one and is not measured. `None`: all
    /// tenants are measured.
    pub(super) noisy_tps: Option<f64>,
}

/// The kind of server that a point is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerName {
    Fulmar,
    Postgres,
}

/// A workload with its options.
#[derive(Clone)]
pub(super) enum Load {
    Ycsb(Ycsb),
    Tpcc(Tpcc),
    Tpcw(Tpcw),
}

/// The key of a server: points with the same server, memory, tenants and rows share a node.
pub(super) type Node = (ServerName, u64, u32, u64);

/// The measured values of a point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Transactions per second.
    pub throughput_tps: f64,
    /// Mean latency from the scheduled start, in milliseconds.
    pub mean_ms: f64,
    /// The 99th percentile of the latency, in milliseconds.
    pub p99_ms: f64,
    /// The lowest and the highest mean latency of a tenant, in milliseconds.
    pub tenant_mean_ms: [f64; 2],
}

impl Point {
    /// A point with a single tenant in a closed loop.
    pub(super) fn alone(line: &str, x: f64, memory_bytes: u64, load: Load, connections: usize) -> Point {
        Point {
            line: line.to_owned(),
            x,
            server: ServerName::Fulmar,
            memory_bytes,
            load,
            tenants: 1,
            connections,
            rate_tps: None,
            noisy_tps: None,
        }
    }

    pub(super) fn node(&self) -> Node {
        (self.server, self.memory_bytes, self.tenants, self.load.rows())
    }

    pub(super) fn databases(&self) -> Vec<String> {
        tenants::names(DATABASE_PREFIX, self.tenants)
    }

    /// Runs the load of the point. Returns a row for each of `kinds`, or one row for all
    /// transactions if `kinds` is empty.
    pub(super) fn measure<'a>(
        &'a self,
        server: &'a Server,
        time: Duration,
        kinds: &'a [&'a str],
    ) -> LocalBoxFuture<'a, anyhow::Result<Vec<(String, Measured)>>> {
        async move {
            let report = match self.load.clone() {
                Load::Ycsb(workload) => self.run(workload, server, time).await?,
                Load::Tpcc(workload) => self.run(workload, server, time).await?,
                Load::Tpcw(workload) => self.run(workload, server, time).await?,
            };
            let report = report.complete()?;
            if kinds.is_empty() {
                return Ok(vec![(self.line.clone(), Measured::of(&report))]);
            }
            let wanted = report.kinds.iter().filter(|kind| kinds.contains(&kind.kind.as_str()));
            let row = |kind: &KindReport| {
                let measured = Measured {
                    throughput_tps: kind.succeeded() as f64 / report.seconds,
                    mean_ms: kind.latency.mean_ms,
                    p99_ms: kind.latency.p99_ms,
                    ..Measured::of(&report)
                };
                (kind.kind.clone(), measured)
            };
            Ok(wanted.map(row).collect())
        }
        .boxed_local()
    }

    async fn run<W: Workload>(&self, workload: W, server: &Server, time: Duration) -> anyhow::Result<Report> {
        let databases = self.databases();
        let options = |databases: &[String], rate_tps: Option<f64>| RunOptions {
            databases: databases.to_vec(),
            connections: self.connections,
            arrival: rate_tps.map_or(Arrival::Closed, Arrival::poisson),
            warm_up: time.min(MAX_WARM_UP),
            measure: time,
            ..RunOptions::new(server.target())
        };
        match self.noisy_tps {
            None => run(workload, options(&databases, self.rate_tps)).await,
            Some(loud_tps) => {
                let (loud, others) = databases.split_at(1);
                let loud = (workload.clone(), options(loud, Some(loud_tps)));
                Ok(run_with_background_load((workload, options(others, self.rate_tps)), loud).await?.0)
            }
        }
    }
}

impl Load {
    fn rows(&self) -> u64 {
        match self {
            Load::Ycsb(workload) => workload.rows(),
            Load::Tpcc(workload) => workload.rows(),
            Load::Tpcw(workload) => workload.rows(),
        }
    }
}

impl Measured {
    fn of(report: &Report) -> Measured {
        Measured {
            throughput_tps: report.throughput_tps,
            mean_ms: report.latency.mean_ms,
            p99_ms: report.latency.p99_ms,
            tenant_mean_ms: report.tenant_mean_ms,
        }
    }
}

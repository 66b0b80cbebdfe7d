//! A figure of points: the load of each point, its server, and its measured values.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use futures::future::LocalBoxFuture;

use super::{Bench, Course, Experiment, FigureRow, Scaling};
use crate::arrival::Arrival;
use crate::run::{KindReport, Report, RunOptions, run, run_with_background_load};
use crate::server::{Fulmar, Postgres, Product, Server};
use crate::tenants;
use crate::tpcc::Tpcc;
use crate::tpcw::Tpcw;
use crate::workload::Workload;
use crate::ycsb::Ycsb;

/// The maximum warm-up before each point. If a point is shorter, the warm-up is as long as the
/// point.
const MAX_WARM_UP: Duration = Duration::from_secs(5);

/// The maximum warm-up of a new server before its first point, in addition to the warm-up of each
/// point. If a point is shorter, the warm-up is as long as the point.
const MAX_SERVER_WARM_UP: Duration = Duration::from_secs(3);

/// The prefix of the names of databases.
const DATABASE_PREFIX: &str = "figure_";

/// Points, each with a load on one server.
pub(super) struct Points {
    /// Returns the points. Points with the same server, memory and data are adjacent.
    pub(super) points: fn(&Scaling) -> Vec<Point>,
    /// Kinds of transactions that have a line each. Empty: one line for all kinds.
    pub(super) kinds: &'static [&'static str],
}

impl Experiment for Points {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move { Ok(Course { rows: self.measure(bench).await?, ..Course::default() }) }.boxed_local()
    }

    #[cfg(test)]
    fn points(&self, scaled: &Scaling) -> Vec<Point> {
        (self.points)(scaled)
    }
}

impl Points {
    async fn measure(&self, bench: &Bench<'_>) -> anyhow::Result<Vec<FigureRow>> {
        let (points, time) = (self.wanted(bench)?, bench.arguments.time());
        let warm_up = time.min(MAX_SERVER_WARM_UP);
        let mut servers = Servers { fulmar_binary: bench.binary.to_owned(), warm_up, running: None };
        let mut rows = Vec::new();
        for (number, point) in points.iter().enumerate() {
            let (number, of) = (number + 1, points.len());
            bench.step(&format!("point {number} of {of}: {} at {}", point.line, point.x));
            let measured = async { point.measure(servers.of(point).await?, time, self.kinds).await };
            let (line, x) = (point.line.clone(), point.x);
            match measured.await {
                Ok(lines) => rows.extend(lines.into_iter().map(|(line, measured)| {
                    let values = Ok(measured.into_iter().take(bench.figure.measures.len()).collect());
                    FigureRow { line, x, values }
                })),
                Err(error) => rows.push(FigureRow { line, x, values: Err(format!("{error:#}")) }),
            }
        }
        Ok(rows)
    }

    /// The points of a figure, or of one of its lines if requested.
    fn wanted(&self, bench: &Bench<'_>) -> anyhow::Result<Vec<Point>> {
        let mut points = (self.points)(&bench.arguments.scaled());
        if let Some(wanted) = &bench.arguments.line {
            let mut lines: Vec<String> = points.iter().map(|point| point.line.clone()).collect();
            lines.sort_unstable();
            lines.dedup();
            points.retain(|point| point.line == *wanted);
            anyhow::ensure!(
                !points.is_empty(),
                "{} has no line \"{wanted}\"; its lines are {}",
                bench.figure.name,
                lines.join(", ")
            );
        }
        Ok(points)
    }
}

/// The running server, shared by successive points with the same data and memory.
struct Servers {
    fulmar_binary: PathBuf,
    warm_up: Duration,
    running: Option<(Node, Server)>,
}

impl Servers {
    async fn of(&mut self, point: &Point) -> anyhow::Result<&Server> {
        let node = point.node();
        if self.running.as_ref().is_none_or(|(running, _)| *running != node) {
            // The previous server is stopped first, because both may not fit into memory.
            self.running = None;
            let product: Box<dyn Product> = match point.server {
                ServerName::Fulmar => Box::new(Fulmar::at(self.fulmar_binary.clone())),
                ServerName::Postgres => Box::new(Postgres::installed()?),
            };
            let connections = point.tenants * point.connections as u32;
            let server = Server::start(product, point.memory_bytes, connections).await?;
            tenants::create(&server.target(), &point.databases(), |_| ()).await?;
            // Loads the data and warms up the server. If it fails, the points fail with the same
            // error.
            let _ = point.measure(&server, self.warm_up, &[]).await;
            self.running = Some((node, server));
        }
        self.running.as_ref().map(|(_, server)| server).context("the server has just been started")
    }
}

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

/// The measured values of a point, in the order of `SERVED_BY_TENANT`: transactions per second,
/// mean latency from the scheduled start, its 99th percentile, and the lowest and the highest mean
/// latency of a tenant.
type Measured = [f64; 5];

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
                return Ok(vec![(self.line.clone(), measured(&report))]);
            }
            let wanted = report.kinds.iter().filter(|kind| kinds.contains(&kind.kind.as_str()));
            let row = |kind: &KindReport| {
                let [_, _, _, least, most] = measured(&report);
                let throughput_tps = kind.succeeded() as f64 / report.seconds;
                (kind.kind.clone(), [throughput_tps, kind.latency.mean_ms, kind.latency.p99_ms, least, most])
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

fn measured(report: &Report) -> Measured {
    let [least, most] = report.tenant_mean_ms;
    [report.throughput_tps, report.latency.mean_ms, report.latency.p99_ms, least, most]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper_figures::figures;

    #[test]
    fn points_of_a_server_are_adjacent() {
        for figure in figures() {
            let points = figure.experiment.points(&Scaling { scale: 1.0, memory_bytes: None });
            let mut nodes: Vec<_> = points.iter().map(|point| format!("{:?}", point.node())).collect();
            nodes.dedup();
            let number = nodes.len();
            nodes.sort_unstable();
            nodes.dedup();
            assert_eq!(nodes.len(), number, "{}", figure.name);
        }
    }
}

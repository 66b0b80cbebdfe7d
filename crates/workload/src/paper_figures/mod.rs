//! `bench figure`: repeats the experiment behind a figure of a paper, with the paper's parameters,
//! against a server that it starts.
//!
//! ```text
//!  elastras/12 --scale--> points (line, x, server, memory, load)    elastras, estore, cloudtps
//!                             |  one server per size of data and memory
//!                             v
//!                          rows --> CSV, HTML page: charts and tables with the paper's numbers
//! ```
//!
//! `--scale` shrinks the data and the memory but not the load, so that today's machine is
//! compared with the paper's under the same load. `papers.csv` has the numbers that the text of a
//! paper states. Values that a paper only plots are not available.

mod cloudtps;
mod elastras;
mod estore;
mod page;
mod papers;
mod point;
mod timeline;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde::Serialize;

pub use self::point::Measured;
use self::point::{Node, Point, ServerName};
use self::timeline::{Course, Timeline};
use crate::server::{Fulmar, Postgres, Product, Server, run_in_private};
use crate::tenants;

/// The minimum memory of a node.
const MIN_MEMORY_BYTES: u64 = 64 << 20;

/// The maximum warm-up of a new server before its first point, in addition to the warm-up of each
/// point. If a point is shorter, the warm-up is as long as the point.
const MAX_WARM_UP: Duration = Duration::from_secs(3);

/// The default seconds per point, and the scale below which they decrease.
const DEFAULT_SECONDS: f64 = 10.0;
const FULL_TIME_SCALE: f64 = 0.1;

/// Arguments of `fulmar bench figure`.
#[derive(Args, Clone, Debug)]
pub struct FigureArgs {
    /// The figure: elastras/4 (load), elastras/5 (transaction size), elastras/6 (reads), elastras/7
    /// (database size), elastras/8 (cache), elastras/7.3.2 (peaks), elastras/9 (TPC-C), elastras/10
    /// and elastras/11 (tenants), elastras/12 (a noisy tenant), estore/3 (skew), cloudtps/7 and
    /// cloudtps/8 (death of a node, partition; as root), cloudtps/13 (memory)
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Size of the data and memory, as a fraction of the paper's
    #[arg(long, default_value_t = 0.1, value_name = "PART")]
    pub scale: f64,
    /// Only this line of the figure, such as uniform, hotspot:90:20, fulmar or postgres
    #[arg(long, value_name = "NAME")]
    pub line: Option<String>,
    /// Memory of the server in MiB, instead of the paper's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: Option<u64>,
    /// Seconds per point [default: 10; less for a scale below 0.1, at least 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: Option<u64>,
    /// Write an HTML page with charts to this file
    #[arg(long, short, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

impl FigureArgs {
    fn time(&self) -> Duration {
        let seconds = (DEFAULT_SECONDS * self.scale / FULL_TIME_SCALE).clamp(1.0, DEFAULT_SECONDS);
        self.seconds.map_or(Duration::from_secs_f64(seconds), Duration::from_secs)
    }

    fn scaled(&self) -> Scaling {
        Scaling { scale: self.scale, memory_bytes: self.memory_mib.map(|mib| mib << 20) }
    }
}

/// The size of data and memory in relation to the paper's.
struct Scaling {
    scale: f64,
    /// The server's memory, if it is not derived from the paper's.
    memory_bytes: Option<u64>,
}

impl Scaling {
    fn bytes(&self, papers: f64) -> u64 {
        (papers * self.scale) as u64
    }

    fn memory_bytes(&self, papers: f64) -> u64 {
        self.memory_bytes.unwrap_or(self.bytes(papers).max(MIN_MEMORY_BYTES))
    }
}

/// A figure of a paper.
struct Figure {
    name: &'static str,
    title: &'static str,
    /// The label of the x axis.
    x: &'static str,
    /// Returns the points. Points with the same server, memory and data are adjacent.
    points: fn(&Scaling) -> Vec<Point>,
    /// Kinds of transactions that have a line each. Empty: one line for all kinds.
    kinds: &'static [&'static str],
    /// Also shows the lowest and the highest mean latency of a tenant.
    by_tenant: bool,
    /// Also shows the values relative to those at the first x.
    over_first: bool,
    /// The label of the paper's x axis, if it differs from `x`.
    paper_x_label: Option<&'static str>,
    /// Measures the throughput of a cluster over time, instead of points.
    timeline: Option<Timeline>,
}

impl Figure {
    /// The defaults of a figure.
    const DEFAULT: Figure = Figure {
        name: "",
        title: "",
        x: "",
        points: |_| Vec::new(),
        kinds: &[],
        by_tenant: false,
        over_first: false,
        paper_x_label: None,
        timeline: None,
    };
}

fn figures() -> impl Iterator<Item = &'static Figure> {
    static ELASTRAS: [Figure; 10] = elastras::FIGURES;
    static ESTORE: [Figure; 1] = estore::FIGURES;
    static CLOUDTPS: [Figure; 3] = cloudtps::FIGURES;
    ELASTRAS.iter().chain(&ESTORE).chain(&CLOUDTPS)
}

/// The result of a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureRow {
    /// The line of the point.
    pub line: String,
    /// The position on the x axis.
    pub x: f64,
    /// The measured values, or why the point could not be measured.
    pub measured: Result<Measured, String>,
}

/// Runs the experiment of a figure and returns the rows as CSV. Reports progress through `step`.
pub async fn figure(
    arguments: &FigureArgs,
    fulmar_binary: PathBuf,
    step: impl Fn(&str),
) -> anyhow::Result<String> {
    anyhow::ensure!(
        arguments.scale > 0.0 && arguments.scale <= 10.0,
        "--scale must be greater than 0 and at most 10"
    );
    let figure = figures().find(|figure| figure.name == arguments.name).with_context(|| {
        let names = figures().map(|figure| figure.name).collect::<Vec<_>>().join(", ");
        format!("unknown figure \"{}\"; the figures are {names}", arguments.name)
    })?;
    let Course { rows, notes } = match &figure.timeline {
        Some(timeline) => {
            let own: Vec<String> = std::env::args().skip(1).collect();
            if let Some(status) = run_in_private(&own)? {
                std::process::exit(status.code().unwrap_or(1));
            }
            let step = |text: &str| step(&format!("{}: {text}", figure.name));
            timeline::measure(timeline, &arguments.scaled(), &fulmar_binary, step).await?
        }
        None => {
            Course { rows: measure_points(figure, arguments, fulmar_binary, step).await?, notes: Vec::new() }
        }
    };
    if let Some(path) = &arguments.output {
        let page = page::html(figure, arguments, &rows, &notes);
        std::fs::write(path, page).with_context(|| format!("could not write {}", path.display()))?;
    }
    let notes: String = notes.iter().map(|note| format!("# {note}\n")).collect();
    Ok(csv(figure, &rows) + &notes)
}

async fn measure_points(
    figure: &Figure,
    arguments: &FigureArgs,
    fulmar_binary: PathBuf,
    step: impl Fn(&str),
) -> anyhow::Result<Vec<FigureRow>> {
    let points = points(figure, arguments)?;
    let warm_up = arguments.time().min(MAX_WARM_UP);
    let mut servers = Servers { fulmar_binary, warm_up, running: None };
    let mut rows = Vec::new();
    for (number, point) in points.iter().enumerate() {
        let (number, of) = (number + 1, points.len());
        step(&format!("{}: point {number} of {of}: {} at {}", figure.name, point.line, point.x));
        let measured =
            async { point.measure(servers.of(point).await?, arguments.time(), figure.kinds).await };
        let (line, x) = (point.line.clone(), point.x);
        match measured.await {
            Ok(lines) => rows.extend(lines.into_iter().map(|(line, measured)| FigureRow {
                line,
                x,
                measured: Ok(measured),
            })),
            Err(error) => rows.push(FigureRow { line, x, measured: Err(format!("{error:#}")) }),
        }
    }
    Ok(rows)
}

/// The points of a figure, or of one of its lines if requested.
fn points(figure: &Figure, arguments: &FigureArgs) -> anyhow::Result<Vec<Point>> {
    let mut points = (figure.points)(&arguments.scaled());
    if let Some(wanted) = &arguments.line {
        let mut lines: Vec<String> = points.iter().map(|point| point.line.clone()).collect();
        lines.sort_unstable();
        lines.dedup();
        points.retain(|point| point.line == *wanted);
        anyhow::ensure!(
            !points.is_empty(),
            "{} has no line \"{wanted}\"; its lines are {}",
            figure.name,
            lines.join(", ")
        );
    }
    Ok(points)
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

fn csv(figure: &Figure, rows: &[FigureRow]) -> String {
    let mut text =
        "figure,line,x,throughput_tps,mean_ms,p99_ms,least_tenant_mean_ms,most_tenant_mean_ms,failed\n"
            .to_owned();
    for FigureRow { line, x, measured } in rows {
        let cells = match measured {
            Ok(measured) => {
                let Measured { throughput_tps, mean_ms, p99_ms, tenant_mean_ms: [least, most] } = measured;
                format!("{throughput_tps:.2},{mean_ms:.3},{p99_ms:.3},{least:.3},{most:.3},")
            }
            Err(reason) => format!(",,,,,\"{}\"", reason.replace('"', "'").replace('\n', " ")),
        };
        let line = if line.contains(',') { format!("\"{line}\"") } else { line.clone() };
        text.push_str(&format!("{},{line},{x},{cells}\n", figure.name));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_points_of_a_server_are_adjacent() {
        let names: BTreeSet<_> = figures().map(|figure| figure.name).collect();
        assert_eq!(names.len(), figures().count());
        for figure in figures() {
            let mut nodes: Vec<_> = (figure.points)(&Scaling { scale: 1.0, memory_bytes: None })
                .iter()
                .map(|point| format!("{:?}", point.node()))
                .collect();
            nodes.dedup();
            let number = nodes.len();
            nodes.sort_unstable();
            nodes.dedup();
            assert_eq!(nodes.len(), number, "{}", figure.name);
        }
    }

    #[test]
    fn failed_points_have_a_reason() {
        let row = |line: &str, measured| FigureRow { line: line.to_owned(), x: 20.0, measured };
        let measured =
            Measured { throughput_tps: 19.9, mean_ms: 1.5, p99_ms: 4.0, tenant_mean_ms: [1.25, 2.0] };
        let figure = Figure { name: "f/1", ..Figure::DEFAULT };
        let text = csv(&figure, &[row("a, b", Ok(measured)), row("c", Err("no \"room\"\nleft".to_owned()))]);
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            ["f/1,\"a, b\",20,19.90,1.500,4.000,1.250,2.000,", "f/1,c,20,,,,,,\"no 'room' left\""]
        );
    }

    #[test]
    fn small_scales_take_less_time() {
        let time = |scale, seconds| {
            let arguments = FigureArgs {
                name: String::new(),
                scale,
                line: None,
                memory_mib: None,
                seconds,
                output: None,
            };
            arguments.time().as_secs_f64()
        };
        assert_eq!([time(1.0, None), time(0.1, None), time(0.05, None)], [10.0, 10.0, 5.0]);
        assert_eq!([time(0.001, None), time(0.001, Some(7))], [1.0, 7.0]);
    }
}

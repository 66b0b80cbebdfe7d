//! `bench figure`: the experiment of a paper's figure, with its parameters, against a Fulmar node of its own.
//!
//! ```text
//!  elastras/4 --parameters--> points (a line's name, x, workload, rate, memory)    experiments
//!                                |  a node for each size of data and memory
//!                                v
//!                             rows --> table, CSV, charts beside the paper's numbers (papers.csv)
//! ```
//! `--scale` shrinks the data and the memory, and leaves the load as it is: a machine of today is compared with the
//! paper's by what it does with the paper's load. Of what stood in a paper's plot alone there are no numbers: `papers.csv` has
//! those of its text.

mod experiments;
mod page;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use self::experiments::{FIGURES, Figure, Point};
use crate::arrival::Arrival;
use crate::keys::Distribution;
use crate::run::{RunOptions, run};
use crate::server::{Fulmar, Server};
use crate::tenants;

/// Connections of every point: enough for the paper's rates at some ten milliseconds a transaction.
const CONNECTIONS: usize = 32;

/// Before each point; a short point has no longer one.
const LONGEST_WARM_UP: Duration = Duration::from_secs(5);

const DATABASE: &str = "figure";

/// The paper's numbers.
const PAPERS: &str = include_str!("papers.csv");

/// `fulmar bench figure`: its arguments.
#[derive(Args, Clone, Debug)]
pub struct FigureArgs {
    /// Which: elastras/4 (load), elastras/5 (transaction size), elastras/6 (reads), elastras/7 (database size), elastras/8 (cache)
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The part of the paper's data and memory that is used
    #[arg(long, default_value_t = 0.1, value_name = "PART")]
    pub scale: f64,
    /// Only this line of the figure: uniform, zipfian:1, hotspot:80:20 or hotspot:90:20
    #[arg(long, value_name = "NAME")]
    pub line: Option<Distribution>,
    /// MiB of memory of the node, instead of the paper's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: Option<u64>,
    /// Seconds of each point
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Where the page with the charts goes
    #[arg(long, short, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

/// What a point came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FigureRow {
    /// The line that the point is of.
    pub line: String,
    /// Its place on the x axis.
    pub x: f64,
    /// Or why it could not be measured.
    pub measured: Result<Measured, String>,
}

/// What was measured at a point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Transactions per second.
    pub throughput_tps: f64,
    /// Mean latency from the scheduled start.
    pub mean_ms: f64,
    /// Its 99th percentile.
    pub p99_ms: f64,
}

/// Runs the experiment of a figure; calls `step` with what goes on. Answers the rows as CSV.
pub async fn figure(
    arguments: &FigureArgs,
    fulmar_binary: PathBuf,
    step: impl Fn(&str),
) -> anyhow::Result<String> {
    anyhow::ensure!(arguments.scale > 0.0 && arguments.scale <= 10.0, "a scale is above 0 and at most 10");
    let figure = FIGURES.iter().find(|figure| figure.name == arguments.name).with_context(|| {
        let names = FIGURES.iter().map(|figure| figure.name).collect::<Vec<_>>().join(", ");
        format!("there is no figure {}; there are: {names}", arguments.name)
    })?;
    let mut points = figure.points(arguments.scale, arguments.memory_mib.map(|mib| mib << 20));
    points.retain(|point| arguments.line.is_none_or(|line| line == point.workload.distribution));
    anyhow::ensure!(!points.is_empty(), "{} has no such line", figure.name);
    let mut node = Node { binary: fulmar_binary, running: None };
    let mut rows = Vec::new();
    for (number, point) in points.iter().enumerate() {
        step(&format!(
            "{}: point {} of {}: {} at {}",
            figure.name,
            number + 1,
            points.len(),
            point.line,
            point.x
        ));
        let measured = measure(&mut node, point, Duration::from_secs(arguments.seconds)).await;
        rows.push(FigureRow {
            line: point.line.clone(),
            x: point.x,
            measured: measured.map_err(|error| format!("{error:#}")),
        });
    }
    if let Some(path) = &arguments.output {
        let page = page::html(figure, arguments, &rows, PAPERS);
        std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(csv(figure, &rows))
}

/// The node that the points share which need the same data and memory.
struct Node {
    binary: PathBuf,
    running: Option<((u32, u64), Server)>,
}

impl Node {
    async fn of(&mut self, point: &Point) -> anyhow::Result<&Server> {
        let size = (point.workload.records, point.memory_bytes);
        if self.running.as_ref().is_none_or(|(running, _)| *running != size) {
            // The one before goes first: both may not fit.
            self.running = None;
            let product = Box::new(Fulmar::at(self.binary.clone()));
            let server = Server::start(product, point.memory_bytes, CONNECTIONS as u32).await?;
            tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
            self.running = Some((size, server));
        }
        self.running.as_ref().map(|(_, server)| server).context("the node has just been started")
    }
}

async fn measure(node: &mut Node, point: &Point, time: Duration) -> anyhow::Result<Measured> {
    let server = node.of(point).await?;
    let options = RunOptions {
        connections: CONNECTIONS,
        arrival: Arrival::poisson(point.rate_tps),
        warm_up: time.min(LONGEST_WARM_UP),
        measure: time,
        ..RunOptions::new(server.target().with_database(DATABASE))
    };
    let report = run(point.workload.clone(), options).await?;
    let error = report.first_error.as_deref().unwrap_or_default();
    anyhow::ensure!(report.failed == 0, "{} transactions were given up: {error}", report.failed);
    let (mean_ms, p99_ms) = (report.latency.mean_ms, report.latency.p99_ms);
    Ok(Measured { throughput_tps: report.throughput_tps, mean_ms, p99_ms })
}

fn csv(figure: &Figure, rows: &[FigureRow]) -> String {
    let mut text = "figure,line,x,throughput_tps,mean_ms,p99_ms,failed\n".to_owned();
    for FigureRow { line, x, measured } in rows {
        let cells = match measured {
            Ok(measured) => {
                let Measured { throughput_tps, mean_ms, p99_ms } = measured;
                format!("{throughput_tps:.2},{mean_ms:.3},{p99_ms:.3},")
            }
            Err(reason) => format!(",,,\"{}\"", reason.replace('"', "'").replace('\n', " ")),
        };
        text.push_str(&format!("{},{line},{x},{cells}\n", figure.name));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_numbers_are_of_figures_that_there_are() {
        for line in PAPERS.lines().skip(1) {
            let name = line.split(',').next().unwrap();
            assert!(FIGURES.iter().any(|figure| figure.name == name), "{line}");
            let value = line.split(',').nth(3).unwrap();
            assert!(value.parse::<f64>().unwrap() > 0.0, "{line}");
        }
    }

    #[test]
    fn a_point_that_failed_says_why() {
        let row = |measured| FigureRow { line: "uniform".to_owned(), x: 20.0, measured };
        let measured = Measured { throughput_tps: 19.9, mean_ms: 1.5, p99_ms: 4.0 };
        let text = csv(&FIGURES[0], &[row(Ok(measured)), row(Err("no \"room\"\nleft".to_owned()))]);
        assert_eq!(
            text.lines().skip(1).collect::<Vec<_>>(),
            ["elastras/4,uniform,20,19.90,1.500,4.000,", "elastras/4,uniform,20,,,,\"no 'room' left\""]
        );
    }
}

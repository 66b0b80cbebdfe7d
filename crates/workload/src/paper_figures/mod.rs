//! `bench figure`: repeats the experiment behind a figure of a paper, with the paper's parameters,
//! against servers that it starts.
//!
//! ```text
//!  name --> Figure: title, axes, measures, notes     elastras, estore, shuttledb, thesis, cloudtps
//!              |
//!              v
//!          Experiment --> rows (line, x, values) --> CSV, HTML page with the paper's numbers
//!            Points      a load on one server for each point                 point
//!            Timeline    death of a node and partition                       timeline
//!            Planned     planners and a model, no server                     planned
//!            Trials      moves of a loaded tenant, one per point             trials
//!            ScaleOut    twice the load, one node to two and back            scale_out
//!            Scenario    a controller, nodes with a share of a core          scenario
//!            and others: Overload (overload), Skew, Counting (skew)
//! ```
//!
//! `--scale` shrinks the data and the memory but not the load, so that today's machine is
//! compared with the paper's under the same load. `papers.csv` has the numbers that the text of a
//! paper states. Values that a paper only plots are not available.

mod albatross;
mod cloudtps;
mod controlled;
mod elastras;
mod estore;
mod overload;
mod page;
mod papers;
mod planned;
mod point;
mod scale_out;
mod scenario;
mod shuttledb;
mod skew;
mod thesis;
mod timeline;
mod trials;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use futures::future::LocalBoxFuture;

use self::point::Points;
use crate::server::run_in_private;

/// The minimum memory of a node.
const MIN_MEMORY_BYTES: u64 = 64 << 20;

/// The default seconds per point, and the scale below which they decrease.
const DEFAULT_SECONDS: f64 = 10.0;
const FULL_TIME_SCALE: f64 = 0.1;

/// Arguments of `fulmar bench figure`.
#[derive(Args, Clone, Debug)]
#[command(after_help = figures_help())]
pub struct FigureArgs {
    /// The figure: PAPER/NUMBER, as in the list below
    #[arg(value_name = "NAME", required_unless_present = "list")]
    pub name: Option<String>,
    /// List the figures, with about how long each takes
    #[arg(long)]
    pub list: bool,
    /// Size of the data and memory, as a fraction of the paper's
    #[arg(long, default_value_t = 0.1, value_name = "PART")]
    pub scale: f64,
    /// Only this line of the figure, such as uniform, hotspot:90:20, albatross or postgres
    #[arg(long, value_name = "NAME")]
    pub line: Option<String>,
    /// Memory of the server in MiB, instead of the paper's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: Option<u64>,
    /// Seconds per point, or per phase of a figure over time; of planners their time limit
    /// [default: 10; less for a scale below 0.1, at least 1]
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

    /// Returns true if a line was asked for, or all lines.
    fn wants(&self, line: &str) -> bool {
        self.line.as_deref().is_none_or(|wanted| wanted == line)
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
    experiment: &'static dyn Experiment,
    /// What is measured of each row.
    measures: &'static [Measure],
    /// About how many minutes it takes with the default arguments.
    minutes: u32,
    /// Also shows the throughput and the mean latency relative to those at the first x.
    over_first: bool,
    /// The label of the paper's x axis, if it differs from `x`.
    paper_x_label: Option<&'static str>,
    /// What differs from the paper, and what is missing.
    notes: &'static [&'static str],
}

impl Figure {
    /// The defaults of a figure.
    const DEFAULT: Figure = Figure {
        name: "",
        title: "",
        x: "",
        experiment: &Points { points: |_| Vec::new(), kinds: &[] },
        measures: &SERVED,
        minutes: 2,
        over_first: false,
        paper_x_label: None,
        notes: &[],
    };
}

/// A measured quantity: its name in the CSV and in the paper's numbers, and its title and unit in
/// the charts.
struct Measure {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
}

const fn measure(name: &'static str, title: &'static str, unit: &'static str) -> Measure {
    Measure { name, title, unit }
}

const THROUGHPUT: Measure = measure("throughput_tps", "Throughput", "transactions/s");
const MEAN: Measure = measure("mean_ms", "Mean latency from the scheduled start", "ms");
const P99: Measure = measure("p99_ms", "99th percentile", "ms");
/// What clients get.
const SERVED: [Measure; 3] = [THROUGHPUT, MEAN, P99];
/// The same, and how it differs between tenants.
const SERVED_BY_TENANT: [Measure; 5] = [
    THROUGHPUT,
    MEAN,
    P99,
    measure("least_tenant_mean_ms", "Lowest mean latency of a tenant", "ms"),
    measure("most_tenant_mean_ms", "Highest mean latency of a tenant", "ms"),
];

/// How the rows of a figure are obtained.
trait Experiment: Sync {
    /// Runs it.
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>>;

    /// The points, if it consists of points.
    #[cfg(test)]
    fn points(&self, _: &Scaling) -> Vec<point::Point> {
        Vec::new()
    }

    /// Returns true if it needs no server, and has all data of the paper.
    fn is_computed(&self) -> bool {
        false
    }

    /// Returns true if it runs in network namespaces of its own.
    fn is_isolated(&self) -> bool {
        false
    }
}

/// What an experiment runs with.
struct Bench<'a> {
    figure: &'a Figure,
    arguments: &'a FigureArgs,
    binary: &'a Path,
    step: &'a dyn Fn(&str),
}

impl Bench<'_> {
    /// Reports progress.
    fn step(&self, text: &str) {
        (self.step)(&format!("{}: {text}", self.figure.name));
    }
}

/// The rows of a figure, and what else was observed.
#[derive(Debug, Default)]
struct Course {
    rows: Vec<FigureRow>,
    notes: Vec<String>,
    /// Periods to mark in charts over time: the line, begin and end.
    spans: Vec<(String, f64, f64)>,
}

/// The result of a point.
#[derive(Clone, Debug, PartialEq)]
struct FigureRow {
    /// The line of the point.
    line: String,
    /// The position on the x axis.
    x: f64,
    /// A value for each of the figure's measures (NaN if it does not apply), or why the point could
    /// not be measured.
    values: Result<Vec<f64>, String>,
}

fn figures() -> impl Iterator<Item = &'static Figure> {
    [
        elastras::FIGURES,
        albatross::FIGURES,
        shuttledb::FIGURES,
        controlled::FIGURES,
        thesis::FIGURES,
        estore::FIGURES,
        cloudtps::FIGURES,
    ]
    .into_iter()
    .flatten()
}

/// The figures with their titles and durations, one per line.
fn figures_help() -> String {
    let mut text = "Figures (about how many minutes each takes):\n".to_owned();
    for figure in figures() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {:<16} {:>3}  {}", figure.name, figure.minutes, figure.title);
    }
    text
}

/// Runs the experiment of a figure and returns the rows as CSV, or lists the figures. Reports
/// progress through `step`.
pub async fn figure(
    arguments: &FigureArgs,
    fulmar_binary: PathBuf,
    step: impl Fn(&str),
) -> anyhow::Result<String> {
    if arguments.list {
        return Ok(figures_help());
    }
    anyhow::ensure!(
        arguments.scale > 0.0 && arguments.scale <= 10.0,
        "--scale must be greater than 0 and at most 10"
    );
    let name = arguments.name.as_deref().unwrap_or_default();
    let figure = figures().find(|figure| figure.name == name).with_context(|| {
        let names = figures().map(|figure| figure.name).collect::<Vec<_>>().join(", ");
        format!("unknown figure \"{name}\"; the figures are {names}")
    })?;
    if figure.experiment.is_isolated() {
        let own: Vec<String> = std::env::args().skip(1).collect();
        if let Some(status) = run_in_private(&own)? {
            std::process::exit(status.code().unwrap_or(1));
        }
    }
    let bench = Bench { figure, arguments, binary: &fulmar_binary, step: &step };
    let mut course = figure.experiment.run(&bench).await?;
    course.notes.splice(0..0, figure.notes.iter().map(|note| (*note).to_owned()));
    if let Some(path) = &arguments.output {
        let page = page::html(figure, arguments, &course);
        std::fs::write(path, page).with_context(|| format!("could not write {}", path.display()))?;
    }
    let notes: String = course.notes.iter().map(|note| format!("# {note}\n")).collect();
    Ok(csv(figure, &course.rows) + &notes)
}

fn csv(figure: &Figure, rows: &[FigureRow]) -> String {
    let names: Vec<&str> = figure.measures.iter().map(|measure| measure.name).collect();
    let mut text = format!("figure,line,x,{},failed\n", names.join(","));
    for FigureRow { line, x, values } in rows {
        let cells = match values {
            Ok(values) => values.iter().map(|value| cell(*value) + ",").collect(),
            Err(reason) => {
                let reason = reason.replace('"', "'").replace('\n', " ");
                format!("{}\"{reason}\"", ",".repeat(names.len()))
            }
        };
        let line = if line.contains(',') { format!("\"{line}\"") } else { line.clone() };
        text.push_str(&format!("{},{line},{x},{cells}\n", figure.name));
    }
    text
}

/// A number with three digits after the point, or nothing if it does not apply.
fn cell(value: f64) -> String {
    if value.is_finite() { format!("{value:.3}") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeSet;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        figure: FigureArgs,
    }

    pub(super) fn arguments(words: &[&str]) -> FigureArgs {
        Line::try_parse_from(["figure"].iter().chain(words)).map(|line| line.figure).unwrap()
    }

    #[test]
    fn figures_have_unique_names_and_at_most_ten_minutes() {
        let names: BTreeSet<_> = figures().map(|figure| figure.name).collect();
        assert_eq!(names.len(), figures().count());
        for figure in figures() {
            assert!((1..=10).contains(&figure.minutes), "{} is too long", figure.name);
            assert!(figures_help().contains(figure.title), "{}", figure.name);
        }
        assert!(arguments(&["--list"]).name.is_none());
        assert!(Line::try_parse_from(["figure"]).is_err(), "a name is required");
    }

    #[test]
    fn failed_points_have_a_reason() {
        let row = |line: &str, values| FigureRow { line: line.to_owned(), x: 20.0, values };
        let figure = Figure { name: "f/1", ..Figure::DEFAULT };
        let rows =
            [row("a, b", Ok(vec![19.9, 1.5, f64::NAN])), row("c", Err("no \"room\"\nleft".to_owned()))];
        assert_eq!(
            csv(&figure, &rows).lines().collect::<Vec<_>>(),
            [
                "figure,line,x,throughput_tps,mean_ms,p99_ms,failed",
                "f/1,\"a, b\",20,19.900,1.500,,",
                "f/1,c,20,,,,\"no 'room' left\""
            ]
        );
    }

    #[test]
    fn small_scales_take_less_time() {
        let time = |words: &[&str]| arguments(&[&["f/1", "--scale"], words].concat()).time().as_secs_f64();
        assert_eq!([time(&["1"]), time(&["0.1"]), time(&["0.05"])], [10.0, 10.0, 5.0]);
        assert_eq!([time(&["0.001"]), time(&["0.001", "--seconds", "7"])], [1.0, 7.0]);
    }
}

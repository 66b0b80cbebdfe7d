//! `bench report`: renders the JSON lines of a run as one self-contained HTML file.
//!
//! ```text
//!  run.jsonl --read--> records --> facts, tables        (page)
//!                          +-----> charts over time --> (series, chart: SVG)
//! ```
//!
//! The file has no scripts, fonts or links, so that it can be mailed, archived with a change, and
//! opened in ten years.

pub(crate) mod chart;
pub(crate) mod page;
mod series;

use std::io::BufRead;

use anyhow::Context;

use crate::run::{IntervalRecord, Record, Report, RunRecord, TenantRecord};

/// The maximum length of a line. An interval of many kinds with all its samples has some hundred
/// kilobytes.
const MAX_LINE_BYTES: usize = 64 << 20;

/// The records of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunFile {
    /// The first line.
    pub run: RunRecord,
    /// The intervals in order, including the warm-up.
    pub intervals: Vec<IntervalRecord>,
    /// The tenants in the order of their databases.
    pub tenants: Vec<TenantRecord>,
    /// The last line. An interrupted run has none.
    pub report: Option<Report>,
}

impl RunFile {
    /// Reads the JSON lines of a run.
    pub fn read(lines: impl BufRead) -> anyhow::Result<RunFile> {
        let (mut run, mut intervals, mut tenants, mut report) = (None, Vec::new(), Vec::new(), None);
        for (number, line) in lines.lines().enumerate() {
            let line = line.with_context(|| format!("could not read line {}", number + 1))?;
            anyhow::ensure!(line.len() <= MAX_LINE_BYTES, "line {} is too long", number + 1);
            let record = serde_json::from_str(&line)
                .with_context(|| format!("line {} is not a record of a run", number + 1))?;
            match record {
                Record::Run(_) if run.is_some() => {
                    anyhow::bail!("line {} starts a second run", number + 1)
                }
                Record::Run(first) => run = Some(first),
                Record::Interval(interval) => intervals.push(interval),
                Record::Tenant(tenant) => tenants.push(tenant),
                Record::Report(last) => report = Some(*last),
            }
        }
        let run =
            run.context("the file has no \"run\" line; write it with `fulmar bench run ... --output FILE`")?;
        Ok(RunFile { run, intervals, tenants, report })
    }

    /// Renders the HTML page.
    pub fn html(&self) -> String {
        page::html(self)
    }
}

/// Draws a line chart as an SVG file. `x` and `y` label the axes, which include zero.
pub fn line_chart(
    title: &'static str,
    (x, y): (&'static str, &'static str),
    series: Vec<(String, Vec<(f64, f64)>)>,
) -> String {
    let series = series.into_iter().map(|(name, points)| chart::Series::new(name, points)).collect();
    let (x, y) = ((x, chart::Scale::Linear), (y, chart::Scale::Linear));
    let chart = chart::Chart { title, x, y, series, measured_from: None };
    chart.file(&format!("{}{}", page::COLOURS, page::CHART_STYLE))
}

#[cfg(test)]
mod tests;

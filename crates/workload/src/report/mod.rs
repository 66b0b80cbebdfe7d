//! `bench report`: the JSON lines of a run as one HTML file, which needs nothing but itself.
//!
//! ```text
//!  run.jsonl --read--> records --> facts, tables        (page)
//!                          +-----> charts over time --> (series, chart: SVG)
//! ```
//! No script, no font, no link to anywhere: the file can be mailed, kept beside a change, and opened in ten years.

pub(crate) mod chart;
pub(crate) mod page;
mod series;

use std::io::BufRead;

use anyhow::Context;

use crate::run::{IntervalRecord, Record, Report, RunRecord, TenantRecord};

/// The longest line that is read: an interval of many kinds with all its samples is some hundred kilobytes.
const MAX_LINE_BYTES: usize = 64 << 20;

/// All lines of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunFile {
    /// The first.
    pub run: RunRecord,
    /// In their order, warm-up included.
    pub intervals: Vec<IntervalRecord>,
    /// In the order of their databases.
    pub tenants: Vec<TenantRecord>,
    /// The last; a run that was interrupted has none.
    pub report: Option<Report>,
}

impl RunFile {
    /// Reads the lines of one run.
    pub fn read(lines: impl BufRead) -> anyhow::Result<RunFile> {
        let (mut run, mut intervals, mut tenants, mut report) = (None, Vec::new(), Vec::new(), None);
        for (number, line) in lines.lines().enumerate() {
            let line = line.with_context(|| format!("cannot read line {}", number + 1))?;
            anyhow::ensure!(line.len() <= MAX_LINE_BYTES, "line {} is too long", number + 1);
            let record = serde_json::from_str(&line)
                .with_context(|| format!("line {} is not of a run's JSON lines", number + 1))?;
            match record {
                Record::Run(_) if run.is_some() => anyhow::bail!("line {} begins a second run", number + 1),
                Record::Run(first) => run = Some(first),
                Record::Interval(interval) => intervals.push(interval),
                Record::Tenant(tenant) => tenants.push(tenant),
                Record::Report(last) => report = Some(*last),
            }
        }
        let run =
            run.context("there is no line \"run\"; write the file with `fulmar bench run ... --output`")?;
        Ok(RunFile { run, intervals, tenants, report })
    }

    /// The page.
    pub fn html(&self) -> String {
        page::html(self)
    }
}

#[cfg(test)]
mod tests;

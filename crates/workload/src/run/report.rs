//! What came of a run, for people (a table) and for scripts (serde).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

use super::RunOptions;
use crate::measure::{Latency, Meter};
use crate::workload::Workload;

/// What came of a run. Counts are of the measured window, except errors and losses, which are of the whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The workload's name.
    pub workload: &'static str,
    /// The workload's options.
    pub options: serde_json::Value,
    /// The server.
    pub target: String,
    /// Instances, one per database.
    pub tenants: usize,
    /// Connections per instance.
    pub connections: usize,
    /// Open loop: the transactions per second that fell due.
    pub offered_tps: Option<f64>,
    /// Length of the measured window.
    pub seconds: f64,
    /// Committed transactions.
    pub transactions: u64,
    /// Committed transactions per second.
    pub throughput_tps: f64,
    /// From the first statement (open loop: from when it was due) to the answer of COMMIT, retries included.
    pub latency: Latency,
    /// Statements of the committed transactions, BEGIN and COMMIT included.
    pub statements: u64,
    /// CPU time of the driver's thread per statement, in microseconds.
    pub driver_cpu_us_per_statement: f64,
    /// Errors of the server by SQLSTATE; 40001 and 40P01 were run again.
    pub errors: BTreeMap<String, u64>,
    /// Transactions that were given up.
    pub failed: u64,
    /// The first error that made one be given up.
    pub first_error: Option<String>,
    /// Connections that were lost.
    pub lost_connections: u64,
}

impl Report {
    pub(super) fn new<W: Workload>(
        workload: &W,
        options: &RunOptions,
        tenants: usize,
        meter: &Meter,
        driver_cpu: Duration,
    ) -> anyhow::Result<Report> {
        let latency = meter.latency();
        let seconds = options.measure.as_secs_f64();
        let cpu_us = driver_cpu.as_secs_f64() * 1e6;
        Ok(Report {
            workload: W::NAME,
            options: serde_json::to_value(workload)?,
            target: options.target.to_string(),
            tenants,
            connections: options.connections,
            offered_tps: options.rate_tps,
            seconds,
            transactions: latency.count,
            throughput_tps: latency.count as f64 / seconds,
            latency,
            statements: meter.statements,
            driver_cpu_us_per_statement: if meter.statements == 0 {
                0.0
            } else {
                cpu_us / meter.statements as f64
            },
            errors: meter.errors.clone(),
            failed: meter.failed,
            first_error: meter.first_error.clone(),
            lost_connections: meter.lost_connections,
        })
    }

    /// Tries that were refused with a serialization failure or a deadlock, and run again.
    pub fn retries(&self) -> u64 {
        ["40001", "40P01"].iter().filter_map(|sqlstate| self.errors.get(*sqlstate)).sum()
    }

    fn lines(&self) -> Vec<(&str, String)> {
        let Latency { mean_ms, p50_ms, p95_ms, p99_ms, p999_ms, max_ms, .. } = self.latency;
        let mut lines = vec![
            ("instances x connections", format!("{} x {}", self.tenants, self.connections)),
            ("transactions/s", format!("{:.1}", self.throughput_tps)),
            ("latency mean, p50", format!("{mean_ms:.2} ms, {p50_ms:.2} ms")),
            ("p95, p99, p99.9", format!("{p95_ms:.2} ms, {p99_ms:.2} ms, {p999_ms:.2} ms")),
            ("longest", format!("{max_ms:.2} ms")),
            ("run again (40001, 40P01)", self.retries().to_string()),
            ("given up", self.failed.to_string()),
            ("driver CPU per statement", format!("{:.1} us", self.driver_cpu_us_per_statement)),
        ];
        if let Some(offered) = self.offered_tps {
            lines.insert(1, ("offered transactions/s", format!("{offered:.1}")));
        }
        if self.lost_connections > 0 {
            lines.push(("connections lost", self.lost_connections.to_string()));
        }
        for (name, value) in self.options.as_object().into_iter().flatten().rev() {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            lines.insert(0, (name, value));
        }
        for (sqlstate, count) in &self.errors {
            lines.push(("errors by SQLSTATE", format!("{sqlstate}: {count}")));
        }
        if let Some(error) = &self.first_error {
            lines.push(("first error", error.clone()));
        }
        lines
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header([self.workload.to_owned(), self.target.clone()]);
        for (name, value) in self.lines() {
            table.add_row([Cell::new(name), Cell::new(value).set_alignment(CellAlignment::Right)]);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Window;
    use crate::workload::Done;
    use crate::ycsb::Ycsb;
    use std::time::Instant;

    #[test]
    fn rates_are_of_the_window() {
        let opens = Instant::now();
        let mut meter = Meter::new(Window { opens, closes: opens + Duration::from_secs(4) });
        for number in 1..=200 {
            let end = opens + Duration::from_millis(number * 10);
            meter.done(0, Done::Committed, end - Duration::from_millis(5), end, 12);
        }
        meter.refused("40001");
        meter.refused("40P01");
        meter.refused("23505");
        let mut options = RunOptions::new("postgres://a:secret@b/c".parse().unwrap());
        options.measure = Duration::from_secs(4);
        let report = Report::new(&Ycsb::default(), &options, 1, &meter, Duration::from_millis(24)).unwrap();
        assert_eq!((report.transactions, report.statements, report.retries()), (200, 2400, 2));
        assert_eq!(report.throughput_tps, 50.0);
        assert!((report.driver_cpu_us_per_statement - 10.0).abs() < 1e-9);
        let text = format!("{report}{}", serde_json::to_string(&report).unwrap());
        assert!(text.contains("50.0") && text.contains("23505: 1") && !text.contains("secret"), "{text}");
    }

    #[test]
    fn a_run_without_transactions_divides_by_nothing() {
        let now = Instant::now();
        let meter = Meter::new(Window { opens: now, closes: now });
        let options = RunOptions::new("postgres://a@b/c".parse().unwrap());
        let report = Report::new(&Ycsb::default(), &options, 1, &meter, Duration::ZERO).unwrap();
        assert_eq!((report.throughput_tps, report.driver_cpu_us_per_statement), (0.0, 0.0));
    }
}

//! Prints the report of a run as a table.

use std::fmt;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};

use super::prices::ServerUsage;
use super::report::{Availability, Driver, Report};
use crate::measure::Latency;

impl Report {
    fn lines(&self) -> Vec<(String, String)> {
        let mut lines = Lines(Vec::new());
        for (name, value) in self.options.as_object().into_iter().flatten() {
            lines.add(name, value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
        lines.add("instances x connections", format!("{} x {}", self.tenants, self.connections));
        if let Some(offered) = self.offered_tps {
            lines.add("offered transactions/s", format!("{offered:.1}"));
        }
        lines.add("transactions/s", format!("{:.1}", self.throughput_tps));
        lines.latency("latency", &self.latency);
        if self.tenants > 1 {
            let [min, max] = self.tenant_mean_ms;
            lines.add("mean latency by tenant", format!("{min:.2} to {max:.2} ms"));
        }
        if self.kinds.len() > 1 {
            for kind in self.kinds.iter().filter(|kind| kind.latency.count > 0) {
                let name = format!("{}: {:.1}/s", kind.kind, kind.succeeded() as f64 / self.seconds);
                lines.latency(&name, &kind.latency);
            }
        }
        if self.rolled_back > 0 {
            lines.add("rolled back as intended", self.rolled_back.to_string());
        }
        lines.add("retries (40001, 40P01)", self.retries().to_string());
        lines.add("retried more than once", self.retried_again.to_string());
        lines.add("failed", self.failed.to_string());
        if let (true, Some(lost)) = (self.cancelled > 0, self.lost_work_s) {
            lines.add("cancelled, lost work", format!("{}, {lost:.2} s", self.cancelled));
        }
        if self.unsent > 0 {
            lines.add("due, but not sent", self.unsent.to_string());
        }
        self.availability.lines(&mut lines);
        for (name, value) in self.server.iter().flat_map(ServerUsage::lines) {
            lines.add(name, value);
        }
        let Driver { threads, cpu_us_per_statement, busiest_thread } = self.driver;
        lines.add("driver CPU time per statement", format!("{cpu_us_per_statement:.1} us"));
        if self.driver.is_bottleneck() {
            let busiest = busiest_thread * 1e2;
            let text = format!("busiest of {threads} threads used {busiest:.0} % of a CPU");
            lines.add("DRIVER BOTTLENECK", format!("{text}; raise --threads or --processes"));
        }
        if self.lost_connections > 0 {
            lines.add("lost connections", self.lost_connections.to_string());
        }
        for (sqlstate, count) in &self.errors {
            lines.add("errors by SQLSTATE", format!("{sqlstate}: {count}"));
        }
        if let Some(error) = &self.first_error {
            lines.add("first error", error.clone());
        }
        lines.0
    }
}

impl Availability {
    fn lines(&self, lines: &mut Lines) {
        if self.outages > 0 {
            let Availability { outages, unavailable_s, longest_outage_s, .. } = self;
            let text = format!("{unavailable_s:.1} s in {outages} outages, longest {longest_outage_s:.1} s");
            lines.add("unavailable, all tenants", text);
        }
        if self.down_intervals > 0 {
            let name = format!("down intervals of {} s", self.down_interval_s);
            lines.add(&name, self.down_intervals.to_string());
        }
        for tenant in &self.worst {
            let outages: f64 = tenant.outages_s.iter().sum();
            lines.add(&format!("unavailable: {}", tenant.tenant), format!("{outages:.1} s"));
        }
    }
}

/// The rows of the table: names and values.
struct Lines(Vec<(String, String)>);

impl Lines {
    fn add(&mut self, name: &str, value: String) {
        self.0.push((name.to_owned(), value));
    }

    fn latency(&mut self, name: &str, latency: &Latency) {
        let Latency { mean_ms, p50_ms, p95_ms, p99_ms, p999_ms, max_ms, .. } = latency;
        let text = format!("mean {mean_ms:.2}, p50 {p50_ms:.2}, p95 {p95_ms:.2}, p99 {p99_ms:.2} ms");
        self.add(name, text);
        self.add("", format!("p99.9 {p999_ms:.2}, max {max_ms:.2} ms"));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header([self.workload.clone(), self.target.clone()]);
        for (name, value) in self.lines() {
            table.add_row([Cell::new(name), Cell::new(value).set_alignment(CellAlignment::Right)]);
        }
        write!(f, "{table}")
    }
}

//! Figures of moves: a loaded tenant is moved by one mechanism per point, in the laboratory of
//! `bench migrate` ([`crate::compare::migrate::laboratory`]).
//!
//! Unless a figure varies it, the load is that of ElasTraS (7.7.1): 50 transactions/s of table III,
//! a cache of a quarter of the data. The data has at least the size of which the minimum memory of
//! a node is that part.

use std::time::Duration;

use futures::FutureExt;
use futures::future::LocalBoxFuture;

use super::{Bench, Course, Experiment, FigureRow, MIN_MEMORY_BYTES, Measure, Scaling, measure};
use crate::compare::migrate::laboratory::{NORMAL, Observed, Trial, TrialLoad};
use crate::keys::Distribution;
use crate::measure::Sample;
use crate::tpcc::Tpcc;
use crate::ycsb::Ycsb;

/// What a move costs (ElasTraS 6.1).
pub(super) const COSTS: [Measure; 8] = [
    measure("unavailable_ms", "Unavailable for statements", "ms"),
    measure("pause_ms", "Longest latency because of the move", "ms"),
    measure("aborted", "Attempts that were aborted, and repeated by clients", ""),
    measure("given_up", "Transactions that failed", ""),
    measure("increase_percent", "Mean latency in the 30 s after the move, above that before", "%"),
    measure("moved_mb", "Bytes moved", "MB"),
    measure("duration_s", "Duration of the move", "s"),
    measure("mean_ms", "Mean latency before the move", "ms"),
];

/// What clients get while a tenant is moved.
pub(super) const OVER_TIME: [Measure; 3] = [
    measure("mean_ms", "Mean latency from the scheduled start", "ms"),
    measure("longest_ms", "Longest latency", "ms"),
    measure("throughput_tps", "Throughput", "transactions/s"),
];

/// Of all transactions from before the move until after it.
pub(super) const LATENCIES: [Measure; 6] = [
    measure("p25_ms", "25th percentile", "ms"),
    measure("p50_ms", "Median", "ms"),
    measure("p75_ms", "75th percentile", "ms"),
    measure("p99_ms", "99th percentile", "ms"),
    measure("longest_ms", "Longest latency", "ms"),
    measure("outliers", "Above the upper quartile by 1.5 times the distance of the quartiles", ""),
];

/// The mechanisms that ElasTraS compares.
pub(super) const OF_ELASTRAS: &[&str] = &["stop", "flush", "albatross"];
/// The same, and a run without a move.
pub(super) const WITH_NORMAL: &[&str] = &[NORMAL, "stop", "flush", "albatross"];

/// A warehouse of TPC-C.
const WAREHOUSE_BYTES: f64 = 90e6;

/// The longest time after a move that is measured.
const MAX_AFTER: Duration = Duration::from_secs(30);

/// The parameters of a move.
#[derive(Clone, Copy)]
pub(super) struct Parameters {
    pub(super) database_bytes: f64,
    /// At least this much data, whatever the scale is.
    pub(super) least_bytes: f64,
    /// The memory of a node as a part of the data.
    pub(super) cache: f64,
    /// `None` is a closed loop.
    pub(super) rate_tps: Option<f64>,
    pub(super) operations: u32,
    pub(super) read_percent: f64,
    pub(super) distribution: Distribution,
    pub(super) connections: usize,
    /// Warehouses of TPC-C, instead of YCSB.
    pub(super) warehouses: u32,
    pub(super) others: u32,
    pub(super) is_wide: bool,
}

pub(super) const TABLE_III: Parameters = Parameters {
    database_bytes: 1e9,
    least_bytes: 0.0,
    cache: 0.25,
    rate_tps: Some(50.0),
    operations: 10,
    read_percent: 90.0,
    distribution: Distribution::HOT_90_20,
    connections: 8,
    warehouses: 0,
    others: 0,
    is_wide: false,
};

/// Moves of a loaded tenant.
pub(super) struct Trials {
    pub(super) mechanisms: &'static [&'static str],
    /// The values of the x axis. A figure over time has one.
    pub(super) values: &'static [f64],
    /// Sets the parameter that varies.
    pub(super) vary: fn(&mut Parameters, f64),
    pub(super) view: View,
}

/// What the rows of a figure are.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum View {
    /// [`COSTS`].
    Costs,
    /// [`OVER_TIME`].
    Time,
    /// [`LATENCIES`].
    Latencies,
}

impl Trials {
    pub(super) const DEFAULT: Trials =
        Trials { mechanisms: OF_ELASTRAS, values: &[1.0], vary: |_, _| {}, view: View::Costs };

    fn trial(&self, mechanism: &'static str, value: f64, bench: &Bench<'_>) -> Trial {
        let mut parameters = TABLE_III;
        (self.vary)(&mut parameters, value);
        let time = bench.arguments.time();
        let (before, after) = (time, (time * 3).min(MAX_AFTER));
        Trial { before, after, ..parameters.trial(mechanism, &bench.arguments.scaled()) }
    }

    async fn measure(&self, bench: &Bench<'_>) -> anyhow::Result<Course> {
        let mut course = Course::default();
        let wanted = self.mechanisms.iter().filter(|name| bench.arguments.wants(name));
        let points = wanted.flat_map(|name| self.values.iter().map(move |value| (*name, *value)));
        for (mechanism, value) in points {
            bench.step(&format!("{mechanism} at {value}"));
            let trial = self.trial(mechanism, value, bench);
            match trial.observe(bench.binary).await {
                Ok(observed) => self.record(&mut course, value, &observed),
                Err(error) => course.rows.push(FigureRow {
                    line: mechanism.to_owned(),
                    x: value,
                    values: Err(format!("{error:#}")),
                }),
            }
            let memory = format!("{} MiB of memory per node", trial.memory_bytes >> 20);
            let data = match &trial.load {
                TrialLoad::Ycsb(load) => format!("{} MB of data", load.data_bytes() / 1_000_000),
                TrialLoad::Tpcc(load) => format!("{} items, {} customers", load.items, load.customers),
            };
            let note = format!("at {value}: {data}, {memory}");
            if !course.notes.contains(&note) {
                course.notes.push(note);
            }
        }
        Ok(course)
    }

    fn record(&self, course: &mut Course, value: f64, observed: &Observed) {
        let row =
            |line: &str, x, values: Vec<f64>| FigureRow { line: line.to_owned(), x, values: Ok(values) };
        let line = observed.mechanism;
        match self.view {
            View::Costs => {
                if let Some(outward) = observed.outward {
                    let mut values = vec![f64::NAN; COSTS.len()];
                    (values[0], values[5], values[6]) =
                        (outward.freeze_ms, outward.bytes / 1e6, outward.total_ms / 1e3);
                    course.rows.push(row("live, before it", value, values));
                }
                course.rows.push(row(line, value, costs(observed)));
            }
            View::Time => {
                if line != NORMAL {
                    course.spans.push((line.to_owned(), observed.span.0, observed.span.1));
                }
                let values = observed.intervals.iter().map(|at| {
                    row(
                        line,
                        (at.at_s * 10.0).round() / 10.0,
                        vec![at.mean_ms, at.longest_ms, at.throughput_tps],
                    )
                });
                course.rows.extend(values);
            }
            View::Latencies => course.rows.push(row(line, value, latencies(&observed.latencies))),
        }
    }
}

impl Experiment for Trials {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        self.measure(bench).boxed_local()
    }

    fn is_isolated(&self) -> bool {
        let mut parameters = TABLE_III;
        (self.vary)(&mut parameters, self.values.first().copied().unwrap_or_default());
        parameters.is_wide
    }
}

impl Parameters {
    /// The trial of these parameters. Its times are zero.
    pub(super) fn trial(&self, mechanism: &'static str, scaled: &Scaling) -> Trial {
        let least = (MIN_MEMORY_BYTES as f64 / self.cache).ceil().max(self.least_bytes) as u64;
        let data_bytes = scaled.bytes(self.database_bytes).max(least);
        let load = match self.warehouses {
            0 => {
                let (operations, reads) = (self.operations, self.read_percent);
                let ycsb = Ycsb { operations, reads, distribution: self.distribution, ..Ycsb::default() };
                TrialLoad::Ycsb(ycsb.of_bytes(data_bytes))
            }
            // A warehouse has as many items and customers as its part of the data.
            warehouses => {
                let part = (data_bytes as f64 / f64::from(warehouses) / WAREHOUSE_BYTES).min(1.0);
                let rows = |count: f64| (count * part).max(100.0) as u32;
                let (items, customers) = (rows(100_000.0), rows(3_000.0));
                TrialLoad::Tpcc(Tpcc { warehouses, items, customers, ..Tpcc::default() })
            }
        };
        Trial {
            mechanism,
            load,
            rate_tps: self.rate_tps,
            connections: self.connections,
            memory_bytes: scaled
                .memory_bytes
                .unwrap_or(((data_bytes as f64 * self.cache) as u64).max(MIN_MEMORY_BYTES)),
            others: self.others,
            is_wide: self.is_wide,
            before: Duration::ZERO,
            after: Duration::ZERO,
        }
    }
}

fn costs(of: &Observed) -> Vec<f64> {
    let (aborted, failed) = (of.aborted as f64, of.failed as f64);
    let (megabytes, seconds) = (of.bytes / 1e6, of.duration_ms / 1e3);
    let increase = of.increase_percent();
    vec![of.freeze_ms, of.pause_ms, aborted, failed, increase, megabytes, seconds, of.before_ms]
}

/// The values of [`LATENCIES`] of latencies in ascending order.
fn latencies(samples: &[Sample]) -> Vec<f64> {
    let all: u64 = samples.iter().map(|(_, count)| count).sum();
    let at = |share: f64| {
        let mut left = (all as f64 * share).ceil().max(1.0) as u64;
        let found = samples.iter().find(|(_, count)| {
            let is_here = *count >= left;
            left = left.saturating_sub(*count);
            is_here
        });
        found.map_or(f64::NAN, |(microseconds, _)| *microseconds as f64 / 1e3)
    };
    let [lower, upper] = [at(0.25), at(0.75)];
    let whisker = upper + 1.5 * (upper - lower);
    let is_outlier = |(microseconds, _): &&Sample| *microseconds as f64 / 1e3 > whisker;
    let outliers: u64 = samples.iter().filter(is_outlier).map(|(_, count)| count).sum();
    vec![lower, at(0.5), upper, at(0.99), at(1.0), outliers as f64]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_the_papers_part_of_the_data() {
        let size = |parameters: Parameters, scale| {
            let trial = parameters.trial("live", &Scaling { scale, memory_bytes: None });
            let TrialLoad::Ycsb(load) = trial.load else { panic!("not YCSB") };
            (load.data_bytes() >> 20, trial.memory_bytes >> 20)
        };
        assert_eq!(size(TABLE_III, 0.1), (255, 64), "a node has at least 64 MiB");
        assert_eq!(size(TABLE_III, 1.0), (953, 238));
        assert_eq!(size(Parameters { cache: 0.1, ..TABLE_III }, 0.1), (639, 64));
    }

    #[test]
    fn percentiles_and_outliers_are_counted() {
        let samples = [(1_000, 50), (2_000, 40), (3_000, 9), (90_000, 1)];
        assert_eq!(latencies(&samples), [1.0, 1.0, 2.0, 3.0, 90.0, 1.0]);
        assert!(latencies(&[])[0].is_nan());
    }
}

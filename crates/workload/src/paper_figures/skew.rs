//! Figures of a skewed load on real nodes, without a controller (E-Store 2.2 and 6.2).

use futures::FutureExt;
use futures::future::LocalBoxFuture;
use tokio::time::Instant;

use super::{Bench, Course, Experiment, FigureRow, Measure, measure};
use crate::arrival::Arrival;
use crate::compare::control::elastic::{CPUS, Elastic, Placement, workload};
use crate::keys::Distribution;
use crate::run::{Recorder, RunOptions, run};
use crate::server::{Cluster, Fulmar, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

pub(super) const UTILISATION: [Measure; 1] =
    [measure("cpu_percent", "CPU utilisation", "% of the node's share")];

const NODES: usize = 3;
const TENANTS: u32 = 30;
/// The load, as a share of the capacity without skew.
const LOAD: f64 = 0.8;
/// Of the load, 60 % goes to one of 30 tenants (40 keys of one partition in the paper).
const HIGH: Distribution = Distribution::HighSkew { operations_percent: 60.0, hot_keys: 1 };
const SKEWS: [(&str, Distribution); 3] =
    [("no skew", Distribution::Uniform), ("low skew", Distribution::LowSkew), ("high skew", HIGH)];

/// Tenants with unequal loads.
pub(super) struct Skew {
    /// Shows [`UTILISATION`] of each node, instead of what clients get for each skew.
    pub(super) by_node: bool,
}

impl Experiment for Skew {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        self.measure(bench).boxed_local()
    }
}

impl Skew {
    async fn measure(&self, bench: &Bench<'_>) -> anyhow::Result<Course> {
        let step = |text: &str| bench.step(text);
        let elastic = Elastic::start(bench.binary, &step, (NODES, Placement::Blocks), TENANTS, None).await?;
        let mut course = Course::default();
        for (x, (line, tenant_rates)) in (0..).zip(SKEWS) {
            step(line);
            let before = cpu(&elastic.cluster)?;
            let begun = Instant::now();
            let options = RunOptions {
                tenant_rates,
                arrival: Arrival::poisson(elastic.capacity_tps * LOAD),
                ..elastic.options(&elastic.databases, bench.arguments.time())
            };
            let report = run(workload(), options).await?;
            let seconds = begun.elapsed().as_secs_f64();
            let row = |line: &str, x, values| FigureRow { line: line.to_owned(), x, values: Ok(values) };
            if self.by_node {
                let used = cpu(&elastic.cluster)?.into_iter().zip(before);
                course.rows.extend((1..).zip(used).map(|(node, (after, before))| {
                    row(line, f64::from(node), vec![(after - before) / seconds / CPUS * 100.0])
                }));
            } else {
                let latency = &report.latency;
                let values = vec![report.throughput_tps, latency.mean_ms, latency.p99_ms];
                course.rows.push(row("all tenants", f64::from(x), values));
            }
        }
        Ok(course)
    }
}

/// The CPU time of each node that owns tenants, in seconds.
fn cpu(cluster: &Cluster) -> anyhow::Result<Vec<f64>> {
    (1..=NODES).map(|node| Ok(cluster.processes(node)?.cpu()?.as_secs_f64())).collect()
}

/// What counting accesses per key costs (E-Store, figure 6).
pub(super) struct Counting;

const MODES: [&str; 3] = ["off", "on", "full"];
const KEYS: [(&str, Distribution); 2] = [
    ("low skew", Distribution::LowSkew),
    ("high skew", Distribution::HighSkew { operations_percent: 60.0, hot_keys: 40 }),
];
const DATABASE: &str = "ycsb";
const CONNECTIONS: usize = 16;
const DATA_BYTES: u64 = 64 << 20;
const MEMORY_BYTES: u64 = 256 << 20;

impl Experiment for Counting {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move {
            let mut course = Course::default();
            for mode in MODES {
                let product = Fulmar::at(bench.binary.to_owned()).with_flags(&["--key-monitoring", mode]);
                let server = Server::start(Box::new(product), MEMORY_BYTES, CONNECTIONS as u32).await?;
                tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
                for (skew, distribution) in KEYS {
                    let line = format!("{mode}, {skew}");
                    bench.step(&line);
                    let recorder = Recorder::new();
                    let ycsb =
                        Ycsb { tables: 1, operations: 1, reads: 85.0, distribution, ..Ycsb::default() };
                    let options = RunOptions {
                        connections: CONNECTIONS,
                        measure: bench.arguments.time() * 2,
                        watcher: Some(recorder.watcher()),
                        ..RunOptions::new(server.target().with_database(DATABASE))
                    };
                    run(ycsb.of_bytes(DATA_BYTES), options).await?;
                    let opened = recorder.opened().await?;
                    let moments = recorder.moments().0.into_iter().filter(|moment| moment.at > opened);
                    course.rows.extend((1..).zip(moments).map(|(second, moment)| FigureRow {
                        line: line.clone(),
                        x: f64::from(second),
                        values: Ok(vec![moment.tick.throughput_tps, moment.tick.mean_ms, moment.tick.p99_ms]),
                    }));
                }
            }
            Ok(course)
        }
        .boxed_local()
    }
}

//! Figures of a cluster that a controller looks after: tenants whose load changes, nodes with a
//! fixed share of a core, and what clients, nodes and the controller do in every second.
//!
//! ```text
//!  settle              |  the profile: equal phases of --seconds
//!  first load, nodes   |  phase 1 | phase 2 | ...
//! ```

use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use futures::future::{LocalBoxFuture, try_join_all};
use tokio::time::{Instant, sleep};

use super::{Bench, Course, Experiment, FigureRow, Measure, measure};
use crate::arrival::{Arrival, Shape};
use crate::compare::control::elastic::{CPUS, Elastic, OBJECTIVE_MS, Placement, workload};
use crate::compare::control::scale::Counts;
use crate::run::{Moments, Prices, Recorder, RunOptions, run};
use crate::server::AddedNodes;

/// What clients get, and what the controller does.
pub(super) const ELASTIC: [Measure; 6] = [
    measure("throughput_tps", "Throughput", "transactions/s"),
    measure("mean_ms", "Mean latency from the scheduled start", "ms"),
    measure("p99_ms", "99th percentile", "ms"),
    measure("nodes", "Nodes with tenants", ""),
    measure("moves", "Moves so far", ""),
    measure("dollars_per_hour", "Operating cost: the nodes' share of a CPU", "dollars/hour"),
];

/// Latency is the mean of this time (ElasTraS 7.8).
const SMOOTHING: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A cluster, its tenants and their load.
pub(super) struct Scenario {
    /// Nodes at the beginning.
    pub(super) owners: usize,
    /// Nodes that the controller has to reach before the profile begins, in phases of this number.
    pub(super) settled: Option<Settled>,
    pub(super) placement: Placement,
    pub(super) groups: &'static [Group],
    /// Phases of the profile.
    pub(super) phases: u32,
    /// One run each: the name of its lines, and settings of the controller.
    pub(super) variants: &'static [(&'static str, &'static [(&'static str, &'static str)])],
}

/// What happens before the profile.
#[derive(Clone, Copy)]
pub(super) struct Settled {
    pub(super) nodes: usize,
    pub(super) phases: u32,
}

/// Tenants with the same load over time.
pub(super) struct Group {
    pub(super) line: &'static str,
    pub(super) tenants: u32,
    /// The load of the group, in shares of the capacity of the settled nodes.
    pub(super) load: f64,
    /// The load over time, as in `--trace`. It includes the time to settle.
    pub(super) trace: &'static str,
}

impl Experiment for Scenario {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move {
            let mut course = Course::default();
            course.notes.push(format!(
                "each node has {CPUS:.2} of a core (cfs_period_us 10000), so that a node adds capacity on one \
                 machine; latency objective {OBJECTIVE_MS} ms; {} tenants",
                self.groups.iter().map(|group| group.tenants).sum::<u32>()
            ));
            for (name, settings) in self.variants.iter().filter(|(name, _)| bench.arguments.wants(name)) {
                self.one(bench, name, settings, &mut course).await.with_context(|| (*name).to_owned())?;
            }
            Ok(course)
        }
        .boxed_local()
    }
}

/// The nodes and moves at a time.
struct Sample {
    at: Instant,
    nodes: usize,
    moves: f64,
}

impl Scenario {
    async fn one(
        &self,
        bench: &Bench<'_>,
        name: &str,
        settings: &[(&str, &str)],
        course: &mut Course,
    ) -> anyhow::Result<()> {
        let added = AddedNodes::new()?;
        let tenants = self.groups.iter().map(|group| group.tenants).sum();
        let step = |text: &str| bench.step(&format!("{name}: {text}"));
        let elastic =
            Elastic::start(bench.binary, &step, (self.owners, self.placement), tenants, Some(&added)).await?;
        elastic.configure(settings).await?;
        let phase = bench.arguments.time();
        let settling = self.settled.map_or(Duration::ZERO, |settled| phase * settled.phases);
        let loaded = if self.placement == Placement::First { 1 } else { self.owners };
        let nodes = self.settled.map_or(loaded, |settled| settled.nodes);
        let capacity_tps = elastic.capacity_tps / loaded as f64 * nodes as f64;
        let length = settling + phase * self.phases;
        let (mut recorders, mut loads) = (Vec::new(), Vec::new());
        let mut rest = &elastic.databases[..];
        for group in self.groups {
            let (own, others) = rest.split_at(group.tenants as usize);
            rest = others;
            let shape: Shape = group.trace.parse()?;
            let recorder = Recorder::new();
            let options = RunOptions {
                arrival: Arrival::Open { rate_tps: capacity_tps * group.load, shape, tolerance: None },
                watcher: Some(recorder.watcher()),
                // A node that leaves closes its connections.
                reconnect_timeout: Duration::from_secs(30),
                ..elastic.options(own, length)
            };
            loads.push(run(workload(), options));
            recorders.push((group.line, recorder));
        }
        step("running the load");
        let (mut counts, mut samples) = (Counts::new(&added), Vec::new());
        let watching = async {
            let begun = recorders[0].1.opened().await?;
            let mut is_settled = self.settled.is_none();
            loop {
                counts.poll(&elastic).await?;
                let sql =
                    "SELECT count(*) FROM fulmar.migrations WHERE step = 'moved' AND mechanism <> 'flush'";
                let moves = elastic.column(sql).await?.pop().unwrap_or_default().parse()?;
                samples.push(Sample { at: Instant::now(), nodes: counts.nodes(), moves });
                if !is_settled && begun.elapsed() >= settling {
                    // From now on the controller may remove the nodes that it has added.
                    elastic.configure(&[("min_nodes", "1")]).await?;
                    is_settled = true;
                }
                sleep(POLL_INTERVAL).await;
                if begun.elapsed() > length * 2 {
                    return anyhow::Ok(());
                }
            }
        };
        let reports = tokio::select! {
            ended = try_join_all(loads) => ended?,
            failed = watching => {
                failed?;
                anyhow::bail!("the load did not end")
            }
        };
        let begun = recorders[0].1.opened().await? + settling;
        let failed: u64 = reports.iter().map(|report| report.failed + report.lost_connections).sum();
        let line = |group: &str| match (self.variants.len(), self.groups.len()) {
            (1, _) => group.to_owned(),
            (_, 1) => name.to_owned(),
            _ => format!("{name}: {group}"),
        };
        for (number, (group, recorder)) in recorders.iter().enumerate() {
            let moments = recorder.moments();
            let shown = if number == 0 { &samples[..] } else { &[] };
            course.rows.extend(rows(&line(group), &moments, shown, begun)?);
        }
        course.notes.push(format!("{name}: {failed} failed; {}", cost(&samples, begun)));
        course
            .notes
            .extend(elastic.decisions().await?.into_iter().map(|decision| format!("{name}: {decision}")));
        Ok(())
    }
}

/// A row per second: the latency of the last ten seconds, and nodes, moves and cost if there are
/// samples.
fn rows(line: &str, moments: &Moments, samples: &[Sample], begun: Instant) -> anyhow::Result<Vec<FigureRow>> {
    let price = Prices::listed()?.cpu * CPUS;
    let row = |moment: &crate::run::Moment| {
        // Before the profile, too.
        let at_s = match moment.at.checked_duration_since(begun) {
            Some(after) => after.as_secs_f64(),
            None => -begun.duration_since(moment.at).as_secs_f64(),
        };
        let from = moment.at.checked_sub(SMOOTHING).unwrap_or(moment.at);
        let latency = moments.between(from, moment.at).latency();
        let sample = samples.iter().rev().find(|sample| sample.at <= moment.at);
        let of = |value: fn(&Sample) -> f64| sample.map_or(f64::NAN, value);
        let nodes = of(|sample| sample.nodes as f64);
        let moves = of(|sample| sample.moves);
        let throughput = moment.tick.throughput_tps;
        let values = vec![throughput, latency.mean_ms, latency.p99_ms, nodes, moves, nodes * price];
        FigureRow { line: line.to_owned(), x: at_s.round(), values: Ok(values) }
    };
    Ok(moments.0.iter().map(row).collect())
}

/// The cost of the profile, over that of the largest number of nodes throughout.
fn cost(samples: &[Sample], begun: Instant) -> String {
    let shown: Vec<&Sample> = samples.iter().filter(|sample| sample.at >= begun).collect();
    let most = shown.iter().map(|sample| sample.nodes).max().unwrap_or(0);
    let node_seconds: f64 = shown
        .windows(2)
        .map(|pair| pair[0].nodes as f64 * pair[1].at.duration_since(pair[0].at).as_secs_f64())
        .sum();
    let (Some(first), Some(last)) = (shown.first(), shown.last()) else { return "no sample".to_owned() };
    let all = most as f64 * last.at.duration_since(first.at).as_secs_f64();
    format!(
        "{node_seconds:.0} node-seconds, {:.0} % of {most} nodes throughout",
        node_seconds / all.max(1.0) * 100.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_that_of_the_nodes_over_time() {
        let begun = Instant::now();
        let sample =
            |second: u64, nodes| Sample { at: begun + Duration::from_secs(second), nodes, moves: 0.0 };
        let samples = [sample(0, 2), sample(10, 4), sample(20, 1), sample(40, 1)];
        assert_eq!(cost(&samples, begun), "80 node-seconds, 50 % of 4 nodes throughout");
        assert_eq!(cost(&samples, begun + Duration::from_secs(60)), "no sample");
    }
}

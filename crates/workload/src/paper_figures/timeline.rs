//! Throughput over time, through the death of a node and through a partition (CloudTPS 6.4).
//!
//! ```text
//!   0 s                30 s               70 s            130 s          160 s
//!   |  five nodes      |  four nodes      |  one cut off  |  four again  |
//!                      kill -9            cut             end of the cut
//! ```
//!
//! The nodes run in network namespaces with etcd and an S3 server. The browsers of all databases
//! are connected to the first node, so most of their statements are relayed to other nodes, like
//! those of the paper's clients.
//!
//! Differences from the paper: its partition lasts 300 s and leaves each node alone, so that
//! transactions block until it ends. Here one node is cut off, the others take its databases over,
//! and it joins them again after the cut.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::{Bench, Course, Experiment, FigureRow};
use crate::client::Client;
use crate::run::{Report, RunEvent, RunOptions, RunTick, run};
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;
use crate::tpcw::Tpcw;

/// A figure over time.
pub(super) struct Timeline {
    /// Emulated browsers.
    pub(super) browsers: u32,
    /// Databases, each of which gets an equal share of the data and the browsers.
    pub(super) databases: u32,
}

const NODES: usize = 5;
/// The node that is killed, and the one that is cut off.
const KILLED: usize = 1;
const CUT_OFF: usize = 2;
const MEMORY_BYTES: u64 = 256 << 20;
const WARM_UP: Duration = Duration::from_secs(10);

/// Times in seconds after the warm-up.
const DEATH: u32 = 30;
const CUT: u32 = 70;
const HEAL: u32 = 130;
const END: u32 = 160;

/// The throughput counts as recovered at this share of the mean before the event. Intervals of 1 s
/// with 50 browsers vary by a tenth.
const RECOVERED_SHARE: f64 = 0.7;
const STABLE: usize = 3;
/// The line of the throughput.
const LINE: &str = "committed transactions";

impl Experiment for Timeline {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        measure(self, bench).boxed_local()
    }

    fn is_isolated(&self) -> bool {
        true
    }
}

async fn measure(timeline: &Timeline, bench: &Bench<'_>) -> anyhow::Result<Course> {
    let (scaled, step) = (bench.arguments.scaled(), |text: &str| bench.step(text));
    step("starting etcd, the store and five nodes");
    let setup = ClusterSetup {
        nodes: NODES,
        store: ClusterStore::S3,
        isolated: true,
        memory_bytes: scaled.memory_bytes.unwrap_or(MEMORY_BYTES),
        ..ClusterSetup::default()
    };
    let mut cluster = Cluster::start(bench.binary, setup).await?;
    let databases = tenants::names("figure_", timeline.databases);
    tenants::create(&cluster.target(0), &databases, |_| ()).await?;
    let mut admin = Client::connect(&cluster.target(0)).await?;
    for (number, database) in databases.iter().enumerate() {
        let node = cluster.name(number % NODES);
        admin.query(&format!("ALTER DATABASE {database} MOVE TO '{node}'")).await?;
    }
    admin.close().await?;
    let share =
        |all: f64, least: u32| ((all * scaled.scale / f64::from(timeline.databases)) as u32).max(least);
    let workload =
        Tpcw { items: share(10_000.0, 10), customers: share(144_000.0, 100), pauses: 1.0, ..Tpcw::default() };
    let (opened, mut opens) = watch::channel(None);
    let (ticks, mut ticked) = mpsc::unbounded_channel();
    let watcher = move |event: &RunEvent| match event {
        RunEvent::Opens => {
            opened.send_replace(Some(Instant::now()));
        }
        RunEvent::Tick(tick) => drop(ticks.send(tick.clone())),
        _ => {}
    };
    let options = RunOptions {
        databases,
        connections: (timeline.browsers / timeline.databases) as usize,
        warm_up: WARM_UP,
        measure: seconds(END),
        watcher: Some(Arc::new(watcher)),
        ..RunOptions::new(cluster.target(0))
    };
    let events = async {
        step("loading the databases");
        let opened = *opens.wait_for(Option::is_some).await.context("the run has ended")?;
        let at = |second| opened.map(|opened| opened + seconds(second)).context("the run has not begun");
        step("measuring five nodes");
        sleep_until(at(DEATH)?).await;
        step("killing a node");
        cluster.kill(KILLED)?;
        sleep_until(at(CUT)?).await;
        step("cutting a node off");
        cluster.network().context("the nodes are not isolated")?.cut(CUT_OFF)?;
        sleep_until(at(HEAL)?).await;
        step("ending the cut");
        cluster.network().context("the nodes are not isolated")?.heal(CUT_OFF)
    };
    let (report, ()) = tokio::try_join!(run(workload, options), events)?;
    let mut ticks = Vec::new();
    while let Ok(tick) = ticked.try_recv() {
        ticks.push(tick);
    }
    course(&ticks, &report)
}

fn seconds(number: u32) -> Duration {
    Duration::from_secs(u64::from(number))
}

fn course(ticks: &[RunTick], report: &Report) -> anyhow::Result<Course> {
    // The end of an interval, in seconds after the warm-up.
    let end = |tick: &RunTick| tick.elapsed.as_secs_f64() - WARM_UP.as_secs_f64();
    let intervals: Vec<(f64, f64)> = ticks.iter().map(|tick| (end(tick), tick.throughput_tps)).collect();
    ensure!(!intervals.is_empty(), "no interval was measured");
    let row = |tick: &RunTick| FigureRow {
        line: LINE.to_owned(),
        x: end(tick).round(),
        values: Ok(vec![tick.throughput_tps, tick.mean_ms, tick.p99_ms]),
    };
    let rows = ticks.iter().filter(|tick| end(tick) > 0.5).map(row).collect();
    let recovery = |event, next| recovery_s(&intervals, event, next);
    let notes = vec![
        format!("recovery after the death of a node at {DEATH} s: {:.0} s", recovery(DEATH, CUT)),
        format!("recovery after the begin of the cut at {CUT} s: {:.0} s", recovery(CUT, HEAL)),
        format!("recovery after the end of the cut at {HEAL} s: {:.0} s", recovery(HEAL, END)),
        format!(
            "failed transactions: {}, lost connections: {}, retried after an error: {}, longest outage of a \
             database: {:.1} s",
            report.failed,
            report.lost_connections,
            report.errors.values().sum::<u64>(),
            report.availability.longest_outage_s
        ),
    ];
    Ok(Course { rows, notes, ..Course::default() })
}

/// The seconds from an event until the throughput stays at [`RECOVERED_SHARE`] of that before the
/// event for [`STABLE`] intervals. All seconds until the next event, if it never does.
fn recovery_s(intervals: &[(f64, f64)], event: u32, next: u32) -> f64 {
    let (event, next) = (f64::from(event), f64::from(next));
    let between = |from: f64, to: f64| -> Vec<(f64, f64)> {
        intervals.iter().copied().filter(|(end, _)| *end > from + 0.5 && *end < to + 0.5).collect()
    };
    let before = between(event - 20.0, event);
    let mean = before.iter().map(|(_, tps)| tps).sum::<f64>() / before.len().max(1) as f64;
    let after = between(event, next);
    let is_stable = |of: &[(f64, f64)]| of.iter().all(|(_, tps)| *tps >= mean * RECOVERED_SHARE);
    let stable = after.windows(STABLE).position(is_stable);
    stable.map_or(next - event, |lost| lost as f64)
}

#[cfg(test)]
mod tests {
    use super::recovery_s;

    #[test]
    fn recovery_ends_when_the_throughput_is_stable() {
        let throughput = |second: u32| match second {
            31 => 0.0,
            33 => 60.0,
            60 => 10.0,
            _ => 100.0,
        };
        let intervals: Vec<(f64, f64)> = (1..=100).map(|end| (f64::from(end), throughput(end))).collect();
        assert_eq!(recovery_s(&intervals, 30, 50), 3.0);
        assert_eq!(recovery_s(&intervals, 30, 34), 4.0, "it is not stable before the next event");
        assert_eq!(recovery_s(&intervals, 70, 100), 0.0);
    }
}

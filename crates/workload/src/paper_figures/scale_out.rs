//! Scaling out from one node to two while the load is doubled, and back (Karyakin's thesis, 5).
//!
//! ```text
//!  one phase  one phase  four phases             one phase  two phases
//!  | load     | twice    | half of the tenants   | load     | they are moved back |
//!  |          | the load | are moved             |          | (disk-bound only)   |
//!  0          T          2T                      6T         7T                    9T
//! ```
//!
//! A tenant is a warehouse of the thesis. Each owner may use a third of a core, so that the second
//! node adds capacity on one machine. Clients are connected to a third node. The schedule is that
//! of the thesis: transactions that are too late are cancelled.

use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use rustix::process::Pid;
use tempfile::TempDir;
use tokio::time::{Instant, sleep_until};

use super::{Bench, Course, Experiment, FigureRow, MIN_MEMORY_BYTES, Measure, measure};
use crate::arrival::{Arrival, Shape};
use crate::client::Client;
use crate::measure::Latencies;
use crate::report::RunFile;
use crate::run::{IntervalRecord, Recorder, RunOptions, run};
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;
use crate::tpcc::Tpcc;

const GATEWAY: usize = 0;
const OWNERS: [usize; 2] = [1, 2];
/// CPUs of each owner.
const CPUS: f64 = 1.0 / 3.0;
const TENANTS: u32 = 8;
/// Terminals of a tenant.
const CONNECTIONS: usize = 4;
const WAREHOUSE_BYTES: f64 = 90e6;

pub(super) const THROUGHPUT: Measure =
    measure("throughput_tps", "Throughput of all tenants", "transactions/s");
pub(super) const RESPONSE: Measure = measure("mean_ms", "Mean latency from the scheduled start", "ms");
pub(super) const NETWORK: Measure =
    measure("network_mb_s", "Network traffic of the machine, clients included", "MB/s");
pub(super) const MIGRATING: Measure =
    measure("migrating_tps", "Throughput of the tenants that are moved", "transactions/s");
pub(super) const STAYING: Measure =
    measure("staying_tps", "Throughput of the tenants that stay", "transactions/s");
pub(super) const DOWN: Measure = measure("down_intervals", "Intervals without an ended transaction", "");
pub(super) const WORST: Measure =
    measure("worst_tps", "Throughput of the slowest tenant in each 10 s", "transactions/s");

/// What limits a node.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Bound {
    /// The cache is a quarter of the data, as in the thesis.
    Disk,
    /// The data fits into memory.
    Cpu,
    /// The same, and clients do not pause.
    CpuMaximum,
}

/// What the rows of a figure are.
#[derive(Clone, Copy)]
pub(super) enum View {
    /// The figure's measures, every second.
    Time,
    /// [`DOWN`] of each tenant, in descending order.
    Down,
    /// [`WORST`], every ten seconds.
    Worst,
    /// [`THROUGHPUT`] that a share of the seconds before the load rises does not exceed; the share
    /// is the x axis.
    Distribution,
}

/// The experiment: one run per mechanism.
pub(super) struct ScaleOut {
    pub(super) bound: Bound,
    pub(super) mechanisms: &'static [&'static str],
    pub(super) view: View,
}

impl Bound {
    /// The load on the first node before it is doubled, as a share of its capacity: 50 of 60 and
    /// 750 of 1,130 transactions.
    fn base_load(self) -> f64 {
        if self == Bound::Disk { 0.83 } else { 0.66 }
    }

    /// How late a transaction may start, and the length of a down interval.
    fn tolerance_s(self) -> u32 {
        if self == Bound::Disk { 5 } else { 1 }
    }

    /// The load in each phase, in multiples of the first.
    fn steps(self) -> &'static [u32] {
        if self == Bound::Disk { &[1, 2, 2, 2, 2, 2, 1, 1, 1] } else { &[1, 2, 2, 2, 2, 2] }
    }

    /// The data of all tenants, over the memory of a node.
    fn data_over_memory(self) -> f64 {
        if self == Bound::Disk { 4.0 } else { 0.5 }
    }
}

impl Experiment for ScaleOut {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move {
            let mut course = Course::default();
            for mechanism in self.mechanisms.iter().filter(|name| bench.arguments.wants(name)) {
                bench.step(&format!("scaling out by {mechanism}"));
                match self.observe(mechanism, bench).await {
                    Ok(observed) => self.record(&mut course, mechanism, &observed, bench),
                    Err(error) => course.rows.push(FigureRow {
                        line: (*mechanism).to_owned(),
                        x: 0.0,
                        values: Err(format!("{error:#}")),
                    }),
                }
            }
            Ok(course)
        }
        .boxed_local()
    }
}

/// What clients observed: those of the tenants that are moved, and those of the others.
struct Observed {
    migrating: RunFile,
    staying: RunFile,
    /// The rate while the load is doubled.
    doubled_tps: Option<f64>,
    /// The begin and the end of the moves, there and back, in seconds.
    spans: Vec<(f64, f64)>,
}

impl ScaleOut {
    async fn observe(&self, mechanism: &str, bench: &Bench<'_>) -> anyhow::Result<Observed> {
        let memory_bytes = bench.arguments.scaled().memory_bytes.unwrap_or(match self.bound {
            Bound::Disk => MIN_MEMORY_BYTES,
            _ => MIN_MEMORY_BYTES * 3,
        });
        let phase = bench.arguments.time();
        let workload = workload(memory_bytes as f64 * self.bound.data_over_memory());
        let setup = ClusterSetup { store: ClusterStore::Private, memory_bytes, ..ClusterSetup::default() };
        let mut cluster = Cluster::start(bench.binary, setup).await?;
        let databases = tenants::names("warehouse_", TENANTS);
        tenants::create(&cluster.target(GATEWAY), &databases, |_| ()).await?;
        let mut admin = Client::connect(&cluster.target(GATEWAY)).await?;
        move_all(&mut admin, &databases, cluster.name(OWNERS[0]), "live").await?;
        let process = *cluster.processes(OWNERS[0])?.pids()?.first().context("the node has no process")?;
        let closed = |databases: &[String], measure| RunOptions {
            databases: databases.to_vec(),
            connections: CONNECTIONS,
            warm_up: Duration::ZERO,
            measure,
            reconnect_timeout: Duration::from_secs(30),
            down_interval_seconds: self.bound.tolerance_s() as usize,
            server_processes: Pid::from_raw(process).into_iter().collect(),
            ..RunOptions::new(cluster.target(GATEWAY))
        };
        run(workload.clone(), closed(&databases, Duration::from_secs(1))).await?;
        let calibration = closed(&databases, phase);
        let (migrating, staying) = databases.split_at(databases.len() / 2);
        let length = phase * self.bound.steps().len() as u32;
        let [migrating_load, staying_load] = [closed(migrating, length), closed(staying, length)];
        let [source, destination] = OWNERS.map(|owner| cluster.name(owner).to_owned());
        for owner in OWNERS {
            cluster.limit_cpus(owner, CPUS)?;
        }
        let capacity = run(workload.clone(), calibration).await?.complete()?.throughput_tps;
        let base_tps = capacity * self.bound.base_load();
        let arrival = self.arrival(base_tps / 2.0)?;
        let recorder = Recorder::new();
        let moving = async {
            let opened = recorder.opened().await?;
            let mut spans = vec![];
            let second = |at: Instant| at.duration_since(opened).as_secs_f64();
            sleep_until(opened + phase * 2).await;
            for (to, at) in [(&destination, 2), (&source, 7)] {
                if at < self.bound.steps().len() as u32 {
                    sleep_until(opened + phase * at).await;
                    let begun = Instant::now();
                    move_all(&mut admin, migrating, to, mechanism).await?;
                    spans.push((second(begun), second(Instant::now())));
                }
            }
            anyhow::Ok(spans)
        };
        let directory = tempfile::tempdir()?;
        let load = async |options: RunOptions, name: &str| {
            let output = Some(directory.path().join(name));
            let options = RunOptions { output, arrival: arrival.clone(), ..options };
            run(workload.clone(), options).await.map(drop)
        };
        let migrating_load = RunOptions { watcher: Some(recorder.watcher()), ..migrating_load };
        let (_, _, spans) =
            tokio::try_join!(load(migrating_load, "migrating"), load(staying_load, "staying"), moving)?;
        let doubled_tps = (self.bound != Bound::CpuMaximum).then_some(base_tps * 2.0);
        let [migrating, staying] = [read(&directory, "migrating")?, read(&directory, "staying")?];
        Ok(Observed { migrating, staying, doubled_tps, spans })
    }

    /// The load of half of the tenants.
    fn arrival(&self, rate_tps: f64) -> anyhow::Result<Arrival> {
        if self.bound == Bound::CpuMaximum {
            return Ok(Arrival::Closed);
        }
        let steps: Vec<String> = self.bound.steps().iter().map(u32::to_string).collect();
        let shape: Shape = format!("steps:{}", steps.join(",")).parse()?;
        let tolerance = Some(Duration::from_secs(u64::from(self.bound.tolerance_s())));
        Ok(Arrival::Open { rate_tps, shape, tolerance })
    }

    fn record(&self, course: &mut Course, mechanism: &str, observed: &Observed, bench: &Bench<'_>) {
        let row = |x, values| FigureRow { line: mechanism.to_owned(), x, values: Ok(values) };
        let phase_s = bench.arguments.time().as_secs_f64();
        match self.view {
            View::Time => {
                let spans = observed.spans.iter().map(|(from, to)| (mechanism.to_owned(), *from, *to));
                course.spans.extend(spans);
                course.rows.extend(observed.seconds().map(|(at_s, migrating, staying)| {
                    let value = |measure: &Measure| value(measure, migrating, staying);
                    row(at_s, bench.figure.measures.iter().map(value).collect())
                }));
            }
            View::Down => {
                let tenants = observed.migrating.tenants.iter().chain(&observed.staying.tenants);
                let mut down: Vec<u64> = tenants.map(|tenant| tenant.down_intervals).collect();
                down.sort_unstable_by(|left, right| right.cmp(left));
                let rows = (1..).zip(down).map(|(tenant, down)| row(f64::from(tenant), vec![down as f64]));
                course.rows.extend(rows);
            }
            View::Worst => {
                let slots = |file: &RunFile| {
                    file.report
                        .as_ref()
                        .map_or_else(Vec::new, |report| report.availability.worst_tenant_tps.clone())
                };
                let both = slots(&observed.migrating).into_iter().zip(slots(&observed.staying));
                let rows = (0..).zip(both).map(|(slot, (one, other))| {
                    row(f64::from(slot) * 10.0 + 5.0, vec![f64::min(one, other)])
                });
                course.rows.extend(rows);
            }
            View::Distribution => {
                let calm = observed.seconds().filter(|(at_s, ..)| *at_s <= phase_s * 2.0);
                let mut rates: Vec<f64> =
                    calm.map(|(_, migrating, staying)| value(&THROUGHPUT, migrating, staying)).collect();
                rates.sort_unstable_by(f64::total_cmp);
                let of = rates.len().max(1) as f64;
                let rows = (1..).zip(rates).map(|(rank, rate)| row(f64::from(rank) / of * 100.0, vec![rate]));
                course.rows.extend(rows);
            }
        }
        course.notes.push(observed.note(mechanism, phase_s));
    }
}

impl Observed {
    /// The intervals of both groups of tenants, with the time at which they ended.
    fn seconds(&self) -> impl Iterator<Item = (f64, &IntervalRecord, &IntervalRecord)> {
        let both = self.migrating.intervals.iter().zip(&self.staying.intervals);
        both.filter(|(one, _)| one.ends_s > 0.5).map(|(one, other)| (one.ends_s.round(), one, other))
    }

    /// How long the moves took, and what they cost.
    fn note(&self, mechanism: &str, phase_s: f64) -> String {
        let cancelled = |from_s: f64, to_s: f64| -> u64 {
            let within = self.seconds().filter(|(at_s, ..)| *at_s > from_s && *at_s <= to_s);
            within
                .flat_map(|(_, one, other)| one.kinds.iter().chain(&other.kinds))
                .map(|kind| kind.report.cancelled)
                .sum()
        };
        let failed =
            |file: &RunFile| file.report.as_ref().map_or(0, |report| report.failed + report.lost_connections);
        let mut note = format!("{mechanism}: {} failed", failed(&self.migrating) + failed(&self.staying));
        for ((from, to), (begin, end, share)) in self.spans.iter().zip([(2.0, 6.0, 1.0), (7.0, 9.0, 0.5)]) {
            let lost = self.doubled_tps.map_or_else(String::new, |rate_tps| {
                let cancelled = cancelled(begin * phase_s, end * phase_s);
                format!(", lost work {:.1} s", cancelled as f64 / (rate_tps * share))
            });
            note.push_str(&format!("; moves took {:.1} s{lost}", to - from));
        }
        note
    }
}

/// A value of an interval of both groups of tenants.
fn value(measure: &Measure, migrating: &IntervalRecord, staying: &IntervalRecord) -> f64 {
    let throughput = |interval: &IntervalRecord| {
        interval.kinds.iter().map(|kind| kind.report.succeeded()).sum::<u64>() as f64 / interval.seconds
    };
    match measure.name {
        "migrating_tps" => throughput(migrating),
        "staying_tps" => throughput(staying),
        "network_mb_s" => {
            let bytes = migrating.usage.as_ref().map_or(f64::NAN, |usage| usage.received_bytes as f64);
            bytes / migrating.seconds / 1e6
        }
        "mean_ms" => {
            let mut all = Latencies::new();
            migrating.kinds.iter().chain(&staying.kinds).for_each(|kind| all.add(&kind.samples_us));
            let latency = all.summary();
            if latency.count > 0 { latency.mean_ms } else { f64::NAN }
        }
        _ => throughput(migrating) + throughput(staying),
    }
}

/// One warehouse per tenant, all tenants together with this size.
fn workload(bytes: f64) -> Tpcc {
    let part = (bytes / f64::from(TENANTS) / WAREHOUSE_BYTES).min(1.0);
    let rows = |count: f64| (count * part).max(100.0) as u32;
    Tpcc { items: rows(100_000.0), customers: rows(3_000.0), one_warehouse: true, ..Tpcc::default() }
}

async fn move_all(admin: &mut Client, databases: &[String], to: &str, mechanism: &str) -> anyhow::Result<()> {
    for name in databases {
        let statement = format!("ALTER DATABASE {name} MOVE TO '{to}' USING '{mechanism}'");
        admin.query(&statement).await.with_context(|| format!("the move of {name} failed"))?;
    }
    Ok(())
}

fn read(directory: &TempDir, name: &str) -> anyhow::Result<RunFile> {
    let path: &Path = &directory.path().join(name);
    let file = std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    RunFile::read(BufReader::new(file))
}

//! The laboratory: a tenant under an open-loop load is moved once, by each mechanism in turn, and
//! its clients record every latency. `bench migrate --mechanism all` draws all of them in one
//! picture, and the figures of moves (`crate::paper_figures`) vary the load.
//!
//! ```text
//!  load, fill the cache |  before  | move |  after  |
//!                       0          ^ begin  ^ end
//! ```
//!
//! Each trial has a cluster of its own: a gateway that clients connect to and two owners. Stop,
//! flush and albatross use a common store (S3), the others stores of the nodes.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use tokio::time::{Instant, sleep, sleep_until};

use super::{GATEWAY, OWNERS, Reported, newest_move};
use crate::arrival::Arrival;
use crate::client::Client;
use crate::measure::Sample;
use crate::run::{Moments, RunOptions, run, run_while};
use crate::server::{Cluster, ClusterSetup, ClusterStore, Wan};
use crate::tenants;
use crate::tpcc::Tpcc;
use crate::workload::Workload;
use crate::ycsb::Ycsb;

/// All mechanisms, the baselines first.
pub(crate) const MECHANISMS: [&str; 8] =
    ["stop", "flush", "albatross", "live", "delta", "on-demand", "bulk", "sql"];
/// No mechanism: all tenants of the node are moved one after the other, by [`MACHINE_USING`]
/// (ShuttleDB moves the virtual machine).
pub(crate) const MACHINE: &str = "machine";
const MACHINE_USING: &str = "live";
/// No move at all.
pub(crate) const NORMAL: &str = "normal";

/// The tenant that is moved, and the prefix of the others on its node.
const TENANT: &str = "moved";
const OTHERS: &str = "other_";

/// Before the window: the first seconds of a run fill the cache.
const WARM_UP: Duration = Duration::from_secs(2);
/// The resolution of pictures.
const TICK: Duration = Duration::from_millis(200);
/// Transactions that were caught by a move are answered at most this long after its end.
const CAUGHT: Duration = Duration::from_secs(2);
/// A run that is ended by what happens meanwhile may last this long.
pub(crate) const MAX_RUN: Duration = Duration::from_secs(3600);

/// Returns true if a mechanism moves tenants between stores of the nodes.
pub(crate) fn is_private(mechanism: &str) -> bool {
    !matches!(mechanism, "albatross" | "flush" | "stop" | NORMAL)
}

/// The load of the tenant that is moved.
#[derive(Clone)]
pub(crate) enum TrialLoad {
    Ycsb(Ycsb),
    Tpcc(Tpcc),
}

/// A move under load.
#[derive(Clone)]
pub(crate) struct Trial {
    pub(crate) mechanism: &'static str,
    pub(crate) load: TrialLoad,
    /// `None` is a closed loop.
    pub(crate) rate_tps: Option<f64>,
    pub(crate) connections: usize,
    /// The memory of each node.
    pub(crate) memory_bytes: u64,
    /// Other tenants of the same size on the source, without load.
    pub(crate) others: u32,
    /// The destination is at another site.
    pub(crate) is_wide: bool,
    pub(crate) before: Duration,
    pub(crate) after: Duration,
}

/// What the clients of a moved tenant observed.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Observed {
    pub(crate) mechanism: &'static str,
    /// Transactions that failed.
    pub(crate) failed: u64,
    /// Attempts that the servers rejected. The clients repeated them.
    pub(crate) aborted: u64,
    /// The longest latency because of the move: above the longest one before it.
    pub(crate) pause_ms: f64,
    /// How long the tenant accepted no statements.
    pub(crate) freeze_ms: f64,
    pub(crate) bytes: f64,
    /// Of the move, or of all moves of a node.
    pub(crate) duration_ms: f64,
    pub(crate) before_ms: f64,
    pub(crate) during_ms: f64,
    pub(crate) after_ms: f64,
    /// When it began and ended, in seconds of the window.
    #[serde(skip)]
    pub(crate) span: (f64, f64),
    #[serde(skip)]
    pub(crate) intervals: Vec<Interval>,
    /// All latencies of the window.
    #[serde(skip)]
    pub(crate) latencies: Vec<Sample>,
    /// Of the mechanism `delta`: the move to the source, which left an archive.
    #[serde(skip)]
    pub(crate) outward: Option<Reported>,
}

/// An interval of the window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    /// The end, in seconds of the window.
    pub(crate) at_s: f64,
    pub(crate) throughput_tps: f64,
    pub(crate) mean_ms: f64,
    pub(crate) longest_ms: f64,
}

impl Observed {
    /// The mean latency after the move, above that before it.
    pub(crate) fn increase_percent(&self) -> f64 {
        (self.after_ms / self.before_ms - 1.0) * 100.0
    }
}

impl Trial {
    /// Runs the trial with the executable `binary`.
    pub(crate) async fn observe(&self, binary: &Path) -> anyhow::Result<Observed> {
        match &self.load {
            TrialLoad::Ycsb(workload) => self.observe_with(workload.clone(), binary).await,
            TrialLoad::Tpcc(workload) => self.observe_with(workload.clone(), binary).await,
        }
    }

    async fn observe_with<W: Workload>(&self, workload: W, binary: &Path) -> anyhow::Result<Observed> {
        let cluster = Cluster::start(binary, self.setup()).await?;
        for owner in OWNERS {
            cluster.wait_until_hears(owner, cluster.nodes()).await?;
        }
        let mut names = vec![TENANT.to_owned()];
        names.extend(tenants::names(OTHERS, self.others));
        tenants::create(&cluster.target(GATEWAY), &names, |_| ()).await?;
        let mut admin = Client::connect(&cluster.target(GATEWAY)).await?;
        // Where an earlier move has left an archive, the tenant is moved back.
        let goes_back = self.mechanism == "delta";
        for name in &names {
            let using = if is_private(self.mechanism) { "live" } else { "flush" };
            admin.query(&self.statement(&cluster, name, OWNERS[0], using)).await?;
        }
        let options = self.options(&cluster);
        // Loads the data.
        let loading = RunOptions {
            databases: names.clone(),
            measure: TICK,
            arrival: Arrival::Closed,
            ..options.clone()
        };
        run(workload.clone(), loading).await?;
        let (mut to, mut outward) = (OWNERS[1], None);
        if goes_back {
            admin.query(&self.statement(&cluster, TENANT, OWNERS[1], "live")).await?;
            outward = Some(newest_move(&mut admin, TENANT).await?);
            to = OWNERS[0];
        }
        let (moved, using) = match self.mechanism {
            MACHINE => (&names[..], MACHINE_USING),
            NORMAL => (&[][..], ""),
            mechanism => (&names[..1], mechanism),
        };
        let acts = async |opened: Instant| {
            sleep_until(opened + self.before).await;
            let begun = Instant::now();
            for name in moved {
                admin.query(&self.statement(&cluster, name, to, using)).await.context("the move failed")?;
            }
            let ended = Instant::now();
            sleep(self.after.max(CAUGHT) + TICK).await;
            anyhow::Ok((opened, begun, ended))
        };
        let (moments, times) = run_while(workload, options, acts).await?;
        let mut reports = Vec::new();
        for name in moved {
            reports.push(newest_move(&mut admin, name).await?);
        }
        admin.close().await?;
        let outward = outward.filter(|_| goes_back);
        Ok(Observed { outward, ..observed(self, &moments, times, &reports) })
    }

    /// The statement that moves a tenant. Between sites a copy takes less than the rate of a
    /// connection, because it shares its connection with heartbeats, which would be late otherwise.
    fn statement(&self, cluster: &Cluster, tenant: &str, to: usize, using: &str) -> String {
        let limit_kib = Wan::coasts(OWNERS[1]).bytes_per_s * 3 / 4 / 1024;
        let limit = if self.is_wide { format!(" LIMIT '{limit_kib}kB'") } else { String::new() };
        format!("ALTER DATABASE {tenant} MOVE TO '{}' USING '{using}'{limit}", cluster.name(to))
    }

    fn setup(&self) -> ClusterSetup {
        let arguments = match self.mechanism {
            "delta" => vec!["--archives".to_owned(), (self.memory_bytes * 16).to_string()],
            _ => Vec::new(),
        };
        ClusterSetup {
            store: if is_private(self.mechanism) { ClusterStore::Private } else { ClusterStore::S3 },
            memory_bytes: self.memory_bytes,
            isolated: self.is_wide,
            wan: self.is_wide.then(|| Wan::coasts(OWNERS[1])),
            arguments,
            ..ClusterSetup::default()
        }
    }

    fn options(&self, cluster: &Cluster) -> RunOptions {
        RunOptions {
            connections: self.connections,
            arrival: self.rate_tps.map_or(Arrival::Closed, Arrival::poisson),
            warm_up: WARM_UP,
            measure: MAX_RUN,
            tick: TICK,
            // A move may close connections.
            reconnect_timeout: Duration::from_secs(30),
            ..RunOptions::new(cluster.target(GATEWAY).with_database(TENANT))
        }
    }
}

fn observed(
    trial: &Trial,
    moments: &Moments,
    (opened, begun, ended): (Instant, Instant, Instant),
    reports: &[Reported],
) -> Observed {
    let second = |at: Instant| at.duration_since(opened).as_secs_f64();
    let before = moments.between(opened, begun).latency();
    // At least one transaction has been answered by then.
    let answered = moments.0.iter().find(|moment| moment.at > ended && moment.tick.throughput_tps > 0.0);
    let caught_until = answered.map_or(ended, |moment| moment.at).max(ended + CAUGHT);
    let caught = moments.between(begun, caught_until).latency();
    let after = moments.between(ended, ended + trial.after).latency();
    let all = moments.between(opened, ended + trial.after);
    let interval = |moment: &crate::run::Moment| Interval {
        at_s: second(moment.at),
        throughput_tps: moment.tick.throughput_tps,
        mean_ms: if moment.tick.throughput_tps > 0.0 { moment.tick.mean_ms } else { f64::NAN },
        longest_ms: moment.tick.samples_us.last().map_or(f64::NAN, |(longest, _)| *longest as f64 / 1e3),
    };
    Observed {
        mechanism: trial.mechanism,
        failed: all.failed() + all.lost_connections(),
        aborted: all.rejected(),
        pause_ms: if reports.is_empty() { 0.0 } else { (caught.max_ms - before.max_ms).max(0.0) },
        freeze_ms: reports.iter().map(|report| report.freeze_ms).fold(0.0, f64::max),
        bytes: reports.iter().map(|report| report.bytes).sum(),
        duration_ms: ended.duration_since(begun).as_secs_f64() * 1e3,
        before_ms: before.mean_ms,
        during_ms: caught.mean_ms,
        after_ms: after.mean_ms,
        span: (second(begun), second(ended)),
        intervals: all.0.iter().map(interval).collect(),
        latencies: all.samples(),
        outward: None,
    }
}

//! The load monitor: what this node and its partitions do, as a report per second.
//!
//! Level 1 is always on. It costs nothing per statement: once per second it computes differences of
//! the counters of [`crate::tenant_stats`] and of the engine, for those partitions that were used.
//! Level 2 counts accesses per key ([`keys`]).

mod keys;
mod process;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fulmar_control::report::{MoveReport, NodeReport, PartitionReport};
use fulmar_engine::{Engine, PartitionStatistics};
use fulmar_meta::{Catalog, SYSTEM_PARTITION};
use fulmar_pages::PartitionId;
use hashbrown::HashSet;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

pub use self::keys::{KeyMode, KeyMonitoring};
pub(crate) use self::keys::{KeyMonitor, KeySampler};
use self::process::ProcessTotals;
use crate::Result;
use crate::activity;
use crate::cluster::Cluster;
use crate::memory::SessionMemory;
use crate::tenant_stats::{Reported, TenantCounts, TenantStatsRegistry};

/// The length of a report's window.
const WINDOW: Duration = Duration::from_secs(1);
/// The utilisation is smoothed over this time, so that short bursts do not matter.
const SMOOTHING_S: f64 = 10.0;
/// Number of windows after which the sizes of unused partitions are read again.
const IDLE_WINDOWS: u32 = 10;
/// The name of a node without a cluster in its report.
pub(crate) const SINGLE_NODE: &str = "local";

/// A node, and its report or why there is none.
pub(crate) type NodeLoad = (String, Result<NodeReport>);

/// What a load monitor observes.
pub(crate) struct Observed {
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) tenants: Arc<TenantStatsRegistry>,
    pub(crate) sessions: Arc<SessionMemory>,
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
    /// CPUs that count as the node's capacity, if they are not those that the process can use.
    pub(crate) cpus: Option<f64>,
    /// The memory budget of the node.
    pub(crate) memory_bytes: u64,
}

/// Measures the load of this node.
pub(crate) struct LoadMonitor {
    observed: Observed,
    keys: Arc<KeyMonitor>,
    /// The smoothed utilisation, as the bits of an f64. Not in `state`, which is locked while the cluster
    /// is asked for this node.
    utilisation: AtomicU64,
    state: Mutex<State>,
}

struct State {
    at: Instant,
    process: ProcessTotals,
    /// Windows since the last one in which all open partitions were reported.
    windows: u32,
    /// The partitions that were used since then.
    recent: HashSet<PartitionId>,
    /// The partitions that were open and not used then.
    idle: Arc<Vec<IdlePartition>>,
    /// The report of the last window, with the partitions of `recent`.
    report: Arc<NodeReport>,
}

/// The counters of a partition.
struct Totals {
    gateway: TenantCounts,
    engine: PartitionStatistics,
}

/// What is reported of an open partition that is not used.
struct IdlePartition {
    partition: PartitionId,
    size_bytes: u64,
    memory_bytes: u64,
    smoothed_us: u64,
}

impl LoadMonitor {
    pub(crate) fn new(observed: Observed, keys: Arc<KeyMonitor>) -> LoadMonitor {
        let state = State {
            at: Instant::now(),
            process: ProcessTotals::read(),
            windows: 0,
            recent: HashSet::new(),
            idle: Arc::default(),
            report: Arc::default(),
        };
        LoadMonitor { observed, keys, utilisation: AtomicU64::new(0), state: Mutex::new(state) }
    }

    /// Measures until `closing` is cancelled.
    pub(crate) async fn run(self: Arc<Self>, closing: CancellationToken) {
        loop {
            self.measure(Instant::now());
            if closing.run_until_cancelled(tokio::time::sleep(WINDOW)).await.is_none() {
                return;
            }
        }
    }

    /// The report of the last window.
    pub(crate) fn report(&self, with_keys: bool) -> NodeReport {
        let (report, idle) = {
            let state = self.state.lock();
            (state.report.clone(), state.idle.clone())
        };
        let mut report = NodeReport::clone(&report);
        let used: HashSet<u64> = report.partitions.iter().map(|of| of.partition).collect();
        let is_idle = |of: &&IdlePartition| !used.contains(&of.partition.0);
        report.partitions.extend(idle.iter().filter(is_idle).filter_map(|of| self.idle_report(of)));
        report.partitions.sort_unstable_by_key(|of| of.partition);
        report.idle_partitions = report.idle_partitions.saturating_sub(report.partitions.len() as u64);
        if with_keys {
            for of in &mut report.partitions {
                of.keys = self.keys.report(PartitionId(of.partition));
            }
        }
        report
    }

    /// The share of the capacity that the node has used in the last ten seconds or so.
    pub(crate) fn utilisation(&self) -> f64 {
        f64::from_bits(self.utilisation.load(Ordering::Relaxed))
    }

    /// Requests that accesses per key are counted for a window.
    pub(crate) fn request_keys(&self) {
        self.keys.request();
    }

    /// The partitions that executed statements in the last window, those with most statements first,
    /// with the smoothed execution times of these in microseconds.
    pub(crate) fn latencies(&self) -> Vec<(PartitionId, u64)> {
        let report = self.state.lock().report.clone();
        let mut used: Vec<&PartitionReport> =
            report.partitions.iter().filter(|of| of.requests_per_s > 0.0).collect();
        used.sort_by(|one, other| other.requests_per_s.total_cmp(&one.requests_per_s));
        let now = |of: &PartitionReport| {
            let partition = PartitionId(of.partition);
            Some((partition, self.observed.tenants.counts(partition)?.smoothed_us))
        };
        used.into_iter().filter_map(now).collect()
    }

    /// The reports of all nodes.
    pub(crate) async fn reports(&self, with_keys: bool) -> Vec<NodeLoad> {
        match &self.observed.cluster {
            Some(cluster) => cluster.load_reports(with_keys).await,
            None => {
                let report = self.report(with_keys);
                vec![(report.node.clone(), Ok(report))]
            }
        }
    }

    /// Ends the window.
    fn measure(&self, now: Instant) {
        let mut state = self.state.lock();
        let seconds = now.saturating_duration_since(state.at).as_secs_f64();
        let process = ProcessTotals::read();
        let cpu = process.cpu.saturating_sub(state.process.cpu).as_secs_f64();
        let read_bytes = process.read_bytes.saturating_sub(state.process.read_bytes);
        let written_bytes = process.written_bytes.saturating_sub(state.process.written_bytes);
        let (requests, partitions) = self.measure_partitions(&mut state, seconds);
        let (node, owned) = self.node();
        let report = NodeReport {
            node,
            at_unix_ms: activity::now_ms(),
            window_s: seconds,
            capacity: self.observed.cpus.unwrap_or_else(process::available_cpus),
            cpu: rate(cpu, seconds),
            memory: self.observed.memory_bytes,
            memory_used: self.observed.engine.used_memory_bytes() + self.observed.sessions.usage().used_bytes,
            read_bytes_per_s: rate(read_bytes as f64, seconds),
            written_bytes_per_s: rate(written_bytes as f64, seconds),
            requests_per_s: rate(requests as f64, seconds),
            moves: MoveReport::default(),
            partitions,
            idle_partitions: owned,
        };
        let (before, share) = (self.utilisation(), (seconds / SMOOTHING_S).min(1.0));
        let smoothed = before + (report.utilisation() - before) * share;
        self.utilisation.store(smoothed.to_bits(), Ordering::Relaxed);
        self.keys.tick(now, report.utilisation());
        (state.at, state.process, state.report) = (now, process, Arc::new(report));
    }

    /// The number of statements of all partitions, and the reports of those used recently.
    fn measure_partitions(&self, state: &mut State, seconds: f64) -> (u64, Vec<PartitionReport>) {
        let Observed { engine, tenants, .. } = &self.observed;
        let used: HashSet<PartitionId> = tenants.used().into_iter().collect();
        state.recent.extend(used.iter().copied());
        let mut requests = 0;
        let mut reports = Vec::new();
        for partition in state.recent.iter().copied() {
            let Some(stats) = tenants.get(partition) else { continue };
            let totals = self.totals(partition);
            let mut earlier = stats.reported.lock();
            let window = totals.gateway.since(&earlier.gateway);
            requests += window.statements;
            reports.extend(self.partition_report(partition, &totals, (&earlier, &window), seconds));
            *earlier = Reported {
                gateway: totals.gateway.to_earlier(),
                log_bytes: totals.engine.log_bytes,
                page_misses: totals.engine.page_misses,
            };
        }
        state.windows += 1;
        if state.windows >= IDLE_WINDOWS {
            state.windows = 0;
            let mut idle = Vec::new();
            for partition in engine.open_partitions() {
                if !used.contains(&partition) {
                    let Totals { gateway, engine } = self.totals(partition);
                    idle.push(IdlePartition {
                        partition,
                        size_bytes: engine.size_bytes.unwrap_or(0),
                        memory_bytes: engine.memory_bytes.unwrap_or(0),
                        smoothed_us: gateway.smoothed_us,
                    });
                }
            }
            (state.idle, state.recent) = (Arc::new(idle), used);
        }
        (requests, reports)
    }

    fn totals(&self, partition: PartitionId) -> Totals {
        let Observed { engine, tenants, .. } = &self.observed;
        Totals {
            gateway: tenants.counts(partition).unwrap_or_default(),
            engine: engine.partition_statistics(partition).unwrap_or_default(),
        }
    }

    /// The tenant of a partition. `None` if this node does not own it.
    fn tenant(&self, partition: PartitionId) -> Option<String> {
        let is_reported = partition != SYSTEM_PARTITION && self.owns(partition);
        let tenant = is_reported.then(|| self.observed.catalog.tenant_of(partition)).flatten();
        tenant.map(|tenant| tenant.name.clone())
    }

    fn idle_report(&self, idle: &IdlePartition) -> Option<PartitionReport> {
        Some(PartitionReport {
            partition: idle.partition.0,
            tenant: self.tenant(idle.partition)?,
            size: idle.size_bytes,
            memory: idle.memory_bytes,
            latency_ms: milliseconds(idle.smoothed_us),
            ..PartitionReport::default()
        })
    }

    /// The report of a partition, with what was counted in the window.
    fn partition_report(
        &self,
        partition: PartitionId,
        totals: &Totals,
        (earlier, counted): (&Reported, &TenantCounts),
        seconds: f64,
    ) -> Option<PartitionReport> {
        let per_second = |count: u64| rate(count as f64, seconds);
        let since = |now: u64, before: u64| per_second(now.saturating_sub(before));
        Some(PartitionReport {
            partition: partition.0,
            tenant: self.tenant(partition)?,
            cpu: rate(counted.busy_us as f64 / 1e6, seconds),
            requests_per_s: per_second(counted.statements),
            reads_per_s: per_second(counted.reads),
            writes_per_s: per_second(counted.writes),
            log_bytes_per_s: since(totals.engine.log_bytes, earlier.log_bytes),
            page_misses_per_s: since(totals.engine.page_misses, earlier.page_misses),
            errors_per_s: per_second(counted.errors),
            size: totals.engine.size_bytes.unwrap_or(0),
            memory: totals.engine.memory_bytes.unwrap_or(0),
            latency_ms: milliseconds(totals.gateway.smoothed_us),
            p50_ms: milliseconds(counted.quantile_us(50)),
            p95_ms: milliseconds(counted.quantile_us(95)),
            p99_ms: milliseconds(counted.quantile_us(99)),
            keys: None,
        })
    }

    fn owns(&self, partition: PartitionId) -> bool {
        let Some(cluster) = &self.observed.cluster else { return true };
        cluster.owner(partition).is_some_and(|owner| owner.node == cluster.this_node())
    }

    /// The name of this node, and the number of its partitions.
    fn node(&self) -> (String, u64) {
        let Some(cluster) = &self.observed.cluster else {
            return (SINGLE_NODE.to_owned(), self.observed.catalog.tenants().len() as u64);
        };
        let this = cluster.this_node();
        let info = cluster.nodes().into_iter().find(|node| node.id == this);
        info.map_or((this.to_string(), 0), |node| (node.name, node.partitions))
    }
}

fn milliseconds(us: u64) -> f64 {
    us as f64 / 1000.0
}

/// Per second. The first window may be empty.
fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

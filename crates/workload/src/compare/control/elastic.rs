//! A cluster for the cases in which the controller acts: nodes with a share of a core each, and one
//! without a limit, which clients connect to and which owns nothing.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::arrival::Arrival;
use crate::client::Client;
use crate::run::{Report, RunEvent, RunOptions, Watcher, run};
use crate::server::{AddedNodes, Cluster, ClusterSetup};
use crate::tenants;
use crate::ycsb::Ycsb;

/// CPUs of each node that owns tenants.
pub(crate) const CPUS: f64 = 1.0 / 3.0;
/// The latency that tenants are promised.
pub(crate) const OBJECTIVE_MS: f64 = 300.0;
/// The node that clients connect to.
pub(crate) const GATEWAY: usize = 0;
/// Connections of a tenant for each run.
const CONNECTIONS: usize = 4;
/// Connections of a run on a single tenant, which has to get the load of several.
const SINGLE_CONNECTIONS: usize = 32;
/// Time over which the capacity is measured.
const CALIBRATE: Duration = Duration::from_secs(10);

/// Statements whose execution takes longer than passing them on, so that the nodes with a limit are
/// the bottleneck: reads, sorts and joins (ShuttleDB 6.4). Few are updates, because their CPU time is
/// not proportional to their number: the busier a node is, the more of them share an object of the log.
pub(crate) fn workload() -> Ycsb {
    Ycsb {
        records: 2_000,
        tables: 2,
        operations: 1,
        reads: 58.0,
        sorts: 20.0,
        joins: 20.0,
        ..Ycsb::default()
    }
}

/// Which of the nodes a tenant is on at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// One after the other.
    Spread,
    /// Neighbouring tenants on the same node, equally many on each.
    Blocks,
    /// All on the first one.
    First,
}

impl Placement {
    /// The node of a tenant, from 0.
    fn node(self, number: usize, tenants: usize, owners: usize) -> usize {
        match self {
            Placement::Spread => number % owners,
            Placement::Blocks => number * owners / tenants,
            Placement::First => 0,
        }
    }
}

pub(crate) struct Elastic {
    pub(crate) cluster: Cluster,
    pub(crate) databases: Vec<String>,
    /// Transactions per second that the nodes can serve together.
    pub(crate) capacity_tps: f64,
}

impl Elastic {
    /// Starts `owners` nodes, and loads `count` tenants on them. The controller is off. It can add nodes
    /// to `added`.
    pub(crate) async fn start(
        binary: &Path,
        step: &dyn Fn(&str),
        (owners, placement): (usize, Placement),
        count: u32,
        added: Option<&AddedNodes>,
    ) -> anyhow::Result<Elastic> {
        step("starting etcd and the nodes");
        let mut arguments = vec!["--cpus".to_owned(), CPUS.to_string()];
        arguments.extend(added.into_iter().flat_map(AddedNodes::arguments));
        let setup = ClusterSetup { nodes: owners + 1, arguments, ..ClusterSetup::default() };
        let cluster = Cluster::start(binary, setup).await?;
        let databases = tenants::names("tenant_", count);
        tenants::create(&cluster.target(GATEWAY), &databases, |_| ()).await?;
        let mut elastic = Elastic { cluster, databases, capacity_tps: 0.0 };
        elastic.control(&[&format!("ALTER NODE '{}' FORBID", elastic.cluster.name(GATEWAY))]).await?;
        for (number, database) in elastic.databases.iter().enumerate() {
            let to = elastic.cluster.name(1 + placement.node(number, count as usize, owners));
            let objective = format!("ALTER DATABASE {database} SET latency_objective = '{OBJECTIVE_MS} ms'");
            let moved = format!("ALTER DATABASE {database} MOVE TO '{to}' USING flush");
            elastic.control(&[&objective, &moved]).await?;
        }
        step("loading");
        run(workload(), elastic.options(&elastic.databases, Duration::from_secs(1))).await?;
        for node in 1..=owners {
            elastic.cluster.limit_cpus(node, CPUS)?;
        }
        step("measuring the capacity");
        let closed = run(workload(), elastic.options(&elastic.databases, CALIBRATE)).await?.complete()?;
        elastic.capacity_tps = closed.throughput_tps;
        Ok(elastic)
    }

    /// Executes administrative statements.
    pub(crate) async fn control(&self, statements: &[&str]) -> anyhow::Result<()> {
        let mut admin = Client::connect(&self.cluster.target(GATEWAY)).await?;
        for statement in statements {
            admin.query(statement).await?;
        }
        Ok(admin.close().await?)
    }

    /// Changes settings of the controller.
    pub(crate) async fn configure(&self, settings: &[(&str, &str)]) -> anyhow::Result<()> {
        let change = |(name, value): &(&str, &str)| format!("ALTER SYSTEM SET control.{name} = '{value}'");
        let statements: Vec<String> = settings.iter().map(change).collect();
        self.control(&statements.iter().map(String::as_str).collect::<Vec<_>>()).await
    }

    /// The only column of a query's rows.
    pub(crate) async fn column(&self, sql: &str) -> anyhow::Result<Vec<String>> {
        let mut admin = Client::connect(&self.cluster.target(GATEWAY)).await?;
        let rows = admin.query(sql).await?;
        admin.close().await?;
        Ok(rows.into_iter().map(|row| row.into_iter().flatten().next().unwrap_or_default()).collect())
    }

    /// What the controller has decided, why, and what came of it.
    pub(crate) async fn decisions(&self) -> anyhow::Result<Vec<String>> {
        let sql = "SELECT substr(time, 12, 8) || ' ' || what || ': ' || why || coalesce('; ' || outcome, '') \
                   FROM fulmar.decisions ORDER BY number";
        self.column(sql).await
    }

    pub(crate) fn options(&self, databases: &[String], time: Duration) -> RunOptions {
        RunOptions {
            databases: databases.to_vec(),
            connections: if databases.len() == 1 { SINGLE_CONNECTIONS } else { CONNECTIONS },
            warm_up: Duration::ZERO,
            measure: time,
            ..RunOptions::new(self.cluster.target(GATEWAY))
        }
    }

    /// Runs tenants at a rate, or a rate over time, and records their latency.
    pub(crate) async fn load(
        &self,
        databases: &[String],
        arrival: Arrival,
        time: Duration,
        watched: &Watched,
    ) -> anyhow::Result<Report> {
        let options = RunOptions {
            arrival,
            watcher: Some(watched.watcher()),
            // A node that leaves closes its connections.
            reconnect_timeout: Duration::from_secs(30),
            ..self.options(databases, time)
        };
        run(workload(), options).await
    }
}

/// The latency of some tenants in each second of a run.
#[derive(Clone, Default)]
pub(crate) struct Watched(Arc<Mutex<Vec<Second>>>);

/// One second of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Second {
    /// Its end.
    pub(crate) at: Instant,
    /// `None` if nothing was answered.
    pub(crate) p99_ms: Option<f64>,
}

impl Second {
    pub(crate) fn is_late(&self) -> bool {
        self.p99_ms.is_none_or(|p99_ms| p99_ms > OBJECTIVE_MS)
    }
}

impl Watched {
    fn watcher(&self) -> Watcher {
        let seconds = self.0.clone();
        Arc::new(move |event: &RunEvent| {
            // Answers that come after the end make an interval of their own.
            if let RunEvent::Tick(tick) = event
                && tick.elapsed <= tick.of
            {
                let p99_ms = (tick.throughput_tps > 0.0).then_some(tick.p99_ms);
                let second = Second { at: Instant::now(), p99_ms };
                seconds.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(second);
            }
        })
    }

    /// The highest p99 of each five seconds from a time on, in milliseconds. A second without answers
    /// counts as `-`.
    pub(crate) fn timeline(&self, begun: Instant) -> String {
        let mut worst: Vec<Option<f64>> = Vec::new();
        for second in self.since(begun) {
            let bucket = second.at.duration_since(begun).as_secs() as usize / 5;
            worst.resize(worst.len().max(bucket + 1), Some(0.0));
            worst[bucket] = worst[bucket].zip(second.p99_ms).map(|(left, right)| left.max(right));
        }
        let text = |p99_ms: &Option<f64>| p99_ms.map_or("-".to_owned(), |p99_ms| format!("{p99_ms:.0}"));
        worst.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    /// The seconds that ended after a time.
    pub(crate) fn since(&self, time: Instant) -> Vec<Second> {
        let seconds = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        seconds.iter().copied().filter(|second| second.at > time).collect()
    }
}

//! `bench cluster`: three nodes with etcd and an S3 server, all on this machine.
//!
//! Cases that cut a node off run each node in its own network namespace, which needs the rights
//! of root. The cases measure a cluster of one build. `docs/benchmarks.md` describes each case.

mod cut;
mod driver;
mod failover;
mod forward;
mod probe;
mod seal;
mod single;
mod steady;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::Case;
use super::result::{Bound, CaseResult};
use super::rounds::Progress;
use super::{other_command, print_results};
use crate::client::Client;
use crate::server::{Cluster, ClusterSetup, ClusterStore, run_in_private};
use crate::tenants;

/// The number of nodes.
const NODES: usize = 3;
/// Number of databases that are filled or moved concurrently.
const CONCURRENT: usize = 16;

/// Arguments of `fulmar bench cluster`.
#[derive(Args, Clone, Debug)]
pub struct ClusterBenchArgs {
    /// Run only this case (repeatable): failover-median-ms (with failover-worst-ms and
    /// failover-failed), cutoff-ms (with heal-ms), seal-worst-ms, forward-ratio, driver-forwarded,
    /// idle-core-percent, metadata-per-txn, single-node-cpu (needs --before)
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// Nodes that are killed, one after the other, and take-overs of seal-worst-ms
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub kills: u32,
    /// Tenants under load while nodes are killed
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub active: u32,
    /// Further tenants without load while nodes are killed
    #[arg(long, default_value_t = 3_000, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=100_000))]
    pub idle: u32,
    /// Tenants of idle-core-percent
    #[arg(long, default_value_t = 10_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub idle_tenants: u32,
    /// Length of each measurement in seconds, except those of kills and cuts
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Measurements of each case without kills, and number of cuts
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Memory of each node (--memory) in MiB
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    /// Another fulmar executable for single-node-cpu, such as the previous release
    #[arg(long, value_name = "COMMAND")]
    pub before: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

const fn row(name: &'static str, what: &'static str, unit: &'static str, must_be: Bound) -> Case {
    Case { name, group: None, what, unit, must_be }
}

const MEDIAN: &str = "failover-median-ms";
const WORST: &str = "failover-worst-ms";
const FAILED: &str = "failover-failed";
const CUTOFF: &str = "cutoff-ms";
const HEAL: &str = "heal-ms";
const SEAL: &str = "seal-worst-ms";
const FORWARD: &str = "forward-ratio";
const DRIVER: &str = "driver-forwarded";
const IDLE: &str = "idle-core-percent";
const METADATA: &str = "metadata-per-txn";
const SINGLE: &str = "single-node-cpu";

#[rustfmt::skip]
static CASES: [Case; 11] = [
    row(MEDIAN, "from kill -9 of a node until the last active tenant answers", "ms", Bound::AtMost(2500.0)),
    row(WORST, "the longest of these times", "ms", Bound::AtMost(8000.0)),
    row(FAILED, "failed transactions of clients of other nodes, above a run without kills", "", Bound::AtMost(0.0)),
    row(CUTOFF, "from cutting a node off until its last tenant answers elsewhere", "ms", Bound::AtMost(4000.0)),
    row(HEAL, "from the end of the cut until a statement through the node is answered", "ms", Bound::AtMost(500.0)),
    row(SEAL, "the longest take-over from a node that commits 200 times per second, of 20", "ms", Bound::AtMost(5000.0)),
    row(FORWARD, "YCSB with 8 connections through a node that owns nothing, over the owner", "ratio", Bound::AtLeast(0.35)),
    row(DRIVER, "statements of the Rust driver that are forwarded, after its first answer", "", Bound::AtMost(0.0)),
    row(IDLE, "CPU of three idle nodes together, of one core", "%", Bound::AtMost(4.0)),
    row(METADATA, "requests to etcd per transaction, above an idle cluster", "", Bound::AtMost(0.001)),
    row(SINGLE, "CPU per transaction of ycsb-8 on a single node, over --before", "ratio", Bound::AtMost(1.2)),
];

fn case(name: &str) -> anyhow::Result<&'static Case> {
    CASES.iter().find(|case| case.name == name).ok_or_else(|| {
        let names = CASES.each_ref().map(|case| case.name).join(", ");
        anyhow::anyhow!("unknown case \"{name}\"; the cases are {names}")
    })
}

/// A measurement, which yields the results of one or more cases.
struct Bench<'a> {
    arguments: &'a ClusterBenchArgs,
    binary: &'a Path,
    progress: Progress,
}

impl Bench<'_> {
    /// Starts a cluster with an S3 server.
    async fn cluster(&self) -> anyhow::Result<Cluster> {
        self.start(ClusterSetup { store: ClusterStore::S3, ..ClusterSetup::default() }).await
    }

    /// Starts a cluster. The number of nodes and their memory are set here.
    async fn start(&self, setup: ClusterSetup) -> anyhow::Result<Cluster> {
        self.progress.step("starting etcd, the store and three nodes");
        let setup = ClusterSetup { nodes: NODES, memory_bytes: self.arguments.memory_mib << 20, ..setup };
        Cluster::start(self.binary, setup).await
    }

    /// Creates databases, each with a table `counters` of one row.
    async fn create(&self, cluster: &Cluster, databases: &[String]) -> anyhow::Result<()> {
        self.progress.step(&format!("creating {} tenants", databases.len()));
        let target = cluster.target(0);
        tenants::create(&target, databases, |created| {
            if created % 500 == 0 {
                self.progress.step(&format!("created {created} of {} tenants", databases.len()));
            }
        })
        .await?;
        self.progress.step(&format!("filling {} tenants", databases.len()));
        let fill = async |database: &String| {
            let mut client = Client::connect(&target.with_database(database)).await?;
            client.query("CREATE TABLE counters (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)").await?;
            client.query("INSERT INTO counters VALUES (1, 0)").await?;
            client.close().await
        };
        stream::iter(databases).map(fill).buffer_unordered(CONCURRENT).try_collect::<()>().await?;
        Ok(())
    }
}

/// Runs the cases, prints the results to stdout and returns them. `binary` is the `fulmar`
/// executable to start.
pub async fn cluster(arguments: &ClusterBenchArgs, binary: PathBuf) -> anyhow::Result<Vec<CaseResult>> {
    let wanted: Vec<&'static Case> = match arguments.case.as_slice() {
        [] => CASES.iter().filter(|case| case.name != SINGLE || arguments.before.is_some()).collect(),
        names => names.iter().map(|name| case(name)).collect::<anyhow::Result<_>>()?,
    };
    let is_wanted = |names: &[&str]| wanted.iter().any(|case| names.contains(&case.name));
    if is_wanted(&[CUTOFF, HEAL, SEAL]) {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        if let Some(status) = run_in_private(&arguments)? {
            std::process::exit(status.code().unwrap_or(1));
        }
    }
    let measuring = async {
        let bench = Bench { arguments, binary: &binary, progress: Progress::new() };
        let mut results = Vec::new();
        let groups = [
            &[MEDIAN, WORST, FAILED][..],
            &[CUTOFF, HEAL],
            &[SEAL],
            &[FORWARD],
            &[DRIVER],
            &[IDLE],
            &[METADATA],
            &[SINGLE],
        ];
        for names in groups {
            if is_wanted(names) {
                let failed = |error: anyhow::Error| {
                    let failed =
                        |name: &&str| case(name).map(|case| CaseResult::failed(case, format!("{error:#}")));
                    names.iter().map(failed).collect::<anyhow::Result<Vec<_>>>()
                };
                results.extend(measure(&bench, names[0]).await.or_else(failed)?);
            }
        }
        Ok(results)
    };
    print_results(measuring, arguments.json).await
}

/// Boxes the future, because a future is compiled where it is polled.
fn measure<'a>(
    bench: &'a Bench<'_>,
    name: &'static str,
) -> LocalBoxFuture<'a, anyhow::Result<Vec<CaseResult>>> {
    async move {
        match name {
            MEDIAN => failover::measure(bench).await,
            CUTOFF => cut::measure(bench).await,
            FORWARD => forward::measure(bench).await.map(|result| vec![result]),
            SEAL => seal::measure(bench).await.map(|result| vec![result]),
            DRIVER => driver::measure(bench).await.map(|result| vec![result]),
            SINGLE => {
                let before = bench.arguments.before.as_deref();
                let before = before.context("single-node-cpu needs another executable: --before COMMAND")?;
                let measured = single::measure(bench, &other_command(before)?).await;
                measured.map(|result| vec![result])
            }
            IDLE => steady::idle(bench).await.map(|result| vec![result]),
            _ => steady::metadata(bench).await.map(|result| vec![result]),
        }
    }
    .boxed_local()
}

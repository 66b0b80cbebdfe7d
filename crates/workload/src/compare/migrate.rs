//! `bench migrate`: one tenant is moved between two nodes under a constant load (YCSB of ElasTraS,
//! table III), and clients of a third node measure what they notice of it.
//!
//! Each move is in the middle of a window. A window without a move follows each one. The pause of a
//! move is the longest latency in its window, above the median of the longest latencies in the
//! windows without one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use super::cases::Case;
use super::print_results;
use super::result::{Bound, CaseResult};
use super::rounds::Progress;
use crate::arrival::Arrival;
use crate::client::Client;
use crate::measure::Spread;
use crate::run::{Report, RunOptions, run};
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "moved";
/// The node that clients connect to. It owns nothing.
const GATEWAY: usize = 0;
/// The nodes that the tenant is moved between.
const OWNERS: [usize; 2] = [1, 2];
const WARM_UP: Duration = Duration::from_secs(1);

/// Arguments of `fulmar bench migrate`.
#[derive(Args, Clone, Debug)]
pub struct MigrateArgs {
    /// How the tenant is moved: albatross or flush
    #[arg(long, default_value = "albatross", value_name = "NAME", value_parser = ["albatross", "flush"])]
    pub mechanism: String,
    /// Number of moves
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub moves: u32,
    /// Size of the tenant in MiB
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub size_mib: u64,
    /// Memory of each node (--memory) in MiB
    #[arg(long, default_value_t = 80, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    /// Transactions per second
    #[arg(long, default_value_t = 50.0, value_name = "N")]
    pub rate: f64,
    /// Length of each window in seconds
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(4..=3600))]
    pub window: u64,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

const fn row(name: &'static str, what: &'static str, unit: &'static str, must_be: Bound) -> Case {
    Case { name, group: None, what, unit, must_be }
}

#[rustfmt::skip]
static CASES: [Case; 5] = [
    row("move-failed", "failed transactions, above the windows without a move", "", Bound::AtMost(0.0)),
    row("move-pause-ms", "the longest latency because of a move", "ms", Bound::AtMost(150.0)),
    row("move-pause-worst-ms", "the longest of these", "ms", Bound::AtMost(1500.0)),
    row("move-after-percent", "mean latency after a move, over the windows without one", "%", Bound::AtMost(25.0)),
    row("move-bytes-ratio", "bytes moved over the cached bytes", "ratio", Bound::AtMost(1.2)),
];

/// What was measured of one move.
struct Moved {
    longest_ms: f64,
    failed: u64,
    freeze_ms: f64,
    total_ms: f64,
    bytes_ratio: f64,
    after_mean_ms: f64,
    control: Control,
}

/// A window without a move.
struct Control {
    longest_ms: f64,
    mean_ms: f64,
    failed: u64,
}

/// Runs the moves, prints the results to stdout and returns them. `binary` is the `fulmar` executable
/// to start.
pub async fn migrate(arguments: &MigrateArgs, binary: PathBuf) -> anyhow::Result<Vec<CaseResult>> {
    print_results(measure(arguments, &binary), arguments.json).await
}

async fn measure(arguments: &MigrateArgs, binary: &Path) -> anyhow::Result<Vec<CaseResult>> {
    let progress = Progress::new();
    progress.step("starting etcd, an S3 server and three nodes");
    let setup = ClusterSetup {
        store: ClusterStore::S3,
        memory_bytes: arguments.memory_mib << 20,
        ..ClusterSetup::default()
    };
    let cluster = Cluster::start(binary, setup).await?;
    tenants::create(&cluster.target(GATEWAY), &[DATABASE.to_owned()], |_| ()).await?;
    let mut admin = Client::connect(&cluster.target(GATEWAY)).await?;
    admin.query(&move_statement(&cluster, OWNERS[0], "flush")).await?;
    progress.step(&format!("loading {} MiB", arguments.size_mib));
    // Fills the cache, too.
    window(arguments, &cluster, 0).await?;
    let mut moves = Vec::new();
    for number in 1..=arguments.moves {
        progress.step(&format!("move {number} of {}", arguments.moves));
        moves.push(one_move(arguments, &cluster, &mut admin, number).await?);
    }
    admin.close().await?;
    results(arguments, &moves)
}

fn move_statement(cluster: &Cluster, to: usize, mechanism: &str) -> String {
    format!("ALTER DATABASE {DATABASE} MOVE TO '{}' USING {mechanism}", cluster.name(to))
}

fn ycsb(arguments: &MigrateArgs) -> Ycsb {
    Ycsb::default().of_bytes(arguments.size_mib << 20)
}

fn options(arguments: &MigrateArgs, cluster: &Cluster, seed: u64) -> RunOptions {
    RunOptions {
        arrival: Arrival::poisson(arguments.rate),
        warm_up: WARM_UP,
        measure: Duration::from_secs(arguments.window),
        seed,
        ..RunOptions::new(cluster.target(GATEWAY).with_database(DATABASE))
    }
}

async fn window(arguments: &MigrateArgs, cluster: &Cluster, seed: u64) -> anyhow::Result<Report> {
    run(ycsb(arguments), options(arguments, cluster, seed)).await
}

async fn one_move(
    arguments: &MigrateArgs,
    cluster: &Cluster,
    admin: &mut Client,
    number: u32,
) -> anyhow::Result<Moved> {
    let seed = u64::from(number) * 10;
    let control = window(arguments, cluster, seed).await?;
    let cached_bytes = cached_bytes(cluster).await?;
    let to = OWNERS[number as usize % 2];
    let moving = async {
        tokio::time::sleep(WARM_UP + Duration::from_secs(arguments.window) / 3).await;
        admin.query(&move_statement(cluster, to, &arguments.mechanism)).await.context("the move failed")
    };
    let (during, _) = tokio::try_join!(window(arguments, cluster, seed + 1), moving)?;
    let after = window(arguments, cluster, seed + 2).await?;
    let sql = "SELECT bytes, total_ms, freeze_ms FROM fulmar.migrations ORDER BY started DESC LIMIT 1";
    let rows = admin.query(sql).await?;
    let row = rows.first().context("the move has no report")?;
    let number = |at: usize| -> anyhow::Result<f64> {
        Ok(row.get(at).and_then(Option::as_deref).context("the report is incomplete")?.parse()?)
    };
    Ok(Moved {
        longest_ms: during.latency.max_ms,
        failed: during.failed + during.lost_connections + after.failed + after.lost_connections,
        freeze_ms: number(2)?,
        total_ms: number(1)?,
        bytes_ratio: number(0)? / cached_bytes.max(1.0),
        after_mean_ms: after.latency.mean_ms,
        control: Control {
            longest_ms: control.latency.max_ms,
            mean_ms: control.latency.mean_ms,
            failed: control.failed + control.lost_connections,
        },
    })
}

/// The bytes of the tenant's pages in its owner's memory.
async fn cached_bytes(cluster: &Cluster) -> anyhow::Result<f64> {
    // The statistics are those of the node that runs the session: the owner of its database.
    let mut client = Client::connect(&cluster.target(GATEWAY).with_database(DATABASE)).await?;
    let sql = format!("SELECT memory_bytes FROM fulmar.tenant_stats WHERE tenant = '{DATABASE}'");
    let rows = client.query(&sql).await?;
    let value = rows.first().and_then(|row| row.first().cloned().flatten());
    client.close().await?;
    value.unwrap_or_default().parse().context("the size of the tenant's cache is not known")
}

fn results(arguments: &MigrateArgs, moves: &[Moved]) -> anyhow::Result<Vec<CaseResult>> {
    let all = |value: &dyn Fn(&Moved) -> f64| moves.iter().map(value).collect::<Vec<f64>>();
    let median = |values: Vec<f64>| Spread::of(values).map_or(0.0, |spread| spread.median);
    let quiet_ms = median(all(&|moved| moved.control.longest_ms));
    let mean_ms = median(all(&|moved| moved.control.mean_ms));
    let pauses = all(&|moved| (moved.longest_ms - quiet_ms).max(0.0));
    let worst = pauses.iter().copied().fold(0.0, f64::max);
    let failed: u64 = moves.iter().map(|moved| moved.failed).sum();
    // Two windows of each move, and one without.
    let control_failed: u64 = moves.iter().map(|moved| moved.control.failed).sum();
    let note = format!(
        "{}: {} moves of {} MiB, {} transactions/s; without a move: longest {quiet_ms:.0} ms, mean {mean_ms:.1} ms",
        arguments.mechanism, arguments.moves, arguments.size_mib, arguments.rate
    );
    let values = [
        vec![failed.saturating_sub(2 * control_failed) as f64],
        pauses,
        vec![worst],
        all(&|moved| (moved.after_mean_ms / mean_ms.max(0.001) - 1.0) * 100.0),
        all(&|moved| moved.bytes_ratio),
    ];
    let mut results: Vec<CaseResult> =
        CASES.iter().zip(values).map(|(case, values)| CaseResult::value(case, values)).collect();
    let spread = |name: &str, values| match Spread::of(values) {
        Some(Spread { median, min, max, .. }) => format!("{name}: {median:.0} ms ({min:.0} to {max:.0})"),
        None => String::new(),
    };
    // From the last statement at the source until the destination has opened the tenant.
    let freeze = spread("freeze", all(&|moved| moved.freeze_ms));
    let total = spread("duration of a move", all(&|moved| moved.total_ms));
    let last = results.pop().context("there are no cases")?;
    results.push(last.with_note(note).with_note(freeze).with_note(total));
    Ok(results)
}

//! `bench migrate`: one tenant is moved between two nodes under a constant load (YCSB of ElasTraS,
//! table III), and clients of a third node measure what they notice of it.
//!
//! Each move is in the middle of a window. A window without a move follows each one. The pause of a
//! move is the longest latency in its window, above the median of the longest latencies in the
//! windows without one.
//!
//! Failed transactions are counted in many more moves, one after the other, of a small tenant.
//!
//! `live` has three more cases: [`dump`], [`relief`] and [`scale_out`].
//!
//! `--mechanism all` is the [`laboratory`] instead: one move by each mechanism, in one picture.

mod dump;
pub(crate) mod laboratory;
mod picture;
mod relief;
mod scale_out;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tokio::time::Instant;

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

/// The tenant whose moves are measured, and the one that is moved often.
const LARGE: &str = "moved";
const SMALL: &str = "moved_often";
const SMALL_MIB: u64 = 4;
/// Between two moves of the small tenant.
const SMALL_MOVE_PAUSE: Duration = Duration::from_millis(50);
/// How long a report may take after its move.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of moves back to a node that has kept the tenant.
const MAX_MOVES_BACK: u32 = 5;
const TABLES: &str = "SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'ycsb%'";
/// The node that clients connect to. It owns nothing.
const GATEWAY: usize = 0;
/// The nodes that the tenant is moved between.
const OWNERS: [usize; 2] = [1, 2];
const WARM_UP: Duration = Duration::from_secs(1);

/// Arguments of `fulmar bench migrate`.
#[derive(Args, Clone, Debug)]
pub struct MigrateArgs {
    /// Run only this case (repeatable): albatross-failed, albatross-pause-ms (with
    /// albatross-pause-worst-ms, albatross-after-percent and albatross-bytes-ratio), the same with
    /// another --mechanism; delta-bytes-ratio; with live also live-vs-dump-ratio, overload-relief
    /// and lost-work-s
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// How the tenant is moved. albatross, flush and stop: in a common store; the others: between
    /// stores of the nodes. all: one move by each of them, in one picture instead of cases
    #[arg(long, default_value = "albatross", value_name = "NAME")]
    #[arg(value_parser = ["all", "albatross", "flush", "stop", "live", "delta", "on-demand", "bulk", "sql"])]
    pub mechanism: String,
    /// With --mechanism all: the load of the tenant
    #[arg(long, default_value_t, value_enum, value_name = "NAME")]
    pub workload: LaboratoryLoad,
    /// With --mechanism all: the network between the owners. wan: another site, 40 ms away (as
    /// root)
    #[arg(long, default_value_t, value_enum, value_name = "NAME")]
    pub net: Net,
    /// With --mechanism all: the HTML file for the picture
    #[arg(long, short, default_value = "migrate.html", value_name = "FILE.html")]
    pub output: PathBuf,
    /// Number of moves
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub moves: u32,
    /// Number of moves of a small tenant in which failed transactions are counted
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub small_moves: u32,
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

/// The load of the laboratory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LaboratoryLoad {
    /// YCSB of ElasTraS, table III.
    #[default]
    Ycsb,
    /// TPC-C.
    Tpcc,
}

impl std::fmt::Display for LaboratoryLoad {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LaboratoryLoad::Ycsb => "ycsb",
            LaboratoryLoad::Tpcc => "tpcc",
        })
    }
}

/// The network between the nodes of the laboratory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Net {
    /// One machine.
    #[default]
    Lan,
    /// Two sites.
    Wan,
}

const fn row(name: &'static str, what: &'static str, unit: &'static str, must_be: Bound) -> Case {
    Case { name, group: None, what, unit, must_be }
}

/// The cases of a mechanism, whose name they begin with.
const fn cases(names: [&'static str; 5], pause_ms: f64) -> [Case; 5] {
    let [failed, pause, worst, after, ratio] = names;
    [
        row(
            failed,
            "failed transactions in the moves of a small tenant, above a run without moves",
            "",
            Bound::AtMost(0.0),
        ),
        row(pause, "the longest latency because of a move", "ms", Bound::AtMost(pause_ms)),
        row(worst, "the longest of these", "ms", Bound::AtMost(1500.0)),
        row(after, "mean latency after a move, over the windows without one", "%", Bound::AtMost(25.0)),
        row(ratio, "bytes moved over the cached bytes, or the tenant's size", "ratio", Bound::AtMost(1.2)),
    ]
}

macro_rules! cases {
    ($mechanism:literal, $pause_ms:literal) => {
        cases(
            [
                concat!($mechanism, "-failed"),
                concat!($mechanism, "-pause-ms"),
                concat!($mechanism, "-pause-worst-ms"),
                concat!($mechanism, "-after-percent"),
                concat!($mechanism, "-bytes-ratio"),
            ],
            $pause_ms,
        )
    };
}

static ALBATROSS: [Case; 5] = cases!("albatross", 150.0);
static FLUSH: [Case; 5] = cases!("flush", 150.0);
static STOP: [Case; 5] = cases!("stop", 150.0);
static LIVE: [Case; 5] = cases!("live", 300.0);
static ON_DEMAND: [Case; 5] = cases!("on-demand", 300.0);
static BULK: [Case; 5] = cases!("bulk", 300.0);
static SQL: [Case; 5] = cases!("sql", 300.0);
static DELTA: [Case; 1] = [row(
    "delta-bytes-ratio",
    "bytes of the move back after 5 % of the pages have changed, over those of a full copy",
    "ratio",
    Bound::AtMost(0.1),
)];

/// Further cases of `live`.
static LIVE_ONLY: [Case; 3] = [
    row(
        "live-vs-dump-ratio",
        "duration of pg_dump into psql over that of a move, without load",
        "ratio",
        Bound::AtLeast(2.0),
    ),
    row(
        "overload-relief",
        "latency of a tenant 30 s after it was moved off an overloaded node, over that before",
        "ratio",
        Bound::AtMost(0.8),
    ),
    row(
        "lost-work-s",
        "work lost while the load doubles and half of the tenants are moved to a second node",
        "s",
        Bound::AtMost(3.0),
    ),
];

impl MigrateArgs {
    /// The cases that only one mechanism has.
    fn further_cases(&self) -> &'static [Case] {
        if self.mechanism == "live" { &LIVE_ONLY } else { &[] }
    }

    fn cases(&self) -> &'static [Case] {
        match self.mechanism.as_str() {
            "flush" => &FLUSH,
            "stop" => &STOP,
            "live" => &LIVE,
            "on-demand" => &ON_DEMAND,
            "bulk" => &BULK,
            "sql" => &SQL,
            "delta" => &DELTA,
            _ => &ALBATROSS,
        }
    }

    /// Whether each node has a store of its own.
    fn is_private(&self) -> bool {
        laboratory::is_private(&self.mechanism)
    }

    /// Whether one of these cases was asked for.
    fn wants(&self, cases: &[Case]) -> bool {
        self.case.is_empty() || cases.iter().any(|case| self.case.iter().any(|name| name == case.name))
    }

    /// Fails if a case does not exist.
    fn check(&self) -> anyhow::Result<()> {
        let names = || self.cases().iter().chain(self.further_cases()).map(|case| case.name);
        match self.case.iter().find(|name| names().all(|case| case != name.as_str())) {
            Some(unknown) => {
                let names = names().collect::<Vec<_>>().join(", ");
                anyhow::bail!("unknown case \"{unknown}\"; the cases are {names}")
            }
            None => Ok(()),
        }
    }
}

/// A tenant under load.
#[derive(Clone, Copy)]
struct Loaded {
    name: &'static str,
    mib: u64,
}

/// What was measured of one move.
struct Moved {
    longest_ms: f64,
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
}

/// Runs the moves, prints the results to stdout and returns them. `binary` is the `fulmar`
/// executable to start.
pub async fn migrate(arguments: &MigrateArgs, binary: PathBuf) -> anyhow::Result<Vec<CaseResult>> {
    if arguments.mechanism == "all" {
        picture::measure(arguments, &binary).await?;
        return Ok(Vec::new());
    }
    print_results(measure(arguments, &binary), arguments.json).await
}

async fn measure(arguments: &MigrateArgs, binary: &Path) -> anyhow::Result<Vec<CaseResult>> {
    arguments.check()?;
    let mut results = Vec::new();
    if arguments.wants(arguments.cases()) {
        results = moves(&Bench::start(arguments, binary).await?).await?;
    }
    for case in arguments.further_cases().iter().filter(|case| arguments.wants(std::slice::from_ref(case))) {
        results.push(match case.name {
            "live-vs-dump-ratio" => dump::measure(arguments, binary, case).await?,
            "overload-relief" => relief::measure(arguments, binary, case).await?,
            _ => scale_out::measure(arguments, binary, case).await?,
        });
    }
    results
        .retain(|result| arguments.case.is_empty() || arguments.case.iter().any(|name| name == result.name));
    Ok(results)
}

/// The cases that all mechanisms have.
async fn moves(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let arguments = bench.arguments;
    if arguments.mechanism == "delta" {
        return Ok(vec![bench.moves_back(&DELTA[0]).await?]);
    }
    let (failed, measured) = arguments.cases().split_at(1);
    let mut results = Vec::new();
    if arguments.wants(failed) {
        results.push(bench.small_moves(&failed[0]).await?);
    }
    if arguments.wants(measured) {
        let moves = bench.large_moves().await?;
        results.extend(summary(arguments, &moves, measured)?);
    }
    Ok(results)
}

struct Bench<'a> {
    arguments: &'a MigrateArgs,
    cluster: Cluster,
    progress: Progress,
}

impl<'a> Bench<'a> {
    async fn start(arguments: &'a MigrateArgs, binary: &Path) -> anyhow::Result<Bench<'a>> {
        let progress = Progress::new();
        progress.step("starting etcd, the store and three nodes");
        let archives = ["--archives".to_owned(), format!("{}MiB", arguments.size_mib * 4)];
        let setup = ClusterSetup {
            store: if arguments.is_private() { ClusterStore::Private } else { ClusterStore::S3 },
            arguments: if arguments.mechanism == "delta" { archives.to_vec() } else { Vec::new() },
            memory_bytes: arguments.memory_mib << 20,
            ..ClusterSetup::default()
        };
        Ok(Bench { arguments, cluster: Cluster::start(binary, setup).await?, progress })
    }
}

impl Bench<'_> {
    /// Creates and loads a tenant at the first owner. Returns a connection to move it.
    async fn load(&self, tenant: Loaded) -> anyhow::Result<Client> {
        self.progress.step(&format!("loading {} MiB", tenant.mib));
        tenants::create(&self.cluster.target(GATEWAY), &[tenant.name.to_owned()], |_| ()).await?;
        let mut admin = Client::connect(&self.cluster.target(GATEWAY)).await?;
        let first = if self.arguments.is_private() { "live" } else { "flush" };
        admin.query(&self.move_statement(tenant.name, OWNERS[0], first)).await?;
        // Fills the cache, too.
        self.window(tenant, 0).await?;
        Ok(admin)
    }

    async fn large_moves(&self) -> anyhow::Result<Vec<Moved>> {
        let tenant = Loaded { name: LARGE, mib: self.arguments.size_mib };
        let mut admin = self.load(tenant).await?;
        let mut moves = Vec::new();
        for number in 1..=self.arguments.moves {
            self.progress.step(&format!("move {number} of {}", self.arguments.moves));
            moves.push(self.one_move(tenant, &mut admin, number).await?);
        }
        admin.close().await?;
        Ok(moves)
    }

    /// Moves a small tenant back and forth under load, and counts failed transactions.
    async fn small_moves(&self, case: &Case) -> anyhow::Result<CaseResult> {
        let MigrateArgs { small_moves: of, window, mechanism, .. } = self.arguments;
        let tenant = Loaded { name: SMALL, mib: SMALL_MIB };
        let mut admin = self.load(tenant).await?;
        let failures = |report: &Report| report.failed + report.lost_connections;
        let (mut moved, mut failed, mut failed_without) = (0, 0, 0);
        let mut seed = 0;
        while moved < *of {
            self.progress.step(&format!("move {moved} of {of} of a small tenant"));
            seed += 2;
            failed_without += failures(&self.window(tenant, seed).await?);
            let moving = async {
                tokio::time::sleep(WARM_UP).await;
                let begun = Instant::now();
                while moved < *of && begun.elapsed() < Duration::from_secs(*window) {
                    moved += 1;
                    let statement = self.move_statement(tenant.name, OWNERS[moved as usize % 2], mechanism);
                    admin.query(&statement).await.context("a move failed")?;
                    tokio::time::sleep(SMALL_MOVE_PAUSE).await;
                }
                anyhow::Ok(())
            };
            let (report, ()) = tokio::try_join!(self.window(tenant, seed + 1), moving)?;
            failed += failures(&report);
        }
        admin.close().await?;
        let above = failed.saturating_sub(failed_without) as f64;
        let note =
            format!("{moved} moves of {SMALL_MIB} MiB; {failed} failed, {failed_without} without moves");
        Ok(CaseResult::value(case, vec![above]).with_note(note))
    }

    /// Moves a tenant that has changed back to the node that has kept it.
    async fn moves_back(&self, case: &Case) -> anyhow::Result<CaseResult> {
        let tenant = Loaded { name: LARGE, mib: self.arguments.size_mib };
        let mut admin = self.load(tenant).await?;
        let mut client = Client::connect(&self.cluster.target(GATEWAY).with_database(tenant.name)).await?;
        admin.query(&self.move_statement(tenant.name, OWNERS[1], "live")).await?;
        let full = newest_move(&mut admin, tenant.name).await?;
        let (mut ratios, mut durations) = (Vec::new(), Vec::new());
        for number in 0..self.arguments.moves.min(MAX_MOVES_BACK) {
            self.progress.step(&format!(
                "move {} of {}",
                number + 1,
                self.arguments.moves.min(MAX_MOVES_BACK)
            ));
            for table in client.query(TABLES).await?.into_iter().flatten().flatten() {
                // Neighbouring rows, so that about as many pages change.
                let sql = format!(
                    "UPDATE {table} SET field0 = upper(substr(field0, 1, 90)) || '{number}' \
                     WHERE id < (SELECT max(id) / 20 FROM {table})"
                );
                client.query(&sql).await?;
            }
            admin.query(&self.move_statement(tenant.name, OWNERS[number as usize % 2], "delta")).await?;
            let moved = newest_move(&mut admin, tenant.name).await?;
            ratios.push(moved.bytes / full.bytes.max(1.0));
            durations.push(moved.total_ms);
        }
        client.close().await?;
        admin.close().await?;
        let note = format!(
            "{} MiB; a full copy has {:.0} MB and takes {:.0} ms; {}",
            tenant.mib,
            full.bytes / 1e6,
            full.total_ms,
            described("a patch takes", durations)
        );
        Ok(CaseResult::value(case, ratios).with_note(note))
    }

    fn move_statement(&self, tenant: &str, to: usize, mechanism: &str) -> String {
        format!("ALTER DATABASE {tenant} MOVE TO '{}' USING '{mechanism}'", self.cluster.name(to))
    }

    fn options(&self, tenant: Loaded, seed: u64) -> RunOptions {
        RunOptions {
            arrival: Arrival::poisson(self.arguments.rate),
            warm_up: WARM_UP,
            measure: Duration::from_secs(self.arguments.window),
            seed,
            ..RunOptions::new(self.cluster.target(GATEWAY).with_database(tenant.name))
        }
    }

    async fn window(&self, tenant: Loaded, seed: u64) -> anyhow::Result<Report> {
        run(Ycsb::default().of_bytes(tenant.mib << 20), self.options(tenant, seed)).await
    }

    async fn one_move(&self, tenant: Loaded, admin: &mut Client, number: u32) -> anyhow::Result<Moved> {
        let seed = u64::from(number) * 10;
        let control = self.window(tenant, seed).await?;
        let column = if self.arguments.is_private() { "size_bytes" } else { "memory_bytes" };
        let cached_bytes = tenant_bytes(&self.cluster, tenant, column).await?;
        let to = OWNERS[number as usize % 2];
        let moving = async {
            tokio::time::sleep(WARM_UP + Duration::from_secs(self.arguments.window) / 3).await;
            let statement = self.move_statement(tenant.name, to, &self.arguments.mechanism);
            admin.query(&statement).await.context("the move failed")
        };
        let (during, _) = tokio::try_join!(self.window(tenant, seed + 1), moving)?;
        let after = self.window(tenant, seed + 2).await?;
        let reported = newest_move(admin, tenant.name).await?;
        Ok(Moved {
            longest_ms: during.latency.max_ms,
            freeze_ms: reported.freeze_ms,
            total_ms: reported.total_ms,
            bytes_ratio: reported.bytes / cached_bytes.max(1.0),
            after_mean_ms: after.latency.mean_ms,
            control: Control { longest_ms: control.latency.max_ms, mean_ms: control.latency.mean_ms },
        })
    }
}

/// The report of a move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reported {
    pub(crate) bytes: f64,
    pub(crate) total_ms: f64,
    pub(crate) freeze_ms: f64,
}

/// The newest move. Its report is stored a little later than it ends.
async fn newest_move(admin: &mut Client, tenant: &str) -> anyhow::Result<Reported> {
    let sql = &format!(
        "SELECT bytes, total_ms, freeze_ms, step FROM fulmar.migrations WHERE tenant = '{tenant}' \
         ORDER BY number DESC LIMIT 1"
    );
    let deadline = Instant::now() + REPORT_TIMEOUT;
    let row = loop {
        let newest = admin.query(sql).await?.into_iter().next();
        if let Some(row) = newest.filter(|row| row[3].as_deref() == Some("moved")) {
            break row;
        }
        anyhow::ensure!(Instant::now() < deadline, "the move has no report");
        tokio::time::sleep(SMALL_MOVE_PAUSE).await;
    };
    let number = |at: usize| -> anyhow::Result<f64> {
        Ok(row.get(at).and_then(Option::as_deref).context("the report is incomplete")?.parse()?)
    };
    Ok(Reported { bytes: number(0)?, total_ms: number(1)?, freeze_ms: number(2)? })
}

/// A statistic of the tenant at its owner, in bytes: of its pages in memory, or of all.
async fn tenant_bytes(cluster: &Cluster, tenant: Loaded, column: &str) -> anyhow::Result<f64> {
    // The statistics are those of the node that runs the session: the owner of its database.
    let mut client = Client::connect(&cluster.target(GATEWAY).with_database(tenant.name)).await?;
    let sql = format!("SELECT {column} FROM fulmar.tenant_stats WHERE tenant = '{}'", tenant.name);
    let rows = client.query(&sql).await?;
    let value = rows.first().and_then(|row| row.first().cloned().flatten());
    client.close().await?;
    value.unwrap_or_default().parse().context("the size of the tenant is not known")
}

/// A text for durations.
fn described(name: &str, values: Vec<f64>) -> String {
    match Spread::of(values) {
        Some(Spread { median, min, max, .. }) => format!("{name} {median:.0} ms ({min:.0} to {max:.0})"),
        None => String::new(),
    }
}

fn summary(
    arguments: &MigrateArgs,
    moves: &[Moved],
    cases: &'static [Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let all = |value: &dyn Fn(&Moved) -> f64| moves.iter().map(value).collect::<Vec<f64>>();
    let median = |values: Vec<f64>| Spread::of(values).map_or(0.0, |spread| spread.median);
    let quiet_ms = median(all(&|moved| moved.control.longest_ms));
    let mean_ms = median(all(&|moved| moved.control.mean_ms));
    let pauses = all(&|moved| (moved.longest_ms - quiet_ms).max(0.0));
    let worst = pauses.iter().copied().fold(0.0, f64::max);
    let note = format!(
        "{}: {} moves of {} MiB, {} transactions/s; without a move: longest {quiet_ms:.0} ms, mean {mean_ms:.1} ms",
        arguments.mechanism, arguments.moves, arguments.size_mib, arguments.rate
    );
    let values = [
        pauses,
        vec![worst],
        all(&|moved| (moved.after_mean_ms / mean_ms.max(0.001) - 1.0) * 100.0),
        all(&|moved| moved.bytes_ratio),
    ];
    let mut results: Vec<CaseResult> =
        cases.iter().zip(values).map(|(case, values)| CaseResult::value(case, values)).collect();
    // From the last statement at the source until the destination has opened the tenant.
    let freeze = described("freeze:", all(&|moved| moved.freeze_ms));
    let total = described("duration of a move:", all(&|moved| moved.total_ms));
    let last = results.pop().context("there are no cases")?;
    results.push(last.with_note(note).with_note(freeze).with_note(total));
    Ok(results)
}

//! `bench compare`: measures a Fulmar node against PostgreSQL, or against another build of Fulmar.
//!
//! ```text
//!            +--------------+   the same load    +---------------------+
//!   fulmar   | pgbench,     |  ------ A ------>  | fulmar, PostgreSQL  |   A, B, A, B ...: rounds
//!   bench    | YCSB driver  |  ------ B ------>  | (own temp dirs)     |   alternate, medians
//!            +--------------+    loopback TCP    +---------------------+   are compared
//! ```
//!
//! - Both servers are started for a group of cases, on the same disk, with the same memory and
//!   their default durability.
//! - Only the server that is being measured runs. The processes of the other one are stopped with
//!   SIGSTOP, so neither pays for the background work of the other, and each pays for its own
//!   during its own rounds.
//! - If a case fails (a server returned an error to a client, or a rate was not kept), it is
//!   reported as failed and the other cases still run.
//! - If a case measures one server only, the other build is measured after this one.
//!
//! `docs/benchmarks.md` describes each case.

mod cases;
mod cluster;
mod connections;
mod consolidation;
pub(crate) mod control;
mod copy;
mod fair;
mod idle;
pub(crate) mod migrate;
mod reads;
mod result;
mod rounds;
mod shared_log;
mod space;
mod stall;
mod store;
mod tenants;
mod time_travel;
mod tpcb;
mod tpcc;
mod ycsb;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use tokio::signal::unix::{SignalKind, signal};

pub use self::cases::Suite;
use self::cases::{CASES, Case, Group};
pub use self::cluster::{ClusterBenchArgs, cluster};
pub use self::control::{ControlBenchArgs, control};
pub use self::migrate::{MigrateArgs, migrate};
pub use self::result::{Bound, CaseResult, Outcome, Peer, text};
use self::rounds::{Bench, MakeProduct};
pub use self::store::{StoreArgs, store};
use crate::server::{Fulmar, Postgres};

/// Arguments of `fulmar bench compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Run only this case (repeatable)
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// Length of each measurement in seconds
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Measurements of each server, alternating
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Memory of each server in MiB: --memory of Fulmar, shared_buffers of PostgreSQL
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    /// Compare with this fulmar executable instead of PostgreSQL, such as the previous release
    #[arg(long, value_name = "COMMAND")]
    pub before: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

impl CompareArgs {
    /// Returns the options for a comparison of `fulmar_binary`.
    pub fn into_options(self, suite: Suite, fulmar_binary: PathBuf) -> CompareOptions {
        let CompareArgs { case, seconds, rounds, memory_mib, before, json } = self;
        CompareOptions {
            suite,
            case,
            seconds,
            rounds,
            memory_bytes: memory_mib << 20,
            json,
            fulmar_binary,
            before,
        }
    }
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// The suite to run.
    pub suite: Suite,
    /// The cases of the suite to run, by name. Empty for all.
    pub case: Vec<String>,
    /// Length of each measurement in seconds.
    pub seconds: u64,
    /// Measurements of each server.
    pub rounds: u32,
    /// Memory of each server in bytes.
    pub memory_bytes: u64,
    /// Print JSON instead of the table and the result lines.
    pub json: bool,
    /// The `fulmar` executable to measure.
    pub fulmar_binary: PathBuf,
    /// The `fulmar` executable to compare it with, instead of PostgreSQL.
    pub before: Option<PathBuf>,
}

/// The sizes of data and load. They are smaller only in tests.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// pgbench accounts in the read cases, in units of 100,000.
    read_scale: u32,
    /// Keys of the YCSB cases. Each key has three rows of 1 KB.
    ycsb_records: u32,
    /// Tenants of the `tenants` cases, and keys per tenant.
    tenants: u32,
    tenant_records: u32,
    /// Tenants of the `idle` and `restart` cases.
    idle_tenants: u32,
    /// Rows of the `copy` case.
    copy_rows: u32,
    /// Connections of the `idle-connection` case.
    idle_connections: u32,
    /// Tenants of `hundred-tenants`, and keys per tenant in it and in `noisy-neighbour`.
    small_tenants: u32,
    small_tenant_records: u32,
    /// TPC-C's warehouses, items and customers per district.
    tpcc: (u32, u32, u32),
    /// The share of the rate that a server must serve in the `tenants` cases. Otherwise they fail.
    min_tenants_rate_share: f64,
    /// The share of its rate that the big tenant of `fair-share`, or the noisy one of
    /// `noisy-neighbour`, must get. Otherwise the case fails.
    min_big_rate_share: f64,
    /// Warm-up before each measurement.
    warm_up: Duration,
    /// How long the memory of idle tenants must be stable before it is measured.
    settle_time: Duration,
}

const FULL_SIZE: Sizes = Sizes {
    read_scale: 5,
    ycsb_records: 30_000,
    tenants: 500,
    tenant_records: 100,
    idle_tenants: 10_000,
    copy_rows: 1_000_000,
    idle_connections: 3_000,
    small_tenants: 100,
    small_tenant_records: 16_667,
    tpcc: (10, 100_000, 3_000),
    min_tenants_rate_share: 0.95,
    min_big_rate_share: 0.5,
    warm_up: Duration::from_secs(2),
    settle_time: Duration::from_secs(30),
};

/// Runs the comparison, prints the results to stdout and returns them. Ctrl-C and SIGTERM stop it
/// and its servers.
pub async fn run(options: CompareOptions) -> anyhow::Result<Vec<CaseResult>> {
    let json = options.json;
    print_results(compare(options), json).await
}

/// Waits for the results, prints them to stdout and returns them. Ctrl-C and SIGTERM stop the
/// measurement and its servers.
async fn print_results(
    measured: impl Future<Output = anyhow::Result<Vec<CaseResult>>>,
    json: bool,
) -> anyhow::Result<Vec<CaseResult>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let results = tokio::select! {
        results = measured => results?,
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted; all servers were stopped"),
        _ = terminate.recv() => anyhow::bail!("terminated; all servers were stopped"),
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&results)?);
    } else {
        print!("{}", text(&results));
    }
    Ok(results)
}

fn compare(options: CompareOptions) -> LocalBoxFuture<'static, anyhow::Result<Vec<CaseResult>>> {
    async move {
        let wanted = wanted(options.suite, &options.case)?;
        let build = |binary: &Path, name| -> MakeProduct {
            let binary = binary.to_owned();
            Arc::new(move || Ok(Box::new(Fulmar::at(binary.clone()).named(name)) as _))
        };
        let (peer, of_peer): (_, MakeProduct) = match &options.before {
            Some(binary) => (Peer::Before, build(&other_command(binary)?, Peer::Before.name())),
            None => (Peer::Postgres, Arc::new(|| Ok(Box::new(Postgres::installed()?) as _))),
        };
        let fulmar = build(&options.fulmar_binary, "fulmar");
        Ok(measure(&Bench::new(&options, FULL_SIZE, fulmar, peer, of_peer), &wanted).await)
    }
    .boxed_local()
}

/// Resolves the file of the executable to compare with.
fn other_command(path: &Path) -> anyhow::Result<PathBuf> {
    let remedy = "--before requires the file of another fulmar executable, such as ./fulmar-0.1";
    let file = path.canonicalize().with_context(|| format!("could not find {}; {remedy}", path.display()))?;
    anyhow::ensure!(file.is_file(), "{} is not a file; {remedy}", path.display());
    Ok(file)
}

/// The names and descriptions of the cases of a suite.
pub fn cases(suite: Suite) -> impl Iterator<Item = (&'static str, &'static str)> {
    of_suite(suite).map(|case| (case.name, case.what))
}

fn of_suite(suite: Suite) -> impl Iterator<Item = &'static Case> {
    CASES.iter().filter(move |case| case.group.map(Group::suite) == Some(suite))
}

fn wanted(suite: Suite, wanted: &[String]) -> anyhow::Result<Vec<&'static Case>> {
    let cases: Vec<_> = of_suite(suite).collect();
    if wanted.is_empty() {
        return Ok(cases);
    }
    let names = || cases.iter().map(|case| case.name).collect::<Vec<_>>().join(", ");
    let find = |name: &String| {
        let found = cases.iter().copied().find(|case| case.name == *name);
        found.ok_or_else(|| anyhow::anyhow!("unknown case \"{name}\"; the cases are {}", names()))
    };
    wanted.iter().map(find).collect()
}

/// Measures the wanted cases and returns their results in the order of the table.
async fn measure(bench: &Bench, wanted: &[&'static Case]) -> Vec<CaseResult> {
    let mut results = Vec::new();
    for group in Group::ALL {
        let cases: Vec<_> = wanted.iter().copied().filter(|case| case.group == Some(group)).collect();
        if cases.is_empty() {
            continue;
        }
        let mut measured = measure_group(bench, group, &cases).await;
        if bench.peer == Peer::Before && group.measures_single_server() {
            let before = measure_group(&bench.of_peer(), group, &cases).await;
            measured = measured.into_iter().zip(before).map(|(now, before)| now.over(before)).collect();
        }
        if group.is_seeded() {
            let seeds = format!("seeds 1 to {}, one per round", bench.rounds);
            measured = measured.into_iter().map(|result| result.with_note(&seeds)).collect();
        }
        results.extend(measured);
    }
    results.sort_by_key(|result| CASES.iter().position(|case| case.name == result.name));
    results
}

/// Measures the cases of one group. Every case gets a result, also if it fails.
async fn measure_group(bench: &Bench, group: Group, cases: &[&'static Case]) -> Vec<CaseResult> {
    let measured = match group {
        Group::Reads => reads::measure(bench, cases).await,
        Group::Ycsb => ycsb::measure(bench, cases).await,
        Group::Log => ycsb::measure_log(bench, cases).await,
        Group::Driver => ycsb::measure_driver(bench, cases).await,
        Group::Tpcb => tpcb::measure(bench, cases).await,
        Group::Tenants => tenants::measure(bench, cases).await,
        Group::Idle => idle::measure(bench, cases).await,
        Group::Connections => connections::measure(bench, cases).await,
        Group::Copy => copy::measure(bench).await,
        Group::Fair => fair::measure(bench, cases).await,
        Group::Tpcc => tpcc::measure(bench, cases).await,
        Group::Noisy => consolidation::measure_noisy(bench, cases).await,
        Group::Hundred => consolidation::measure_hundred_tenants(bench, cases).await,
    };
    let failed = |error| cases.iter().map(|case| CaseResult::failed(case, format!("{error:#}"))).collect();
    let mut measured: Vec<_> = measured.unwrap_or_else(failed);
    measured.sort_by_key(|result| CASES.iter().position(|case| case.name == result.name));
    measured
}

#[cfg(test)]
mod tests;

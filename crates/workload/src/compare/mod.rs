//! `bench compare`: a Fulmar node beside a PostgreSQL, or beside one of another build, case by case.
//!
//! ```text
//!            +--------------+   the same load    +---------------------+
//!   fulmar   | pgbench,     |  ------ A ------>  | fulmar, PostgreSQL  |   A, B, A, B ...: rounds in turns,
//!   bench    | YCSB driver  |  ------ B ------>  | (own temp dirs)     |   medians compared
//!            +--------------+    loopback TCP    +---------------------+
//! ```
//! Both servers are started for a group of cases, with the same memory and default durability, on the same disk. Only
//! the one whose turn it is runs: the other's processes are stopped (SIGSTOP), so that neither pays for the other's
//! background work, and each pays for its own in its own time. A case that fails (a server gives a client an error, a
//! rate is not kept) is reported as failed and the others go on. Where a case measures one server, another build is
//! measured after this one. `docs/benchmarks.md` says how each case is made.

mod cases;
mod connections;
mod consolidation;
mod copy;
mod fair;
mod idle;
mod past;
mod reads;
mod result;
mod shared_log;
mod space;
mod stall;
mod store;
mod tenants;
mod tpcb;
mod tpcc;
mod turns;
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
pub use self::result::{Bound, CaseResult, Outcome, Peer, text};
pub use self::store::{StoreArgs, store};
use self::turns::{Bench, MakeProduct};
use crate::server::{Fulmar, Postgres};

/// `fulmar bench compare`: its arguments.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Only these cases; may be repeated
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Measurements of each server, in turns
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// MiB of memory of each server: Fulmar's --memory, PostgreSQL's shared_buffers
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    /// Instead of with PostgreSQL, compare with this fulmar command, such as the one before an update
    #[arg(long, value_name = "COMMAND")]
    pub before: Option<PathBuf>,
    /// Results as JSON
    #[arg(long)]
    pub json: bool,
}

impl CompareArgs {
    /// The options of the comparison of this binary.
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

/// What to compare, and how long.
#[derive(Clone, Debug)]
pub struct CompareOptions {
    /// What to compare.
    pub suite: Suite,
    /// Cases of it by name; all if empty.
    pub case: Vec<String>,
    /// Seconds of each measurement.
    pub seconds: u64,
    /// Measurements of each server.
    pub rounds: u32,
    /// Memory of each server.
    pub memory_bytes: u64,
    /// Print JSON instead of the table and the lines.
    pub json: bool,
    /// The `fulmar` command to start.
    pub fulmar_binary: PathBuf,
    /// The `fulmar` command to compare it with, instead of PostgreSQL.
    pub before: Option<PathBuf>,
}

/// How big things are; smaller only in tests.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Of pgbench's accounts in the read cases, in units of 100,000.
    read_scale: u32,
    /// Keys of the YCSB cases: three rows of a kilobyte for each.
    ycsb_records: u32,
    /// Tenants of the `tenants` cases, and the keys of each.
    tenants: u32,
    tenant_records: u32,
    /// Tenants of the `idle` and `restart` cases.
    idle_tenants: u32,
    /// Rows of the `copy` case.
    copy_rows: u32,
    /// Connections of the `idle-connection` case.
    idle_connections: u32,
    /// Tenants of `hundred-tenants`, and the keys of each there and in `noisy-neighbour`.
    small_tenants: u32,
    small_tenant_records: u32,
    /// Warehouses, items and customers of a district of TPC-C.
    tpcc: (u32, u32, u32),
    /// What a server of the `tenants` cases must serve of the rate, else it has not done the work.
    tenants_keep: f64,
    /// What the big tenant of the `fair-share` case must keep of the rate that it has alone.
    big_keeps: f64,
    /// Before each measurement.
    warm_up: Duration,
    /// How long idle tenants' memory must have stood still before it is measured.
    still: Duration,
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
    tenants_keep: 0.95,
    big_keeps: 0.5,
    warm_up: Duration::from_secs(2),
    still: Duration::from_secs(30),
};

/// Compares, prints the results on stdout and answers them. Ctrl-C and SIGTERM end it, servers included.
pub async fn run(options: CompareOptions) -> anyhow::Result<Vec<CaseResult>> {
    let json = options.json;
    print_results(compare(options), json).await
}

/// Waits for results, prints them on stdout and answers them. Ctrl-C and SIGTERM end it, servers included.
async fn print_results(
    measured: impl Future<Output = anyhow::Result<Vec<CaseResult>>>,
    json: bool,
) -> anyhow::Result<Vec<CaseResult>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let results = tokio::select! {
        results = measured => results?,
        _ = tokio::signal::ctrl_c() => anyhow::bail!("interrupted; the servers have been ended"),
        _ = terminate.recv() => anyhow::bail!("told to end; the servers have been ended"),
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

/// The file of the command to compare with.
fn other_command(path: &Path) -> anyhow::Result<PathBuf> {
    let remedy = "name the file of another fulmar command, as in: --before ./fulmar-0.1";
    let file = path.canonicalize().with_context(|| format!("cannot find {}; {remedy}", path.display()))?;
    anyhow::ensure!(file.is_file(), "{} is not a file; {remedy}", path.display());
    Ok(file)
}

/// The names of the cases of a suite, and what they measure.
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
        found.ok_or_else(|| anyhow::anyhow!("there is no case {name}; there are: {}", names()))
    };
    wanted.iter().map(find).collect()
}

/// Measures the wanted cases; the results come in the order of the table.
async fn measure(bench: &Bench, wanted: &[&'static Case]) -> Vec<CaseResult> {
    let mut results = Vec::new();
    for group in Group::ALL {
        let cases: Vec<_> = wanted.iter().copied().filter(|case| case.group == Some(group)).collect();
        if cases.is_empty() {
            continue;
        }
        let mut measured = measure_group(bench, group, &cases).await;
        if bench.peer == Peer::Before && group.measures_one() {
            let before = measure_group(&bench.of_peer(), group, &cases).await;
            measured = measured.into_iter().zip(before).map(|(now, before)| now.over(before)).collect();
        }
        if group.has_seeds() {
            let seeds = format!("seeds 1 to {}, one for each round", bench.rounds);
            measured = measured.into_iter().map(|result| result.with_note(&seeds)).collect();
        }
        results.extend(measured);
    }
    results.sort_by_key(|result| CASES.iter().position(|case| case.name == result.name));
    results
}

/// Measures cases of one group; they come to results of the same order, whatever fails.
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
        Group::Hundred => consolidation::measure_hundred(bench, cases).await,
    };
    let failed = |error| cases.iter().map(|case| CaseResult::failed(case, format!("{error:#}"))).collect();
    let mut measured: Vec<_> = measured.unwrap_or_else(failed);
    measured.sort_by_key(|result| CASES.iter().position(|case| case.name == result.name));
    measured
}

#[cfg(test)]
mod tests;

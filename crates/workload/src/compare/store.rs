//! `bench store`: the cost and performance of the object store.
//!
//! The cases measure only a Fulmar node, since PostgreSQL has no such store. The exception is
//! [`beyond`], which compares with PostgreSQL. `docs/benchmarks.md` describes each case.

mod beyond;
mod resident;
mod restart;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use rand::RngExt;

use super::cases::Case;
use super::result::{Bound, CaseResult};
use super::rounds::Progress;
use super::{print_results, shared_log, space, stall, time_travel};
use crate::client::Client;
use crate::server::{Fulmar, S3Server, Server};

/// Arguments of `fulmar bench store`.
#[derive(Args, Clone, Debug)]
pub struct StoreArgs {
    /// Run only this case (repeatable): cold-local-ms, cold-s3-ms, branch-ms, restore-ms, space,
    /// flush-stall, beyond-memory, resident, shared-log, restart-after-kills-ms,
    /// restart-after-stop-ms
    #[arg(long, value_name = "NAME")]
    pub case: Vec<String>,
    /// Measurements of each case
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Memory of the node (--memory) in MiB; beyond-memory uses a quarter of it, resident twice as
    /// much
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u64).range(64..=1 << 20))]
    pub memory_mib: u64,
    /// The S3 server, a versitygw executable [default: the one built by `make tools`]
    #[arg(long, value_name = "FILE")]
    pub s3_server: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

const fn row(name: &'static str, what: &'static str, unit: &'static str, must_be: f64) -> Case {
    Case { name, group: None, what, unit, must_be: Bound::AtMost(must_be) }
}

#[rustfmt::skip]
static CASES: [Case; 11] = [
    row("cold-local-ms", "first response of a cold 100 MB tenant, local store", "ms", 20.0),
    row(COLD_S3, "first response of a cold 100 MB tenant, S3 on loopback", "ms", 60.0),
    row("branch-ms", "branch of a 1 GB tenant at an earlier time, including its first response", "ms", 1000.0),
    row("restore-ms", "restore of a 1 GB tenant to an earlier time, including its first response", "ms", 1000.0),
    row("space", "bytes in the store over live data, for a 100 MB tenant overwritten ten times", "ratio", 2.0),
    row("flush-stall", "p99.9 of commits while flushes and compactions run, over p99.9 without", "ratio", 2.0),
    Case {
        must_be: Bound::AtLeast(1.0),
        ..row(BEYOND, "YCSB, uniform, data of four times the memory", "tps", 0.0)
    },
    row("resident", "memory (PSS) over the budget, 1,000 active tenants of 50 MB", "", 1.1),
    Case {
        must_be: Bound::AtLeast(0.5),
        ..row("shared-log", "durable YCSB, 32 connections, log in S3 on loopback over log on disk", "ratio", 0.0)
    },
    row(AFTER_KILLS, "start after kills under load every 15 s, shared tenant, S3 on loopback", "ms", 3000.0),
    row(AFTER_STOP, "start after a clean stop under load, shared tenant, S3 on loopback", "ms", 1000.0),
];
const COLD_S3: &str = "cold-s3-ms";
const BEYOND: &str = "beyond-memory";
const AFTER_KILLS: &str = "restart-after-kills-ms";
const AFTER_STOP: &str = "restart-after-stop-ms";

/// Rows of the cold tenant, 1 KB each, and rows written per statement.
pub(super) const ROWS: u32 = 100_000;
pub(super) const ROWS_PER_STATEMENT: u32 = 10_000;

const TENANT: &str = "cold";

/// Runs the cases, prints the results to stdout and returns them. `binary` is the `fulmar`
/// executable to start.
pub async fn store(arguments: &StoreArgs, binary: PathBuf) -> anyhow::Result<Vec<CaseResult>> {
    let wanted =
        |case: &&Case| arguments.case.is_empty() || arguments.case.iter().any(|name| name == case.name);
    let cases: Vec<&'static Case> = CASES.iter().filter(wanted).collect();
    anyhow::ensure!(
        cases.len() == arguments.case.len() || arguments.case.is_empty(),
        "unknown or repeated case; the cases are {}",
        CASES.each_ref().map(|case| case.name).join(", ")
    );
    let measuring = async {
        let mut results = Vec::new();
        for case in cases {
            let measured = measure(arguments, &binary, case).await;
            results.push(measured.unwrap_or_else(|error| CaseResult::failed(case, format!("{error:#}"))));
        }
        Ok(results)
    };
    print_results(measuring, arguments.json).await
}

/// A plain function that boxes the future: a future is compiled where it is polled, and these
/// futures are most of the crate.
fn measure<'a>(
    arguments: &'a StoreArgs,
    binary: &'a Path,
    case: &'static Case,
) -> LocalBoxFuture<'a, anyhow::Result<CaseResult>> {
    async move {
        match case.name {
            BEYOND => beyond::measure(arguments, binary, case).await,
            AFTER_KILLS => restart::measure(arguments, binary, case, restart::End::Kill).await,
            AFTER_STOP => restart::measure(arguments, binary, case, restart::End::Stop).await,
            _ => rounds(arguments, binary, case).await.map(|rounds| CaseResult::value(case, rounds)),
        }
    }
    .boxed_local()
}

async fn rounds(arguments: &StoreArgs, binary: &Path, case: &Case) -> anyhow::Result<Vec<f64>> {
    match case.name {
        "branch-ms" | "restore-ms" => {
            time_travel::measure(arguments, binary.to_owned(), case, time_travel::ROWS).await
        }
        "space" => space::measure(arguments, binary.to_owned(), ROWS).await,
        "flush-stall" => stall::measure(arguments, binary.to_owned()).await,
        "resident" => resident::measure(arguments, binary, case).await,
        "shared-log" => shared_log::measure(arguments, binary, case).await,
        _ => cold(arguments, binary, case, ROWS).await,
    }
}

/// Each round restarts the node, and reads one row of a tenant that the node has not opened.
/// Measures the time from the connection attempt to the response, in milliseconds.
async fn cold(arguments: &StoreArgs, binary: &Path, case: &Case, rows: u32) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    let s3 = (case.name == COLD_S3).then(|| s3_server(arguments)).transpose()?;
    let fulmar = Fulmar::at(binary.to_owned());
    let fulmar = match &s3 {
        Some(s3) => fulmar.with_store(s3.url("bench"), s3.environment()),
        None => fulmar,
    };
    progress.step(&format!("{}: loading", case.name));
    let mut server = Server::start(Box::new(fulmar), arguments.memory_mib << 20, 4).await?;
    load(&server, TENANT, rows).await?;
    server.stop().await?;
    let mut times = Vec::new();
    for round in 1..=arguments.rounds {
        progress.step(&format!("{}: round {round} of {}", case.name, arguments.rounds));
        server.restart().await?;
        let row = rand::rng().random_range(1..=rows);
        let began = Instant::now();
        let mut client = Client::connect(&server.target().with_database(TENANT)).await?;
        client.query(&format!("SELECT length(v) FROM t WHERE id = {row}")).await?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        client.close().await?;
        server.stop().await?;
    }
    Ok(times)
}

pub(super) fn s3_server(arguments: &StoreArgs) -> anyhow::Result<S3Server> {
    match &arguments.s3_server {
        Some(program) => S3Server::start_at(program),
        None => S3Server::start(),
    }
}

/// Creates a tenant with `rows` rows of 1 KB.
pub(super) async fn load(server: &Server, tenant: &str, rows: u32) -> anyhow::Result<()> {
    let mut system = Client::connect(&server.target()).await?;
    system.query(&format!("CREATE DATABASE {tenant}")).await?;
    system.close().await?;
    let mut client = Client::connect(&server.target().with_database(tenant)).await?;
    client.query("CREATE TABLE t (id INTEGER PRIMARY KEY, v BLOB NOT NULL)").await?;
    for first in (1..=rows).step_by(ROWS_PER_STATEMENT as usize) {
        let last = rows.min(first + ROWS_PER_STATEMENT - 1);
        let sql = format!(
            "INSERT INTO t WITH RECURSIVE n(i) AS \
             (SELECT {first} UNION ALL SELECT i + 1 FROM n WHERE i < {last}) \
             SELECT i, randomblob(1000) FROM n"
        );
        client.query(&sql).await?;
    }
    Ok(client.close().await?)
}

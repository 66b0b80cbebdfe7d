//! `live-vs-dump-ratio`: moving a tenant between the stores of two nodes, against `pg_dump` piped into
//! `psql`, from one PostgreSQL server to another. The rows are the same, and there is no load.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};

use super::{Bench, LARGE, Loaded, MigrateArgs, OWNERS, described};
use crate::client::Client;
use crate::compare::cases::Case;
use crate::compare::result::CaseResult;
use crate::run::{RunOptions, run};
use crate::server::{Postgres, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

/// Maximum number of rounds.
const MAX_ROUNDS: u32 = 5;
const CONNECTIONS: u32 = 16;

pub(super) async fn measure(
    arguments: &MigrateArgs,
    binary: &Path,
    case: &Case,
) -> anyhow::Result<CaseResult> {
    let bench = Bench::start(arguments, binary).await?;
    let tenant = Loaded { name: LARGE, mib: arguments.size_mib };
    let mut admin = bench.load(tenant).await?;
    let memory_bytes = arguments.memory_mib << 20;
    let source = Server::start(Box::new(Postgres::installed()?), memory_bytes, CONNECTIONS).await?;
    let destination = Server::start(Box::new(Postgres::installed()?), memory_bytes, CONNECTIONS).await?;
    bench.progress.step("loading PostgreSQL");
    tenants::create(&source.target(), &[LARGE.to_owned()], |_| ()).await?;
    let options = RunOptions::new(source.target().with_database(LARGE));
    run(Ycsb::default().of_bytes(tenant.mib << 20), options).await?;

    let (mut ratios, mut moves, mut dumps) = (Vec::new(), Vec::new(), Vec::new());
    let rounds = arguments.moves.min(MAX_ROUNDS);
    for round in 1..=rounds {
        bench.progress.step(&format!("{}: round {round} of {rounds}", case.name));
        let begun = Instant::now();
        admin.query(&bench.move_statement(tenant.name, OWNERS[round as usize % 2], "live")).await?;
        let moved = begun.elapsed().as_secs_f64();

        let mut postgres = Client::connect(&destination.target()).await?;
        postgres.query(&format!("DROP DATABASE IF EXISTS {LARGE}")).await?;
        postgres.query(&format!("CREATE DATABASE {LARGE}")).await?;
        postgres.close().await?;
        let begun = Instant::now();
        copy(&source.target().with_database(LARGE), &destination.target().with_database(LARGE)).await?;
        let dumped = begun.elapsed().as_secs_f64();
        ratios.push(dumped / moved);
        moves.push(moved * 1000.0);
        dumps.push(dumped * 1000.0);
    }
    admin.close().await?;
    Ok(CaseResult::value(case, ratios)
        .with_note(format!("{} MiB; {}", tenant.mib, described("a move takes", moves)))
        .with_note(described("pg_dump into psql takes", dumps)))
}

/// Copies a database with `pg_dump` and `psql`.
async fn copy(from: &crate::Target, to: &crate::Target) -> anyhow::Result<()> {
    let (from, to) = (from.to_string(), to.to_string());
    tokio::task::spawn_blocking(move || {
        let mut dump = Command::new("pg_dump");
        let mut dump = dump.arg(&from).stdout(Stdio::piped()).spawn().context("could not run pg_dump")?;
        let rows = dump.stdout.take().context("pg_dump has no output")?;
        let restored = Command::new("psql")
            .args(["--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", &to])
            .stdin(rows)
            .stdout(Stdio::null())
            .status()
            .context("could not run psql")?;
        ensure!(restored.success(), "psql failed: {restored}");
        let dumped = dump.wait()?;
        ensure!(dumped.success(), "pg_dump failed: {dumped}");
        Ok(())
    })
    .await?
}

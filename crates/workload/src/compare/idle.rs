//! Ten thousand tenants that do nothing: what one costs in memory, and how long the node takes to come back with them.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::client::{Client, Error};
use crate::server::Server;
use crate::{Target, tenants};

/// Tenants that are filled or written to at a time.
const CONCURRENT: usize = 16;

/// Tenants that write something before the node goes down, so that there is a log to recover.
const WRITERS: u32 = 100;

/// The longest wait for memory to stand still, how often it is looked at, and what counts as still.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
const LOOK: Duration = Duration::from_millis(500);
const STILL_WITHIN: f64 = 0.01;

const FIRST_QUERY: &str = "SELECT count(*) FROM notes";

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut server = bench.fulmar(CONCURRENT as u32).await?;
    let databases = tenants::names("tenant_", bench.sizes.idle_tenants);
    let empty = still_memory(bench, &server).await?;
    fill(bench, &server, &databases).await?;
    let mut results = Vec::new();
    for case in wanted {
        results.push(match case.name {
            "idle-tenant-kib" => {
                bench.step("idle-tenant-kib: waiting for the server to come to rest");
                let full = still_memory(bench, &server).await?;
                let each = (full as f64 - empty as f64) / 1024.0 / databases.len() as f64;
                let mib = |bytes: u64| bytes >> 20;
                let note =
                    format!("{} MiB empty, {} MiB with {} tenants", mib(empty), mib(full), databases.len());
                CaseResult::value(case, vec![each]).with_note(note)
            }
            _ => restarts(bench, case, &mut server, &databases).await?,
        });
    }
    Ok(results)
}

/// Makes the tenants, each with a table of a few rows.
async fn fill(bench: &Bench, server: &Server, databases: &[String]) -> anyhow::Result<()> {
    bench.step(&format!("making {} tenants", databases.len()));
    tenants::create(&server.target(), databases, |made| {
        if made % 500 == 0 {
            bench.step(&format!("{made} of {} tenants made", databases.len()));
        }
    })
    .await?;
    bench.step(&format!("filling {} tenants", databases.len()));
    each(server, databases, async |client| {
        client.query("CREATE TABLE notes (id INTEGER PRIMARY KEY, text VARCHAR(100))").await?;
        client.query("INSERT INTO notes VALUES (1, 'one'), (2, 'two'), (3, 'three')").await.map(drop)
    })
    .await
}

/// Does something in each database, on a connection of its own.
async fn each(
    server: &Server,
    databases: &[String],
    work: impl AsyncFn(&mut Client) -> Result<(), Error>,
) -> anyhow::Result<()> {
    let (target, work) = (server.target(), &work);
    let one = async |target: Target| {
        let mut client = Client::connect(&target).await?;
        work(&mut client).await?;
        client.close().await
    };
    stream::iter(databases)
        .map(|database| {
            let target = target.with_database(database);
            let done = one(target.clone());
            async move { done.await.with_context(|| format!("on {target}")) }
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

/// The server's memory once it has stood still for a while: tenants that are not used have been closed.
async fn still_memory(bench: &Bench, server: &Server) -> anyhow::Result<u64> {
    let processes = server.processes()?;
    let begin = Instant::now();
    let (mut reference, mut since) = (processes.pss_bytes()?, begin);
    loop {
        tokio::time::sleep(LOOK).await;
        let now = processes.pss_bytes()?;
        if (now as f64 - reference as f64).abs() > reference as f64 * STILL_WITHIN {
            (reference, since) = (now, Instant::now());
        }
        if since.elapsed() >= bench.sizes.still {
            return Ok(now);
        }
        anyhow::ensure!(begin.elapsed() < LONGEST_WAIT, "memory still moves after {LONGEST_WAIT:?}");
    }
}

/// From exec to the first answer out of a tenant, after a crash and after a clean end; a round counts the slower one.
async fn restarts(
    bench: &Bench,
    case: &Case,
    server: &mut Server,
    databases: &[String],
) -> anyhow::Result<CaseResult> {
    let (mut crashed, mut clean) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds {
        bench.step(&format!("restart-ms: round {round} of {}", bench.rounds));
        write(server, databases, round).await?;
        server.kill().await?;
        crashed.push(start(server, &databases[round as usize % databases.len()]).await?);
        write(server, databases, round).await?;
        server.stop().await?;
        clean.push(start(server, &databases[round as usize % databases.len()]).await?);
    }
    let slower = crashed.iter().zip(&clean).map(|(crashed, clean)| crashed.max(*clean)).collect();
    let note = format!("after kill -9: {crashed:.0?} ms; after a clean stop: {clean:.0?} ms");
    Ok(CaseResult::value(case, slower).with_note(note))
}

async fn write(server: &Server, databases: &[String], round: u32) -> anyhow::Result<()> {
    let step = databases.len().div_ceil(WRITERS as usize).max(1);
    let writers: Vec<String> = databases.iter().step_by(step).cloned().collect();
    each(server, &writers, async |client| {
        client.query(&format!("UPDATE notes SET text = 'round {round}' || text WHERE id = 1")).await.map(drop)
    })
    .await
}

async fn start(server: &mut Server, database: &str) -> anyhow::Result<f64> {
    let target = server.target().with_database(database);
    Ok(server.start_until(&target, FIRST_QUERY).await?.as_secs_f64() * 1e3)
}

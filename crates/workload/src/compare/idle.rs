//! `idle-tenant-kib` and `restart-ms`: memory per tenant with 10,000 idle tenants, and the time in
//! which a node restarts with them.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::Case;
use super::result::CaseResult;
use super::rounds::Bench;
use crate::client::{Client, Error};
use crate::server::Server;
use crate::{Target, tenants};

/// Number of tenants that are filled or written concurrently.
const CONCURRENT: usize = 16;

/// Number of tenants that write before the node goes down, so that there is a log to recover.
const WRITERS: u32 = 100;

/// Limits of the wait for memory to settle: its timeout, the polling interval, and the relative
/// change below which memory counts as settled.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const SETTLED_CHANGE: f64 = 0.01;

const FIRST_QUERY: &str = "SELECT count(*) FROM notes";

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut server = bench.fulmar(CONCURRENT as u32).await?;
    let databases = tenants::names("tenant_", bench.sizes.idle_tenants);
    let empty = settled_memory(bench, &server).await?;
    fill(bench, &server, &databases).await?;
    let mut results = Vec::new();
    for case in wanted {
        results.push(match case.name {
            "idle-tenant-kib" => {
                bench.step("idle-tenant-kib: waiting for the server's memory to settle");
                let full = settled_memory(bench, &server).await?;
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

/// Creates the tenants, each with a table of three rows.
async fn fill(bench: &Bench, server: &Server, databases: &[String]) -> anyhow::Result<()> {
    bench.step(&format!("creating {} tenants", databases.len()));
    tenants::create(&server.target(), databases, |created| {
        if created % 500 == 0 {
            bench.step(&format!("created {created} of {} tenants", databases.len()));
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

/// Runs `work` in each database, on a separate connection.
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
            async move { done.await.with_context(|| format!("in {target}")) }
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

/// The server's memory once it has been stable for `sizes.settle_time`: by then unused tenants have
/// been closed.
async fn settled_memory(bench: &Bench, server: &Server) -> anyhow::Result<u64> {
    let processes = server.processes()?;
    let begin = Instant::now();
    let (mut reference, mut since) = (processes.pss_bytes()?, begin);
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = processes.pss_bytes()?;
        if (now as f64 - reference as f64).abs() > reference as f64 * SETTLED_CHANGE {
            (reference, since) = (now, Instant::now());
        }
        if since.elapsed() >= bench.sizes.settle_time {
            return Ok(now);
        }
        anyhow::ensure!(
            begin.elapsed() < SETTLE_TIMEOUT,
            "memory usage did not settle within {SETTLE_TIMEOUT:?}"
        );
    }
}

/// The time from exec to the first response of a tenant, after a crash and after a clean stop. A
/// round counts the slower of the two.
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
    let note = format!("after SIGKILL: {crashed:.0?} ms; after a clean stop: {clean:.0?} ms");
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

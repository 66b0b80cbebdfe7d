//! `overload-relief`: the latency of a tenant that is moved off an overloaded node (ElasTraS, figure
//! 30), and what its former neighbours gain.
//!
//! Both nodes may use a third of a core. Neighbours without pauses keep the first one busy.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::{Bench, GATEWAY, MigrateArgs, OWNERS, SMALL_MIB};
use crate::arrival::Arrival;
use crate::client::Client;
use crate::compare::cases::Case;
use crate::compare::result::CaseResult;
use crate::run::{Report, RunOptions, run};
use crate::tenants;
use crate::ycsb::Ycsb;

/// CPUs of each node that tenants are moved between.
pub(super) const CPUS: f64 = 1.0 / 3.0;
const TENANT: &str = "relieved";
const NEIGHBOURS: u32 = 3;
/// Connections of each neighbour. Each always has a transaction in progress.
const NEIGHBOUR_CONNECTIONS: usize = 4;
const RATE: f64 = 10.0;
const MEASURE: Duration = Duration::from_secs(10);
/// From the end of the move to the second measurement.
const SETTLE: Duration = Duration::from_secs(25);
const MAX_ROUNDS: u32 = 3;

pub(super) async fn measure(
    arguments: &MigrateArgs,
    binary: &Path,
    case: &Case,
) -> anyhow::Result<CaseResult> {
    let mut bench = Bench::start(arguments, binary).await?;
    let neighbours = tenants::names("neighbour_", NEIGHBOURS);
    tenants::create(&bench.cluster.target(GATEWAY), &neighbours, |_| ()).await?;
    tenants::create(&bench.cluster.target(GATEWAY), &[TENANT.to_owned()], |_| ()).await?;
    let mut admin = Client::connect(&bench.cluster.target(GATEWAY)).await?;
    for name in neighbours.iter().map(String::as_str).chain([TENANT]) {
        admin.query(&bench.move_statement(name, OWNERS[0], "live")).await?;
    }
    bench.progress.step("loading");
    // Loads the data.
    run(Ycsb::default().of_bytes(SMALL_MIB << 20), load_of(&bench, &neighbours, Duration::from_secs(1)))
        .await?;
    run(Ycsb::default().of_bytes(SMALL_MIB << 20), options(&bench, 0)).await?;
    for owner in OWNERS {
        bench.cluster.limit_cpus(owner, CPUS)?;
    }
    let (mut ratios, mut notes) = (Vec::new(), Vec::new());
    let rounds = arguments.moves.min(MAX_ROUNDS);
    for round in 1..=rounds {
        bench.progress.step(&format!("{}: round {round} of {rounds}", case.name));
        admin.query(&bench.move_statement(TENANT, OWNERS[0], "live")).await?;
        let all = MEASURE * 2 + SETTLE + Duration::from_secs(15);
        let background = run(Ycsb::default().of_bytes(SMALL_MIB << 20), load_of(&bench, &neighbours, all));
        let moving = async {
            let before = latency(&bench, u64::from(round) * 2).await?;
            admin.query(&bench.move_statement(TENANT, OWNERS[1], "live")).await.context("the move failed")?;
            tokio::time::sleep(SETTLE).await;
            anyhow::Ok((before, latency(&bench, u64::from(round) * 2 + 1).await?))
        };
        let (_, (before, after)) = tokio::try_join!(background, moving)?;
        ratios.push(after.latency.mean_ms / before.latency.mean_ms);
        notes.push(format!(
            "round {round}: mean {:.1} -> {:.1} ms, p99 {:.0} -> {:.0} ms",
            before.latency.mean_ms, after.latency.mean_ms, before.latency.p99_ms, after.latency.p99_ms
        ));
    }
    admin.close().await?;
    Ok(notes.into_iter().fold(CaseResult::value(case, ratios), CaseResult::with_note))
}

/// The load of the neighbours.
fn load_of(bench: &Bench<'_>, neighbours: &[String], time: Duration) -> RunOptions {
    RunOptions {
        databases: neighbours.to_vec(),
        connections: NEIGHBOUR_CONNECTIONS,
        measure: time,
        ..RunOptions::new(bench.cluster.target(GATEWAY))
    }
}

fn options(bench: &Bench<'_>, seed: u64) -> RunOptions {
    RunOptions {
        arrival: Arrival::poisson(RATE),
        measure: MEASURE,
        seed,
        ..RunOptions::new(bench.cluster.target(GATEWAY).with_database(TENANT))
    }
}

async fn latency(bench: &Bench<'_>, seed: u64) -> anyhow::Result<Report> {
    run(Ycsb::default().of_bytes(SMALL_MIB << 20), options(bench, seed)).await?.complete()
}

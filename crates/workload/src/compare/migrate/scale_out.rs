//! `lost-work-s`: scaling out from one node to two when the load doubles (Karyakin's thesis, 5.3).
//!
//! Each node may use a third of a core. The tenants of the first node offer 60 % of what it can serve.
//! Then they offer twice as much, and half of them are moved to the second node. The lost work is what
//! had to be cancelled because it could not start within a second, in seconds of the offered load.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use futures::future::try_join_all;

use super::relief::CPUS;
use super::{Bench, GATEWAY, MigrateArgs, OWNERS};
use crate::arrival::{Arrival, Shape};
use crate::client::Client;
use crate::compare::cases::Case;
use crate::compare::result::CaseResult;
use crate::run::{RunOptions, run};
use crate::tenants;
use crate::ycsb::Ycsb;

const TENANTS: u32 = 10;
const TENANT_MIB: u64 = 8;
/// Tenants that are moved at the same time.
const CONCURRENT: usize = 2;
/// The share of the first node's capacity that is offered at first.
const BASE_LOAD: f64 = 0.6;
/// How late a transaction may start.
const TOLERANCE: Duration = Duration::from_secs(1);
const CALIBRATE: Duration = Duration::from_secs(10);
const MEASURE: Duration = Duration::from_secs(30);
const MAX_ROUNDS: u32 = 3;

pub(super) async fn measure(
    arguments: &MigrateArgs,
    binary: &Path,
    case: &Case,
) -> anyhow::Result<CaseResult> {
    let mut bench = Bench::start(arguments, binary).await?;
    let databases = tenants::names("scaled_", TENANTS);
    tenants::create(&bench.cluster.target(GATEWAY), &databases, |_| ()).await?;
    let mut admin = Client::connect(&bench.cluster.target(GATEWAY)).await?;
    gather(&bench, &mut admin, &databases).await?;
    bench.progress.step("loading");
    let workload = Ycsb::default().of_bytes(TENANT_MIB << 20);
    let closed = |time| RunOptions {
        databases: databases.clone(),
        connections: 2,
        measure: time,
        ..RunOptions::new(bench.cluster.target(GATEWAY))
    };
    run(workload.clone(), closed(Duration::from_secs(1))).await?;
    let closed = closed(CALIBRATE);
    for owner in OWNERS {
        bench.cluster.limit_cpus(owner, CPUS)?;
    }
    let (mut lost, mut notes) = (Vec::new(), Vec::new());
    let rounds = arguments.moves.min(MAX_ROUNDS);
    for round in 1..=rounds {
        bench.progress.step(&format!("{}: round {round} of {rounds}", case.name));
        gather(&bench, &mut admin, &databases).await?;
        let capacity = run(workload.clone(), closed.clone()).await?.complete()?.throughput_tps;
        let offered = |factor: f64, time| RunOptions {
            arrival: Arrival::Open {
                rate_tps: capacity * BASE_LOAD * factor,
                shape: Shape::constant(),
                tolerance: Some(TOLERANCE),
            },
            warm_up: Duration::ZERO,
            measure: time,
            seed: u64::from(round),
            ..closed.clone()
        };
        let calm = run(workload.clone(), offered(1.0, CALIBRATE)).await?;
        let moving = async {
            let lanes = databases[..databases.len() / 2].chunks(databases.len() / 2 / CONCURRENT);
            let begun = tokio::time::Instant::now();
            try_join_all(lanes.map(|lane| scale_out(&bench, lane))).await?;
            anyhow::Ok(begun.elapsed())
        };
        let (busy, took) = tokio::try_join!(run(workload.clone(), offered(2.0, MEASURE)), moving)?;
        lost.push(busy.lost_work_s.context("the run has no lost work")?);
        notes.push(format!(
            "round {round}: {capacity:.0} tx/s at capacity; {:.2} s lost before; moved within {:.1} s; \
             then p99 {:.0} ms, {} failed",
            calm.lost_work_s.unwrap_or_default(),
            took.as_secs_f64(),
            busy.latency.p99_ms,
            busy.failed + busy.lost_connections
        ));
    }
    admin.close().await?;
    Ok(notes.into_iter().fold(CaseResult::value(case, lost), CaseResult::with_note))
}

/// Moves all tenants to the first node.
async fn gather(bench: &Bench<'_>, admin: &mut Client, databases: &[String]) -> anyhow::Result<()> {
    for name in databases {
        admin.query(&bench.move_statement(name, OWNERS[0], "live")).await?;
    }
    Ok(())
}

/// Moves tenants to the second node, one after the other.
async fn scale_out(bench: &Bench<'_>, databases: &[String]) -> anyhow::Result<()> {
    let mut admin = Client::connect(&bench.cluster.target(GATEWAY)).await?;
    for name in databases {
        admin.query(&bench.move_statement(name, OWNERS[1], "live")).await.context("a move failed")?;
    }
    Ok(admin.close().await?)
}

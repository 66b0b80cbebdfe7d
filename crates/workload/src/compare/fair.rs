//! A small tenant beside one at full load: does it notice?
//!
//! Fulmar only. Both tenants have YCSB's tables and transactions; the small one has a few that arrive at random, the big
//! one as many as 32 connections can. The figure is the small one's p99 with the big one over that without, one after
//! the other in each round. The big load's driver runs with the lowest priority: it is to take the server's time, not the
//! other driver's on the same machine. Who starves the big one gains nothing: it must keep most of the rate that it has
//! alone, or the case fails.

use std::time::Duration;

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::arrival::Arrival;
use crate::run::{Report, RunOptions, run};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

const SMALL: &str = "small";
const BIG: &str = "big";

const SMALL_CONNECTIONS: usize = 4;
const SMALL_TPS: f64 = 50.0;
const BIG_CONNECTIONS: usize = 32;

/// The lowest priority.
const LAST: i32 = 19;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar((SMALL_CONNECTIONS + BIG_CONNECTIONS) as u32).await?;
    bench.step("fair-share: loading");
    tenants::create(&server.target(), &[SMALL.to_owned(), BIG.to_owned()], |_| ()).await?;
    for database in [SMALL, BIG] {
        let brief =
            RunOptions { connections: 1, measure: bench.sizes.warm_up, ..options(bench, &server, database) };
        run(workload(bench), brief).await?;
    }
    bench.step("fair-share: the big tenant alone");
    let big_alone_tps = big(bench, &server, bench.time).await?.throughput_tps;
    let (mut ratios, mut note) = (Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.begin_round("fair-share", round, "");
        let alone = small(bench, &server).await?;
        // The big one begins before the small one's window and ends after it.
        let long = bench.time + 2 * bench.sizes.warm_up;
        let (beside, big) = tokio::try_join!(small(bench, &server), big(bench, &server, long))?;
        anyhow::ensure!(
            big.throughput_tps >= big_alone_tps * bench.sizes.big_keeps,
            "the big tenant had {:.0} transactions/s of the {big_alone_tps:.0} that it has alone",
            big.throughput_tps
        );
        ratios.push(beside.latency.p99_ms / alone.latency.p99_ms);
        note = format!(
            "last round: p50 {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms, beside {:.0} transactions/s of {big_alone_tps:.0} \
             alone; both p99s have the driver's timers in them, up to 1 ms, which pulls the ratio towards 1",
            alone.latency.p50_ms,
            beside.latency.p50_ms,
            alone.latency.p99_ms,
            beside.latency.p99_ms,
            big.throughput_tps
        );
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

async fn small(bench: &Bench, server: &Server) -> anyhow::Result<Report> {
    let options = RunOptions {
        connections: SMALL_CONNECTIONS,
        arrival: Arrival::poisson(SMALL_TPS),
        ..options(bench, server, SMALL)
    };
    served(bench, options).await
}

async fn big(bench: &Bench, server: &Server, measure: Duration) -> anyhow::Result<Report> {
    let options =
        RunOptions { connections: BIG_CONNECTIONS, measure, niceness: LAST, ..options(bench, server, BIG) };
    served(bench, options).await
}

async fn served(bench: &Bench, options: RunOptions) -> anyhow::Result<Report> {
    let report = run(workload(bench), options).await?;
    let error = report.first_error.as_deref().unwrap_or_default();
    anyhow::ensure!(report.failed == 0, "{} transactions were given up: {error}", report.failed);
    Ok(report)
}

fn workload(bench: &Bench) -> Ycsb {
    Ycsb { records: bench.sizes.ycsb_records, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, database: &str) -> RunOptions {
    RunOptions {
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        ..RunOptions::new(server.target().with_database(database))
    }
}

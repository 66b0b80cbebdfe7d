//! A small tenant beside one at full load: does it notice?
//!
//! Fulmar only. Both tenants have YCSB's tables and transactions; the small one has a few that arrive at random, the big
//! one as many as 32 connections can. The figure is the small one's p99 with the big one over that without, one after
//! the other in each round.

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::arrival::Arrival;
use crate::run::{Report, RunOptions, run, run_beside};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

const SMALL: &str = "small";
const BIG: &str = "big";

const SMALL_CONNECTIONS: usize = 4;
const SMALL_TPS: f64 = 50.0;
const BIG_CONNECTIONS: usize = 32;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar((SMALL_CONNECTIONS + BIG_CONNECTIONS) as u32).await?;
    bench.step("fair-share: loading");
    tenants::create(&server.target(), &[SMALL.to_owned(), BIG.to_owned()], |_| ()).await?;
    for database in [SMALL, BIG] {
        let brief =
            RunOptions { connections: 1, measure: bench.sizes.warm_up, ..options(bench, &server, database) };
        run(workload(bench), brief).await?;
    }
    let (mut ratios, mut note) = (Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.step(&format!("fair-share: round {round} of {}", bench.rounds));
        let alone = checked(run(workload(bench), small(bench, &server)).await?)?;
        let big = RunOptions { connections: BIG_CONNECTIONS, ..options(bench, &server, BIG) };
        let small = (workload(bench), small(bench, &server));
        let (beside, big) = run_beside(small, (workload(bench), big)).await?;
        let beside = checked(beside)?;
        ratios.push(beside.latency.p99_ms / alone.latency.p99_ms);
        note = format!(
            "last round: p50 {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms, beside {:.0} transactions/s",
            alone.latency.p50_ms,
            beside.latency.p50_ms,
            alone.latency.p99_ms,
            beside.latency.p99_ms,
            big.throughput_tps
        );
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

fn small(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions {
        connections: SMALL_CONNECTIONS,
        arrival: Arrival::poisson(SMALL_TPS),
        ..options(bench, server, SMALL)
    }
}

fn checked(report: Report) -> anyhow::Result<Report> {
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
        ..RunOptions::new(server.target().with_database(database))
    }
}

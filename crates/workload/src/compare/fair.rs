//! A small tenant beside one at full load: does it notice?
//!
//! Fulmar only. Both tenants have YCSB's tables and transactions; the small one has a few that arrive at random, the big
//! one as many as 32 connections can. Server and drivers have processors of their own: tenants are looked at, and not what the
//! drivers do to the server on the same machine. The figure is the small one's p99 with the big one over that without, one after
//! the other in each round. Who starves the big one gains nothing: it must keep half of the rate that it has alone in the same
//! round, as a median, or the case fails. A p99 is made by the slowest hundredth, so the small one is measured longer than others: of ten seconds' five hundred
//! transactions it would be the fifth slowest, which is chance.

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::arrival::Arrival;
use crate::measure::Spread;
use crate::run::{RunOptions, run, run_beside};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

const SMALL: &str = "small";
const BIG: &str = "big";

const SMALL_CONNECTIONS: usize = 4;
const SMALL_TPS: f64 = 50.0;
const BIG_CONNECTIONS: usize = 32;

/// How often the time of other measurements.
const SMALL_TIMES: u32 = 4;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar_apart(0, (SMALL_CONNECTIONS + BIG_CONNECTIONS) as u32).await?;
    bench.step("fair-share: loading");
    tenants::create(&server.target(), &[SMALL.to_owned(), BIG.to_owned()], |_| ()).await?;
    for database in [SMALL, BIG] {
        let brief =
            RunOptions { connections: 1, measure: bench.sizes.warm_up, ..options(bench, &server, database) };
        run(workload(bench), brief).await?;
    }
    let (mut ratios, mut kept, mut note) = (Vec::new(), Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.begin_round("fair-share", round, "");
        let alone = run(workload(bench), small(bench, &server)).await?.complete()?;
        let big_alone_tps = run(workload(bench), big(bench, &server)).await?.complete()?.throughput_tps;
        let (small, big) = (small(bench, &server), big(bench, &server));
        let (beside, big) = run_beside((workload(bench), small), (workload(bench), big)).await?;
        let (beside, big) = (beside.complete()?, big.complete()?);
        kept.push(big.throughput_tps / big_alone_tps);
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
    let kept = Spread::of(kept).map_or(0.0, |kept| kept.median);
    anyhow::ensure!(
        kept >= bench.sizes.big_keeps,
        "the big tenant had {kept:.2} of the transactions that it has alone (median)"
    );
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

fn small(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions {
        connections: SMALL_CONNECTIONS,
        arrival: Arrival::poisson(SMALL_TPS),
        measure: bench.time * SMALL_TIMES,
        ..options(bench, server, SMALL)
    }
}

/// Its driver gives way alone as beside the small one's.
fn big(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions { connections: BIG_CONNECTIONS, gives_way: true, ..options(bench, server, BIG) }
}

fn workload(bench: &Bench) -> Ycsb {
    Ycsb { records: bench.sizes.ycsb_records, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, database: &str) -> RunOptions {
    RunOptions {
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        apart: true,
        ..RunOptions::new(server.target().with_database(database))
    }
}

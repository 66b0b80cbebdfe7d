//! `fair-share`: the latency of a small tenant while another tenant of the node is at full load.
//!
//! Only Fulmar is measured. Both tenants have the tables and transactions of YCSB. The small tenant
//! runs few transactions, at random times. The big tenant runs as many as 32 connections can.
//!
//! - Server and drivers use separate CPUs, so that the case measures the tenants' effect on each
//!   other and not that of the drivers on the server.
//! - The result is the small tenant's p99 with the big tenant active, over its p99 without,
//!   measured one after the other in each round.
//! - Starving the big tenant does not help: the case fails unless the big tenant keeps half of the
//!   rate that it has alone in the same round (median over the rounds).
//! - The small tenant is measured for four times as long as others. A p99 is determined by the
//!   slowest 1 %: of the 500 transactions of 10 s it would be the fifth slowest, which is chance.

use super::cases::Case;
use super::result::CaseResult;
use super::rounds::Bench;
use crate::arrival::Arrival;
use crate::measure::Spread;
use crate::run::{RunOptions, run, run_with_background_load};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

const SMALL: &str = "small";
const BIG: &str = "big";

const SMALL_CONNECTIONS: usize = 4;
const SMALL_TPS: f64 = 50.0;
const BIG_CONNECTIONS: usize = 32;

/// The small tenant's measuring time, as a multiple of the usual one.
const SMALL_TIME_FACTOR: u32 = 4;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar_on_separate_cpus(0, (SMALL_CONNECTIONS + BIG_CONNECTIONS) as u32).await?;
    bench.step("fair-share: loading");
    tenants::create(&server.target(), &[SMALL.to_owned(), BIG.to_owned()], |_| ()).await?;
    for database in [SMALL, BIG] {
        let brief =
            RunOptions { connections: 1, measure: bench.sizes.warm_up, ..options(bench, &server, database) };
        run(workload(bench), brief).await?;
    }
    let (mut ratios, mut big_shares, mut note) = (Vec::new(), Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.begin_round("fair-share", round, "");
        let alone = run(workload(bench), small(bench, &server)).await?.complete()?;
        let big_alone_tps = run(workload(bench), big(bench, &server)).await?.complete()?.throughput_tps;
        let (small, big) = (small(bench, &server), big(bench, &server));
        let (contended, big) =
            run_with_background_load((workload(bench), small), (workload(bench), big)).await?;
        let (contended, big) = (contended.complete()?, big.complete()?);
        big_shares.push(big.throughput_tps / big_alone_tps);
        ratios.push(contended.latency.p99_ms / alone.latency.p99_ms);
        note = format!(
            "last round: p50 {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms; the big tenant ran {:.0} \
             transactions/s instead of {big_alone_tps:.0}; both p99s include up to 1 ms of the \
             driver's timer inaccuracy, which pulls the ratio towards 1",
            alone.latency.p50_ms,
            contended.latency.p50_ms,
            alone.latency.p99_ms,
            contended.latency.p99_ms,
            big.throughput_tps
        );
    }
    let big_share = Spread::of(big_shares).map_or(0.0, |shares| shares.median);
    anyhow::ensure!(
        big_share >= bench.sizes.min_big_rate_share,
        "the big tenant kept only {big_share:.2} of the rate that it has alone (median)"
    );
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

fn small(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions {
        connections: SMALL_CONNECTIONS,
        arrival: Arrival::poisson(SMALL_TPS),
        measure: bench.time * SMALL_TIME_FACTOR,
        ..options(bench, server, SMALL)
    }
}

/// Options of the big tenant. Its driver has low priority also when it runs alone, as it does
/// concurrently with the small tenant's driver.
fn big(bench: &Bench, server: &Server) -> RunOptions {
    RunOptions { connections: BIG_CONNECTIONS, idle_priority: true, ..options(bench, server, BIG) }
}

fn workload(bench: &Bench) -> Ycsb {
    Ycsb { records: bench.sizes.ycsb_records, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, database: &str) -> RunOptions {
    RunOptions {
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        separate_cpus: true,
        ..RunOptions::new(server.target().with_database(database))
    }
}

//! Consolidation of many tenants on one node.
//!
//! - `noisy-neighbour`: whether an overloading tenant slows down the others (ElasTraS, figure 12).
//! - `hundred-tenants`: what 100 small tenants cost in throughput (ElasTraS, figure 11).
//!
//! Only Fulmar is measured. All tenants have the tables and transactions of YCSB and 50 MB of data
//! each, all of it in memory: the cases compare tenants, not the store.

use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::Case;
use super::result::CaseResult;
use super::rounds::Bench;
use crate::arrival::Arrival;
use crate::client::Client;
use crate::run::{Report, RunOptions, run, run_with_background_load};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

/// Number of tenants in `noisy-neighbour`, including the noisy one, and connections per tenant.
const NEIGHBOURS: u32 = 10;
const CONNECTIONS: usize = 8;
const NOISY_CONNECTIONS: usize = 32;

/// The share of the node's capacity that all tenants together request in the calm run.
const CALM_LOAD: f64 = 0.5;

/// The noisy tenant's share of the calm load, and the factor by which it increases its load. With
/// the same tenth as the other tenants, ten times its load would bring the total to 95 % of the
/// capacity. With a sixth it is 125 %.
const NOISY_SHARE: f64 = 1.0 / 6.0;
const NOISY_FACTOR: f64 = 10.0;

/// Number of tenants whose data is read concurrently.
const CONCURRENT_READERS: usize = 4;

pub(super) async fn measure_noisy(
    bench: &Bench,
    wanted: &[&'static Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let databases = tenants::names("tenant_", NEIGHBOURS);
    let connections = CONNECTIONS * databases.len() + NOISY_CONNECTIONS;
    let data_bytes = workload(bench).data_bytes() * databases.len() as u64;
    let server = bench.fulmar_on_separate_cpus(data_bytes, connections as u32).await?;
    load(bench, &server, "noisy-neighbour", &databases).await?;
    let (mut ratios, mut notes) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds {
        bench.begin_round("noisy-neighbour", round, "");
        // As many driver threads as the later runs have. The capacity is measured in every round,
        // because it varies over time, as the latencies do.
        let closed =
            RunOptions { threads: 2, ..options_on_separate_cpus(bench, &server, &databases, CONNECTIONS) };
        let capacity_tps = run(workload(bench), closed).await?.complete()?.throughput_tps;
        let neighbours = Neighbours { bench, server: &server, databases: &databases, capacity_tps };
        let (calm, _) = neighbours.load(1.0).await?;
        let (disturbed, noisy) = neighbours.load(NOISY_FACTOR).await?;
        ratios.push(disturbed.latency.mean_ms / calm.latency.mean_ms);
        notes.push(format!(
            "round {round}: mean {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms at {:.0} transactions/s; \
             the noisy tenant requested {:.0} and got {:.0}; capacity {capacity_tps:.0}",
            calm.latency.mean_ms,
            disturbed.latency.mean_ms,
            calm.latency.p99_ms,
            disturbed.latency.p99_ms,
            disturbed.throughput_tps,
            noisy.offered_tps.unwrap_or(0.0),
            noisy.throughput_tps,
        ));
    }
    let result = |case: &&'static Case| {
        let result = CaseResult::value(case, ratios.clone());
        notes.iter().fold(result, |result, note| result.with_note(note))
    };
    Ok(wanted.iter().map(result).collect())
}

/// Tenants that together request a share of the node's capacity.
struct Neighbours<'a> {
    bench: &'a Bench,
    server: &'a Server,
    databases: &'a [String],
    capacity_tps: f64,
}

impl Neighbours<'_> {
    /// Runs the other tenants at their calm load, and concurrently the first tenant at `factor`
    /// times its calm load. Within a round the other tenants draw the same start times in each run.
    async fn load(&self, factor: f64) -> anyhow::Result<(Report, Report)> {
        let (noisy, others) = self.databases.split_at(1);
        let calm_tps = self.capacity_tps * CALM_LOAD;
        let others = RunOptions {
            arrival: Arrival::poisson(calm_tps * (1.0 - NOISY_SHARE)),
            ..options_on_separate_cpus(self.bench, self.server, others, CONNECTIONS)
        };
        let noisy = RunOptions {
            arrival: Arrival::poisson(calm_tps * NOISY_SHARE * factor),
            ..options_on_separate_cpus(self.bench, self.server, noisy, NOISY_CONNECTIONS)
        };
        let (others, noisy) =
            run_with_background_load((workload(self.bench), others), (workload(self.bench), noisy)).await?;
        let (others, noisy) = (others.complete()?, noisy.complete()?);
        // If the noisy tenant is starved, the other tenants are not disturbed.
        let requested_tps = calm_tps * NOISY_SHARE * factor;
        anyhow::ensure!(
            noisy.throughput_tps >= requested_tps * self.bench.sizes.min_big_rate_share,
            "the noisy tenant requested {requested_tps:.0} transactions/s and got only {:.0}",
            noisy.throughput_tps
        );
        Ok((others, noisy))
    }
}

/// Measures with one tenant and with all. The total number of connections, and so the concurrency,
/// is the same.
pub(super) async fn measure_hundred_tenants(
    bench: &Bench,
    wanted: &[&'static Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let databases = tenants::names("tenant_", bench.sizes.small_tenants);
    let data_bytes = workload(bench).data_bytes() * databases.len() as u64;
    let server = bench.fulmar_with_memory_for(data_bytes, databases.len() as u32).await?;
    load(bench, &server, "hundred-tenants", &databases).await?;
    let (mut ratios, mut note) = (Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.begin_round("hundred-tenants", round, "");
        let one = throughput(bench, &server, &databases[..1], databases.len()).await?;
        let all = throughput(bench, &server, &databases, 1).await?;
        ratios.push(all / one);
        note =
            format!("last round: {one:.0} transactions/s with one tenant, {all:.0} with {}", databases.len());
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

async fn throughput(
    bench: &Bench,
    server: &Server,
    databases: &[String],
    connections: usize,
) -> anyhow::Result<f64> {
    // The data of an idle tenant may have been evicted from memory.
    read_all(server, databases).await?;
    let report = run(workload(bench), options(bench, server, databases, connections)).await?.complete()?;
    anyhow::ensure!(report.transactions > 0, "no transaction committed");
    Ok(report.throughput_tps)
}

/// Creates the tenants, loads them, and reads all their data into memory.
async fn load(bench: &Bench, server: &Server, case: &str, databases: &[String]) -> anyhow::Result<()> {
    let megabytes = workload(bench).data_bytes() * databases.len() as u64 / 1_000_000;
    bench.step(&format!("{case}: loading {} tenants, {megabytes} MB", databases.len()));
    tenants::create(&server.target(), databases, |_| ()).await?;
    let brief = RunOptions {
        warm_up: Duration::ZERO,
        measure: bench.sizes.warm_up,
        ..options(bench, server, databases, 1)
    };
    run(workload(bench), brief).await?;
    read_all(server, databases).await
}

/// Reads every row, so that all data is in memory.
async fn read_all(server: &Server, databases: &[String]) -> anyhow::Result<()> {
    let target = server.target();
    stream::iter(databases)
        .map(|database| {
            let target = target.with_database(database);
            async move {
                let mut client = Client::connect(&target).await?;
                for table in ["ycsb_primary", "ycsb_secondary_1", "ycsb_secondary_2"] {
                    client.query(&format!("SELECT max(length(field9)) FROM {table}")).await?;
                }
                anyhow::Ok(client.close().await?)
            }
        })
        .buffer_unordered(CONCURRENT_READERS)
        .try_collect()
        .await
}

fn workload(bench: &Bench) -> Ycsb {
    Ycsb { records: bench.sizes.small_tenant_records, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, databases: &[String], connections: usize) -> RunOptions {
    RunOptions {
        databases: databases.to_vec(),
        connections,
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        ..RunOptions::new(server.target())
    }
}

/// Like [`options`], with drivers that use only the CPUs reserved for them.
fn options_on_separate_cpus(
    bench: &Bench,
    server: &Server,
    databases: &[String],
    connections: usize,
) -> RunOptions {
    RunOptions { separate_cpus: true, ..options(bench, server, databases, connections) }
}

//! Many tenants on one node: does a loud one disturb the others (ElasTraS's figure 12), and what do a hundred small ones
//! cost in throughput (its figure 11)?
//!
//! Fulmar only. All tenants have YCSB's tables and transactions, 50 MB of data each, and all of it in memory: tenants are
//! compared here, not the store.

use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::arrival::Arrival;
use crate::client::Client;
use crate::run::{Report, RunOptions, run, run_beside};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

/// Tenants of `noisy-neighbour`, the loud one among them, and the connections of each.
const NEIGHBOURS: u32 = 10;
const CONNECTIONS: usize = 8;
const LOUD_CONNECTIONS: usize = 32;

/// The part of the node's capacity that all ask for in calm times.
const CALM: f64 = 0.5;

/// The loud tenant's part of the calm load, and how often it asks for that in the end. With a tenth, as the others, ten times
/// its load would come to 95 % of the capacity; so it is 125 %.
const LOUD_SHARE: f64 = 1.0 / 6.0;
const LOUD_FACTOR: f64 = 10.0;

/// Tenants whose data is read at a time.
const CONCURRENT: usize = 4;

pub(super) async fn measure_noisy(
    bench: &Bench,
    wanted: &[&'static Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let databases = tenants::names("tenant_", NEIGHBOURS);
    let connections = CONNECTIONS * databases.len() + LOUD_CONNECTIONS;
    let data_bytes = workload(bench).data_bytes() * databases.len() as u64;
    let server = bench.fulmar_apart(data_bytes, connections as u32).await?;
    load(bench, &server, "noisy-neighbour", &databases).await?;
    let (mut ratios, mut notes) = (Vec::new(), Vec::new());
    for round in 1..=bench.rounds {
        bench.begin_round("noisy-neighbour", round, "");
        // As many driver threads as there will be. The capacity is of this hour, as what is compared is.
        let closed = RunOptions { threads: 2, ..apart(bench, &server, &databases, CONNECTIONS) };
        let capacity_tps = run(workload(bench), closed).await?.complete()?.throughput_tps;
        let neighbours = Neighbours { bench, server: &server, databases: &databases, capacity_tps };
        let (calm, _) = neighbours.load(1.0).await?;
        let (disturbed, loud) = neighbours.load(LOUD_FACTOR).await?;
        ratios.push(disturbed.latency.mean_ms / calm.latency.mean_ms);
        notes.push(format!(
            "round {round}: mean {:.2} -> {:.2} ms, p99 {:.2} -> {:.2} ms at {:.0} transactions/s; the loud one asked for \
             {:.0} and got {:.0}; capacity {capacity_tps:.0}",
            calm.latency.mean_ms,
            disturbed.latency.mean_ms,
            calm.latency.p99_ms,
            disturbed.latency.p99_ms,
            disturbed.throughput_tps,
            loud.offered_tps.unwrap_or(0.0),
            loud.throughput_tps,
        ));
    }
    let result = |case: &&'static Case| {
        let result = CaseResult::value(case, ratios.clone());
        notes.iter().fold(result, |result, note| result.with_note(note))
    };
    Ok(wanted.iter().map(result).collect())
}

/// Tenants that ask for a part of what their node can do.
struct Neighbours<'a> {
    bench: &'a Bench,
    server: &'a Server,
    databases: &'a [String],
    capacity_tps: f64,
}

impl Neighbours<'_> {
    /// The others at their calm load, beside the first one at so many times its own. Within a round equal moments are drawn for
    /// the others.
    async fn load(&self, factor: f64) -> anyhow::Result<(Report, Report)> {
        let (loud, others) = self.databases.split_at(1);
        let calm_tps = self.capacity_tps * CALM;
        let others = RunOptions {
            arrival: Arrival::poisson(calm_tps * (1.0 - LOUD_SHARE)),
            ..apart(self.bench, self.server, others, CONNECTIONS)
        };
        let loud = RunOptions {
            arrival: Arrival::poisson(calm_tps * LOUD_SHARE * factor),
            ..apart(self.bench, self.server, loud, LOUD_CONNECTIONS)
        };
        let (others, loud) = run_beside((workload(self.bench), others), (workload(self.bench), loud)).await?;
        let (others, loud) = (others.complete()?, loud.complete()?);
        // Else nobody was disturbed.
        let asked_tps = calm_tps * LOUD_SHARE * factor;
        anyhow::ensure!(
            loud.throughput_tps >= asked_tps * self.bench.sizes.big_keeps,
            "the loud tenant has asked for {asked_tps:.0} transactions a second and got {:.0}",
            loud.throughput_tps
        );
        Ok((others, loud))
    }
}

/// As many connections, and so transactions at once, with one tenant as with all.
pub(super) async fn measure_hundred(
    bench: &Bench,
    wanted: &[&'static Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let databases = tenants::names("tenant_", bench.sizes.small_tenants);
    let data_bytes = workload(bench).data_bytes() * databases.len() as u64;
    let server = bench.fulmar_holding(data_bytes, databases.len() as u32).await?;
    load(bench, &server, "hundred-tenants", &databases).await?;
    let (mut ratios, mut note) = (Vec::new(), String::new());
    for round in 1..=bench.rounds {
        bench.begin_round("hundred-tenants", round, "");
        let one = throughput(bench, &server, &databases[..1], databases.len()).await?;
        let all = throughput(bench, &server, &databases, 1).await?;
        ratios.push(all / one);
        note = format!("last round: {one:.0} transactions/s with one, {all:.0} with {}", databases.len());
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, ratios.clone()).with_note(&note)).collect())
}

async fn throughput(
    bench: &Bench,
    server: &Server,
    databases: &[String],
    connections: usize,
) -> anyhow::Result<f64> {
    // A tenant that nobody has used for a while has left memory.
    read_all(server, databases).await?;
    let report = run(workload(bench), options(bench, server, databases, connections)).await?.complete()?;
    anyhow::ensure!(report.transactions > 0, "no transaction committed");
    Ok(report.throughput_tps)
}

/// Makes these tenants, and brings all their data into memory.
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
        .buffer_unordered(CONCURRENT)
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

/// For drivers with processors of their own.
fn apart(bench: &Bench, server: &Server, databases: &[String], connections: usize) -> RunOptions {
    RunOptions { apart: true, ..options(bench, server, databases, connections) }
}

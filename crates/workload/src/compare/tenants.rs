//! `tenants-500-cpu` and `tenants-500-memory`: what many tenants with one connection and little
//! load each cost the server.
//!
//! A transaction is one prepared statement by primary key, and 90 % of them are reads. First, the
//! capacity of the peer is measured with all connections busy. Then both servers serve half of that
//! rate, at random times. The results are the CPU time in the measured window and the memory at its
//! end.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::cases::{Case, case};
use super::result::CaseResult;
use super::rounds::{Bench, Pair, Side};
use crate::arrival::Arrival;
use crate::run::{RunEvent, RunOptions, run};
use crate::server::{ProcessTree, Server};
use crate::tenants;
use crate::ycsb::Ycsb;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let databases = tenants::names("tenant_", bench.sizes.tenants);
    let mut pair = bench.pair(bench.sizes.tenants).await?;
    pair.each(async |server| {
        bench.step(&format!("creating {} databases in {}", databases.len(), server.name()));
        tenants::create(&server.target(), &databases, |_| ()).await?;
        bench.step(&format!("loading {} databases in {}", databases.len(), server.name()));
        let brief = RunOptions { measure: bench.sizes.warm_up, ..options(bench, server, &databases) };
        run(workload(bench), brief).await?;
        bench.step(&format!("settling {}", server.name()));
        stream::iter(&databases)
            .map(|database| server.settle(database))
            .buffer_unordered(4)
            .try_collect()
            .await
    })
    .await?;
    let rate_tps = capacity(bench, &mut pair, &databases).await? / 2.0;
    let cases = [case("tenants-500-cpu"), case("tenants-500-memory")];
    let results = bench.alternate(&mut pair, cases, async |server| {
        let options =
            RunOptions { arrival: Arrival::poisson(rate_tps), ..options(bench, server, &databases) };
        cost(workload(bench), options, server, bench.sizes.min_tenants_rate_share).await
    });
    let results = results.await.map(|result| result.with_note(format!("at {rate_tps:.0} transactions/s")));
    Ok(results.into_iter().filter(|result| wanted.iter().any(|case| case.name == result.name)).collect())
}

fn workload(bench: &Bench) -> Ycsb {
    Ycsb { records: bench.sizes.tenant_records, operations: 1, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, databases: &[String]) -> RunOptions {
    RunOptions {
        databases: databases.to_vec(),
        connections: 1,
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        ..RunOptions::new(server.target())
    }
}

/// The peer's transactions per second with all connections busy.
async fn capacity(bench: &Bench, pair: &mut Pair, databases: &[String]) -> anyhow::Result<f64> {
    bench.step(&format!("measuring the capacity of {}", bench.peer.name()));
    pair.alone(Side::Peer, &mut async |server: &Server| {
        Ok(run(workload(bench), options(bench, server, databases)).await?.throughput_tps)
    })
    .await
}

/// Returns the microseconds of server CPU time per transaction, and the server's memory in MiB.
/// Fails if the server does not serve a share of `keep` of the offered rate.
async fn cost(
    workload: Ycsb,
    mut options: RunOptions,
    server: &Server,
    keep: f64,
) -> anyhow::Result<[f64; 2]> {
    let samples = Arc::new(Mutex::new(Samples::default()));
    let (taken, processes) = (samples.clone(), server.processes()?);
    options.watcher = Some(Arc::new(move |event| {
        if let Ok(mut samples) = taken.lock() {
            samples.take(event, processes);
        }
    }));
    let report = run(workload, options).await?;
    let offered = report.offered_tps.unwrap_or(0.0);
    anyhow::ensure!(report.failed == 0, "{} transactions failed: {:?}", report.failed, report.first_error);
    anyhow::ensure!(
        report.throughput_tps >= offered * keep,
        "only {:.0} of {offered:.0} transactions/s were served",
        report.throughput_tps
    );
    let samples = samples.lock().map_err(|_| anyhow::anyhow!("sampler panicked"))?;
    let (cpu, pss_bytes) = samples.cost().context("could not measure the server's processes")?;
    Ok([cpu.as_secs_f64() * 1e6 / report.transactions.max(1) as f64, pss_bytes as f64 / f64::from(1 << 20)])
}

/// Values read from `/proc` when the measured window opens and closes.
#[derive(Default)]
struct Samples {
    opened: Option<Duration>,
    closed: Option<Duration>,
    pss_bytes: Option<u64>,
}

impl Samples {
    fn take(&mut self, event: &RunEvent, processes: ProcessTree) {
        match event {
            RunEvent::Opens => self.opened = processes.cpu().ok(),
            RunEvent::Closes => {
                self.closed = processes.cpu().ok();
                self.pss_bytes = processes.pss_bytes().ok();
            }
            _ => {}
        }
    }

    fn cost(&self) -> Option<(Duration, u64)> {
        Some((self.closed?.saturating_sub(self.opened?), self.pss_bytes?))
    }
}

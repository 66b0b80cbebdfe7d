//! `idle-core-percent` and `metadata-per-txn`: what a cluster costs while nothing happens to it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::{Bench, IDLE, METADATA, NODES, case, probe};
use crate::compare::result::CaseResult;
use crate::server::{Cluster, Usage};
use crate::tenants;

/// How long a cluster is left alone before it is measured.
const SETTLE: Duration = Duration::from_secs(30);
/// Tenants under load in `metadata-per-txn`.
const ACTIVE: u32 = 60;
/// The interval of a tenant's transactions in `metadata-per-txn`. There are many, because what a
/// cluster requests in the background varies by a few dozen requests from one round to the next.
const EVERY: Duration = Duration::from_millis(20);
/// The maximum size of etcd's metrics.
const MAX_METRICS_BYTES: u64 = 16 << 20;

pub(super) async fn idle(bench: &Bench<'_>) -> anyhow::Result<CaseResult> {
    let cluster = bench.cluster().await?;
    bench.create(&cluster, &tenants::names("idle_", bench.arguments.idle_tenants)).await?;
    bench.progress.step(&format!("{IDLE}: letting the cluster settle"));
    tokio::time::sleep(SETTLE).await;
    let trees = (0..NODES).map(|node| cluster.processes(node)).collect::<anyhow::Result<Vec<_>>>()?;
    let mut rounds = Vec::new();
    for round in 1..=bench.arguments.rounds {
        bench.progress.step(&format!("{IDLE}: round {round} of {}", bench.arguments.rounds));
        let cpu = || trees.iter().map(|tree| tree.cpu()).sum::<std::io::Result<Duration>>();
        let (before, begun) = (cpu()?, Instant::now());
        tokio::time::sleep(Duration::from_secs(bench.arguments.seconds)).await;
        let used = cpu()?.saturating_sub(before);
        rounds.push(100.0 * used.as_secs_f64() / begun.elapsed().as_secs_f64());
    }
    let memory = Usage::of(&trees)?.pss_bytes >> 20;
    let note = format!("{} tenants; {memory} MiB of memory together", bench.arguments.idle_tenants);
    Ok(CaseResult::value(case(IDLE)?, rounds).with_note(note))
}

pub(super) async fn metadata(bench: &Bench<'_>) -> anyhow::Result<CaseResult> {
    let mut cluster = bench.cluster().await?;
    let active = tenants::names("active_", ACTIVE);
    bench.create(&cluster, &active).await?;
    let tasks = LocalSet::new();
    let work = async {
        let time = Duration::from_secs(bench.arguments.seconds);
        let mut clients = JoinSet::new();
        let samples: probe::Samples = Rc::new(RefCell::new(Vec::new()));
        let mut rounds = Vec::new();
        let mut notes = Vec::new();
        for round in 1..=bench.arguments.rounds {
            bench.progress.step(&format!("{METADATA}: round {round} of {}", bench.arguments.rounds));
            clients.shutdown().await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            let idle = requests_during(&mut cluster, time).await?;
            for (number, database) in active.iter().enumerate() {
                let targets = (0..NODES).map(|node| cluster.target(node).with_database(database)).collect();
                clients.spawn_local(probe::run(targets, number % NODES, EVERY, samples.clone()));
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
            samples.borrow_mut().clear();
            let busy = requests_during(&mut cluster, time).await?;
            let done = samples.borrow().iter().filter(|sample| sample.error.is_none()).count();
            ensure!(done > 0, "no transaction committed");
            rounds.push((busy - idle).max(0.0) / done as f64);
            notes.push(format!("{busy} requests with {done} transactions, {idle} without"));
        }
        let result = CaseResult::value(case(METADATA)?, rounds);
        Ok(notes.into_iter().fold(result, CaseResult::with_note))
    };
    tasks.run_until(work).await
}

/// The requests that etcd gets in this time, except those that keep its own leases and watches.
async fn requests_during(cluster: &mut Cluster, time: Duration) -> anyhow::Result<f64> {
    let endpoint = cluster.etcd().endpoints().first().cloned().context("there is no etcd")?;
    let before = requests(&endpoint).await?;
    tokio::time::sleep(time).await;
    Ok(requests(&endpoint).await? - before)
}

async fn requests(endpoint: &str) -> anyhow::Result<f64> {
    let mut stream = TcpStream::connect(endpoint).await?;
    stream.write_all(format!("GET /metrics HTTP/1.0\r\nHost: {endpoint}\r\n\r\n").as_bytes()).await?;
    let mut response = String::new();
    stream.take(MAX_METRICS_BYTES).read_to_string(&mut response).await?;
    Ok(response.lines().filter_map(handled).sum())
}

/// The count of a metric line of requests to the key-value service.
fn handled(line: &str) -> Option<f64> {
    let labels = line.strip_prefix("grpc_server_handled_total{")?;
    let (labels, value) = labels.split_once("} ")?;
    labels.contains("grpc_service=\"etcdserverpb.KV\"").then(|| value.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::handled;

    #[test]
    fn requests_to_the_key_value_service_are_counted() {
        let line = |service| {
            format!(
                "grpc_server_handled_total{{grpc_code=\"OK\",grpc_method=\"Txn\",grpc_service=\"{service}\"}} 12"
            )
        };
        assert_eq!(handled(&line("etcdserverpb.KV")), Some(12.0));
        assert_eq!(handled(&line("etcdserverpb.Lease")), None);
        assert_eq!(handled("# TYPE grpc_server_handled_total counter"), None);
    }
}

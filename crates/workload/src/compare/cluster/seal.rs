//! `seal-worst-ms`: take-overs from a node that lives and commits.
//!
//! The other nodes lose the way to the node, and take its databases over: they seal its log while
//! clients of the node append to it 200 times a second. The node reaches etcd and the store all the
//! time. Every put of the store takes 20 to 50 ms longer, so the sealing node and the writer compete
//! for each slot of the log.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::failover::{all_answered, move_tenants};
use super::probe::{self, Samples};
use super::{Bench, NODES, SEAL, case};
use crate::compare::result::CaseResult;
use crate::measure::Spread;
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;

/// Tenants of the node whose clients are connected to it. Each commits twice a second.
const WRITERS: u32 = 100;
const COMMITS_PER_SECOND: f64 = 2.0 * WRITERS as f64;
/// Tenants of the node whose clients are connected to the other nodes.
const WAITING: u32 = 20;
/// The share of the writers' rate that the node must serve before a take-over.
const MIN_RATE_SHARE: f64 = 0.8;
/// How long the cluster is left alone before each take-over.
const QUIET: Duration = Duration::from_secs(3);
const MIN_PUT_DELAY: Duration = Duration::from_millis(20);
const MAX_PUT_DELAY: Duration = Duration::from_millis(50);

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<CaseResult> {
    let setup = ClusterSetup {
        store: ClusterStore::S3,
        put_delay: Some(MIN_PUT_DELAY..=MAX_PUT_DELAY),
        isolated: true,
        ..ClusterSetup::default()
    };
    let cluster = bench.start(setup).await?;
    let (writers, waiting) = (tenants::names("writer_", WRITERS), tenants::names("waiting_", WAITING));
    bench.create(&cluster, &writers).await?;
    bench.create(&cluster, &waiting).await?;
    let tasks = LocalSet::new();
    tasks.run_until(take_over(bench, &cluster, &writers, &waiting)).await
}

async fn take_over(
    bench: &Bench<'_>,
    cluster: &Cluster,
    writers: &[String],
    waiting: &[String],
) -> anyhow::Result<CaseResult> {
    let network = cluster.network().context("the nodes are not isolated")?;
    let all = [writers, waiting].concat();
    let (mut times, mut rates, mut last_commits) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.arguments.kills {
        // The first node stays: the requests to administer the cluster go there.
        let node = 1 + round as usize % (NODES - 1);
        let others: Vec<usize> = (0..NODES).filter(|other| *other != node).collect();
        bench.progress.step(&format!("{SEAL}: take-over {} of {}", round + 1, bench.arguments.kills));
        move_tenants(cluster, &all, |_| node).await?;
        let mut clients = JoinSet::new();
        let mut run = |databases: &[String], nodes: &[usize]| {
            let samples: Vec<Samples> = databases.iter().map(|_| Rc::new(RefCell::new(Vec::new()))).collect();
            for (number, (database, samples)) in databases.iter().zip(&samples).enumerate() {
                let targets =
                    nodes.iter().map(|node| cluster.target(*node).with_database(database)).collect();
                clients.spawn_local(probe::run(
                    targets,
                    number % nodes.len(),
                    probe::INTERVAL,
                    samples.clone(),
                ));
            }
            samples
        };
        let (written, waited) = (run(writers, &[node]), run(waiting, &others));
        tokio::time::sleep(QUIET).await;
        let since = Instant::now();
        tokio::time::sleep(QUIET).await;
        rates.push(commits(&written, since).len() as f64 / since.elapsed().as_secs_f64());
        let cut = Instant::now();
        for other in &others {
            network.cut_between(*other, node)?;
        }
        let answered = all_answered(&waited, cut).await?;
        times.push(answered.duration_since(cut).as_secs_f64() * 1000.0);
        // The writers reach the new owners only when the node has joined again.
        let last = commits(&written, cut).into_iter().filter(|done| *done < answered).max();
        last_commits.extend(last.map(|last| last.duration_since(cut).as_secs_f64() * 1000.0));
        clients.shutdown().await;
        for other in &others {
            network.heal_between(*other, node)?;
        }
        cluster.wait_until_alive(NODES).await?;
    }
    let rate = Spread::of(rates.clone()).map_or(0.0, |spread| spread.median);
    ensure!(
        rate >= MIN_RATE_SHARE * COMMITS_PER_SECOND,
        "the node committed {rate:.0} times per second before a take-over, not {COMMITS_PER_SECOND:.0}"
    );
    let text = |name: &str, values| match Spread::of(values) {
        Some(Spread { median, min, max, .. }) => format!("{name}: {median:.0} ({min:.0} to {max:.0})"),
        None => format!("{name}: none"),
    };
    let worst = times.iter().copied().fold(0.0, f64::max);
    Ok(CaseResult::value(case(SEAL)?, vec![worst])
        .with_note(text(&format!("ms of {} take-overs", times.len()), times))
        .with_note(text("commits/s before", rates))
        .with_note(text("last commit of the node, in ms after the cut", last_commits)))
}

/// When the transactions committed that were answered since this time.
fn commits(samples: &[Samples], since: Instant) -> Vec<Instant> {
    let of_client = |samples: &Samples| -> Vec<Instant> {
        let samples = samples.borrow();
        let committed = samples.iter().filter(|sample| sample.done >= since && sample.error.is_none());
        committed.map(|sample| sample.done).collect()
    };
    samples.iter().flat_map(of_client).collect()
}

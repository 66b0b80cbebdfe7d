//! `failover-median-ms`: nodes are killed one after the other under load.
//!
//! Every active tenant has a client that updates a row at a constant rate, through a random node.
//! The tenants are spread evenly over the nodes before each kill. The time of a kill is the time
//! until every active tenant has answered a transaction that was sent after it. Clients of the
//! killed node connect to another one; their failures do not count.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::stream::{self, StreamExt, TryStreamExt};
use rand::RngExt;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;

use super::probe::{self, Samples};
use super::{Bench, CONCURRENT, FAILED, MEDIAN, NODES, WORST, case};
use crate::client::Client;
use crate::compare::result::CaseResult;
use crate::server::Cluster;
use crate::tenants;

/// How long the cluster is left alone before each kill, and how long after it failures count.
const QUIET: Duration = Duration::from_secs(5);
/// How long tenants may take to answer after a kill.
const TIMEOUT: Duration = Duration::from_secs(120);

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let mut cluster = bench.cluster().await?;
    let active = tenants::names("active_", bench.arguments.active);
    let idle = tenants::names("idle_", bench.arguments.idle);
    bench.create(&cluster, &active).await?;
    bench.create(&cluster, &idle).await?;
    let tasks = LocalSet::new();
    tasks.run_until(kill_nodes(bench, &mut cluster, &active)).await
}

async fn kill_nodes(
    bench: &Bench<'_>,
    cluster: &mut Cluster,
    active: &[String],
) -> anyhow::Result<Vec<CaseResult>> {
    let mut clients = JoinSet::new();
    let samples: Vec<Samples> = active.iter().map(|_| Rc::new(RefCell::new(Vec::new()))).collect();
    for (database, samples) in active.iter().zip(&samples) {
        let targets = (0..NODES).map(|node| cluster.target(node).with_database(database)).collect();
        let home = rand::rng().random_range(0..NODES);
        clients.spawn_local(probe::run(targets, home, probe::INTERVAL, samples.clone()));
    }
    let mut times = Vec::new();
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    let (mut failed, mut failed_before) = (0, 0);
    for kill in 0..bench.arguments.kills {
        let node = kill as usize % NODES;
        bench.progress.step(&format!(
            "kill {} of {}: spreading the tenants",
            kill + 1,
            bench.arguments.kills
        ));
        spread(cluster, active, 0).await?;
        let control = Instant::now();
        tokio::time::sleep(QUIET).await;
        failed_before += errors(&samples, control, node).count();
        bench.progress.step(&format!(
            "kill {} of {}: {}",
            kill + 1,
            bench.arguments.kills,
            cluster.name(node)
        ));
        let death = Instant::now();
        cluster.kill(node)?;
        let last = all_answered(&samples, death).await?;
        times.push(last.duration_since(death).as_secs_f64() * 1000.0);
        tokio::time::sleep_until(death + QUIET).await;
        for error in errors(&samples, death, node) {
            *failures.entry(error).or_default() += 1;
            failed += 1;
        }
        cluster.start_node(node).await?;
        samples.iter().for_each(|samples| samples.borrow_mut().clear());
    }
    let worst = times.iter().copied().fold(0.0, f64::max);
    let note = format!(
        "{} kills, {} active and {} idle tenants",
        bench.arguments.kills, bench.arguments.active, bench.arguments.idle
    );
    let above = failed as f64 - failed_before as f64;
    let mut of_failures = CaseResult::value(case(FAILED)?, vec![above.max(0.0)])
        .with_note(format!("{failed} failed after the kills, {failed_before} in the same time before"));
    for (error, count) in failures {
        of_failures = of_failures.with_note(format!("{count} x {error}"));
    }
    Ok(vec![
        CaseResult::value(case(MEDIAN)?, times).with_note(note),
        CaseResult::value(case(WORST)?, vec![worst]),
        of_failures,
    ])
}

/// Waits until every tenant has answered a transaction that was sent after `death`. Returns when
/// the last one did.
pub(super) async fn all_answered(samples: &[Samples], death: Instant) -> anyhow::Result<Instant> {
    let first = |samples: &Samples| {
        let samples = samples.borrow();
        samples.iter().find(|sample| sample.sent >= death && sample.error.is_none()).map(|sample| sample.done)
    };
    loop {
        let answered: Vec<Instant> = samples.iter().filter_map(first).collect();
        if answered.len() == samples.len() {
            return answered.into_iter().max().context("there are no active tenants");
        }
        ensure!(
            death.elapsed() < TIMEOUT,
            "{} of {} tenants did not answer within {TIMEOUT:?}",
            samples.len() - answered.len(),
            samples.len()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The errors that clients of other nodes than `killed` got since `begin`.
fn errors(samples: &[Samples], begin: Instant, killed: usize) -> impl Iterator<Item = String> {
    samples.iter().flat_map(move |samples| {
        let samples = samples.borrow();
        let since = samples.iter().filter(move |sample| sample.done >= begin && sample.gateway != killed);
        since.filter_map(|sample| sample.error.clone()).collect::<Vec<_>>()
    })
}

/// Moves the tenants so that each node owns the same number of them. `first` is the node of the first
/// one.
pub(super) async fn spread(cluster: &Cluster, active: &[String], first: usize) -> anyhow::Result<()> {
    move_tenants(cluster, active, |number| (first + number) % NODES).await
}

/// Moves each tenant to the node of its number.
pub(super) async fn move_tenants(
    cluster: &Cluster,
    tenants: &[String],
    node_of: impl Fn(usize) -> usize,
) -> anyhow::Result<()> {
    let target = cluster.target(0);
    let move_one = async |(number, database): (usize, &String)| {
        let mut client = Client::connect(&target).await?;
        let node = cluster.name(node_of(number));
        client.query(&format!("ALTER DATABASE {database} MOVE TO '{node}'")).await?;
        client.close().await
    };
    let moves = stream::iter(tenants.iter().enumerate()).map(move_one).buffer_unordered(CONCURRENT);
    moves.try_collect::<()>().await.context("could not move a tenant")
}

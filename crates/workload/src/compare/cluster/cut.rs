//! `cutoff-ms` and `heal-ms`: a node loses all its connections, and gets them back.
//!
//! The clients are connected to the other nodes. A cut drops every packet of the node, so the
//! others notice only its silence. When the cut has ended, the node finds that it was replaced, starts again as a new incarnation, and serves as a gateway.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, timeout};

use super::failover::{all_answered, spread};
use super::probe::{self, Samples};
use super::{Bench, CUTOFF, HEAL, NODES, case};
use crate::client::{Client, Error};
use crate::compare::result::CaseResult;
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::{Target, tenants};

/// Tenants under load.
const ACTIVE: u32 = 60;
/// How long the cluster is left alone before a cut, and how long a cut lasts after the tenants have
/// answered.
const QUIET: Duration = Duration::from_secs(3);
/// How long one attempt to get an answer through the node may take, and all attempts together.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(200);
/// Pause between two attempts, and so the resolution of the time.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(5);
const HEAL_TIMEOUT: Duration = Duration::from_secs(120);

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let cluster = bench
        .start(ClusterSetup { store: ClusterStore::S3, isolated: true, ..ClusterSetup::default() })
        .await?;
    let active = tenants::names("active_", ACTIVE);
    bench.create(&cluster, &active).await?;
    let tasks = LocalSet::new();
    tasks.run_until(cut_nodes(bench, &cluster, &active)).await
}

async fn cut_nodes(
    bench: &Bench<'_>,
    cluster: &Cluster,
    active: &[String],
) -> anyhow::Result<Vec<CaseResult>> {
    let network = cluster.network().context("the nodes are not isolated")?;
    let (mut cutoffs, mut heals) = (Vec::new(), Vec::new());
    for round in 0..bench.arguments.rounds {
        // The first node stays: the clients' requests to administer the cluster go there.
        let node = 1 + round as usize % (NODES - 1);
        let others: Vec<usize> = (0..NODES).filter(|other| *other != node).collect();
        bench.progress.step(&format!("{CUTOFF}: round {} of {}", round + 1, bench.arguments.rounds));
        spread(cluster, active, 0).await?;
        let mut clients = JoinSet::new();
        let samples: Vec<Samples> = active.iter().map(|_| Rc::new(RefCell::new(Vec::new()))).collect();
        for (number, (database, samples)) in active.iter().zip(&samples).enumerate() {
            let targets = others.iter().map(|other| cluster.target(*other).with_database(database)).collect();
            clients.spawn_local(probe::run(targets, number % others.len(), probe::INTERVAL, samples.clone()));
        }
        tokio::time::sleep(QUIET).await;
        let cut = Instant::now();
        network.cut(node)?;
        let answered = all_answered(&samples, cut).await?;
        cutoffs.push(answered.duration_since(cut).as_secs_f64() * 1000.0);
        tokio::time::sleep(QUIET).await;
        let healed = Instant::now();
        network.heal(node)?;
        answer_through(&cluster.target(node).with_database(&active[0])).await?;
        heals.push(healed.elapsed().as_secs_f64() * 1000.0);
        clients.shutdown().await;
        cluster.wait_until_alive(NODES).await?;
    }
    let note = format!("{ACTIVE} active tenants");
    Ok(vec![CaseResult::value(case(CUTOFF)?, cutoffs).with_note(note), CaseResult::value(case(HEAL)?, heals)])
}

/// Connects through a node until a statement is answered.
async fn answer_through(target: &Target) -> anyhow::Result<()> {
    let begun = Instant::now();
    let read = async || -> Result<(), Error> {
        let mut client = Client::connect(target).await?;
        client.query("SELECT n FROM counters").await?;
        client.close().await
    };
    while !matches!(timeout(ATTEMPT_TIMEOUT, read()).await, Ok(Ok(()))) {
        ensure!(begun.elapsed() < HEAL_TIMEOUT, "the node did not answer within {HEAL_TIMEOUT:?}");
        // The address refuses connections while the node starts.
        tokio::time::sleep(ATTEMPT_PAUSE).await;
    }
    Ok(())
}

//! `driver-forwarded`: statements of the Rust driver that reach a node which does not own the
//! database.
//!
//! Each tenant has a session of the driver. Every round moves all tenants to other nodes. The first
//! statement after a move may be forwarded: its answer shows the new owner, and the driver follows
//! it. All later statements must reach the owner. The benchmark knows it, because it has moved the
//! tenant.

use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_driver::{Address, Session};
use futures::future::try_join_all;
use tokio::time::Instant;
use tokio_postgres::NoTls;

use super::failover::spread;
use super::{Bench, DRIVER, NODES, case};
use crate::compare::result::CaseResult;
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;

type Driver = fulmar_driver::Cluster<NoTls>;

const ACTIVE: u32 = 60;
/// Pause between two statements of a session.
const PAUSE: Duration = Duration::from_millis(50);
const STATEMENT: &str = "UPDATE counters SET n = n + 1 WHERE id = 1";

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<CaseResult> {
    let cluster =
        bench.start(ClusterSetup { store: ClusterStore::Directory, ..ClusterSetup::default() }).await?;
    let active = tenants::names("active_", ACTIVE);
    bench.create(&cluster, &active).await?;
    let driver = driver(&cluster);
    let connect = active.iter().map(|database| driver.connect(database));
    let mut sessions = try_join_all(connect).await.context("could not connect")?;
    let (mut rounds, mut statements) = (Vec::new(), 0);
    for round in 1..=bench.arguments.rounds {
        bench.progress.step(&format!("{DRIVER}: round {round} of {}", bench.arguments.rounds));
        let first = round as usize % NODES;
        spread(&cluster, &active, first).await?;
        let end = Instant::now() + Duration::from_secs(bench.arguments.seconds);
        let owner = |number: usize| address(&cluster, (first + number) % NODES);
        let running = sessions.iter_mut().enumerate();
        let running = running.map(|(number, session)| run(&driver, session, owner(number), end));
        let counts = try_join_all(running).await?;
        rounds.push(counts.iter().map(|count| count.forwarded).sum::<u64>() as f64);
        statements += counts.iter().map(|count| count.statements).sum::<u64>();
    }
    ensure!(statements > 0, "no statement was counted");
    let note = format!("{statements} statements of {ACTIVE} sessions, {} moves of each", rounds.len());
    // Not the median: no round may have any.
    Ok(CaseResult::value(case(DRIVER)?, vec![rounds.iter().sum()]).with_note(note))
}

/// A driver that knows all nodes.
fn driver(cluster: &Cluster) -> Driver {
    let mut config = tokio_postgres::Config::new();
    for node in 0..NODES {
        let target = cluster.target(node);
        config.user(&target.user).host(&target.host).port(target.port);
    }
    fulmar_driver::Cluster::new(config, NoTls)
}

fn address(cluster: &Cluster, node: usize) -> Address {
    let target = cluster.target(node);
    Address { host: target.host, port: target.port }
}

#[derive(Default)]
struct Count {
    statements: u64,
    /// Those that were sent to another node than the owner.
    forwarded: u64,
}

/// Runs statements of one session until `end`. The first one is not counted.
async fn run(driver: &Driver, session: &mut Session, owner: Address, end: Instant) -> anyhow::Result<Count> {
    session.batch_execute(STATEMENT).await?;
    driver.follow(session).await?;
    let mut count = Count::default();
    while Instant::now() < end {
        tokio::time::sleep(PAUSE).await;
        count.statements += 1;
        count.forwarded += u64::from(*session.address() != owner);
        session.batch_execute(STATEMENT).await?;
        driver.follow(session).await?;
    }
    Ok(count)
}

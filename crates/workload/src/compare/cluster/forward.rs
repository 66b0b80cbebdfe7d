//! `forward-ratio`: the cost of a node between the client and the owner. The store is a directory:
//! the latency of an S3 server would hide the cost.

use std::time::Duration;

use anyhow::ensure;

use super::{Bench, FORWARD, case};
use crate::client::Client;
use crate::compare::result::CaseResult;
use crate::measure::Spread;
use crate::run::{RunOptions, run};
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "ycsb";
const CONNECTIONS: usize = 8;
const RECORDS: u32 = 30_000;
const WARM_UP: Duration = Duration::from_secs(2);

/// The node that owns the database, and one that owns nothing.
const OWNER: usize = 1;
const OTHER: usize = 2;

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<CaseResult> {
    let cluster =
        bench.start(ClusterSetup { store: ClusterStore::Directory, ..ClusterSetup::default() }).await?;
    tenants::create(&cluster.target(0), &[DATABASE.to_owned()], |_| ()).await?;
    let mut admin = Client::connect(&cluster.target(0)).await?;
    for (database, node) in [(DATABASE, OWNER), ("fulmar", 0)] {
        admin.query(&format!("ALTER DATABASE {database} MOVE TO '{}'", cluster.name(node))).await?;
    }
    admin.close().await?;
    bench.progress.step("loading YCSB");
    transactions(bench, &cluster, OWNER, WARM_UP, 0).await?;
    let (mut ratios, mut owner, mut other) = (Vec::new(), Vec::new(), Vec::new());
    let time = Duration::from_secs(bench.arguments.seconds);
    for round in 1..=bench.arguments.rounds {
        bench.progress.step(&format!("{FORWARD}: round {round} of {}", bench.arguments.rounds));
        let at_owner = transactions(bench, &cluster, OWNER, time, u64::from(round)).await?;
        let forwarded = transactions(bench, &cluster, OTHER, time, u64::from(round)).await?;
        ratios.push(forwarded / at_owner);
        owner.push(at_owner);
        other.push(forwarded);
    }
    let text = |name: &str, rounds| match Spread::of(rounds) {
        Some(Spread { median, min, max, .. }) => format!("{name}: {median:.0} tps ({min:.0} to {max:.0})"),
        None => String::new(),
    };
    let result = CaseResult::value(case(FORWARD)?, ratios);
    Ok(result.with_note(text("at the owner", owner)).with_note(text("forwarded", other)))
}

async fn transactions(
    bench: &Bench<'_>,
    cluster: &Cluster,
    node: usize,
    time: Duration,
    seed: u64,
) -> anyhow::Result<f64> {
    bench.progress.step(&format!("{FORWARD}: through {}", cluster.name(node)));
    let options = RunOptions {
        connections: CONNECTIONS,
        warm_up: WARM_UP,
        measure: time,
        seed,
        ..RunOptions::new(cluster.target(node).with_database(DATABASE))
    };
    let report = run(Ycsb { records: RECORDS, ..Ycsb::default() }, options).await?.complete()?;
    ensure!(report.transactions > 0, "no transaction committed");
    Ok(report.throughput_tps)
}

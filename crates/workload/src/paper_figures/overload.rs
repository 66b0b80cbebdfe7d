//! A tenant leaves an overloaded node (ElasTraS 7.7.4): how its latency changes, and that of a
//! tenant that stays and of one at the destination.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use tokio::time::sleep;

use super::trials::OF_ELASTRAS;
use super::{Bench, Course, Experiment, FigureRow, MIN_MEMORY_BYTES, Measure, measure};
use crate::arrival::Arrival;
use crate::client::Client;
use crate::compare::migrate::laboratory::MAX_RUN;
use crate::run::{Recorder, RunOptions, run, run_while};
use crate::server::{Cluster, ClusterSetup, ClusterStore};
use crate::tenants;
use crate::ycsb::Ycsb;

pub(super) const CHANGE: [Measure; 2] = [
    measure("change_percent", "Mean latency in the 30 s after the move, over that before", "%"),
    measure("before_ms", "Mean latency before the move", "ms"),
];

/// The experiment.
pub(super) struct Overload;

const GATEWAY: usize = 0;
const SOURCE: usize = 1;
const DESTINATION: usize = 2;
/// CPUs of each owner.
const CPUS: f64 = 1.0 / 3.0;
/// The tenant that is moved, one that stays, and one at the destination, as in the paper.
const MEASURED: [&str; 3] = ["t_m", "t_s", "t_d"];
const RATE_TPS: f64 = 10.0;
/// Tenants that keep the source busy.
const BUSY: u32 = 3;
const BUSY_CONNECTIONS: usize = 4;
const DATA_BYTES: u64 = 4 << 20;

impl Experiment for Overload {
    fn run<'a>(&'a self, bench: &'a Bench<'a>) -> LocalBoxFuture<'a, anyhow::Result<Course>> {
        async move {
            let mut course = Course::default();
            for (x, mechanism) in (1..).zip(OF_ELASTRAS) {
                if !bench.arguments.wants(mechanism) {
                    continue;
                }
                bench.step(&format!("moving by {mechanism}"));
                let changes = changes(bench.binary, mechanism, bench.arguments.time()).await;
                let of = |number: usize| match &changes {
                    Ok(changes) => Ok(changes[number].to_vec()),
                    Err(error) => Err(format!("{error:#}")),
                };
                course.rows.extend((0..MEASURED.len()).map(|number| {
                    let (line, x) = (MEASURED[number].to_uppercase(), f64::from(x));
                    FigureRow { line, x, values: of(number) }
                }));
            }
            Ok(course)
        }
        .boxed_local()
    }
}

/// The values of [`CHANGE`] of each of [`MEASURED`].
async fn changes(binary: &Path, mechanism: &str, time: Duration) -> anyhow::Result<[[f64; 2]; 3]> {
    let setup =
        ClusterSetup { store: ClusterStore::S3, memory_bytes: MIN_MEMORY_BYTES, ..ClusterSetup::default() };
    let mut cluster = Cluster::start(binary, setup).await?;
    let busy = tenants::names("busy_", BUSY);
    let names: Vec<String> = busy.iter().cloned().chain(MEASURED.map(str::to_owned)).collect();
    tenants::create(&cluster.target(GATEWAY), &names, |_| ()).await?;
    let mut admin = Client::connect(&cluster.target(GATEWAY)).await?;
    for name in &names {
        let node = if name == MEASURED[2] { DESTINATION } else { SOURCE };
        admin.query(&format!("ALTER DATABASE {name} MOVE TO '{}' USING 'flush'", cluster.name(node))).await?;
    }
    let workload = Ycsb::default().of_bytes(DATA_BYTES);
    let options = |databases: Vec<String>, connections, arrival| RunOptions {
        databases,
        connections,
        arrival,
        measure: MAX_RUN,
        reconnect_timeout: Duration::from_secs(30),
        ..RunOptions::new(cluster.target(GATEWAY))
    };
    let loading =
        RunOptions { measure: Duration::from_secs(1), ..options(names.clone(), 2, Arrival::Closed) };
    run(workload.clone(), loading).await?;
    let busy = options(busy, BUSY_CONNECTIONS, Arrival::Closed);
    let tick = busy.tick;
    let others = MEASURED[1..].iter().map(|name| {
        let recorder = Recorder::new();
        let own = options(vec![(*name).to_owned()], 8, Arrival::poisson(RATE_TPS));
        (RunOptions { watcher: Some(recorder.watcher()), ..own }, recorder)
    });
    let [(stays, stays_recorder), (other, other_recorder)] =
        <[_; 2]>::try_from(others.collect::<Vec<_>>()).ok().context("two tenants are not moved")?;
    let moving = options(vec![MEASURED[0].to_owned()], 8, Arrival::poisson(RATE_TPS));
    let destination = cluster.name(DESTINATION).to_owned();
    for node in [SOURCE, DESTINATION] {
        cluster.limit_cpus(node, CPUS)?;
    }
    let acts = async |opened: tokio::time::Instant| {
        for recorder in [&stays_recorder, &other_recorder] {
            recorder.opened().await?;
        }
        sleep(time).await;
        let begun = tokio::time::Instant::now();
        let statement = format!("ALTER DATABASE {} MOVE TO '{destination}' USING '{mechanism}'", MEASURED[0]);
        admin.query(&statement).await.context("the move failed")?;
        let ended = tokio::time::Instant::now();
        sleep(time * 3 + tick).await;
        anyhow::Ok((opened, begun, ended))
    };
    let background = async {
        tokio::try_join!(
            run(workload.clone(), busy),
            run(workload.clone(), stays),
            run(workload.clone(), other)
        )
        .map(drop)
    };
    let (moved, (opened, begun, ended)) = tokio::select! {
        measured = run_while(workload.clone(), moving, acts) => measured?,
        ended = background => {
            ended?;
            anyhow::bail!("the load of the other tenants ended too early")
        }
    };
    let of_others = [stays_recorder, other_recorder].map(|recorder| recorder.moments());
    let [stays, other] = of_others;
    Ok([moved, stays, other].map(|moments| {
        let before = moments.between(opened, begun).latency().mean_ms;
        let after = moments.between(ended, ended + time * 3).latency().mean_ms;
        [(after / before - 1.0) * 100.0, before]
    }))
}

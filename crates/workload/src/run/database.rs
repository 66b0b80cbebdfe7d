//! Loads the databases of all tenants before a run and checks them after it.

use std::cell::Cell;

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::{RunEvent, RunOptions};
use crate::Target;
use crate::client::Client;
use crate::workload::{Dialect, LoadContext, Workload};

/// Number of databases that are loaded or checked concurrently.
const CONCURRENT: usize = 4;

/// The dialect and version of a server.
pub(super) struct Server {
    pub(super) dialect: Dialect,
    pub(super) version: String,
}

async fn connect(target: &Target) -> anyhow::Result<Client> {
    Client::connect(target).await.with_context(|| format!("could not connect to {target}"))
}

/// Queries the dialect and the version of a server.
pub(super) async fn server(target: &Target) -> anyhow::Result<Server> {
    let mut client = connect(target).await?;
    let dialect = Dialect::of(&mut client).await?;
    let version = client.query("SELECT version()").await?.into_iter().flatten().flatten().next();
    client.close().await?;
    Ok(Server { dialect, version: version.unwrap_or_default() })
}

/// Loads missing data into all databases, each with the workload of its tenant.
pub(super) async fn load<W: Workload>(
    workloads: &[W],
    options: &RunOptions,
    dialect: Dialect,
) -> anyhow::Result<()> {
    let of = workloads.iter().map(Workload::rows).sum();
    let done = Cell::new(0);
    let loaded = |rows: u64| {
        done.set(done.get() + rows);
        if let Some(watcher) = &options.watcher {
            watcher(&RunEvent::Loading { rows: done.get(), of });
        }
    };
    let loaded = &loaded;
    stream::iter(workloads.iter().zip(options.targets()))
        .map(|(workload, target)| async move {
            let mut client = connect(&target).await?;
            let mut loading = LoadContext { client: &mut client, dialect, seed: options.seed, loaded };
            workload.load(&mut loading).await.with_context(|| format!("could not load {target}"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

/// Checks the data of all tenants.
pub(super) async fn check<W: Workload>(workloads: &[W], options: &RunOptions) -> anyhow::Result<()> {
    stream::iter(workloads.iter().zip(options.targets()))
        .map(|(workload, target)| async move {
            let mut client = connect(&target).await?;
            workload.check(&mut client).await.with_context(|| format!("check of {target} failed"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

//! What is done to all tenants' databases before and after a run: loading and checking.

use std::cell::Cell;

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};

use super::{RunEvent, RunOptions};
use crate::Target;
use crate::client::Client;
use crate::workload::{Dialect, Loading, Workload};

/// Databases that are worked on at a time.
const CONCURRENT: usize = 4;

/// What is told of the server.
pub(super) struct Server {
    pub(super) dialect: Dialect,
    pub(super) version: String,
}

async fn connect(target: &Target) -> anyhow::Result<Client> {
    Client::connect(target).await.with_context(|| format!("cannot connect to {target}"))
}

/// Asks the server what it is.
pub(super) async fn server(target: &Target) -> anyhow::Result<Server> {
    let mut client = connect(target).await?;
    let dialect = Dialect::of(&mut client).await?;
    let version = client.query("SELECT version()").await?.into_iter().flatten().flatten().next();
    client.close().await?;
    Ok(Server { dialect, version: version.unwrap_or_default() })
}

/// Loads what is missing everywhere, each tenant with its own workload.
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
            let mut loading = Loading { client: &mut client, dialect, seed: options.seed, loaded };
            workload.load(&mut loading).await.with_context(|| format!("cannot load {target}"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

/// Checks all tenants' data.
pub(super) async fn check<W: Workload>(workloads: &[W], options: &RunOptions) -> anyhow::Result<()> {
    stream::iter(workloads.iter().zip(options.targets()))
        .map(|(workload, target)| async move {
            let mut client = connect(&target).await?;
            workload.check(&mut client).await.with_context(|| format!("the check of {target}"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT)
        .try_collect()
        .await
}

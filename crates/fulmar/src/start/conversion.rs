//! Makes the first node of a cluster from a single node, with its data.
//!
//! ```text
//!   1 reserve    the metadata store of the cluster is reserved for the id of the node's store
//!   2 flush      started as a single node in a new term: every commit is in a manifest; stopped
//!   3 mark       conversion.json and a stamp in the data directory, the object `cluster` in the store
//!   4 copy       catalog, owners, the node's records; the last transaction ends the reservation
//!   5 join       like any start of a cluster's node; then conversion.json is removed
//! ```
//!
//! The cluster exists from the last transaction of step 4 on. Until then no node joins it
//! ([`fulmar_meta::reject_unfinished`]). Killed at any point, the next start with the same flags
//! decides by the metadata store, read linearizably:
//!
//! - **The reservation exists, or nothing does**: steps 1 to 4 run again. No commit is lost, because
//!   step 2 starts with the recovery of a single node. After step 3 no other process has changed the
//!   store: the data directory, and copies of it, are refused without the flags of the cluster. Step 1
//!   replaces the reservation, which every transaction of step 4 compares. Requests of the killed run
//!   that arrive late change nothing, so the cluster cannot begin with epochs below the term of the
//!   new step 2. Step 4 changes what differs.
//! - **The cluster exists**: only step 5 runs. Other nodes may have joined, and may have failed the
//!   node over. It must not start as a single node again, and does not.
//! - **Another cluster exists**: refused, nothing is changed.
//!
//! Before step 3 the node may also go on as a single node. Its later commits are flushed and copied
//! by the next attempt.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, anyhow, ensure};
use fulmar_engine::Config;
use fulmar_meta::{MetadataStore, copy, reject_unfinished, reserve};
use fulmar_node::conversion::ConvertedStore;
use fulmar_node::directory::{Conversion, DirectoryOwner};
use fulmar_node::registration;
use fulmar_store::failpoint::{self, CONVERT_AFTER_COPY, CONVERT_AFTER_FLUSH};
use fulmar_store::failpoint::{CONVERT_AFTER_MARK, CONVERT_MID_COPY};
use fulmar_store::{Limits, Reliable};

use super::catalog_check::with_remedy;
use super::data::DataDirectory;
use super::node::{self, METADATA_FILE, Recovered};
use super::store;
use crate::cli::StartArgs;
use crate::size::Bytes;

/// Refuses to start a single node on a data directory that is being converted.
pub(super) fn check_not_begun(data: &Path) -> anyhow::Result<()> {
    let Some(Conversion { name, meta, .. }) = Conversion::read(data)? else { return Ok(()) };
    Err(anyhow!(
        "{} is being converted to node \"{name}\" of a cluster; start it with --node {name} --rpc ADDR:PORT \
         --meta {meta} and its --store to complete that",
        data.display()
    ))
}

/// Refuses a data directory of a single node, or one that is being converted, for a node that joins an
/// existing cluster.
pub(super) fn check_joinable(data: &Path) -> anyhow::Result<()> {
    check_not_begun(data)?;
    ensure!(
        DirectoryOwner::read(data)?.is_some() || !data.join(METADATA_FILE).exists(),
        "{} is the data directory of a single node; use another --data to join a cluster",
        data.display()
    );
    Ok(())
}

/// Converts the data directory if it is that of a single node: all steps but the last.
pub(super) async fn convert(
    arguments: &StartArgs,
    data: &DataDirectory,
    memory: Bytes,
    (name, meta): (&str, String),
    metadata: &dyn MetadataStore,
) -> anyhow::Result<()> {
    let path = data.path();
    if DirectoryOwner::read(path)?.is_some() {
        // Step 5 was interrupted before its end, or complete.
        return Ok(Conversion::remove(path)?);
    }
    let begun = Conversion::read(path)?;
    if begun.is_none() && !path.join(METADATA_FILE).exists() {
        return Ok(());
    }
    if let Some(begun) = begun.as_ref().filter(|begun| begun.name != name) {
        return Err(anyhow!(
            "{} is being converted to node \"{1}\" of a cluster; start it with --node {1}",
            path.display(),
            begun.name
        ));
    }
    ensure!(
        arguments.store.is_some(),
        "{} is the data directory of a single node; start it with --store, a store that all nodes of its cluster \
         will reach, or use another --data",
        path.display()
    );
    // The cluster may exist there already.
    if let Some(begun) = begun.as_ref().filter(|begun| begun.meta != meta) {
        return Err(anyhow!(
            "the conversion of {} to a node of a cluster was begun with --meta {}; use the same one",
            path.display(),
            begun.meta
        ));
    }
    let id = store::bound_id(path)?.with_context(|| {
        format!("{} has no store yet; use another --data for a node of a cluster", path.display())
    })?;
    if reject_unfinished(metadata).await.is_ok()
        && let Some(cluster) = registration::find_cluster(metadata).await?
    {
        ensure!(
            begun.is_some() && cluster == id,
            "{} is the data directory of a single node, and --meta {meta} contains a cluster ({cluster:032x}); \
             choose an unused cluster name for a cluster with its data, or another --data to join the existing one",
            path.display()
        );
        return Ok(());
    }
    reserve(metadata, id).await.map_err(with_remedy)?;
    tracing::info!(data = %path.display(), "converting a single node to the first node of a cluster");
    let (source, last_term) = flush(arguments, data, memory).await?;
    failpoint::hit(CONVERT_AFTER_FLUSH);
    let conversion = match begun {
        Some(begun) => begun,
        None => Conversion::new(id, name, meta, rand::random()),
    };
    conversion.write(path)?;
    mark_store(arguments, id).await?;
    failpoint::hit(CONVERT_AFTER_MARK);
    let source = ConvertedStore::new(source, conversion, last_term);
    let copied = copy(&source, metadata, |_| failpoint::hit(CONVERT_MID_COPY)).await.map_err(with_remedy)?;
    failpoint::hit(CONVERT_AFTER_COPY);
    tracing::info!(records = copied.entries, "copied the catalog to the cluster's metadata store");
    Ok(())
}

/// Starts the single node, flushes all its commits and stops it. Returns its catalog, and the greatest
/// term in its store.
async fn flush(
    arguments: &StartArgs,
    data: &DataDirectory,
    memory: Bytes,
) -> anyhow::Result<(Arc<dyn MetadataStore>, u32)> {
    let config = Config::new(data.path(), memory.0);
    let opening = store::open_for_conversion(data.path(), arguments.store.as_ref());
    let Recovered { engine, metadata, store, .. } = node::recover(arguments, config, data, opening).await?;
    let settled = engine.settle_for_cluster().await;
    let stopped = engine.shutdown().await;
    let last_term = settled.context("cannot convert the node to a cluster's")?;
    stopped.context("engine shutdown failed; no acknowledged commit is lost")?;
    store.record_clean_shutdown().await?;
    Ok((metadata, last_term))
}

async fn mark_store(arguments: &StartArgs, id: u128) -> anyhow::Result<()> {
    let url = arguments.store.as_ref().context("a node of a cluster needs --store")?;
    let backend = url.open().with_context(|| format!("cannot open the store {url}"))?;
    store::mark_as_clusters(&Reliable::new(Arc::new(backend), Limits::default()), id).await
}

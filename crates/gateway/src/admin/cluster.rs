//! Administration in a cluster: the partition of a database is created, restored, dropped and moved
//! through the cluster, because any node may own it.

use std::sync::{Arc, OnceLock};

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Tenant, Unit};
use fulmar_pages::{Durability, PartitionId};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};

use super::context::{Context, in_use, to_postgres_error};
use crate::Result;
use crate::cluster::{Cluster, Move};

fn unsupported(message: &str) -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
}

/// The durability of a database. The default is `shared`, or what is possible without a common store.
pub(super) fn durability(
    given: Option<&str>,
    parsed: Durability,
    cluster: &dyn Cluster,
) -> Result<Durability> {
    match (cluster.has_private_stores(), given) {
        (false, None) => Ok(Durability::Shared),
        (false, Some(_)) => Ok(parsed),
        (true, Some(_)) if parsed == Durability::Shared => Err(unsupported(
            "databases cannot have shared durability in a cluster whose nodes have stores of their own",
        )
        .hint("Start the nodes of a cluster with --store, a store that all of them reach.")),
        (true, _) => Ok(Durability::Local),
    }
}

/// Creates the partition of a new database, empty or as a branch of another one.
///
/// A branch is stored before its ownership record is created, and is invisible until the catalog's
/// record is ready, so a failure in between leaves a creation that is undone.
pub(super) async fn create(
    tenant: &Tenant,
    source: Option<(PartitionId, Option<u64>)>,
    durability: Durability,
    context: &Context,
    cluster: &dyn Cluster,
) -> Result<()> {
    if durability != tenant.durability {
        let changed = context.catalog.set_durability(tenant, durability).await;
        changed.map_err(|error| to_postgres_error(&error))?;
    }
    if let Some((source, at_unix_ms)) = source {
        cluster.branch_partition(source, tenant.partition, at_unix_ms).await?;
    }
    cluster.create_partition(tenant.partition, durability).await
}

/// Rolls the creation of a database's partition back.
pub(super) async fn undo(tenant: &Tenant, context: &Context, cluster: &dyn Cluster) -> Result<()> {
    cluster.drop_partition(tenant.partition).await?;
    // The partition may have a manifest although it never had an owner.
    context.engine.undo_creation(tenant.partition).await
}

/// Fails if a client of any node uses a database.
pub(super) async fn check_unused(tenant: &Tenant, cluster: &dyn Cluster, hint: &str) -> Result<()> {
    match cluster.sessions(tenant.partition).await? {
        0 => Ok(()),
        sessions => Err(in_use(tenant, sessions, hint)),
    }
}

/// Restores a database at its owner.
pub(super) async fn restore(tenant: &Tenant, at_unix_ms: u64, cluster: &dyn Cluster) -> Result<()> {
    cluster.restore_partition(tenant.partition, at_unix_ms).await
}

pub(super) fn require_cluster(context: &Context) -> Result<&Arc<dyn Cluster>> {
    context.cluster.as_ref().ok_or_else(|| {
        unsupported("this node does not belong to a cluster")
            .hint("Start nodes with --node, --rpc and --meta to form a cluster.")
    })
}

/// Removes a node that has ended from the cluster.
pub(super) async fn forget_node(name: &str, context: &Context) -> Result<()> {
    require_cluster(context)?.forget_node(name).await
}

/// The start of a statement's migration. It completes also if the statement is interrupted: otherwise
/// nothing would know which migration to cancel.
pub(super) struct Started {
    partition: PartitionId,
    /// The number of the migration; `None` if the node owns the database.
    number: Shared<BoxFuture<'static, Result<Option<u64>>>>,
}

/// Moves a database to the node with this name. Sets `started` when the migration is about to start.
pub(super) async fn move_database(
    database: &str,
    node: &str,
    options: Move,
    context: &Context,
    started: &OnceLock<Started>,
) -> Result<Arc<Tenant>> {
    let cluster = require_cluster(context)?;
    let tenant = context.find(database)?;
    let nodes = cluster.nodes();
    if !nodes.iter().any(|known| known.name == node) {
        let names = nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ");
        let message = format!("node \"{}\" does not exist", fulmar_dialect::shorten(node));
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint(format!("Available values: {names}.")));
    }
    let partition = tenant.partition;
    let (starting, to) = (cluster.clone(), node.to_owned());
    let number = async move { starting.start_move(partition, &to, options).await }.boxed().shared();
    let started = started.get_or_init(|| Started { partition, number });
    if let Some(number) = started.number.clone().await? {
        cluster.wait_for_move(partition, number).await?;
    }
    Ok(tenant)
}

/// Cancels the migration of a statement that was cancelled with this error. Returns the error for the
/// client.
pub(super) async fn cancel_started(error: Error, started: Option<&Started>, context: &Context) -> Error {
    let Some(Started { partition, number }) = started else { return error };
    let cancelling = async {
        match number.clone().await? {
            Some(number) => require_cluster(context)?.cancel_move(*partition, Some(number)).await,
            None => Ok(()),
        }
    };
    match cancelling.await {
        Ok(()) => error.detail("The move was cancelled. The database stays where it was."),
        Err(_) => error
            .detail("The move can no longer be cancelled.")
            .hint("The table fulmar.migrations shows how it ends."),
    }
}

/// Cancels the migration of a database.
pub(super) async fn cancel_move(database: &str, context: &Context) -> Result<()> {
    let cluster = require_cluster(context)?;
    cluster.cancel_move(context.find(database)?.partition, None).await
}

/// Parses a size per second.
pub(super) fn rate(text: &str) -> Result<u64> {
    let kilobytes = Unit::Kilobytes.parse(text).filter(|kilobytes| *kilobytes > 0);
    kilobytes.and_then(|kilobytes| kilobytes.checked_mul(1024)).ok_or_else(|| {
        let message = format!("invalid rate: \"{}\"", fulmar_dialect::shorten(text));
        Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint("Write the bytes per second as a size, such as '20MB'.")
    })
}

/// Ends the quarantine of a database.
pub(super) async fn resume(name: &str, context: &Context) -> Result<Arc<Tenant>> {
    let tenant = context.find(name)?;
    match &context.cluster {
        Some(cluster) => cluster.resume_partition(tenant.partition).await?,
        None => {
            let message = "the database is not quarantined";
            return Err(Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, message));
        }
    }
    Ok(tenant)
}

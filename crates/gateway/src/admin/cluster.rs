//! Administration in a cluster: the partition of a database is created, restored, dropped and moved
//! through the cluster, because any node may own it.

use std::sync::Arc;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Tenant, Unit};
use fulmar_pages::{Durability, PartitionId};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;

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
        (false, Some(_)) => Ok(parsed),
        (true, Some(_)) if parsed == Durability::Shared => Err(unsupported(
            "databases cannot have shared durability in a cluster whose nodes have stores of their own",
        )
        .hint("Start the nodes of a cluster with --store, a store that all of them reach.")),
        _ => Ok(cluster.default_durability()),
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

/// The migrations that a statement has started and that have not ended.
#[derive(Default)]
pub(super) struct Running(Mutex<Vec<Started>>);

/// The start of a migration. It completes also if the statement is interrupted: otherwise nothing
/// would know which migration to cancel.
#[derive(Clone)]
struct Started {
    partition: PartitionId,
    /// The number of the migration; `None` if the node owns the database.
    number: Shared<BoxFuture<'static, Result<Option<u64>>>>,
}

/// Fails if no node has this name.
pub(super) fn check_node(node: &str, cluster: &dyn Cluster) -> Result<()> {
    let nodes = cluster.nodes();
    if nodes.iter().any(|known| known.name == node) {
        return Ok(());
    }
    let names = nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ");
    let message = format!("node \"{}\" does not exist", fulmar_dialect::shorten(node));
    Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message).hint(format!("Available values: {names}.")))
}

/// Moves a database to the node with this name.
pub(super) async fn move_database(
    database: &str,
    node: &str,
    options: Move,
    context: &Context,
    running: &Running,
) -> Result<Arc<Tenant>> {
    let cluster = require_cluster(context)?;
    let tenant = context.find(database)?;
    check_node(node, &**cluster)?;
    move_partition(tenant.partition, node, options, cluster, running).await?;
    Ok(tenant)
}

/// Moves a partition. Returns the number of the migration; `None` if the node owns the partition.
/// If it is interrupted, the migration stays in `running`.
pub(super) async fn move_partition(
    partition: PartitionId,
    node: &str,
    options: Move,
    cluster: &Arc<dyn Cluster>,
    running: &Running,
) -> Result<Option<u64>> {
    let (starting, to) = (cluster.clone(), node.to_owned());
    let number = async move { starting.start_move(partition, &to, options).await }.boxed().shared();
    running.0.lock().push(Started { partition, number: number.clone() });
    let ended = match number.await {
        Ok(Some(number)) => cluster.wait_for_move(partition, number).await.map(|()| Some(number)),
        other => other,
    };
    running.0.lock().retain(|started| started.partition != partition);
    ended
}

/// Cancels the migrations of a statement that was cancelled with this error. Returns the error for
/// the client.
pub(super) async fn cancel_running(error: Error, running: &Running, context: &Context) -> Error {
    let started = running.0.lock().clone();
    let (mut cancelled, mut continuing) = (0, 0);
    for Started { partition, number } in started {
        let cancelling = async {
            match number.await? {
                Some(number) => require_cluster(context)?.cancel_move(partition, Some(number)).await,
                None => Ok(()),
            }
        };
        match cancelling.await {
            Ok(()) => cancelled += 1,
            Err(_) => continuing += 1,
        }
    }
    match (cancelled, continuing) {
        (0, 0) => error,
        (1, 0) => error.detail("The move was cancelled. The database stays where it was."),
        (0, 1) => error
            .detail("The move can no longer be cancelled.")
            .hint("The table fulmar.migrations shows how it ends."),
        (cancelled, continuing) => error
            .detail(format!(
                "Moves that were cancelled: {cancelled}. Moves that can no longer be cancelled: {continuing}."
            ))
            .hint("The table fulmar.migrations shows them. Repeat the statement to move what is left."),
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

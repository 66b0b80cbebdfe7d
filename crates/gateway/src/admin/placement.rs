//! Databases in a cluster: which node owns a new one, and moving one to another node.
//!
//! Administrative statements run on the node that owns the system database. Statements that the
//! engine carries out on a partition require that this node owns the partition as well.

use std::sync::Arc;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::Tenant;
use fulmar_pages::{Durability, PartitionId};

use super::context::{Context, to_postgres_error};
use crate::Result;
use crate::cluster::Cluster;

/// The name of the setting of ALTER DATABASE that moves a database.
pub(super) const NODE: &str = "node";

/// Creates the partition of a tenant that is being created, at a node of the cluster.
pub(super) async fn create(
    tenant: &Tenant,
    durability: Durability,
    context: &Context,
    cluster: &dyn Cluster,
) -> Result<()> {
    if durability != tenant.durability {
        let set = context.catalog.set_durability(tenant, durability).await;
        set.map_err(|error| to_postgres_error(&error))?;
    }
    cluster.create_partition(tenant.partition, durability).await
}

/// Moves a database to the node `node`.
pub(super) async fn move_database(
    database: &str,
    node: Option<&str>,
    context: &Context,
) -> Result<Arc<Tenant>> {
    let Some(cluster) = &context.cluster else {
        let message = "databases can only be moved between the nodes of a cluster";
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
            .hint("This node is not part of a cluster: it was started without --node."));
    };
    let Some(node) = node else {
        let message = "the node of a database cannot be reset";
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
            .hint("Name a node: ALTER DATABASE ... SET node = '...'. fulmar.nodes lists the nodes."));
    };
    let tenant = context.find(database)?;
    cluster.move_partition(tenant.partition, node).await?;
    Ok(tenant)
}

/// Fails if another node of the cluster owns the partition. `command` names what cannot be done.
pub(crate) async fn check_is_here(
    cluster: Option<&Arc<dyn Cluster>>,
    partition: PartitionId,
    command: &str,
) -> Result<()> {
    let Some(cluster) = cluster else { return Ok(()) };
    let Some(owner) = cluster.find_owner(partition).await? else { return Ok(()) };
    if owner.node == cluster.this_node() {
        return Ok(());
    }
    let nodes = cluster.nodes();
    let name = |id: u32| {
        let node = nodes.iter().find(|node| node.id == id);
        node.map_or_else(|| id.to_string(), |node| node.name.clone())
    };
    let (owner, here) = (name(owner.node), name(cluster.this_node()));
    let message = format!("cannot execute {command} for a database of another node");
    Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
        .detail(format!("Node \"{owner}\" owns the database. The command runs on node \"{here}\"."))
        .hint(format!("Move the database first: ALTER DATABASE ... SET node = '{here}'.")))
}

/// Fails in a cluster, where an import cannot choose the node of the new database.
pub(crate) fn refuse_import(context: &Context) -> Result<()> {
    let hint = "Create the database, and load its tables with COPY.";
    match &context.cluster {
        Some(_) => Err(not_in_a_cluster("the import of a database file", hint)),
        None => Ok(()),
    }
}

/// The error of a command that a cluster does not support.
pub(super) fn not_in_a_cluster(command: &str, hint: &str) -> Error {
    let message = format!("{command} is not supported in a cluster");
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message).hint(hint)
}

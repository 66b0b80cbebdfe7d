//! Administration in a cluster: the partition of a database is created, dropped and moved through the
//! cluster, because any node may own it.

use std::sync::Arc;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::Tenant;
use fulmar_pages::Durability;

use super::context::{Context, to_postgres_error};
use crate::Result;
use crate::cluster::Cluster;

/// The name of the setting that moves a database: `ALTER DATABASE x SET node = 'name'`.
pub(super) const NODE: &str = "node";

fn unsupported(message: &str) -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
}

/// Checks the durability of a new database. The default is `shared`.
pub(super) fn durability(given: Option<&str>, parsed: Durability) -> Result<Durability> {
    match given {
        Some(_) if parsed == Durability::Local => {
            Err(unsupported("cannot create a database with durability = 'local' in a cluster")
                .detail("Its commits would be lost with the disk of the node that owns it.")
                .hint("Use durability = 'shared', the default."))
        }
        _ => Ok(Durability::Shared),
    }
}

/// Creates the partition of a new database.
pub(super) async fn create(
    tenant: &Tenant,
    durability: Durability,
    context: &Context,
    cluster: &dyn Cluster,
) -> Result<()> {
    if durability != tenant.durability {
        let changed = context.catalog.set_durability(tenant, durability).await;
        changed.map_err(|error| to_postgres_error(&error))?;
    }
    cluster.create_partition(tenant.partition, durability).await
}

fn require_cluster(context: &Context) -> Result<&Arc<dyn Cluster>> {
    context.cluster.as_ref().ok_or_else(|| {
        unsupported("this node does not belong to a cluster")
            .hint("Start nodes with --node, --rpc and --meta to form a cluster.")
    })
}

/// Removes a node that has ended from the cluster.
pub(super) async fn forget_node(name: &str, context: &Context) -> Result<()> {
    require_cluster(context)?.forget_node(name).await
}

/// Moves a database to the node with this name.
pub(super) async fn move_database(
    database: &str,
    node: Option<&str>,
    context: &Context,
) -> Result<Arc<Tenant>> {
    let cluster = require_cluster(context)?;
    let tenant = context.find(database)?;
    let nodes = cluster.nodes();
    let names = || nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ");
    let Some(node) = node else {
        let message = format!("parameter \"{NODE}\" has no default");
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint(format!("Available values: {}.", names())));
    };
    if !nodes.iter().any(|known| known.name == node) {
        let message = format!("node \"{}\" does not exist", fulmar_dialect::shorten(node));
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint(format!("Available values: {}.", names())));
    }
    cluster.move_partition(tenant.partition, node).await?;
    Ok(tenant)
}

/// Fails in a cluster.
pub(crate) fn check_single_node(statement: &str, context: &Context) -> Result<()> {
    match context.cluster {
        None => Ok(()),
        Some(_) => Err(unsupported(&format!("{statement} is not supported in a cluster"))),
    }
}

/// Fails if another node owns a database.
pub(super) fn check_owned_here(statement: &str, tenant: &Tenant, context: &Context) -> Result<()> {
    let Some(cluster) = &context.cluster else { return Ok(()) };
    let owner = cluster.owner(tenant.partition);
    if owner.is_none_or(|owner| owner.node == cluster.this_node()) {
        return Ok(());
    }
    let nodes = cluster.nodes();
    let name = |id: u32| nodes.iter().find(|node| node.id == id).map(|node| node.name.as_str());
    let owner = owner.and_then(|owner| name(owner.node)).unwrap_or("another node");
    let here = name(cluster.this_node()).unwrap_or_default();
    Err(unsupported(&format!("cannot execute {statement} for a database of another node"))
        .detail(format!("Node \"{owner}\" owns the database. The command runs on node \"{here}\"."))
        .hint(format!("Move the database first: ALTER DATABASE ... SET node = '{here}'.")))
}

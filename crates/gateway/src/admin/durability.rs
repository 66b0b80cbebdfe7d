//! The durability setting of a tenant: where its commits are made durable. Set by CREATE DATABASE,
//! changed by ALTER DATABASE.

use std::sync::Arc;

use fulmar_dialect::shorten;
use fulmar_engine::{DurabilityChangeError, Error, sqlstate};
use fulmar_meta::{MetaError, Tenant};
use fulmar_pages::Durability;

use super::context::{Context, to_postgres_error};
use crate::Result;

/// The name of the setting.
pub(super) const NAME: &str = "durability";

/// Parses a value. `None` is the default.
pub(super) fn parse(value: Option<&str>) -> Result<Durability> {
    let Some(value) = value else { return Ok(Durability::default()) };
    Durability::from_name(&value.to_lowercase()).ok_or_else(|| {
        let message = format!("invalid value for parameter \"{NAME}\": \"{}\"", shorten(value));
        Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint("Available values: 'local' (the node's disk), 'shared' (the store).")
    })
}

/// Changes the durability of a tenant. On a single node it fails if the tenant has sessions; in a
/// cluster they wait.
pub(super) async fn alter(database: &str, durability: Durability, context: &Context) -> Result<Arc<Tenant>> {
    let hint = "The system database holds no tenant data.";
    let problem = if context.cluster.is_some() {
        "always has shared durability"
    } else {
        "always has local durability"
    };
    let tenant = context.find_ordinary(database, problem, hint)?;
    if let Some(cluster) = &context.cluster {
        cluster.set_durability(tenant.partition, durability).await?;
        // The owner has changed the catalog. Statements that follow on this node see the change, or
        // see it later if etcd does not answer now.
        let _ = context.catalog.catch_up().await;
        return Ok(tenant);
    }
    let hint = "End them first. Their commits wait for the log that the database would leave.";
    context.check_unused(&tenant, hint).await?;
    set(&tenant, durability, context).await?;
    Ok(tenant)
}

/// Sets the durability of a tenant that is being created.
pub(super) async fn initialize(tenant: &Tenant, durability: Durability, context: &Context) -> Result<()> {
    match durability == tenant.durability {
        true => Ok(()),
        false => set(tenant, durability, context).await,
    }
}

async fn set(tenant: &Tenant, durability: Durability, context: &Context) -> Result<()> {
    let change = async {
        let changed = context.catalog.set_durability(tenant, durability).await;
        changed.map(drop).map_err(|error| match error {
            // The tenant is being dropped.
            MetaError::Missing { .. } => DurabilityChangeError::Refused(to_postgres_error(&error)),
            _ => DurabilityChangeError::InDoubt(to_postgres_error(&error)),
        })
    };
    context.engine.set_durability(tenant.partition, durability, change).await
}

//! Where a tenant's commits are made durable: chosen when it is made, changed with ALTER DATABASE.

use std::sync::Arc;

use fulmar_engine::{Error, NotChanged, sqlstate};
use fulmar_meta::{MetaError, Tenant};
use fulmar_pages::Durability;

use super::{answer, check_unused, find_ordinary};
use crate::Result;
use crate::dialect::shorten;
use crate::gateway::Shared;

/// What it is set as.
pub(super) const NAME: &str = "durability";

/// No value is the default.
pub(super) fn parse(value: Option<&str>) -> Result<Durability> {
    let Some(value) = value else { return Ok(Durability::default()) };
    Durability::of_name(&value.to_lowercase()).ok_or_else(|| {
        let message = format!("invalid value for parameter \"{NAME}\": \"{}\"", shorten(value));
        Error::new(sqlstate::INVALID_PARAMETER_VALUE, message)
            .hint("It is 'local' (the node's disk) or 'shared' (the store).")
    })
}

/// Changes it, while nobody is connected.
pub(super) async fn alter(database: &str, durability: Durability, shared: &Shared) -> Result<Arc<Tenant>> {
    let hint = "Leave it as it is: it holds no data of yours.";
    let tenant = find_ordinary(database, "is always local", hint, shared)?;
    check_unused(&tenant, "End them first: their answers wait for the log that is to be left.", shared)?;
    set(&tenant, durability, shared).await?;
    Ok(tenant)
}

/// Gives a tenant that is being made another one than the default.
pub(super) async fn settle(tenant: &Tenant, durability: Durability, shared: &Shared) -> Result<()> {
    match durability == tenant.durability {
        true => Ok(()),
        false => set(tenant, durability, shared).await,
    }
}

async fn set(tenant: &Tenant, durability: Durability, shared: &Shared) -> Result<()> {
    let change = async {
        let changed = shared.catalog.set_durability(tenant, durability).await;
        changed.map(drop).map_err(|error| match error {
            // It is being dropped.
            MetaError::Missing { .. } => NotChanged::Refused(answer(&error)),
            _ => NotChanged::InDoubt(answer(&error)),
        })
    };
    shared.engine.set_durability(tenant.partition, durability, change).await
}

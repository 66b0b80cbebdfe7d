//! `ALTER DATABASE ... RESTORE TO TIMESTAMP`.
//!
//! The engine stores what the database will be made of, then the catalog is told: that decides. Then the sessions end, since
//! what they have seen is not there any more. What goes wrong before the catalog was told disturbs nobody, but for transactions that
//! tried to commit meanwhile.

use std::sync::Arc;

use fulmar_meta::Tenant;

use super::{answer, end_sessions, find_ordinary};
use crate::Result;
use crate::gateway::Shared;

/// Makes a database what it was at a time.
pub(super) async fn restore(name: &str, at_unix_ms: u64, shared: &Shared) -> Result<Arc<Tenant>> {
    let hint = "Branch it, and look at the branch.";
    let tenant = find_ordinary(name, "cannot be restored", hint, shared)?;
    let partition = tenant.partition;
    let decide = async |era: fulmar_engine::Era| {
        let told = shared.catalog.begin_era(partition, era.lineage, era.epoch).await;
        told.map_err(|error| answer(&error))
    };
    shared.engine.restore_partition(partition, at_unix_ms, decide).await?;
    if !end_sessions(&tenant, shared).await {
        tracing::warn!(tenant = tenant.name, "sessions of a database that was restored do not end");
    }
    Ok(tenant)
}

//! Point-in-time recovery: `ALTER DATABASE ... RESTORE TO TIMESTAMP`.
//!
//! 1. The engine stores the restored version.
//! 2. The catalog record changes to the new lineage. This decides the restore.
//! 3. All sessions of the database end, because the data that they have read no longer exists.
//!
//! In a cluster the owner does all of it, and step 2 is a step of the ownership protocol.
//!
//! A failure before step 2 has no effect, except on transactions that tried to commit meanwhile.

use std::sync::Arc;

use fulmar_meta::Tenant;

use super::context::{Context, to_postgres_error};
use crate::Result;

/// Restores a database to its state at a time.
pub(super) async fn restore(name: &str, at_unix_ms: u64, context: &Context) -> Result<Arc<Tenant>> {
    let hint = "Create a branch and query that instead.";
    let tenant = context.find_ordinary(name, "cannot be restored", hint)?;
    let partition = tenant.partition;
    if let Some(cluster) = &context.cluster {
        super::cluster::restore(&tenant, at_unix_ms, &**cluster).await?;
        return Ok(tenant);
    }
    let decide = async |era: fulmar_engine::Timeline| {
        let changed = context.catalog.begin_timeline(partition, era.lineage, era.epoch).await;
        changed.map_err(|error| to_postgres_error(&error))
    };
    context.engine.restore_partition(partition, at_unix_ms, decide).await?;
    if !context.end_sessions(&tenant).await {
        tracing::warn!(tenant = tenant.name, "sessions of the restored database have not ended");
    }
    Ok(tenant)
}

//! Finds the restore points of a partition ([`crate::restore_points`]).

use std::sync::Arc;

use fulmar_mvcc::store_error;
use fulmar_pages::{Manifest, PartitionId};
use fulmar_sqlite::calendar::timestamp;
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::ManifestName;

use crate::maintenance::Maintenance;
use crate::restore_points::{RestorePoint, around, at, read};

impl Maintenance {
    /// Lists a partition's restore points, oldest first.
    pub async fn history(&self, id: PartitionId) -> Result<Vec<RestorePoint>> {
        let mut points = Vec::new();
        let names = self.manifests(id).await?;
        for point in read(&self.node().store, &names, |manifest| RestorePoint::of(&manifest)).await? {
            match point {
                Ok(point) => points.push(point),
                Err(error) => {
                    tracing::warn!(%error, partition = %id, "restore point omitted: its manifest is damaged");
                }
            }
        }
        Ok(points)
    }

    /// Returns the manifest that was the newest at a time. Callers must keep it from being deleted.
    pub(crate) async fn manifest_at(&self, id: PartitionId, at_unix_ms: u64) -> Result<Arc<Manifest>> {
        let now_ms = self.node().clock.unix_ms();
        if at_unix_ms > now_ms {
            return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, "time is in the future")
                .detail(format!("The current time is {}.", timestamp(now_ms))));
        }
        let names = self.manifests(id).await?;
        at(id, &around(&self.node().store, &names, at_unix_ms).await?, at_unix_ms, now_ms)
    }

    /// Lists a partition's manifests, oldest first. Manifests above its epoch belong to an
    /// incomplete restore and are left out.
    async fn manifests(&self, id: PartitionId) -> Result<Vec<ManifestName>> {
        self.partitions.opener().learn_timeline(&self.partitions, id).await?;
        let mut names = self.node().store.list_manifests(Some(id)).await.map_err(store_error)?;
        let epoch = self.partitions.timeline(id).epoch;
        names.retain(|name| name.epoch <= epoch);
        Ok(names)
    }
}

//! Opens the partitions of a replica.

use std::sync::Arc;

use fulmar_maintenance::{HotLists, RestorePoint};
use fulmar_mvcc::{Partition, Partitions, ReplicaState, dropped_error, store_error};
use fulmar_pages::{Durability, Manifest, PartitionId, Timeline};
use fulmar_sqlite::Result;
use fulmar_store::{CommitLog, HotPagesName, ManifestName, StoreError};

use super::{CatalogState, MAX_OPENINGS, Replica, deleted_too_fast};

impl Replica {
    /// Opens a partition at its newest manifest. Following begins at the first position that the
    /// log is needed from: earlier records are in the manifest, which is listed later.
    pub(crate) async fn open(
        self: &Arc<Self>,
        partitions: &Partitions,
        hot: &HotLists,
        id: PartitionId,
    ) -> Result<Arc<Partition>> {
        let Some(CatalogState { timeline: era, durability }) = self.catalog_state(id) else {
            return Err(dropped_error());
        };
        let node = partitions.node();
        let place = match durability {
            Durability::Shared => self.end(node, None).await?.end.needed,
            Durability::Local => Default::default(),
        };
        let (opened, manifest, hot_pages) = self.open_newest(partitions, id, era).await?;
        let manifest_unix_ms = manifest.as_ref().map(|manifest| RestorePoint::of(manifest).time_unix_ms);
        let following = ReplicaState::new(durability, place, manifest_unix_ms, node.clock.monotonic_ms());
        // Not shared with other tasks yet.
        let _is_first = opened.replica_state.set(following);
        if let Some(list) = hot_pages {
            hot.prewarm(&opened, list);
        }
        Ok(opened)
    }

    /// Opens a partition at its newest manifest. If that manifest or one of its segments was
    /// deleted, there is a newer one.
    async fn open_newest(
        &self,
        partitions: &Partitions,
        id: PartitionId,
        era: Timeline,
    ) -> Result<(Arc<Partition>, Option<Manifest>, Option<HotPagesName>)> {
        let node = partitions.node();
        for _ in 0..MAX_OPENINGS {
            let (manifest, hot_pages) = match node.store.latest(id, era.epoch, None).await {
                Err(StoreError::Missing { .. }) => continue,
                latest => latest.map_err(store_error)?,
            };
            if let Some(manifest) = &manifest
                && !self.pins.pin(node, ManifestName::of(manifest)).await
            {
                continue;
            }
            let (log, stats) = (CommitLog::read_only(), partitions.counted(id));
            let open = Partition::open(node.clone(), log, stats, id, era, manifest.as_ref(), None);
            match fulmar_mvcc::with_partition_context(id, open).await {
                Ok(opened) => return Ok((opened, manifest, hot_pages)),
                Err(error) => {
                    let known = manifest.as_ref().map(ManifestName::of);
                    let newest = node.store.latest_name(id, era.epoch, known).await.map_err(store_error)?;
                    if newest == known {
                        return Err(error);
                    }
                }
            }
        }
        Err(deleted_too_fast())
    }
}

//! Opens the partitions of a replica.

use std::sync::Arc;

use fulmar_maintenance::{HotLists, RestorePoint};
use fulmar_mvcc::{
    ApplyResult, Contents, Partition, Partitions, ReplicaState, dropped_error, log_unreadable, store_error,
};
use fulmar_pages::{Durability, Manifest, PartitionId, Timeline};
use fulmar_sqlite::Result;
use fulmar_store::{CommitLog, HotPagesName, LogObject, LogPosition, ManifestName, StoreError};

use super::{CatalogState, MAX_OPENINGS, Ownership, Replica, deleted_too_fast};
use crate::membership::ReplayRange;

impl Replica {
    /// Opens a partition at its newest manifest. Following begins at the first position that the
    /// owner's log is needed from: earlier records are in the manifest, which is listed later, or in
    /// sealed logs, which are read before.
    pub(crate) async fn open(
        self: &Arc<Self>,
        partitions: &Partitions,
        hot: &HotLists,
        id: PartitionId,
    ) -> Result<Arc<Partition>> {
        for _ in 0..MAX_OPENINGS {
            let Some(CatalogState { timeline, durability }) = self.catalog_state(id) else {
                return Err(dropped_error());
            };
            let node = partitions.node();
            let (source, place, objects) = match durability {
                Durability::Shared => {
                    let (follower, poll) = self.poll_owner(node, id, None).await?;
                    let Some(ownership) = self.ownership(id) else { continue };
                    if ownership.source.log_node != follower.log_node {
                        continue;
                    }
                    let since = LogPosition::new(follower.since, 0);
                    let place = ownership.from.max(since).max(poll.end.needed);
                    match self.sealed_objects(id, &ownership, since).await? {
                        Some(objects) => (ownership.source, place, objects),
                        None => continue,
                    }
                }
                Durability::Local => {
                    let source = self.ownership(id).map(|ownership| ownership.source);
                    (source.unwrap_or_default(), LogPosition::default(), Vec::new())
                }
            };
            let (opened, manifest, hot_pages) = self.open_newest(partitions, id, timeline).await?;
            let manifest_unix_ms = manifest.as_ref().map(|manifest| RestorePoint::of(manifest).time_unix_ms);
            let now_ms = node.clock.monotonic_ms();
            let following = ReplicaState::new(source, durability, place, manifest_unix_ms, now_ms);
            // Not shared with other tasks yet.
            let _is_first = opened.replica_state.set(Box::new(following));
            if opened.apply_objects(&objects).await? != ApplyResult::UpToDate {
                // The partition was restored, or its record has changed.
                opened.mark_stale();
                opened.release_resources();
                self.catch_up().await?;
                continue;
            }
            if let Some(list) = hot_pages {
                hot.prewarm(&opened, list);
            }
            return Ok(opened);
        }
        Err(deleted_too_fast())
    }

    /// The objects of sealed logs that contain records of a partition: of earlier epochs, and of the
    /// owner's incarnations before the position `since`. `None` if the ownership has changed
    /// meanwhile, so that they may have been deleted.
    async fn sealed_objects(
        &self,
        id: PartitionId,
        ownership: &Ownership,
        since: LogPosition,
    ) -> Result<Option<Vec<Arc<LogObject>>>> {
        let log_node = ownership.source.log_node;
        let own = ReplayRange { log_node, from: ownership.from, to: since };
        let mut objects = Vec::new();
        for range in ownership.earlier.iter().chain([&own]).filter(|range| range.from < range.to) {
            match self.sealed.objects_of(id, range.log_node, range.from, range.to).await {
                Ok(found) => objects.extend(found),
                Err(error) => {
                    self.catch_up().await?;
                    let is_same = self.ownership(id).as_ref() == Some(ownership);
                    return if is_same { Err(log_unreadable(error)) } else { Ok(None) };
                }
            }
        }
        Ok(Some(objects))
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
            let open = Partition::open(node.clone(), log, stats, id, era, Contents::of(manifest.as_ref()));
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

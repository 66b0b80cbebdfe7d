//! Pulling the pages of a partition that was moved before they were copied (on demand; thesis 7).
//!
//! The manifest names segments of the source, which the store reads from there
//! ([`fulmar_store::FallbackStore`]). They are merged into a segment of this node like in a compaction,
//! the pages that the source had in memory first. Until then a page is read when it is needed.

use fulmar_mvcc::store_error;
use fulmar_pages::{PageNo, PartitionId, SegmentId};
use fulmar_sqlite::{Error, Result, sqlstate};
use hashbrown::HashSet;

use crate::compact::Work;
use crate::maintenance::Maintenance;

impl Maintenance {
    /// Copies the segments of a partition that are not in this node's store. `hottest` are the pages to
    /// read into memory before. On return the newest manifest names no other segments, and no other
    /// manifest exists.
    pub async fn pull(&self, id: PartitionId, hottest: &[PageNo]) -> Result<()> {
        let partition = self.partitions.partition(id).await?;
        self.warm(&partition, hottest).await?;
        let mut working = self.scheduler.working.lock().await;
        loop {
            // The listing is of this node's store alone.
            let own = self.node().store.list_segments().await.map_err(store_error)?;
            let own: HashSet<SegmentId> = own.into_iter().collect();
            let Some(work) = Work::of_missing(&partition, &own) else { break };
            if !self.merge(&partition, &work, &mut working.throttle).await? {
                let text = "the database was closed while its pages were copied to this node";
                return Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, text).hint("Retry."));
            }
        }
        let _past = self.node().old_manifests.write().await;
        let epoch = self.partitions.timeline(id).epoch;
        let store = &self.node().store;
        let manifests = store.list_manifests(Some(id)).await.map_err(store_error)?;
        let newest = manifests.iter().rfind(|name| name.epoch <= epoch).copied();
        for older in manifests.into_iter().filter(|name| newest.is_some_and(|newest| *name < newest)) {
            store.delete_manifest(older).await.map_err(store_error)?;
        }
        Ok(())
    }
}

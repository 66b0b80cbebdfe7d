//! Pulling the pages of a partition that was moved before they were copied (on demand; thesis 7).
//!
//! The manifest names segments of the source, which the store reads from there
//! ([`fulmar_store::FallbackStore`]). They are merged into a segment of this node like in a compaction,
//! the pages that the source had in memory first. Until then a page is read when it is needed. The
//! partition is not compacted meanwhile, but others are.

use fulmar_mvcc::store_error;
use fulmar_pages::{PageNo, PartitionId, SegmentId};
use fulmar_sqlite::{Error, Result, sqlstate};

use crate::compact::Work;
use crate::maintenance::Maintenance;
use crate::scheduler::CopyDirection;
use crate::throttle::CompactionThrottle;

impl Maintenance {
    /// Copies the segments of a partition that are not in this node's store. `hottest` are the pages to
    /// read into memory before. Returns true if nothing needs other segments any more: the newest
    /// manifest names none, no other manifest exists, and no snapshot reads any.
    pub async fn pull(&self, id: PartitionId, hottest: &[PageNo]) -> Result<bool> {
        let partition = self.partitions.partition(id).await?;
        self.warm(&partition, hottest).await?;
        let hold = self.scheduler.hold_compaction(id, CopyDirection::In);
        // A compaction that began before has ended.
        drop(self.scheduler.working.lock().await);
        let mut throttle = CompactionThrottle::default();
        throttle.begin();
        let is_own = |segment: SegmentId| self.node().store.has_own_segment(segment);
        while let Some(work) = Work::of_missing(&partition, is_own) {
            if !self.merge(&partition, &work, &mut throttle).await? {
                let text = "the database was closed while its pages were copied to this node";
                return Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, text).hint("Retry."));
            }
        }
        drop(hold);
        self.delete_older_manifests(id).await?;
        let historical = self.historical_versions.open().into_iter().filter(|version| version.id == id);
        let mut readers = historical.chain([partition]);
        Ok(readers.all(|version| version.frame_segments().into_iter().all(is_own)))
    }

    /// Deletes all manifests of a partition but the newest one. Those that this node has kept from an
    /// earlier stay would be taken for its restore points.
    pub async fn delete_older_manifests(&self, id: PartitionId) -> Result<()> {
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

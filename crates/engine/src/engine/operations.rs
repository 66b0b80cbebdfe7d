//! Operations on whole partitions, which [`fulmar_maintenance`] implements.

use std::sync::Arc;

use fulmar_maintenance::{CommonStore, DecisionError, Export, Import, RestorePoint};
use fulmar_pages::{PartitionId, SegmentId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use futures::future::BoxFuture;

use super::Engine;

impl Engine {
    /// Creates a partition: empty, or as a branch of another one, as that is now or was at a time
    /// (milliseconds since 1970). A branch shares the segments of its source.
    pub fn create_partition(
        &self,
        id: PartitionId,
        source: Option<(PartitionId, Option<u64>)>,
    ) -> BoxFuture<'_, Result<()>> {
        self.maintenance.create_partition(id, source)
    }

    /// Deletes the remains of a failed creation. A partition that another process created under the
    /// same id is left alone, and so is everything in a store that was taken over. Afterwards the
    /// catalog record can be deleted: it must not make the next start drop that partition.
    pub async fn undo_creation(&self, id: PartitionId) -> Result<()> {
        self.maintenance.undo_creation(id).await
    }

    /// Drops a partition: its sessions get 57P04, its manifests are deleted, and its segments are
    /// collected later unless other partitions reference them. Idempotent; does nothing for a
    /// partition that never existed.
    pub async fn drop_partition(&self, id: PartitionId) -> Result<()> {
        self.maintenance.drop_partition(id).await
    }

    /// Lists a partition's restore points, oldest first.
    pub async fn history(&self, id: PartitionId) -> Result<Vec<RestorePoint>> {
        self.maintenance.history(id).await
    }

    /// Restores a partition to a time (milliseconds since 1970). `decide` records the restore in
    /// the catalog; if it fails the outcome is unknown, and the partition stays closed until the
    /// next start. Open transactions cannot commit any more.
    pub async fn restore_partition(
        &self,
        id: PartitionId,
        at_unix_ms: u64,
        decide: impl AsyncFnOnce(Timeline) -> Result<()>,
    ) -> Result<()> {
        let decide = async |timeline| decide(timeline).await.map_err(DecisionError::InDoubt);
        self.maintenance.restore_partition(id, at_unix_ms, None, decide).await
    }

    /// Like [`Engine::restore_partition`], on a member of a cluster. The new timeline has the lineage
    /// `lineage`, by which a repeated request recognizes it.
    pub async fn restore_assigned<'a>(
        &self,
        id: PartitionId,
        at_unix_ms: u64,
        lineage: u64,
        decide: impl FnOnce(Timeline) -> BoxFuture<'a, std::result::Result<(), DecisionError>>,
    ) -> Result<()> {
        let decide = async |timeline| decide(timeline).await;
        self.maintenance.restore_partition(id, at_unix_ms, Some(lineage), decide).await
    }

    /// Returns a lineage for [`Engine::restore_assigned`].
    pub fn new_lineage(&self) -> u64 {
        self.node().clock.tick()
    }

    /// The objects in the store, for the collector of a cluster.
    pub fn common_store(&self) -> CommonStore {
        CommonStore::new(self.maintenance.clone())
    }

    /// Returns those of these segments that this node does not need ([`CommonStore`]).
    pub async fn disowned(&self, segments: Vec<SegmentId>) -> Vec<SegmentId> {
        self.maintenance.disowned(segments).await
    }

    /// Begins to read a partition as it is now, with exactly the commits acknowledged so far, or as
    /// it was at a time (milliseconds since 1970).
    pub async fn export(&self, id: PartitionId, at_unix_ms: Option<u64>) -> Result<Export> {
        if at_unix_ms.is_none() && self.is_replica() {
            // The newest manifest may be a minute old, and miss commits that the session has seen.
            let message = "cannot export the current version of a database on a replica";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                .hint("Export it on the primary, or export a historical version (fulmar.as_of)."));
        }
        self.maintenance.export(id, at_unix_ms).await
    }

    /// Begins to fill a new partition. Fails if a partition with this id has a manifest.
    pub async fn import(self: &Arc<Self>, id: PartitionId) -> Result<Import> {
        self.maintenance.import(id).await
    }

    /// Flushes all changed partitions. For tests and tools; the engine does so by itself.
    pub async fn flush(&self) -> Result<()> {
        self.check_primary()?;
        self.maintenance.flush_all().await
    }

    /// Runs all queued compactions. For tests and tools; the engine does so by itself.
    pub async fn compact_all(&self) -> Result<()> {
        self.maintenance.compact_all().await
    }

    /// Runs a garbage collection. For tests and tools; the engine does so by itself.
    pub async fn collect(&self) -> Result<()> {
        self.maintenance.collect().await
    }
}

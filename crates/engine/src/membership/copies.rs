//! Copies of partitions between nodes that have a store of their own ([`fulmar_maintenance`]'s `copy`).

use fulmar_maintenance::{Archive, ArchiveSize, IncomingCopy, OutgoingCopy};
use fulmar_mvcc::store_error;
use fulmar_pages::{PageNo, PartitionId, SegmentId, Timeline};
use fulmar_sqlite::Result;
use fulmar_store::{Piece, Span, VERSION_BITS};

use crate::engine::Engine;

impl Engine {
    /// Begins to copy a partition of this node to another one.
    pub fn copy_out(&self, id: PartitionId) -> OutgoingCopy {
        self.maintenance().copy_out(id)
    }

    /// Begins to receive a partition, to be owned in the epoch `epoch`.
    pub async fn copy_in(&self, id: PartitionId, timeline: Timeline, epoch: u32) -> Result<IncomingCopy> {
        self.require_member()?;
        self.maintenance().copy_in(id, timeline, u64::from(epoch) << VERSION_BITS).await
    }

    /// The archive of a partition that this node does not own; `None` if it has kept nothing.
    pub async fn archive(&self, id: PartitionId, timeline: Timeline) -> Result<Option<Archive>> {
        self.maintenance().archive(id, timeline.epoch).await
    }

    /// The size of such an archive.
    pub async fn archive_size(&self, id: PartitionId, timeline: Timeline) -> Result<Option<ArchiveSize>> {
        self.maintenance().archive_size(id, timeline.epoch).await
    }

    /// Fails if there is no room on the disk for this many bytes.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        self.node().disk.check_room(bytes)
    }

    /// Copies the pages of a partition that are still in the source's store. `hottest` are those to read
    /// first. Returns false if snapshots still read pages there.
    pub async fn pull(&self, id: PartitionId, hottest: &[PageNo]) -> Result<bool> {
        self.maintenance().pull(id, hottest).await
    }

    /// Reads a part of a segment of this node's own store; `None` if it is not there.
    pub async fn read_segment(&self, id: SegmentId, span: Span) -> Result<Option<Piece>> {
        let store = &self.node().store;
        match store.has_own_segment(id) {
            true => store.read_segment(id, span).await.map(Some).map_err(store_error),
            false => Ok(None),
        }
    }

    /// Deletes what is stored of a partition that this node does not own.
    pub async fn delete_copy(&self, id: PartitionId) -> Result<()> {
        self.forget_arrival(id);
        self.maintenance().delete_copy(id).await
    }

    /// The pages that a partition has in memory, hottest first. Empty if it is closed.
    pub fn pages_in_memory(&self, id: PartitionId) -> Vec<PageNo> {
        let open = self.partitions().open_one(id);
        let cached = open.map(|partition| partition.cached_pages()).unwrap_or_default();
        cached.into_iter().map(|cached| cached.page).collect()
    }

    /// The partitions of which something is in the store.
    pub async fn stored_partitions(&self) -> Result<Vec<PartitionId>> {
        self.maintenance().stored_partitions().await
    }
}

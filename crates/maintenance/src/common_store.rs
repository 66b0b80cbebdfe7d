//! The objects in the common store of a cluster, for its elected collector.
//!
//! The protocol decides what is garbage (`fulmar_cluster::collection`): this module lists and
//! deletes, and says what this node needs. It uses the retention and the thinning of
//! [`crate::restore_points`], and keeps the [index of manifests](crate::segment_refs) between
//! collections, so each manifest is read once.
//!
//! - Listing is paced: after each chunk of partitions it pauses for as long as the chunk took, and
//!   for a fixed time per manifest that it had to read.
//! - A manifest is condemned before it is deleted, so one that is pinned stays
//!   ([`fulmar_store`]'s `objects/manifest_holds`).
//! - If a listed manifest is missing or damaged, its references are unknown. A partition may have
//!   been dropped after it was branched. The listing is incomplete then, and no segment is deleted.
//!
//! Lists of hot pages and anchors that newer ones replace are deleted on the way: nothing refers
//! to them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_mvcc::store_error;
use fulmar_pages::{PartitionId, SegmentId};
use fulmar_sqlite::Result;
use fulmar_store::{ManifestName, PageStore, PartitionObjects, StoreError};
use tokio::sync::Mutex;

use crate::collect::{holds_of, warn_if_damaged};
use crate::maintenance::Maintenance;
use crate::restore_points;
use crate::segment_refs::ReachabilityIndex;

/// Approximate number of manifests per chunk.
const CHUNK_MANIFESTS: usize = 1000;
/// Pause for each manifest that was read.
const READ_PAUSE: Duration = Duration::from_millis(5);
/// Maximum pause after a chunk.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// The manifests of a partition.
#[derive(Clone, Debug)]
pub struct PartitionManifests {
    /// The partition.
    pub partition: PartitionId,
    /// Those whose timeline has begun, oldest first, and whether each has expired.
    pub manifests: Vec<(ManifestName, bool)>,
    /// All segments that any of its manifests names.
    pub segments: Vec<SegmentId>,
    /// A manifest of this part of the listing is missing or damaged.
    pub is_incomplete: bool,
}

/// The objects in a store that several nodes use.
pub struct CommonStore {
    maintenance: Arc<Maintenance>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    index: ReachabilityIndex,
    /// Listed objects that were not returned yet. Their partitions are above `after`.
    listed: PartitionObjects,
    after: Option<PartitionId>,
    /// There may be more in the store.
    has_more: bool,
}

impl CommonStore {
    /// The objects in the store of a node.
    pub fn new(maintenance: Arc<Maintenance>) -> Self {
        CommonStore { maintenance, state: Mutex::default() }
    }

    fn store(&self) -> &PageStore {
        &self.maintenance.node().store
    }

    /// Lists all segments.
    pub async fn segments(&self) -> Result<Vec<SegmentId>> {
        self.store().list_segments().await.map_err(store_error)
    }

    /// The partitions whose pages a segment contains; none if it does not exist.
    pub async fn contents(&self, segment: SegmentId) -> Result<Vec<PartitionId>> {
        match self.store().segment_index(segment).await {
            Ok(index) => Ok(index.partitions().collect()),
            Err(StoreError::Missing { .. }) => Ok(Vec::new()),
            Err(error) => Err(store_error(error)),
        }
    }

    /// Returns the manifests of the next partitions above `after`. `timeline` returns the epoch of a
    /// partition in the catalog, and `now_ms` is compared with the times of manifests.
    pub async fn manifests_after(
        &self,
        after: Option<PartitionId>,
        now_ms: u64,
        timeline: &(dyn Fn(PartitionId) -> u32 + Sync),
    ) -> Result<Vec<PartitionManifests>> {
        let begun = Instant::now();
        let mut state = self.state.lock().await;
        let chunk = self.next_chunk(&mut state, after).await?;
        let names = &chunk.manifests;
        let known = state.index.count(names);
        let unread = state.index.refresh(self.store(), names).await?;
        if let Some(damaged) = &unread.damaged {
            tracing::warn!(error = %damaged, "segments are kept: a manifest cannot be read");
        }
        let is_incomplete = unread.missing || unread.damaged.is_some();
        let mut found = Vec::new();
        for names in names.chunk_by(|a, b| a.partition == b.partition) {
            let (partition, epoch) = (names[0].partition, timeline(names[0].partition));
            let begun = &names[..names.partition_point(|name| name.epoch <= epoch)];
            let points = state.index.points(begun);
            let retention = (self.maintenance.retention)(partition);
            let expired = restore_points::expired(&points, now_ms, retention, false);
            let manifests = begun.iter().map(|name| (*name, expired.binary_search(name).is_ok())).collect();
            let segments = state.index.segments(partition).collect();
            // A later restore may reuse the names of an incomplete one.
            state.index.forget(&names[begun.len()..]);
            found.push(PartitionManifests { partition, manifests, segments, is_incomplete });
        }
        state.index.evict_if_full(names);
        self.delete_replaced(&chunk, timeline).await?;
        let pause = begun.elapsed() + READ_PAUSE * names.len().saturating_sub(known) as u32;
        state.after = found.last().map(|last| last.partition);
        drop(state);
        if !found.is_empty() {
            tokio::time::sleep(pause.min(MAX_PAUSE)).await;
        }
        Ok(found)
    }

    /// Takes the objects of the next partitions that have manifests.
    async fn next_chunk(&self, state: &mut State, after: Option<PartitionId>) -> Result<PartitionObjects> {
        if after.is_none() || after != state.after {
            (state.listed, state.has_more, state.after) = (PartitionObjects::default(), true, after);
        }
        let mut from = after;
        while state.listed.manifests.is_empty() && state.has_more {
            let (listed, has_more) = self.store().list_partitions_after(from).await.map_err(store_error)?;
            from = listed.last_partition().or(from);
            (state.listed, state.has_more) = (listed, has_more);
        }
        let manifests = &state.listed.manifests;
        let Some(last) = manifests.len().min(CHUNK_MANIFESTS).checked_sub(1) else {
            return Ok(PartitionObjects::default());
        };
        let last = manifests[last].partition;
        Ok(state.listed.take_up_to(last))
    }

    /// Deletes lists of hot pages and anchors that newer ones replace. A manifest that is named by
    /// the newest anchor is never deleted.
    async fn delete_replaced(
        &self,
        chunk: &PartitionObjects,
        timeline: &(dyn Fn(PartitionId) -> u32 + Sync),
    ) -> Result<()> {
        for lists in chunk.hot_pages.chunk_by(|a, b| a.partition == b.partition) {
            let epoch = timeline(lists[0].partition);
            let newest = lists.iter().rfind(|list| list.epoch <= epoch);
            for list in lists.iter().filter(|list| newest.is_some_and(|newest| *list < newest)) {
                self.store().delete_hot_pages(*list).await.map_err(store_error)?;
            }
        }
        for names in chunk.manifests.chunk_by(|a, b| a.partition == b.partition) {
            let Some(newest) = names.iter().rfind(|name| name.epoch <= timeline(name.partition)) else {
                continue;
            };
            let anchors = chunk.anchors_of(names[0].partition);
            for older in anchors.iter().filter(|anchor| *anchor < newest) {
                self.store().delete_anchor(*older).await.map_err(store_error)?;
            }
        }
        Ok(())
    }

    /// Returns true if a manifest exists.
    pub async fn has_manifest(&self, name: ManifestName) -> Result<bool> {
        match self.store().read_manifest(name).await {
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(StoreError::Damaged { .. } | StoreError::WrongIdentity { .. }) | Ok(_) => Ok(true),
            Err(error) => Err(store_error(error)),
        }
    }

    /// Returns true if a segment exists.
    pub async fn has_segment(&self, segment: SegmentId) -> Result<bool> {
        match self.store().segment_index(segment).await {
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(StoreError::Damaged { .. }) | Ok(_) => Ok(true),
            Err(error) => Err(store_error(error)),
        }
    }

    /// Deletes a manifest, unless it is pinned.
    pub async fn delete_manifest(&self, name: ManifestName) -> Result<()> {
        let node = self.maintenance.node();
        let _past = node.old_manifests.write().await;
        let listed = self.store().list_partitions(Some(name.partition)).await.map_err(store_error)?;
        let holds = holds_of(&listed, name);
        if listed.manifests.binary_search(&name).is_err() {
            // Its holds may be left.
            return warn_if_damaged(self.store().delete_orphaned_holds(holds, node.clock.unix_ms()).await);
        }
        warn_if_damaged(self.store().condemn(name, holds, node.clock.unix_ms()).await.map(drop))
    }

    /// Deletes a segment.
    pub async fn delete_segment(&self, segment: SegmentId) -> Result<()> {
        self.store().delete_segment(segment).await.map_err(store_error)
    }
}

impl Maintenance {
    /// Returns those of these segments that this node does not need: no partition, session or task
    /// reads them, and no manifest or log record of this process will name them that does not do so
    /// already.
    pub async fn disowned(&self, segments: Vec<SegmentId>) -> Vec<SegmentId> {
        // Tasks that have stored a segment have referenced it afterwards, or never will.
        self.node().publication.wait_for_grace_period().await;
        // Historical sessions that have read a manifest which is deleted now have opened it
        // afterwards.
        let _past = self.node().old_manifests.write().await;
        let used: HashSet<SegmentId> = self.segments_in_use();
        segments.into_iter().filter(|segment| !used.contains(segment)).collect()
    }
}

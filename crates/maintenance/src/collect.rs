//! Garbage collection: deletes expired manifests, then segments that are no longer referenced, and
//! all but the newest list of hot pages ([`crate::hot`]) of each partition. It also stores anchors
//! for the newest manifests of closed partitions ([`fulmar_store`]'s `objects/anchors`).
//!
//! A collection has these steps:
//! 1. List the segments.
//! 2. Wait until all tasks with unreferenced segments have referenced them
//!    ([`fulmar_mvcc::SegmentPublication`]).
//! 3. List the manifests.
//! 4. Check that this process still owns the store ([`fulmar_mvcc::StoreOwnership`]).
//! 5. Condemn and delete expired manifests ([`crate::restore_points`]).
//! 6. Determine which of the listed segments the remaining manifests reference or sessions read.
//! 7. Delete the others.
//!
//! It takes no lock that a commit or a flush waits for.
//!
//! # Why no needed segment is deleted
//! A segment is deleted if it existed at step 1 and is unreferenced at step 6. Step 2 ensures that
//! the task that stored it has referenced it by then, or never will. Any other task can reference
//! it only by copying from a manifest that does:
//! - A flush copies from the newest manifest of its partition, which is never deleted.
//! - A branch or restore copies from any manifest, but holds [`fulmar_mvcc::Node::old_manifests`]
//!   from reading that manifest until the new one is stored. So either the old manifest was deleted
//!   first, or the new one is found.
//! - A historical session ([`crate::time_travel`]) holds the same lock until its segments are found
//!   among those in use.
//!
//! A manifest that is missing when it is read (its tenant was dropped) may have been branched
//! meanwhile, so all manifests are listed again.
//!
//! # Other processes
//! In a cluster with a common store the elected collector collects ([`crate::common_store`]), and this
//! module does nothing. Otherwise only the owner of the store collects. After listing objects and finding the segments that only
//! logs reference, it checks that it still owns the store, so it knew every reference to the listed
//! objects. What it then deletes stays garbage, however long the deletion takes and even after a
//! takeover, since a later process can reference a segment only by copying from a manifest that
//! references it, or if it stored the segment itself:
//! - An expired manifest is *condemned* before it is deleted, unless it is *pinned*
//!   ([`fulmar_store`]'s `objects/manifest_holds`). Replicas and branches see that before they use
//!   it.
//! - A branch checks that its source manifest still exists after its own manifest is stored.
//!   References are listed after the last manifest was deleted, so the listing contains the branch
//!   or its source.
//! - Segments of earlier terms are kept until their processes are gone: a flush may be about to
//!   reference one.
//!
//! # A damaged shared log
//! A shared log that was rejected at startup (`log_routing` in `fulmar_engine`) may reference
//! segments of large commits that no manifest references yet. The operator can restore its damaged
//! object, and the next start then needs these segments. A process that has rejected the log
//! therefore deletes no segments. Manifests are deleted as usual: the records of a log continue
//! from the newest one, which is kept.
//!
//! # Damaged holds and manifests
//! A hold that cannot be read keeps its manifest and logs a warning. While any manifest cannot be
//! read no segment is deleted, since its references are unknown. Each collection logs a warning
//! with the object, its partition and the remedy.
//!
//! # Crashes
//! Manifests are deleted before the segments that only they reference. A crash in between leaves
//! unreferenced segments, which the next collection finds, since it starts by listing all segments.

use std::collections::HashSet;

use fulmar_mvcc::store_error;
use fulmar_pages::{PartitionId, SegmentId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{HoldName, ManifestName, PartitionObjects, Store, StoreError};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use hashbrown::HashMap;

use crate::maintenance::Maintenance;
use crate::restore_points;
use crate::segment_refs::{ReachabilityIndex, chunks};

/// Maximum number of concurrent manifest deletions.
const MAX_CONCURRENT_DELETIONS: usize = 16;
/// Manifests deleted per acquisition of the lock that excludes historical reads.
const DELETION_CHUNK: usize = 256;

/// Maximum number of anchors stored per collection.
const MAX_NEW_ANCHORS: usize = 1000;
/// How often all manifests are listed again if some are missing each time.
const MAX_LISTINGS: usize = 20;

/// The segments that existed at the beginning, sorted, and whether each is needed.
struct Segments {
    existing: Vec<SegmentId>,
    needed: Vec<bool>,
}

impl Segments {
    fn new(mut existing: Vec<SegmentId>) -> Self {
        existing.sort_unstable();
        Segments { needed: vec![false; existing.len()], existing }
    }

    fn need(&mut self, segments: impl IntoIterator<Item = SegmentId>) {
        for segment in segments {
            if let Ok(at) = self.existing.binary_search(&segment) {
                self.needed[at] = true;
            }
        }
    }

    fn unneeded(&self) -> impl Iterator<Item = SegmentId> {
        self.existing.iter().zip(&self.needed).filter(|(_, needed)| !**needed).map(|(segment, _)| *segment)
    }
}

impl Maintenance {
    /// Runs one collection.
    pub(crate) fn delete_unneeded<'a>(
        &'a self,
        index: &'a mut ReachabilityIndex,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            if self.node().has_common_store {
                return Ok(());
            }
            let (node, store) = (self.node(), &self.node().store);
            let mut segments = Segments::new(store.list_segments().await.map_err(store_error)?);
            // Read before the manifests are listed: manifests above these epochs are ignored, even
            // if a restore completes meanwhile.
            let timelines = self.partitions.timelines();
            let is_begun = |name: &ManifestName| name.epoch <= epoch_in(&timelines, name.partition);
            node.publication.wait_for_grace_period().await;
            let listed = store.list_partitions(None).await.map_err(store_error)?;
            // Segments that only logs reference are determined while this process is known to own
            // the store.
            segments.need(self.segments_in_use());
            self.node().check_term().await?;
            self.delete_old_hot_pages(&listed).await?;
            self.anchor_closed_partitions(&listed, &is_begun).await?;
            self.delete_old_manifests(&listed, index, &is_begun).await?;
            if self.partitions.opener().check_shared_log().is_err() {
                // Segments that only the rejected log references are in none of the sets above.
                return Ok(());
            }
            segments.need(self.segments_in_use());
            self.need_named_segments(index, &mut segments, &is_begun).await?;
            let now_ms = node.clock.monotonic_ms();
            let may_delete = |segment| {
                node.ownership.as_ref().is_none_or(|ownership| ownership.may_delete(segment, now_ms))
            };
            for segment in segments.unneeded().filter(|segment| may_delete(*segment)) {
                store.delete_segment(segment).await.map_err(store_error)?;
            }
            Ok(())
        }
        .boxed()
    }

    async fn delete_old_manifests(
        &self,
        listed: &PartitionObjects,
        index: &mut ReachabilityIndex,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        let condemned = self.condemned(listed).await?;
        // Thinning helps only if the history is on the disk that is nearly full, below the data
        // directory.
        let sparsely = node.disk.is_low() && node.ownership.is_none() && store.store().directory().is_some();
        let mut thinned = 0;
        for chunk in chunks(&listed.manifests) {
            // Missing and damaged manifests are handled below, when references are determined.
            index.refresh(store, chunk).await?;
            for names in chunk.chunk_by(|a, b| a.partition == b.partition) {
                let (now_ms, retention) = (node.clock.unix_ms(), (self.retention)(names[0].partition));
                let begun = &names[..names.partition_point(is_begun)];
                let points = index.points(begun);
                let over = |sparsely| restore_points::expired(&points, now_ms, retention, sparsely);
                let mut old = over(sparsely);
                if sparsely {
                    thinned += old.len() - over(false).len();
                }
                old.extend(begun.iter().rev().skip(1).filter(|name| condemned.contains(*name)));
                index.forget(&names[begun.len()..]);
                // If no epoch has begun, the catalog is older than the store.
                if !begun.is_empty() && begun.len() < names.len() {
                    self.condemn_unbegun(&names[begun.len()..], listed).await?;
                }
                if names.len() > 1 {
                    // Condemned manifests may also have expired.
                    old.sort_unstable();
                    old.dedup();
                    index.forget(&old);
                    self.condemn_all(&old, listed).await?;
                }
            }
            index.evict_if_full(chunk);
        }
        if thinned > 0 {
            tracing::warn!(
                manifests = thinned,
                "disk nearly full: restore points older than one hour have been thinned"
            );
        }
        self.delete_orphaned_holds(listed).await
    }

    /// Deletes a partition's manifests of incomplete restores. Their epoch had not begun when they
    /// were listed.
    async fn condemn_unbegun(&self, names: &[ManifestName], listed: &PartitionObjects) -> Result<()> {
        let _past = self.node().old_manifests.write().await;
        // No restore is in progress now. One that completed meanwhile has begun its epoch, unless
        // its outcome is unknown.
        let id = names[0].partition;
        let epoch =
            if self.partitions.is_undecided(id) { u32::MAX } else { self.partitions.timeline(id).epoch };
        for name in names.iter().filter(|name| name.epoch > epoch) {
            self.condemn(*name, holds_of(listed, *name)).await?;
        }
        Ok(())
    }

    /// Deletes expired manifests unless they are pinned. The lock is released between chunks, so
    /// that historical reads can proceed.
    async fn condemn_all(&self, names: &[ManifestName], listed: &PartitionObjects) -> Result<()> {
        for chunk in names.chunks(DELETION_CHUNK) {
            let _past = self.node().old_manifests.write().await;
            let condemning = chunk.iter().map(|name| self.condemn(*name, holds_of(listed, *name)));
            let condemning =
                stream::iter(condemning.collect::<Vec<_>>()).buffer_unordered(MAX_CONCURRENT_DELETIONS);
            condemning.try_collect::<()>().await?;
        }
        Ok(())
    }

    /// Deletes a manifest unless it is pinned. If its holds cannot be read it is kept.
    async fn condemn(&self, manifest: ManifestName, holds: &[HoldName]) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        warn_if_damaged(store.condemn(manifest, holds, node.clock.unix_ms()).await.map(drop))
    }

    /// Manifests that were condemned and not deleted, because of a crash.
    async fn condemned(&self, listed: &PartitionObjects) -> Result<HashSet<ManifestName>> {
        let mut condemned = HashSet::new();
        for holds in listed.holds.chunk_by(|a, b| a.manifest == b.manifest) {
            let is_condemned = self.node().store.is_condemned(holds).await;
            warn_if_damaged(is_condemned.map(|is_condemned| {
                condemned.extend(is_condemned.then_some(holds[0].manifest));
            }))?;
        }
        Ok(condemned)
    }

    /// Deletes holds whose manifest was deleted without them, because of a crash.
    async fn delete_orphaned_holds(&self, listed: &PartitionObjects) -> Result<()> {
        let (node, store) = (self.node(), &self.node().store);
        for holds in listed.holds.chunk_by(|a, b| a.manifest == b.manifest) {
            if listed.manifests.binary_search(&holds[0].manifest).is_err() {
                warn_if_damaged(store.delete_orphaned_holds(holds, node.clock.unix_ms()).await)?;
            }
        }
        Ok(())
    }

    /// Deletes lists of hot pages that no partition will open with: there is a newer list or epoch,
    /// or the partition is gone. A partition with a list has a manifest, which was stored first.
    async fn delete_old_hot_pages(&self, listed: &PartitionObjects) -> Result<()> {
        for lists in listed.hot_pages.chunk_by(|a, b| a.partition == b.partition) {
            let id = lists[0].partition;
            let exists = listed.manifests.binary_search_by_key(&id, |name| name.partition).is_ok();
            let epoch = self.partitions.timeline(id).epoch;
            let newest = lists.iter().rfind(|list| list.epoch == epoch).filter(|_| exists);
            for list in lists.iter().filter(|list| Some(*list) != newest) {
                self.node().store.delete_hot_pages(*list).await.map_err(store_error)?;
            }
        }
        Ok(())
    }

    /// Stores anchors for the newest manifests of closed partitions, unless that was done when they
    /// were closed. These partitions need no log, so without an anchor a missing manifest would not
    /// be noticed. At most [`MAX_NEW_ANCHORS`] per collection; thousands take several. Also deletes
    /// anchors of older manifests, and anchors stored after their partition was dropped.
    async fn anchor_closed_partitions(
        &self,
        listed: &PartitionObjects,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let store = &self.node().store;
        let is_dropped =
            |anchor: &&ManifestName| self.partitions.check_not_dropped(anchor.partition).is_err();
        for anchor in listed.anchors.iter().filter(is_dropped) {
            store.delete_anchor(*anchor).await.map_err(store_error)?;
        }
        let mut left = MAX_NEW_ANCHORS;
        for names in listed.manifests.chunk_by(|a, b| a.partition == b.partition) {
            let id = names[0].partition;
            let Some(newest) = names.iter().rfind(|name| is_begun(name)) else { continue };
            let anchors = listed.anchors_of(id);
            if anchors.last() != Some(newest) {
                if left == 0 || self.partitions.may_be_dirty(id) {
                    continue;
                }
                store.put_anchor(*newest).await.map_err(store_error)?;
                left -= 1;
            }
            for older in anchors.iter().filter(|anchor| *anchor < newest) {
                store.delete_anchor(*older).await.map_err(store_error)?;
            }
        }
        Ok(())
    }

    /// Segments that are being read in this process, or that only log records reference.
    pub(crate) fn segments_in_use(&self) -> HashSet<SegmentId> {
        // The order matters: a partition that is being opened is not yet in the second set, or
        // still in the first.
        let mut segments: HashSet<SegmentId> = self.partitions.unopened_segments().into_iter().collect();
        segments.extend(self.node().exported_segments());
        for partition in self.partitions.open_partitions().into_iter().chain(self.historical_versions.open())
        {
            segments.extend(partition.frame_segments());
            segments.extend(partition.named_segments().iter().map(|named| named.segment.id));
        }
        segments
    }

    /// Marks all segments that manifests reference.
    async fn need_named_segments(
        &self,
        index: &mut ReachabilityIndex,
        segments: &mut Segments,
        is_begun: &(impl Fn(&ManifestName) -> bool + Sync),
    ) -> Result<()> {
        let store = &self.node().store;
        'listing: for _ in 0..MAX_LISTINGS {
            let names = store.list_manifests(None).await.map_err(store_error)?;
            index.keep_only(&names);
            for chunk in chunks(&names) {
                let unlearned = index.refresh(store, chunk).await?;
                if let Some(damaged) = unlearned.damaged {
                    return Err(store_error(damaged));
                }
                if unlearned.missing {
                    continue 'listing;
                }
                for names in chunk.chunk_by(|a, b| a.partition == b.partition) {
                    segments.need(index.segments(names[0].partition));
                    index.forget(&names[names.partition_point(is_begun)..]);
                }
                index.evict_if_full(chunk);
            }
            return Ok(());
        }
        Err(Error::new(
            sqlstate::INTERNAL,
            "garbage collection backlog: databases are dropped faster than their data is deleted",
        )
        .hint("The collection is retried."))
    }
}

/// A partition's epoch in `timelines`.
fn epoch_in(timelines: &HashMap<PartitionId, Timeline>, id: PartitionId) -> u32 {
    timelines.get(&id).copied().unwrap_or(Timeline::first(id)).epoch
}

/// A manifest's holds in a listing.
pub(crate) fn holds_of(listed: &PartitionObjects, manifest: ManifestName) -> &[HoldName] {
    let begin = listed.holds.partition_point(|hold| hold.manifest < manifest);
    let count = listed.holds[begin..].iter().take_while(|hold| hold.manifest == manifest).count();
    &listed.holds[begin..begin + count]
}

/// Turns damage into a warning: the affected manifest is kept, and the collection continues.
pub(crate) fn warn_if_damaged(result: std::result::Result<(), StoreError>) -> Result<()> {
    match result {
        Err(error @ (StoreError::Damaged { .. } | StoreError::WrongIdentity { .. })) => {
            let partition = error.partition().map(tracing::field::display);
            tracing::warn!(%error, partition, "manifest kept: its holds cannot be read");
            Ok(())
        }
        result => result.map_err(store_error),
    }
}

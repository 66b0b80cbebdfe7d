//! The destination of a copy.

use std::sync::Arc;

use fulmar_mvcc::store_error;
use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{Manifest, PartitionId, SegmentId, Timeline, Version};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::SegmentWriter;

use super::archive::Archive;
use super::batch;
use crate::maintenance::Maintenance;

/// A partition of another node that is being copied to this one.
pub struct IncomingCopy {
    maintenance: Arc<Maintenance>,
    partition: PartitionId,
    timeline: Timeline,
    /// The version number of the next round's manifest.
    number: u64,
    /// The segment of this round, from its first frame on.
    current: Option<(SegmentWriter, SegmentBuilder)>,
    segments: Vec<SegmentRef>,
    /// Protects the segments from the collector.
    held: Vec<Arc<Vec<SegmentId>>>,
}

impl Maintenance {
    /// Begins to receive a copy. Its version numbers are at least `first`, and above those of all
    /// versions that are stored.
    pub async fn copy_in(
        self: &Arc<Self>,
        partition: PartitionId,
        timeline: Timeline,
        first: u64,
    ) -> Result<IncomingCopy> {
        self.node().check_owner()?;
        self.node().disk.admit(true)?;
        // The collector would take manifests of a later timeline for those of a failed restore.
        self.partitions.learn_timeline(partition, timeline);
        let stored = self.node().store.list_manifests(Some(partition)).await.map_err(store_error)?;
        let newest = stored.iter().map(|name| name.number).max();
        let number = newest.map_or(first, |newest| first.max(newest + 1));
        Ok(IncomingCopy {
            maintenance: self.clone(),
            partition,
            timeline,
            number,
            current: None,
            segments: Vec::new(),
            held: Vec::new(),
        })
    }

    /// The partitions of which the store has anything but segments.
    pub async fn stored_partitions(&self) -> Result<Vec<PartitionId>> {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let listed = self.node().store.list_partitions_after(after).await;
            let (listed, has_more) = listed.map_err(store_error)?;
            after = listed.last_partition().or(after);
            found.extend(listed.manifests.iter().map(|name| name.partition));
            found.extend(listed.anchors.iter().map(|name| name.partition));
            found.extend(listed.hot_pages.iter().map(|name| name.partition));
            found.extend(listed.holds.iter().map(|name| name.manifest.partition));
            found.sort_unstable();
            found.dedup();
            if !has_more {
                return Ok(found);
            }
        }
    }

    /// Deletes the manifests of a partition that this node does not own. Segments that only they name
    /// are collected later.
    pub async fn delete_copy(&self, partition: PartitionId) -> Result<()> {
        self.node().check_owner()?;
        crate::flush::delete(self, partition).await
    }
}

impl IncomingCopy {
    /// Uses the pages of an archive whose hashes were sent to the source.
    pub fn use_archive(&mut self, archive: &Archive) {
        self.segments = archive.manifest().segments.clone();
        self.held.push(archive.held.clone());
    }

    /// Uses segments of the source, which are copied later ([`Maintenance::pull`]).
    pub fn use_segments(&mut self, manifest: &Manifest) {
        self.segments = manifest.segments.clone();
    }

    /// Stores the frames of a batch of the source ([`super::OutgoingCopy::next`]).
    pub async fn frames(&mut self, batch: &[u8]) -> Result<()> {
        let node = self.maintenance.node().clone();
        node.disk.admit(true)?;
        let (writer, builder) = match &mut self.current {
            Some(current) => current,
            none => {
                let mut writer = node.store.segment_writer().await.map_err(store_error)?;
                let builder = SegmentBuilder::new(writer.buffer());
                none.insert((writer, builder))
            }
        };
        for frame in batch::frames(batch) {
            let (page, frame) = frame?;
            builder.push_frame(self.partition, page, frame, writer.buffer());
        }
        writer.flush().await.map_err(store_error)
    }

    /// Makes the version of this round durable. `manifest` is the source's; `None` if the partition
    /// is empty.
    pub async fn end_round(&mut self, manifest: Option<Manifest>) -> Result<()> {
        self.finish_segment().await?;
        let Some(manifest) = manifest else { return Ok(()) };
        let Timeline { lineage, epoch } = self.timeline;
        let version = manifest.version;
        if manifest.partition != self.partition || (version.lineage, version.epoch) != (lineage, epoch) {
            return Err(Error::new(sqlstate::INTERNAL, "received the copy of another partition or timeline"));
        }
        let node = self.maintenance.node();
        node.clock.observe(manifest.timestamp);
        let version = Version { lineage, epoch, number: self.number };
        let stored = Manifest { version, segments: self.segments.clone(), ..manifest };
        node.store.put_manifest(&stored).await.map_err(store_error)?;
        self.number += 1;
        Ok(())
    }

    async fn finish_segment(&mut self) -> Result<()> {
        let Some((mut writer, builder)) = self.current.take() else { return Ok(()) };
        let node = self.maintenance.node();
        let bytes = builder.bytes();
        builder.finish(writer.buffer());
        let _unnamed = node.publication.enter();
        let id = writer.finish().await.map_err(store_error)?;
        let held = Arc::new(vec![id]);
        node.exported.lock().push(Arc::downgrade(&held));
        self.held.push(held);
        self.segments.push(SegmentRef { id, partition: self.partition });
        self.maintenance.scheduler.count_written(bytes);
        Ok(())
    }
}

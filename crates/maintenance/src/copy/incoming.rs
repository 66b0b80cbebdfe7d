//! The destination of a copy.

use std::sync::Arc;

use fulmar_mvcc::{Draft, Node, Partition, store_error};
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
    /// The size of the database in pages, if it was built here.
    page_count: Option<u32>,
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
            page_count: None,
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

    /// Uses a database that was built from the rows of the source, by a transaction on `partition`.
    pub async fn use_draft(&mut self, partition: &Partition, mut draft: Draft) -> Result<()> {
        let node = self.maintenance.node().clone();
        let unnamed = node.publication.enter();
        if let Some(segment) = partition.store_draft(&mut draft).await? {
            self.hold(segment.id);
            self.segments.push(segment);
        }
        drop(unnamed);
        let (no, page) = draft.page_one();
        let (mut writer, mut builder) = begin_segment(&node).await?;
        builder.push(self.partition, no, page, writer.buffer());
        self.current = Some((writer, builder));
        self.page_count = Some(draft.page_count());
        Ok(())
    }

    /// Protects a segment from the collector.
    fn hold(&mut self, segment: SegmentId) {
        let held = Arc::new(vec![segment]);
        self.maintenance.node().exported.lock().push(Arc::downgrade(&held));
        self.held.push(held);
    }

    /// Stores the frames of a batch of the source ([`super::OutgoingCopy::next`]).
    pub async fn frames(&mut self, batch: &[u8]) -> Result<()> {
        let node = self.maintenance.node().clone();
        node.disk.admit(true)?;
        if self.current.is_none() {
            self.current = Some(begin_segment(&node).await?);
        }
        let Some((writer, builder)) = &mut self.current else { return Ok(()) };
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
        let page_count = self.page_count.unwrap_or(manifest.page_count);
        let stored = Manifest { version, page_count, segments: self.segments.clone(), ..manifest };
        node.store.put_manifest(&stored).await.map_err(store_error)?;
        self.number += 1;
        Ok(())
    }

    async fn finish_segment(&mut self) -> Result<()> {
        let Some((mut writer, builder)) = self.current.take() else { return Ok(()) };
        let node = self.maintenance.node().clone();
        let bytes = builder.bytes();
        builder.finish(writer.buffer());
        let _unnamed = node.publication.enter();
        let id = writer.finish().await.map_err(store_error)?;
        self.hold(id);
        self.segments.push(SegmentRef { id, partition: self.partition });
        self.maintenance.scheduler.count_written(bytes);
        Ok(())
    }
}

async fn begin_segment(node: &Node) -> Result<(SegmentWriter, SegmentBuilder)> {
    let mut writer = node.store.segment_writer().await.map_err(store_error)?;
    // The pages that the source has in memory are read after the round; most others are not soon.
    writer.bypass_page_cache();
    let builder = SegmentBuilder::new(writer.buffer());
    Ok((writer, builder))
}

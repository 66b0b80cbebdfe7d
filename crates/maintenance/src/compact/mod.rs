//! Compaction: merges a partition's segments, so that they stay few and contain little dead data.
//!
//! ```text
//!   before, oldest first      [ 25,000 ] [ 900 ] [ 700 ] [ 800 ] [ 1,100 ]      pages
//!                                         '-------- same tier ---------'
//!   after                     [ 25,000 ] [ 2,400 ]                              live pages only
//! ```
//!
//! Size-tiered policy:
//! - Two segments are in the same tier if their page counts are within a factor of four. When the
//!   newest four or more segments are in one tier (not counting smaller ones between them), they
//!   are merged, the smaller ones included. Each page is thus copied once per tier, a logarithmic
//!   number of times, and a partition has at most three segments per tier.
//! - When dead pages exceed three quarters of the live ones, all segments are merged. That copies
//!   no more than was written meanwhile.
//!
//! Only neighbours are merged, since later segments override earlier ones. Frames are copied from
//! store to store as they are: their checksums are verified, but they are neither decompressed nor
//! brought into the page cache.
//!
//! # Concurrency
//! A background task ([`crate::scheduler`]) compacts one partition at a time, within a budget of
//! bytes and CPU time ([`crate::throttle`]), which does not apply to a partition with more than
//! [`plan::MAX_PACED_SEGMENTS`]. Reading and writing take no lock.
//!
//! Flushes continue meanwhile. They only append to the list of segments; only compaction and a
//! restore remove any. The merged segments therefore still stand side by side when the new one is
//! finished. It replaces them in the partition's memory under the flush lock, and the next
//! manifest, written immediately, references it together with everything flushed meanwhile. No
//! flushed segment is lost, since that manifest is made from the same list. If a restore came
//! first, the partition is closed and the new segment is garbage.
//!
//! Once the manifest is durable, the partition's frames are moved to the new segment, so that the
//! old segments can be deleted while the partition stays open.
//!
//! While a partition is copied to another node, a merge of it is abandoned: the copy would take the
//! pages that it moves for changed ones, and send them again.
//!
//! # Crashes
//! Before the manifest is stored the new segment is garbage; afterwards the old ones are history.

mod plan;

use std::cmp::Reverse;
use std::sync::Arc;

use fulmar_mvcc::{CopiedFrame, Frame, NamedSegment, Partition, store_error};
use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{FrameLocation, PageNo, SegmentId};
use fulmar_sqlite::Result;
use fulmar_store::{RawFrame, SegmentWriter, failpoint};
use futures::FutureExt;
use futures::future::{BoxFuture, try_join_all};

pub(crate) use self::plan::Work;
use crate::flush;
use crate::maintenance::Maintenance;
use crate::throttle::{CompactionThrottle, measure_cpu};

/// Pages copied per batch.
const BATCH_PAGES: usize = 256;

impl Maintenance {
    /// Merges a partition's segments until no merge is due.
    pub(crate) fn compact<'a>(
        &'a self,
        partition: &'a Arc<Partition>,
        throttle: &'a mut CompactionThrottle,
    ) -> BoxFuture<'a, Result<()>> {
        throttle.begin();
        let cpu_time = throttle.cpu_time();
        let merging = async move {
            while let Some(work) = Work::of(partition) {
                if self.is_held(partition, &work) {
                    break;
                }
                // A copy needs space, so compaction stops while the disk is low.
                if self.node().disk.is_low() || !self.merge(partition, &work, throttle).await? {
                    break;
                }
                throttle.throttle(0, work.crowded).await;
            }
            Ok(())
        };
        measure_cpu(cpu_time, merging).boxed()
    }

    /// Merges segments. Returns false if the merge was abandoned.
    pub(crate) async fn merge(
        &self,
        partition: &Arc<Partition>,
        work: &Work,
        throttle: &mut CompactionThrottle,
    ) -> Result<bool> {
        let entries = self.newest_frames(work).await?;
        let mut writer = self.node().store.segment_writer().await.map_err(store_error)?;
        if !self.copy_frames(partition, work, &entries, &mut writer, throttle).await? {
            return Ok(false);
        }
        let _unnamed = self.node().publication.enter();
        let id = writer.finish().await.map_err(store_error)?;
        failpoint::hit(failpoint::COMPACT_AFTER_SEGMENT);
        let segment = SegmentRef { id, partition: partition.id };
        let merged = NamedSegment { segment, pages: entries.len() as u64 };
        let settled = self.flusher.lock_flushes().await;
        if partition.has_uncertain_manifest() {
            self.node().check_term().await?;
        }
        flush::settle_uncertain_manifests(self, partition).await??;
        // A copy that begins now waits for the flush lock.
        if self.is_held(partition, work) || !partition.replace_named(&work.sources, merged) {
            return Ok(false);
        }
        flush::write_manifest(self, partition.clone()).await?;
        drop(settled);
        failpoint::hit(failpoint::COMPACT_AFTER_MANIFEST);
        self.move_frames(partition, work, &entries, id).await?;
        Ok(true)
    }

    /// Returns true if a merge has to be abandoned: the partition was closed, or a copy of it was begun.
    fn is_held(&self, partition: &Partition, work: &Work) -> bool {
        partition.is_closed() || (!work.is_pull && !self.scheduler.may_compact(partition.id, work))
    }

    /// Moves the partition's frames to the merged segment.
    async fn move_frames(
        &self,
        partition: &Partition,
        work: &Work,
        entries: &[Entry],
        merged: SegmentId,
    ) -> Result<()> {
        let index = self.node().store.segment_index(merged).await.map_err(store_error)?;
        let to = partition.segment_number(merged);
        let sources = work.sources.iter().map(|source| partition.segment_number(source.segment.id));
        let sources: Vec<u32> = sources.collect();
        let copied = |(page, place, location): &Entry| {
            Some(CopiedFrame {
                page: *page,
                old: Frame { segment: *sources.get(*place)?, location: *location },
                new: Frame { segment: to, location: index.frame(partition.id, *page)? },
            })
        };
        for batch in entries.chunks(BATCH_PAGES) {
            partition.move_frames(batch.iter().filter_map(copied));
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Copies the frames to a new segment. Returns false if the copy was abandoned because the node
    /// is stopping, or the partition was closed, or is copied to another node.
    async fn copy_frames(
        &self,
        partition: &Partition,
        work: &Work,
        entries: &[Entry],
        writer: &mut SegmentWriter,
        throttle: &mut CompactionThrottle,
    ) -> Result<bool> {
        let mut builder = SegmentBuilder::new(writer.buffer());
        for batch in entries.chunks(BATCH_PAGES) {
            if self.scheduler.task.is_stopping() || self.is_held(partition, work) {
                return Ok(false);
            }
            self.node().disk.admit(true)?;
            let before = builder.bytes();
            let frames = self.read_batch(work, batch).await?;
            for ((no, ..), frame) in batch.iter().zip(frames) {
                let location = builder.push_frame(partition.id, *no, &frame.bytes, writer.buffer());
                // A cached frame will soon be requested from the new segment, so it is cached there
                // too.
                if frame.is_cached {
                    writer.cache_last_frame(location);
                }
            }
            writer.flush().await.map_err(store_error)?;
            throttle.throttle(builder.bytes() - before, work.crowded).await;
        }
        self.scheduler.count_written(builder.bytes());
        builder.finish(writer.buffer());
        Ok(true)
    }

    /// Returns the newest frame of each live page, sorted by page: page number, index of the
    /// segment in `work`, location.
    async fn newest_frames(&self, work: &Work) -> Result<Vec<Entry>> {
        let store = &self.node().store;
        let indexes = work.sources.iter().map(|source| store.segment_index(source.segment.id));
        let indexes = try_join_all(indexes).await.map_err(store_error)?;
        let mut entries: Vec<Entry> = Vec::new();
        for (place, (source, index)) in work.sources.iter().zip(&indexes).enumerate() {
            let frames = index.frames(source.segment.partition);
            entries
                .extend(frames.take_while(|(no, _)| *no <= work.page_count).map(|(no, at)| (no, place, at)));
        }
        entries.sort_unstable_by_key(|(no, place, _)| (*no, Reverse(*place)));
        entries.dedup_by_key(|(no, ..)| *no);
        Ok(entries)
    }

    /// Reads the frames of some pages, in their order.
    async fn read_batch(&self, work: &Work, batch: &[Entry]) -> Result<Vec<RawFrame>> {
        let of = |place: usize| {
            let entries = batch.iter().enumerate().filter(move |(_, entry)| entry.1 == place);
            entries
                .map(|(at, (.., location))| (at, *location))
                .unzip::<_, _, Vec<usize>, Vec<FrameLocation>>()
        };
        let reads = work.sources.iter().enumerate().map(async |(place, source)| {
            let (at, locations) = of(place);
            let frames = self.node().store.read_frames(source.segment.id, &locations).await?;
            Ok(at.into_iter().zip(frames))
        });
        let mut frames = vec![RawFrame::default(); batch.len()];
        for (at, frame) in try_join_all(reads).await.map_err(store_error)?.into_iter().flatten() {
            frames[at] = frame;
        }
        Ok(frames)
    }
}

/// Page number, index of its segment, location in the segment.
type Entry = (PageNo, usize, FrameLocation);

//! The source of a copy.

use std::sync::Arc;

use fulmar_mvcc::{Frame, LongTermReservation, Segments, read_frames, store_error};
use fulmar_pages::segment::FrameWriter;
use fulmar_pages::{FrameLocation, Manifest, PageNo, PartitionId, SegmentId, ZERO_PAGE};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{RawFrame, StoreError};
use hashbrown::HashMap;
use tokio::task::JoinHandle;

use super::{archive, batch};
use crate::maintenance::Maintenance;
use crate::scheduler::{CompactionHold, CopyDirection};

/// Maximum number of pages per batch. A batch is shorter than a message between nodes may be.
const BATCH_PAGES: usize = 128;
/// Memory per page of the partition: the frame that was sent, the one to be sent, and the hash of the
/// one in the archive.
const INDEX_ENTRY_BYTES: u64 = (2 * size_of::<(PageNo, Frame)>() + size_of::<(PageNo, u128)>()) as u64;

/// The size of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundSize {
    /// Pages to send.
    pub pages: u64,
    /// Their frames.
    pub bytes: u64,
}

/// A partition of this node that is being copied to another one.
pub struct OutgoingCopy {
    maintenance: Arc<Maintenance>,
    partition: PartitionId,
    segments: Segments,
    /// The frames that the destination has.
    sent: HashMap<PageNo, Frame>,
    /// The hashes of the frames in the destination's archive that were not compared yet.
    archived: HashMap<PageNo, u128>,
    /// The version of this round; `None` if the partition is empty.
    manifest: Option<Manifest>,
    /// The frames that are still to be sent in this round, last one first.
    waiting: Vec<(PageNo, Frame)>,
    /// The next batch, which is read while the previous one is sent.
    next_batch: Option<Batch>,
    /// Protects the segments from the collector.
    held: Arc<Vec<SegmentId>>,
    /// A merge would move the frames that were sent. `None` at the end.
    hold: Option<CompactionHold>,
    memory: Option<LongTermReservation>,
}

/// Frames that are being read.
struct Batch {
    pages: Vec<PageNo>,
    frames: JoinHandle<std::result::Result<Vec<RawFrame>, StoreError>>,
}

impl Maintenance {
    /// Begins to copy a partition of this node.
    pub fn copy_out(self: &Arc<Self>, partition: PartitionId) -> OutgoingCopy {
        OutgoingCopy {
            maintenance: self.clone(),
            partition,
            segments: Segments::default(),
            sent: HashMap::new(),
            archived: HashMap::new(),
            manifest: None,
            waiting: Vec::new(),
            next_batch: None,
            held: Arc::default(),
            hold: Some(self.scheduler.hold_compaction(partition, CopyDirection::Out)),
            memory: None,
        }
    }
}

impl Drop for OutgoingCopy {
    fn drop(&mut self) {
        self.hold = None;
        // The partition stays here if the copy has failed, and a merge may have become due.
        if let Some(partition) = self.maintenance.partitions.open_one(self.partition) {
            self.maintenance.scheduler.flushed(&partition);
        }
    }
}

impl OutgoingCopy {
    /// The destination has these frames, a list made by [`super::Archive::next`].
    pub fn add_archived(&mut self, list: &[u8]) -> Result<()> {
        archive::read_hashes(list, &mut self.archived)
    }

    /// Flushes the partition and begins a round with its newest version.
    pub async fn begin_round(&mut self) -> Result<RoundSize> {
        let maintenance = self.maintenance.clone();
        let (past, manifest) = maintenance.manifest_of(self.partition, None).await?;
        let size = self.read_version(manifest).await?;
        drop(past);
        Ok(size)
    }

    /// Begins the last round. The partition was released: its newest manifest contains everything.
    /// `epoch` is that of its timeline.
    pub async fn begin_last_round(&mut self, epoch: u32) -> Result<RoundSize> {
        let maintenance = self.maintenance.clone();
        let past = maintenance.node().old_manifests.read().await;
        let newest = maintenance.node().store.latest_manifest(self.partition, epoch, None).await;
        let size = self.read_version(newest.map_err(store_error)?).await?;
        drop(past);
        Ok(size)
    }

    async fn read_version(&mut self, manifest: Option<Manifest>) -> Result<RoundSize> {
        let node = self.maintenance.node();
        let mut frames = HashMap::new();
        if let Some(manifest) = &manifest {
            self.memory = None;
            let bytes = u64::from(manifest.page_count) * INDEX_ENTRY_BYTES;
            self.memory = Some(node.room(bytes).await?.into_long_term());
            (frames, _) = read_frames(node, &self.segments, manifest).await?;
        }
        self.held = Arc::new(self.segments.all());
        node.exported.lock().push(Arc::downgrade(&self.held));
        let is_new = |(page, frame): &(&PageNo, &Frame)| self.sent.get(*page) != Some(*frame);
        self.waiting = frames.iter().filter(is_new).map(|(page, frame)| (*page, *frame)).collect();
        // Sent in the order in which they are stored.
        self.waiting.sort_unstable_by_key(|(_, frame)| (frame.segment, frame.location.offset));
        let bytes = self.waiting.iter().map(|(_, frame)| u64::from(frame.location.length)).sum();
        self.waiting.reverse();
        self.next_batch = None;
        (self.sent, self.manifest) = (frames, manifest);
        Ok(RoundSize { pages: self.waiting.len() as u64, bytes })
    }

    /// Appends the next frames to `out`. Returns false at the end of the round.
    pub async fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        if self.next_batch.is_none() {
            self.next_batch = self.read_batch()?;
        }
        let Some(batch) = &mut self.next_batch else { return Ok(self.push_unwritten(out)) };
        let read = (&mut batch.frames).await;
        let pages = self.next_batch.take().map(|batch| batch.pages).unwrap_or_default();
        let read = read.map_err(|cause| {
            Error::new(sqlstate::INTERNAL, format!("reading pages to copy failed: {cause}"))
        })?;
        let frames = read.map_err(store_error)?;
        self.next_batch = self.read_batch()?;
        for (page, frame) in pages.into_iter().zip(frames) {
            let archived = self.archived.remove(&page);
            if archived.is_none_or(|archived| archived != archive::hash(&frame.bytes)) {
                batch::push(out, page, &frame.bytes);
            }
        }
        Ok(true)
    }

    /// Begins to read the next frames that are waiting; `None` if there are none.
    fn read_batch(&mut self) -> Result<Option<Batch>> {
        let Some((_, first)) = self.waiting.last().copied() else { return Ok(None) };
        let of_segment = |(_, frame): &&(PageNo, Frame)| frame.segment == first.segment;
        let count = self.waiting.iter().rev().take(BATCH_PAGES).take_while(of_segment).count();
        let run = self.waiting.drain(self.waiting.len() - count..).rev();
        let (pages, locations): (Vec<PageNo>, Vec<FrameLocation>) =
            run.map(|(page, frame)| (page, frame.location)).unzip();
        let segment = self.segments.known(first.segment)?;
        let store = self.maintenance.node().store.clone();
        let frames = tokio::spawn(async move { store.read_frames(segment, &locations).await });
        Ok(Some(Batch { pages, frames }))
    }

    /// Appends empty pages for some of those that the archive has, and that this version has never
    /// written. Returns false if there are no more.
    fn push_unwritten(&mut self, out: &mut Vec<u8>) -> bool {
        let page_count = self.manifest.as_ref().map_or(0, |manifest| manifest.page_count);
        self.archived.retain(|page, _| *page <= page_count);
        let pages: Vec<PageNo> = self.archived.keys().take(BATCH_PAGES).copied().collect();
        let mut writer = FrameWriter::new(&mut Vec::new());
        for page in &pages {
            let mut frame = Vec::new();
            writer.push(&ZERO_PAGE, &mut frame);
            batch::push(out, *page, &frame);
            self.archived.remove(page);
        }
        !pages.is_empty()
    }

    /// The manifest of the round's version; `None` if the partition is empty.
    pub fn manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }
}

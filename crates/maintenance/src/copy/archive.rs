//! Archives: what a node has kept of a partition that it gave away (delta migration, ShuttleDB 3.2).
//!
//! If the partition comes back, the destination sends the hashes of the frames in its archive. The
//! source sends only pages whose frames differ. Frames are copied between stores as they are, so a
//! page that has not changed has the same frame at both nodes.
//!
//! ```text
//!   page (4 bytes) | hash of its frame (16 bytes) | page | hash | ...
//! ```

use std::sync::Arc;

use fulmar_mvcc::{Frame, Segments, read_frames, store_error};
use fulmar_pages::{FrameLocation, Manifest, PageNo, PartitionId, SegmentId};
use fulmar_sqlite::{Error, Result, sqlstate};
use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_128;

use crate::maintenance::Maintenance;

/// Number of frames that are read at once.
const BATCH_PAGES: usize = 256;
const ENTRY_BYTES: usize = 20;

/// The hash of a frame.
pub(super) fn hash(frame: &[u8]) -> u128 {
    xxh3_128(frame)
}

/// What a node has kept of a partition.
pub struct Archive {
    maintenance: Arc<Maintenance>,
    manifest: Manifest,
    segments: Segments,
    /// The frames whose hashes were not listed yet.
    frames: Vec<(PageNo, Frame)>,
    /// Protects the segments from the collector.
    pub(super) held: Arc<Vec<SegmentId>>,
}

/// An archive, for the budget of all archives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchiveSize {
    /// The partition.
    pub partition: PartitionId,
    /// When its newest version was committed, as a hybrid timestamp.
    pub timestamp: u64,
    /// The size of its pages. Segments may contain more, and pages are compressed.
    pub bytes: u64,
}

impl Maintenance {
    /// The archive of a partition that this node does not own; `None` if it has kept nothing. `epoch`
    /// is that of its timeline.
    pub async fn archive(self: &Arc<Self>, partition: PartitionId, epoch: u32) -> Result<Option<Archive>> {
        let node = self.node();
        let past = node.old_manifests.read().await;
        let newest = node.store.latest_manifest(partition, epoch, None).await.map_err(store_error)?;
        let Some(manifest) = newest.filter(|newest| self.is_whole(newest)) else { return Ok(None) };
        let segments = Segments::default();
        let (frames, _) = read_frames(node, &segments, &manifest).await?;
        let mut frames: Vec<(PageNo, Frame)> = frames.into_iter().collect();
        frames.sort_unstable_by_key(|(_, frame)| (frame.segment, frame.location.offset));
        frames.reverse();
        let held = Arc::new(segments.all());
        node.exported.lock().push(Arc::downgrade(&held));
        drop(past);
        Ok(Some(Archive { maintenance: self.clone(), manifest, segments, frames, held }))
    }

    /// Returns false for what is left of an on-demand migration that was undone: it names segments of the
    /// other node.
    fn is_whole(&self, manifest: &Manifest) -> bool {
        manifest.segments.iter().all(|segment| self.node().store.has_own_segment(segment.id))
    }

    /// The size of the archive of a partition; `None` if this node has kept nothing.
    pub async fn archive_size(&self, partition: PartitionId, epoch: u32) -> Result<Option<ArchiveSize>> {
        let store = &self.node().store;
        let newest = store.latest_manifest(partition, epoch, None).await.map_err(store_error)?;
        let Some(newest) = newest.filter(|newest| self.is_whole(newest)) else { return Ok(None) };
        let bytes = u64::from(newest.page_count) * fulmar_pages::PAGE_SIZE as u64;
        Ok(Some(ArchiveSize { partition, timestamp: newest.timestamp, bytes }))
    }
}

impl Archive {
    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Appends hashes of the next frames to `out`. Returns false at the end.
    pub async fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        let Some((_, first)) = self.frames.last().copied() else { return Ok(false) };
        let of_segment = |(_, frame): &&(PageNo, Frame)| frame.segment == first.segment;
        let count = self.frames.iter().rev().take(BATCH_PAGES).take_while(of_segment).count();
        let run = self.frames.split_off(self.frames.len() - count);
        let locations: Vec<FrameLocation> = run.iter().map(|(_, frame)| frame.location).collect();
        let segment = self.segments.known(first.segment)?;
        let read = self.maintenance.node().store.read_frames(segment, &locations).await;
        for ((page, _), frame) in run.iter().zip(read.map_err(store_error)?) {
            out.extend_from_slice(&page.to_le_bytes());
            out.extend_from_slice(&hash(&frame.bytes).to_le_bytes());
        }
        Ok(true)
    }
}

/// Adds the hashes of a list made by [`Archive::next`].
pub(super) fn read_hashes(list: &[u8], hashes: &mut HashMap<PageNo, u128>) -> Result<()> {
    let (entries, rest) = list.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        return Err(Error::new(sqlstate::DATA_CORRUPTED, "received a damaged list of archived pages"));
    }
    for entry in entries {
        let (page, hash) = entry.split_at(4);
        let (Ok(page), Ok(hash)) = (page.try_into(), hash.try_into()) else { continue };
        hashes.insert(PageNo::from_le_bytes(page), u128::from_le_bytes(hash));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_read_back_and_incomplete_lists_are_refused() {
        let mut list = Vec::new();
        for page in 1..=3u32 {
            list.extend_from_slice(&page.to_le_bytes());
            list.extend_from_slice(&hash(&[page as u8]).to_le_bytes());
        }
        let mut hashes = HashMap::new();
        read_hashes(&list, &mut hashes).unwrap();
        assert_eq!(hashes, HashMap::from_iter((1..=3u32).map(|page| (page, hash(&[page as u8])))));
        assert!(read_hashes(&list[1..], &mut hashes).is_err());
    }
}

//! Verifies the checksums of a segment: header, all frames, index and footer.

use fulmar_pages::{FrameLocation, SegmentId, segment};

use super::{PageStore, StoreError, segment_object};
use crate::disk_cache::ReadHint;
use crate::store::Span;

/// Maximum number of frames per read.
const MAX_RUN_FRAMES: usize = 256;

impl PageStore {
    /// Reads a whole segment. Returns its number of pages, or the first damage.
    pub async fn verify_segment(&self, id: SegmentId) -> Result<u64, StoreError> {
        let object = segment_object(id);
        let header =
            self.get(&object, Span::Range { offset: 0, bytes: segment::HEADER_BYTES as u64 }).await?;
        segment::check_header(&header.bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        // Bypasses the cached index and the disk cache, because the data in the store is to be
        // verified.
        let (index, _) = self.read_index(id).await?;
        let mut frames: Vec<FrameLocation> = index
            .partitions()
            .flat_map(|partition| index.frames(partition))
            .map(|(_, location)| location)
            .collect();
        frames.sort_unstable_by_key(|location| location.offset);
        let mut pages = Vec::new();
        let adjacent = |a: &FrameLocation, b: &FrameLocation| a.offset + u64::from(a.length) == b.offset;
        for run in frames.chunk_by(adjacent).flat_map(|run| run.chunks(MAX_RUN_FRAMES)) {
            pages.clear();
            self.read_remaining(id, run, vec![None; run.len()], ReadHint::Scan, &mut pages).await?;
        }
        Ok(frames.len() as u64)
    }
}

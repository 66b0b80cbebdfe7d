//! Checks a segment against its checksums: header, every frame, index and footer.

use fulmar_pages::{FrameLocation, SegmentId, segment};
use object_store::GetRange;

use super::{PageStore, StoreError, damaged, segment_path};

/// Frames that are read at once.
const RUN_FRAMES: usize = 256;

impl PageStore {
    /// Reads all of a segment. Answers how many pages it holds, or the first damage that it meets.
    pub async fn verify_segment(&self, id: SegmentId) -> Result<u64, StoreError> {
        let path = segment_path(id);
        let header = self.read(&path, GetRange::Bounded(0..segment::HEADER_BYTES as u64)).await?;
        segment::check_header(&header).map_err(|cause| damaged(&path, cause))?;
        let index = self.segment_index(id).await?;
        let mut frames: Vec<FrameLocation> = index
            .partitions()
            .flat_map(|partition| index.frames(partition))
            .map(|(_, location)| location)
            .collect();
        frames.sort_unstable_by_key(|location| location.offset);
        let mut pages = Vec::new();
        let adjacent = |a: &FrameLocation, b: &FrameLocation| a.offset + u64::from(a.length) == b.offset;
        for run in frames.chunk_by(adjacent).flat_map(|run| run.chunks(RUN_FRAMES)) {
            pages.clear();
            self.read_pages(id, run, &mut pages).await?;
        }
        Ok(frames.len() as u64)
    }
}

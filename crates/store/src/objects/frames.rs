//! Reads frames of a segment as they are, for who writes them into another one.

use bytes::Bytes;
use fulmar_pages::{FrameLocation, SegmentId, segment};

use super::{PageStore, StoreError, segment_object};
use crate::store::Span;

/// What lies between two frames is read along if it is not more than this: it costs less than a request.
const GAP_BYTES: u64 = 64 << 10;

/// A frame as it lies in its segment.
pub type RawFrame = Bytes;

impl PageStore {
    /// Frames of a segment, in the order of their locations, each checked against its checksum. Those that lie close together
    /// are one ranged read.
    pub async fn read_frames(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
    ) -> Result<Vec<RawFrame>, StoreError> {
        let object = segment_object(id);
        let end = |at: usize| locations[at].offset.saturating_add(locations[at].length.into());
        let mut order: Vec<usize> = (0..locations.len()).collect();
        order.sort_unstable_by_key(|at| locations[*at].offset);
        let mut frames = vec![RawFrame::new(); locations.len()];
        let close = |a: &usize, b: &usize| locations[*b].offset.saturating_sub(end(*a)) <= GAP_BYTES;
        for run in order.chunk_by(close) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let offset = locations[*first].offset;
            let span = Span::Range { offset, bytes: end(*last).saturating_sub(offset) };
            let read = self.get(&object, span).await?.bytes;
            for at in run {
                let start = locations[*at].offset.saturating_sub(offset) as usize;
                let range = start.min(read.len())
                    ..start.saturating_add(locations[*at].length as usize).min(read.len());
                let frame = read.slice(range);
                segment::check_frame(&frame)
                    .map_err(|cause| self.damaged_at(&object, locations[*at].offset, cause))?;
                frames[*at] = frame;
            }
        }
        Ok(frames)
    }
}

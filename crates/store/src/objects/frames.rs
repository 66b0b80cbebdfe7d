//! Reads encoded frames of a segment, to be copied into another one.

use bytes::Bytes;
use fulmar_pages::{FrameLocation, SegmentId, segment};

use super::{PageStore, StoreError, frame_within, segment_object};
use crate::disk_cache::ReadHint;
use crate::store::Span;

/// Gaps between frames up to this size are read too: that costs less than another request.
const GAP_BYTES: u64 = 64 << 10;

/// An encoded frame of a segment.
#[derive(Clone, Default, Debug)]
pub struct RawFrame {
    /// Its bytes.
    pub bytes: Bytes,
    /// The frame is in the disk cache, so it was used recently.
    pub is_cached: bool,
}

impl PageStore {
    /// Reads frames of a segment in the order of `locations`, and verifies their checksums. Frames
    /// that are not in the disk cache and are close to each other are read with one ranged read.
    pub async fn read_frames(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
    ) -> Result<Vec<RawFrame>, StoreError> {
        let object = segment_object(id);
        let end = |at: usize| locations[at].offset.saturating_add(locations[at].length.into());
        let cached = self.cached_frames(id, locations, ReadHint::Scan).await.into_iter();
        let cached = cached.map(|frame| frame.filter(|frame| segment::check_frame(frame).is_ok()));
        let raw =
            |frame: Option<Bytes>| RawFrame { is_cached: frame.is_some(), bytes: frame.unwrap_or_default() };
        let mut frames: Vec<RawFrame> = cached.map(raw).collect();
        let mut order: Vec<usize> = (0..locations.len()).filter(|at| !frames[*at].is_cached).collect();
        order.sort_unstable_by_key(|at| locations[*at].offset);
        let close = |a: &usize, b: &usize| locations[*b].offset.saturating_sub(end(*a)) <= GAP_BYTES;
        for run in order.chunk_by(close) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let offset = locations[*first].offset;
            let span = Span::Range { offset, bytes: end(*last).saturating_sub(offset) };
            let read = self.get(&object, span).await?.bytes;
            for at in run {
                let frame = frame_within(&read, offset, locations[*at]);
                segment::check_frame(&frame)
                    .map_err(|cause| self.damaged_at(&object, locations[*at].offset, cause))?;
                frames[*at].bytes = frame;
            }
        }
        Ok(frames)
    }
}

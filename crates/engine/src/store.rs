//! What the engine keeps of the store's names: frames without their 128-bit segment ids.

use fulmar_pages::SegmentId;
use fulmar_pages::segment::FrameLocation;
use parking_lot::RwLock;

use crate::{Error, Result, sqlstate};

/// Where the bytes of a page lie in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Index into the partition's [`Segments`].
    pub segment: u32,
    pub location: FrameLocation,
}

/// The segments that a partition's frames point into. Only grows while the partition is open.
#[derive(Default)]
pub(crate) struct Segments(RwLock<Vec<SegmentId>>);

impl Segments {
    /// The index of a segment, added if it is new.
    pub(crate) fn index_of(&self, id: SegmentId) -> u32 {
        let mut segments = self.0.write();
        let at = segments.iter().rposition(|known| *known == id).unwrap_or_else(|| {
            segments.push(id);
            segments.len() - 1
        });
        at as u32
    }

    pub(crate) fn all(&self) -> Vec<SegmentId> {
        self.0.read().clone()
    }

    /// The segment of a frame.
    pub(crate) fn known(&self, index: u32) -> Result<SegmentId> {
        let known = self.0.read().get(index as usize).copied();
        known.ok_or_else(|| Error::new(sqlstate::INTERNAL, "a frame of an unknown segment"))
    }
}

//! Frames in the store, addressed without their 128-bit segment ids.

use std::sync::atomic::{AtomicU32, Ordering};

use fulmar_pages::SegmentId;
use fulmar_pages::segment::FrameLocation;
use fulmar_sqlite::{Error, Result, sqlstate};
use parking_lot::RwLock;

/// Location of a page's bytes in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Index into the partition's [`Segments`].
    pub segment: u32,
    /// Where it is in the segment.
    pub location: FrameLocation,
}

/// The segments that a partition's frames point into. Indexes stay valid while the partition is
/// open.
#[derive(Default)]
pub struct Segments(RwLock<Vec<SegmentUse>>);

struct SegmentUse {
    id: SegmentId,
    /// Number of page versions with frames in this segment.
    versions: AtomicU32,
}

impl Segments {
    /// Returns the index of a segment, which is added if it is new.
    pub(crate) fn index_of(&self, id: SegmentId) -> u32 {
        let mut segments = self.0.write();
        let at = segments.iter().rposition(|known| known.id == id).unwrap_or_else(|| {
            segments.push(SegmentUse { id, versions: AtomicU32::new(0) });
            segments.len() - 1
        });
        at as u32
    }

    /// All segments.
    pub fn all(&self) -> Vec<SegmentId> {
        self.0.read().iter().map(|known| known.id).collect()
    }

    /// The segments that contain at least one version's frame.
    pub(crate) fn in_use(&self) -> Vec<SegmentId> {
        let segments = self.0.read();
        segments
            .iter()
            .filter(|known| known.versions.load(Ordering::Relaxed) > 0)
            .map(|known| known.id)
            .collect()
    }

    /// Counts one more version with a frame in this segment.
    pub fn acquire(&self, index: u32) {
        if let Some(known) = self.0.read().get(index as usize) {
            known.versions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts one version less.
    pub fn release(&self, index: u32) {
        if let Some(known) = self.0.read().get(index as usize) {
            known.versions.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the id of a segment.
    pub fn known(&self, index: u32) -> Result<SegmentId> {
        let known = self.0.read().get(index as usize).map(|known| known.id);
        known.ok_or_else(|| Error::new(sqlstate::INTERNAL, "frame in unknown segment"))
    }
}

//! What the engine keeps of the store's names: frames without their 128-bit segment ids.

use std::sync::atomic::{AtomicU32, Ordering};

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

/// The segments that a partition's frames point into. Indexes stay good while the partition is open.
#[derive(Default)]
pub(crate) struct Segments(RwLock<Vec<Known>>);

struct Known {
    id: SegmentId,
    /// Versions of pages whose frames lie in it.
    versions: AtomicU32,
}

impl Segments {
    /// The index of a segment, added if it is new.
    pub(crate) fn index_of(&self, id: SegmentId) -> u32 {
        let mut segments = self.0.write();
        let at = segments.iter().rposition(|known| known.id == id).unwrap_or_else(|| {
            segments.push(Known { id, versions: AtomicU32::new(0) });
            segments.len() - 1
        });
        at as u32
    }

    pub(crate) fn all(&self) -> Vec<SegmentId> {
        self.0.read().iter().map(|known| known.id).collect()
    }

    /// Those that a version's frame lies in.
    pub(crate) fn in_use(&self) -> Vec<SegmentId> {
        let segments = self.0.read();
        segments
            .iter()
            .filter(|known| known.versions.load(Ordering::Relaxed) > 0)
            .map(|known| known.id)
            .collect()
    }

    /// A version's frame lies in this segment from now on.
    pub(crate) fn acquire(&self, index: u32) {
        if let Some(known) = self.0.read().get(index as usize) {
            known.versions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// ... or no longer.
    pub(crate) fn release(&self, index: u32) {
        if let Some(known) = self.0.read().get(index as usize) {
            known.versions.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The segment of a frame.
    pub(crate) fn known(&self, index: u32) -> Result<SegmentId> {
        let known = self.0.read().get(index as usize).map(|known| known.id);
        known.ok_or_else(|| Error::new(sqlstate::INTERNAL, "a frame of an unknown segment"))
    }
}

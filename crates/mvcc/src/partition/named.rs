//! The content of a partition's newest manifest.

use fulmar_pages::manifest::{Manifest, SegmentRef};

/// A segment named by the newest manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedSegment {
    /// The segment.
    pub segment: SegmentRef,
    /// The partition's pages in it, live or obsolete.
    pub pages: u64,
}

/// The content of the newest manifest.
#[derive(Default)]
pub(super) struct Named {
    /// Oldest first.
    pub segments: Vec<NamedSegment>,
    pub number: u64,
    /// Its number when the partition was opened.
    pub opened_number: u64,
    pub page_count: u32,
    /// A newer manifest that is being stored, or whose put has an unknown outcome.
    pub uncertain: Option<(Manifest, Vec<u64>)>,
}

impl Named {
    /// `pages` are the partition's pages in each of the segments.
    pub fn new(manifest: Option<&Manifest>, pages: &[u64]) -> Self {
        let Some(manifest) = manifest else { return Named::default() };
        let segments = manifest.segments.iter().zip(pages);
        Named {
            segments: segments
                .map(|(segment, pages)| NamedSegment { segment: *segment, pages: *pages })
                .collect(),
            number: manifest.version.number,
            opened_number: manifest.version.number,
            page_count: manifest.page_count,
            uncertain: None,
        }
    }
}

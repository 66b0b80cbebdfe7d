//! A database that is built by one transaction and never committed: its pages become a segment that a
//! manifest of another partition object names (a migration that copies rows).
//!
//! ```text
//!   Partition without contents, read-only log
//!     -> transaction that drafts: BEGIN, CREATE, INSERT ... COMMIT
//!     -> Draft: its changed pages, in memory and in files
//!     -> segment in the store, and page 1
//! ```
//!
//! Nothing is written to the log, and the partition object keeps its empty version.

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::{Page, PageNo};
use fulmar_sqlite::{Result, spill};

use super::Partition;
use crate::page_memory::PageBytes;
use crate::transaction::Overlay;

/// The pages of a database that a transaction has built.
pub struct Draft {
    pub(crate) overlay: Overlay,
    pub(crate) page_one: PageBytes,
    pub(crate) page_count: u32,
}

impl Draft {
    /// Number of pages.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Page 1, which is not in the segment.
    pub fn page_one(&self) -> (PageNo, &Page) {
        (1, &self.page_one)
    }
}

impl Partition {
    /// Stores all pages of a draft but page 1 as a segment; `None` if there are no others. The caller
    /// protects it from the collector ([`crate::SegmentPublication`]).
    pub async fn store_draft(&self, draft: &mut Draft) -> Result<Option<SegmentRef>> {
        if draft.page_count <= 1 {
            return Ok(None);
        }
        self.node.disk.admit(true)?;
        let made = draft.overlay.make_segment(self.id, draft.page_count).await;
        let made = made.map_err(|cause| spill::error(&cause))?;
        let segment = self.store_segment(made.file.clone(), made.bytes).await?;
        Ok(Some(SegmentRef { id: segment, partition: self.id }))
    }
}

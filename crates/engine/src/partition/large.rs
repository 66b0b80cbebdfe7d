//! Large commits: pages that are too many for memory and log go into a segment first.
//!
//! ```text
//!  overlay (a temporary file) -> segment (synced) -> commit record that names it -> versions without bytes in memory
//! ```
//!
//! The segment is written before the commit lock is taken, page by page; the record then holds page 1 and the
//! segment's name. The new versions are absent ones, read from the segment when they are touched. If the commit
//! conflicts the segment is garbage, and collected like any other; until the commit is installed the node's naming
//! lock keeps the collector away.

use std::sync::Arc;

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::{SegmentBuilder, SegmentIndex};
use fulmar_pages::{PageNo, SegmentId};
use fulmar_store::SegmentWriter;
use tokio::sync::OwnedRwLockReadGuard;

use super::{Partition, store_error};
use crate::store::Frame;
use crate::transaction::Overlay;
use crate::{Error, Result, sqlstate};

/// Changed pages (of 4 KiB) above which a commit is written as a segment.
pub(crate) const LARGE_PAGES: usize = 2048;

/// Bytes collected before they are handed to the store.
const PIECE_BYTES: usize = 1 << 20;

/// A large commit's pages, in the store.
pub(crate) struct Large {
    pub segment: SegmentId,
    index: Arc<SegmentIndex>,
    _naming: OwnedRwLockReadGuard<()>,
}

/// The segment of a large commit, until a manifest names it.
pub(crate) struct LargeSegment {
    /// The commit's.
    pub number: u64,
    pub segment: SegmentRef,
    pub pages: u64,
}

impl Large {
    /// For the next manifest.
    pub(super) fn named(&self, partition: &Partition, number: u64) -> LargeSegment {
        let segment = SegmentRef { id: self.segment, partition: partition.id };
        LargeSegment { number, segment, pages: self.index.pages() as u64 }
    }

    /// The pages, each with where it lies.
    pub(super) fn frames(&self, partition: &Partition) -> Vec<(PageNo, Frame)> {
        let segment = partition.segments.index_of(self.segment);
        self.index.frames(partition.id).map(|(no, location)| (no, Frame { segment, location })).collect()
    }
}

impl Partition {
    /// Writes a transaction's changed pages, but for page 1, into a segment. The overlay is emptied.
    pub(crate) async fn write_large(&self, overlay: &mut Overlay, page_count: u32) -> Result<Large> {
        self.node.disk.admit(true)?;
        let naming = self.node.naming.clone().read_owned().await;
        let mut writer = self.node.store.segment_writer().await.map_err(store_error)?;
        let mut builder = SegmentBuilder::new(writer.buffer());
        match self.stream(overlay, page_count, &mut builder, &mut writer).await {
            Ok(()) => builder.finish(writer.buffer()),
            Err(error) => {
                let _ = writer.abort().await;
                return Err(error);
            }
        }
        let segment = writer.finish().await.map_err(store_error)?;
        let index = self.node.store.segment_index(segment).await.map_err(store_error)?;
        Ok(Large { segment, index, _naming: naming })
    }

    async fn stream(
        &self,
        overlay: &mut Overlay,
        page_count: u32,
        builder: &mut SegmentBuilder,
        writer: &mut SegmentWriter,
    ) -> Result<()> {
        for changed in overlay.drain() {
            let (no, data) = changed.map_err(|e| {
                Error::new(
                    sqlstate::IO_ERROR,
                    format!("reading back a transaction's spilled pages failed: {e}"),
                )
                .hint("check the disk that holds the data directory's tmp folder")
            })?;
            if no != 1 && no <= page_count {
                builder.push(self.id, no, &data, writer.buffer());
            }
            if writer.buffer().len() > PIECE_BYTES {
                writer.flush().await.map_err(store_error)?;
            }
        }
        Ok(())
    }
}

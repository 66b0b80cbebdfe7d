//! Large commits: pages that are too many for memory and log go into a segment first.
//!
//! ```text
//!  overlay (most of it in a draft of the segment) -> segment (synced, then named) -> commit record that names it
//!     -> versions without bytes in memory
//! ```
//!
//! The segment is made before the commit lock is taken; the record then holds page 1 and the segment's name. The new
//! versions are absent ones, read from the segment when they are touched.
//!
//! # Crashes
//! Until it is named the segment is a file without a name, which goes with the process. It is synced before it is named
//! (or uploaded whole), and named durably before the record that names it is appended: a record that survives has its
//! segment. Who dies between the two leaves a segment that nothing names, garbage that is collected like any other; so
//! does a commit that conflicts. Until the commit is installed the collector waits ([`crate::node::Naming`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::SegmentIndex;
use fulmar_pages::{PageNo, SegmentId};
use fulmar_store::{SegmentWriter, failpoint};

use super::{Partition, store_error, store_error_of};
use crate::node::Unnamed;
use crate::store::Frame;
use crate::transaction::Overlay;
use crate::{Error, Result, spill, sqlstate};

/// Changed pages (of 4 KiB) above which a commit is written as a segment.
const LARGE_PAGES: usize = 2048;

/// Bytes that are handed to the store at once.
const PIECE_BYTES: u64 = 1 << 20;

/// A large commit's pages, in the store.
pub(crate) struct Large {
    pub segment: SegmentId,
    index: Arc<SegmentIndex>,
    _unnamed: Unnamed,
}

/// The segment of a large commit, until a manifest names it, as it is: whoever has found the commit in the log need not read its pages
/// to cut the log behind it.
#[derive(Clone)]
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
        let segment = partition.pages.segments().index_of(self.segment);
        self.index.frames(partition.id).map(|(no, location)| (no, Frame { segment, location })).collect()
    }
}

impl Partition {
    /// What a transaction that has spilled does before it commits: its changed pages, but for page 1, become a segment, and
    /// the overlay is emptied; or they are few, and come back into memory if the connection may hold them (`charge`).
    pub(crate) async fn write_if_large(
        &self,
        overlay: &mut Overlay,
        page_count: u32,
        charge: impl Fn(u64) -> bool,
    ) -> Result<Option<Large>> {
        if overlay.len() <= LARGE_PAGES && overlay.charge_spilled(charge) {
            overlay.bring_back().await.map_err(|cause| spill::error(&cause))?;
            return Ok(None);
        }
        self.node.disk.admit(true)?;
        let made = overlay.make_segment(self.id, page_count).await.map_err(|cause| spill::error(&cause))?;
        let unnamed = self.node.naming.enter();
        let segment = self.store_segment(made.file.clone(), made.bytes).await?;
        drop(made);
        failpoint::hit(failpoint::COMMIT_AFTER_SEGMENT);
        let index =
            self.node.store.segment_index(segment).await.map_err(|error| store_error_of(self.id, error))?;
        Ok(Some(Large { segment, index, _unnamed: unnamed }))
    }

    async fn store_segment(&self, file: Arc<File>, bytes: u64) -> Result<SegmentId> {
        let (store, unnamed) = (self.node.store.clone(), file.clone());
        let adopting = self.node.spill.runtime().spawn_blocking(move || store.adopt_segment(&unnamed));
        let adopted = adopting
            .await
            .map_err(|cause| Error::new(sqlstate::INTERNAL, format!("storing a segment failed: {cause}")))?;
        match adopted.map_err(store_error)? {
            Some(segment) => Ok(segment),
            None => self.upload(file, bytes).await,
        }
    }

    /// Copies a file that holds a segment into the store.
    async fn upload(&self, file: Arc<File>, bytes: u64) -> Result<SegmentId> {
        let mut writer = self.node.store.segment_writer().await.map_err(store_error)?;
        self.send(file, bytes, &mut writer).await?;
        writer.finish().await.map_err(store_error)
    }

    /// Reads the file on another thread, a piece ahead of what is sent: it was written past the page cache.
    async fn send(&self, file: Arc<File>, bytes: u64, writer: &mut SegmentWriter) -> Result<()> {
        let read = |offset: u64| {
            let file = file.clone();
            let count = bytes.saturating_sub(offset).min(PIECE_BYTES) as usize;
            self.node.spill.runtime().spawn_blocking(move || {
                let mut piece = vec![0; count];
                file.read_exact_at(&mut piece, offset).map(|()| piece)
            })
        };
        let (mut sent, mut next) = (0, read(0));
        while sent < bytes {
            let piece = next.await.map_err(io::Error::other).flatten();
            let piece = piece.map_err(|cause| spill::error(&cause))?;
            sent += piece.len() as u64;
            next = read(sent);
            writer.buffer().extend_from_slice(&piece);
            writer.flush().await.map_err(store_error)?;
        }
        Ok(())
    }
}

//! Large commits: pages that exceed memory and log are written to a segment first.
//!
//! ```text
//!  overlay (most of it in a draft of the segment)
//!    -> segment (synced, then named)
//!    -> commit record with the name of the segment
//!    -> versions without bytes in memory
//! ```
//!
//! The segment is written before the commit lock is taken. The record then holds page 1 and the
//! segment's name. The new versions are absent; their pages are read from the segment on access.
//!
//! # Crashes
//! - Until it is named, the segment is an unnamed file that disappears with the process.
//! - It is synced before it is named (or uploaded whole), and durably named before the record is
//!   appended. So a record that survives has its segment.
//! - A crash between naming and appending leaves a segment that nothing names. The garbage
//!   collector deletes it, like that of a commit that conflicts.
//! - Until the commit is installed the collector waits ([`crate::node::SegmentPublication`]).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fulmar_pages::manifest::SegmentRef;
use fulmar_pages::segment::SegmentIndex;
use fulmar_pages::{PageNo, SegmentId};
use fulmar_sqlite::{Error, Result, spill, sqlstate};
use fulmar_store::{SegmentWriter, failpoint};

use super::Partition;
use super::commits::LargeSegment;
use crate::error::{store_error, store_error_of};
use crate::node::PublicationGuard;
use crate::store::Frame;
use crate::transaction::Overlay;

/// Changed pages (4 KiB each) above which a commit is written as a segment.
const LARGE_COMMIT_PAGES: usize = 2048;

/// Bytes passed to the store per write.
const UPLOAD_CHUNK_BYTES: u64 = 1 << 20;

/// The pages of a large commit, in the store.
pub(crate) struct LargeCommit {
    pub segment: SegmentId,
    index: Arc<SegmentIndex>,
    _publication: PublicationGuard,
}

impl LargeCommit {
    /// The entry for the next manifest.
    pub(super) fn manifest_entry(&self, partition: &Partition, number: u64) -> LargeSegment {
        let segment = SegmentRef { id: self.segment, partition: partition.id };
        LargeSegment { number, segment, pages: self.index.pages() as u64 }
    }

    /// The pages and their positions.
    pub(super) fn frames(&self, partition: &Partition) -> Vec<(PageNo, Frame)> {
        let segment = partition.pages.segments().index_of(self.segment);
        self.index.frames(partition.id).map(|(no, location)| (no, Frame { segment, location })).collect()
    }
}

impl Partition {
    /// Prepares the commit of a transaction that has spilled. If it is large, its changed pages
    /// except page 1 become a segment, and the overlay is emptied. If its pages are few, and the
    /// connection's memory limit allows it (`charge`), they are read back into memory.
    pub(crate) async fn write_if_large(
        &self,
        overlay: &mut Overlay,
        page_count: u32,
        charge: impl Fn(u64) -> bool,
    ) -> Result<Option<LargeCommit>> {
        if overlay.len() <= LARGE_COMMIT_PAGES && overlay.charge_spilled(charge) {
            overlay.bring_back().await.map_err(|cause| spill::error(&cause))?;
            return Ok(None);
        }
        self.node.disk.admit(true)?;
        let made = overlay.make_segment(self.id, page_count).await.map_err(|cause| spill::error(&cause))?;
        let publication = self.node.publication.enter();
        let segment = self.store_segment(made.file.clone(), made.bytes).await?;
        drop(made);
        failpoint::hit(failpoint::COMMIT_AFTER_SEGMENT);
        let index =
            self.node.store.segment_index(segment).await.map_err(|error| store_error_of(self.id, error))?;
        Ok(Some(LargeCommit { segment, index, _publication: publication }))
    }

    pub(super) async fn store_segment(&self, file: Arc<File>, bytes: u64) -> Result<SegmentId> {
        let (store, publication) = (self.node.store.clone(), file.clone());
        let adopting = self.node.spill.runtime().spawn_blocking(move || store.adopt_segment(&publication));
        let adopted = adopting
            .await
            .map_err(|cause| Error::new(sqlstate::INTERNAL, format!("storing a segment failed: {cause}")))?;
        match adopted.map_err(store_error)? {
            Some(segment) => Ok(segment),
            None => self.upload(file, bytes).await,
        }
    }

    /// Copies a file that contains a segment into the store.
    async fn upload(&self, file: Arc<File>, bytes: u64) -> Result<SegmentId> {
        let mut writer = self.node.store.segment_writer().await.map_err(store_error)?;
        self.send(file, bytes, &mut writer).await?;
        writer.finish().await.map_err(store_error)
    }

    /// Reads the file on another thread, one chunk ahead of the upload: the file was written with
    /// direct I/O and is not in the operating system's page cache.
    async fn send(&self, file: Arc<File>, bytes: u64, writer: &mut SegmentWriter) -> Result<()> {
        let read = |offset: u64| {
            let file = file.clone();
            let count = bytes.saturating_sub(offset).min(UPLOAD_CHUNK_BYTES) as usize;
            self.node.spill.runtime().spawn_blocking(move || {
                let mut chunk = vec![0; count];
                file.read_exact_at(&mut chunk, offset).map(|()| chunk)
            })
        };
        let (mut sent, mut next) = (0, read(0));
        while sent < bytes {
            let chunk = next.await.map_err(io::Error::other).flatten();
            let chunk = chunk.map_err(|cause| spill::error(&cause))?;
            sent += chunk.len() as u64;
            next = read(sent);
            writer.buffer().extend_from_slice(&chunk);
            writer.flush().await.map_err(store_error)?;
        }
        Ok(())
    }
}

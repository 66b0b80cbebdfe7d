//! Export of a partition as a plain SQLite file.
//!
//! A partition consists of the pages of an SQLite database, so an export is the pages of one
//! version, in order. Like a branch, it flushes the partition first, and then reads the segments
//! that the newest manifest references.
//!
//! ```text
//! flush -> manifest -> segments, protected from collection -> page 1, page 2, ... to the client
//! ```
//!
//! An export pins no snapshot and blocks no other work, however slowly its client reads. It holds
//! only the index in memory (32 bytes per page, charged to the node's memory), and brings no page
//! into the cache.

use std::sync::Arc;

use fulmar_pages::{PAGE_SIZE, PageNo, PartitionId, SegmentId};
use fulmar_sqlite::Result;
use fulmar_store::ReadHint;

use crate::maintenance::Maintenance;
use fulmar_mvcc::{Frame, LongTermReservation, Node, Segments, read_frames, store_error};

/// Memory per page of the index.
const INDEX_ENTRY_BYTES: u64 = size_of::<(PageNo, Frame)>() as u64;
/// Maximum number of pages per read.
const RUN_PAGES: usize = 64;

/// The pages of a version, to be read in order.
pub struct Export {
    node: Arc<Node>,
    segments: Segments,
    /// The frames of the pages, sorted by page. Pages that were never written have none.
    frames: Vec<(PageNo, Frame)>,
    page_count: u32,
    /// The next page, and the index of its frame if it has one.
    next: PageNo,
    at: usize,
    /// The charge for `frames`.
    _memory: LongTermReservation,
    /// Protects the segments from the collector.
    _held: Arc<Vec<SegmentId>>,
}

impl Maintenance {
    /// Begins to read a partition as it is now, with exactly the commits acknowledged so far, or as
    /// it was at a time (milliseconds since 1970).
    pub async fn export(&self, id: PartitionId, at_unix_ms: Option<u64>) -> Result<Export> {
        let (past, manifest) = self.manifest_of(id, at_unix_ms).await?;
        let page_count = manifest.as_ref().map_or(0, |manifest| manifest.page_count);
        // Reserved before the index is read. A client that reads slowly holds it for any length of
        // time.
        let memory = self.node().room(u64::from(page_count) * INDEX_ENTRY_BYTES).await?.into_long_term();
        let segments = Segments::default();
        let mut frames = Vec::new();
        if let Some(manifest) = &manifest {
            let (found, _) = read_frames(self.node(), &segments, manifest).await?;
            frames = found.into_iter().collect();
            frames.sort_unstable_by_key(|(no, _)| *no);
        }
        let held = Arc::new(segments.all());
        self.node().exported.lock().push(Arc::downgrade(&held));
        drop(past);
        let node = self.node().clone();
        Ok(Export { node, segments, frames, page_count, next: 1, at: 0, _memory: memory, _held: held })
    }
}

impl Export {
    /// Size of the whole file in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.page_count) * PAGE_SIZE as u64
    }

    /// Appends the next pages to `out`, at most 256 KiB. Returns false at the end of the file.
    pub async fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        if self.next > self.page_count {
            return Ok(false);
        }
        let run = self.run();
        match run.first() {
            None => {
                out.resize(out.len() + PAGE_SIZE, 0);
                self.next += 1;
            }
            Some(first) => {
                let locations: Vec<_> = run.iter().map(|frame| frame.location).collect();
                let segment = self.segments.known(first.segment)?;
                self.node
                    .store
                    .read_pages(segment, &locations, ReadHint::Scan, out)
                    .await
                    .map_err(store_error)?;
                self.next += locations.len() as PageNo;
                self.at += locations.len();
            }
        }
        Ok(true)
    }

    /// The contiguous frames from the next page on.
    fn run(&self) -> Vec<Frame> {
        let mut run: Vec<Frame> = Vec::new();
        for (no, frame) in self.frames.iter().skip(self.at).take(RUN_PAGES) {
            let follows = run.last().is_none_or(|last| {
                last.segment == frame.segment
                    && last.location.offset + u64::from(last.location.length) == frame.location.offset
            });
            if *no != self.next + run.len() as PageNo || !follows {
                break;
            }
            run.push(*frame);
        }
        run
    }
}

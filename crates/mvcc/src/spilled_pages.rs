//! Spilled pages of a large transaction.
//!
//! ```text
//! new page -> buffer, 256 KiB -> second thread: compress, append to a draft of the segment
//!                                  -> third thread: write
//! changed again after it was handed over -> a plain file, where it can change any number of times
//! ```
//!
//! A bulk load in key order spills each page once: at the commit the pages are already in the
//! segment ([`crate::segment_draft`]), and the session's thread has copied each of them once. While
//! the second thread is busy, pages go to a second buffer; when that is full too the session waits
//! (its thread serves other sessions meanwhile). The same holds for compressed data while the third
//! thread waits for the disk.
//!
//! The draft contains at most one frame per page, since a page that changes again goes to the plain
//! file. If that happens often, new pages go to the plain file immediately. At the commit the pages
//! of the plain file are added to the draft. If most of the draft's frames are obsolete by then,
//! everything is rewritten.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fulmar_pages::segment::{Entry, FrameLocation};
use fulmar_pages::{PAGE_SIZE, Page, PageNo, PartitionId};
use fulmar_sqlite::spill::{TemporaryFile, refused};
use fulmar_sqlite::{TemporaryCharge, TemporaryFiles};
use tokio::task::JoinHandle;

use crate::segment_draft::{Draft, Piece};

/// New pages that are collected before they are handed over.
const BUFFER_PAGES: usize = 64;
/// Number of pages read back from which on the draft is written through the page cache.
const MAX_DIRECT_READS: usize = 64;
/// Number of replaced pages that never cause new pages to go to the plain file.
const TOLERATED_REPLACED: u32 = 64;
/// Charge of a page in the draft: an incompressible page, its frame header and its index entry.
const DRAFT_PAGE_BYTES: u64 = PAGE_SIZE as u64 + 64;
/// Memory of the buffers between the threads: pages being collected, pages being compressed, pieces
/// being written.
pub(crate) const BUFFERS_BYTES: u64 = 2 * BUFFER_PAGES as u64 * PAGE_SIZE as u64 + (1 << 20);
/// Memory used per spilled page.
pub(crate) const LOCATION_BYTES: u64 = size_of::<FrameLocation>() as u64;

/// Where a page is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageLocation {
    /// In the draft or on the way to it, by index.
    Draft(u32),
    /// In the plain file, by index.
    Plain(u32),
}

/// The state that the second thread works on and returns.
struct Work {
    draft: Draft,
    pages: Vec<Page>,
    locations: Vec<FrameLocation>,
}

/// A draft that has become a segment, in a file that is not synced. It is charged until this is
/// dropped.
pub(crate) struct SpilledSegment {
    pub file: Arc<File>,
    pub bytes: u64,
    _charge: TemporaryCharge,
}

pub(crate) struct SpilledPages {
    files: TemporaryFiles,
    /// The charge of the draft.
    charge: TemporaryCharge,
    /// Pages to be handed over next.
    buffer: Vec<Page>,
    /// Number of pages handed over so far.
    handed_over: u32,
    /// The idle state; None while `job` owns it, and after a failure.
    work: Option<Box<Work>>,
    job: Option<JoinHandle<Box<Work>>>,
    writing: Option<JoinHandle<io::Result<Vec<Piece>>>>,
    /// Locations of the pages in the draft.
    locations: Vec<FrameLocation>,
    /// Number of pages in the draft that have been replaced.
    replaced: u32,
    read_back: usize,
    plain: Option<TemporaryFile>,
    plain_pages: u32,
}

impl SpilledPages {
    pub(crate) fn new(files: &TemporaryFiles) -> io::Result<Self> {
        let draft = Draft::new(files.area.file()?);
        let pages = Vec::with_capacity(BUFFER_PAGES);
        let work = Work { draft, pages, locations: Vec::new() };
        Ok(SpilledPages {
            files: files.clone(),
            charge: TemporaryCharge::new(&files.quota),
            buffer: Vec::with_capacity(BUFFER_PAGES),
            handed_over: 0,
            work: Some(Box::new(work)),
            job: None,
            writing: None,
            locations: Vec::new(),
            replaced: 0,
            read_back: 0,
            plain: None,
            plain_pages: 0,
        })
    }

    /// Adds a page.
    pub(crate) fn push(&mut self, page: &Page) -> io::Result<PageLocation> {
        match self.replaced > TOLERATED_REPLACED + self.handed_over / 8 {
            true => self.push_plain(page),
            false => Ok(PageLocation::Draft(self.push_draft(page)?)),
        }
    }

    /// Replaces a page that has changed again. Returns its new place.
    pub(crate) fn replace(&mut self, location: PageLocation, page: &Page) -> io::Result<PageLocation> {
        match location {
            PageLocation::Plain(index) => {
                self.plain()?.write_all_at(page, plain_offset(index))?;
                Ok(location)
            }
            PageLocation::Draft(index) => match self.buffered_mut(index) {
                Some(buffer) => {
                    *buffer = *page;
                    Ok(location)
                }
                None => {
                    self.replaced += 1;
                    self.push_plain(page)
                }
            },
        }
    }

    pub(crate) async fn read(&mut self, location: PageLocation, page: &mut Page) -> io::Result<()> {
        match location {
            PageLocation::Plain(index) => self.plain()?.file()?.read_exact_at(page, plain_offset(index)),
            PageLocation::Draft(index) => {
                if let Some(buffer) = self.buffered_mut(index) {
                    *page = *buffer;
                    return Ok(());
                }
                self.read_back += 1;
                let cache = self.read_back > MAX_DIRECT_READS;
                self.wait_idle().await?;
                let (Some(work), Some(location)) = (&mut self.work, self.locations.get(index as usize))
                else {
                    return Err(invalidated());
                };
                if cache {
                    work.draft.cache();
                }
                work.draft.read(*location, page)
            }
        }
    }

    /// Whether pages must be handed over before more are added.
    pub(crate) fn is_full(&self) -> bool {
        self.buffer.len() >= BUFFER_PAGES
    }

    /// Hands over the collected pages, after waiting until the previous ones are compressed.
    pub(crate) async fn hand_over(&mut self) -> io::Result<()> {
        self.wait_compressed().await?;
        let mut work = self.work.take().ok_or_else(invalidated)?;
        std::mem::swap(&mut work.pages, &mut self.buffer);
        self.handed_over += work.pages.len() as u32;
        self.job = Some(self.files.area.runtime().spawn_blocking(move || {
            work.run();
            work
        }));
        Ok(())
    }

    /// Number of pages in the draft, including replaced ones.
    pub(crate) fn drafted(&self) -> usize {
        self.handed_over as usize + self.buffer.len()
    }

    #[cfg(test)]
    pub(crate) fn plain_pages(&self) -> u32 {
        self.plain_pages
    }

    /// Adds a page to the draft unconditionally. Returns its index.
    pub(crate) async fn draft(&mut self, page: &Page) -> io::Result<u32> {
        if self.is_full() {
            self.hand_over().await?;
        }
        self.push_draft(page)
    }

    /// Turns the draft into a segment. `frames` maps the partition's pages to indexes in the draft.
    pub(crate) async fn finish(
        mut self,
        partition: PartitionId,
        frames: Vec<(PageNo, u32)>,
    ) -> io::Result<SpilledSegment> {
        self.hand_over().await?;
        self.wait_idle().await?;
        let draft = self.work.take().ok_or_else(invalidated)?.draft;
        let locations = &self.locations;
        let entry = |(no, index)| Some((partition, no, *locations.get(index as usize)?));
        let entries: Option<Vec<Entry>> = frames.into_iter().map(entry).collect();
        let entries = entries.ok_or_else(invalidated)?;
        let finished = self.files.area.runtime().spawn_blocking(move || draft.finish(entries)).await;
        let (file, bytes) = finished.map_err(io::Error::other)??;
        let unused = TemporaryCharge::new(&self.files.quota);
        Ok(SpilledSegment { file, bytes, _charge: std::mem::replace(&mut self.charge, unused) })
    }

    /// Waits until the other threads are idle.
    async fn wait_idle(&mut self) -> io::Result<()> {
        self.wait_compressed().await?;
        self.wait_written().await
    }

    /// Waits until pages are compressed, and starts writing the finished pieces.
    async fn wait_compressed(&mut self) -> io::Result<()> {
        if let Some(job) = &mut self.job {
            let done = job.await;
            self.job = None;
            let work = self.work.insert(done.map_err(io::Error::other)?);
            self.locations.append(&mut work.locations);
        }
        if self.pieces().is_some_and(|pieces| !pieces.is_empty()) {
            self.wait_written().await?;
            let mut pieces = self.pieces().map(std::mem::take).unwrap_or_default();
            self.writing = Some(self.files.area.runtime().spawn_blocking(move || {
                pieces.iter_mut().try_for_each(Piece::write)?;
                Ok(pieces)
            }));
        }
        Ok(())
    }

    /// Waits until pieces are written. A failure invalidates the draft.
    async fn wait_written(&mut self) -> io::Result<()> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let done = writing.await;
        self.writing = None;
        // No job owns the state here: callers wait for compression first.
        let work = self.work.take();
        let pieces = done.map_err(io::Error::other).flatten()?;
        let work = self.work.insert(work.ok_or_else(invalidated)?);
        pieces.into_iter().for_each(|piece| work.draft.take_back(piece));
        Ok(())
    }

    /// Pieces that are ready to be written.
    fn pieces(&mut self) -> Option<&mut Vec<Piece>> {
        self.work.as_mut().map(|work| work.draft.full())
    }

    fn push_draft(&mut self, page: &Page) -> io::Result<u32> {
        self.charge.grow_by(DRAFT_PAGE_BYTES).map_err(refused)?;
        self.buffer.push(*page);
        Ok(self.handed_over + self.buffer.len() as u32 - 1)
    }

    fn push_plain(&mut self, page: &Page) -> io::Result<PageLocation> {
        let index = self.plain_pages;
        self.plain()?.write_all_at(page, plain_offset(index))?;
        self.plain_pages += 1;
        Ok(PageLocation::Plain(index))
    }

    fn plain(&mut self) -> io::Result<&mut TemporaryFile> {
        match &mut self.plain {
            Some(file) => Ok(file),
            none => Ok(none.insert(self.files.create()?)),
        }
    }

    /// Returns a page that has not been handed over yet.
    fn buffered_mut(&mut self, index: u32) -> Option<&mut Page> {
        self.buffer.get_mut(index.checked_sub(self.handed_over)? as usize)
    }
}

impl Drop for SpilledPages {
    fn drop(&mut self) {
        // The file is closed before the charge is released.
        let charge = std::mem::replace(&mut self.charge, TemporaryCharge::new(&self.files.quota));
        self.files.area.close((self.work.take(), charge));
    }
}

impl Work {
    fn run(&mut self) {
        let Work { draft, pages, locations } = self;
        locations.extend(pages.drain(..).map(|page| draft.push(&page)));
    }
}

fn plain_offset(index: u32) -> u64 {
    u64::from(index) * PAGE_SIZE as u64
}

fn invalidated() -> io::Error {
    io::Error::other("the transaction's temporary file is unusable after an earlier failure")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{all_released, files};

    /// Incompressible pages.
    fn noise() -> impl Iterator<Item = Page> {
        let mut state = 1u64;
        std::iter::from_fn(move || {
            Some(std::array::from_fn(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            }))
        })
    }

    /// Spilled pages whose draft is on a full disk.
    fn on_a_full_disk(files: &TemporaryFiles) -> SpilledPages {
        let mut pages = SpilledPages::new(files).unwrap();
        let full = Draft::new(File::options().write(true).open("/dev/full").unwrap());
        pages.work.as_mut().unwrap().draft = full;
        pages
    }

    #[tokio::test]
    async fn failure_of_a_background_thread_fails_the_next_call() {
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = on_a_full_disk(&area);
        let mut failed = None;
        for page in noise().take(10 * BUFFER_PAGES) {
            if let Err(error) = pages.draft(&page).await {
                failed = Some(error);
                break;
            }
        }
        assert_eq!(failed.unwrap().raw_os_error(), Some(libc::ENOSPC));
        assert!(pages.read(PageLocation::Draft(0), &mut [0; PAGE_SIZE]).await.is_err());
        assert!(pages.hand_over().await.is_err());
        assert!(pages.finish(PartitionId(1), Vec::new()).await.is_err());
    }

    #[tokio::test]
    async fn unreported_failure_fails_finish() {
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = on_a_full_disk(&area);
        // One piece, whose write starts after the pages collected now are compressed.
        for page in noise().take(BUFFER_PAGES + 1) {
            pages.draft(&page).await.unwrap();
        }
        let failed = pages.finish(PartitionId(1), Vec::new()).await.err().unwrap();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    }

    /// Several pieces, written sequentially and concurrently, with reads of all of them in between.
    #[tokio::test]
    async fn pieces_are_written_at_their_offsets() {
        const PAGES: u32 = 20 * BUFFER_PAGES as u32;
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = SpilledPages::new(&area).unwrap();
        let mut read = [0; PAGE_SIZE];
        let all: Vec<Page> = noise().take(PAGES as usize).collect();
        for (no, page) in all.iter().enumerate() {
            assert_eq!(pages.draft(page).await.unwrap(), no as u32);
            if no % 150 == 149 {
                for back in [no, no / 2, no / 3, 0] {
                    pages.read(PageLocation::Draft(back as u32), &mut read).await.unwrap();
                    assert!(read == all[back], "{back} after {no}");
                }
            }
        }
        let frames = (0..PAGES).map(|no| (no + 1, no)).collect();
        let finished = pages.finish(PartitionId(1), frames).await.unwrap();
        let mut segment = vec![0; finished.bytes as usize];
        finished.file.read_exact_at(&mut segment, 0).unwrap();
        assert_eq!(fulmar_pages::segment::verify(&segment).unwrap().pages(), PAGES as usize);
    }

    #[tokio::test]
    async fn pages_are_charged_from_before_the_write_until_the_segment_is_dropped() {
        const LIMIT: u64 = 300 * DRAFT_PAGE_BYTES;
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 0, LIMIT);
        let used = || files.quota.used_bytes();
        let mut pages = SpilledPages::new(&files).unwrap();
        let all: Vec<Page> = noise().take(300).collect();
        for page in &all[..290] {
            pages.draft(page).await.unwrap();
        }
        // A drafted page that changes again is charged a second time.
        pages.replace(PageLocation::Draft(0), &all[1]).unwrap();
        assert_eq!(used(), 290 * DRAFT_PAGE_BYTES + PAGE_SIZE as u64);
        let refused = loop {
            match pages.draft(&all[299]).await {
                Ok(_) => {}
                Err(refused) => break refused,
            }
        };
        assert_eq!(fulmar_sqlite::spill::error(&refused).state(), "53400");
        assert!(used() <= LIMIT);
        let finished = pages.finish(PartitionId(1), vec![(2, 1)]).await.unwrap();
        assert!(used() >= finished.bytes);
        drop(finished);
        all_released(&files).await;
    }
}

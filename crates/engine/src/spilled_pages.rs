//! Pages of a large transaction outside of memory.
//!
//! ```text
//! new page -> gathered, 256 KiB -> another thread: compressed, appended to a draft of the commit's segment -> a third: written
//! a page that was handed over, changed again -> a plain file, where it can be changed as often as it likes
//! ```
//!
//! A bulk load in the order of its keys spills each of its pages once: at the commit they are where they belong
//! ([`crate::draft`]), and the session's thread has copied each once. Whatever it spills while the other thread is busy
//! waits in the second of two buffers, and when that is full the session waits (its thread serves others meanwhile). Likewise
//! with what is compressed while the third one waits for the disk.
//!
//! The draft has one frame for each page at most, since a page that comes again goes to the plain file; and where many
//! do, new pages go there at once. At the commit the plain pages are added to the draft. If most of the draft's frames mean
//! nothing by then, all is written anew.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use fulmar_pages::segment::{Entry, FrameLocation};
use fulmar_pages::{PAGE_SIZE, Page, PageNo, PartitionId};
use tokio::task::JoinHandle;

use crate::draft::{Draft, Piece};
use crate::spill::{TemporaryFile, TemporaryFiles, refused};
use crate::temporary::TemporaryCharge;

/// New pages that gather before they are handed over.
const GATHERED: usize = 64;
/// Pages that a transaction has wanted again, from which on its draft goes through the page cache.
const MOST_WANTED_AGAIN: usize = 64;
/// Drafted pages that may come again before it is looked at how many they are.
const FEW_REPLACED: u32 = 64;
/// What a page is charged for in the draft: a page that does not shrink, the head of its frame and its entry in the index.
const DRAFTED_BYTES: u64 = PAGE_SIZE as u64 + 64;
/// Memory that the buffers between the threads take: pages that gather, pages that are compressed, pieces that are written.
pub(crate) const BUFFERS_BYTES: u64 = 2 * GATHERED as u64 * PAGE_SIZE as u64 + (1 << 20);
/// Memory that is kept for each page.
pub(crate) const PLACE_BYTES: u64 = size_of::<FrameLocation>() as u64;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the draft, or on its way there: its number among those.
    Draft(u32),
    /// In the plain file: its number there.
    Plain(u32),
}

/// What the other thread works on, and gives back.
struct Work {
    draft: Draft,
    pages: Vec<Page>,
    locations: Vec<FrameLocation>,
}

/// A draft that has become a segment, in a file that is not synced. It is charged until this is dropped.
pub(crate) struct SpilledSegment {
    pub file: Arc<File>,
    pub bytes: u64,
    _charge: TemporaryCharge,
}

pub(crate) struct SpilledPages {
    files: TemporaryFiles,
    /// For the draft.
    charge: TemporaryCharge,
    /// Pages that are to be handed over next.
    gathered: Vec<Page>,
    /// Pages handed over before them.
    handed_over: u32,
    /// At rest; `None` while `job` has it, and after a failure.
    work: Option<Box<Work>>,
    job: Option<JoinHandle<Box<Work>>>,
    writing: Option<JoinHandle<io::Result<Vec<Piece>>>>,
    /// Of the pages that are in the draft.
    locations: Vec<FrameLocation>,
    /// Pages in the draft that have been changed since.
    replaced: u32,
    wanted_again: usize,
    plain: Option<TemporaryFile>,
    plain_pages: u32,
}

impl SpilledPages {
    pub(crate) fn new(files: &TemporaryFiles) -> io::Result<Self> {
        let draft = Draft::new(files.area.file()?);
        let pages = Vec::with_capacity(GATHERED);
        let work = Work { draft, pages, locations: Vec::new() };
        Ok(SpilledPages {
            files: files.clone(),
            charge: TemporaryCharge::new(&files.quota),
            gathered: Vec::with_capacity(GATHERED),
            handed_over: 0,
            work: Some(Box::new(work)),
            job: None,
            writing: None,
            locations: Vec::new(),
            replaced: 0,
            wanted_again: 0,
            plain: None,
            plain_pages: 0,
        })
    }

    /// Adds a page.
    pub(crate) fn push(&mut self, page: &Page) -> io::Result<Place> {
        match self.replaced > FEW_REPLACED + self.handed_over / 8 {
            true => self.push_plain(page),
            false => Ok(Place::Draft(self.push_draft(page)?)),
        }
    }

    /// A page has changed again; answers where it is now.
    pub(crate) fn replace(&mut self, place: Place, page: &Page) -> io::Result<Place> {
        match place {
            Place::Plain(index) => {
                self.plain()?.write_all_at(page, plain_offset(index))?;
                Ok(place)
            }
            Place::Draft(index) => match self.gathered_mut(index) {
                Some(gathered) => {
                    *gathered = *page;
                    Ok(place)
                }
                None => {
                    self.replaced += 1;
                    self.push_plain(page)
                }
            },
        }
    }

    pub(crate) async fn read(&mut self, place: Place, page: &mut Page) -> io::Result<()> {
        match place {
            Place::Plain(index) => self.plain()?.file()?.read_exact_at(page, plain_offset(index)),
            Place::Draft(index) => {
                if let Some(gathered) = self.gathered_mut(index) {
                    *page = *gathered;
                    return Ok(());
                }
                self.wanted_again += 1;
                let cache = self.wanted_again > MOST_WANTED_AGAIN;
                self.rest().await?;
                let (Some(work), Some(location)) = (&mut self.work, self.locations.get(index as usize))
                else {
                    return Err(given_up());
                };
                if cache {
                    work.draft.cache();
                }
                work.draft.read(*location, page)
            }
        }
    }

    /// Whether pages have gathered that are to be handed over before more come.
    pub(crate) fn is_full(&self) -> bool {
        self.gathered.len() >= GATHERED
    }

    /// Hands over what has gathered; waits until what was handed over before is compressed.
    pub(crate) async fn hand_over(&mut self) -> io::Result<()> {
        self.compressed().await?;
        let mut work = self.work.take().ok_or_else(given_up)?;
        std::mem::swap(&mut work.pages, &mut self.gathered);
        self.handed_over += work.pages.len() as u32;
        self.job = Some(self.files.area.runtime().spawn_blocking(move || {
            work.run();
            work
        }));
        Ok(())
    }

    /// Pages that the draft has been given, those that have been replaced included.
    pub(crate) fn drafted(&self) -> usize {
        self.handed_over as usize + self.gathered.len()
    }

    #[cfg(test)]
    pub(crate) fn plain_pages(&self) -> u32 {
        self.plain_pages
    }

    /// Adds a page to the draft, whatever happened before; answers its place there.
    pub(crate) async fn draft(&mut self, page: &Page) -> io::Result<u32> {
        if self.is_full() {
            self.hand_over().await?;
        }
        self.push_draft(page)
    }

    /// The draft becomes a segment: `frames` are the places in it of the partition's pages.
    pub(crate) async fn finish(
        mut self,
        partition: PartitionId,
        frames: Vec<(PageNo, u32)>,
    ) -> io::Result<SpilledSegment> {
        self.hand_over().await?;
        self.rest().await?;
        let draft = self.work.take().ok_or_else(given_up)?.draft;
        let locations = &self.locations;
        let entry = |(no, index)| Some((partition, no, *locations.get(index as usize)?));
        let entries: Option<Vec<Entry>> = frames.into_iter().map(entry).collect();
        let entries = entries.ok_or_else(given_up)?;
        let finished = self.files.area.runtime().spawn_blocking(move || draft.finish(entries)).await;
        let (file, bytes) = finished.map_err(io::Error::other)??;
        let unused = TemporaryCharge::new(&self.files.quota);
        Ok(SpilledSegment { file, bytes, _charge: std::mem::replace(&mut self.charge, unused) })
    }

    /// Waits until the other threads have nothing to do.
    async fn rest(&mut self) -> io::Result<()> {
        self.compressed().await?;
        self.written().await
    }

    /// Waits for the thread that compresses. If that has made pieces, they are being written then.
    async fn compressed(&mut self) -> io::Result<()> {
        if let Some(job) = &mut self.job {
            let done = job.await;
            self.job = None;
            let work = self.work.insert(done.map_err(io::Error::other)?);
            self.locations.append(&mut work.locations);
        }
        if self.pieces().is_some_and(|pieces| !pieces.is_empty()) {
            self.written().await?;
            let mut pieces = self.pieces().map(std::mem::take).unwrap_or_default();
            self.writing = Some(self.files.area.runtime().spawn_blocking(move || {
                pieces.iter_mut().try_for_each(Piece::write)?;
                Ok(pieces)
            }));
        }
        Ok(())
    }

    /// Waits for the thread that writes. If it has failed all is given up.
    async fn written(&mut self) -> io::Result<()> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let done = writing.await;
        self.writing = None;
        // It is not compressing: whoever waits for this has waited for that.
        let work = self.work.take();
        let pieces = done.map_err(io::Error::other).flatten()?;
        let work = self.work.insert(work.ok_or_else(given_up)?);
        pieces.into_iter().for_each(|piece| work.draft.take_back(piece));
        Ok(())
    }

    /// Those that are to be written.
    fn pieces(&mut self) -> Option<&mut Vec<Piece>> {
        self.work.as_mut().map(|work| work.draft.full())
    }

    fn push_draft(&mut self, page: &Page) -> io::Result<u32> {
        self.charge.grow_by(DRAFTED_BYTES).map_err(refused)?;
        self.gathered.push(*page);
        Ok(self.handed_over + self.gathered.len() as u32 - 1)
    }

    fn push_plain(&mut self, page: &Page) -> io::Result<Place> {
        let index = self.plain_pages;
        self.plain()?.write_all_at(page, plain_offset(index))?;
        self.plain_pages += 1;
        Ok(Place::Plain(index))
    }

    fn plain(&mut self) -> io::Result<&mut TemporaryFile> {
        match &mut self.plain {
            Some(file) => Ok(file),
            none => Ok(none.insert(self.files.create()?)),
        }
    }

    /// The page, if it has not been handed over.
    fn gathered_mut(&mut self, index: u32) -> Option<&mut Page> {
        self.gathered.get_mut(index.checked_sub(self.handed_over)? as usize)
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

fn given_up() -> io::Error {
    io::Error::other("the transaction's file was given up after an earlier failure")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spill::tests::{all_released, files};

    /// Pages that do not shrink.
    fn noise() -> impl Iterator<Item = Page> {
        let mut state = 1u64;
        std::iter::from_fn(move || {
            Some(std::array::from_fn(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            }))
        })
    }

    /// Pages whose draft is on a disk that is full.
    fn on_a_full_disk(files: &TemporaryFiles) -> SpilledPages {
        let mut pages = SpilledPages::new(files).unwrap();
        let full = Draft::new(File::options().write(true).open("/dev/full").unwrap());
        pages.work.as_mut().unwrap().draft = full;
        pages
    }

    #[tokio::test]
    async fn a_failure_of_the_other_thread_is_met_by_whoever_comes_next() {
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = on_a_full_disk(&area);
        let mut failed = None;
        for page in noise().take(10 * GATHERED) {
            if let Err(error) = pages.draft(&page).await {
                failed = Some(error);
                break;
            }
        }
        assert_eq!(failed.unwrap().raw_os_error(), Some(libc::ENOSPC));
        assert!(pages.read(Place::Draft(0), &mut [0; PAGE_SIZE]).await.is_err());
        assert!(pages.hand_over().await.is_err());
        assert!(pages.finish(PartitionId(1), Vec::new()).await.is_err());
    }

    #[tokio::test]
    async fn a_failure_that_nobody_has_met_is_met_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = on_a_full_disk(&area);
        // One piece, which is written when those are done that gather now.
        for page in noise().take(GATHERED + 1) {
            pages.draft(&page).await.unwrap();
        }
        let failed = pages.finish(PartitionId(1), Vec::new()).await.err().unwrap();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    }

    /// Several pieces, one after another and some at once; pages of all of them are read between.
    #[tokio::test]
    async fn pieces_come_where_they_belong() {
        const PAGES: u32 = 20 * GATHERED as u32;
        let directory = tempfile::tempdir().unwrap();
        let area = files(directory.path(), 0, u64::MAX);
        let mut pages = SpilledPages::new(&area).unwrap();
        let mut read = [0; PAGE_SIZE];
        let all: Vec<Page> = noise().take(PAGES as usize).collect();
        for (no, page) in all.iter().enumerate() {
            assert_eq!(pages.draft(page).await.unwrap(), no as u32);
            if no % 150 == 149 {
                for back in [no, no / 2, no / 3, 0] {
                    pages.read(Place::Draft(back as u32), &mut read).await.unwrap();
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
    async fn pages_are_charged_before_they_are_written_and_until_the_segment_is_gone() {
        const LIMIT: u64 = 300 * DRAFTED_BYTES;
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 0, LIMIT);
        let used = || files.quota.used_bytes();
        let mut pages = SpilledPages::new(&files).unwrap();
        let all: Vec<Page> = noise().take(300).collect();
        for page in &all[..290] {
            pages.draft(page).await.unwrap();
        }
        // A drafted page that changes again takes a second place.
        pages.replace(Place::Draft(0), &all[1]).unwrap();
        assert_eq!(used(), 290 * DRAFTED_BYTES + PAGE_SIZE as u64);
        let refused = loop {
            match pages.draft(&all[299]).await {
                Ok(_) => {}
                Err(refused) => break refused,
            }
        };
        assert_eq!(crate::spill::error(&refused).state(), "53400");
        assert!(used() <= LIMIT);
        let finished = pages.finish(PartitionId(1), vec![(2, 1)]).await.unwrap();
        assert!(used() >= finished.bytes);
        drop(finished);
        all_released(&files).await;
    }
}

//! Pages of a large transaction in a temporary file.
//!
//! ```text
//! new page -> gathered, 256 KiB -> file        a bulk load: past the page cache, read back once, in order
//!                 page again  <-> file         anything else: through the page cache
//! ```
//!
//! A bulk load in the order of its keys spills each of its pages once, and asks for none of them until the commit. In the
//! page cache they would be of no use, and fresh memory for a gigabyte of them costs more time than the disk does. So
//! they are written in large pieces past it, until the transaction turns out to want its pages again.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use fulmar_pages::{PAGE_SIZE, Page};

use crate::spill::SpillArea;

/// New pages that gather before they are written.
const GATHERED: usize = 64;
const PIECE_BYTES: u64 = (GATHERED * PAGE_SIZE) as u64;
/// Pieces in memory while all is read back.
const PIECES: usize = 8;
/// Pages that a transaction has wanted again, from which on its file goes through the page cache.
const MOST_WANTED_AGAIN: usize = 64;

/// A page where direct reads and writes want it: they take whole blocks of memory, too.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Aligned(Page);

/// The file, and the new pages that are not in it yet.
pub(crate) struct SpilledPages {
    file: File,
    /// The same file past the page cache; `None` if the file system has no such thing, or pages are wanted again.
    direct: Option<File>,
    wanted_again: usize,
    /// They belong at `gathered_at`.
    gathered: Vec<Aligned>,
    gathered_at: u64,
}

impl SpilledPages {
    pub(crate) fn new(area: &SpillArea) -> io::Result<Self> {
        let file = area.file()?;
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(same).ok();
        let gathered = Vec::with_capacity(GATHERED);
        Ok(SpilledPages { file, direct, wanted_again: 0, gathered, gathered_at: 0 })
    }

    /// Adds a page; answers where it lies.
    pub(crate) fn push(&mut self, page: &Page) -> io::Result<u64> {
        if self.gathered.len() == GATHERED {
            let file = self.direct.as_ref().unwrap_or(&self.file);
            file.write_all_at(bytes(&self.gathered), self.gathered_at)?;
            self.gathered_at += PIECE_BYTES;
            self.gathered.clear();
        }
        let offset = self.gathered_at + (self.gathered.len() * PAGE_SIZE) as u64;
        self.gathered.push(Aligned(*page));
        Ok(offset)
    }

    /// Writes a page over what lies there.
    pub(crate) fn write(&mut self, offset: u64, page: &Page) -> io::Result<()> {
        if let Some(index) = self.gathered_index(offset) {
            self.gathered[index].0 = *page;
            return Ok(());
        }
        self.note_wanted_again();
        self.file.write_all_at(page, offset)
    }

    pub(crate) fn read(&mut self, offset: u64, page: &mut Page) -> io::Result<()> {
        if let Some(index) = self.gathered_index(offset) {
            *page = self.gathered[index].0;
            return Ok(());
        }
        self.note_wanted_again();
        self.file.read_exact_at(page, offset)
    }

    /// To read the pages one last time.
    pub(crate) fn into_reader(self) -> Reader {
        Reader { pages: self, pieces: VecDeque::new() }
    }

    fn note_wanted_again(&mut self) {
        self.wanted_again += 1;
        if self.wanted_again > MOST_WANTED_AGAIN {
            self.direct = None;
        }
    }

    /// Which of the gathered pages, if it is one of those.
    fn gathered_index(&self, offset: u64) -> Option<usize> {
        offset.checked_sub(self.gathered_at).map(|start| start as usize / PAGE_SIZE)
    }
}

/// Reads pages back. What was written in one piece is read in one piece: SQLite spills its pages in their order, but for
/// some that come a little earlier or later.
pub(crate) struct Reader {
    pages: SpilledPages,
    /// Pieces and where they begin; the one that was used last is the last.
    pieces: VecDeque<(u64, Vec<Aligned>)>,
}

impl Reader {
    pub(crate) fn read(&mut self, offset: u64) -> io::Result<Box<Page>> {
        if let Some(index) = self.pages.gathered_index(offset) {
            return Ok(Box::new(self.pages.gathered[index].0));
        }
        let Some(direct) = &self.pages.direct else {
            let mut page = Box::new([0; PAGE_SIZE]);
            self.pages.file.read_exact_at(&mut page[..], offset)?;
            return Ok(page);
        };
        let within = offset % PIECE_BYTES;
        let start = offset - within;
        let piece = match self.pieces.iter().position(|(at, _)| *at == start) {
            Some(known) => self.pieces.remove(known).map(|(_, piece)| piece).unwrap_or_default(),
            None => {
                let oldest = if self.pieces.len() == PIECES { self.pieces.pop_front() } else { None };
                let mut piece =
                    oldest.map_or_else(|| vec![Aligned([0; PAGE_SIZE]); GATHERED], |(_, piece)| piece);
                direct.read_exact_at(bytes_mut(&mut piece), start)?;
                piece
            }
        };
        let page = Box::new(piece[within as usize / PAGE_SIZE].0);
        self.pieces.push_back((start, piece));
        Ok(page)
    }
}

fn bytes(pages: &[Aligned]) -> &[u8] {
    // SAFETY: pages are bytes, one behind the other.
    unsafe { std::slice::from_raw_parts(pages.as_ptr().cast(), size_of_val(pages)) }
}

fn bytes_mut(pages: &mut [Aligned]) -> &mut [u8] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), size_of_val(pages)) }
}

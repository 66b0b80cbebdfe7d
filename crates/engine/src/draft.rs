//! A segment in the making: an unnamed file that pages are appended to, compressed, as a transaction spills them.
//!
//! ```text
//! page -> frame -> gathered, 256 KiB -> a piece -> file, past the page cache     ... at the commit: index, footer, sync, name
//!         (this thread)                  (another)
//! ```
//!
//! What a bulk load spills is what it will commit, so it is written once, in its last form. If the transaction is rolled
//! back, or the process dies, the file is gone: it has no name. In the page cache its bytes would be of no use, and fresh
//! memory for a gigabyte of them costs more time than the disk does; so they go past it, until it turns out that the
//! transaction wants its pages again. Past it a write takes as long as the disk does, about as long as it takes to compress
//! as much: whoever has the draft gives its pieces to somebody else to write ([`Draft::full`], [`Draft::take_back`]).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

use fulmar_pages::Page;
use fulmar_pages::segment::{Entry, FrameLocation, FrameWriter, MAX_FRAME_BYTES, decode_frame};

/// What direct writes want: whole blocks of memory to whole blocks of the file.
const BLOCK_BYTES: usize = 4096;
/// Bytes that gather before they are written.
const PIECE_BYTES: usize = 256 << 10;

pub(crate) struct Draft {
    file: Arc<File>,
    /// The same file past the page cache; `None` if the file system has no such thing, or pages are wanted again.
    direct: Option<Arc<File>>,
    frames: FrameWriter,
    /// Bytes of the pieces so far.
    in_pieces: u64,
    /// Those that follow.
    gathered: Blocks,
    full: Vec<Piece>,
    /// Of pieces that have been written.
    spare: Vec<Blocks>,
}

/// Whole blocks of a draft, on their way to its file.
pub(crate) struct Piece {
    file: Arc<File>,
    direct: Option<Arc<File>>,
    offset: u64,
    blocks: Blocks,
    bytes: usize,
}

/// Bytes of which the first is at a block's beginning, behind so many that put it there. They stay where they are as long as they are no more
/// than a piece and a frame.
struct Blocks {
    memory: Vec<u8>,
    padding: usize,
}

impl Draft {
    pub(crate) fn new(file: File) -> Self {
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(same).ok();
        let mut gathered = Blocks::new();
        let frames = FrameWriter::new(&mut gathered.memory);
        Draft {
            file: Arc::new(file),
            direct: direct.map(Arc::new),
            frames,
            in_pieces: 0,
            gathered,
            full: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Appends a page; answers where it lies.
    pub(crate) fn push(&mut self, page: &Page) -> FrameLocation {
        let location = self.frames.push(page, &mut self.gathered.memory);
        if self.gathered.bytes().len() >= PIECE_BYTES {
            self.cut();
        }
        location
    }

    /// What has gathered becomes a piece, but for a part of a block.
    fn cut(&mut self) {
        let bytes = self.gathered.bytes();
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % BLOCK_BYTES);
        let mut next = self.spare.pop().unwrap_or_else(Blocks::new);
        next.memory.extend_from_slice(rest);
        let (bytes, offset) = (whole.len(), self.in_pieces);
        let blocks = std::mem::replace(&mut self.gathered, next);
        self.full.push(Piece { file: self.file.clone(), direct: self.direct.clone(), offset, blocks, bytes });
        self.in_pieces += bytes as u64;
    }

    /// Pieces that nobody has taken to write.
    pub(crate) fn full(&mut self) -> &mut Vec<Piece> {
        &mut self.full
    }

    /// A piece has been written.
    pub(crate) fn take_back(&mut self, mut piece: Piece) {
        if piece.direct.is_none() {
            self.direct = None;
        }
        piece.blocks.memory.truncate(piece.blocks.padding);
        self.spare.push(piece.blocks);
    }

    /// Reads a page back. All pieces have been written.
    pub(crate) fn read(&self, location: FrameLocation, page: &mut Page) -> io::Result<()> {
        let mut room = [0; MAX_FRAME_BYTES];
        let frame = room.get_mut(..location.length as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let in_file = self.in_pieces.saturating_sub(location.offset).min(frame.len() as u64) as usize;
        let (first, rest) = frame.split_at_mut(in_file);
        self.file.read_exact_at(first, location.offset)?;
        if !rest.is_empty() {
            let at = (location.offset + in_file as u64 - self.in_pieces) as usize;
            let gathered =
                self.gathered.bytes().get(at..at + rest.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            rest.copy_from_slice(gathered);
        }
        decode_frame(frame, page).map_err(io::Error::other)
    }

    /// From now on its pages are wanted again: they go through the page cache.
    pub(crate) fn cache(&mut self) {
        self.direct = None;
    }

    /// Ends the segment, all pieces of which have been written: the file holds it then, not synced. Answers its bytes too.
    pub(crate) fn finish(mut self, entries: Vec<Entry>) -> io::Result<(Arc<File>, u64)> {
        self.frames.finish(entries, &mut self.gathered.memory);
        let rest = self.gathered.bytes();
        self.file.write_all_at(rest, self.in_pieces)?;
        Ok((self.file, self.in_pieces + rest.len() as u64))
    }
}

impl Piece {
    pub(crate) fn write(&mut self) -> io::Result<()> {
        let bytes = &self.blocks.bytes()[..self.bytes];
        if let Some(direct) = &self.direct {
            match direct.write_all_at(bytes, self.offset) {
                // Some file systems let a file be opened so and do not write to it.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.direct = None,
                outcome => return outcome,
            }
        }
        self.file.write_all_at(bytes, self.offset)
    }
}

impl Blocks {
    fn new() -> Blocks {
        let mut memory: Vec<u8> = Vec::with_capacity(BLOCK_BYTES + PIECE_BYTES + MAX_FRAME_BYTES);
        let padding = memory.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        memory.resize(padding, 0);
        Blocks { memory, padding }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.padding..]
    }
}

#[cfg(test)]
mod tests {
    use fulmar_pages::{PAGE_SIZE, PartitionId, segment};

    use super::*;

    /// A page that shrinks to some three quarters.
    fn page(no: u32) -> Page {
        let mut state = u64::from(no) + 1;
        std::array::from_fn(|i| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if i % 4 == 0 { no as u8 } else { (state >> 33) as u8 }
        })
    }

    #[test]
    fn a_full_disk_is_told() {
        let mut draft = Draft::new(File::options().write(true).open("/dev/full").unwrap());
        for no in 0..200 {
            draft.push(&page(no));
        }
        let failed = draft.full().iter_mut().find_map(|piece| piece.write().err()).unwrap();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn pages_are_read_back_wherever_they_are_and_the_file_becomes_a_segment() {
        for cached in [false, true] {
            let mut draft = Draft::new(tempfile::tempfile().unwrap());
            if cached {
                draft.cache();
            }
            let mut locations = Vec::new();
            let mut read = [0; PAGE_SIZE];
            for no in 0..300 {
                locations.push(draft.push(&page(no)));
                for mut piece in std::mem::take(draft.full()) {
                    piece.write().unwrap();
                    draft.take_back(piece);
                }
                // The one just added, and one from each piece before, those on an edge too.
                for back in [no, no / 2, no.saturating_sub(80), no.saturating_sub(81), no.saturating_sub(82)]
                {
                    draft.read(locations[back as usize], &mut read).unwrap();
                    assert!(read == page(back), "{back} after {no}");
                }
            }
            assert!(draft.in_pieces > 2 * PIECE_BYTES as u64);
            let entries = (0..300).rev().map(|no| (PartitionId(3), no + 1, locations[no as usize])).collect();
            let (file, bytes) = draft.finish(entries).unwrap();
            let mut segment = vec![0; bytes as usize];
            file.read_exact_at(&mut segment, 0).unwrap();
            assert_eq!(file.metadata().unwrap().len(), bytes);
            assert_eq!(segment::verify(&segment).unwrap().pages(), 300);
        }
    }
}

//! A segment under construction: an unnamed file to which compressed pages are appended as a
//! transaction spills them.
//!
//! ```text
//! page -> frame -> buffer, 256 KiB -> piece -> file, bypassing the page cache
//!         (this thread)               (another thread)    at the commit: index, footer, sync, name
//! ```
//!
//! A bulk load commits what it spills, so the data is written once, in its final form. If the
//! transaction is rolled back, or the process dies, the file disappears, since it has no name.
//!
//! Writes bypass the kernel's page cache, where the data would be useless: allocating fresh memory
//! for 1 GB of it takes longer than writing it. Once the transaction reads its spilled pages again,
//! writes go through the page cache. A direct write takes about as long as compressing the same
//! pages, so the owner of the draft has pieces written by another thread ([`Draft::full`],
//! [`Draft::take_back`]).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

use fulmar_pages::Page;
use fulmar_pages::segment::{Entry, FrameLocation, FrameWriter, MAX_FRAME_BYTES, decode_frame};

/// Alignment of direct writes, in memory and in the file.
const BLOCK_BYTES: usize = 4096;
/// Bytes that are collected before they are written.
const PIECE_BYTES: usize = 256 << 10;

pub(crate) struct Draft {
    file: Arc<File>,
    /// The file opened for direct writes. None if the file system does not support them, or pages
    /// are read again.
    direct: Option<Arc<File>>,
    frames: FrameWriter,
    /// Bytes of the pieces so far.
    piece_bytes: u64,
    /// The bytes after these pieces.
    buffer: Blocks,
    full: Vec<Piece>,
    /// Buffers of written pieces, for reuse.
    spare: Vec<Blocks>,
}

/// Whole blocks of a draft, to be written to its file.
pub(crate) struct Piece {
    file: Arc<File>,
    direct: Option<Arc<File>>,
    offset: u64,
    blocks: Blocks,
    bytes: usize,
}

/// A buffer whose contents start at a block boundary, after some padding. It is not reallocated as
/// long as it holds no more than a piece and a frame.
struct Blocks {
    memory: Vec<u8>,
    padding: usize,
}

impl Draft {
    pub(crate) fn new(file: File) -> Self {
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(same).ok();
        let mut buffer = Blocks::new();
        let frames = FrameWriter::new(&mut buffer.memory);
        Draft {
            file: Arc::new(file),
            direct: direct.map(Arc::new),
            frames,
            piece_bytes: 0,
            buffer,
            full: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Appends a page and returns its location.
    pub(crate) fn push(&mut self, page: &Page) -> FrameLocation {
        let location = self.frames.push(page, &mut self.buffer.memory);
        if self.buffer.bytes().len() >= PIECE_BYTES {
            self.cut();
        }
        location
    }

    /// Turns the collected bytes into a piece, except for an incomplete last block.
    fn cut(&mut self) {
        let bytes = self.buffer.bytes();
        let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % BLOCK_BYTES);
        let mut next = self.spare.pop().unwrap_or_else(Blocks::new);
        next.memory.extend_from_slice(rest);
        let (bytes, offset) = (whole.len(), self.piece_bytes);
        let blocks = std::mem::replace(&mut self.buffer, next);
        self.full.push(Piece { file: self.file.clone(), direct: self.direct.clone(), offset, blocks, bytes });
        self.piece_bytes += bytes as u64;
    }

    /// Pieces that are ready to be written.
    pub(crate) fn full(&mut self) -> &mut Vec<Piece> {
        &mut self.full
    }

    /// Returns a written piece, whose buffer is reused.
    pub(crate) fn take_back(&mut self, mut piece: Piece) {
        if piece.direct.is_none() {
            self.direct = None;
        }
        piece.blocks.memory.truncate(piece.blocks.padding);
        self.spare.push(piece.blocks);
    }

    /// Reads a page back. All pieces must have been written.
    pub(crate) fn read(&self, location: FrameLocation, page: &mut Page) -> io::Result<()> {
        let mut room = [0; MAX_FRAME_BYTES];
        let frame = room.get_mut(..location.length as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let in_file = self.piece_bytes.saturating_sub(location.offset).min(frame.len() as u64) as usize;
        let (first, rest) = frame.split_at_mut(in_file);
        self.file.read_exact_at(first, location.offset)?;
        if !rest.is_empty() {
            let at = (location.offset + in_file as u64 - self.piece_bytes) as usize;
            let buffer = self.buffer.bytes().get(at..at + rest.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            rest.copy_from_slice(buffer);
        }
        decode_frame(frame, page).map_err(io::Error::other)
    }

    /// Switches to writes through the page cache, since pages are read again.
    pub(crate) fn cache(&mut self) {
        self.direct = None;
    }

    /// Completes the segment in the file, without a sync, and returns the file and its size. All
    /// pieces must have been written.
    pub(crate) fn finish(mut self, entries: Vec<Entry>) -> io::Result<(Arc<File>, u64)> {
        self.frames.finish(entries, &mut self.buffer.memory);
        let rest = self.buffer.bytes();
        self.file.write_all_at(rest, self.piece_bytes)?;
        Ok((self.file, self.piece_bytes + rest.len() as u64))
    }
}

impl Piece {
    pub(crate) fn write(&mut self) -> io::Result<()> {
        let bytes = &self.blocks.bytes()[..self.bytes];
        if let Some(direct) = &self.direct {
            match direct.write_all_at(bytes, self.offset) {
                // Some file systems allow direct opens and reject direct writes.
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

    /// A page that compresses to about three quarters.
    fn page(no: u32) -> Page {
        let mut state = u64::from(no) + 1;
        std::array::from_fn(|i| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            if i % 4 == 0 { no as u8 } else { (state >> 33) as u8 }
        })
    }

    #[test]
    fn full_disk_is_reported() {
        let mut draft = Draft::new(File::options().write(true).open("/dev/full").unwrap());
        for no in 0..200 {
            draft.push(&page(no));
        }
        let failed = draft.full().iter_mut().find_map(|piece| piece.write().err()).unwrap();
        assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn pages_can_be_read_back_and_the_file_becomes_a_segment() {
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
                // The last page, and one of each earlier piece, including those at a boundary.
                for back in [no, no / 2, no.saturating_sub(80), no.saturating_sub(81), no.saturating_sub(82)]
                {
                    draft.read(locations[back as usize], &mut read).unwrap();
                    assert!(read == page(back), "{back} after {no}");
                }
            }
            assert!(draft.piece_bytes > 2 * PIECE_BYTES as u64);
            let entries = (0..300).rev().map(|no| (PartitionId(3), no + 1, locations[no as usize])).collect();
            let (file, bytes) = draft.finish(entries).unwrap();
            let mut segment = vec![0; bytes as usize];
            file.read_exact_at(&mut segment, 0).unwrap();
            assert_eq!(file.metadata().unwrap().len(), bytes);
            assert_eq!(segment::verify(&segment).unwrap().pages(), 300);
        }
    }
}

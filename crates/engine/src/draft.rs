//! A segment in the making: an unnamed file that pages are appended to, compressed, as a transaction spills them.
//!
//! ```text
//! page -> frame -> gathered, 256 KiB -> file, past the page cache        ... at the commit: index, footer, sync, name
//! ```
//!
//! What a bulk load spills is what it will commit, so it is written once, in its last form. If the transaction is rolled
//! back, or the process dies, the file is gone: it has no name. In the page cache its bytes would be of no use, and fresh
//! memory for a gigabyte of them costs more time than the disk does; so they go past it, until it turns out that the
//! transaction wants its pages again.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use fulmar_pages::Page;
use fulmar_pages::segment::{Entry, FrameLocation, FrameWriter, MAX_FRAME_BYTES, decode_frame};

/// What direct writes want: whole blocks of memory to whole blocks of the file.
const BLOCK_BYTES: usize = 4096;
/// Bytes that gather before they are written.
const PIECE_BYTES: usize = 256 << 10;

pub(crate) struct Draft {
    file: File,
    /// The same file past the page cache; `None` if the file system has no such thing, or pages are wanted again.
    direct: Option<File>,
    frames: FrameWriter,
    /// Bytes in the file.
    written: u64,
    /// Those that follow, behind so many that put them at a block's beginning. Never grows beyond its first capacity.
    gathered: Vec<u8>,
    padding: usize,
}

impl Draft {
    pub(crate) fn new(file: File) -> Self {
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(same).ok();
        let mut gathered: Vec<u8> = Vec::with_capacity(BLOCK_BYTES + PIECE_BYTES + MAX_FRAME_BYTES);
        let padding = gathered.as_ptr().align_offset(BLOCK_BYTES).min(BLOCK_BYTES);
        gathered.resize(padding, 0);
        let frames = FrameWriter::new(&mut gathered);
        Draft { file, direct, frames, written: 0, gathered, padding }
    }

    /// Appends a page; answers where it lies.
    pub(crate) fn push(&mut self, page: &Page) -> io::Result<FrameLocation> {
        let location = self.frames.push(page, &mut self.gathered);
        let bytes = self.gathered.len() - self.padding;
        if bytes >= PIECE_BYTES {
            let whole = bytes - bytes % BLOCK_BYTES;
            self.write(whole)?;
            self.written += whole as u64;
            self.gathered.copy_within(self.padding + whole.., self.padding);
            self.gathered.truncate(self.padding + bytes - whole);
        }
        Ok(location)
    }

    /// Writes so many of the gathered bytes, which are whole blocks.
    fn write(&mut self, bytes: usize) -> io::Result<()> {
        let piece = &self.gathered[self.padding..self.padding + bytes];
        if let Some(direct) = &self.direct {
            match direct.write_all_at(piece, self.written) {
                // Some file systems let a file be opened so and do not write to it.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.direct = None,
                outcome => return outcome,
            }
        }
        self.file.write_all_at(piece, self.written)
    }

    /// Reads a page back.
    pub(crate) fn read(&self, location: FrameLocation, page: &mut Page) -> io::Result<()> {
        let mut room = [0; MAX_FRAME_BYTES];
        let frame = room.get_mut(..location.length as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let in_file = self.written.saturating_sub(location.offset).min(frame.len() as u64) as usize;
        let (first, rest) = frame.split_at_mut(in_file);
        self.file.read_exact_at(first, location.offset)?;
        if !rest.is_empty() {
            let at = self.padding + (location.offset + in_file as u64 - self.written) as usize;
            let gathered = self.gathered.get(at..at + rest.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            rest.copy_from_slice(gathered);
        }
        decode_frame(frame, page).map_err(io::Error::other)
    }

    /// From now on its pages are wanted again: they go through the page cache.
    pub(crate) fn cache(&mut self) {
        self.direct = None;
    }

    /// Ends the segment: the file holds it then, not synced. Answers its bytes too.
    pub(crate) fn finish(mut self, entries: Vec<Entry>) -> io::Result<(File, u64)> {
        self.frames.finish(entries, &mut self.gathered);
        let rest = &self.gathered[self.padding..];
        self.file.write_all_at(rest, self.written)?;
        Ok((self.file, self.written + rest.len() as u64))
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
        let failed = (0..200).find_map(|no| draft.push(&page(no)).err()).unwrap();
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
                locations.push(draft.push(&page(no)).unwrap());
                // The one just added, and one from each piece before, those on an edge too.
                for back in [no, no / 2, no.saturating_sub(80), no.saturating_sub(81), no.saturating_sub(82)]
                {
                    draft.read(locations[back as usize], &mut read).unwrap();
                    assert!(read == page(back), "{back} after {no}");
                }
            }
            assert!(draft.written > 2 * PIECE_BYTES as u64);
            let entries = (0..300).rev().map(|no| (PartitionId(3), no + 1, locations[no as usize])).collect();
            let (file, bytes) = draft.finish(entries).unwrap();
            let mut segment = vec![0; bytes as usize];
            file.read_exact_at(&mut segment, 0).unwrap();
            assert_eq!(file.metadata().unwrap().len(), bytes);
            assert_eq!(segment::verify(&segment).unwrap().pages(), 300);
        }
    }
}

//! Writing a log file past the page cache.
//!
//! A log writes a few hundred bytes and syncs, thousands of times a second, and nobody reads it before the next start. Through the page
//! cache each of these costs a copy, dirtying and finding a page, and write-back: a quarter of a small commit's processor time.
//! Direct writes are of whole blocks from aligned memory, so the block in which the last write ended is kept, to be written
//! again with what comes behind it.
//!
//! What stands behind the written bytes in their last block becomes zeros; see [`super::LogFile::write_at`]. Writing a block again
//! does not endanger what was durable in it: those sectors are written with what they hold (and the page cache would
//! write whole pages, too).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What disks and file systems that take direct writes at all are content with.
const BLOCK_BYTES: usize = 4096;
/// Blocks that are written at a time.
const PIECE_BLOCKS: usize = 64;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// A file that is written in whole blocks, front to back.
pub(super) struct DirectWriter {
    file: File,
    blocks: Vec<Block>,
    /// The number of the file's block that `blocks` begins with, if the last write ended within one.
    held: Option<u64>,
}

impl DirectWriter {
    /// Writes to a file that was opened with O_DIRECT, and whose length is a multiple of [`BLOCK_BYTES`].
    pub(super) fn new(file: File) -> Self {
        DirectWriter { file, blocks: Vec::new(), held: None }
    }

    /// Whether a file of this length can be written so.
    pub(super) fn takes(length_bytes: u64) -> bool {
        length_bytes.is_multiple_of(BLOCK_BYTES as u64)
    }

    /// Writes all of `bytes` at `offset`. `read_at` reads what stands before `offset` in its block, if that was not written
    /// last.
    pub(super) fn write_at(
        &mut self,
        mut offset: u64,
        mut bytes: &[u8],
        read_at: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let lead = (offset % BLOCK_BYTES as u64) as usize;
        let first = offset - lead as u64;
        // After an error nothing is known of what is held.
        if self.held.take() != Some(first / BLOCK_BYTES as u64) && lead > 0 {
            read_at(first, &mut self.room(BLOCK_BYTES)[..lead])?;
        }
        while !bytes.is_empty() {
            let lead = (offset % BLOCK_BYTES as u64) as usize;
            let count = bytes.len().min(PIECE_BLOCKS * BLOCK_BYTES - lead);
            let end = lead + count;
            let piece = self.room(end.next_multiple_of(BLOCK_BYTES));
            piece[lead..end].copy_from_slice(&bytes[..count]);
            piece[end..].fill(0);
            let (blocks, whole) = (piece.len() / BLOCK_BYTES, piece.len());
            // SAFETY: `room` has just made so many blocks.
            let piece = unsafe { std::slice::from_raw_parts(self.blocks.as_ptr().cast::<u8>(), whole) };
            self.file.write_all_at(piece, offset - lead as u64)?;
            bytes = &bytes[count..];
            offset += count as u64;
            self.blocks.swap(0, blocks - 1);
        }
        if !offset.is_multiple_of(BLOCK_BYTES as u64) {
            self.held = Some(offset / BLOCK_BYTES as u64);
        }
        Ok(())
    }

    /// The first so many bytes of the blocks: a multiple of [`BLOCK_BYTES`].
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        let blocks = bytes / BLOCK_BYTES;
        if self.blocks.len() < blocks {
            self.blocks.resize(blocks, Block([0; BLOCK_BYTES]));
        }
        // SAFETY: a block is its bytes, without padding; there are at least so many blocks.
        unsafe { std::slice::from_raw_parts_mut(self.blocks.as_mut_ptr().cast::<u8>(), bytes) }
    }
}

//! Direct writes: log files and uploads are written with O_DIRECT, bypassing the page cache.
//!
//! A log writes a few hundred bytes and syncs them, thousands of times per second, and the data is
//! not read again before the next start. Through the page cache, each write would cost a copy,
//! finding and dirtying a page, and write-back: a quarter of a small commit's CPU time.
//!
//! Direct writes need whole blocks and aligned memory. The last, partially filled block is
//! therefore kept in memory and written again together with the data that follows it.
//!
//! The bytes after the written data in their last block become zeros; see
//! [`super::LogFile::write_at`]. Rewriting a block does not endanger its durable part, because
//! those sectors are written with their current contents. (The page cache would rewrite whole pages
//! as well.)

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Alignment that is sufficient for every disk and file system that supports direct I/O.
const BLOCK_BYTES: usize = 4096;
/// Maximum number of blocks per write of buffered blocks.
const MAX_WRITE_BLOCKS: usize = 64;
/// Maximum number of bytes per write of the caller's memory. Bounds how long other disk I/O waits.
const MAX_ALIGNED_WRITE_BYTES: usize = 1 << 20;

#[derive(Clone)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// A file that is written in whole blocks, from front to back.
pub(crate) struct DirectWriter {
    file: File,
    blocks: Vec<Block>,
    /// Number of the file block that is stored at the start of `blocks`, if the last write ended
    /// inside a block.
    tail_block: Option<u64>,
}

impl DirectWriter {
    /// Wraps a file that was opened with O_DIRECT. Its length must be a multiple of
    /// [`BLOCK_BYTES`].
    pub(crate) fn new(file: File) -> Self {
        DirectWriter { file, blocks: Vec::new(), tail_block: None }
    }

    /// Returns true if a file of this length can be written with direct I/O.
    pub(crate) fn takes(length_bytes: u64) -> bool {
        length_bytes.is_multiple_of(BLOCK_BYTES as u64)
    }

    /// Writes all of `bytes` at `offset`. `read_at` reads the start of the first block from the
    /// file if that block is not buffered.
    pub(crate) fn write_at(
        &mut self,
        mut offset: u64,
        mut bytes: &[u8],
        read_at: impl FnOnce(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let lead = (offset % BLOCK_BYTES as u64) as usize;
        let first = offset - lead as u64;
        // After an error the buffered block is invalid, hence `take`.
        if self.tail_block.take() != Some(first / BLOCK_BYTES as u64) && lead > 0 {
            read_at(first, &mut self.buffer(BLOCK_BYTES)[..lead])?;
        }
        while !bytes.is_empty() {
            let lead = (offset % BLOCK_BYTES as u64) as usize;
            let whole = whole_blocks(bytes);
            if lead == 0 && whole > 0 {
                let count = whole.min(MAX_ALIGNED_WRITE_BYTES);
                self.file.write_all_at(&bytes[..count], offset)?;
                bytes = &bytes[count..];
                offset += count as u64;
                continue;
            }
            let count = bytes.len().min(MAX_WRITE_BLOCKS * BLOCK_BYTES - lead);
            let end = lead + count;
            let piece = self.buffer(end.next_multiple_of(BLOCK_BYTES));
            piece[lead..end].copy_from_slice(&bytes[..count]);
            piece[end..].fill(0);
            let (blocks, whole) = (piece.len() / BLOCK_BYTES, piece.len());
            // SAFETY: `buffer` has just allocated this many blocks.
            let piece = unsafe { std::slice::from_raw_parts(self.blocks.as_ptr().cast::<u8>(), whole) };
            self.file.write_all_at(piece, offset - lead as u64)?;
            bytes = &bytes[count..];
            offset += count as u64;
            self.blocks.swap(0, blocks - 1);
        }
        if !offset.is_multiple_of(BLOCK_BYTES as u64) {
            self.tail_block = Some(offset / BLOCK_BYTES as u64);
        }
        Ok(())
    }

    /// Returns the first `bytes` bytes of the block buffer, which must be a multiple of
    /// [`BLOCK_BYTES`].
    fn buffer(&mut self, bytes: usize) -> &mut [u8] {
        let blocks = bytes / BLOCK_BYTES;
        if self.blocks.len() < blocks {
            self.blocks.resize(blocks, Block([0; BLOCK_BYTES]));
        }
        // SAFETY: a block consists of its bytes without padding, and there are at least `blocks`
        // blocks.
        unsafe { std::slice::from_raw_parts_mut(self.blocks.as_mut_ptr().cast::<u8>(), bytes) }
    }
}

/// Returns the length of the whole blocks in `bytes` if its memory is aligned, and 0 otherwise.
fn whole_blocks(bytes: &[u8]) -> usize {
    match bytes.as_ptr().addr().is_multiple_of(BLOCK_BYTES) {
        true => bytes.len() - bytes.len() % BLOCK_BYTES,
        false => 0,
    }
}

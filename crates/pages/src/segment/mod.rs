//! Format of a segment: an immutable, indexed file of pages.
//!
//! ```text
//!   +--------+-------+-------+-----+-------+-------------------------------+--------+
//!   | header | frame | frame | ... | frame | index                         | footer |
//!   +--------+-------+-------+-----+-------+-------------------------------+--------+
//!    16 bytes  one page each,               (partition, page) -> (offset,    44 bytes, contains
//!              zstd or plain, crc            length), sorted, varints        the index position
//! ```
//!
//! **Writing.** A segment is written in one pass. [`SegmentBuilder`] returns the bytes as it goes,
//! so a large segment is never held in memory. Pages can be added in any order and for several
//! partitions; the index is smallest if they are sorted.
//!
//! **Reading.** A segment is read from its end. The footer gives the length of the index
//! ([`tail_bytes`]), the index gives the position of each page's frame ([`SegmentIndex::frame`]),
//! and one ranged read plus [`decode_frame`] give the page.
//!
//! **Unused frames.** Frames that the index does not list are ignored. A transaction that changes a
//! page more than once ([`FrameWriter`]) leaves the older frame in the file.
//!
//! Frames, index and footer have separate checksums, so a page can be verified without reading the
//! whole file.

mod builder;
mod index;

use std::cell::RefCell;

use crate::codec::{self, Reader};
use crate::{FormatError, PAGE_SIZE, Page, Problem};

pub use builder::{Entry, FrameWriter, SegmentBuilder};
pub use index::{SegmentIndex, tail_bytes};

const FORMAT: &str = "segment";

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Length of the header, in bytes.
pub const HEADER_BYTES: usize = 16;

/// Length of the footer, in bytes.
pub const FOOTER_BYTES: usize = 44;

/// Maximum length of a frame, in bytes.
pub const MAX_FRAME_BYTES: usize = FRAME_HEAD + PAGE_SIZE;

const HEADER_MAGIC: &[u8; 8] = b"FULMSEGM";
const FOOTER_MAGIC: &[u8; 8] = b"FULMSEGE";
/// Length of a frame's encoding byte and checksum.
const FRAME_HEAD: usize = 5;
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;

/// Position of a page's frame in its segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameLocation {
    /// Offset from the start of the segment, in bytes.
    pub offset: u64,
    /// Length of the frame, in bytes.
    pub length: u32,
}

/// Checks the header of a segment. Readers of pages need not call it: every part that they read has
/// a checksum.
pub fn check_header(header: &[u8]) -> Result<(), FormatError> {
    let mut reader = Reader::new(FORMAT, header);
    if reader.take(HEADER_MAGIC.len())? != HEADER_MAGIC {
        return Err(codec::error(FORMAT, 0, Problem::Invalid("not a segment (wrong magic bytes)")));
    }
    let found = reader.u32()?;
    if found != FORMAT_VERSION {
        let problem = Problem::FormatVersion { found, newest: FORMAT_VERSION };
        return Err(codec::error(FORMAT, HEADER_MAGIC.len(), problem));
    }
    match reader.u32()? as usize {
        PAGE_SIZE => Ok(()),
        _ => Err(codec::error(FORMAT, HEADER_BYTES - 4, Problem::Invalid("unsupported page size"))),
    }
}

/// Verifies a frame's checksum without decoding the page. Used when a frame is copied unchanged.
pub fn check_frame(frame: &[u8]) -> Result<(), FormatError> {
    split_frame(frame).map(|_| ())
}

/// Splits a frame into encoding and payload, and verifies its checksum.
fn split_frame(frame: &[u8]) -> Result<(u8, &[u8]), FormatError> {
    let mut reader = Reader::new(FORMAT, frame);
    let encoding = reader.u8()?;
    let stored = reader.u32()?;
    let payload = reader.take(reader.remaining())?;
    let computed = frame_crc(encoding, payload);
    if stored != computed {
        return Err(codec::error(FORMAT, 1, Problem::Checksum { stored, computed }));
    }
    Ok((encoding, payload))
}

/// Decodes the page of one frame. After an error the page's contents are unspecified.
pub fn decode_frame(frame: &[u8], page: &mut Page) -> Result<(), FormatError> {
    thread_local! {
        /// Reused, because a decompressor allocates about 100 KiB of tables.
        static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
    }
    let (encoding, payload) = split_frame(frame)?;
    match encoding {
        PLAIN if payload.len() == PAGE_SIZE => {
            page.copy_from_slice(payload);
            Ok(())
        }
        PLAIN => Err(codec::error(FORMAT, FRAME_HEAD, Problem::Invalid("plain frame is not one page long"))),
        ZSTD => DECOMPRESSOR.with_borrow_mut(|decompressor| {
            let bad = |what| codec::error(FORMAT, FRAME_HEAD, Problem::Invalid(what));
            let decompressor = match decompressor {
                Some(ready) => ready,
                None => decompressor.insert(
                    zstd::bulk::Decompressor::new()
                        .map_err(|_| bad("out of memory decompressing a frame"))?,
                ),
            };
            match decompressor.decompress_to_buffer(payload, &mut page[..]) {
                Ok(PAGE_SIZE) => Ok(()),
                Ok(_) => Err(bad("frame holds less than one page")),
                Err(_) => Err(bad("frame cannot be decompressed to one page")),
            }
        }),
        _ => Err(codec::error(FORMAT, 0, Problem::Invalid("unknown frame encoding"))),
    }
}

fn frame_crc(encoding: u8, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[encoding]);
    hasher.update(payload);
    hasher.finalize()
}

/// Verifies a whole segment: header, index and every frame. Returns the index.
pub fn verify(segment: &[u8]) -> Result<SegmentIndex, FormatError> {
    let mut reader = Reader::new(FORMAT, segment);
    if reader.take(HEADER_MAGIC.len())? != HEADER_MAGIC {
        return Err(codec::error(FORMAT, 0, Problem::Invalid("not a segment (wrong magic bytes)")));
    }
    check_version(&mut reader)?;
    if reader.u32()? as usize != PAGE_SIZE {
        return Err(codec::error(FORMAT, 12, Problem::Invalid("unsupported page size")));
    }
    let index = SegmentIndex::decode(segment)?;
    if index.segment_bytes() != segment.len() as u64 {
        return Err(reader.invalid("segment length differs from the length in the footer"));
    }
    let mut page = crate::ZERO_PAGE;
    for partition in index.partitions() {
        for (_, location) in index.frames(partition) {
            let start = location.offset as usize;
            decode_frame(&segment[start..start + location.length as usize], &mut page)
                .map_err(|error| FormatError { at: start + error.at, ..error })?;
        }
    }
    Ok(index)
}

fn check_version(reader: &mut Reader<'_>) -> Result<(), FormatError> {
    let at = reader.at();
    match reader.u32()? {
        FORMAT_VERSION => Ok(()),
        found => {
            let problem = Problem::FormatVersion { found, newest: FORMAT_VERSION };
            Err(codec::error(FORMAT, at, problem))
        }
    }
}

#[cfg(test)]
mod tests;

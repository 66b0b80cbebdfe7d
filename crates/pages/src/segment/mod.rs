//! A segment: an immutable, indexed file of pages.
//!
//! ```text
//!   +--------+-------+-------+-----+-------+-------------------------------+--------+
//!   | header | frame | frame | ... | frame | index                         | footer |
//!   +--------+-------+-------+-----+-------+-------------------------------+--------+
//!    16        one page each,               (partition, page) -> (offset,    44 bytes, says where
//!              zstd or plain, crc            length), sorted, varints        the index begins
//! ```
//!
//! A segment is written in one pass ([`SegmentBuilder`] hands out the bytes as they come, so a big segment never
//! stands in memory) and read from its end: the footer says how long the index is ([`tail_bytes`]), the index where
//! each page's frame lies ([`SegmentIndex::frame`]), and one ranged read and [`decode_frame`] give the page.
//! Pages may come in any order and for several partitions; in sorted order their index is smallest. Frames that the index
//! does not name mean nothing: a transaction that changed a page again ([`FrameWriter`]) leaves the older one behind.
//!
//! Frame, index and footer have a checksum each, so that a page can be trusted without reading the whole file.

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

/// Bytes of the header.
pub const HEADER_BYTES: usize = 16;

/// Bytes of the footer.
pub const FOOTER_BYTES: usize = 44;

/// The most bytes that a frame takes.
pub const MAX_FRAME_BYTES: usize = FRAME_HEAD + PAGE_SIZE;

const HEADER_MAGIC: &[u8; 8] = b"FULMSEGM";
const FOOTER_MAGIC: &[u8; 8] = b"FULMSEGE";
/// A frame's encoding and checksum.
const FRAME_HEAD: usize = 5;
const PLAIN: u8 = 0;
const ZSTD: u8 = 1;

/// Where a page's frame lies in its segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameLocation {
    /// Bytes from the beginning of the segment.
    pub offset: u64,
    /// Bytes of the frame.
    pub length: u32,
}

/// Checks the bytes with which a segment begins. Readers of pages do without: all that they need has a checksum.
pub fn check_header(header: &[u8]) -> Result<(), FormatError> {
    let mut reader = Reader::new(FORMAT, header);
    if reader.take(HEADER_MAGIC.len())? != HEADER_MAGIC {
        return Err(codec::error(FORMAT, 0, Problem::Invalid("it does not begin as a segment does")));
    }
    let found = reader.u32()?;
    if found != FORMAT_VERSION {
        let problem = Problem::FormatVersion { found, newest: FORMAT_VERSION };
        return Err(codec::error(FORMAT, HEADER_MAGIC.len(), problem));
    }
    match reader.u32()? as usize {
        PAGE_SIZE => Ok(()),
        _ => Err(codec::error(FORMAT, HEADER_BYTES - 4, Problem::Invalid("its pages have another size"))),
    }
}

/// Checks a frame against its checksum, for who copies it as it is.
pub fn check_frame(frame: &[u8]) -> Result<(), FormatError> {
    split_frame(frame).map(|_| ())
}

/// A frame's encoding and payload, as its checksum has them.
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
        /// A decompressor holds some 100 KiB of tables: too much to make one per page.
        static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
    }
    let (encoding, payload) = split_frame(frame)?;
    match encoding {
        PLAIN if payload.len() == PAGE_SIZE => {
            page.copy_from_slice(payload);
            Ok(())
        }
        PLAIN => {
            Err(codec::error(FORMAT, FRAME_HEAD, Problem::Invalid("a plain frame is not one page long")))
        }
        ZSTD => DECOMPRESSOR.with_borrow_mut(|decompressor| {
            let bad = |what| codec::error(FORMAT, FRAME_HEAD, Problem::Invalid(what));
            let decompressor = match decompressor {
                Some(ready) => ready,
                None => decompressor.insert(
                    zstd::bulk::Decompressor::new().map_err(|_| bad("no memory to decompress the frame"))?,
                ),
            };
            match decompressor.decompress_to_buffer(payload, &mut page[..]) {
                Ok(PAGE_SIZE) => Ok(()),
                Ok(_) => Err(bad("a frame holds less than one page")),
                Err(_) => Err(bad("a frame cannot be decompressed to one page")),
            }
        }),
        _ => Err(codec::error(FORMAT, 0, Problem::Invalid("the encoding of the frame is not known"))),
    }
}

fn frame_crc(encoding: u8, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[encoding]);
    hasher.update(payload);
    hasher.finalize()
}

/// Checks a whole segment: header, index, every frame. Answers its index.
pub fn verify(segment: &[u8]) -> Result<SegmentIndex, FormatError> {
    let mut reader = Reader::new(FORMAT, segment);
    if reader.take(HEADER_MAGIC.len())? != HEADER_MAGIC {
        return Err(codec::error(FORMAT, 0, Problem::Invalid("this is not a segment (wrong first bytes)")));
    }
    check_version(&mut reader)?;
    if reader.u32()? as usize != PAGE_SIZE {
        return Err(codec::error(FORMAT, 12, Problem::Invalid("the pages are not of 4096 bytes")));
    }
    let index = SegmentIndex::decode(segment)?;
    if index.segment_bytes() != segment.len() as u64 {
        return Err(reader.invalid("the footer says another length than the segment has"));
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

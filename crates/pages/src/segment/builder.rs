//! Writes a segment in one pass, without holding it in memory.

use super::{
    FOOTER_MAGIC, FORMAT_VERSION, FRAME_HEAD, FrameLocation, HEADER_BYTES, HEADER_MAGIC, PLAIN, ZSTD,
    frame_crc,
};
use crate::{PAGE_SIZE, Page, PageNo, PartitionId, codec};

/// Level 1 compresses a database page to a third or less in about 10 us. Higher levels gain little
/// on 4 KiB.
const ZSTD_LEVEL: i32 = 1;

/// Builds a segment. The caller must write the bytes that each call appends to `out` in that order.
pub struct SegmentBuilder {
    frames: FrameWriter,
    entries: Vec<Entry>,
}

/// A page and the position of its frame.
pub type Entry = (PartitionId, PageNo, FrameLocation);

impl SegmentBuilder {
    /// Begins a segment and appends its header.
    pub fn new(out: &mut Vec<u8>) -> Self {
        SegmentBuilder { frames: FrameWriter::new(out), entries: Vec::new() }
    }

    /// Adds a page, appends its frame and returns the frame's position. If a page is added twice,
    /// the last one is used.
    pub fn push(
        &mut self,
        partition: PartitionId,
        no: PageNo,
        page: &Page,
        out: &mut Vec<u8>,
    ) -> FrameLocation {
        let location = self.frames.push(page, out);
        self.entries.push((partition, no, location));
        location
    }

    /// Adds a page by copying its frame from another segment. Returns the frame's position.
    pub fn push_frame(
        &mut self,
        partition: PartitionId,
        no: PageNo,
        frame: &[u8],
        out: &mut Vec<u8>,
    ) -> FrameLocation {
        let location = self.frames.push_frame(frame, out);
        self.entries.push((partition, no, location));
        location
    }

    /// Number of pages added so far.
    pub fn pages(&self) -> usize {
        self.entries.len()
    }

    /// Length of the segment so far in bytes (header and frames).
    pub fn bytes(&self) -> u64 {
        self.frames.bytes()
    }

    /// Completes the segment: appends index and footer.
    pub fn finish(self, out: &mut Vec<u8>) {
        self.frames.finish(self.entries, out);
    }
}

/// Writes the frames of a segment whose index is known only at the end. A spilling transaction uses
/// it, because it may write a page several times before it commits. The caller must write the bytes
/// that each call appends to `out` in that order.
pub struct FrameWriter {
    /// Length of the segment so far in bytes, including the header.
    offset: u64,
    /// `None` if its memory could not be allocated. All frames are then plain.
    compressor: Option<zstd::bulk::Compressor<'static>>,
    compressed: Box<[u8; PAGE_SIZE - 1]>,
}

impl FrameWriter {
    /// Begins a segment and appends its header.
    pub fn new(out: &mut Vec<u8>) -> Self {
        out.extend_from_slice(HEADER_MAGIC);
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        out.extend_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        FrameWriter {
            offset: HEADER_BYTES as u64,
            compressor: zstd::bulk::Compressor::new(ZSTD_LEVEL).ok(),
            compressed: Box::new([0; PAGE_SIZE - 1]),
        }
    }

    /// Appends the frame of a page and returns its position.
    pub fn push(&mut self, page: &Page, out: &mut Vec<u8>) -> FrameLocation {
        // A page that does not shrink does not fit into the buffer, which is one byte shorter.
        let shrunk = self
            .compressor
            .as_mut()
            .and_then(|compressor| compressor.compress_to_buffer(page, &mut self.compressed[..]).ok());
        let (encoding, payload) = match shrunk {
            Some(length) => (ZSTD, &self.compressed[..length]),
            None => (PLAIN, &page[..]),
        };
        out.push(encoding);
        out.extend_from_slice(&frame_crc(encoding, payload).to_le_bytes());
        out.extend_from_slice(payload);
        self.advance(FRAME_HEAD + payload.len())
    }

    /// Appends a frame copied from another segment and returns its position.
    pub fn push_frame(&mut self, frame: &[u8], out: &mut Vec<u8>) -> FrameLocation {
        out.extend_from_slice(frame);
        self.advance(frame.len())
    }

    /// Advances past a frame that was just appended and returns its position.
    fn advance(&mut self, bytes: usize) -> FrameLocation {
        let location = FrameLocation { offset: self.offset, length: bytes as u32 };
        self.offset += bytes as u64;
        location
    }

    /// Length of the segment so far in bytes (header and frames).
    pub fn bytes(&self) -> u64 {
        self.offset
    }

    /// Completes the segment: appends index and footer. `entries` can be in any order. If a page
    /// has several entries, the last one is used. Frames without an entry stay in the file and are
    /// ignored.
    pub fn finish(self, mut entries: Vec<Entry>, out: &mut Vec<u8>) {
        // The sort is stable, so the last of several entries for a page stays last. Reversing makes
        // it the first one, which is the one that dedup retains.
        entries.sort_by_key(|&(partition, no, _)| (partition, no));
        entries.reverse();
        entries.dedup_by_key(|&mut (partition, no, _)| (partition, no));
        entries.reverse();
        let index_at = out.len();
        encode_index(&entries, out);
        let index_bytes = (out.len() - index_at) as u64;
        let index_crc = crc32fast::hash(&out[index_at..]);
        let footer_at = out.len();
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&index_bytes.to_le_bytes());
        out.extend_from_slice(&(entries.len() as u64).to_le_bytes());
        out.extend_from_slice(&index_crc.to_le_bytes());
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        let footer_crc = crc32fast::hash(&out[footer_at..]);
        out.extend_from_slice(&footer_crc.to_le_bytes());
        out.extend_from_slice(FOOTER_MAGIC);
    }
}

fn encode_index(entries: &[Entry], out: &mut Vec<u8>) {
    let groups = entries.chunk_by(|a, b| a.0 == b.0);
    codec::put_varint(out, groups.clone().count() as u64);
    let mut previous_partition = 0;
    let mut expected_offset = HEADER_BYTES as u64;
    for group in groups {
        let partition = group[0].0.0;
        codec::put_varint(out, partition - previous_partition);
        codec::put_varint(out, group.len() as u64);
        previous_partition = partition;
        let mut previous_no = 0;
        for &(_, no, location) in group {
            codec::put_varint(out, u64::from(no - previous_no));
            codec::put_varint(out, codec::zigzag(location.offset.wrapping_sub(expected_offset) as i64));
            codec::put_varint(out, u64::from(location.length));
            previous_no = no;
            expected_offset = location.offset + u64::from(location.length);
        }
    }
}

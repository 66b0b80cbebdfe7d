//! The index of a segment: the position of each page's frame.

use super::{FOOTER_BYTES, FOOTER_MAGIC, FORMAT, FRAME_HEAD, FrameLocation, HEADER_BYTES, MAX_FRAME_BYTES};
use crate::codec::{self, Reader};
use crate::{FormatError, PageNo, PartitionId, Problem};

/// Number of footer bytes that its checksum covers.
const FOOTER_CHECKED: usize = 32;

/// Minimum length of an index entry, in bytes.
const MIN_ENTRY_BYTES: usize = 3;

/// The index of one segment in memory: 14 bytes per page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentIndex {
    segment_bytes: u64,
    /// The partitions in ascending order, each with the end of its range of entries. The range
    /// starts at the end of the previous partition's range.
    partitions: Vec<(PartitionId, usize)>,
    // Entry i is (numbers[i], offsets[i], lengths[i]). The numbers of a partition are sorted.
    numbers: Vec<PageNo>,
    offsets: Vec<u64>,
    lengths: Vec<u16>,
}

/// The decoded footer.
struct Footer {
    index_offset: u64,
    index_bytes: u64,
    pages: u64,
    index_crc: u32,
}

/// The combined length of index and footer, in bytes. `tail` must hold at least the last
/// [`FOOTER_BYTES`] of the segment.
pub fn tail_bytes(tail: &[u8]) -> Result<u64, FormatError> {
    Ok(Footer::decode(tail)?.index_bytes + FOOTER_BYTES as u64)
}

impl Footer {
    fn decode(tail: &[u8]) -> Result<Footer, FormatError> {
        let at = tail.len().checked_sub(FOOTER_BYTES).ok_or(codec::error(
            FORMAT,
            tail.len(),
            Problem::Truncated,
        ))?;
        let mut reader = Reader::starting(FORMAT, tail, at);
        let footer = Footer {
            index_offset: reader.u64()?,
            index_bytes: reader.u64()?,
            pages: reader.u64()?,
            index_crc: reader.u32()?,
        };
        let version_at = reader.clone();
        reader.u32()?;
        let stored = reader.u32()?;
        if reader.take(FOOTER_MAGIC.len())? != FOOTER_MAGIC {
            return Err(codec::error(
                FORMAT,
                at,
                Problem::Invalid("segment footer is missing (wrong magic bytes)"),
            ));
        }
        let computed = crc32fast::hash(&tail[at..at + FOOTER_CHECKED]);
        if stored != computed {
            return Err(codec::error(FORMAT, at, Problem::Checksum { stored, computed }));
        }
        super::check_version(&mut version_at.clone())?;
        let fits = footer.index_offset >= HEADER_BYTES as u64
            && footer.index_offset.checked_add(footer.index_bytes).is_some_and(|end| end <= i64::MAX as u64);
        if !fits {
            return Err(codec::error(FORMAT, at, Problem::Invalid("index lies outside the segment")));
        }
        Ok(footer)
    }
}

impl SegmentIndex {
    /// Decodes the index from the end of a segment. `tail` must hold at least [`tail_bytes`];
    /// bytes before that are ignored.
    pub fn decode(tail: &[u8]) -> Result<SegmentIndex, FormatError> {
        let footer = Footer::decode(tail)?;
        let footer_at = tail.len() - FOOTER_BYTES;
        let index_at = usize::try_from(footer.index_bytes)
            .ok()
            .and_then(|bytes| footer_at.checked_sub(bytes))
            .ok_or(codec::error(FORMAT, 0, Problem::Truncated))?;
        let computed = crc32fast::hash(&tail[index_at..footer_at]);
        if computed != footer.index_crc {
            let problem = Problem::Checksum { stored: footer.index_crc, computed };
            return Err(codec::error(FORMAT, index_at, problem));
        }
        let mut reader = Reader::starting(FORMAT, &tail[..footer_at], index_at);
        let index = Self::decode_entries(&mut reader, &footer)?;
        reader.end()?;
        if index.numbers.len() as u64 != footer.pages {
            return Err(reader.invalid("page count in the footer differs from the index"));
        }
        Ok(index)
    }

    fn decode_entries(reader: &mut Reader<'_>, footer: &Footer) -> Result<SegmentIndex, FormatError> {
        let groups = reader.count(2 + MIN_ENTRY_BYTES)?;
        let mut index = SegmentIndex {
            segment_bytes: footer.index_offset + footer.index_bytes + FOOTER_BYTES as u64,
            partitions: Vec::with_capacity(groups),
            numbers: Vec::new(),
            offsets: Vec::new(),
            lengths: Vec::new(),
        };
        let mut expected_offset = HEADER_BYTES as u64;
        for _ in 0..groups {
            let step = reader.varint()?;
            let partition = match index.partitions.last() {
                None => Some(step),
                Some(_) if step == 0 => None,
                Some((previous, _)) => previous.0.checked_add(step),
            };
            let partition =
                partition.ok_or_else(|| reader.invalid("partitions in the index are not sorted"))?;
            let count = reader.count(MIN_ENTRY_BYTES)?;
            if count == 0 {
                return Err(reader.invalid("partition in the index has no pages"));
            }
            index.reserve(count);
            let mut no: PageNo = 0;
            for _ in 0..count {
                no = reader
                    .varint_u32()
                    .map(|step| if step == 0 { None } else { no.checked_add(step) })?
                    .ok_or_else(|| reader.invalid("pages in the index are not sorted"))?;
                let location = decode_location(reader, expected_offset, footer.index_offset)?;
                expected_offset = location.offset + u64::from(location.length);
                index.numbers.push(no);
                index.offsets.push(location.offset);
                index.lengths.push(location.length as u16);
            }
            index.partitions.push((PartitionId(partition), index.numbers.len()));
        }
        Ok(index)
    }

    fn reserve(&mut self, entries: usize) {
        self.numbers.reserve_exact(entries);
        self.offsets.reserve_exact(entries);
        self.lengths.reserve_exact(entries);
    }

    /// Position of the page's frame. `None` if the segment does not contain the page.
    pub fn frame(&self, partition: PartitionId, no: PageNo) -> Option<FrameLocation> {
        let range = self.range(partition)?;
        let at = range.start + self.numbers[range].binary_search(&no).ok()?;
        Some(self.location(at))
    }

    /// The partition's pages in ascending order.
    pub fn frames(&self, partition: PartitionId) -> impl Iterator<Item = (PageNo, FrameLocation)> + '_ {
        self.range(partition).unwrap_or(0..0).map(|at| (self.numbers[at], self.location(at)))
    }

    /// Number of pages of a partition in the segment.
    pub fn pages_of(&self, partition: PartitionId) -> usize {
        self.range(partition).map_or(0, |range| range.len())
    }

    /// The partitions in the segment, in ascending order.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.partitions.iter().map(|&(partition, _)| partition)
    }

    /// Number of pages in the segment, of all partitions.
    pub fn pages(&self) -> usize {
        self.numbers.len()
    }

    /// Length of the whole segment, in bytes.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Memory use of the index, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.partitions.capacity() * size_of::<(PartitionId, usize)>()
            + self.numbers.capacity() * size_of::<PageNo>()
            + self.offsets.capacity() * size_of::<u64>()
            + self.lengths.capacity() * size_of::<u16>()
    }

    fn range(&self, partition: PartitionId) -> Option<std::ops::Range<usize>> {
        let at = self.partitions.binary_search_by_key(&partition, |&(known, _)| known).ok()?;
        let start = if at == 0 { 0 } else { self.partitions[at - 1].1 };
        Some(start..self.partitions[at].1)
    }

    fn location(&self, at: usize) -> FrameLocation {
        FrameLocation { offset: self.offsets[at], length: self.lengths[at].into() }
    }
}

fn decode_location(
    reader: &mut Reader<'_>,
    expected_offset: u64,
    index_offset: u64,
) -> Result<FrameLocation, FormatError> {
    let at = reader.at();
    let offset = expected_offset.wrapping_add(codec::unzigzag(reader.varint()?) as u64);
    let length = reader.varint()?;
    let fits = offset >= HEADER_BYTES as u64
        && (FRAME_HEAD as u64..=MAX_FRAME_BYTES as u64).contains(&length)
        && offset.checked_add(length).is_some_and(|end| end <= index_offset);
    if !fits {
        return Err(codec::error(FORMAT, at, Problem::Invalid("frame lies outside the segment's frames")));
    }
    Ok(FrameLocation { offset, length: length as u32 })
}

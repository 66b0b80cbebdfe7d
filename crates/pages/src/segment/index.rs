//! Where each page of a segment lies.

use super::{FOOTER_BYTES, FOOTER_MAGIC, FORMAT, FRAME_HEAD, FrameLocation, HEADER_BYTES, MAX_FRAME_BYTES};
use crate::codec::{self, Reader};
use crate::{FormatError, PageNo, PartitionId, Problem};

/// Bytes of the footer that its checksum covers.
const FOOTER_CHECKED: usize = 32;

/// The fewest bytes that an entry of the index takes.
const MIN_ENTRY: usize = 3;

/// The index of one segment, in memory: 14 bytes a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentIndex {
    segment_bytes: u64,
    /// The partitions, sorted, each with the end of its entries; they begin where the previous one's end.
    partitions: Vec<(PartitionId, usize)>,
    // One entry is (numbers[i], offsets[i], lengths[i]); the numbers of a partition are sorted.
    numbers: Vec<PageNo>,
    offsets: Vec<u64>,
    lengths: Vec<u16>,
}

/// What the footer tells.
struct Footer {
    index_offset: u64,
    index_bytes: u64,
    pages: u64,
    index_crc: u32,
}

/// How many bytes at the end of a segment its index and footer take, read from its last bytes (at least
/// [`FOOTER_BYTES`] of them).
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
                Problem::Invalid("a segment's footer is missing (wrong last bytes)"),
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
            return Err(codec::error(FORMAT, at, Problem::Invalid("the index lies outside the segment")));
        }
        Ok(footer)
    }
}

impl SegmentIndex {
    /// Decodes the index from the end of a segment: at least [`tail_bytes`] bytes; what comes before is ignored.
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
            return Err(reader.invalid("the footer counts other pages than the index has"));
        }
        Ok(index)
    }

    fn decode_entries(reader: &mut Reader<'_>, footer: &Footer) -> Result<SegmentIndex, FormatError> {
        let groups = reader.count(2 + MIN_ENTRY)?;
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
                partition.ok_or_else(|| reader.invalid("the partitions of the index are not sorted"))?;
            let count = reader.count(MIN_ENTRY)?;
            if count == 0 {
                return Err(reader.invalid("a partition of the index has no pages"));
            }
            index.reserve(count);
            let mut no: PageNo = 0;
            for _ in 0..count {
                no = reader
                    .varint_u32()
                    .map(|step| if step == 0 { None } else { no.checked_add(step) })?
                    .ok_or_else(|| reader.invalid("the pages of the index are not sorted"))?;
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

    /// Where the page's frame lies, if the segment has the page.
    pub fn frame(&self, partition: PartitionId, no: PageNo) -> Option<FrameLocation> {
        let range = self.range(partition)?;
        let at = range.start + self.numbers[range].binary_search(&no).ok()?;
        Some(self.location(at))
    }

    /// The partition's pages, in order of their numbers.
    pub fn frames(&self, partition: PartitionId) -> impl Iterator<Item = (PageNo, FrameLocation)> + '_ {
        self.range(partition).unwrap_or(0..0).map(|at| (self.numbers[at], self.location(at)))
    }

    /// How many pages of a partition the segment has.
    pub fn pages_of(&self, partition: PartitionId) -> usize {
        self.range(partition).map_or(0, |range| range.len())
    }

    /// The partitions of which the segment has pages, in order.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> + '_ {
        self.partitions.iter().map(|&(partition, _)| partition)
    }

    /// Pages in the segment, of all partitions.
    pub fn pages(&self) -> usize {
        self.numbers.len()
    }

    /// Bytes of the whole segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Bytes that the index takes in memory.
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
        return Err(codec::error(FORMAT, at, Problem::Invalid("a frame lies outside the segment's frames")));
    }
    Ok(FrameLocation { offset, length: length as u32 })
}

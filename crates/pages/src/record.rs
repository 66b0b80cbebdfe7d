//! Format of a log record's body.
//!
//! ```text
//!   +---+------+----------------+--------+------------+-----------+
//!   | 3 | kind | version number | steps  | page count | timestamp |     the head
//!   +---+------+----------------+--------+------------+-----------+
//!     u8  u8     varint           varint   varint       u64
//!   +----------------------------------------+-----------
//!   | partition, lineage, epoch, transaction | items ...
//!   +----------------------------------------+-----------
//!     varints
//! ```
//!
//! - **Base version.** A record's diffs apply to the version that is `steps` before its own. A
//!   reader that holds any other version has missed a record.
//! - **Head.** Its four numbers are known only inside the partition's commit lock. The diffs, which
//!   are expensive, are encoded outside of the lock, after space for the longest head.
//!   [`RecordBuilder::finish`] then writes the head directly before them.
//! - **Items.** An item begins with a varint. A nonzero value is a page number; the diff follows
//!   (length, bytes). After zero, a byte gives the kind: 1 an outcome, 2 a cut, 3 a segment.
//! - **Large commits.** A commit with too many pages for memory is written as a segment first. Its
//!   record only names the segment, which stores the pages under the record's partition.
//! - **Checksum.** A record has none. The log's frame around it has one, which covers the position.
//! - **Older versions.** Versions 1 and 2 are still read. They have the numbers at fixed places:
//!   version number (u64), timestamp, page count (u32) and, in version 2, the number of the base
//!   version (u64).
//!
//! The record of an update of 100 bytes in one page takes about 140 bytes.

use crate::codec::{self, Reader};
use crate::{FormatError, LogId, Outcome, Page, PageNo, PartitionId, Problem, SegmentId, Version, diff};

const FORMAT: &str = "log record";

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u8 = 3;

const AT_KIND: usize = 1;

/// Length of the longest head: two 64-bit varints, a 32-bit varint, and the fixed-size fields.
const HEAD_BYTES: usize = 2 + 2 * codec::VARINT_MAX + 5 + 8;

/// Minimum length of a record, in bytes.
pub const MIN_BYTES: usize = 2 + 3 + 8 + 4;

const ITEM_OUTCOME: u8 = 1;
const ITEM_CUT: u8 = 2;
const ITEM_SEGMENT: u8 = 3;

/// The kind of a record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum RecordKind {
    /// A transaction of one partition has committed. Contains its pages.
    Commit = 1,
    /// A transaction of several partitions is prepared. Contains its pages of this partition.
    Prepare = 2,
    /// Outcomes of prepared transactions, and of transactions that a client asked about.
    Decide = 3,
    /// The log's node owns the partition from this record on.
    Open = 4,
    /// The owner releases the partition at this version.
    Release = 5,
    /// An older log ends at a position. Records beyond it are ignored.
    Cut = 6,
    /// The end of this log.
    Seal = 7,
}

impl RecordKind {
    fn from_u8(kind: u8) -> Option<Self> {
        use RecordKind::*;
        [Commit, Prepare, Decide, Open, Release, Cut, Seal].into_iter().find(|known| *known as u8 == kind)
    }
}

/// The fields that every record has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader {
    /// The kind of the record.
    pub kind: RecordKind,
    /// The record's partition. 0 for cut and seal, which belong to no partition.
    pub partition: PartitionId,
    /// The version that the record creates, or at which it was written.
    pub version: Version,
    /// The transaction's id. 0 if there is none.
    pub transaction: u64,
    /// A hybrid timestamp above everything that the record depends on.
    pub timestamp: u64,
    /// Number of pages in the partition after this record.
    pub page_count: u32,
    /// Number of the version that the diffs apply to. `None` in records of format version 1.
    pub previous: Option<u64>,
}

/// The end of an older log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CutPoint {
    /// The log that ends.
    pub log: LogId,
    /// The position at which it ends.
    pub position: u64,
}

/// A page of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageEntry<'a> {
    /// The page.
    pub no: PageNo,
    /// The change, for [`diff::apply`].
    pub diff: &'a [u8],
}

/// Writes records, one at a time, into a reusable buffer.
///
/// ```
/// # use fulmar_pages::*;
/// # use fulmar_pages::record::Patch;
/// let mut builder = RecordBuilder::new(Vec::new());
/// builder.begin(&RecordHeader {
///     kind: RecordKind::Commit,
///     partition: PartitionId(7),
///     version: Version { lineage: 1, epoch: 1, number: 0 },
///     transaction: 42,
///     timestamp: 0,
///     page_count: 3,
///     previous: Some(0),
/// });
/// builder.push_page(2, None, &[0; PAGE_SIZE]);
/// builder.patch(Patch { number: 9, previous: 7, timestamp: 1_000, page_count: 3 });
/// assert_eq!(record::decode(builder.finish()).unwrap().header.version.number, 9);
/// ```
#[derive(Debug, Default)]
pub struct RecordBuilder {
    /// Space for the head, then the rest of the record.
    buffer: Vec<u8>,
    kind: u8,
    patch: Patch,
}

impl RecordBuilder {
    /// Writes into `buffer`. Discards its contents and reuses its capacity.
    pub fn new(buffer: Vec<u8>) -> Self {
        RecordBuilder { buffer, ..RecordBuilder::default() }
    }

    /// Discards the current record and begins a new one.
    pub fn begin(&mut self, header: &RecordHeader) {
        self.kind = header.kind as u8;
        self.patch = Patch {
            number: header.version.number,
            previous: header.previous.unwrap_or_default(),
            timestamp: header.timestamp,
            page_count: header.page_count,
        };
        let out = &mut self.buffer;
        out.clear();
        out.resize(HEAD_BYTES, 0);
        codec::put_varint(out, header.partition.0);
        codec::put_varint(out, header.version.lineage);
        codec::put_varint(out, u64::from(header.version.epoch));
        codec::put_varint(out, header.transaction);
    }

    /// Adds a page as its diff from `base` (or from zeros). Pages are numbered from 1; a record
    /// with page 0 would not decode.
    pub fn push_page(&mut self, no: PageNo, base: Option<&Page>, page: &Page) {
        debug_assert!(no > 0, "pages are numbered from 1");
        let out = &mut self.buffer;
        codec::put_varint(out, u64::from(no));
        // Most diffs are shorter than 128 bytes: reserve one byte for the length, and insert a
        // second one if needed.
        let length_at = out.len();
        out.push(0);
        diff::encode(base, page, out);
        let length = out.len() - length_at - 1;
        if length < 0x80 {
            out[length_at] = length as u8;
        } else {
            out[length_at] = length as u8 | 0x80;
            out.insert(length_at + 1, (length >> 7) as u8);
        }
    }

    /// Adds a page whose diff is already encoded.
    pub fn push_diff(&mut self, no: PageNo, diff: &[u8]) {
        debug_assert!(no > 0, "pages are numbered from 1");
        codec::put_varint(&mut self.buffer, u64::from(no));
        codec::put_varint(&mut self.buffer, diff.len() as u64);
        self.buffer.extend_from_slice(diff);
    }

    /// Adds the outcome of a transaction.
    pub fn push_outcome(&mut self, outcome: Outcome) {
        self.buffer.extend_from_slice(&[0, ITEM_OUTCOME]);
        codec::put_varint(&mut self.buffer, outcome.transaction);
        self.buffer.push(u8::from(outcome.committed));
    }

    /// Adds the end of an older log. A record of kind cut has exactly one; other kinds have none.
    pub fn push_cut(&mut self, cut: CutPoint) {
        self.buffer.extend_from_slice(&[0, ITEM_CUT]);
        self.buffer.extend_from_slice(&cut.log.0.to_le_bytes());
        codec::put_varint(&mut self.buffer, cut.position);
    }

    /// Adds a segment that holds pages of this commit.
    pub fn push_segment(&mut self, segment: SegmentId) {
        self.buffer.extend_from_slice(&[0, ITEM_SEGMENT]);
        self.buffer.extend_from_slice(&segment.0.to_le_bytes());
    }

    /// Sets the numbers that were not known when the record was begun.
    pub fn patch(&mut self, patch: Patch) {
        self.patch = patch;
    }

    /// Completes the record and returns its bytes.
    pub fn finish(&mut self) -> &[u8] {
        let Patch { number, previous, timestamp, page_count } = self.patch;
        let out = &mut self.buffer;
        // Encoded at the end of the buffer first, because its length is not known before.
        let end = out.len();
        out.extend([FORMAT_VERSION, self.kind]);
        codec::put_varint(out, number);
        codec::put_varint(out, number.wrapping_sub(previous));
        codec::put_varint(out, u64::from(page_count));
        out.extend(timestamp.to_le_bytes());
        let at = HEAD_BYTES - (out.len() - end);
        out.copy_within(end.., at);
        out.truncate(end);
        &out[at..]
    }

    /// Length of the record so far in bytes, including space for the longest head.
    #[expect(clippy::len_without_is_empty, reason = "a record has a head, so it is never empty")]
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Removes the items that were pushed since the record had this length.
    pub fn truncate(&mut self, bytes: usize) {
        self.buffer.truncate(bytes);
    }

    /// Returns the buffer for reuse by another builder. It does not hold the record.
    pub fn into_buffer(self) -> Vec<u8> {
        self.buffer
    }
}

/// The fields of a record that are known only inside the commit lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Patch {
    /// Number of the version that the record creates.
    pub number: u64,
    /// Number of the version that the diffs apply to.
    pub previous: u64,
    /// As in [`RecordHeader`].
    pub timestamp: u64,
    /// As in [`RecordHeader`].
    pub page_count: u32,
}

/// A decoded record. Borrows its bytes.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// The fields that every record has.
    pub header: RecordHeader,
    body: &'a [u8],
    items_at: usize,
}

#[derive(Clone, Copy, Debug)]
enum Item<'a> {
    Page(PageEntry<'a>),
    Outcome(Outcome),
    Cut(CutPoint),
    Segment(SegmentId),
}

impl<'a> Record<'a> {
    /// The pages, in the order in which they were added.
    pub fn pages(&self) -> impl Iterator<Item = PageEntry<'a>> + use<'a> {
        self.items().filter_map(|item| match item {
            Item::Page(page) => Some(page),
            _ => None,
        })
    }

    /// The transaction outcomes.
    pub fn outcomes(&self) -> impl Iterator<Item = Outcome> + use<'a> {
        self.items().filter_map(|item| match item {
            Item::Outcome(outcome) => Some(outcome),
            _ => None,
        })
    }

    /// The end of an older log. Every record of kind cut has one.
    pub fn cut(&self) -> Option<CutPoint> {
        self.items().find_map(|item| match item {
            Item::Cut(cut) => Some(cut),
            _ => None,
        })
    }

    /// The segments that hold more pages of this record.
    pub fn segments(&self) -> impl Iterator<Item = SegmentId> + use<'a> {
        self.items().filter_map(|item| match item {
            Item::Segment(segment) => Some(segment),
            _ => None,
        })
    }

    /// The encoded record.
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// [`decode`] has validated every item, so an error cannot occur here.
    fn items(&self) -> impl Iterator<Item = Item<'a>> + use<'a> {
        let mut reader = Reader::starting(FORMAT, self.body, self.items_at);
        std::iter::from_fn(move || if reader.remaining() == 0 { None } else { read_item(&mut reader).ok() })
    }
}

/// Decodes a record and validates its items. The diffs are validated by [`diff::apply`].
pub fn decode(body: &[u8]) -> Result<Record<'_>, FormatError> {
    let mut reader = Reader::new(FORMAT, body);
    let found = reader.u8()?;
    let kind = RecordKind::from_u8(reader.u8()?);
    let (number, previous, timestamp, page_count) = match found {
        1 => (reader.u64()?, None, reader.u64()?, reader.u32()?),
        2 => {
            let (number, timestamp, page_count) = (reader.u64()?, reader.u64()?, reader.u32()?);
            (number, Some(reader.u64()?), timestamp, page_count)
        }
        FORMAT_VERSION => {
            let (number, steps, page_count) = (reader.varint()?, reader.varint()?, reader.varint_u32()?);
            (number, Some(number.wrapping_sub(steps)), reader.u64()?, page_count)
        }
        _ => {
            let problem = Problem::FormatVersion { found: found.into(), newest: FORMAT_VERSION.into() };
            return Err(codec::error(FORMAT, 0, problem));
        }
    };
    let kind = kind.ok_or_else(|| codec::error(FORMAT, AT_KIND, Problem::Invalid("unknown record kind")))?;
    let partition = PartitionId(reader.varint()?);
    let lineage = reader.varint()?;
    let epoch = reader.varint_u32()?;
    let transaction = reader.varint()?;
    let version = Version { lineage, epoch, number };
    let header = RecordHeader { kind, partition, version, transaction, timestamp, page_count, previous };
    let items_at = reader.at();
    let mut cuts = 0;
    while reader.remaining() > 0 {
        cuts += usize::from(matches!(read_item(&mut reader)?, Item::Cut(_)));
    }
    if cuts != usize::from(kind == RecordKind::Cut) {
        return Err(reader.invalid("a cut record must have exactly one cut item, other records none"));
    }
    Ok(Record { header, body, items_at })
}

fn read_item<'a>(reader: &mut Reader<'a>) -> Result<Item<'a>, FormatError> {
    let no = reader.varint_u32()?;
    if no != 0 {
        let length = reader.varint()?;
        let length = usize::try_from(length).map_err(|_| reader.error(Problem::Truncated))?;
        return Ok(Item::Page(PageEntry { no, diff: reader.take(length)? }));
    }
    let at = reader.at();
    match reader.u8()? {
        ITEM_OUTCOME => {
            let transaction = reader.varint()?;
            let committed = match reader.u8()? {
                0 => false,
                1 => true,
                _ => return Err(reader.invalid("unknown transaction outcome")),
            };
            Ok(Item::Outcome(Outcome { transaction, committed }))
        }
        ITEM_CUT => Ok(Item::Cut(CutPoint { log: LogId(reader.u128()?), position: reader.varint()? })),
        ITEM_SEGMENT => Ok(Item::Segment(SegmentId(reader.u128()?))),
        _ => Err(codec::error(FORMAT, at, Problem::Invalid("unknown item kind"))),
    }
}

#[cfg(test)]
mod tests;

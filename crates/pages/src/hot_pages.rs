//! Format of a list of hot pages: the numbers of the pages that a partition used before it was
//! closed, hottest first. The partition prewarms its page cache with them when it opens again.
//!
//! ```text
//!   pages      7 8 9 40 3 4        hottest first; equally hot neighbours in ascending order
//!   runs       +7 x3   +30 x1   -38 x2
//! ```
//!
//! A run is a number of consecutive pages. It is stored as the distance of its first page from the
//! end of the previous run, and its length.
//!
//! The list is a hint. A list that cannot be read is ignored.

use crate::codec::{self, Envelope, Reader};
use crate::{FormatError, PageNo, PartitionId};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Maximum number of pages in a list (16 MiB of pages).
pub const MAX_PAGES: usize = 4096;

const ENVELOPE: Envelope = Envelope {
    format: "list of hot pages",
    magic: b"FULMHOTP",
    foreign: "not a list of hot pages (wrong magic bytes)",
    version: FORMAT_VERSION,
};

/// The hot pages of a partition.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HotPages {
    /// The partition.
    pub partition: PartitionId,
    /// The partition's epoch.
    pub epoch: u32,
    /// Hybrid timestamp at which the list was made.
    pub timestamp: u64,
    /// Page numbers, hottest first; at most [`MAX_PAGES`].
    pub pages: Vec<PageNo>,
}

impl HotPages {
    /// Encodes the list.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(64);
        out.extend_from_slice(&self.partition.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.timestamp.to_le_bytes());
        let runs = || self.pages.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        codec::put_varint(&mut out, runs().count() as u64);
        let mut end = 0;
        for run in runs() {
            let first = i64::from(run[0]);
            codec::put_varint(&mut out, codec::zigzag(first - end));
            codec::put_varint(&mut out, run.len() as u64);
            end = first + run.len() as i64;
        }
        ENVELOPE.end(out)
    }

    /// Decodes a list.
    pub fn decode(bytes: &[u8]) -> Result<HotPages, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let partition = PartitionId(reader.u64()?);
        let (epoch, timestamp) = (reader.u32()?, reader.u64()?);
        let pages = decode_runs(&mut reader)?;
        reader.end()?;
        Ok(HotPages { partition, epoch, timestamp, pages })
    }
}

fn decode_runs(reader: &mut Reader<'_>) -> Result<Vec<PageNo>, FormatError> {
    let mut pages = Vec::new();
    // The end of the previous run. Initially 0, which is no page.
    let mut end = 0;
    for _ in 0..reader.count(2)? {
        let distance = codec::unzigzag(reader.varint()?);
        let length = reader.varint()?;
        if distance == 0 || length == 0 {
            return Err(reader.invalid("run of pages is empty or adjoins the previous run"));
        }
        if length > (MAX_PAGES - pages.len()) as u64 {
            return Err(reader.invalid("list has more pages than allowed"));
        }
        let first: i64 = distance.saturating_add(end);
        end = first.saturating_add(length as i64);
        match (PageNo::try_from(first), PageNo::try_from(end - 1)) {
            (Ok(first), Ok(last)) if first > 0 => pages.extend(first..=last),
            _ => return Err(reader.invalid("invalid page number")),
        }
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CRC_BYTES;
    use crate::codec::testing::{assert_rejects_damage, with_valid_checksum};
    use proptest::prelude::*;

    fn list(pages: &[PageNo]) -> HotPages {
        HotPages { partition: PartitionId(7), epoch: 2, timestamp: 3, pages: pages.to_vec() }
    }

    #[test]
    fn consecutive_pages_share_a_run() {
        let all: Vec<PageNo> = (2..2 + MAX_PAGES as PageNo).collect();
        assert!(list(&all).encode().len() < 48);
        let odd: Vec<PageNo> = (0..MAX_PAGES as PageNo).map(|i| 2 * i + 1).collect();
        assert!(list(&odd).encode().len() < 48 + 2 * MAX_PAGES);
    }

    #[test]
    fn smallest_and_largest_page_numbers_round_trip() {
        for pages in [&[][..], &[1], &[PageNo::MAX, 1], &[1, PageNo::MAX - 1, PageNo::MAX], &[5, 5, 4, 3]] {
            assert_eq!(HotPages::decode(&list(pages).encode()), Ok(list(pages)));
        }
        assert!(HotPages::decode(&list(&[0]).encode()).is_err(), "page 0 must be rejected");
    }

    #[test]
    fn list_with_too_many_pages_is_rejected() {
        let mut bytes = list(&(1..=MAX_PAGES as PageNo).collect::<Vec<_>>()).encode();
        assert!(HotPages::decode(&bytes).is_ok());
        let length = bytes.len() - CRC_BYTES - 2;
        bytes[length] += 1;
        let error = HotPages::decode(&with_valid_checksum(bytes)).unwrap_err();
        assert!(error.to_string().contains("more pages than allowed"), "{error}");
    }

    #[test]
    fn damaged_list_is_rejected() {
        assert_rejects_damage(&list(&[7, 8, 9, 40, 3, 4]).encode(), HotPages::decode);
    }

    proptest! {
        #[test]
        fn list_round_trips(pages in prop::collection::vec(1..=PageNo::MAX, 0..200)) {
            prop_assert_eq!(HotPages::decode(&list(&pages).encode()), Ok(list(&pages)));
        }

        #[test]
        fn changed_byte_is_rejected_or_round_trips(
            pages in prop::collection::vec(1..200u32, 0..50),
            at: prop::sample::Index,
            value: u8,
        ) {
            let mut bytes = list(&pages).encode();
            let at = at.index(bytes.len() - CRC_BYTES);
            bytes[at] = value;
            let bytes = with_valid_checksum(bytes);
            if let Ok(decoded) = HotPages::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}

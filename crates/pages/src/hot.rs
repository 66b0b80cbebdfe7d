//! Hot pages: the numbers of the pages that a partition was working with when it was closed, the hottest first.
//!
//! ```text
//!   pages      7 8 9 40 3 4        the hottest at the front; neighbours that are as hot as each other are in order
//!   runs       +7 x3   +30 x1   -38 x2
//! ```
//!
//! A run is so many pages that follow each other, and begins so far from where the one before it has ended.
//!
//! It is a hint: what is in it is read ahead when the partition opens again. So whoever cannot read it goes without.

use crate::codec::{self, Envelope, Reader};
use crate::{FormatError, PageNo, PartitionId};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

/// Pages that a list names, at most: 16 MiB of them.
pub const MOST_PAGES: usize = 4096;

const ENVELOPE: Envelope = Envelope {
    format: "list of hot pages",
    magic: b"FULMHOTP",
    foreign: "this is not a list of hot pages (wrong first bytes)",
    version: FORMAT_VERSION,
};

/// The pages that a partition was working with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HotPages {
    /// Whose pages they are.
    pub partition: PartitionId,
    /// In which epoch of it.
    pub epoch: u32,
    /// The hybrid timestamp of the time when they were.
    pub timestamp: u64,
    /// The hottest first, [`MOST_PAGES`] at most.
    pub pages: Vec<PageNo>,
}

impl HotPages {
    /// The list's bytes.
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
    // Where the last run has ended: so far nowhere, and there is no page 0.
    let mut end = 0;
    for _ in 0..reader.count(2)? {
        let distance = codec::unzigzag(reader.varint()?);
        let length = reader.varint()?;
        if distance == 0 || length == 0 {
            return Err(reader.invalid("a run of pages has no pages, or is part of the one before it"));
        }
        if length > (MOST_PAGES - pages.len()) as u64 {
            return Err(reader.invalid("there are more pages than such a list may have"));
        }
        let first: i64 = distance.saturating_add(end);
        end = first.saturating_add(length as i64);
        match (PageNo::try_from(first), PageNo::try_from(end - 1)) {
            (Ok(first), Ok(last)) if first > 0 => pages.extend(first..=last),
            _ => return Err(reader.invalid("a page's number is not one")),
        }
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CRC_BYTES;
    use crate::codec::testing::{nothing_else_is_read, resigned};
    use proptest::prelude::*;

    fn list(pages: &[PageNo]) -> HotPages {
        HotPages { partition: PartitionId(7), epoch: 2, timestamp: 3, pages: pages.to_vec() }
    }

    #[test]
    fn neighbours_take_no_space() {
        let all: Vec<PageNo> = (2..2 + MOST_PAGES as PageNo).collect();
        assert!(list(&all).encode().len() < 48);
        let odd: Vec<PageNo> = (0..MOST_PAGES as PageNo).map(|i| 2 * i + 1).collect();
        assert!(list(&odd).encode().len() < 48 + 2 * MOST_PAGES);
    }

    #[test]
    fn the_ends_of_the_numbers_are_pages_too() {
        for pages in [&[][..], &[1], &[PageNo::MAX, 1], &[1, PageNo::MAX - 1, PageNo::MAX], &[5, 5, 4, 3]] {
            assert_eq!(HotPages::decode(&list(pages).encode()), Ok(list(pages)));
        }
        assert!(HotPages::decode(&list(&[0]).encode()).is_err(), "there is no page 0");
    }

    #[test]
    fn more_than_a_list_may_have_is_refused() {
        let mut bytes = list(&(1..=MOST_PAGES as PageNo).collect::<Vec<_>>()).encode();
        assert!(HotPages::decode(&bytes).is_ok());
        let length = bytes.len() - CRC_BYTES - 2;
        bytes[length] += 1;
        let error = HotPages::decode(&resigned(bytes)).unwrap_err();
        assert!(error.to_string().contains("more pages than"), "{error}");
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        nothing_else_is_read(&list(&[7, 8, 9, 40, 3, 4]).encode(), HotPages::decode);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(pages in prop::collection::vec(1..=PageNo::MAX, 0..200)) {
            prop_assert_eq!(HotPages::decode(&list(&pages).encode()), Ok(list(&pages)));
        }

        #[test]
        fn changed_bytes_are_rejected_or_decode_to_what_they_encode(
            pages in prop::collection::vec(1..200u32, 0..50),
            at: prop::sample::Index,
            value: u8,
        ) {
            let mut bytes = list(&pages).encode();
            let at = at.index(bytes.len() - CRC_BYTES);
            bytes[at] = value;
            let bytes = resigned(bytes);
            if let Ok(decoded) = HotPages::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}

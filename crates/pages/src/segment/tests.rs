use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::{PageNo, PartitionId, ZERO_PAGE};

fn page(seed: u64, noisy: bool) -> Page {
    let mut state = seed | 1;
    std::array::from_fn(|i| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if noisy || i < 50 { (state >> 24) as u8 } else { seed as u8 }
    })
}

fn build(pages: &[(u64, PageNo, Page)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut builder = SegmentBuilder::new(&mut out);
    for (partition, no, page) in pages {
        builder.push(PartitionId(*partition), *no, page, &mut out);
        assert_eq!(builder.bytes(), out.len() as u64);
    }
    builder.finish(&mut out);
    out
}

fn read(segment: &[u8], index: &SegmentIndex, partition: u64, no: PageNo) -> Option<Page> {
    let location = index.frame(PartitionId(partition), no)?;
    let start = location.offset as usize;
    let mut page = ZERO_PAGE;
    decode_frame(&segment[start..start + location.length as usize], &mut page).unwrap();
    Some(page)
}

#[test]
fn index_finds_exactly_the_stored_pages() {
    let pages =
        [(7, 3, page(1, true)), (2, 9, page(2, false)), (7, 1, page(3, false)), (7, 3, page(4, true))];
    let segment = build(&pages);
    let index = verify(&segment).unwrap();
    assert_eq!(index.pages(), 3);
    assert_eq!(read(&segment, &index, 7, 3), Some(pages[3].2), "the last push of a page must win");
    assert_eq!(read(&segment, &index, 2, 9), Some(pages[1].2));
    assert_eq!(read(&segment, &index, 2, 3), None);
    assert_eq!(read(&segment, &index, 3, 3), None);
    assert_eq!(index.frames(PartitionId(7)).map(|(no, _)| no).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(index.partitions().map(|p| p.0).collect::<Vec<_>>(), [2, 7]);
}

#[test]
fn frames_without_an_index_entry_are_ignored() {
    let mut out = Vec::new();
    let mut frames = FrameWriter::new(&mut out);
    let locations: Vec<_> = (0..4).map(|seed| frames.push(&page(seed, seed == 2), &mut out)).collect();
    frames.finish(vec![(PartitionId(3), 8, locations[3]), (PartitionId(3), 5, locations[1])], &mut out);
    let index = verify(&out).unwrap();
    assert_eq!(index.frames(PartitionId(3)).collect::<Vec<_>>(), [(5, locations[1]), (8, locations[3])]);
    assert_eq!(read(&out, &index, 3, 5), Some(page(1, false)));
    assert_eq!(read(&out, &index, 3, 8), Some(page(3, false)));
}

#[test]
fn incompressible_pages_are_stored_plain() {
    let segment = build(&[(1, 1, page(1, true)), (1, 2, page(1, false))]);
    let index = verify(&segment).unwrap();
    let length = |no| index.frame(PartitionId(1), no).unwrap().length as usize;
    assert_eq!(length(1), MAX_FRAME_BYTES);
    assert!(length(2) < 200);
}

#[test]
fn index_decodes_from_the_tail_and_not_from_less() {
    let segment = build(&[(1, 1, page(1, true)), (1, 2, page(2, true))]);
    let needed = tail_bytes(&segment[segment.len() - FOOTER_BYTES..]).unwrap() as usize;
    let whole = SegmentIndex::decode(&segment).unwrap();
    assert_eq!(SegmentIndex::decode(&segment[segment.len() - needed..]).unwrap(), whole);
    assert!(SegmentIndex::decode(&segment[segment.len() - needed + 1..]).is_err());
    assert!(tail_bytes(&segment[segment.len() - FOOTER_BYTES + 1..]).is_err());
}

#[test]
fn empty_segment_is_valid() {
    let index = verify(&build(&[])).unwrap();
    assert_eq!((index.pages(), index.partitions().count()), (0, 0));
}

#[test]
fn flipped_bits_and_truncation_are_detected() {
    let segment = build(&[(1, 1, page(1, false)), (1, 2, page(2, false)), (u64::MAX, u32::MAX, ZERO_PAGE)]);
    for at in 0..segment.len() {
        for bit in 0..8 {
            let mut damaged = segment.clone();
            damaged[at] ^= 1 << bit;
            assert!(verify(&damaged).is_err(), "bit {bit} of byte {at}");
        }
        assert!(verify(&segment[..at]).is_err(), "truncated to {at} bytes");
    }
}

/// A segment with an arbitrary index and valid checksums, so that only the index checks are tested.
fn with_index(index: &[u8], pages: u64) -> Vec<u8> {
    let mut out = build(&[]);
    out.truncate(HEADER_BYTES);
    out.extend_from_slice(&[0; 100]);
    let offset = out.len() as u64;
    out.extend_from_slice(index);
    let footer = out.len();
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&(index.len() as u64).to_le_bytes());
    out.extend_from_slice(&pages.to_le_bytes());
    out.extend_from_slice(&crc32fast::hash(index).to_le_bytes());
    out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    let crc = crc32fast::hash(&out[footer..]);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(FOOTER_MAGIC);
    out
}

#[test]
fn invalid_index_is_rejected() {
    assert!(SegmentIndex::decode(&with_index(&[1, 5, 1, 1, 0, 50], 1)).is_ok());
    for (index, pages, why) in [
        (&[1, 5, 1, 1, 0, 50][..], 2, "counts differ"),
        (&[1, 5, 1, 1, 0, 101], 1, "a frame beyond the frames"),
        (&[1, 5, 1, 1, 1, 50], 1, "a frame in the header"),
        (&[1, 5, 1, 1, 0, 4], 1, "a frame too short"),
        (&[1, 5, 1, 0, 0, 50], 1, "page 0"),
        (&[1, 5, 2, 1, 0, 50, 0, 0, 10], 2, "a page twice"),
        (&[2, 5, 1, 1, 0, 50, 0, 1, 1, 0, 10], 2, "a partition twice"),
        (&[2, 5, 0, 1, 1, 1, 0, 50, 0, 0], 1, "a partition without pages"),
        (&[1, 5, 1, 1, 0, 50, 0], 1, "trailing bytes"),
        (&[0xff, 0xff, 0xff, 0xff, 0x0f, 0, 0, 0, 0, 0], 0, "too many partitions"),
        (&[1, 5, 0xff, 0xff, 0xff, 0xff, 0x0f], 0, "too many pages"),
        (&[1, 5, 2, 0xff, 0xff, 0xff, 0xff, 0x0f, 0, 50, 1, 0, 10], 2, "a page number overflows"),
    ] {
        assert!(SegmentIndex::decode(&with_index(index, pages)).is_err(), "{why}");
    }
}

#[test]
fn frames_are_copied_unchanged_and_damage_is_detected() {
    let mut out = Vec::new();
    let mut builder = SegmentBuilder::new(&mut out);
    builder.push(PartitionId(4), 9, &[7; PAGE_SIZE], &mut out);
    builder.finish(&mut out);
    let location = SegmentIndex::decode(&out).unwrap().frame(PartitionId(4), 9).unwrap();
    let mut frame = out[location.offset as usize..][..location.length as usize].to_vec();
    check_frame(&frame).unwrap();
    let mut copy = Vec::new();
    let mut builder = SegmentBuilder::new(&mut copy);
    builder.push_frame(PartitionId(5), 9, &frame, &mut copy);
    builder.push(PartitionId(5), 10, &[8; PAGE_SIZE], &mut copy);
    builder.finish(&mut copy);
    let index = verify(&copy).unwrap();
    let at = index.frame(PartitionId(5), 9).unwrap().offset as usize;
    assert_eq!(copy[at..][..frame.len()], frame);
    for at in 0..frame.len() {
        frame[at] ^= 1;
        assert!(check_frame(&frame).is_err(), "byte {at}");
        frame[at] ^= 1;
        assert!(check_frame(&frame[..at]).is_err(), "truncated to {at} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn segment_round_trips(
        pages in prop::collection::vec((0..4u64, 1..30u32, any::<u64>(), any::<bool>()), 0..40),
    ) {
        let page_of = |(p, no, seed, noisy)| (p << 60, no, page(seed, noisy));
        let pages: Vec<_> = pages.into_iter().map(page_of).collect();
        let segment = build(&pages);
        let index = verify(&segment).unwrap();
        let expected: BTreeMap<_, _> = pages.iter().map(|(p, no, page)| ((*p, *no), *page)).collect();
        prop_assert_eq!(index.pages(), expected.len());
        for ((partition, no), page) in expected {
            prop_assert!(read(&segment, &index, partition, no) == Some(page));
        }
    }

    #[test]
    fn decoding_arbitrary_bytes_does_not_panic(
        index in prop::collection::vec(any::<u8>(), 0..60),
        pages: u64,
        frame in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let _ = SegmentIndex::decode(&with_index(&index, pages));
        let _ = SegmentIndex::decode(&index);
        let mut page = ZERO_PAGE;
        let _ = decode_frame(&frame, &mut page);
        // Also with a valid checksum, so that it reaches the decompressor.
        let mut checked = vec![ZSTD];
        checked.extend_from_slice(&frame_crc(ZSTD, &frame).to_le_bytes());
        checked.extend_from_slice(&frame);
        let _ = decode_frame(&checked, &mut page);
    }
}

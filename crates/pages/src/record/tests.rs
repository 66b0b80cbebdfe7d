use proptest::prelude::*;

use super::*;
use crate::{PAGE_SIZE, ZERO_PAGE};

fn header(kind: RecordKind) -> RecordHeader {
    RecordHeader {
        kind,
        partition: PartitionId(1 << 40),
        version: Version { lineage: 3, epoch: 9, number: 1 << 33 },
        transaction: 1 << 50,
        timestamp: 1 << 60,
        page_count: 12,
        previous: Some(1 << 32),
    }
}

#[test]
fn record_of_a_small_update_is_short() {
    let base = std::array::from_fn(|i| i as u8);
    let mut page = base;
    page[500..600].fill(0xaa);
    let mut builder = RecordBuilder::new(Vec::new());
    builder.begin(&header(RecordKind::Commit));
    builder.push_page(77, Some(&base), &page);
    assert!(builder.finish().len() < 150);
}

#[test]
fn head_can_be_patched_repeatedly_after_the_items() {
    let mut builder = RecordBuilder::new(vec![7; 5]);
    builder.begin(&header(RecordKind::Commit));
    builder.push_page(1, None, &ZERO_PAGE);
    let patches = [(5, 4), (u64::MAX, 0), (0, u64::MAX), (1 << 40, (1 << 40) - 3), (0, 0)];
    for (at, (number, previous)) in (0..).zip(patches) {
        let patch = Patch { number, previous, timestamp: u64::MAX - at, page_count: u32::MAX >> at };
        builder.patch(patch);
        let mut expected = header(RecordKind::Commit);
        expected.version.number = number;
        expected.timestamp = patch.timestamp;
        expected.page_count = patch.page_count;
        expected.previous = Some(previous);
        let record = decode(builder.finish()).unwrap();
        assert_eq!(record.header, expected);
        assert_eq!(record.pages().count(), 1);
    }
}

#[test]
fn shortest_record_has_min_bytes() {
    let mut builder = RecordBuilder::default();
    let smallest = RecordHeader {
        kind: RecordKind::Seal,
        partition: PartitionId(0),
        version: Version::default(),
        transaction: 0,
        timestamp: 0,
        page_count: 0,
        previous: None,
    };
    builder.begin(&smallest);
    assert_eq!(builder.finish().len(), MIN_BYTES);
}

#[test]
fn pushed_page_and_pushed_diff_give_the_same_record() {
    let noise: Page = std::array::from_fn(|i| (i * i / 7 + 1) as u8);
    let mut with_page = RecordBuilder::default();
    let mut with_diff = RecordBuilder::default();
    for length in [1, 100, 126, 127, 128, 1000, PAGE_SIZE] {
        let mut page = ZERO_PAGE;
        page[..length].copy_from_slice(&noise[..length]);
        let mut bytes = Vec::new();
        diff::encode(Some(&ZERO_PAGE), &page, &mut bytes);
        with_page.begin(&header(RecordKind::Commit));
        with_page.push_page(5, Some(&ZERO_PAGE), &page);
        with_diff.begin(&header(RecordKind::Commit));
        with_diff.push_diff(5, &bytes);
        assert_eq!(with_page.finish(), with_diff.finish(), "{length}");
    }
}

#[test]
fn cut_record_requires_exactly_one_cut_item() {
    let cut = CutPoint { log: LogId(5), position: 99 };
    let mut builder = RecordBuilder::default();
    builder.begin(&header(RecordKind::Cut));
    assert!(decode(builder.finish()).is_err());
    builder.push_cut(cut);
    assert_eq!(decode(builder.finish()).unwrap().cut(), Some(cut));
    builder.push_cut(cut);
    assert!(decode(builder.finish()).is_err());
    builder.begin(&header(RecordKind::Seal));
    builder.push_cut(cut);
    assert!(decode(builder.finish()).is_err());
}

#[test]
fn unknown_version_or_kind_is_rejected() {
    let mut builder = RecordBuilder::default();
    builder.begin(&header(RecordKind::Seal));
    let mut body = builder.finish().to_vec();
    body[1] = 8;
    assert_eq!(decode(&body).unwrap_err().at, 1);
    for unknown in [0, 4] {
        body[0] = unknown;
        let error = decode(&body).unwrap_err();
        assert_eq!(error.problem, Problem::FormatVersion { found: unknown.into(), newest: 3 });
    }
}

#[derive(Clone, Debug)]
enum Pushed {
    Page(PageNo, Vec<u8>),
    Outcome(Outcome),
    Segment(SegmentId),
}

fn pushed() -> impl Strategy<Value = Pushed> {
    prop_oneof![
        (1..=u32::MAX, prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(no, diff)| Pushed::Page(no, diff)),
        any::<(u64, bool)>()
            .prop_map(|(transaction, committed)| Pushed::Outcome(Outcome { transaction, committed })),
        any::<u128>().prop_map(|id| Pushed::Segment(SegmentId(id))),
    ]
}

fn any_header() -> impl Strategy<Value = RecordHeader> {
    let kinds = prop::sample::select(vec![
        RecordKind::Commit,
        RecordKind::Prepare,
        RecordKind::Decide,
        RecordKind::Open,
        RecordKind::Release,
        RecordKind::Seal,
    ]);
    (kinds, any::<u64>(), any::<(u64, u32, u64)>(), any::<(u64, u64, u32, u64)>()).prop_map(
        |(kind, partition, (lineage, epoch, number), (transaction, timestamp, page_count, previous))| {
            RecordHeader {
                kind,
                partition: PartitionId(partition),
                version: Version { lineage, epoch, number },
                transaction,
                timestamp,
                page_count,
                previous: Some(previous),
            }
        },
    )
}

fn build(header: &RecordHeader, items: &[Pushed]) -> Vec<u8> {
    let mut builder = RecordBuilder::default();
    builder.begin(header);
    for item in items {
        match item {
            Pushed::Page(no, diff) => builder.push_diff(*no, diff),
            Pushed::Outcome(outcome) => builder.push_outcome(*outcome),
            Pushed::Segment(id) => builder.push_segment(*id),
        }
    }
    builder.finish().to_vec()
}

/// Asserts that a body that decodes can be encoded and decoded again without loss.
fn assert_round_trips_if_valid(body: &[u8]) {
    let read = |body: &[u8]| {
        let record = decode(body).ok()?;
        let pages: Vec<_> = record.pages().map(|page| (page.no, page.diff.to_vec())).collect();
        let (outcomes, segments): (Vec<_>, Vec<_>) =
            (record.outcomes().collect(), record.segments().collect());
        Some((record.header, record.cut(), pages, outcomes, segments))
    };
    let Some((header, cut, pages, outcomes, segments)) = read(body) else { return };
    let mut builder = RecordBuilder::default();
    builder.begin(&header);
    cut.into_iter().for_each(|cut| builder.push_cut(cut));
    pages.iter().for_each(|(no, diff)| builder.push_diff(*no, diff));
    outcomes.iter().for_each(|outcome| builder.push_outcome(*outcome));
    segments.iter().for_each(|id| builder.push_segment(*id));
    // Records of format version 1 have no `previous`.
    let header = RecordHeader { previous: header.previous.or(Some(0)), ..header };
    assert_eq!(read(builder.finish()), Some((header, cut, pages, outcomes, segments)));
}

proptest! {
    #[test]
    fn record_round_trips(header in any_header(), items in prop::collection::vec(pushed(), 0..20)) {
        let body = build(&header, &items);
        let record = decode(&body).unwrap();
        prop_assert_eq!(record.header, header);
        let pages: Vec<_> = record.pages().map(|page| (page.no, page.diff.to_vec())).collect();
        let outcomes: Vec<_> = record.outcomes().collect();
        let segments: Vec<_> = record.segments().collect();
        let (mut p, mut o, mut s) = (vec![], vec![], vec![]);
        for item in items {
            match item {
                Pushed::Page(no, diff) => p.push((no, diff)),
                Pushed::Outcome(outcome) => o.push(outcome),
                Pushed::Segment(id) => s.push(id),
            }
        }
        prop_assert_eq!((pages, outcomes, segments), (p, o, s));
    }

    #[test]
    fn damaged_record_is_rejected_or_round_trips(
        header in any_header(),
        items in prop::collection::vec(pushed(), 0..5),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut body = build(&header, &items);
        for (index, bit) in flips {
            let at = index.index(body.len());
            body[at] ^= 1 << bit;
        }
        body.truncate(cut.index(body.len() + 1));
        assert_round_trips_if_valid(&body);
    }

    #[test]
    fn any_bytes_are_rejected_or_round_trip(body in prop::collection::vec(any::<u8>(), 0..200)) {
        assert_round_trips_if_valid(&body);
    }
}

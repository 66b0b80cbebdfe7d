//! Golden files: files of earlier versions stay readable, and encoders still write the same bytes.
//!
//! A format may change only together with its format version. The file of the old version is then
//! kept, and is still read. `UPDATE_GOLDEN=1 cargo test -p fulmar-pages --test golden` creates
//! missing files; it never changes an existing one.

use std::path::PathBuf;

use fulmar_pages::record::{self, CutPoint};
use fulmar_pages::{
    CatalogEntry, HoldState, HotPages, LogId, Manifest, Outcome, PAGE_SIZE, Page, PartitionId, RecordBuilder,
    RecordHeader, RecordKind, SegmentBuilder, SegmentId, SegmentRef, StoredCatalog, StoredHold, StoredTerm,
    TermState, Version, ZERO_PAGE, diff, segment,
};

/// Reads a golden file. Creates it from `written` if it is missing and UPDATE_GOLDEN is set.
fn golden(name: &str, written: &[u8]) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if !path.exists() && std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, written).unwrap();
    }
    std::fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; set UPDATE_GOLDEN=1 to create it", path.display()))
}

fn noise(seed: u32) -> Page {
    let mut state = seed | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    })
}

fn header(kind: RecordKind, partition: u64) -> RecordHeader {
    RecordHeader {
        kind,
        partition: PartitionId(partition),
        version: Version { lineage: 2, epoch: 300, number: 0x0102_0304_0506_0708 },
        transaction: 70_000,
        timestamp: 0x1112_1314_1516_1718,
        page_count: 0x2122_2324,
        previous: Some(0x3132_3334_3536_3738),
    }
}

fn diffs() -> [(Option<Page>, Page); 4] {
    let mut changed = noise(1);
    changed[100..110].fill(0xee);
    changed[4095] ^= 1;
    let mut sparse = ZERO_PAGE;
    sparse[7] = 7;
    sparse[3000..3003].copy_from_slice(b"end");
    [(Some(noise(1)), changed), (Some(noise(1)), noise(1)), (None, sparse), (None, noise(2))]
}

#[test]
fn page_diffs() {
    for (i, (base, page)) in diffs().into_iter().enumerate() {
        let mut bytes = Vec::new();
        diff::encode(base.as_ref(), &page, &mut bytes);
        let stored = golden(&format!("diff-v1-{i}.bin"), &bytes);
        assert_eq!(bytes, stored, "diff {i}");
        let mut made = base.unwrap_or([0xcc; PAGE_SIZE]);
        diff::apply(&stored, &mut made).unwrap();
        assert!(made == page, "diff {i}");
    }
}

/// A record of each kind. Together they contain every kind of item.
fn records() -> Vec<Vec<u8>> {
    use RecordKind::*;
    let outcome = |transaction, committed| Outcome { transaction, committed };
    [Commit, Prepare, Decide, Open, Release, Cut, Seal]
        .into_iter()
        .map(|kind| {
            let mut builder = RecordBuilder::default();
            builder.begin(&header(kind, if matches!(kind, Cut | Seal) { 0 } else { 7 }));
            match kind {
                Commit => {
                    for (no, (base, page)) in (200..).zip(diffs()) {
                        builder.push_page(no, base.as_ref(), &page);
                    }
                }
                Prepare => builder.push_segment(SegmentId(0x0123_4567_89ab_cdef << 64 | 5)),
                Decide => {
                    builder.push_outcome(outcome(70_001, true));
                    builder.push_outcome(outcome(70_002, false));
                }
                Cut => builder.push_cut(CutPoint { log: LogId(0xfedc << 100), position: 123_456_789 }),
                Open | Release | Seal => {}
            }
            builder.finish().to_vec()
        })
        .collect()
}

#[test]
fn log_records() {
    for (i, bytes) in records().into_iter().enumerate() {
        let stored = golden(&format!("record-v3-{}.bin", i + 1), &bytes);
        assert_eq!(bytes, stored, "record of kind {}", i + 1);
        check_record(i, &stored, Some(0x3132_3334_3536_3738));
        // Versions 2 and 1 have the numbers at fixed places. Version 1 has no previous version.
        check_record(i, &golden(&format!("record-v2-{}.bin", i + 1), &[]), Some(0x3132_3334_3536_3738));
        check_record(i, &golden(&format!("record-v1-{}.bin", i + 1), &[]), None);
    }
}

fn check_record(i: usize, stored: &[u8], previous: Option<u64>) {
    let record = record::decode(stored).unwrap();
    assert_eq!(record.header.previous, previous);
    assert_eq!(record.header.kind as usize, i + 1);
    assert_eq!(record.header.version.number, 0x0102_0304_0506_0708);
    assert_eq!(record.pages().count(), if i == 0 { 4 } else { 0 });
    assert_eq!(record.segments().count(), usize::from(i == 1));
    assert_eq!(record.outcomes().filter(|outcome| outcome.committed).count(), usize::from(i == 2));
    assert_eq!(record.cut().map(|cut| cut.position), (i == 5).then_some(123_456_789));
}

/// The output of zstd may change with its version, so only the uncompressed parts are compared.
#[test]
fn segments() {
    let mut text = ZERO_PAGE;
    text[..40].copy_from_slice(b"a page that shrinks, so zstd has it all!");
    let pages = [(9, 1, noise(1)), (9, 2, text), (4, 70_000, noise(2)), (9, 300, ZERO_PAGE)];
    let mut bytes = Vec::new();
    let mut builder = SegmentBuilder::new(&mut bytes);
    for (partition, no, page) in &pages {
        builder.push(PartitionId(*partition), *no, page, &mut bytes);
    }
    builder.finish(&mut bytes);
    let stored = golden("segment-v1.bin", &bytes);
    let plain = segment::HEADER_BYTES + segment::MAX_FRAME_BYTES;
    assert_eq!(bytes[..plain], stored[..plain], "header and first frame");
    let index = segment::verify(&stored).unwrap();
    assert_eq!(index.pages(), pages.len());
    for (partition, no, page) in pages {
        let location = index.frame(PartitionId(partition), no).unwrap();
        let start = location.offset as usize;
        let mut made = [0xcc; PAGE_SIZE];
        segment::decode_frame(&stored[start..start + location.length as usize], &mut made).unwrap();
        assert!(made == page, "page {no} of {partition}");
    }
}

#[test]
fn manifests() {
    let manifest = Manifest {
        partition: PartitionId(7),
        version: header(RecordKind::Commit, 7).version,
        page_count: 12,
        timestamp: 0x1112_1314_1516_1718,
        segments: vec![
            SegmentRef { id: SegmentId(0xa1 << 80), partition: PartitionId(4) },
            SegmentRef { id: SegmentId(0xb2 << 80), partition: PartitionId(7) },
        ],
        outcomes: vec![
            Outcome { transaction: 70_000, committed: true },
            Outcome { transaction: 5, committed: false },
        ],
        outcomes_horizon: 60_000,
    };
    let bytes = manifest.encode();
    let stored = golden("manifest-v1.bin", &bytes);
    assert_eq!(bytes, stored);
    assert_eq!(Manifest::decode(&stored), Ok(manifest));
}

#[test]
fn hot_pages() {
    let list = HotPages {
        partition: PartitionId(7),
        epoch: 300,
        timestamp: 0x1112_1314_1516_1718,
        pages: vec![7, 8, 9, 70_000, 70_001, 3, 4, 2, u32::MAX],
    };
    let bytes = list.encode();
    let stored = golden("hot-pages-v1.bin", &bytes);
    assert_eq!(bytes, stored);
    assert_eq!(HotPages::decode(&stored), Ok(list));
}

#[test]
fn manifest_holds() {
    for (name, state) in [
        ("fate-v1-condemned.bin", HoldState::Condemned),
        ("fate-v1-pinned.bin", HoldState::Pinned { until_unix_ms: 0x0192_1314_1516 }),
    ] {
        let decision = StoredHold {
            partition: PartitionId(7),
            epoch: 300,
            number: 0x1112_1314_1516_1718,
            sequence: 70_000,
            by: 0x2122 << 100,
            state,
        };
        let bytes = decision.encode();
        let stored = golden(name, &bytes);
        assert_eq!(bytes, stored);
        assert_eq!(StoredHold::decode(&stored), Ok(decision));
    }
}

#[test]
fn terms() {
    for (name, state) in
        [("term-v1-begun.bin", TermState::Begun), ("term-v1-ended.bin", TermState::Ended { wait_ms: 70_000 })]
    {
        let term = StoredTerm { number: 0x0012_1314, by: 0x2122 << 100, state };
        let bytes = term.encode();
        let stored = golden(name, &bytes);
        assert_eq!(bytes, stored);
        assert_eq!(StoredTerm::decode(&stored), Ok(term));
    }
}

#[test]
fn catalogs() {
    let entry = |key: &str, value: &[u8], modified| CatalogEntry {
        key: key.to_owned(),
        value: value.to_vec(),
        modified,
    };
    let catalog = StoredCatalog {
        number: 0x0102_0304_0506_0708,
        node: 0x1112 << 100,
        entries: vec![
            entry("counter/partition", br#"{"v":1,"next":66}"#, 3),
            entry("tenant/h\u{e9}ron", br#"{"v":1,"partition":2}"#, 70_000),
            entry("x", b"", 0),
        ],
    };
    let bytes = catalog.encode();
    let stored = golden("catalog-v1.bin", &bytes);
    assert_eq!(bytes, stored);
    assert_eq!(StoredCatalog::decode(&stored), Ok(catalog));
}

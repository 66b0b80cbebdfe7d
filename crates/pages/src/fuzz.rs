//! Fuzz targets for all decoders: arbitrary bytes are decoded or rejected, with memory proportional
//! to their length.
//!
//! Mutations break the checksums of the formats. If the first byte of an input is odd, the target
//! recomputes the checksums, so that the checks behind them are tested too.

use crate::{
    HotPages, Manifest, PAGE_SIZE, SegmentIndex, StoredCatalog, StoredHold, StoredTerm, ZERO_PAGE, diff,
    hot_pages, record, segment,
};
use fulmar_fuzz::Target;

/// Seeds: the golden files, each once with and once without recomputed checksums.
fn golden(prefix: &str) -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.retain(|file| file.file_name().unwrap().to_str().unwrap().starts_with(prefix));
    assert!(!files.is_empty());
    let seed = |signed: u8, file| [vec![signed], std::fs::read(file).unwrap()].concat();
    files.iter().flat_map(|file| [seed(0, file), seed(1, file)]).collect()
}

/// The input without its first byte. `sign` recomputes the checksums if that byte is odd.
fn signed(input: &[u8], sign: impl FnOnce(&mut [u8]) -> Option<()>) -> Vec<u8> {
    let Some((flag, bytes)) = input.split_first() else { return Vec::new() };
    let mut bytes = bytes.to_vec();
    if flag & 1 == 1 {
        let _ = sign(&mut bytes);
    }
    bytes
}

/// Writes the checksum of `bytes[from..to]` to `bytes[at..]`.
fn write_checksum(bytes: &mut [u8], from: usize, to: usize, at: usize) -> Option<()> {
    let crc = crc32fast::hash(bytes.get(from..to)?);
    bytes.get_mut(at..at + 4)?.copy_from_slice(&crc.to_le_bytes());
    Some(())
}

/// Recomputes the checksum at the end of a format that is read as a whole.
fn sign_end(bytes: &mut [u8]) -> Option<()> {
    let end = bytes.len().checked_sub(4)?;
    write_checksum(bytes, 0, end, end)
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok()
}

/// Recomputes the checksums of a segment's index and footer, and of the frames that the index
/// lists.
fn sign_segment(bytes: &mut [u8]) -> Option<()> {
    let footer = bytes.len().checked_sub(segment::FOOTER_BYTES)?;
    let index = footer.checked_sub(number(bytes, footer + 8)?)?;
    write_checksum(bytes, index, footer, footer + 24)?;
    write_checksum(bytes, footer, footer + 32, footer + 32)?;
    let read = SegmentIndex::decode(bytes).ok()?;
    for partition in read.partitions() {
        for (_, frame) in read.frames(partition) {
            let start = usize::try_from(frame.offset).ok()?;
            let frame = bytes.get_mut(start..start + frame.length as usize)?;
            let (head, payload) = frame.split_at_mut_checked(5)?;
            let mut hasher = crc32fast::Hasher::new();
            hasher.update(&head[..1]);
            hasher.update(payload);
            head[1..].copy_from_slice(&hasher.finalize().to_le_bytes());
        }
    }
    Some(())
}

#[test]
fn fuzz_segment() {
    let target = Target::new("segment", env!("CARGO_MANIFEST_DIR")).seeds(golden("segment"));
    target.max_length(16 << 10).max_allocation(256 << 10, 32).run(|input| {
        let bytes = signed(input, sign_segment);
        if let Ok(tail) = segment::tail_bytes(&bytes) {
            assert!(tail >= segment::FOOTER_BYTES as u64);
        }
        if let Ok(index) = SegmentIndex::decode(&bytes) {
            assert_eq!(
                index.partitions().map(|partition| index.frames(partition).count()).sum::<usize>(),
                index.pages()
            );
            for partition in index.partitions() {
                assert!(index.frames(partition).all(|(no, frame)| index.frame(partition, no) == Some(frame)));
            }
        }
        let _ = segment::verify(&bytes);
        let _ = segment::decode_frame(&bytes, &mut ZERO_PAGE.clone());
    });
}

#[test]
fn fuzz_manifest() {
    Target::new("manifest", env!("CARGO_MANIFEST_DIR"))
        .seeds(golden("manifest"))
        .max_allocation(64 << 10, 16)
        .run(|input| {
            let bytes = signed(input, sign_end);
            if let Ok(manifest) = Manifest::decode(&bytes) {
                assert_eq!(manifest.encode(), bytes, "each value must have exactly one encoding");
            }
        });
}

#[test]
fn fuzz_hot_pages() {
    Target::new("hot-pages", env!("CARGO_MANIFEST_DIR"))
        .seeds(golden("hot-pages"))
        .max_allocation(64 << 10, 16)
        .run(|input| {
            let bytes = signed(input, sign_end);
            if let Ok(list) = HotPages::decode(&bytes) {
                assert!(list.pages.len() <= hot_pages::MAX_PAGES && !list.pages.contains(&0));
                assert_eq!(list.encode(), bytes, "each value must have exactly one encoding");
            }
        });
}

#[test]
fn fuzz_fate() {
    Target::new("fate", env!("CARGO_MANIFEST_DIR")).seeds(golden("fate")).max_allocation(64 << 10, 16).run(
        |input| {
            let bytes = signed(input, sign_end);
            if let Ok(hold) = StoredHold::decode(&bytes) {
                assert_eq!(hold.encode(), bytes, "each value must have exactly one encoding");
            }
        },
    );
}

#[test]
fn fuzz_term() {
    Target::new("term", env!("CARGO_MANIFEST_DIR")).seeds(golden("term")).max_allocation(64 << 10, 16).run(
        |input| {
            let bytes = signed(input, sign_end);
            if let Ok(term) = StoredTerm::decode(&bytes) {
                assert_eq!(term.encode(), bytes, "each value must have exactly one encoding");
            }
        },
    );
}

#[test]
fn fuzz_catalog() {
    Target::new("catalog", env!("CARGO_MANIFEST_DIR"))
        .seeds(golden("catalog"))
        .max_allocation(64 << 10, 64)
        .run(|input| {
            let bytes = signed(input, sign_end);
            if let Ok(catalog) = StoredCatalog::decode(&bytes) {
                assert_eq!(catalog.encode(), bytes, "each value must have exactly one encoding");
            }
        });
}

#[test]
fn fuzz_record() {
    let seeds = golden("record").into_iter().map(|seed| seed[1..].to_vec());
    Target::new("record", env!("CARGO_MANIFEST_DIR")).seeds(seeds).max_allocation(64 << 10, 16).run(
        |input| {
            let Ok(read) = record::decode(input) else { return };
            let mut page = ZERO_PAGE;
            for entry in read.pages() {
                let _ = diff::apply(entry.diff, &mut page);
            }
            assert!(read.pages().count() + read.outcomes().count() + read.segments().count() <= input.len());
            read.cut();
        },
    );
}

#[test]
fn fuzz_diff() {
    let seeds = golden("diff").into_iter().map(|seed| seed[1..].to_vec());
    let target = Target::new("diff", env!("CARGO_MANIFEST_DIR")).seeds(seeds);
    target.max_length(2 * PAGE_SIZE).max_allocation(64 << 10, 16).run(|input| {
        let mut page = ZERO_PAGE;
        if diff::apply(input, &mut page).is_err() {
            return;
        }
        diff::is_full(input);
        let (mut again, mut other) = (Vec::new(), ZERO_PAGE);
        diff::encode(None, &page, &mut again);
        diff::apply(&again, &mut other).unwrap();
        assert!(page == other);
    });
}

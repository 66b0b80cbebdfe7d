//! File format of the disk cache: a header, entries, and at the end of a full file a directory.
//!
//! ```text
//!   file      = header (16 bytes), entry*, and if finished: directory, footer (32 bytes)
//!   header    = "FULMCACH", format version u32, zeros
//!   entry     = crc u32, length u32, segment id u128, offset u64, `length` bytes,
//!               zeros up to a multiple of 8
//!   directory = (hash u64, position u32)*
//!   footer    = start of the directory u64, entries u32, crc of the directory u32,
//!               format version u32, crc of these 20 bytes u32, "FULMCACE"
//! ```
//!
//! An entry's checksum covers everything after it except the padding, including the **key**. It
//! therefore proves that the entry is complete, and which key it belongs to. Whatever a crash, a
//! disk or a reader with an outdated position makes of a file, a value is returned for a key only
//! if it was once written for this key. The directory and its hashes are only hints.

use std::ops::Range;

use fulmar_pages::SegmentId;

/// Length of a file's header.
pub(super) const HEADER_BYTES: usize = 16;
/// Length of an entry's head, before its value.
pub(super) const HEAD_BYTES: usize = 32;
/// Length of a file's footer.
pub(super) const FOOTER_BYTES: usize = 32;
/// Length of a directory entry.
pub(super) const DIRECTORY_BYTES: usize = 12;
/// Maximum length of an entry's value.
pub(super) const MAX_VALUE_BYTES: usize = 4 << 20;
/// Positions of entries are multiples of this.
pub(super) const ALIGNMENT: usize = 8;

const MAGIC: &[u8; 8] = b"FULMCACH";
const FOOTER_MAGIC: &[u8; 8] = b"FULMCACE";
const FORMAT_VERSION: u32 = 1;
/// Number of bytes of the footer that its checksum covers.
const FOOTER_CHECKED: usize = 20;

/// Identifies cached data: a part of a segment, which is immutable and whose id is never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    segment: SegmentId,
    offset: u64,
}

impl Key {
    /// The frame at this offset of a segment.
    pub(crate) fn frame(segment: SegmentId, offset: u64) -> Key {
        Key { segment, offset }
    }

    /// A segment's index and footer.
    pub(crate) fn end(segment: SegmentId) -> Key {
        Key { segment, offset: u64::MAX }
    }

    /// Hash by which an entry is found. Two keys of one segment never collide, because the hash is
    /// a one-to-one function of the offset. Collisions of keys of different segments are extremely
    /// unlikely, because ids are random, and are detected from the entry itself.
    pub(super) fn hash(&self) -> u64 {
        let id = self.segment.0;
        let mixed = ((id >> 64) as u64 ^ id as u64).wrapping_add(self.offset);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 32
    }
}

pub(super) fn header() -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    header
}

/// Length of an entry with a value of this length.
pub(super) fn entry_bytes(value: usize) -> usize {
    (HEAD_BYTES + value).next_multiple_of(ALIGNMENT)
}

/// Appends an entry.
pub(super) fn push_entry(key: Key, value: &[u8], out: &mut Vec<u8>) {
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(&key.segment.0.to_le_bytes());
    out.extend_from_slice(&key.offset.to_le_bytes());
    out.extend_from_slice(value);
    let crc = crc32fast::hash(&out[at + 4..]);
    out[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    out.resize(at + entry_bytes(value.len()), 0);
}

/// Length of the value of an entry with this head. Returns None if it is not a valid head.
pub(super) fn value_bytes(head: &[u8]) -> Option<usize> {
    let value = u32_at(head, 4)? as usize;
    (1..=MAX_VALUE_BYTES).contains(&value).then_some(value)
}

/// Returns the entry's key, and the range of its value. Returns None if it is damaged or not an
/// entry. Ignores bytes after the entry.
pub(super) fn check_entry(entry: &[u8]) -> Option<(Key, Range<usize>)> {
    let end = HEAD_BYTES + value_bytes(entry)?;
    let checked = entry.get(4..end)?;
    if u32_at(entry, 0)? != crc32fast::hash(checked) {
        return None;
    }
    let segment = SegmentId(u128::from(u64_at(entry, 8)?) | u128::from(u64_at(entry, 16)?) << 64);
    Some((Key { segment, offset: u64_at(entry, 24)? }, HEAD_BYTES..end))
}

/// Positions of a file's entries by the hashes of their keys.
pub(super) type Directory = Vec<(u64, u32)>;

/// Encodes the directory and footer of a file whose entries end at `end`.
pub(super) fn encode_directory(directory: &Directory, end: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(directory.len() * DIRECTORY_BYTES + FOOTER_BYTES);
    for (hash, position) in directory {
        out.extend_from_slice(&hash.to_le_bytes());
        out.extend_from_slice(&position.to_le_bytes());
    }
    let crc = crc32fast::hash(&out);
    let footer = out.len();
    out.extend_from_slice(&end.to_le_bytes());
    out.extend_from_slice(&(directory.len() as u32).to_le_bytes());
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    let crc = crc32fast::hash(&out[footer..]);
    out.extend_from_slice(&crc.to_le_bytes());
    out.extend_from_slice(FOOTER_MAGIC);
    out
}

/// Decodes the footer of a file of `file_bytes`: the range of the directory, and its checksum.
/// Returns None if the footer is damaged or has another version.
pub(super) fn decode_footer(footer: &[u8], file_bytes: u64) -> Option<(Range<u64>, u32)> {
    let is_whole = footer.len() == FOOTER_BYTES
        && footer.ends_with(FOOTER_MAGIC)
        && u32_at(footer, 16)? == FORMAT_VERSION
        && u32_at(footer, FOOTER_CHECKED)? == crc32fast::hash(&footer[..FOOTER_CHECKED]);
    let (begin, entries) = (u64_at(footer, 0)?, u32_at(footer, 8)?);
    let end = begin.checked_add(u64::from(entries) * DIRECTORY_BYTES as u64)?;
    (is_whole && end.checked_add(FOOTER_BYTES as u64)? == file_bytes)
        .then_some((begin..end, u32_at(footer, 12)?))
}

/// Decodes a directory that starts at `begin`. Returns None if it is damaged.
pub(super) fn decode_directory(bytes: &[u8], begin: u64, crc: u32) -> Option<Directory> {
    if crc32fast::hash(bytes) != crc {
        return None;
    }
    let entry = |bytes: &[u8]| Some((u64_at(bytes, 0)?, u32_at(bytes, 8)?));
    let directory: Directory = bytes.chunks_exact(DIRECTORY_BYTES).map(entry).collect::<Option<_>>()?;
    let is_place = |at: u32| at as usize >= HEADER_BYTES && (at as usize).is_multiple_of(ALIGNMENT);
    directory.iter().all(|(_, at)| is_place(*at) && u64::from(*at) < begin).then_some(directory)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key { segment: SegmentId(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff), offset: 16 };

    /// A file of the first version. Later versions read or discard it.
    #[test]
    fn format_matches_the_golden_file() {
        let mut file = header().to_vec();
        push_entry(KEY, b"some bytes", &mut file);
        let end = file.len() as u64;
        file.extend(encode_directory(&vec![(KEY.hash(), 16)], end));
        assert!(file == include_bytes!("../../tests/golden/disk-cache-v1.bin"));
    }

    #[test]
    fn damaged_and_truncated_entries_are_detected() {
        let mut entry = Vec::new();
        push_entry(KEY, b"some bytes", &mut entry);
        assert_eq!(entry.len(), entry_bytes(10));
        let (key, value) = check_entry(&entry).unwrap();
        assert_eq!((key, &entry[value.clone()]), (KEY, &b"some bytes"[..]));
        for bit in 0..value.end * 8 {
            entry[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check_entry(&entry), None, "bit {bit}");
            entry[bit / 8] ^= 1 << (bit % 8);
        }
        for end in 0..value.end {
            assert_eq!(check_entry(&entry[..end]), None, "{end} bytes");
        }
        assert_eq!(check_entry(&[0; 64]), None);
    }

    #[test]
    fn damaged_directory_is_rejected() {
        let entries = vec![(7, 16), (8, 1024)];
        let mut bytes = encode_directory(&entries, 2048);
        let file_bytes = 2048 + bytes.len() as u64;
        let decode = |bytes: &[u8]| {
            let (place, crc) = decode_footer(&bytes[bytes.len() - FOOTER_BYTES..], file_bytes)?;
            let begin = bytes.len() - FOOTER_BYTES - (place.end - place.start) as usize;
            decode_directory(&bytes[begin..bytes.len() - FOOTER_BYTES], place.start, crc)
        };
        assert_eq!(decode(&bytes), Some(entries));
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let beyond = encode_directory(&vec![(7, 2048)], 2048);
        let (place, crc) = decode_footer(&beyond[12..], 2048 + 44).unwrap();
        assert_eq!(
            decode_directory(&beyond[..12], place.start, crc),
            None,
            "a position after the last entry must be rejected"
        );
        assert_eq!(
            decode_footer(&beyond[12..], 2048 + 45),
            None,
            "a footer of a file of another length must be rejected"
        );
    }
}

//! The bytes of a cache file: a header, entries, and when it is full a directory of them.
//!
//! ```text
//!   file      = header (16 bytes), entry*, and if it was ended: directory, footer (32 bytes)
//!   header    = "FULMCACH", format version u32, zeros
//!   entry     = crc u32, length u32, segment id u128, offset u64, `length` bytes, zeros up to a multiple of 8
//!   directory = (hash u64, position u32)*
//!   footer    = where the directory begins u64, entries u32, crc of the directory u32, format version u32,
//!               crc of these 20 bytes u32, "FULMCACE"
//! ```
//!
//! An entry's checksum covers all that follows it but the zeros, so that an entry tells not only whether it is whole but also
//! **whose** it is. Whatever a crash, a disk or a reader with an old position makes of a file: bytes are answered for a key
//! only if they were once written for this key. The directory and the hashes in it are hints.

use std::ops::Range;

use fulmar_pages::SegmentId;

/// Bytes of a file's header.
pub(super) const HEADER_BYTES: usize = 16;
/// Bytes of an entry before what it holds.
pub(super) const HEAD_BYTES: usize = 32;
/// Bytes of a file's footer.
pub(super) const FOOTER_BYTES: usize = 32;
/// Bytes that the directory has for an entry.
pub(super) const DIRECTORY_BYTES: usize = 12;
/// The most that an entry holds.
pub(super) const MAX_HELD_BYTES: usize = 4 << 20;
/// Positions of entries are multiples of it.
pub(super) const ALIGNMENT: usize = 8;

const MAGIC: &[u8; 8] = b"FULMCACH";
const FOOTER_MAGIC: &[u8; 8] = b"FULMCACE";
const FORMAT_VERSION: u32 = 1;
/// Of the footer what its checksum covers.
const FOOTER_CHECKED: usize = 20;

/// Names what is cached: bytes of a segment, which are never changed and whose id is never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Key {
    segment: SegmentId,
    offset: u64,
}

impl Key {
    /// The frame at this place of a segment.
    pub(crate) fn frame(segment: SegmentId, offset: u64) -> Key {
        Key { segment, offset }
    }

    /// A segment's index and footer.
    pub(crate) fn end(segment: SegmentId) -> Key {
        Key { segment, offset: u64::MAX }
    }

    /// By which an entry is found. Two keys of one segment never have the same: ids are random, and the rest is one-to-one. That
    /// of other segments is as good as unheard of, and found out by the entry itself.
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

/// Bytes of an entry that holds so many.
pub(super) fn entry_bytes(held: usize) -> usize {
    (HEAD_BYTES + held).next_multiple_of(ALIGNMENT)
}

/// Appends an entry.
pub(super) fn push_entry(key: Key, held: &[u8], out: &mut Vec<u8>) {
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(held.len() as u32).to_le_bytes());
    out.extend_from_slice(&key.segment.0.to_le_bytes());
    out.extend_from_slice(&key.offset.to_le_bytes());
    out.extend_from_slice(held);
    let crc = crc32fast::hash(&out[at + 4..]);
    out[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    out.resize(at + entry_bytes(held.len()), 0);
}

/// How many bytes the entry holds that begins so, if it can be one.
pub(super) fn held_bytes(head: &[u8]) -> Option<usize> {
    let held = u32_at(head, 4)? as usize;
    (1..=MAX_HELD_BYTES).contains(&held).then_some(held)
}

/// Whose entry this is, and where in it is what it holds. `None` if it is damaged, or none. What stands behind it is not looked at.
pub(super) fn check_entry(entry: &[u8]) -> Option<(Key, Range<usize>)> {
    let end = HEAD_BYTES + held_bytes(entry)?;
    let checked = entry.get(4..end)?;
    if u32_at(entry, 0)? != crc32fast::hash(checked) {
        return None;
    }
    let segment = SegmentId(u128::from(u64_at(entry, 8)?) | u128::from(u64_at(entry, 16)?) << 64);
    Some((Key { segment, offset: u64_at(entry, 24)? }, HEAD_BYTES..end))
}

/// Where a file's entries are, by the hashes of their keys.
pub(super) type Directory = Vec<(u64, u32)>;

/// What ends a file whose entries end at `end`.
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

/// What a footer tells of a file of so many bytes: where the directory lies, and its checksum. `None` if it is none of this version.
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

/// The entries of a directory that begins at `begin`. `None` if it is damaged.
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

    /// What the first version wrote: later ones read it, or throw it away.
    #[test]
    fn the_format_stays() {
        let mut file = header().to_vec();
        push_entry(KEY, b"some bytes", &mut file);
        let end = file.len() as u64;
        file.extend(encode_directory(&vec![(KEY.hash(), 16)], end));
        assert!(file == include_bytes!("../../tests/golden/disk-cache-v1.bin"));
    }

    #[test]
    fn an_entry_is_told_from_every_other() {
        let mut entry = Vec::new();
        push_entry(KEY, b"some bytes", &mut entry);
        assert_eq!(entry.len(), entry_bytes(10));
        let (key, held) = check_entry(&entry).unwrap();
        assert_eq!((key, &entry[held.clone()]), (KEY, &b"some bytes"[..]));
        for bit in 0..held.end * 8 {
            entry[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check_entry(&entry), None, "bit {bit}");
            entry[bit / 8] ^= 1 << (bit % 8);
        }
        for end in 0..held.end {
            assert_eq!(check_entry(&entry[..end]), None, "{end} bytes");
        }
        assert_eq!(check_entry(&[0; 64]), None);
    }

    #[test]
    fn a_damaged_directory_is_none() {
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
        assert_eq!(decode_directory(&beyond[..12], place.start, crc), None, "it lies where no entry is");
        assert_eq!(decode_footer(&beyond[12..], 2048 + 45), None, "of a file of another length");
    }
}

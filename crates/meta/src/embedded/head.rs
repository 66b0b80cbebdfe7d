//! The head of the metadata store: its last revision and a digest of its contents, in a separate
//! file.
//!
//! SQLite ends the recovery of its write-ahead log at the first bad checksum, without an error. A
//! damaged log, or an older copy of the file, is therefore a valid file of an earlier revision. The
//! head file records the last acknowledged revision:
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 8 | `FULMHEAD` |
//! | 8 | 4 | format version: 1 |
//! | 12 | 8 | count of this slot's write, from 1 |
//! | 20 | 8 | revision |
//! | 28 | 16 | digest of the contents at this revision |
//! | 44 | 4 | CRC-32 of bytes 0-43 |
//!
//! The file has 8192 bytes: a slot at 0 and one at 4096, zeros elsewhere. Writes alternate between
//! the slots, so a torn write leaves the other slot intact. The valid slot with the greater count
//! is the head.
//!
//! The digest is the sum modulo 2^128 of the XXH3-128 hashes of all entries. The input of a hash
//! is: length of the key (8 bytes), the key, the revision that put the entry (8 bytes), the value.
//! A transaction updates the sum with the entries that it changes. The digest detects damage and
//! old copies. It does not protect against an attacker with write access to the files.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

use crate::Revision;

const MAGIC: &[u8; 8] = b"FULMHEAD";
const FORMAT_VERSION: u32 = 1;
const SLOT_BYTES: usize = 48;
const SLOT_STRIDE: usize = 4096;
const FILE_BYTES: usize = 2 * SLOT_STRIDE;

/// The sum of the hashes of all entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Digest(pub(super) u128);

impl Digest {
    pub(super) fn add(&mut self, key: &[u8], value: &[u8], modified: Revision) {
        self.0 = self.0.wrapping_add(hash(key, value, modified));
    }

    pub(super) fn remove(&mut self, key: &[u8], value: &[u8], modified: Revision) {
        self.0 = self.0.wrapping_sub(hash(key, value, modified));
    }
}

fn hash(key: &[u8], value: &[u8], modified: Revision) -> u128 {
    let (length, revision) = ((key.len() as u64).to_le_bytes(), modified.0.to_le_bytes());
    xxh3_128(&[&length, key, &revision, value].concat())
}

/// A revision and the digest of the contents at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) revision: Revision,
    pub(super) digest: Digest,
}

/// The head file.
pub(super) struct HeadFile {
    path: PathBuf,
    file: File,
    /// Count of the last write.
    count: u64,
}

/// The state of the head file at the start.
#[derive(Debug)]
pub(super) enum HeadState {
    Missing,
    /// The reason why it is unusable.
    Damaged(String),
    Present(Head, u64),
}

impl HeadFile {
    /// The path of the head file of a metadata file: `meta.head` for `meta.db`.
    pub(super) fn path_of(metadata: &Path) -> PathBuf {
        metadata.with_extension("head")
    }

    /// Reads the file and changes nothing.
    pub(super) fn read(path: &Path) -> io::Result<HeadState> {
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HeadState::Missing),
            Err(error) => return Err(error),
        };
        Ok(decode(&bytes))
    }

    /// Creates or replaces the file, with this head in both slots. Durable when this returns.
    pub(super) fn create(path: &Path, head: Head) -> io::Result<Self> {
        let mut bytes = vec![0; FILE_BYTES];
        for count in [2, 1] {
            let at = slot_of(count);
            bytes[at..at + SLOT_BYTES].copy_from_slice(&encode(head, count));
        }
        // Renamed into place, so that after a crash the file is complete or has its old contents.
        let new = path.with_extension("head-new");
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        if let Some(directory) = path.parent() {
            File::open(directory)?.sync_all()?;
        }
        Ok(HeadFile { path: path.to_owned(), file, count: 2 })
    }

    /// Opens the file, whose last write had this count.
    pub(super) fn open(path: &Path, count: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(HeadFile { path: path.to_owned(), file, count })
    }

    /// Records a head. Durable when this returns.
    pub(super) fn write(&mut self, head: Head) -> io::Result<()> {
        let count = self.count + 1;
        self.file.write_all_at(&encode(head, count), slot_of(count) as u64)?;
        self.file.sync_data()?;
        self.count = count;
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes writes fail later.
    #[cfg(test)]
    pub(super) fn make_read_only(&mut self) {
        self.file = File::open(&self.path).unwrap();
    }
}

fn slot_of(count: u64) -> usize {
    (count % 2) as usize * SLOT_STRIDE
}

fn encode(head: Head, count: u64) -> [u8; SLOT_BYTES] {
    let mut slot = [0; SLOT_BYTES];
    slot[..8].copy_from_slice(MAGIC);
    slot[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    slot[12..20].copy_from_slice(&count.to_le_bytes());
    slot[20..28].copy_from_slice(&head.revision.0.to_le_bytes());
    slot[28..44].copy_from_slice(&head.digest.0.to_le_bytes());
    let checksum = crc32fast::hash(&slot[..44]);
    slot[44..].copy_from_slice(&checksum.to_le_bytes());
    slot
}

fn decode(bytes: &[u8]) -> HeadState {
    if bytes.len() != FILE_BYTES {
        return HeadState::Damaged(format!("expected {FILE_BYTES} bytes, found {}", bytes.len()));
    }
    let mut newest = None;
    for at in [0, SLOT_STRIDE] {
        let slot = &bytes[at..at + SLOT_BYTES];
        let is_whole = slot.starts_with(MAGIC) && crc32fast::hash(&slot[..44]).to_le_bytes() == slot[44..];
        if !is_whole {
            continue;
        }
        let version = u32::from_le_bytes(array(&slot[8..12]));
        if version != FORMAT_VERSION {
            return HeadState::Damaged(format!(
                "unsupported format version {version} (supported: {FORMAT_VERSION})"
            ));
        }
        let count = u64::from_le_bytes(array(&slot[12..20]));
        let head = Head {
            revision: Revision(u64::from_le_bytes(array(&slot[20..28]))),
            digest: Digest(u128::from_le_bytes(array(&slot[28..44]))),
        };
        if newest.is_none_or(|(_, newest)| newest < count) {
            newest = Some((head, count));
        }
    }
    match newest {
        Some((head, count)) => HeadState::Present(head, count),
        None => HeadState::Damaged("no slot has a valid checksum".to_owned()),
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Head =
        Head { revision: Revision(7), digest: Digest(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10) };

    fn present(path: &Path) -> (Head, u64) {
        match HeadFile::read(path).unwrap() {
            HeadState::Present(head, count) => (head, count),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn newest_intact_slot_is_the_head() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("meta.head");
        assert!(matches!(HeadFile::read(&path).unwrap(), HeadState::Missing));
        let mut file = HeadFile::create(&path, Head::default()).unwrap();
        let next = Head { revision: Revision(8), ..HEAD };
        file.write(HEAD).unwrap();
        file.write(next).unwrap();
        assert_eq!(present(&path), (next, 4));
        let good = std::fs::read(&path).unwrap();
        for at in 0..SLOT_BYTES {
            // Damage the slot of count 4: the other slot is the head.
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(present(&path), (HEAD, 3), "byte {at}");
            bytes[SLOT_STRIDE + at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert!(matches!(HeadFile::read(&path).unwrap(), HeadState::Damaged(_)), "byte {at}");
        }
        for bytes in [&[], &good[..100], &good[..4096], &[good.as_slice(), &[0]].concat()] {
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(HeadFile::read(&path).unwrap(), HeadState::Damaged(_)));
        }
        std::fs::write(&path, good).unwrap();
        let mut file = HeadFile::open(&path, 4).unwrap();
        file.write(HEAD).unwrap();
        assert_eq!(present(&path), (HEAD, 5));
    }

    #[test]
    fn format_matches_the_golden_file() {
        let golden = include_bytes!("../../tests/golden/head-v1.bin");
        let mut bytes = vec![0; FILE_BYTES];
        bytes[..SLOT_BYTES].copy_from_slice(&encode(HEAD, 4));
        bytes[SLOT_STRIDE..SLOT_STRIDE + SLOT_BYTES].copy_from_slice(&encode(Head::default(), 3));
        assert_eq!(bytes, golden);
        assert!(matches!(decode(golden), HeadState::Present(HEAD, 4)));
    }

    #[test]
    fn digest_depends_on_all_parts_of_all_entries_but_not_on_their_order() {
        type Entry = (&'static [u8], &'static [u8], u64);
        let entries: [Entry; 3] = [(b"a", b"1", 1), (b"b", b"2", 2), (b"ab", b"", 3)];
        let of = |entries: &[Entry]| {
            let mut digest = Digest::default();
            entries.iter().for_each(|(key, value, revision)| digest.add(key, value, Revision(*revision)));
            digest
        };
        let all = of(&entries);
        assert_eq!(of(&[entries[2], entries[0], entries[1]]), all);
        let others: [[Entry; 3]; 4] = [
            [(b"A", b"1", 1), entries[1], entries[2]],
            [(b"a", b"3", 1), entries[1], entries[2]],
            [(b"a", b"1", 4), entries[1], entries[2]],
            [entries[0], entries[1], (b"a", b"b", 3)],
        ];
        others.iter().for_each(|other| assert_ne!(of(other), all));
        let mut two = all;
        two.remove(b"ab", b"", Revision(3));
        assert_eq!(two, of(&entries[..2]));
    }

    #[test]
    fn head_file_is_in_the_directory_of_the_metadata_file() {
        assert_eq!(HeadFile::path_of(Path::new("/data/meta.db")), Path::new("/data/meta.head"));
    }
}

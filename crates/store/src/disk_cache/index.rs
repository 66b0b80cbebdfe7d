//! The in-memory index of the disk cache: maps key hashes to entries.
//!
//! An entry takes 16 bytes, or 20 to 40 bytes including the free space of the hash tables. A table
//! doubles in one step while other threads wait for it, so the index consists of many small tables.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Maximum size of an entry, directly after a table has grown.
pub(super) const MAX_ENTRY_BYTES: u64 = 40;

const TABLES: usize = 64;
/// Bits of the hash that select the table. They differ from the bits that the table uses to find a
/// slot and to distinguish entries.
const TABLE_SHIFT: u32 = 48;
/// Set in the position of an entry that was used. Positions are multiples of 8, so the bit is free.
const USED: u32 = 1;

/// Location of an entry: a file, and a position in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EntryLocation {
    pub(super) file: u32,
    pub(super) at: u32,
}

/// A hasher that returns its input, because keys are already hashes.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Maps hashes to the file and the position with its used bit.
type Table = HashMap<u64, (u32, u32), BuildHasherDefault<IdentityHasher>>;

/// Locations of entries by hash.
pub(super) struct Index {
    tables: [Mutex<Table>; TABLES],
    entries: AtomicUsize,
}

impl Index {
    pub(super) fn new() -> Index {
        Index { tables: std::array::from_fn(|_| Mutex::default()), entries: AtomicUsize::new(0) }
    }

    fn table(&self, hash: u64) -> &Mutex<Table> {
        &self.tables[(hash >> TABLE_SHIFT) as usize % TABLES]
    }

    pub(super) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    pub(super) fn contains(&self, hash: u64) -> bool {
        self.table(hash).lock().contains_key(&hash)
    }

    /// Finds an entry. If `mark` is true, marks it as used.
    pub(super) fn find(&self, hash: u64, mark: bool) -> Option<EntryLocation> {
        let mut table = self.table(hash).lock();
        let (file, at) = table.get_mut(&hash)?;
        *at |= if mark { USED } else { 0 };
        Some(EntryLocation { file: *file, at: *at & !USED })
    }

    /// Inserts or moves an entry.
    pub(super) fn insert(&self, hash: u64, location: EntryLocation) {
        if self.table(hash).lock().insert(hash, (location.file, location.at)).is_none() {
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Inserts an entry unless the hash is present.
    pub(super) fn insert_if_absent(&self, hash: u64, location: EntryLocation) {
        let mut table = self.table(hash).lock();
        if let std::collections::hash_map::Entry::Vacant(vacant) = table.entry(hash) {
            vacant.insert((location.file, location.at));
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns true if the entry is at this location and was used since it was inserted there.
    pub(super) fn is_marked(&self, hash: u64, location: EntryLocation) -> bool {
        self.table(hash).lock().get(&hash) == Some(&(location.file, location.at | USED))
    }

    /// Removes an entry if it is at this location.
    pub(super) fn remove(&self, hash: u64, location: EntryLocation) {
        let mut table = self.table(hash).lock();
        if table.get(&hash).is_some_and(|(file, at)| (*file, at & !USED) == (location.file, location.at)) {
            table.remove(&hash);
            self.entries.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Removes all entries of a file whose directory cannot be read. Scans the whole index.
    pub(super) fn remove_file(&self, file: u32) {
        for table in &self.tables {
            let mut table = table.lock();
            let before = table.len();
            table.retain(|_, (other, _)| *other != file);
            self.entries.fetch_sub(before - table.len(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_marked_and_removed() {
        let index = Index::new();
        let location = |file, at| EntryLocation { file, at };
        for hash in 0..1000_u64 {
            index.insert(hash << 40, location(1, hash as u32 * 8));
        }
        let hash = 7 << 40;
        assert_eq!(index.find(hash, false), Some(location(1, 56)));
        assert!(!index.is_marked(hash, location(1, 56)));
        assert_eq!(index.find(hash, true), Some(location(1, 56)));
        assert!(index.is_marked(hash, location(1, 56)) && !index.is_marked(hash, location(2, 56)));
        index.insert_if_absent(hash, location(3, 8));
        assert_eq!(index.find(hash, false), Some(location(1, 56)));
        index.insert(hash, location(2, 16));
        assert!(!index.is_marked(hash, location(2, 16)), "a moved entry must not be marked");
        index.remove(hash, location(1, 56));
        assert_eq!((index.find(hash, false), index.entries()), (Some(location(2, 16)), 1000));
        index.remove_file(1);
        assert_eq!((index.entries(), index.contains(hash), index.contains(8 << 40)), (1, true, false));
        index.find(hash, true);
        index.remove(hash, location(2, 16));
        assert_eq!(index.entries(), 0, "a marked entry must be removed too");
    }
}

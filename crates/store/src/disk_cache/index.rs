//! Where entries are, by the hashes of their keys: what the cache holds in memory.
//!
//! An entry takes 16 bytes, and with the room that hash tables have between their entries some 20 to 40. Tables grow to
//! twice their size in one go, while others wait for them; so there are many small ones.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// What an entry takes at most, just after a table has grown.
pub(super) const MOST_ENTRY_BYTES: u64 = 40;

const TABLES: usize = 64;
/// The bits of a hash that say the table: neither those by which the table finds a place nor those by which it tells entries apart.
const TABLE_SHIFT: u32 = 48;
/// Positions are multiples of 8, so there is room for a mark.
const HIT: u32 = 1;

/// A file, and a position in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) file: u32,
    pub(super) at: u32,
}

/// Hashes are hashes already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
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

/// The file, and the position with its mark.
type Table = HashMap<u64, (u32, u32), BuildHasherDefault<AsItIs>>;

/// Places by hashes.
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

    /// Where an entry is. `mark` it as one that was wanted.
    pub(super) fn find(&self, hash: u64, mark: bool) -> Option<Place> {
        let mut table = self.table(hash).lock();
        let (file, at) = table.get_mut(&hash)?;
        *at |= if mark { HIT } else { 0 };
        Some(Place { file: *file, at: *at & !HIT })
    }

    /// An entry is there from now on, wherever it was before.
    pub(super) fn insert(&self, hash: u64, place: Place) {
        if self.table(hash).lock().insert(hash, (place.file, place.at)).is_none() {
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An entry is there, unless a place is known for it.
    pub(super) fn insert_if_absent(&self, hash: u64, place: Place) {
        let mut table = self.table(hash).lock();
        if let std::collections::hash_map::Entry::Vacant(vacant) = table.entry(hash) {
            vacant.insert((place.file, place.at));
            self.entries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether an entry is there, and was wanted since it is.
    pub(super) fn is_marked(&self, hash: u64, place: Place) -> bool {
        self.table(hash).lock().get(&hash) == Some(&(place.file, place.at | HIT))
    }

    /// Forgets an entry, if it is there.
    pub(super) fn remove(&self, hash: u64, place: Place) {
        let mut table = self.table(hash).lock();
        if table.get(&hash).is_some_and(|(file, at)| (*file, at & !HIT) == (place.file, place.at)) {
            table.remove(&hash);
            self.entries.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Forgets all entries of a file whose directory cannot be read: looks at everything.
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
    fn places_are_found_marked_and_forgotten() {
        let index = Index::new();
        let place = |file, at| Place { file, at };
        for hash in 0..1000_u64 {
            index.insert(hash << 40, place(1, hash as u32 * 8));
        }
        let hash = 7 << 40;
        assert_eq!(index.find(hash, false), Some(place(1, 56)));
        assert!(!index.is_marked(hash, place(1, 56)));
        assert_eq!(index.find(hash, true), Some(place(1, 56)));
        assert!(index.is_marked(hash, place(1, 56)) && !index.is_marked(hash, place(2, 56)));
        index.insert_if_absent(hash, place(3, 8));
        assert_eq!(index.find(hash, false), Some(place(1, 56)));
        index.insert(hash, place(2, 16));
        assert!(!index.is_marked(hash, place(2, 16)), "wanted at its old place");
        index.remove(hash, place(1, 56));
        assert_eq!((index.find(hash, false), index.entries()), (Some(place(2, 16)), 1000));
        index.remove_file(1);
        assert_eq!((index.entries(), index.contains(hash), index.contains(8 << 40)), (1, true, false));
        index.find(hash, true);
        index.remove(hash, place(2, 16));
        assert_eq!(index.entries(), 0, "marked or not");
    }
}

//! Reading from the cache without a thread that waits, as local objects are read ([`crate::store::read_at_once`]): what the
//! system has in memory is copied at once, what the disk must be asked for is read by another thread.
//!
//! A disk may take its time, or never answer. So few reads wait for it at once, and none of them is waited for longer than
//! [`PATIENCE`]: then, or when there are as many already, the store is asked instead.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::format::{self, HEAD_BYTES, Key};
use super::index::Place;
use super::{DiskCache, Shared, add};
use crate::store::read_at_once;

/// Reads that may wait for the disk at the same time, each of some pieces.
pub(super) const READS_AT_ONCE: usize = 64;
/// The longest that a read is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// What is copied at most on the caller's thread.
const MOST_AT_ONCE_BYTES: usize = 256 << 10;

/// A piece of a segment that is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    /// Its length, if that is known.
    pub(crate) bytes: Option<usize>,
}

/// What becomes of what is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reading {
    /// It is likely to be read again: the disk cache keeps it.
    Again,
    /// It is read in passing, by who reads everything: the disk cache is used and left as it is.
    Once,
}

/// An entry that the index knows.
struct Entry {
    wanted: Wanted,
    place: Place,
    file: Arc<File>,
}

impl DiskCache {
    /// The pieces that it has of those that are wanted, in their places.
    pub(crate) async fn get(&self, wanted: &[Wanted], reading: Reading) -> Vec<Option<Bytes>> {
        let mut found = vec![None; wanted.len()];
        let mut slow = Vec::new();
        let mut copied_bytes = 0;
        let began = matches!(wanted, [Wanted { bytes: Some(_), .. }]).then(Instant::now);
        for (at, wanted) in wanted.iter().enumerate() {
            let Some(entry) = self.shared.locate(*wanted, reading) else { continue };
            let bytes = wanted.bytes.filter(|bytes| copied_bytes + bytes <= MOST_AT_ONCE_BYTES);
            match bytes.and_then(|bytes| entry.copy(bytes)) {
                Some(read) => {
                    copied_bytes += read.len();
                    found[at] = self.shared.judge(&entry, Ok(read));
                }
                None => slow.push((at, entry)),
            }
        }
        if !slow.is_empty() {
            for (at, piece) in self.wait_for(slow).await {
                found[at] = piece;
            }
        }
        let hits = found.iter().flatten().count() as u64;
        add(&self.shared.counters.hits, hits);
        add(&self.shared.counters.misses, found.len() as u64 - hits);
        if let Some(began) = began.filter(|_| hits == 1) {
            self.shared.costs.read_from_cache(began.elapsed());
        }
        found
    }

    /// Reads entries on a thread that may wait.
    async fn wait_for(&self, mut entries: Vec<(usize, Entry)>) -> Vec<(usize, Option<Bytes>)> {
        let Ok(permit) = self.shared.reads.clone().try_acquire_owned() else { return Vec::new() };
        entries.sort_unstable_by_key(|(_, entry)| (entry.place.file, entry.place.at));
        let file = entries.first().map_or(0, |(_, entry)| entry.place.file);
        let shared = self.shared.clone();
        let read = tokio::task::spawn_blocking(move || {
            // Held until the disk has answered, whether somebody still waits or not.
            let _permit = permit;
            let read = |(at, entry): (usize, Entry)| (at, shared.judge(&entry, entry.read()));
            entries.into_iter().map(read).collect()
        });
        match tokio::time::timeout(PATIENCE, read).await {
            Ok(read) => read.unwrap_or_default(),
            Err(late) => {
                self.shared.read_failed(file, &late);
                Vec::new()
            }
        }
    }
}

impl Shared {
    fn locate(&self, wanted: Wanted, reading: Reading) -> Option<Entry> {
        let hash = wanted.key.hash();
        let place = self.index.find(hash, reading == Reading::Again)?;
        match self.files.read().get(&place.file) {
            Some(file) => Some(Entry { wanted, place, file: file.file.clone() }),
            // It has been given up.
            None => {
                self.index.remove(hash, place);
                None
            }
        }
    }

    /// What an entry holds, if it is whole and the one that is wanted.
    fn judge(&self, entry: &Entry, read: io::Result<Vec<u8>>) -> Option<Bytes> {
        let place = entry.place;
        let cause = match read {
            Ok(read) => match format::check_entry(&read) {
                Some((key, held)) if key == entry.wanted.key => return Some(Bytes::from(read).slice(held)),
                // Two keys have one hash: the other came later.
                Some(_) => return None,
                None => format!("the entry at {} is damaged", place.at),
            },
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                format!("the file ends before the entry at {}", place.at)
            }
            Err(error) => {
                self.give_up(place.file);
                error.to_string()
            }
        };
        self.index.remove(entry.wanted.key.hash(), place);
        self.read_failed(place.file, &cause);
        None
    }
}

impl Entry {
    /// The entry, if the system has all of it in memory and it may hold so many bytes.
    fn copy(&self, bytes: usize) -> Option<Vec<u8>> {
        let mut read = vec![0; HEAD_BYTES + bytes];
        read_at_once(&self.file, &mut read, self.place.at.into()).then_some(read)
    }

    /// The same, wherever it is.
    fn read(&self) -> io::Result<Vec<u8>> {
        match self.wanted.bytes {
            Some(bytes) => {
                let mut read = vec![0; HEAD_BYTES + bytes];
                self.file.read_exact_at(&mut read, self.place.at.into()).map(|()| read)
            }
            None => read_entry(&self.file, self.place.at.into()),
        }
    }
}

/// Reads an entry whose length is not known; what is no entry is answered too. Blocks the thread.
pub(super) fn read_entry(file: &File, at: u64) -> io::Result<Vec<u8>> {
    let mut entry = vec![0; HEAD_BYTES];
    file.read_exact_at(&mut entry, at)?;
    if let Some(held) = format::held_bytes(&entry) {
        entry.resize(HEAD_BYTES + held, 0);
        file.read_exact_at(&mut entry[HEAD_BYTES..], at + HEAD_BYTES as u64)?;
    }
    Ok(entry)
}

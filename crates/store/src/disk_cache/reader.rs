//! Reading from the cache, as local objects are read ([`crate::reads`]): what the system has in memory is copied at once, what
//! the disk must be asked for comes without holding up the thread.
//!
//! A disk may take its time, or never answer. So few reads wait for it at once, and none of them is waited for longer than
//! [`PATIENCE`]: then the store is asked instead, or when as many wait already and the piece is not in memory either. A read that waits
//! asks for a few pieces at once in its thread's ring, or else for one after the other, so that as many threads wait as reads do.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, StreamExt};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::format::{self, HEAD_BYTES, Key};
use super::index::Place;
use super::{DiskCache, Shared, add};
use crate::reads::{self, Kept};

/// Reads that may wait for the disk at the same time, each of some pieces.
pub(super) const READS_AT_ONCE: usize = 64;
/// Pieces that one of them asks the disk for at the same time, in a ring.
const PIECES_AT_ONCE: usize = 4;
/// The longest that a read is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

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
        let began = matches!(wanted, [Wanted { bytes: Some(_), .. }]).then(Instant::now);
        let located = wanted.iter().enumerate();
        let located = located.filter_map(|(at, wanted)| Some((at, self.shared.locate(*wanted, reading)?)));
        for (at, piece) in self.read(located.collect()).await {
            found[at] = piece;
        }
        let hits = found.iter().flatten().count() as u64;
        add(&self.shared.counters.hits, hits);
        add(&self.shared.counters.misses, found.len() as u64 - hits);
        if let Some(began) = began.filter(|_| hits == 1) {
            self.shared.costs.read_from_cache(began.elapsed());
        }
        found
    }

    /// Reads entries, in their order on the disk. Answers nothing if that takes too long; if too much is waited for already, what is in
    /// memory.
    async fn read(&self, mut entries: Vec<(usize, Entry)>) -> Vec<(usize, Option<Bytes>)> {
        entries.sort_unstable_by_key(|(_, entry)| (entry.place.file, entry.place.at));
        let Some((_, first)) = entries.first() else { return Vec::new() };
        let file = first.place.file;
        let Ok(place) = self.shared.reads.clone().try_acquire_owned() else {
            let in_memory = |(at, entry): (usize, Entry)| {
                let read = entry.copy()?;
                Some((at, self.shared.judge(&entry, Ok(read))))
            };
            return entries.into_iter().filter_map(in_memory).collect();
        };
        let place = Arc::new(place);
        let read = |(at, entry): (usize, Entry)| {
            let place = place.clone();
            async move {
                let read = entry.read(place).await;
                (at, self.shared.judge(&entry, read))
            }
        };
        let at_once = if reads::wait_in_a_ring() { PIECES_AT_ONCE } else { 1 };
        let read = stream::iter(entries).map(read).buffer_unordered(at_once).collect();
        match tokio::time::timeout(PATIENCE, read).await {
            Ok(read) => read,
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
    /// The entry, if its length is known and the system has all of it in memory.
    fn copy(&self) -> Option<Vec<u8>> {
        let mut read = vec![0; HEAD_BYTES + self.wanted.bytes?];
        reads::read_at_once(&self.file, &mut read, self.place.at.into()).then_some(read)
    }

    /// The same, wherever it is.
    async fn read(&self, place: Arc<OwnedSemaphorePermit>) -> io::Result<Vec<u8>> {
        let kept = Kept::with_place(self.file.clone(), place);
        let at = self.place.at.into();
        if let Some(bytes) = self.wanted.bytes {
            return reads::read_exact_at(kept, at, HEAD_BYTES + bytes).await;
        }
        let head = reads::read_exact_at(kept.clone(), at, HEAD_BYTES).await?;
        match format::held_bytes(&head) {
            Some(held) => reads::read_exact_at(kept, at, HEAD_BYTES + held).await,
            None => Ok(head),
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

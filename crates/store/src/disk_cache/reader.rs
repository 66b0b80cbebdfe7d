//! Reads from the disk cache without blocking the thread ([`crate::reads`]): data in the kernel's
//! page cache is copied immediately, other reads wait asynchronously.
//!
//! A disk may be slow or never respond. Only a limited number of reads wait for it at a time, each
//! for at most [`READ_TIMEOUT`]. After the timeout, or if the limit is reached and the entry is not
//! in the page cache, the caller reads from the store. A read waits for several entries
//! concurrently in its thread's ring; without a ring it reads one entry after the other, so that it
//! blocks only one thread of the pool.

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
use super::index::EntryLocation;
use super::{DiskCache, Shared, add};
use crate::reads::{self, ReadTarget};

/// Maximum number of concurrent reads that wait for the disk. Each may read several entries.
pub(super) const MAX_CONCURRENT_READS: usize = 64;
/// Number of entries that one read requests concurrently in a ring.
const CONCURRENT_ENTRIES: usize = 4;
/// Timeout of a read.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// A requested part of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheRequest {
    pub(crate) key: Key,
    /// Its length, if known.
    pub(crate) bytes: Option<usize>,
}

/// Whether the data is likely to be read again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadHint {
    /// Likely: the disk cache stores it.
    WillReuse,
    /// Unlikely, for example in a full scan: the disk cache is used but not changed.
    Scan,
}

/// A requested entry that is in the index.
struct Entry {
    request: CacheRequest,
    location: EntryLocation,
    file: Arc<File>,
}

impl DiskCache {
    /// Returns the entries that the cache contains, in the order of the requests.
    pub(crate) async fn get(&self, wanted: &[CacheRequest], reading: ReadHint) -> Vec<Option<Bytes>> {
        let mut found = vec![None; wanted.len()];
        let began = matches!(wanted, [CacheRequest { bytes: Some(_), .. }]).then(Instant::now);
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

    /// Reads entries in their order on disk. Returns nothing if the read times out. If too many
    /// reads are waiting already, returns only the entries in the page cache.
    async fn read(&self, mut entries: Vec<(usize, Entry)>) -> Vec<(usize, Option<Bytes>)> {
        entries.sort_unstable_by_key(|(_, entry)| (entry.location.file, entry.location.at));
        let Some((_, first)) = entries.first() else { return Vec::new() };
        let file = first.location.file;
        let Ok(permit) = self.shared.reads.clone().try_acquire_owned() else {
            let in_memory = |(at, entry): (usize, Entry)| {
                let read = entry.read_from_page_cache()?;
                Some((at, self.shared.check_read(&entry, Ok(read))))
            };
            return entries.into_iter().filter_map(in_memory).collect();
        };
        let permit = Arc::new(permit);
        let read = |(at, entry): (usize, Entry)| {
            let permit = permit.clone();
            async move {
                let read = entry.read(permit).await;
                (at, self.shared.check_read(&entry, read))
            }
        };
        let concurrency = if reads::has_ring() { CONCURRENT_ENTRIES } else { 1 };
        let read = stream::iter(entries).map(read).buffer_unordered(concurrency).collect();
        match tokio::time::timeout(READ_TIMEOUT, read).await {
            Ok(read) => read,
            Err(late) => {
                self.shared.read_failed(file, &late);
                Vec::new()
            }
        }
    }
}

impl Shared {
    fn locate(&self, request: CacheRequest, reading: ReadHint) -> Option<Entry> {
        let hash = request.key.hash();
        let location = self.index.find(hash, reading == ReadHint::WillReuse)?;
        match self.files.read().get(&location.file) {
            Some(file) => Some(Entry { request, location, file: file.file.clone() }),
            // The file was abandoned.
            None => {
                self.index.remove(hash, location);
                None
            }
        }
    }

    /// Returns an entry's value if it is undamaged and belongs to the requested key.
    fn check_read(&self, entry: &Entry, read: io::Result<Vec<u8>>) -> Option<Bytes> {
        let location = entry.location;
        let cause = match read {
            Ok(read) => match format::check_entry(&read) {
                Some((key, value)) if key == entry.request.key => {
                    return Some(Bytes::from(read).slice(value));
                }
                // Two keys have the same hash: the other one was inserted later.
                Some(_) => return None,
                None => format!("the entry at {} is damaged", location.at),
            },
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                format!("the file ends before the entry at {}", location.at)
            }
            Err(error) => {
                self.abandon_file(location.file);
                error.to_string()
            }
        };
        self.index.remove(entry.request.key.hash(), location);
        self.read_failed(location.file, &cause);
        None
    }
}

impl Entry {
    /// Reads the entry if its length is known and all of it is in the page cache.
    fn read_from_page_cache(&self) -> Option<Vec<u8>> {
        let mut read = vec![0; HEAD_BYTES + self.request.bytes?];
        reads::read_from_page_cache(&self.file, &mut read, self.location.at.into()).then_some(read)
    }

    /// Reads the entry, waiting for the disk if necessary.
    async fn read(&self, permit: Arc<OwnedSemaphorePermit>) -> io::Result<Vec<u8>> {
        let target = ReadTarget::with_permit(self.file.clone(), permit);
        let at = self.location.at.into();
        if let Some(bytes) = self.request.bytes {
            return reads::read_exact_at(target, at, HEAD_BYTES + bytes).await;
        }
        let head = reads::read_exact_at(target.clone(), at, HEAD_BYTES).await?;
        match format::value_bytes(&head) {
            Some(value) => reads::read_exact_at(target, at, HEAD_BYTES + value).await,
            None => Ok(head),
        }
    }
}

/// Reads an entry of unknown length. The result may not be a valid entry. Blocks the thread.
pub(super) fn read_entry(file: &File, at: u64) -> io::Result<Vec<u8>> {
    let mut entry = vec![0; HEAD_BYTES];
    file.read_exact_at(&mut entry, at)?;
    if let Some(value) = format::value_bytes(&entry) {
        entry.resize(HEAD_BYTES + value, 0);
        file.read_exact_at(&mut entry[HEAD_BYTES..], at + HEAD_BYTES as u64)?;
    }
    Ok(entry)
}

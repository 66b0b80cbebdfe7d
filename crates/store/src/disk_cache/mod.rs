//! The second tier: pieces of segments that were read from a far store, or have just been written to it, on the node's own disk.
//!
//! ```text
//!   page cache (engine) --miss--> PageStore --get--> DiskCache --miss--> Store (S3: some ten milliseconds, and a price)
//!                                           <--put--    |
//!                                                       |  queue (bounded; what does not fit is dropped)
//!                                                       v
//!                        index: hash -> file, position  thread "fulmar-cache"
//!                                                       |
//!      DATA/cache/    00000003   00000004   00000005  <-'   each 1/64 of the bound, appended to, never changed
//!                     the oldest: thrown away as a whole, what was wanted since it was written first copied to the newest
//! ```
//!
//! It holds frames as they lie in segments (compressed, with their checksums), and segments' indexes. Segments are never changed and
//! their ids never used again, so an entry is never stale. That of a segment which was deleted is never asked for, and goes with
//! its file.
//!
//! Files are written from front to back and thrown away as a whole, instead of places being used again one by one: the disk sees
//! large writes only, nothing is fragmented, a restart has little to read, and no reader ever meets a place that has become
//! another's.
//!
//! # No wrong data
//! Nothing here is ever synced, and nothing needs to be: an entry carries its key under its checksum ([`format`]), and what is
//! read counts only if it is whole and for the key that is asked for. So whatever a file holds after a crash (a part of what was
//! written, in any order, zeros, what another file had there) and whatever index leads to it, the worst is a read in vain. What
//! is damaged, cut off or not readable is counted, said once in the log, forgotten and read from the store: no statement
//! notices. A file that cannot be read is given up as a whole; a disk that does not answer holds up [`reader`]'s few reads for a
//! bounded time, and everybody else not at all.
//!
//! # Restart
//! A file that is full ends with a directory, and the next start takes it over by that alone, the newest first, on the cache's own
//! thread. The one that was being written at a crash has none: its entries are read one after the other up to the first that is
//! not whole. File numbers grow, and a file is never opened to be written again: what a thread still reads from a file that has
//! been thrown away is what was there.
//!
//! # Bounds
//! Bytes on the disk, files included that are being written: a new file is begun only when there is room for it
//! ([`writer`]). The index, an eighth of the node's memory at most: if it is full the oldest file goes. The queue, in bytes. And
//! the disk's reserve: the node says what is left of its disk, and the cache gives back what is missing ([`DiskCache::make_room`])
//! before writers would be refused.

mod cost;
mod format;
mod index;
mod reader;
mod takeover;
mod writer;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, RwLock};
use tokio::sync::Semaphore;

use cost::Costs;
pub use cost::MOST_COST;
pub(crate) use format::Key;
use index::Index;
pub use reader::Reading;
pub(crate) use reader::Wanted;

/// Files of a cache that is as large as it may be.
const FILES: u64 = 64;
const LEAST_FILE_BYTES: u64 = 1 << 20;
const MOST_FILE_BYTES: u64 = 256 << 20;
/// Files, however small: each is open.
const MOST_FILES: usize = 4096;
/// Of the entries that the index has room for the most that are in one file.
const FILE_ENTRIES_PART: usize = 16;
/// Of a file's bytes the most that one entry takes.
const ENTRY_PART: u64 = 4;
/// Of the memory what the index may take, and what may wait to be written.
const INDEX_PART: u64 = 8;
const QUEUE_PART: u64 = 32;
const LEAST_QUEUE_BYTES: u64 = 1 << 20;
const MOST_QUEUE_BYTES: u64 = 16 << 20;

/// Bounds of a cache.
#[derive(Clone, Copy, Debug)]
pub struct DiskCacheOptions {
    /// The most that it takes of the disk.
    pub bytes: u64,
    /// The memory of the node, of which index and queue take a part.
    pub memory_bytes: u64,
}

impl DiskCacheOptions {
    fn file_bytes(&self) -> u64 {
        (self.bytes / FILES).clamp(LEAST_FILE_BYTES, MOST_FILE_BYTES)
    }

    /// The most that an entry may hold.
    fn held_bytes(&self) -> usize {
        format::MAX_HELD_BYTES.min((self.file_bytes() / ENTRY_PART) as usize)
    }

    fn queue_bytes(&self) -> u64 {
        (self.memory_bytes / QUEUE_PART).clamp(LEAST_QUEUE_BYTES, MOST_QUEUE_BYTES)
    }

    fn entries(&self) -> usize {
        (self.memory_bytes / INDEX_PART / index::MOST_ENTRY_BYTES) as usize
    }

    fn entries_of_file(&self) -> usize {
        self.entries() / FILE_ENTRIES_PART
    }
}

/// What has been counted since the start, and what there is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCacheStatistics {
    /// Pieces that were found.
    pub hits: u64,
    /// Pieces that were not.
    pub misses: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Pieces that were not kept: the queue was full, or the disk refused, or has no room.
    pub dropped: u64,
    /// Pieces that could not be read as they were written, and writes that failed.
    pub failures: u64,
    /// Bytes of its files, now.
    pub bytes: u64,
    /// What they may take, now: less than was asked for if the disk has not as much.
    pub limit_bytes: u64,
    /// Pieces that can be found, now.
    pub entries: u64,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    written_bytes: AtomicU64,
    dropped: AtomicU64,
    failures: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// A file of the cache.
struct CacheFile {
    file: Arc<File>,
    bytes: u64,
}

/// What the thread has to do.
#[derive(Default)]
struct Queue {
    pieces: VecDeque<(Key, Bytes)>,
    bytes: u64,
    /// Files that readers have given up, and their lengths.
    given_up: Vec<(u32, u64)>,
    /// There is less room than there was.
    crowded: bool,
    stop: Option<Stop>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    /// What waits is written, and the file ended.
    Cleanly,
    /// At once.
    Now,
}

struct Shared {
    directory: PathBuf,
    options: DiskCacheOptions,
    index: Index,
    /// By their numbers: the oldest first. Only the thread adds to it.
    files: RwLock<BTreeMap<u32, CacheFile>>,
    /// Bytes of all files in the directory, those included that are not taken over yet, or just being removed.
    used_bytes: AtomicU64,
    /// What the disk has for the cache.
    room_bytes: AtomicU64,
    queue: Mutex<Queue>,
    work: Condvar,
    /// Permits of reads that wait for the disk.
    reads: Arc<Semaphore>,
    counters: Counters,
    costs: Costs,
    told_of_reads: AtomicBool,
    told_of_writes: AtomicBool,
}

/// A cache in a directory. Dropping it ends it as a crash would, but for what is being written at the moment.
pub struct DiskCache {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DiskCache {
    /// Opens a cache, and takes over in the background what an earlier one has left in the directory, which is made if it is not
    /// there. No other process may use it. Blocks the thread for a look at the directory.
    pub fn open(directory: &Path, options: DiskCacheOptions) -> io::Result<DiskCache> {
        std::fs::create_dir_all(directory)?;
        let found = takeover::find(directory)?;
        let shared = Arc::new(Shared {
            directory: directory.to_owned(),
            options,
            index: Index::new(),
            files: RwLock::default(),
            used_bytes: AtomicU64::new(found.iter().map(|(_, bytes)| bytes).sum()),
            room_bytes: AtomicU64::new(u64::MAX),
            queue: Mutex::default(),
            work: Condvar::new(),
            reads: Arc::new(Semaphore::new(reader::READS_AT_ONCE)),
            counters: Counters::default(),
            costs: Costs::new(),
            told_of_reads: AtomicBool::new(false),
            told_of_writes: AtomicBool::new(false),
        });
        let writer = writer::Writer::new(shared.clone(), found.last().map_or(0, |(number, _)| *number));
        let thread = std::thread::Builder::new().name("fulmar-cache".to_owned());
        let thread = thread.spawn(move || writer.run(found))?;
        Ok(DiskCache { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Removes what a cache has left in a directory, and the directory if that was all. Blocks the thread.
    pub fn remove(directory: &Path) -> io::Result<()> {
        let found = match takeover::find(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        for (number, _) in found {
            std::fs::remove_file(file_path(directory, number))?;
        }
        match std::fs::remove_dir(directory) {
            // Somebody keeps something else there.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        }
    }

    /// Keeps a piece of a segment, if there is time for it.
    pub(crate) fn put(&self, key: Key, held: Bytes) {
        let Shared { options, index, queue, counters, .. } = &*self.shared;
        if held.is_empty() || held.len() > options.held_bytes() || index.contains(key.hash()) {
            return;
        }
        let mut queue = queue.lock();
        let bytes = queue.bytes + held.len() as u64;
        if bytes > options.queue_bytes() || queue.stop.is_some() {
            drop(queue);
            return add(&counters.dropped, 1);
        }
        queue.bytes = bytes;
        queue.pieces.push_back((key, held));
        let was_empty = queue.pieces.len() == 1;
        drop(queue);
        if was_empty {
            self.shared.work.notify_one();
        }
    }

    /// The disk has so many bytes left, of which so many are to be kept free. The cache takes no more than leaves a quarter
    /// of these beyond them, and gives back what is missing. To be called now and then.
    pub fn make_room(&self, available_bytes: u64, reserve_bytes: u64) {
        let used_bytes = self.shared.used_bytes.load(Ordering::Relaxed);
        let kept_bytes = reserve_bytes.saturating_add(reserve_bytes / 4);
        let room_bytes = used_bytes.saturating_add(available_bytes).saturating_sub(kept_bytes);
        self.shared.room_bytes.store(room_bytes, Ordering::Relaxed);
        if used_bytes > room_bytes {
            self.shared.queue.lock().crowded = true;
            self.shared.work.notify_one();
        }
    }

    /// What has been counted.
    pub fn statistics(&self) -> DiskCacheStatistics {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        DiskCacheStatistics {
            hits: load(&counters.hits),
            misses: load(&counters.misses),
            written_bytes: load(&counters.written_bytes),
            dropped: load(&counters.dropped),
            failures: load(&counters.failures),
            bytes: load(&self.shared.used_bytes),
            limit_bytes: self.shared.limit_bytes(),
            entries: self.shared.index.entries() as u64,
        }
    }

    /// Writes what waits and ends the file that is being written, so that the next start finds all at once. Blocks the thread.
    pub fn close(&self) {
        self.stop(Stop::Cleanly);
    }

    fn stop(&self, stop: Stop) {
        let Some(thread) = self.thread.lock().take() else { return };
        self.shared.queue.lock().stop = Some(stop);
        self.shared.work.notify_one();
        if thread.join().is_err() {
            tracing::error!("the disk cache's thread has panicked");
        }
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        self.stop(Stop::Now);
    }
}

impl std::fmt::Debug for DiskCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DiskCache({})", self.shared.directory.display())
    }
}

impl Shared {
    /// What files may take now.
    fn limit_bytes(&self) -> u64 {
        self.options.bytes.min(self.room_bytes.load(Ordering::Relaxed))
    }

    /// A file is of no use to readers: an entry of it was not read because of this.
    fn give_up(&self, number: u32) {
        let given_up = self.files.write().remove(&number);
        if let Some(file) = given_up {
            self.queue.lock().given_up.push((number, file.bytes));
            self.work.notify_one();
        }
    }

    /// Something could not be read as it was written.
    fn read_failed(&self, file: u32, cause: &dyn std::fmt::Display) {
        add(&self.counters.failures, 1);
        if !self.told_of_reads.swap(true, Ordering::Relaxed) {
            let file = file_path(&self.directory, file);
            tracing::warn!(file = %file.display(), %cause, "the disk cache cannot be read; what it lacks is read from the store");
        }
    }

    fn write_failed(&self, cause: &io::Error) {
        add(&self.counters.failures, 1);
        if !self.told_of_writes.swap(true, Ordering::Relaxed) {
            let directory = self.directory.display();
            tracing::warn!(%directory, %cause, "the disk cache cannot be written; it goes on without what it lacks");
        }
    }
}

/// The names of files sort as their numbers do.
fn file_path(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("{number:08x}"))
}

#[cfg(test)]
mod tests;

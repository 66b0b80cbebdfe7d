//! A second cache tier on the local disk, for parts of segments that were read from a remote store
//! or just written to it.
//!
//! ```text
//!   page cache (engine) --miss--> PageStore --get--> DiskCache --miss--> Store (S3: tens of ms)
//!                                           <--put--    |
//!                                                       |  queue (bounded, drops entries)
//!                                                       v
//!                        index: hash -> file, position  thread "fulmar-cache"
//!                                                       |
//!      DATA/cache/    00000003   00000004   00000005  <-'   each 1/64 of the limit, append-only
//!                     the oldest: evicted as a whole, after its recently used entries have been
//!                     copied to the newest
//! ```
//!
//! The cache stores frames in their on-disk format (compressed, with checksums) and the indexes of
//! segments. Segments are immutable and their ids are never reused, so entries cannot be stale.
//! Entries of a deleted segment are never requested again, and are evicted with their file.
//!
//! Files are written from front to back and evicted as a whole (FIFO with second chance) instead of
//! reusing the space of single entries: the disk receives only large writes, there is no
//! fragmentation, a restart has little to read, and the position of an entry is never reused for
//! another one.
//!
//! # Wrong data is never returned
//!
//! Nothing is synced, and nothing needs to be: the checksum of an entry covers its key
//! ([`format`]), and data is used only if it is complete and belongs to the requested key. Whatever
//! a file contains after a crash (a part of the written data, in any order, zeros, or data of
//! another file) and whatever index entry leads there, the worst case is a useless read. Damaged,
//! truncated and unreadable entries are counted, logged once, removed from the index, and read from
//! the store, so statements do not fail. If a read of a file fails, the whole file is abandoned. A
//! disk that does not respond delays the few concurrent reads of [`reader`] for a bounded time, and
//! nothing else.
//!
//! # Restart
//!
//! A full file ends with a directory. The next start takes over files by their directories, newest
//! first, on the cache's own thread. The file that was being written at a crash has no directory;
//! its entries are read in sequence up to the first incomplete one. File numbers grow, and an
//! existing file is never written again, so a thread that still reads an evicted file reads its old
//! contents.
//!
//! # Limits
//!
//! - Disk space, including the files that are being written: a new file is created only when there
//!   is space for it ([`writer`]).
//! - The index: at most 1/8 of the node's memory. If it is full, the oldest file is evicted.
//! - The queue, in bytes.
//! - The disk's reserve: the node reports its free disk space, and the cache releases space
//!   ([`DiskCache::limit_to_free_space`]) before writes of the node are rejected.

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
pub use cost::MAX_READ_COST;
pub(crate) use format::Key;
use index::Index;
pub(crate) use reader::CacheRequest;
pub use reader::ReadHint;

/// Number of files of a cache that has reached its size limit.
const TARGET_FILES: u64 = 64;
const MIN_FILE_BYTES: u64 = 1 << 20;
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Maximum number of files, whatever their size: each one is open.
const MAX_FILES: usize = 4096;
/// A file contains at most the maximum number of index entries divided by this.
const FILE_ENTRIES_DIVISOR: usize = 16;
/// An entry takes at most the length of a file divided by this.
const ENTRY_BYTES_DIVISOR: u64 = 4;
/// The index and the queue may use at most the node's memory divided by these.
const INDEX_MEMORY_DIVISOR: u64 = 8;
const QUEUE_MEMORY_DIVISOR: u64 = 32;
const MIN_QUEUE_BYTES: u64 = 1 << 20;
const MAX_QUEUE_BYTES: u64 = 16 << 20;

/// Limits of a disk cache.
#[derive(Clone, Copy, Debug)]
pub struct DiskCacheOptions {
    /// Maximum disk space.
    pub bytes: u64,
    /// The node's memory, of which the index and the queue use a fraction.
    pub memory_bytes: u64,
}

impl DiskCacheOptions {
    fn file_bytes(&self) -> u64 {
        (self.bytes / TARGET_FILES).clamp(MIN_FILE_BYTES, MAX_FILE_BYTES)
    }

    /// Maximum length of an entry's value.
    fn max_value_bytes(&self) -> usize {
        format::MAX_VALUE_BYTES.min((self.file_bytes() / ENTRY_BYTES_DIVISOR) as usize)
    }

    fn queue_bytes(&self) -> u64 {
        (self.memory_bytes / QUEUE_MEMORY_DIVISOR).clamp(MIN_QUEUE_BYTES, MAX_QUEUE_BYTES)
    }

    fn entries(&self) -> usize {
        (self.memory_bytes / INDEX_MEMORY_DIVISOR / index::MAX_ENTRY_BYTES) as usize
    }

    fn entries_of_file(&self) -> usize {
        self.entries() / FILE_ENTRIES_DIVISOR
    }
}

/// Counters since the start, and current values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCacheStatistics {
    /// Entries that were found.
    pub hits: u64,
    /// Entries that were not found.
    pub misses: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Entries that were not stored: the queue was full, a write failed, or there was no disk
    /// space.
    pub dropped: u64,
    /// Entries that could not be read or were damaged, and failed writes.
    pub failures: u64,
    /// Current size of all files.
    pub bytes: u64,
    /// Current size limit: less than configured if the disk does not have that much space.
    pub limit_bytes: u64,
    /// Current number of entries.
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

/// Work of the cache's thread.
#[derive(Default)]
struct Queue {
    pieces: VecDeque<(Key, Bytes)>,
    bytes: u64,
    /// Files that readers have abandoned, with their lengths.
    abandoned: Vec<(u32, u64)>,
    /// The size limit was lowered below the current size.
    over_limit: bool,
    stop: Option<Stop>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    /// Write the queue, then finish the current file.
    Cleanly,
    /// Immediately.
    Now,
}

struct Shared {
    directory: PathBuf,
    options: DiskCacheOptions,
    index: Index,
    /// Files by number, oldest first. Only the cache's thread adds files.
    files: RwLock<BTreeMap<u32, CacheFile>>,
    /// Size of all files in the directory, including those that are not yet taken over or are being
    /// removed.
    used_bytes: AtomicU64,
    /// Disk space that is available to the cache.
    room_bytes: AtomicU64,
    queue: Mutex<Queue>,
    work: Condvar,
    /// Permits of reads that wait for the disk.
    reads: Arc<Semaphore>,
    counters: Counters,
    costs: Costs,
    read_failure_logged: AtomicBool,
    write_failure_logged: AtomicBool,
}

/// A disk cache in a directory. Dropping it has the effect of a crash, except that a running write
/// is completed.
pub struct DiskCache {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl DiskCache {
    /// Opens a cache. Creates the directory if it does not exist, and takes over its files in the
    /// background. The directory must not be used by another process. Blocks on listing the
    /// directory.
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
            reads: Arc::new(Semaphore::new(reader::MAX_CONCURRENT_READS)),
            counters: Counters::default(),
            costs: Costs::new(),
            read_failure_logged: AtomicBool::new(false),
            write_failure_logged: AtomicBool::new(false),
        });
        let writer = writer::Writer::new(shared.clone(), found.last().map_or(0, |(number, _)| *number));
        let thread = std::thread::Builder::new().name("fulmar-cache".to_owned());
        let thread = thread.spawn(move || writer.run(found))?;
        Ok(DiskCache { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Removes a cache's files from a directory, and the directory if it is then empty. Blocks on
    /// disk I/O.
    pub fn remove(directory: &Path) -> io::Result<()> {
        let found = match takeover::find(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        for (number, _) in found {
            std::fs::remove_file(file_path(directory, number))?;
        }
        match std::fs::remove_dir(directory) {
            // The directory contains other files.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        }
    }

    /// Queues an entry to be stored, unless the queue is full.
    pub(crate) fn put(&self, key: Key, value: Bytes) {
        let Shared { options, index, queue, counters, .. } = &*self.shared;
        if value.is_empty() || value.len() > options.max_value_bytes() || index.contains(key.hash()) {
            return;
        }
        let mut queue = queue.lock();
        let bytes = queue.bytes + value.len() as u64;
        if bytes > options.queue_bytes() || queue.stop.is_some() {
            drop(queue);
            return add(&counters.dropped, 1);
        }
        queue.bytes = bytes;
        queue.pieces.push_back((key, value));
        let was_empty = queue.pieces.len() == 1;
        drop(queue);
        if was_empty {
            self.shared.work.notify_one();
        }
    }

    /// Limits the cache to the available disk space, given the free space of the disk and the
    /// reserve that must remain. The cache leaves the reserve and a quarter of it free, and
    /// releases space if it exceeds that. Called periodically.
    pub fn limit_to_free_space(&self, available_bytes: u64, reserve_bytes: u64) {
        let used_bytes = self.shared.used_bytes.load(Ordering::Relaxed);
        let keep_free_bytes = reserve_bytes.saturating_add(reserve_bytes / 4);
        let room_bytes = used_bytes.saturating_add(available_bytes).saturating_sub(keep_free_bytes);
        self.shared.room_bytes.store(room_bytes, Ordering::Relaxed);
        if used_bytes > room_bytes {
            self.shared.queue.lock().over_limit = true;
            self.shared.work.notify_one();
        }
    }

    /// Returns the statistics.
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

    /// Writes the queue and finishes the current file, so that the next start finds its entries
    /// immediately. Blocks the thread.
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
    /// The current size limit.
    fn limit_bytes(&self) -> u64 {
        self.options.bytes.min(self.room_bytes.load(Ordering::Relaxed))
    }

    /// Abandons a file after a failed read. The cache's thread removes it.
    fn abandon_file(&self, number: u32) {
        let abandoned = self.files.write().remove(&number);
        if let Some(file) = abandoned {
            self.queue.lock().abandoned.push((number, file.bytes));
            self.work.notify_one();
        }
    }

    /// Counts an entry that could not be read or was damaged. Logs the first one.
    fn read_failed(&self, file: u32, cause: &dyn std::fmt::Display) {
        add(&self.counters.failures, 1);
        if !self.read_failure_logged.swap(true, Ordering::Relaxed) {
            let file = file_path(&self.directory, file);
            tracing::warn!(
                file = %file.display(),
                %cause,
                "could not read from the disk cache; reading from the store instead"
            );
        }
    }

    fn write_failed(&self, cause: &io::Error) {
        add(&self.counters.failures, 1);
        if !self.write_failure_logged.swap(true, Ordering::Relaxed) {
            let directory = self.directory.display();
            tracing::warn!(%directory, %cause, "could not write to the disk cache; data is not cached");
        }
    }
}

/// Names of files sort like their numbers.
fn file_path(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("{number:08x}"))
}

#[cfg(test)]
mod tests;

//! The cache's thread "fulmar-cache": takes over old files, writes queued entries, evicts the
//! oldest files.
//!
//! When the current file is full, a new one is created, and the oldest files are evicted until the
//! size of two files is free: one for the new file, and one for the entries that are copied from an
//! evicted file while that still exists. The size limit therefore holds at all times.
//!
//! Entries of an evicted file that were used since they were written are copied to the new file,
//! and must be used again to be copied again. Copies take at most half of the new file, so that
//! there is space for new entries. A scan of a large tenant therefore does not displace entries
//! that others use.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::format::{self, DIRECTORY_BYTES, Directory, FOOTER_BYTES, Key};
use super::index::EntryLocation;
use super::reader::read_entry;
use super::takeover::{self, TakenOver};
use super::{CacheFile, MAX_FILES, Shared, Stop, add, file_path};

/// Approximate size of a write.
const BATCH_BYTES: usize = 1 << 20;
/// Time without writes after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// State of the thread.
pub(super) struct Writer {
    shared: Arc<Shared>,
    current: Option<Current>,
    /// Number of the newest file.
    newest: u32,
    /// Entries of the current file that are not yet written.
    buffer: Vec<u8>,
    paused_until: Option<Instant>,
}

/// The file that is being written.
struct Current {
    number: u32,
    file: Arc<File>,
    /// Position of the next entry. Includes the entries in the buffer.
    end: u64,
    directory: Directory,
    /// Number of directory entries that are written and in the index.
    written: usize,
}

/// Work to do.
struct Work {
    pieces: Vec<(Key, Bytes)>,
    abandoned: Vec<(u32, u64)>,
    over_limit: bool,
    stop: Option<Stop>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, newest: u32) -> Self {
        Writer { shared, current: None, newest, buffer: Vec::new(), paused_until: None }
    }

    /// Runs until it is stopped. `found` contains the existing files, oldest first.
    pub(super) fn run(mut self, found: Vec<(u32, u64)>) {
        self.take_over(found);
        loop {
            let work = self.wait();
            for (number, bytes) in work.abandoned {
                self.forget(number);
                self.remove(number, bytes);
            }
            if work.over_limit {
                self.shrink();
            }
            if work.stop == Some(Stop::Now) {
                return;
            }
            let is_last = work.pieces.is_empty() && work.stop.is_some();
            self.write(work.pieces);
            if is_last {
                return self.end_file();
            }
        }
    }

    fn wait(&self) -> Work {
        let mut queue = self.shared.queue.lock();
        while queue.pieces.is_empty()
            && queue.abandoned.is_empty()
            && !queue.over_limit
            && queue.stop.is_none()
        {
            self.shared.work.wait(&mut queue);
        }
        let (mut pieces, mut bytes) = (Vec::new(), 0);
        while bytes < BATCH_BYTES
            && let Some(piece) = queue.pieces.pop_front()
        {
            bytes += piece.1.len();
            pieces.push(piece);
        }
        queue.bytes -= bytes as u64;
        Work {
            pieces,
            abandoned: std::mem::take(&mut queue.abandoned),
            over_limit: std::mem::take(&mut queue.over_limit),
            stop: queue.stop,
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.queue.lock().stop.is_some()
    }

    /// Takes over existing files, newest first, as far as there is space.
    fn take_over(&mut self, found: Vec<(u32, u64)>) {
        let options = self.shared.options;
        let target_bytes = options.bytes.saturating_sub(2 * options.file_bytes());
        let (mut taken_bytes, mut files) = (0, found.into_iter().rev());
        for (number, bytes) in files.by_ref() {
            if self.is_stopping() {
                return;
            }
            let taken = match takeover::take_over(&file_path(&self.shared.directory, number)) {
                Ok(taken) => taken,
                Err(error) => {
                    self.shared.read_failed(number, &error);
                    None
                }
            };
            let entries = |taken: &TakenOver| self.shared.index.entries() + taken.directory.len();
            match taken {
                None => self.remove(number, bytes),
                Some(taken)
                    if taken_bytes + taken.bytes <= target_bytes
                        && entries(&taken) <= options.entries()
                        && self.shared.files.read().len() < MAX_FILES =>
                {
                    taken_bytes += taken.bytes;
                    self.shared.used_bytes.fetch_add(taken.bytes, Ordering::Relaxed);
                    self.shared.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
                    self.publish(number, taken);
                }
                Some(_) => {
                    self.remove(number, bytes);
                    break;
                }
            }
        }
        for (number, bytes) in files {
            self.remove(number, bytes);
        }
    }

    fn publish(&self, number: u32, taken: TakenOver) {
        let file = CacheFile { file: Arc::new(taken.file), bytes: taken.bytes };
        self.shared.files.write().insert(number, file);
        for (hash, at) in taken.directory {
            // The entry in the newest file counts.
            self.shared.index.insert_if_absent(hash, EntryLocation { file: number, at });
        }
    }

    fn write(&mut self, pieces: Vec<(Key, Bytes)>) {
        for (key, value) in pieces {
            if self.shared.index.contains(key.hash()) {
                continue;
            }
            if !self.has_space(value.len()) && !self.begin_file() {
                add(&self.shared.counters.dropped, 1);
                continue;
            }
            if let Some(current) = &mut self.current {
                current.directory.push((key.hash(), current.end as u32));
                current.end += format::entry_bytes(value.len()) as u64;
                format::push_entry(key, &value, &mut self.buffer);
            }
        }
        self.flush();
    }

    /// Returns true if the current file has space for one more entry and the resulting directory.
    fn has_space(&self, value: usize) -> bool {
        let options = &self.shared.options;
        self.current.as_ref().is_some_and(|current| {
            let entries = current.directory.len() + 1;
            let tail = entries * DIRECTORY_BYTES + FOOTER_BYTES;
            entries <= options.entries_of_file()
                && current.end + (format::entry_bytes(value) + tail) as u64 <= options.file_bytes()
        })
    }

    /// Writes the buffer, and adds its entries to the index.
    fn flush(&mut self) {
        let Some(current) = &mut self.current else { return self.buffer.clear() };
        if self.buffer.is_empty() {
            return;
        }
        let bytes = self.buffer.len() as u64;
        let written = current.file.write_all_at(&self.buffer, current.end - bytes);
        self.buffer.clear();
        if let Err(error) = written {
            let number = current.number;
            self.failed(&error);
            return self.evict_file(number);
        }
        add(&self.shared.counters.written_bytes, bytes);
        if !grow(&self.shared, current.number, bytes) {
            // A reader has abandoned the file; it will be removed shortly.
            self.current = None;
            return;
        }
        for (hash, at) in &current.directory[current.written..] {
            self.shared.index.insert(*hash, EntryLocation { file: current.number, at: *at });
        }
        current.written = current.directory.len();
    }

    /// Finishes the current file and creates a new one, evicting the oldest files. Returns true if
    /// there is a current file now.
    fn begin_file(&mut self) -> bool {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.paused_until = None;
        self.end_file();
        let options = self.shared.options;
        let file_bytes = options.file_bytes();
        let Some(target_bytes) = self.shared.limit_bytes().checked_sub(2 * file_bytes) else { return false };
        let begun = self.newest.checked_add(1).ok_or_else(|| io::Error::other("file numbers are exhausted"));
        let begun = begun.and_then(|number| Ok((number, self.create(number)?)));
        let (number, file) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                self.failed(&error);
                return false;
            }
        };
        self.newest = number;
        self.shared.files.write().insert(number, CacheFile { file: file.clone(), bytes: 0 });
        self.buffer.extend_from_slice(&format::header());
        let end = self.buffer.len() as u64;
        self.current = Some(Current { number, file, end, directory: Directory::new(), written: 0 });
        let mut budget = CopyBudget { bytes: file_bytes / 2, entries: options.entries_of_file() / 2 };
        while (self.used_bytes() > target_bytes
            || self.shared.index.entries() > options.entries() - options.entries_of_file()
            || self.shared.files.read().len() > MAX_FILES)
            && self.evict_oldest(&mut budget)
        {}
        // Files that could not be removed use space, too.
        if self.current.is_some() && self.used_bytes() > target_bytes + file_bytes {
            self.paused_until = Some(Instant::now() + RETRY_DELAY);
            self.evict_file(number);
        }
        self.current.is_some()
    }

    fn create(&self, number: u32) -> io::Result<Arc<File>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        options.open(file_path(&self.shared.directory, number)).map(Arc::new)
    }

    /// Finishes the current file with its directory.
    fn end_file(&mut self) {
        self.flush();
        let Some(current) = self.current.take() else { return };
        if current.directory.is_empty() {
            return self.evict_file(current.number);
        }
        let tail = format::encode_directory(&current.directory, current.end);
        match current.file.write_all_at(&tail, current.end) {
            // If the file was abandoned, its bytes are not counted.
            Ok(()) => {
                grow(&self.shared, current.number, tail.len() as u64);
            }
            // The file is usable without a directory; a start then reads all of it.
            Err(error) => self.failed(&error),
        }
    }

    fn used_bytes(&self) -> u64 {
        self.shared.used_bytes.load(Ordering::Relaxed)
    }

    fn failed(&mut self, error: &io::Error) {
        self.shared.write_failed(error);
        self.paused_until = Some(Instant::now() + RETRY_DELAY);
    }

    /// Evicts the oldest file that is not being written. Copies its used entries within `budget`.
    /// Returns false if there is no such file.
    fn evict_oldest(&mut self, budget: &mut CopyBudget) -> bool {
        let current = self.current.as_ref().map(|current| current.number);
        let oldest = self
            .shared
            .files
            .read()
            .iter()
            .find(|(number, _)| Some(**number) != current)
            .map(|(number, file)| (*number, file.file.clone(), file.bytes));
        let Some((number, file, bytes)) = oldest else { return false };
        let known = match takeover::read_directory(&file, bytes) {
            Ok(Some(directory)) => {
                for (hash, at) in directory {
                    self.copy_or_forget(hash, EntryLocation { file: number, at }, &file, budget);
                }
                self.flush();
                // If writing the copies failed, their index entries still refer to the evicted
                // file.
                self.current.is_some() == current.is_some()
            }
            _ => false,
        };
        if !known {
            self.shared.index.remove_file(number);
        }
        if let Some(file) = self.shared.files.write().remove(&number) {
            self.remove(number, file.bytes);
        }
        true
    }

    /// Copies an entry to the current file if it was used; otherwise removes it from the index.
    fn copy_or_forget(&mut self, hash: u64, location: EntryLocation, file: &File, budget: &mut CopyBudget) {
        if self.shared.index.is_marked(hash, location) && self.copy_entry(hash, location, file, budget) {
            return;
        }
        self.shared.index.remove(hash, location);
    }

    fn copy_entry(
        &mut self,
        hash: u64,
        location: EntryLocation,
        file: &File,
        budget: &mut CopyBudget,
    ) -> bool {
        if budget.bytes == 0 || budget.entries == 0 || self.is_stopping() {
            return false;
        }
        let Ok(entry) = read_entry(file, location.at.into()) else { return false };
        let Some((key, value)) = format::check_entry(&entry) else { return false };
        if key.hash() != hash || !self.has_space(value.len()) {
            return false;
        }
        if self.buffer.len() >= BATCH_BYTES {
            self.flush();
        }
        let Some(current) = &mut self.current else { return false };
        current.directory.push((hash, current.end as u32));
        let bytes = format::entry_bytes(value.len()) as u64;
        current.end += bytes;
        format::push_entry(key, &entry[value], &mut self.buffer);
        budget.bytes = budget.bytes.saturating_sub(bytes);
        budget.entries -= 1;
        true
    }

    /// Evicts the oldest files, without copying entries, until the size limit holds.
    fn shrink(&mut self) {
        let mut none = CopyBudget { bytes: 0, entries: 0 };
        while self.used_bytes() > self.shared.limit_bytes() {
            if !self.evict_oldest(&mut none) {
                let Some(current) = &self.current else { return };
                let number = current.number;
                self.evict_file(number);
            }
        }
    }

    /// Evicts a file. If a reader has abandoned it in the meantime, it is removed for that reason.
    fn evict_file(&mut self, number: u32) {
        let file = self.shared.files.write().remove(&number);
        self.forget(number);
        if let Some(file) = file {
            self.remove(number, file.bytes);
        }
    }

    /// Stops writing a file, and removes its entries from the index.
    fn forget(&mut self, number: u32) {
        if self.current.as_ref().is_some_and(|current| current.number == number) {
            self.current = None;
            self.buffer.clear();
        }
        self.shared.index.remove_file(number);
    }

    /// Removes a file whose counted size is `bytes`. If that fails, the file remains counted, and
    /// the next start finds it.
    fn remove(&self, number: u32, bytes: u64) {
        match std::fs::remove_file(file_path(&self.shared.directory, number)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => self.shared.write_failed(&error),
            _removed => {
                self.shared.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }
}

/// How much may still be copied from evicted files.
struct CopyBudget {
    bytes: u64,
    entries: usize,
}

/// Counts the growth of a file. Returns false if the file was abandoned.
fn grow(shared: &Shared, number: u32, bytes: u64) -> bool {
    let mut files = shared.files.write();
    let file = files.get_mut(&number);
    let is_known = file.is_some();
    if let Some(file) = file {
        file.bytes += bytes;
        shared.used_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
    is_known
}

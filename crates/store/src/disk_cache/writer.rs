//! The thread "fulmar-cache": takes over what was left, writes what waits, throws away the oldest.
//!
//! A file is begun when the one before is full. Then the oldest files go until two files' length is free: one for the new file,
//! and the other so that what is saved from the oldest has room while that is still there. So the bound holds at every moment.
//!
//! What was wanted since it was written, in a file that goes, is written once more to the new file, and has to be wanted again
//! to be saved again; half of the new file at most, so that there is room for what is new. It costs a scan of a large tenant
//! nothing to be thrown away, and what is used by others stays.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::format::{self, DIRECTORY_BYTES, Directory, FOOTER_BYTES, Key};
use super::index::Place;
use super::reader::read_entry;
use super::takeover::{self, TakenOver};
use super::{CacheFile, MOST_FILES, Shared, Stop, add, file_path};

/// What is written at once, about.
const BATCH_BYTES: usize = 1 << 20;
/// How long nothing is written after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// The thread's own state.
pub(super) struct Writer {
    shared: Arc<Shared>,
    current: Option<Current>,
    /// The number of the newest file.
    newest: u32,
    /// Entries of the current file that are not written yet.
    buffer: Vec<u8>,
    paused_until: Option<Instant>,
}

/// The file that is being written.
struct Current {
    number: u32,
    file: Arc<File>,
    /// Where the next entry goes; what is in the buffer is before it.
    end: u64,
    directory: Directory,
    /// Of the directory's entries those that are written, and in the index.
    written: usize,
}

/// What there is to do.
struct Work {
    pieces: Vec<(Key, Bytes)>,
    given_up: Vec<(u32, u64)>,
    crowded: bool,
    stop: Option<Stop>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, newest: u32) -> Self {
        Writer { shared, current: None, newest, buffer: Vec::new(), paused_until: None }
    }

    /// Works until it is told to stop. `found` are the files that there were, the oldest first.
    pub(super) fn run(mut self, found: Vec<(u32, u64)>) {
        self.take_over(found);
        loop {
            let work = self.wait();
            for (number, bytes) in work.given_up {
                self.forget(number);
                self.remove(number, bytes);
            }
            if work.crowded {
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
        while queue.pieces.is_empty() && queue.given_up.is_empty() && !queue.crowded && queue.stop.is_none() {
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
            given_up: std::mem::take(&mut queue.given_up),
            crowded: std::mem::take(&mut queue.crowded),
            stop: queue.stop,
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.queue.lock().stop.is_some()
    }

    /// Takes over files, the newest first, as far as there is room.
    fn take_over(&mut self, found: Vec<(u32, u64)>) {
        let options = self.shared.options;
        let room_bytes = options.bytes.saturating_sub(2 * options.file_bytes());
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
                    if taken_bytes + taken.bytes <= room_bytes
                        && entries(&taken) <= options.entries()
                        && self.shared.files.read().len() < MOST_FILES =>
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
            // What is in a newer file counts.
            self.shared.index.insert_if_absent(hash, Place { file: number, at });
        }
    }

    fn write(&mut self, pieces: Vec<(Key, Bytes)>) {
        for (key, held) in pieces {
            if self.shared.index.contains(key.hash()) {
                continue;
            }
            if !self.has_room(held.len()) && !self.begin_file() {
                add(&self.shared.counters.dropped, 1);
                continue;
            }
            if let Some(current) = &mut self.current {
                current.directory.push((key.hash(), current.end as u32));
                current.end += format::entry_bytes(held.len()) as u64;
                format::push_entry(key, &held, &mut self.buffer);
            }
        }
        self.flush();
    }

    /// Whether the current file has room for one more entry, and for what ends it.
    fn has_room(&self, held: usize) -> bool {
        let options = &self.shared.options;
        self.current.as_ref().is_some_and(|current| {
            let entries = current.directory.len() + 1;
            let tail = entries * DIRECTORY_BYTES + FOOTER_BYTES;
            entries <= options.entries_of_file()
                && current.end + (format::entry_bytes(held) + tail) as u64 <= options.file_bytes()
        })
    }

    /// Writes what is in the buffer; from then on it can be found.
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
            return self.throw_away(number);
        }
        add(&self.shared.counters.written_bytes, bytes);
        if !grow(&self.shared, current.number, bytes) {
            // Given up by a reader: it will be removed in a moment.
            self.current = None;
            return;
        }
        for (hash, at) in &current.directory[current.written..] {
            self.shared.index.insert(*hash, Place { file: current.number, at: *at });
        }
        current.written = current.directory.len();
    }

    /// Ends the current file and begins a new one, for which the oldest go. Answers whether there is one now.
    fn begin_file(&mut self) -> bool {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.paused_until = None;
        self.end_file();
        let options = self.shared.options;
        let file_bytes = options.file_bytes();
        let Some(room_bytes) = self.shared.limit_bytes().checked_sub(2 * file_bytes) else { return false };
        let begun = self.newest.checked_add(1).ok_or_else(|| io::Error::other("file numbers are used up"));
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
        let mut chances = Chances { bytes: file_bytes / 2, entries: options.entries_of_file() / 2 };
        while (self.used_bytes() > room_bytes
            || self.shared.index.entries() > options.entries() - options.entries_of_file()
            || self.shared.files.read().len() > MOST_FILES)
            && self.throw_away_oldest(&mut chances)
        {}
        // What could not be removed takes room too.
        if self.current.is_some() && self.used_bytes() > room_bytes + file_bytes {
            self.paused_until = Some(Instant::now() + PAUSE);
            self.throw_away(number);
        }
        self.current.is_some()
    }

    fn create(&self, number: u32) -> io::Result<Arc<File>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        options.open(file_path(&self.shared.directory, number)).map(Arc::new)
    }

    /// Ends the current file with its directory.
    fn end_file(&mut self) {
        self.flush();
        let Some(current) = self.current.take() else { return };
        if current.directory.is_empty() {
            return self.throw_away(current.number);
        }
        let tail = format::encode_directory(&current.directory, current.end);
        match current.file.write_all_at(&tail, current.end) {
            // If it was given up there is nothing to be counted.
            Ok(()) => {
                grow(&self.shared, current.number, tail.len() as u64);
            }
            // It is good without; a start has to look at all of it.
            Err(error) => self.failed(&error),
        }
    }

    fn used_bytes(&self) -> u64 {
        self.shared.used_bytes.load(Ordering::Relaxed)
    }

    fn failed(&mut self, error: &io::Error) {
        self.shared.write_failed(error);
        self.paused_until = Some(Instant::now() + PAUSE);
    }

    /// The oldest file that is not being written to, what was wanted of it saved as far as there are chances for it. Answers
    /// whether there was one.
    fn throw_away_oldest(&mut self, chances: &mut Chances) -> bool {
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
                    self.save_or_forget(hash, Place { file: number, at }, &file, chances);
                }
                self.flush();
                // Else what was to be saved is still to be found where it was.
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

    /// Copies an entry to the current file if it was wanted, or forgets it.
    fn save_or_forget(&mut self, hash: u64, place: Place, file: &File, chances: &mut Chances) {
        if self.shared.index.is_marked(hash, place) && self.save(hash, place, file, chances) {
            return;
        }
        self.shared.index.remove(hash, place);
    }

    fn save(&mut self, hash: u64, place: Place, file: &File, chances: &mut Chances) -> bool {
        if chances.bytes == 0 || chances.entries == 0 || self.is_stopping() {
            return false;
        }
        let Ok(entry) = read_entry(file, place.at.into()) else { return false };
        let Some((key, held)) = format::check_entry(&entry) else { return false };
        if key.hash() != hash || !self.has_room(held.len()) {
            return false;
        }
        if self.buffer.len() >= BATCH_BYTES {
            self.flush();
        }
        let Some(current) = &mut self.current else { return false };
        current.directory.push((hash, current.end as u32));
        let bytes = format::entry_bytes(held.len()) as u64;
        current.end += bytes;
        format::push_entry(key, &entry[held], &mut self.buffer);
        chances.bytes = chances.bytes.saturating_sub(bytes);
        chances.entries -= 1;
        true
    }

    /// The disk has less room than the cache takes: the oldest go, and nothing of them is saved.
    fn shrink(&mut self) {
        let mut none = Chances { bytes: 0, entries: 0 };
        while self.used_bytes() > self.shared.limit_bytes() {
            if !self.throw_away_oldest(&mut none) {
                let Some(current) = &self.current else { return };
                let number = current.number;
                self.throw_away(number);
            }
        }
    }

    /// A file is of no use any more. (If a reader has given it up meanwhile, that is what removes it.)
    fn throw_away(&mut self, number: u32) {
        let file = self.shared.files.write().remove(&number);
        self.forget(number);
        if let Some(file) = file {
            self.remove(number, file.bytes);
        }
    }

    /// Nothing is written to a file any more, or found in it.
    fn forget(&mut self, number: u32) {
        if self.current.as_ref().is_some_and(|current| current.number == number) {
            self.current = None;
            self.buffer.clear();
        }
        self.shared.index.remove_file(number);
    }

    /// Removes a file of which so many bytes are counted. One that stays goes on to be counted, and is found by the next start.
    fn remove(&self, number: u32, bytes: u64) {
        match std::fs::remove_file(file_path(&self.shared.directory, number)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => self.shared.write_failed(&error),
            _gone => {
                self.shared.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
            }
        }
    }
}

/// How much may be saved of files that go.
struct Chances {
    bytes: u64,
    entries: usize,
}

/// A file has become longer. Answers whether it still counts.
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

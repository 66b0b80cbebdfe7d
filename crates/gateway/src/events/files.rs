//! The files of the event log: JSON lines in rotating files.
//!
//! - Files are named `events/N.jsonl`, where N is a sequence number with 16 hexadecimal digits.
//! - Events are appended to the file with the highest number. When it is full (2 MiB), a new file
//!   is created, and the oldest is deleted. At most 4 files are kept.
//! - A torn line at the end of a file, left by a crash, is ignored. The next event starts on a new
//!   line.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::event::Event;

/// The format version of each line.
const VERSION: u32 = 1;
/// The size at which a file is full.
const MAX_FILE_BYTES: u64 = 2 << 20;
/// Maximum number of files.
const MAX_FILES: usize = 4;
/// Maximum number of bytes read from a file, which another program may have extended.
const MAX_READ_BYTES: u64 = 2 * MAX_FILE_BYTES;

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    #[serde(flatten)]
    event: &'a Event,
}

/// Parsed before the rest of the line, which can differ in other versions.
#[derive(Deserialize)]
struct VersionOnly {
    v: u32,
}

/// The writer of the event log.
pub(super) struct Files {
    directory: PathBuf,
    /// The sequence number of the current file.
    number: u64,
    file: File,
    bytes: u64,
    /// The last line is incomplete.
    torn: bool,
    /// The id of the last event that was written.
    last_id: u64,
}

impl Files {
    /// Reads all files, and opens the last one for appending.
    pub(super) fn open(directory: &Path) -> io::Result<(Files, Vec<Event>)> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let (mut events, mut torn) = (Vec::new(), false);
        let numbers = numbers(directory)?;
        for number in &numbers {
            let mut text = Vec::new();
            File::open(path(directory, *number))?.take(MAX_READ_BYTES).read_to_end(&mut text)?;
            events.extend(text.split(|byte| *byte == b'\n').filter_map(parse));
            torn = text.last().is_some_and(|last| *last != b'\n');
        }
        let number = numbers.last().copied().unwrap_or(1);
        let file = append_to(directory, number)?;
        let bytes = file.metadata()?.len();
        let last_id = events.iter().map(|event| event.id).max().unwrap_or(0);
        Ok((Files { directory: directory.to_owned(), number, file, bytes, torn, last_id }, events))
    }

    /// Appends events and syncs the file. After an error, some events may have been written. A
    /// retry with the same events writes only those with an id above the last one that was written.
    pub(super) fn append(&mut self, events: &[Arc<Event>]) -> io::Result<()> {
        if self.bytes >= MAX_FILE_BYTES {
            self.begin_next()?;
        }
        let mut lines = Vec::new();
        if self.torn {
            lines.push(b'\n');
        }
        for event in events.iter().filter(|event| event.id > self.last_id) {
            serde_json::to_writer(&mut lines, &Line { v: VERSION, event })?;
            lines.push(b'\n');
        }
        self.torn = true; // until the write has succeeded
        self.file.write_all(&lines)?;
        (self.torn, self.bytes) = (false, self.bytes + lines.len() as u64);
        self.last_id = events.last().map_or(self.last_id, |event| event.id);
        self.file.sync_data()
    }

    fn begin_next(&mut self) -> io::Result<()> {
        self.file = append_to(&self.directory, self.number + 1)?;
        (self.number, self.bytes, self.torn) = (self.number + 1, self.file.metadata()?.len(), false);
        let numbers = numbers(&self.directory)?;
        for number in &numbers[..numbers.len().saturating_sub(MAX_FILES)] {
            std::fs::remove_file(path(&self.directory, *number))?;
        }
        Ok(())
    }
}

fn parse(line: &[u8]) -> Option<Event> {
    let VersionOnly { v } = serde_json::from_slice(line).ok()?;
    if v == VERSION { serde_json::from_slice(line).ok() } else { None }
}

fn path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("{number:016x}.jsonl"))
}

fn append_to(directory: &Path, number: u64) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path(directory, number))
}

/// The sequence numbers of the existing files, in ascending order.
fn numbers(directory: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        let digits = name.to_str().and_then(|name| name.strip_suffix(".jsonl"));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        numbers
            .extend(number.filter(|number| path(directory, *number).file_name() == Some(name.as_os_str())));
    }
    numbers.sort_unstable();
    match numbers.last() {
        Some(&u64::MAX) => Err(io::Error::new(ErrorKind::InvalidData, "event file sequence exhausted")),
        _ => Ok(numbers),
    }
}

#[cfg(test)]
mod tests {
    use super::super::kinds::Kind;
    use super::*;

    fn event(id: u64) -> Arc<Event> {
        Arc::new(Event { id, ..Event::new(Kind::UserCreated).detail("role", "x".repeat(60)) })
    }

    fn ids(directory: &Path) -> Vec<u64> {
        Files::open(directory).unwrap().1.iter().map(|event| event.id).collect()
    }

    #[test]
    fn torn_lines_and_unknown_versions_are_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, events) = Files::open(directory.path()).unwrap();
        assert!(events.is_empty());
        files.append(&[event(1), event(2)]).unwrap();
        let file = path(directory.path(), 1);
        let whole = std::fs::read(&file).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&file, &whole[..cut]).unwrap();
            let (mut files, events) = Files::open(directory.path()).unwrap();
            let kept = events.len();
            files.append(&[event(3)]).unwrap();
            assert_eq!(ids(directory.path()).len(), kept + 1, "cut at {cut}");
            assert_eq!(ids(directory.path()).last(), Some(&3));
        }
        std::fs::write(&file, b"\xff\n{\"v\":2,\"id\":7}\n{\"v\":1}\n[]\n\n").unwrap();
        assert!(ids(directory.path()).is_empty());
    }

    #[test]
    fn failed_write_does_not_corrupt_later_lines() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        files.append(&[event(1)]).unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let file = std::mem::replace(&mut files.file, full);
        assert!(files.append(&[event(2)]).is_err());
        files.file = file;
        files.append(&[event(2)]).unwrap();
        assert_eq!(ids(directory.path()), [1, 2]);
    }

    #[test]
    fn files_are_rotated() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        let (many, mut appended) = (10_000, 0);
        while files.number < MAX_FILES as u64 + 3 {
            let events: Vec<Arc<Event>> = (1..=many).map(|n| event(appended + n)).collect();
            files.append(&events).unwrap();
            appended += many;
        }
        let kept = numbers(directory.path()).unwrap();
        assert_eq!(kept, (files.number - MAX_FILES as u64 + 1..=files.number).collect::<Vec<_>>());
        let read = ids(directory.path()).len() as u64;
        assert!(read >= many && read < appended, "{read}");
    }

    #[test]
    fn events_are_not_written_twice_after_a_failed_sync() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        // A pipe accepts writes, but sync fails.
        let (mut reader, writer) = io::pipe().unwrap();
        files.file = File::from(std::os::fd::OwnedFd::from(writer));
        for ids in [1..=2, 1..=2, 1..=3] {
            let events: Vec<_> = ids.map(event).collect();
            assert!(files.append(&events).is_err());
        }
        drop(files);
        let mut text = Vec::new();
        reader.read_to_end(&mut text).unwrap();
        let ids: Vec<u64> =
            text.split(|byte| *byte == b'\n').filter_map(parse).map(|event| event.id).collect();
        assert_eq!(ids, [1, 2, 3]);
    }
}

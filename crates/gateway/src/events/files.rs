//! The journal's files: lines of JSON, in a few files that take turns.
//!
//! `events/N.jsonl`, N with 16 hexadecimal digits: the highest is written to; when it is full a new one begins, and the
//! oldest goes. What a crash has left of a last line is no event; the next one begins on a line of its own.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Event;

/// The version of every line.
const VERSION: u32 = 1;
/// A file that has so much is full.
const FILE_BYTES: u64 = 2 << 20;
/// Files at most.
const FILES: usize = 4;
/// What is read of a file at most: somebody else may have written to it.
const READ_BYTES: u64 = 2 * FILE_BYTES;

#[derive(Serialize)]
struct Line<'a> {
    v: u32,
    #[serde(flatten)]
    event: &'a Event,
}

/// Read first: the rest of a line of another version may look different.
#[derive(Deserialize)]
struct VersionOnly {
    v: u32,
}

/// The file that is written to.
pub(super) struct Files {
    directory: PathBuf,
    number: u64,
    file: File,
    bytes: u64,
    /// The last line has no end.
    torn: bool,
    /// Of the last event that was written.
    last_id: u64,
}

impl Files {
    /// Reads what there is, and goes on with the last file.
    pub(super) fn open(directory: &Path) -> io::Result<(Files, Vec<Event>)> {
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let (mut events, mut torn) = (Vec::new(), false);
        let numbers = numbers(directory)?;
        for number in &numbers {
            let mut text = Vec::new();
            File::open(path(directory, *number))?.take(READ_BYTES).read_to_end(&mut text)?;
            events.extend(text.split(|byte| *byte == b'\n').filter_map(parse));
            torn = text.last().is_some_and(|last| *last != b'\n');
        }
        let number = numbers.last().copied().unwrap_or(1);
        let file = append_to(directory, number)?;
        let bytes = file.metadata()?.len();
        let last_id = events.iter().map(|event| event.id).max().unwrap_or(0);
        Ok((Files { directory: directory.to_owned(), number, file, bytes, torn, last_id }, events))
    }

    /// Writes events, and syncs them. After an error some may have been written; if they come again and all of them had been,
    /// they are only synced.
    pub(super) fn append(&mut self, events: &[Arc<Event>]) -> io::Result<()> {
        if self.bytes >= FILE_BYTES {
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
        self.torn = true; // unless all of it gets there
        self.file.write_all(&lines)?;
        (self.torn, self.bytes) = (false, self.bytes + lines.len() as u64);
        self.last_id = events.last().map_or(self.last_id, |event| event.id);
        self.file.sync_data()
    }

    fn begin_next(&mut self) -> io::Result<()> {
        self.file = append_to(&self.directory, self.number + 1)?;
        (self.number, self.bytes, self.torn) = (self.number + 1, self.file.metadata()?.len(), false);
        let numbers = numbers(&self.directory)?;
        for number in &numbers[..numbers.len().saturating_sub(FILES)] {
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

/// Of the files that there are, in order.
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
        Some(&u64::MAX) => {
            Err(io::Error::new(ErrorKind::InvalidData, "there is no number for the next file"))
        }
        _ => Ok(numbers),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    fn event(id: u64) -> Arc<Event> {
        Arc::new(Event { id, ..Event::new(Kind::UserCreated).detail("role", "x".repeat(60)) })
    }

    fn ids(directory: &Path) -> Vec<u64> {
        Files::open(directory).unwrap().1.iter().map(|event| event.id).collect()
    }

    #[test]
    fn a_torn_line_and_lines_of_others_are_passed_over() {
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
    fn what_could_not_be_written_tears_no_other_line() {
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
    fn files_take_turns() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        let (many, mut appended) = (10_000, 0);
        while files.number < FILES as u64 + 3 {
            let events: Vec<Arc<Event>> = (1..=many).map(|n| event(appended + n)).collect();
            files.append(&events).unwrap();
            appended += many;
        }
        let kept = numbers(directory.path()).unwrap();
        assert_eq!(kept, (files.number - FILES as u64 + 1..=files.number).collect::<Vec<_>>());
        let read = ids(directory.path()).len() as u64;
        assert!(read >= many && read < appended, "{read}");
    }

    #[test]
    fn what_is_written_and_cannot_be_synced_is_not_written_again() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        // It takes bytes, and knows no sync.
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

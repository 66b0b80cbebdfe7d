//! The files of a log, as the log sees them: a flat directory of files of fixed length.
//!
//! The trait is small so that a test can stand in for the disk and lose exactly what a disk may lose. What the log
//! relies on, and a real file system gives:
//!
//! - what was written is on the disk once `sync_data` has returned without an error, and names once `sync_dir` has;
//! - before that any subset of the written sectors may be there, and changes of names happen in order;
//! - after a failed `sync_data` nothing is known of what was written since the last good one, and a later good one
//!   says nothing about it either (the kernel forgets that those pages were dirty).

mod direct;
mod faulty;
mod std_files;

use std::io;

use crate::failpoint;

pub use faulty::{Fault, FaultyFiles, Operation};
pub use std_files::StdFiles;

/// A directory of log files. Every call may block on the disk.
pub trait LogFiles: Send + Sync + 'static {
    /// The names of all files.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Makes a file of `bytes` zeros that are really on the disk: writing them again changes no metadata, so that
    /// `sync_data` need not wait for the file system's journal, and cannot run out of space. Replaces a file of that
    /// name. After an error no file of that name is left, as far as possible.
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>>;

    /// Opens a file to read and write.
    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>>;

    /// Renames a file; one that had the new name is gone.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all changes of names durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// The file's name for messages to people: with its path.
    fn describe(&self, name: &str) -> String {
        name.to_owned()
    }

    /// Whether [`LogFiles::pass`] may stop at this place.
    fn stops_at(&self, place: &'static str) -> bool {
        failpoint::is_armed(place)
    }

    /// Called when the log passes a named place; see [`failpoint`].
    fn pass(&self, place: &'static str) {
        failpoint::hit(place);
    }
}

/// One log file. Every call may block on the disk.
pub trait LogFile: Send + Sync {
    /// Reads exactly `buffer.len()` bytes at `offset`.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`. What stands behind them up to the next multiple of 4096 may become zeros: logs are
    /// written front to back.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes what was written durable.
    fn sync_data(&self) -> io::Result<()>;

    /// The file's length in bytes.
    fn length_bytes(&self) -> io::Result<u64>;
}

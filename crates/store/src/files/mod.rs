//! The file system interface of the log: a flat directory of files of fixed length.
//!
//! The trait is small, so that a test can replace the disk and lose exactly what a real disk may
//! lose. The log relies on the following, which real file systems provide:
//!
//! - Written data is on disk once `sync_data` has returned without an error. Changes of names are
//!   on disk once `sync_dir` has.
//! - Before that, a power failure may preserve any subset of the written sectors. Changes of names
//!   take effect in order.
//! - After a failed `sync_data`, the state of everything written since the last successful one is
//!   unknown, and a later successful call does not change that: the kernel has marked those pages
//!   clean.

mod direct;
mod faulty;
mod std_files;

use std::io;

use crate::failpoint;

pub(crate) use direct::DirectWriter;
pub use faulty::{Fault, FaultyFiles, Operation};
pub use std_files::StdFiles;

/// A directory of log files. Every call may block on disk I/O.
pub trait LogFiles: Send + Sync + 'static {
    /// Lists the names of all files.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Creates a file of `bytes` zeros, replacing a file of the same name. The zeros are physically
    /// written, so that overwriting them changes no metadata: `sync_data` then does not wait for
    /// the file system's journal, and a write cannot run out of space. After an error the file is
    /// removed if possible.
    fn create(&self, name: &str, bytes: u64) -> io::Result<Box<dyn LogFile>>;

    /// Opens a file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Box<dyn LogFile>>;

    /// Renames a file, replacing any file that has the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all changes of names durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// Returns the file's name for error messages: with its path, if it has one.
    fn describe(&self, name: &str) -> String {
        name.to_owned()
    }

    /// Returns true if [`LogFiles::hit_failpoint`] may stop the process at this failpoint.
    fn is_failpoint_armed(&self, failpoint: &'static str) -> bool {
        failpoint::is_armed(failpoint)
    }

    /// Called when the log passes a failpoint; see [`failpoint`].
    fn hit_failpoint(&self, failpoint: &'static str) {
        failpoint::hit(failpoint);
    }
}

/// One log file. Every call may block on disk I/O.
pub trait LogFile: Send + Sync {
    /// Reads exactly `buffer.len()` bytes at `offset`.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`. The bytes that follow, up to the next multiple of 4096,
    /// may become zeros: logs are written front to back.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes all written data durable.
    fn sync_data(&self) -> io::Result<()>;

    /// The file's length in bytes.
    fn length_bytes(&self) -> io::Result<u64>;
}

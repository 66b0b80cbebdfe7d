//! Turns a local file that contains a complete segment into a segment without copying it.
//!
//! ```text
//! unnamed file -> sync -> link it as segments/ID -> sync the directory
//! ```
//!
//! The file is linked after its bytes are durable, so a crash leaves a complete segment or none.
//! Before the link there is nothing to clean up, because the file has no name. This requires a
//! store in a local directory and a file on the same file system; otherwise use
//! [`super::SegmentWriter`].

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path as FilePath;

use fulmar_pages::SegmentId;
use rustix::fs::{AtFlags, CWD, Mode};
use rustix::io::Errno;

use super::{PageStore, SEGMENTS, StoreError, segment_object};
use crate::store::{Failure, FailureKind, Store};

impl PageStore {
    /// Stores the segment in an unnamed file by linking the file. The segment is durable on return.
    /// Returns None, without any effect, if the store does not support it. Blocks while the file is
    /// synced.
    pub fn adopt_segment(&self, file: &File) -> Result<Option<SegmentId>, StoreError> {
        let Some(directory) = self.store.directory() else { return Ok(None) };
        let id = self.new_segment();
        let failed = |cause: io::Error| {
            let failure = Failure::new(FailureKind::Other, cause);
            StoreError::failed("store", segment_object(id), &self.store, failure)
        };
        file.sync_all().map_err(failed)?;
        match link(file, directory, id) {
            Ok(linked) => Ok(linked.then_some(id)),
            Err(cause) => Err(failed(cause.into())),
        }
    }
}

/// Returns false if the file cannot be linked.
fn link(file: &File, store: &FilePath, id: SegmentId) -> Result<bool, Errno> {
    let segments = store.join(SEGMENTS);
    match rustix::fs::mkdir(&segments, Mode::from_raw_mode(0o777)) {
        Ok(()) => sync_directory(store)?,
        Err(Errno::EXIST) => {}
        Err(cause) => return Err(cause),
    }
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, unnamed, CWD, segments.join(id.to_string()), AtFlags::SYMLINK_FOLLOW) {
        Ok(()) => sync_directory(&segments).map(|()| true),
        // Different file systems, a file system without hard links, or no /proc.
        Err(Errno::XDEV | Errno::PERM | Errno::NOTSUP | Errno::NOENT) => Ok(false),
        Err(cause) => Err(cause),
    }
}

fn sync_directory(directory: &FilePath) -> Result<(), Errno> {
    let sync = || File::open(directory)?.sync_all();
    sync().map_err(|cause| Errno::from_io_error(&cause).unwrap_or(Errno::IO))
}

//! Reading pieces of local objects without a thread that waits.
//!
//! A page that is read again soon is most often in the system's page cache: copying it from there takes a microsecond,
//! handing the read to a thread that may wait takes thirty, and opening the file each time as much again. So files that
//! were read lately stay open, and are asked for what is there at once (`RWF_NOWAIT`). Only what the disk must be asked
//! for goes the longer way.
//!
//! Objects never change, so an open file is never stale. One that is deleted leaves the list, so that its space is free.

use std::fs::File;
use std::io::IoSliceMut;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use quick_cache::sync::Cache;
use rustix::io::{ReadWriteFlags, preadv2};

/// Files that are kept open.
const OPEN_FILES: usize = 512;
/// Larger pieces are not asked for: copying them would keep others waiting.
const MOST_BYTES: u64 = 256 << 10;

/// The files that were read lately, by the names of their objects.
pub(super) struct OpenFiles(Cache<String, Arc<File>>);

impl OpenFiles {
    pub(super) fn new() -> Self {
        OpenFiles(Cache::new(OPEN_FILES))
    }

    /// Reads `bytes` at `offset` of an object in the directory `root`, if all of them can be had at once.
    pub(super) fn read_now(&self, root: &Path, name: &str, offset: u64, bytes: u64) -> Option<Bytes> {
        if bytes > MOST_BYTES {
            return None;
        }
        let file = self.0.get_or_insert_with(name, || File::open(root.join(name)).map(Arc::new)).ok()?;
        let mut buffer = vec![0; bytes as usize];
        let read = preadv2(&*file, &mut [IoSliceMut::new(&mut buffer)], offset, ReadWriteFlags::NOWAIT);
        // Less is what the disk must be asked for, or the end of the object.
        (read == Ok(buffer.len())).then(|| buffer.into())
    }

    /// An object is deleted.
    pub(super) fn close(&self, name: &str) {
        self.0.remove(name);
    }
}

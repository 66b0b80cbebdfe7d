//! Reading pieces of local objects without a thread that waits.
//!
//! A page that is read again soon is most often in the system's page cache: copying it from there takes a microsecond,
//! handing the read to a thread that may wait takes thirty, and opening the file each time as much again. So files that
//! were read lately stay open, and are asked for what is there at once (`RWF_NOWAIT`). Only opening a file, and what the
//! disk must be asked for, go the longer way: either may take as long as the disk, or the network behind it, pleases.
//!
//! Objects never change, so an open file is never stale. One that is deleted leaves the list, so that its space is free.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use quick_cache::sync::Cache;
use rustix::io::{ReadWriteFlags, preadv2};

/// Files that are kept open.
const OPEN_FILES: usize = 512;
/// Larger pieces are not asked for: copying them would keep others waiting.
const MOST_BYTES: u64 = 256 << 10;

/// Reads what of a file the system has in memory. Answers whether that was all that was wanted; it never waits for the disk.
pub(crate) fn read_at_once(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let bytes = buffer.len();
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) == Ok(bytes)
}

/// The files that were read lately, by the names of their objects.
pub(super) struct OpenFiles(Arc<Cache<String, Arc<File>>>);

impl OpenFiles {
    pub(super) fn new() -> Self {
        OpenFiles(Arc::new(Cache::new(OPEN_FILES)))
    }

    /// Reads `bytes` at `offset` of an object in the directory `root`, if it is a small piece and all of it is there.
    pub(super) async fn read(&self, root: &Path, name: &str, offset: u64, bytes: u64) -> Option<Bytes> {
        if bytes > MOST_BYTES {
            return None;
        }
        let mut buffer = vec![0; bytes as usize];
        let known = self.0.get(name);
        if let Some(file) = &known
            && read_at_once(file, &mut buffer, offset)
        {
            return Some(buffer.into());
        }
        let (files, path, name) = (self.0.clone(), root.join(name), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let file = match known {
                Some(file) => file,
                None => opened(&files, name, &path)?,
            };
            file.read_exact_at(&mut buffer, offset).ok().map(|()| buffer.into())
        });
        read.await.ok().flatten()
    }

    /// An object has been deleted.
    pub(super) fn close(&self, name: &str) {
        self.0.remove(name);
    }
}

/// Opens a file and keeps it in the list. Blocks the thread.
fn opened(files: &Cache<String, Arc<File>>, name: String, path: &Path) -> Option<Arc<File>> {
    let file = Arc::new(File::open(path).ok()?);
    files.insert(name.clone(), file.clone());
    // Whoever deletes it does so before he closes it. So he finds it in the list, or it is seen here that it is gone.
    if !path.exists() {
        files.remove(&name);
    }
    Some(file)
}

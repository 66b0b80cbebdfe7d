//! Keeps recently read files of local objects open.
//!
//! Opening a file needs a blocking thread, which takes as long as reading a page from the disk.
//! Reading a page from an open file needs no thread if the kernel supports io_uring
//! ([`crate::reads`]).
//!
//! Objects are immutable, so an open file is never stale. The file of a deleted object is closed,
//! so that its space is released.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use quick_cache::sync::Cache;

use crate::reads::{self, ReadTarget};

/// Maximum number of open files.
const OPEN_FILES: usize = 512;

/// Open files by the names of their objects.
pub(super) struct OpenFiles(Arc<Cache<String, Arc<File>>>);

impl OpenFiles {
    pub(super) fn new() -> Self {
        OpenFiles(Arc::new(Cache::new(OPEN_FILES)))
    }

    /// Reads `bytes` bytes at `offset` of an object in the directory `root`. Fails if not all of
    /// them exist.
    pub(super) async fn read(&self, root: &Path, name: &str, offset: u64, bytes: usize) -> io::Result<Bytes> {
        let read = match self.0.get(name) {
            Some(file) => reads::read_exact_at(ReadTarget::new(file), offset, bytes).await,
            None => self.open_and_read(root, name, offset, bytes).await,
        };
        read.map(Bytes::from)
    }

    async fn open_and_read(&self, root: &Path, name: &str, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
        reads::count_blocking_read();
        let (files, path, name) = (self.0.clone(), root.join(name), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let (file, mut buffer) = (open(&files, name, &path)?, vec![0; bytes]);
            file.read_exact_at(&mut buffer, offset).map(|()| buffer)
        });
        read.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
    }

    /// Closes the file of a deleted object.
    pub(super) fn close(&self, name: &str) {
        self.0.remove(name);
    }
}

/// Opens a file and adds it to the cache. Blocks the thread.
fn open(files: &Cache<String, Arc<File>>, name: String, path: &Path) -> io::Result<Arc<File>> {
    let file = Arc::new(File::open(path)?);
    files.insert(name.clone(), file.clone());
    // The object is deleted before its file is closed. Either `close` finds the file in the cache,
    // or this check finds that the object is gone.
    if !path.exists() {
        files.remove(&name);
    }
    Ok(file)
}

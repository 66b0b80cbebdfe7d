//! Files of local objects that were read lately, which stay open.
//!
//! Opening a file takes a thread that may wait: as long as reading a page from the disk does. Reading a page from one that is open takes
//! none, where the system has io_uring ([`crate::reads`]).
//!
//! Objects never change, so an open file is never stale. One that is deleted leaves the list, so that its space is free.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use quick_cache::sync::Cache;

use crate::reads::{self, Kept};

/// Files that are kept open.
const OPEN_FILES: usize = 512;

/// The files that were read lately, by the names of their objects.
pub(super) struct OpenFiles(Arc<Cache<String, Arc<File>>>);

impl OpenFiles {
    pub(super) fn new() -> Self {
        OpenFiles(Arc::new(Cache::new(OPEN_FILES)))
    }

    /// Reads `bytes` at `offset` of an object in the directory `root`, if all of it is there.
    pub(super) async fn read(&self, root: &Path, name: &str, offset: u64, bytes: usize) -> io::Result<Bytes> {
        let read = match self.0.get(name) {
            Some(file) => reads::read_exact_at(Kept::new(file), offset, bytes).await,
            None => self.open_and_read(root, name, offset, bytes).await,
        };
        read.map(Bytes::from)
    }

    async fn open_and_read(&self, root: &Path, name: &str, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
        reads::goes_to_the_disk();
        let (files, path, name) = (self.0.clone(), root.join(name), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let (file, mut buffer) = (open(&files, name, &path)?, vec![0; bytes]);
            file.read_exact_at(&mut buffer, offset).map(|()| buffer)
        });
        read.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
    }

    /// An object has been deleted.
    pub(super) fn close(&self, name: &str) {
        self.0.remove(name);
    }
}

/// Opens a file and keeps it in the list. Blocks the thread.
fn open(files: &Cache<String, Arc<File>>, name: String, path: &Path) -> io::Result<Arc<File>> {
    let file = Arc::new(File::open(path)?);
    files.insert(name.clone(), file.clone());
    // Whoever deletes it does so before he closes it. So he finds it in the list, or it is seen here that it is gone.
    if !path.exists() {
        files.remove(&name);
    }
    Ok(file)
}

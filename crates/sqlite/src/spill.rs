//! Byte buffers that spill to an unlinked temporary file when they grow beyond a threshold.
//!
//! They hold SQLite's journals and temporary files and a transaction's changed pages, so that a
//! transaction of 1 GB holds only a few megabytes of memory. The file has no name, so no crash
//! leaves it behind.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;

use crate::temporary::{Quota, TemporaryCharge};
use crate::{Error, sqlstate};

/// Directory of the temporary files, and their count.
#[derive(Debug)]
pub struct SpillArea {
    directory: PathBuf,
    /// Maximum bytes of a buffer in memory; a larger buffer moves to a file.
    threshold_bytes: usize,
    files: AtomicU64,
    runtime: Handle,
}

impl SpillArea {
    /// Must be called inside a tokio runtime that outlives the area.
    pub fn new(directory: &Path, threshold_bytes: usize) -> Arc<Self> {
        let (directory, files) = (directory.to_owned(), AtomicU64::new(0));
        Arc::new(SpillArea { directory, threshold_bytes, files, runtime: Handle::current() })
    }

    /// Number of temporary files created so far.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Maximum bytes of a buffer in memory.
    pub fn threshold_bytes(&self) -> usize {
        self.threshold_bytes
    }

    /// A runtime for blocking work, available on any thread.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Creates a file without a name. Closing deletes it.
    pub fn file(&self) -> io::Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        self.files.fetch_add(1, Ordering::Relaxed);
        File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(&self.directory)
    }

    /// Closes files on another thread, since freeing their page cache takes about 100 ms per GB.
    pub fn close(&self, files: impl Send + 'static) {
        let closing = || self.runtime.spawn_blocking(move || drop(files));
        // If no thread can be started the runtime panics, and unwinding closes the files.
        let _ = catch_unwind(AssertUnwindSafe(closing));
    }
}

/// A connection's temporary files: their directory and the quota they are charged to.
#[derive(Clone, Debug)]
pub struct TemporaryFiles {
    /// The directory.
    pub area: Arc<SpillArea>,
    /// The quota.
    pub quota: Arc<Quota>,
}

impl TemporaryFiles {
    /// Creates a file.
    pub fn create(&self) -> io::Result<TemporaryFile> {
        let charge = TemporaryCharge::new(&self.quota);
        Ok(TemporaryFile { open: Some((self.area.file()?, charge)), area: self.area.clone() })
    }
}

/// A file without a name. Bytes are charged before they are written.
#[derive(Debug)]
pub struct TemporaryFile {
    /// None only during drop.
    open: Option<(File, TemporaryCharge)>,
    area: Arc<SpillArea>,
}

impl TemporaryFile {
    fn parts(&mut self) -> io::Result<&mut (File, TemporaryCharge)> {
        self.open.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Writes at an offset. Fails if the quota is exceeded.
    pub fn write_all_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let (file, charge) = self.parts()?;
        charge.grow_to(offset + bytes.len() as u64).map_err(refused)?;
        file.write_all_at(bytes, offset)
    }

    /// The file.
    pub fn file(&self) -> io::Result<&File> {
        self.open.as_ref().map(|(file, _)| file).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        let (file, charge) = self.parts()?;
        file.set_len(length)?;
        charge.shrink_to(length);
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // The file is closed before the charge is released, so released space is really free.
        self.area.close(self.open.take());
    }
}

/// Wraps the reason for rejecting a write in an I/O error.
pub fn refused(error: Error) -> io::Error {
    io::Error::other(error)
}

/// Extracts the error for the client from an I/O error, if it contains one.
pub fn refusal(cause: &io::Error) -> Option<&Error> {
    cause.get_ref().and_then(|inner| inner.downcast_ref())
}

/// The error of a transaction whose temporary file could not be read or written.
pub fn error(cause: &io::Error) -> Error {
    if let Some(refusal) = refusal(cause) {
        return refusal.clone();
    }
    let state = match cause.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => sqlstate::DISK_FULL,
        _ => sqlstate::IO_ERROR,
    };
    Error::new(state, format!("could not access temporary file: {cause}"))
        .hint("Free space on the disk of the data directory, or make the transaction smaller.")
}

/// Total size of the buffers that each thread keeps for reuse, the size of the largest pooled
/// buffer, and the size of a new one. A buffer is charged with its full capacity. The largest fits
/// into a connection's initial charge.
const MAX_POOLED_BYTES: usize = 2 << 20;
const MAX_POOLED_BUFFER_BYTES: usize = 128 << 10;
const MIN_POOLED_BUFFER_BYTES: usize = 16 << 10;

thread_local! {
    /// Every transaction fills and empties a journal. Thousands of connections share a few warm
    /// buffers; growing a buffer would copy its contents each time.
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { buffers: Vec::new(), bytes: 0 }) };
}

struct Pool {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// Returns an empty buffer: the most recently used one, or a new one.
fn take_buffer() -> Vec<u8> {
    let kept = POOL.with_borrow_mut(|pool| {
        let buffer = pool.buffers.pop()?;
        pool.bytes -= buffer.capacity();
        Some(buffer)
    });
    kept.unwrap_or_else(|| Vec::with_capacity(MIN_POOLED_BUFFER_BYTES))
}

fn give_buffer(mut buffer: Vec<u8>) {
    buffer.clear();
    // `try_with`: a connection may be closed while its thread is being torn down.
    let _ = POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        let is_useful = (MIN_POOLED_BUFFER_BYTES..=MAX_POOLED_BUFFER_BYTES).contains(&buffer.capacity());
        if is_useful && pool.bytes + buffer.capacity() <= MAX_POOLED_BYTES {
            pool.bytes += buffer.capacity();
            pool.buffers.push(buffer);
        }
    });
}

/// The contents of one file.
#[derive(Debug)]
pub(crate) struct SpillBuffer {
    files: TemporaryFiles,
    memory: Vec<u8>,
    file: Option<TemporaryFile>,
    length: u64,
}

impl SpillBuffer {
    /// Creates an empty buffer.
    pub(crate) fn new(files: TemporaryFiles) -> Self {
        SpillBuffer { files, memory: Vec::new(), file: None, length: 0 }
    }

    /// The length of the contents.
    pub(crate) fn len(&self) -> u64 {
        self.length
    }

    /// Whether a buffer of this length is kept in a file.
    pub(crate) fn needs_file(&self, length: u64) -> bool {
        self.file.is_some() || length > self.files.area.threshold_bytes as u64
    }

    /// Memory used by `length` bytes; 0 if the buffer is in a file.
    pub(crate) fn memory_bytes(&self, length: u64) -> u64 {
        match self.file {
            Some(_) => 0,
            None if length == 0 => 0,
            None => (self.memory.capacity() as u64).max(length.next_power_of_two()),
        }
    }

    /// Acquires the buffer that the next bytes in memory are written to.
    /// [`SpillBuffer::memory_bytes`] is exact afterwards.
    pub(crate) fn take_memory(&mut self) {
        if self.file.is_none() && self.memory.capacity() == 0 {
            self.memory = take_buffer();
        }
    }

    /// Moves the contents to a file.
    pub(crate) fn move_to_file(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            let mut file = self.files.create()?;
            file.write_all_at(&self.memory, 0)?;
            self.file = Some(file);
            give_buffer(std::mem::take(&mut self.memory));
        }
        Ok(())
    }

    /// Writes at `offset`; a gap before it reads as zeros.
    pub(crate) fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        if self.needs_file(end) {
            self.move_to_file()?;
        }
        match &mut self.file {
            Some(file) => file.write_all_at(bytes, offset)?,
            None => self.write_in_memory(offset as usize, bytes),
        }
        self.length = self.length.max(end);
        Ok(())
    }

    fn write_in_memory(&mut self, offset: usize, bytes: &[u8]) {
        self.take_memory();
        let capacity = self.memory_bytes((offset + bytes.len()) as u64) as usize;
        self.memory.reserve_exact(capacity.saturating_sub(self.memory.len()));
        if self.memory.len() < offset {
            self.memory.resize(offset, 0);
        }
        let (over, beyond) = bytes.split_at(bytes.len().min(self.memory.len() - offset));
        self.memory[offset..offset + over.len()].copy_from_slice(over);
        self.memory.extend_from_slice(beyond);
    }

    /// Fills `bytes` from `offset`. Returns the number of bytes available; the rest is zeros.
    pub(crate) fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let available = self.length.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let (present, beyond) = bytes.split_at_mut(available);
        match &self.file {
            Some(file) => {
                let file = file.file()?;
                let mut done = 0;
                while done < present.len() {
                    match file.read_at(&mut present[done..], offset + done as u64)? {
                        // Beyond the file's end but within `length`: a gap that was never written.
                        0 => {
                            present[done..].fill(0);
                            break;
                        }
                        n => done += n,
                    }
                }
            }
            None if available > 0 => {
                present.copy_from_slice(&self.memory[offset as usize..offset as usize + available])
            }
            None => {}
        }
        beyond.fill(0);
        Ok(available)
    }

    /// Shortens the contents.
    pub(crate) fn truncate(&mut self, length: u64) -> io::Result<()> {
        if length >= self.length {
            return Ok(());
        }
        if length == 0 {
            self.file = None;
            give_buffer(std::mem::take(&mut self.memory));
        } else if let Some(file) = &mut self.file {
            file.truncate(length)?;
        } else {
            self.memory.truncate(length as usize);
        }
        self.length = length;
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::temporary::{NodeSpace, TenantSpace};

    /// Temporary files of a tenant with a quota of `limit_bytes`.
    pub(crate) fn files(directory: &Path, threshold_bytes: usize, limit_bytes: u64) -> TemporaryFiles {
        let space = TenantSpace::new(&NodeSpace::new());
        TemporaryFiles {
            area: SpillArea::new(directory, threshold_bytes),
            quota: Quota::new(space, limit_bytes),
        }
    }

    /// Waits until all dropped files are closed. Panics after two minutes.
    pub(crate) async fn all_released(files: &TemporaryFiles) {
        let closed = async {
            while files.quota.used_bytes() > 0 {
                tokio::task::yield_now().await;
            }
        };
        let deadline = std::time::Duration::from_secs(120);
        tokio::time::timeout(deadline, closed).await.expect("dropped files must be closed within 120 s");
    }

    #[tokio::test]
    async fn buffer_in_a_file_is_charged_and_limited_by_the_quota() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 16, 100);
        let used = || files.quota.used_bytes();
        let mut buffer = SpillBuffer::new(files.clone());
        buffer.write_at(0, &[1; 16]).unwrap();
        assert_eq!((used(), buffer.memory_bytes(16)), (0, buffer.memory.capacity() as u64));
        buffer.write_at(16, &[2; 84]).unwrap();
        assert_eq!((used(), buffer.memory_bytes(100)), (100, 0));
        let refused = buffer.write_at(100, &[3]).unwrap_err();
        assert_eq!(error(&refused).state(), sqlstate::CONFIGURATION_LIMIT);
        // Bytes that are already charged can be overwritten and read.
        buffer.write_at(50, &[4; 50]).unwrap();
        let mut read = [0; 100];
        assert_eq!(buffer.read_at(0, &mut read).unwrap(), 100);
        assert_eq!((read[0], read[20], read[99]), (1, 2, 4));
        buffer.truncate(40).unwrap();
        assert_eq!(used(), 40);
        drop(buffer);
        // The file is closed on another thread.
        all_released(&files).await;
    }

    /// Holds for any pooled buffer and any write pattern.
    #[tokio::test]
    async fn buffer_uses_no_more_memory_than_reported() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), 4 << 20, u64::MAX);
        for largest in [10_000, 100_000, 1_500_000, 3_000_000] {
            for step in [1, 700, 20_000, largest] {
                let mut buffer = SpillBuffer::new(files.clone());
                let mut charged_bytes = 0;
                for end in (step..=largest).step_by(step.max(largest / 50)) {
                    buffer.take_memory();
                    charged_bytes = buffer.memory_bytes(end as u64).max(charged_bytes);
                    buffer.write_at(end as u64 - 1, &[1]).unwrap();
                    assert!(buffer.memory.capacity() as u64 <= charged_bytes, "{end} of {largest}");
                }
                buffer.truncate(0).unwrap();
            }
        }
        let mut buffer = SpillBuffer::new(files);
        buffer.write_at(0, &[1]).unwrap();
        assert!(
            buffer.memory_bytes(1) <= MAX_POOLED_BUFFER_BYTES as u64,
            "a small file must use a small buffer"
        );
    }

    #[tokio::test]
    async fn behaves_the_same_in_memory_and_in_a_file() {
        let directory = tempfile::tempdir().unwrap();
        for threshold in [1 << 20, 16] {
            let files = files(directory.path(), threshold, u64::MAX);
            let mut buffer = SpillBuffer::new(files.clone());
            buffer.write_at(0, b"HELLO, HELLO").unwrap();
            buffer.truncate(0).unwrap();
            buffer.write_at(0, b"hello").unwrap();
            buffer.write_at(10, b"world, this is long").unwrap();
            let mut read = [9; 40];
            assert_eq!(buffer.read_at(3, &mut read).unwrap(), 26);
            assert_eq!(&read[..26], b"lo\0\0\0\0\0world, this is long");
            assert!(read[26..].iter().all(|b| *b == 0));
            buffer.truncate(4).unwrap();
            buffer.write_at(6, b"x").unwrap();
            let mut read = [9; 8];
            assert_eq!(buffer.read_at(0, &mut read).unwrap(), 7);
            assert_eq!(&read, b"hell\0\0x\0");
            buffer.truncate(0).unwrap();
            assert_eq!(buffer.len(), 0);
            assert_eq!(files.area.files(), u64::from(threshold == 16));
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

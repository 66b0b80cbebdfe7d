//! Non-blocking reads of files.
//!
//! Recently used data is usually in the kernel's page cache, from which it is copied within a
//! microsecond. Other reads take as long as the disk, or the network behind it, needs. A thread
//! that serves many sessions must not wait for that. Handing each read to a blocking thread costs
//! two context switches, which is more than a read from a fast disk.
//!
//! ```text
//!   read_exact_at --- thread with a ring ---> io_uring: the kernel reads asynchronously
//!                '--- any other thread -----> page cache, without blocking (RWF_NOWAIT)
//!                                        '--> disk, on a blocking thread
//! ```
//!
//! A read that a ring does not complete fully is repeated by a blocking thread, so that errors and
//! short files are handled in one place.

mod ring;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::io::{ReadWriteFlags, preadv2};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::oneshot::error::TryRecvError;

pub use ring::serve_reads;

/// Maximum number of bytes that are copied on the caller's thread: more would take too long, even
/// from memory.
const MAX_INLINE_READ_BYTES: usize = 256 << 10;

/// Resources that a read keeps until the disk has responded, even if the reader was dropped.
#[derive(Clone, Debug)]
pub(crate) struct ReadTarget {
    file: Arc<File>,
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

impl ReadTarget {
    pub(crate) fn new(file: Arc<File>) -> ReadTarget {
        ReadTarget { file, _permit: None }
    }

    /// Also keeps a permit of the reads that may wait for this disk.
    pub(crate) fn with_permit(file: Arc<File>, permit: Arc<OwnedSemaphorePermit>) -> ReadTarget {
        ReadTarget { file, _permit: Some(permit) }
    }
}

thread_local! {
    static BLOCKING_READS: Cell<u64> = const { Cell::new(0) };
}

/// Number of reads of this thread's tasks that had to wait for the disk, since the thread started.
pub fn blocking_reads() -> u64 {
    BLOCKING_READS.get()
}

/// Counts a read that waits for the disk.
// Not inlined, so that every call looks up the thread-local, whichever stack it runs on.
#[inline(never)]
pub(crate) fn count_blocking_read() {
    BLOCKING_READS.set(BLOCKING_READS.get() + 1);
}

/// Reads exactly `bytes` bytes of a file at an offset.
pub(crate) async fn read_exact_at(target: ReadTarget, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let is_small = bytes <= MAX_INLINE_READ_BYTES;
    if is_small && let Some(mut read) = ring::read(&target, offset, bytes) {
        let read = match read.try_recv() {
            Err(TryRecvError::Empty) => {
                count_blocking_read();
                read.await.ok()
            }
            read => read.ok(),
        };
        if let Some(read) = read {
            return Ok(read);
        }
    }
    let mut buffer = vec![0; bytes];
    if is_small && read_from_page_cache(&target.file, &mut buffer, offset) {
        return Ok(buffer);
    }
    count_blocking_read();
    let read =
        tokio::task::spawn_blocking(move || target.file.read_exact_at(&mut buffer, offset).map(|()| buffer));
    read.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Returns true if reads of this thread wait in a ring, and not in one blocking thread each.
pub(crate) fn has_ring() -> bool {
    ring::is_available()
}

/// Reads from the kernel's page cache without waiting for the disk. Returns false if not all of the
/// bytes are there.
pub(crate) fn read_from_page_cache(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let bytes = buffer.len();
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) == Ok(bytes)
}

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
pub(crate) struct Kept {
    file: Arc<File>,
    _place: Option<Arc<OwnedSemaphorePermit>>,
}

impl Kept {
    pub(crate) fn new(file: Arc<File>) -> Kept {
        Kept { file, _place: None }
    }

    /// Also keeps a permit of the reads that may wait for this disk.
    pub(crate) fn with_place(file: Arc<File>, place: Arc<OwnedSemaphorePermit>) -> Kept {
        Kept { file, _place: Some(place) }
    }
}

thread_local! {
    static BLOCKING_READS: Cell<u64> = const { Cell::new(0) };
}

/// Number of reads of this thread's tasks that had to wait for the disk, since the thread started.
pub fn reads_at_the_disk() -> u64 {
    BLOCKING_READS.get()
}

/// Counts a read that waits for the disk.
// Not inlined, so that every call looks up the thread-local, whichever stack it runs on.
#[inline(never)]
pub(crate) fn goes_to_the_disk() {
    BLOCKING_READS.set(BLOCKING_READS.get() + 1);
}

/// Reads exactly `bytes` bytes of a file at an offset.
pub(crate) async fn read_exact_at(kept: Kept, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let is_small = bytes <= MAX_INLINE_READ_BYTES;
    if is_small && let Some(mut read) = ring::read(&kept, offset, bytes) {
        let read = match read.try_recv() {
            Err(TryRecvError::Empty) => {
                goes_to_the_disk();
                read.await.ok()
            }
            read => read.ok(),
        };
        if let Some(read) = read {
            return Ok(read);
        }
    }
    let mut buffer = vec![0; bytes];
    if is_small && read_at_once(&kept.file, &mut buffer, offset) {
        return Ok(buffer);
    }
    goes_to_the_disk();
    let read =
        tokio::task::spawn_blocking(move || kept.file.read_exact_at(&mut buffer, offset).map(|()| buffer));
    read.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Returns true if reads of this thread wait in a ring, and not in one blocking thread each.
pub(crate) fn wait_in_a_ring() -> bool {
    ring::is_available()
}

/// Reads from the kernel's page cache without waiting for the disk. Returns false if not all of the
/// bytes are there.
pub(crate) fn read_at_once(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let bytes = buffer.len();
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) == Ok(bytes)
}

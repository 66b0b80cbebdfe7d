//! Reading pieces of files without holding up the thread that wants them.
//!
//! What is read again soon is most often in the system's page cache, from where it is copied in a microsecond. What the disk must
//! be asked for takes as long as the disk, or the network behind it, pleases. A thread that serves many sessions may not wait for
//! that, and handing each read to a thread that may costs two switches between threads: more than the disk, where that is fast.
//!
//! ```text
//!   read_exact_at --- a thread with a ring ---> the system: reads while the thread goes on   (ring)
//!                '--- any other thread -------> what is in memory, at once (RWF_NOWAIT)
//!                                         '---> the disk: by a thread that waits
//! ```
//! What a ring does not read whole is read by a thread in any case, so an error, or that a file is too short, is told in one place.

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

/// What is copied at most on the caller's thread: more would hold it up, though it is in memory.
const MOST_AT_ONCE_BYTES: usize = 256 << 10;

/// What a read keeps until the disk has answered, whether somebody still waits for that or not.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    file: Arc<File>,
    _place: Option<Arc<OwnedSemaphorePermit>>,
}

impl Kept {
    pub(crate) fn new(file: Arc<File>) -> Kept {
        Kept { file, _place: None }
    }

    /// ... and a place among those that may wait for this disk.
    pub(crate) fn with_place(file: Arc<File>, place: Arc<OwnedSemaphorePermit>) -> Kept {
        Kept { file, _place: Some(place) }
    }
}

thread_local! {
    static AT_THE_DISK: Cell<u64> = const { Cell::new(0) };
}

/// How many reads of this thread's tasks had to wait for the disk, since it was started.
pub fn reads_at_the_disk() -> u64 {
    AT_THE_DISK.get()
}

/// One more waits.
// Not inlined: the thread's count is looked up anew, whatever stack this runs on.
#[inline(never)]
pub(crate) fn goes_to_the_disk() {
    AT_THE_DISK.set(AT_THE_DISK.get() + 1);
}

/// Reads exactly so many bytes of a file at an offset.
pub(crate) async fn read_exact_at(kept: Kept, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let at_once = bytes <= MOST_AT_ONCE_BYTES;
    if at_once && let Some(mut read) = ring::read(&kept, offset, bytes) {
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
    if at_once && read_at_once(&kept.file, &mut buffer, offset) {
        return Ok(buffer);
    }
    goes_to_the_disk();
    let read =
        tokio::task::spawn_blocking(move || kept.file.read_exact_at(&mut buffer, offset).map(|()| buffer));
    read.await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Whether this thread's reads wait in a ring, and not each in a thread of its own.
pub(crate) fn wait_in_a_ring() -> bool {
    ring::is_there()
}

/// Reads what of a file the system has in memory. Answers whether that was all that was wanted; it never waits for the disk.
pub(crate) fn read_at_once(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let bytes = buffer.len();
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) == Ok(bytes)
}

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
use std::time::{Duration, Instant};

use rustix::io::{ReadWriteFlags, preadv2};
use tokio::sync::OwnedSemaphorePermit;

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
    static WAITED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// For how long tasks of this thread have waited for what they read from files, since it was started; those that waited at the
/// same time are added up.
pub fn reads_have_waited() -> Duration {
    WAITED.get()
}

async fn waiting<T>(read: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let outcome = read.await;
    WAITED.set(WAITED.get() + began.elapsed());
    outcome
}

/// Reads exactly so many bytes of a file at an offset.
pub(crate) async fn read_exact_at(kept: Kept, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let at_once = bytes <= MOST_AT_ONCE_BYTES;
    if at_once
        && let Some(read) = ring::read(&kept, offset, bytes)
        && let Ok(read) = waiting(read).await
    {
        return Ok(read);
    }
    let mut buffer = vec![0; bytes];
    if at_once && read_at_once(&kept.file, &mut buffer, offset) {
        return Ok(buffer);
    }
    let read =
        tokio::task::spawn_blocking(move || kept.file.read_exact_at(&mut buffer, offset).map(|()| buffer));
    waiting(read).await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

/// Reads what of a file the system has in memory. Answers whether that was all that was wanted; it never waits for the disk.
fn read_at_once(file: &File, buffer: &mut [u8], offset: u64) -> bool {
    let bytes = buffer.len();
    preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) == Ok(bytes)
}

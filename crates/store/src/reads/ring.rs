//! An io_uring per thread for reads: the kernel reads while the thread does other work.
//!
//! ```text
//!   read ------> submission queue --> io_uring_enter --> in memory: completed on return
//!                                                   '--> read from disk
//!   serve_reads  <-- eventfd ------ the disk read has completed
//!   both poll the completion queue and wake the waiting readers
//! ```
//!
//! With `DEFER_TASKRUN`, the kernel does no work on the thread by itself: a completed disk read is
//! processed when the thread enters the kernel for its next read, or when its runtime has received
//! the event. A busy thread is therefore not interrupted, and one poll processes all completions
//! since the last one.
//!
//! **Buffers outlive their reads.** A buffer belongs to the ring from the submission of its read
//! until its completion has been seen, even if the reader was dropped. A ring that is dropped
//! before leaks the buffers of its pending reads. Rings are dropped only with their thread or its
//! runtime.

use std::cell::RefCell;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Once};
use std::time::Duration;

use io_uring::{IoUring, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};

use super::ReadTarget;

/// Maximum number of pending reads in a ring. Further reads proceed as on a thread without a ring.
const MAX_PENDING_READS: u32 = 256;
/// Minimum number of completions that the kernel processes per enter (20 since Linux 6.13, all of
/// them before).
const MIN_COMPLETIONS_PER_ENTER: usize = 16;
/// Delay before polling again if the kernel could not accept a read, or announced completions and
/// delivered none.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Receives the data. The sender is dropped if the read was short or failed.
pub(super) type Outcome = oneshot::Receiver<Vec<u8>>;

/// Ensures that a missing io_uring is logged once.
static MISSING_RING_LOGGED: Once = Once::new();

thread_local! {
    static RING: RefCell<Option<Ring>> = const { RefCell::new(None) };
}

/// Serves this thread's reads of local objects through a ring for as long as this future is polled.
/// Returns only if the kernel does not support io_uring, or if the completion event fails. It must
/// run as a task in the thread's own runtime, in which all reads of the thread run too.
pub async fn serve_reads() {
    let (ring, completion_event) = match Ring::new().and_then(Ring::with_watcher) {
        Ok(with_watcher) => with_watcher,
        Err(error) => {
            // All threads behave alike, so one message is enough.
            MISSING_RING_LOGGED.call_once(
                || tracing::info!(%error, "io_uring is not available; disk reads block threads of the pool"),
            );
            return;
        }
    };
    let rejected = ring.rejected.clone();
    let _installed = Installed::new(ring);
    // Poll without waiting for an event.
    let mut poll_again = false;
    loop {
        tokio::select! {
            ready = completion_event.readable() => match ready {
                // Cleared before polling, so that each later completion is a new event.
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return,
            },
            () = rejected.notified() => {
                poll_again = true;
                continue;
            }
            () = tokio::time::sleep(RETRY_INTERVAL), if poll_again => {}
        }
        run_and_notify(Ring::poll_completions);
        poll_again = with_ring(|ring| Some(ring.pending() > 0 && ring.has_completions())).unwrap_or(false);
    }
}

/// Starts to read `bytes` bytes of a file. Returns None if this thread has no ring, or its ring is
/// full.
// Not inlined, so that every call looks up the thread-local, whichever stack it runs on.
#[inline(never)]
pub(super) fn read(target: &ReadTarget, offset: u64, bytes: usize) -> Option<Outcome> {
    let mut begun = None;
    run_and_notify(|ring| begun = ring.submit_read(target.clone(), offset, bytes));
    begun
}

/// Returns true if this thread has a ring.
#[inline(never)]
pub(super) fn is_available() -> bool {
    RING.with_borrow(Option::is_some)
}

/// Runs `work` on this thread's ring, then notifies the readers of completed reads. They are
/// notified while the ring is not borrowed, because a woken or dropped reader may run arbitrary
/// code.
fn run_and_notify(work: impl FnOnce(&mut Ring)) {
    let mut done = with_ring(|ring| {
        work(ring);
        ring.next_completed()
    });
    while let Some(CompletedRead { sender, read }) = done {
        if let Some(read) = read {
            // The reader may have been dropped.
            let _ = sender.send(read);
        }
        done = with_ring(Ring::next_completed);
    }
}

fn with_ring<T>(work: impl FnOnce(&mut Ring) -> Option<T>) -> Option<T> {
    RING.try_with(|ring| ring.borrow_mut().as_mut().and_then(work)).ok().flatten()
}

/// A ring with its pending reads.
struct Ring {
    uring: IoUring,
    /// Pending reads by the number in their completions.
    pending: Vec<Option<PendingRead>>,
    /// Unused numbers.
    free: Vec<u32>,
    /// Signalled when a disk read completes. The count is not read: each signal is an event.
    completion_event: Arc<OwnedFd>,
    /// Notified if the kernel did not accept a submission.
    rejected: Arc<Notify>,
}

struct PendingRead {
    buffer: Vec<u8>,
    _target: ReadTarget,
    sender: oneshot::Sender<Vec<u8>>,
}

/// A completed read: the sender to its reader, and the data unless the read was short or failed.
struct CompletedRead {
    sender: oneshot::Sender<Vec<u8>>,
    read: Option<Vec<u8>>,
}

impl Ring {
    fn new() -> io::Result<Ring> {
        let mut uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(MAX_PENDING_READS)?;
        // Some systems allow creating a ring but not using it.
        // SAFETY: this entry has no buffer and no file.
        let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build()) };
        pushed.map_err(io::Error::other)?;
        uring.submit_and_wait(1)?;
        let _ = uring.completion().next();
        let completion_event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        uring.submitter().register_eventfd(completion_event.as_raw_fd())?;
        let pending = (0..MAX_PENDING_READS).map(|_| None).collect();
        Ok(Ring {
            uring,
            pending,
            free: (0..MAX_PENDING_READS).collect(),
            completion_event,
            rejected: Arc::default(),
        })
    }

    /// Registers the completion event in the current runtime.
    fn with_watcher(self) -> io::Result<(Ring, AsyncFd<Arc<OwnedFd>>)> {
        // SAFETY: the watcher owns a reference to the descriptor.
        let completion_event =
            unsafe { AsyncFd::register_with_interest(self.completion_event.clone(), Interest::READABLE) };
        Ok((self, completion_event?))
    }

    fn submit_read(&mut self, target: ReadTarget, offset: u64, bytes: usize) -> Option<Outcome> {
        let number = self.free.pop()?;
        let mut buffer = vec![0; bytes];
        let file = types::Fd(target.file.as_raw_fd());
        let entry = opcode::Read::new(file, buffer.as_mut_ptr(), bytes as u32)
            .offset(offset)
            .build()
            .user_data(number.into());
        // SAFETY: the file and the buffer are kept until the completion with this number has been
        // seen; the buffer is leaked otherwise.
        if unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.free.push(number);
            return None;
        }
        let (sender, outcome) = oneshot::channel();
        self.pending[number as usize] = Some(PendingRead { buffer, _target: target, sender });
        self.enter();
        Some(outcome)
    }

    /// Processes completed disk reads, if there are any.
    ///
    /// The kernel processes only a limited number of completions per enter, and its flag for
    /// further ones is unreliable: a completion is added to the kernel's list before the flag is
    /// set. If the list is emptied in between, the flag stays set over an empty list until another
    /// read completes. The number of iterations is therefore bounded so that everything in the list
    /// at the start must have been processed: at most one completion per read, and a second one if
    /// the first was partial and the rest has arrived since. Completions that arrive in an empty
    /// list are new events. (There is always one iteration, because the list also contains requests
    /// that only need to be freed. If an enter processes fewer completions than expected,
    /// [`serve_reads`] polls again.)
    fn poll_completions(&mut self) {
        for _ in 0..=2 * self.pending().div_ceil(MIN_COMPLETIONS_PER_ENTER) {
            if !(self.has_completions() && self.enter()) {
                return;
            }
        }
    }

    /// Number of reads whose completion has not been seen.
    fn pending(&self) -> usize {
        MAX_PENDING_READS as usize - self.free.len()
    }

    fn has_completions(&mut self) -> bool {
        let submission = self.uring.submission();
        submission.taskrun() || submission.cq_overflow() || !submission.is_empty()
    }

    /// Submits queued reads and processes completions. Returns false if the kernel rejected that.
    fn enter(&mut self) -> bool {
        let entered = self.uring.submit().is_ok() && self.uring.submission().is_empty();
        if !entered {
            // The submission stays in the queue.
            self.rejected.notify_one();
        }
        entered
    }

    /// Returns the next completed read.
    fn next_completed(&mut self) -> Option<CompletedRead> {
        let entry = self.uring.completion().next()?;
        let number = entry.user_data() as u32;
        let PendingRead { buffer, sender, .. } = self.pending.get_mut(number as usize)?.take()?;
        self.free.push(number);
        let is_all = usize::try_from(entry.result()) == Ok(buffer.len());
        Some(CompletedRead { sender, read: is_all.then_some(buffer) })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for PendingRead { buffer, .. } in self.pending.drain(..).flatten() {
            mem::forget(buffer);
        }
    }
}

/// Installs a ring in this thread; removes it when dropped.
struct Installed;

impl Installed {
    fn new(ring: Ring) -> Installed {
        RING.set(Some(ring));
        Installed
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        drop(RING.take());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, Write};
    use std::os::fd::BorrowedFd;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::RecvTimeoutError;

    use futures::future::join_all;
    use rustix::fs::{Advice, fadvise};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use tokio::runtime::{Builder, LocalOptions};
    use tokio::task::spawn_local;

    use super::*;

    const PIECE_BYTES: usize = 3000;
    const PIECES: usize = 1000;
    /// The kernel's flag for pending completions.
    const TASKRUN: u32 = 1 << 2;

    fn piece(number: usize) -> Vec<u8> {
        (0..PIECE_BYTES).map(|at| (number * 31 + at * 7) as u8).collect()
    }

    /// A file to read from. Returns None, which skips the test, if io_uring is not available.
    fn file() -> Option<Arc<File>> {
        if let Err(error) = Ring::new() {
            eprintln!("no io_uring here: {error}");
            return None;
        }
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        (0..PIECES).for_each(|number| file.write_all(&piece(number)).unwrap());
        file.sync_all().unwrap();
        file.rewind().unwrap();
        Some(Arc::new(file))
    }

    /// Evicts the file from the kernel's page cache.
    fn evict_from_page_cache(file: &File) {
        fadvise(file, 0, None, Advice::DontNeed).unwrap();
    }

    fn run_on_worker<T>(work: impl Future<Output = T>) -> T {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
        runtime.block_on(async {
            let serving = spawn_local(serve_reads());
            tokio::task::yield_now().await;
            let done = work.await;
            serving.abort();
            let _ = serving.await;
            assert!(RING.with_borrow(Option::is_none));
            done
        })
    }

    async fn through_the_ring(file: &Arc<File>, number: usize) -> Option<Vec<u8>> {
        let read = read(&ReadTarget::new(file.clone()), (number * PIECE_BYTES) as u64, PIECE_BYTES);
        read.unwrap().await.ok()
    }

    #[test]
    fn reads_data_on_disk_and_in_memory() {
        let Some(file) = file() else { return };
        run_on_worker(async {
            for _ in 0..2 {
                evict_from_page_cache(&file);
                for _ in 0..2 {
                    for first in (0..PIECES).step_by(200) {
                        let all =
                            join_all((first..first + 200).map(|number| through_the_ring(&file, number)));
                        for (number, read) in all.await.into_iter().enumerate() {
                            assert!(read.unwrap() == piece(first + number));
                        }
                    }
                }
            }
            // Sequential reads: each one waits alone.
            evict_from_page_cache(&file);
            for number in (0..PIECES).rev().step_by(17) {
                assert!(through_the_ring(&file, number).await.unwrap() == piece(number));
            }
        });
    }

    #[test]
    fn more_reads_than_a_ring_can_hold_succeed() {
        let Some(file) = file() else { return };
        run_on_worker(async {
            evict_from_page_cache(&file);
            let target = ReadTarget::new(file.clone());
            let all = (0..PIECES).map(|number| {
                super::super::read_exact_at(target.clone(), (number * PIECE_BYTES) as u64, PIECE_BYTES)
            });
            for (number, read) in join_all(all).await.into_iter().enumerate() {
                assert!(read.unwrap() == piece(number));
            }
        });
    }

    #[test]
    fn reads_beyond_the_end_of_a_file_fail() {
        let Some(file) = file() else { return };
        run_on_worker(async {
            assert!(through_the_ring(&file, PIECES).await.is_none());
            for at in [PIECES * PIECE_BYTES - 1, (PIECES + 7) * PIECE_BYTES] {
                let read = super::super::read_exact_at(ReadTarget::new(file.clone()), at as u64, 2).await;
                assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            }
        });
    }

    /// Half of the readers are dropped before their reads complete, and their slots are reused.
    #[test]
    fn dropped_readers_do_not_affect_others() {
        let Some(file) = file() else { return };
        run_on_worker(async {
            for round in 0..20 {
                evict_from_page_cache(&file);
                let target = ReadTarget::new(file.clone());
                let submit_read = |number| read(&target, (number * PIECE_BYTES) as u64, PIECE_BYTES);
                let first = round * 50;
                let mut waiting: Vec<_> = (first..first + 50).filter_map(submit_read).collect();
                let mut number = first;
                waiting.retain(|_| {
                    number += 1;
                    number % 2 == 0
                });
                for (at, read) in join_all(waiting).await.into_iter().enumerate() {
                    assert!(read.unwrap() == piece(first + 2 * at + 1));
                }
            }
            with_ring(|ring| {
                let pending = ring.pending.iter().flatten().count();
                assert_eq!(pending + ring.free.len(), MAX_PENDING_READS as usize);
                Some(())
            });
        });
    }

    /// The kernel may announce completions although there are none (see
    /// [`Ring::poll_completions`]), until the next one. Many simultaneous completions are one
    /// event.
    #[test]
    fn spurious_completion_flag_does_not_spin_or_lose_reads() {
        const READS: usize = 100;
        if file().is_none() {
            return;
        }
        let (done, is_done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            run_on_worker(async {
                // Reads that stay pending until data is written to the pipe.
                let (reader, mut writer) = std::io::pipe().unwrap();
                let pipe = ReadTarget::new(Arc::new(File::from(OwnedFd::from(reader))));
                let flags = with_ring(|ring| Some(Flags::of(ring))).unwrap();
                for _ in 0..50 {
                    let waiting: Vec<_> = (0..READS).map(|_| read(&pipe, 0, 1).unwrap()).collect();
                    flags.announce();
                    run_and_notify(Ring::poll_completions);
                    tokio::task::yield_now().await;
                    writer.write_all(&[7; READS]).unwrap();
                    for read in join_all(waiting).await {
                        assert_eq!(read.unwrap(), [7]);
                    }
                }
            });
            done.send(()).unwrap();
        });
        match is_done.recv_timeout(Duration::from_secs(120)) {
            Err(RecvTimeoutError::Timeout) => panic!("polling does not end, or a read does not complete"),
            _ => thread.join().unwrap(),
        }
    }

    /// The kernel's word of flags for pending completions, in memory that is shared with the ring.
    struct Flags {
        words: *mut [AtomicU32; FLAGS_BYTES / 4],
        at: usize,
    }

    /// The word is in the first page of that memory, at an offset that depends on the kernel.
    const FLAGS_BYTES: usize = 4096;

    impl Flags {
        fn of(ring: &mut Ring) -> Flags {
            let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: the descriptor is open for as long as the ring exists.
            let descriptor = unsafe { BorrowedFd::borrow_raw(ring.uring.as_raw_fd()) };
            // SAFETY: creates a new mapping.
            let memory = unsafe { mmap(std::ptr::null_mut(), FLAGS_BYTES, access, shared, descriptor, 0) };
            let mut flags = Flags { words: memory.unwrap().cast(), at: 0 };
            // No read is pending, so a change that is undone has no effect. (Counters and positions
            // are not zero, because the ring has been used once.)
            let is_flags_word = |at: &usize| {
                let word = &flags.words()[*at];
                if word.load(Ordering::SeqCst) != 0 {
                    return false;
                }
                word.store(TASKRUN, Ordering::SeqCst);
                let is_flags_word = ring.uring.submission().taskrun();
                word.store(0, Ordering::SeqCst);
                is_flags_word
            };
            flags.at = (0..FLAGS_BYTES / 4).find(is_flags_word).unwrap();
            flags
        }

        fn words(&self) -> &[AtomicU32; FLAGS_BYTES / 4] {
            // SAFETY: mapped for as long as `self` exists, and both sides use only atomic
            // operations.
            unsafe { &*self.words }
        }

        fn announce(&self) {
            self.words()[self.at].fetch_or(TASKRUN, Ordering::SeqCst);
        }
    }

    impl Drop for Flags {
        fn drop(&mut self) {
            // SAFETY: this is the only reference to the mapping.
            unsafe { munmap(self.words.cast(), FLAGS_BYTES) }.unwrap();
        }
    }

    /// Memory that the kernel may still write to is not reused.
    #[test]
    fn dropping_a_ring_with_pending_reads_is_safe() {
        let Some(file) = file() else { return };
        for _ in 0..20 {
            evict_from_page_cache(&file);
            let waiting = run_on_worker(async {
                let target = ReadTarget::new(file.clone());
                (0..50)
                    .filter_map(|number| read(&target, (number * PIECE_BYTES) as u64, PIECE_BYTES))
                    .collect::<Vec<_>>()
            });
            for (number, mut read) in waiting.into_iter().enumerate() {
                // Completed reads return their data; the senders of the others were dropped.
                if let Ok(read) = read.try_recv() {
                    assert!(read == piece(number));
                }
            }
        }
    }
}

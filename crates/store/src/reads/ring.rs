//! A ring (io_uring) for a thread's reads: the system reads while the thread does other work.
//!
//! ```text
//!   read ------> submission queue --> io_uring_enter --> in memory: done before that returns
//!                                                   '--> the disk is asked
//!   serve_reads  <-- eventfd ------ the disk has answered
//!   both look at the completion queue, and wake who waits
//! ```
//!
//! The system does nothing of its own on the thread (`DEFER_TASKRUN`): what the disk has answered is copied when the thread comes
//! to look: at its next read, or when its runtime has seen the event. So a busy thread is not interrupted, and one look
//! serves all that came meanwhile.
//!
//! **What the system writes to stays.** A buffer belongs to the ring from its submission until its completion was seen, whether
//! somebody still waits for it or not. A ring that ends before leaves the buffers of what is under way to the system for good: only
//! the thread's end, or that of its runtime, ends a ring.

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

use super::Kept;

/// Reads under way in one ring. Who comes beyond that reads as a thread without a ring does.
const READS_AT_ONCE: u32 = 256;
/// Answers that the system takes from its list each time that it is entered, at least (20 since Linux 6.13, before that all).
const TAKEN_AT_ONCE: usize = 16;
/// When to look again at a system that could not take a read, or says that it has answers and gave none.
const AGAIN: Duration = Duration::from_millis(1);

/// What has been read; nobody answers if that was not all, for whatever reason.
pub(super) type Outcome = oneshot::Receiver<Vec<u8>>;

/// That there is no ring.
static SAID: Once = Once::new();

thread_local! {
    static RING: RefCell<Option<Ring>> = const { RefCell::new(None) };
}

/// From now on this thread's reads of local objects go through a ring of its own, if the system has one for it, while this is
/// polled: for ever. It must be a task of the thread's own runtime, which all that reads on the thread runs in too.
pub async fn serve_reads() {
    let (ring, answers) = match Ring::new().and_then(Ring::watched) {
        Ok(watched) => watched,
        Err(error) => {
            // One thread has what all have.
            SAID.call_once(
                || tracing::info!(%error, "the system has no io_uring: threads wait for the disk"),
            );
            return;
        }
    };
    let refused = ring.refused.clone();
    let _installed = Installed::new(ring);
    // Whether to look without an event.
    let mut again = false;
    loop {
        tokio::select! {
            ready = answers.readable() => match ready {
                // Before the look: each answer that comes after it is an event of its own.
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return,
            },
            () = refused.notified() => {
                again = true;
                continue;
            }
            () = tokio::time::sleep(AGAIN), if again => {}
        }
        settle(Ring::look);
        again = with_ring(|ring| Some(ring.under_way() > 0 && ring.has_news())).unwrap_or(false);
    }
}

/// Begins to read so many bytes of a file. `None` if this thread has no ring, or one that is full.
// Not inlined: the thread's ring is looked up anew, whatever stack this runs on.
#[inline(never)]
pub(super) fn read(kept: &Kept, offset: u64, bytes: usize) -> Option<Outcome> {
    let mut begun = None;
    settle(|ring| begun = ring.begin(kept.clone(), offset, bytes));
    begun
}

/// Whether this thread has a ring.
#[inline(never)]
pub(super) fn is_there() -> bool {
    RING.with_borrow(Option::is_some)
}

/// Does something with this thread's ring, and tells those whose reads are done. They are told when the ring is not in use:
/// whoever is woken, or finds that nobody waits any more, may do what it wants.
fn settle(work: impl FnOnce(&mut Ring)) {
    let mut done = with_ring(|ring| {
        work(ring);
        ring.next_done()
    });
    while let Some(Done { waits, read }) = done {
        if let Some(read) = read {
            // Perhaps nobody waits any more.
            let _ = waits.send(read);
        }
        done = with_ring(Ring::next_done);
    }
}

fn with_ring<T>(work: impl FnOnce(&mut Ring) -> Option<T>) -> Option<T> {
    RING.try_with(|ring| ring.borrow_mut().as_mut().and_then(work)).ok().flatten()
}

/// A ring, and what is under way in it.
struct Ring {
    uring: IoUring,
    /// By the numbers that its completions have.
    under_way: Vec<Option<UnderWay>>,
    /// Numbers that nothing has.
    free: Vec<u32>,
    /// Counts up when the disk has answered. Its count is not read: each time is an event.
    answers: Arc<OwnedFd>,
    /// Told when the system did not take what was submitted.
    refused: Arc<Notify>,
}

struct UnderWay {
    buffer: Vec<u8>,
    _kept: Kept,
    waits: oneshot::Sender<Vec<u8>>,
}

/// A read that is done, who waits for it, and what was read, if that was all.
struct Done {
    waits: oneshot::Sender<Vec<u8>>,
    read: Option<Vec<u8>>,
}

impl Ring {
    fn new() -> io::Result<Ring> {
        let mut uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(READS_AT_ONCE)?;
        // A system may let one have a ring and not use it.
        // SAFETY: this entry has no buffer and no file.
        let pushed = unsafe { uring.submission().push(&opcode::Nop::new().build()) };
        pushed.map_err(io::Error::other)?;
        uring.submit_and_wait(1)?;
        let _ = uring.completion().next();
        let answers = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        uring.submitter().register_eventfd(answers.as_raw_fd())?;
        let under_way = (0..READS_AT_ONCE).map(|_| None).collect();
        Ok(Ring { uring, under_way, free: (0..READS_AT_ONCE).collect(), answers, refused: Arc::default() })
    }

    /// With the events that tell of answers, in this runtime.
    fn watched(self) -> io::Result<(Ring, AsyncFd<Arc<OwnedFd>>)> {
        // SAFETY: the descriptor is the watcher's own.
        let answers = unsafe { AsyncFd::register_with_interest(self.answers.clone(), Interest::READABLE) };
        Ok((self, answers?))
    }

    fn begin(&mut self, kept: Kept, offset: u64, bytes: usize) -> Option<Outcome> {
        let number = self.free.pop()?;
        let mut buffer = vec![0; bytes];
        let file = types::Fd(kept.file.as_raw_fd());
        let entry = opcode::Read::new(file, buffer.as_mut_ptr(), bytes as u32)
            .offset(offset)
            .build()
            .user_data(number.into());
        // SAFETY: file and buffer are kept until the completion of this number was seen, or the buffer is left for good.
        if unsafe { self.uring.submission().push(&entry) }.is_err() {
            self.free.push(number);
            return None;
        }
        let (waits, outcome) = oneshot::channel();
        self.under_way[number as usize] = Some(UnderWay { buffer, _kept: kept, waits });
        self.enter();
        Some(outcome)
    }

    /// Looks for what the disk has answered, if there is something.
    ///
    /// The system takes only so many answers at a time, and its word that there are more is not to be relied on: an answer is put into its
    /// list first and the flag set after it. If the list is emptied between, the flag stays, with nothing behind it, until another answer
    /// comes. So this ends when all must have been taken that was in the list when it began: of each read one answer at most, and one more
    /// if that was only a part and the rest has come meanwhile. What comes into an empty list is an event of its own. (Once in any case:
    /// the list has requests, too, which only want to be freed. And if this takes fewer than it should, [`serve_reads`] looks again.)
    fn look(&mut self) {
        for _ in 0..=2 * self.under_way().div_ceil(TAKEN_AT_ONCE) {
            if !(self.has_news() && self.enter()) {
                return;
            }
        }
    }

    /// Reads of which no answer has been seen.
    fn under_way(&self) -> usize {
        READS_AT_ONCE as usize - self.free.len()
    }

    fn has_news(&mut self) -> bool {
        let submission = self.uring.submission();
        submission.taskrun() || submission.cq_overflow() || !submission.is_empty()
    }

    /// Hands over what is to be submitted, and takes what is done. Answers whether the system did.
    fn enter(&mut self) -> bool {
        let entered = self.uring.submit().is_ok() && self.uring.submission().is_empty();
        if !entered {
            // It stays in the queue.
            self.refused.notify_one();
        }
        entered
    }

    /// The next read that is done, and who waits for it.
    fn next_done(&mut self) -> Option<Done> {
        let entry = self.uring.completion().next()?;
        let number = entry.user_data() as u32;
        let UnderWay { buffer, waits, .. } = self.under_way.get_mut(number as usize)?.take()?;
        self.free.push(number);
        let is_all = usize::try_from(entry.result()) == Ok(buffer.len());
        Some(Done { waits, read: is_all.then_some(buffer) })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for UnderWay { buffer, .. } in self.under_way.drain(..).flatten() {
            mem::forget(buffer);
        }
    }
}

/// What makes a ring this thread's.
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
    /// The system's bit for "there are answers".
    const TASKRUN: u32 = 1 << 2;

    fn piece(number: usize) -> Vec<u8> {
        (0..PIECE_BYTES).map(|at| (number * 31 + at * 7) as u8).collect()
    }

    /// A file to read from; `None` where the system has no rings, and there is nothing to test.
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

    /// The system forgets what it has of the file in memory.
    fn forget(file: &File) {
        fadvise(file, 0, None, Advice::DontNeed).unwrap();
    }

    fn on_a_worker<T>(work: impl Future<Output = T>) -> T {
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
        let read = read(&Kept::new(file.clone()), (number * PIECE_BYTES) as u64, PIECE_BYTES);
        read.unwrap().await.ok()
    }

    #[test]
    fn what_the_disk_has_and_what_is_in_memory() {
        let Some(file) = file() else { return };
        on_a_worker(async {
            for _ in 0..2 {
                forget(&file);
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
            // One by one: each waits alone.
            forget(&file);
            for number in (0..PIECES).rev().step_by(17) {
                assert!(through_the_ring(&file, number).await.unwrap() == piece(number));
            }
        });
    }

    #[test]
    fn more_than_a_ring_has_room_for() {
        let Some(file) = file() else { return };
        on_a_worker(async {
            forget(&file);
            let kept = Kept::new(file.clone());
            let all = (0..PIECES).map(|number| {
                super::super::read_exact_at(kept.clone(), (number * PIECE_BYTES) as u64, PIECE_BYTES)
            });
            for (number, read) in join_all(all).await.into_iter().enumerate() {
                assert!(read.unwrap() == piece(number));
            }
        });
    }

    #[test]
    fn a_file_that_ends_too_soon() {
        let Some(file) = file() else { return };
        on_a_worker(async {
            assert!(through_the_ring(&file, PIECES).await.is_none());
            for at in [PIECES * PIECE_BYTES - 1, (PIECES + 7) * PIECE_BYTES] {
                let read = super::super::read_exact_at(Kept::new(file.clone()), at as u64, 2).await;
                assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            }
        });
    }

    /// Half of those who wait are gone before the disk has answered, and their places are used again.
    #[test]
    fn nobody_waits_any_more() {
        let Some(file) = file() else { return };
        on_a_worker(async {
            for round in 0..20 {
                forget(&file);
                let kept = Kept::new(file.clone());
                let begin = |number| read(&kept, (number * PIECE_BYTES) as u64, PIECE_BYTES);
                let first = round * 50;
                let mut waiting: Vec<_> = (first..first + 50).filter_map(begin).collect();
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
                let under_way = ring.under_way.iter().flatten().count();
                assert_eq!(under_way + ring.free.len(), READS_AT_ONCE as usize);
                Some(())
            });
        });
    }

    /// The system may say that there are answers when there are none (see [`Ring::look`]), for as long as none come. And many that come
    /// at once are one event.
    #[test]
    fn an_announcement_with_nothing_behind_it() {
        const READS: usize = 100;
        if file().is_none() {
            return;
        }
        let (done, is_done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            on_a_worker(async {
                // Reads that stay under way until there is something in the pipe.
                let (reader, mut writer) = std::io::pipe().unwrap();
                let pipe = Kept::new(Arc::new(File::from(OwnedFd::from(reader))));
                let flags = with_ring(|ring| Some(Flags::of(ring))).unwrap();
                for _ in 0..50 {
                    let waiting: Vec<_> = (0..READS).map(|_| read(&pipe, 0, 1).unwrap()).collect();
                    flags.announce();
                    settle(Ring::look);
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
            Err(RecvTimeoutError::Timeout) => panic!("a look does not end, or a read is not answered"),
            _ => thread.join().unwrap(),
        }
    }

    /// The word in which the system says that there are answers: in memory that it shares with the ring.
    struct Flags {
        words: *mut [AtomicU32; FLAGS_BYTES / 4],
        at: usize,
    }

    /// The word is in the first page of that memory; where, differs from system to system.
    const FLAGS_BYTES: usize = 4096;

    impl Flags {
        fn of(ring: &mut Ring) -> Flags {
            let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: it is open for as long as the ring is.
            let descriptor = unsafe { BorrowedFd::borrow_raw(ring.uring.as_raw_fd()) };
            // SAFETY: a new mapping.
            let memory = unsafe { mmap(std::ptr::null_mut(), FLAGS_BYTES, access, shared, descriptor, 0) };
            let mut flags = Flags { words: memory.unwrap().cast(), at: 0 };
            // Nothing is under way: nobody minds a change that is taken back. (Counts and positions are not zero since the ring was tried.)
            let is_it = |at: &usize| {
                let word = &flags.words()[*at];
                if word.load(Ordering::SeqCst) != 0 {
                    return false;
                }
                word.store(TASKRUN, Ordering::SeqCst);
                let is_it = ring.uring.submission().taskrun();
                word.store(0, Ordering::SeqCst);
                is_it
            };
            flags.at = (0..FLAGS_BYTES / 4).find(is_it).unwrap();
            flags
        }

        fn words(&self) -> &[AtomicU32; FLAGS_BYTES / 4] {
            // SAFETY: mapped for as long as this lives, and both sides use it with atomic operations only.
            unsafe { &*self.words }
        }

        fn announce(&self) {
            self.words()[self.at].fetch_or(TASKRUN, Ordering::SeqCst);
        }
    }

    impl Drop for Flags {
        fn drop(&mut self) {
            // SAFETY: nobody else knows of the mapping.
            unsafe { munmap(self.words.cast(), FLAGS_BYTES) }.unwrap();
        }
    }

    /// What the system may still write to is not used for anything else.
    #[test]
    fn a_ring_that_ends_while_the_disk_is_busy() {
        let Some(file) = file() else { return };
        for _ in 0..20 {
            forget(&file);
            let waiting = on_a_worker(async {
                let kept = Kept::new(file.clone());
                (0..50)
                    .filter_map(|number| read(&kept, (number * PIECE_BYTES) as u64, PIECE_BYTES))
                    .collect::<Vec<_>>()
            });
            for (number, mut read) in waiting.into_iter().enumerate() {
                // Those that were done are told, the others find that nobody answers.
                if let Ok(read) = read.try_recv() {
                    assert!(read == piece(number));
                }
            }
        }
    }
}

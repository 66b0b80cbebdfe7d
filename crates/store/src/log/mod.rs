//! A node's commit log: one sequence of records, made durable together for all its partitions.
//!
//! ```text
//!   commits --append--> pending --write, sync--> file ...............  file  (ready)   made ahead, full of zeros
//!   (any thread)        (memory)  "fulmar-log"   ^                      ^        by "fulmar-log-files"
//!                                                oldest                 durable
//! ```
//!
//! # Positions
//!
//! A record's place is an [`Lsn`]: the byte position of its end in all that was ever logged in the data directory.
//! Positions only grow, over files and over logs. A *log* (with an id) begins when the directory is opened, and after
//! a failed write; it goes on through as many files as it needs.
//!
//! # Appending
//!
//! [`CommitLog::append`] copies the record into memory under a short lock, and refuses it if there is no room; it never
//! touches the disk, so that it can be called inside a partition's commit lock. What is refused has not become visible.
//! Room means: the active file, or the next one, which is always made ahead, has space for the record. So the log can
//! only fail by a broken disk, never by a full one.
//!
//! One thread writes: it takes all that is pending, writes it with one write, syncs once, publishes the new durable
//! position and wakes whom it concerns. While it is at the disk the next batch gathers by itself. Where syncs are slow
//! (over a millisecond), and the batches before were larger than what is pending, it waits a fraction of a sync's time
//! for the rest: clients that were answered together come back together, and would else alternate between a batch
//! of one and a batch of all others. Appending wakes the thread only if it sleeps, so a busy log costs no system calls.
//!
//! A sync costs as much processor time as dozens of reads, whether it is for one record or a hundred. Many tenants that each commit
//! now and then would get one sync each. So records come with an [`Urgency`]: if all are patient and more of them than one
//! come within [`MAX_NAP`], the thread sleeps for about the time in which two come before it looks again, and is
//! woken for a prompt one only.
//!
//! # Recovery, and what is torn or corrupt
//!
//! A crash may leave the last batch half written; that is no fault: the *torn tail* is cut off. But a bad place in
//! what had been durable means lost commits; such a log is refused. To tell them apart each frame says how far the
//! log was durable when the frame was written:
//!
//! ```text
//!   ... | frame | frame | BAD | garbage | frame, "durable up to there" | ...
//!                        ^ p                                       |
//!                          <----------- beyond p: corrupt ----------+
//! ```
//!
//! At a bad place at position p the rest of the log is searched for a valid frame that says "durable beyond p". If
//! there is one, p had been durable: corrupt. If there is none, all that stands behind p was written by batches that
//! were begun before p was durable, hence nothing from p on was known to be durable, except that the last batch
//! may have been synced without anything being written after it. That one case is undecidable from the file alone;
//! a log that was closed has none, since its last record, the *seal*, vouches for all before it. A file's header is
//! written when all before its start is durable, so it vouches like a frame; it lies in one sector, which a disk writes
//! whole or not at all, so a damaged one is never the trace of a crash.
//!
//! Then a new log begins, with a *cut* as its first record: "log X ends at p". From then on what stands behind p in X
//! is never looked at, whatever another crash or a reused file makes of it. Before the cut is written, the part of X
//! that no frame vouches for is written again and synced: it may have been read from the page cache only, and a
//! sync alone says nothing about pages whose write-back has failed before.
//!
//! # A failed write or sync
//!
//! The file is not touched again. New records are refused, the engine is told to discard every version above the
//! durable position ([`CommitLog::on_discard`]), a new log is begun in a new file (tried for as long as it takes), and
//! only when its cut is durable those who wait for the lost records get [`LogError::Discarded`]. An answer "it did not
//! happen" therefore stays true after a crash.
//!
//! # Space
//!
//! [`CommitLog::truncate`] says what manifests cover. Files that lie wholly before are renamed and used again; their
//! old frames are invalid at their new positions. Files go oldest first, so that what is left is always a contiguous
//! piece of the log.

mod batching;
mod error;
mod frame;
mod recover;
mod state;
mod statistics;
mod supply;
mod waiters;
mod writer;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use fulmar_pages::Record;
use parking_lot::Mutex;

use crate::files::LogFiles;

use frame::{FRAME_HEAD_BYTES, MAX_BODY_BYTES};
use state::{Admission, Core, Stop};
use waiters::{Ticket, Waiters};

pub use batching::MAX_NAP;
pub use error::{FullCause, LogError};
pub use statistics::LogStatistics;

/// A position in a node's log, in bytes: that of a record is the position of its end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Lsn(pub u64);

impl std::fmt::Display for Lsn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// How soon a record must be on its way to the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// As soon as the disk is free: somebody waits for it who has more to do.
    Prompt,
    /// It may wait a little for company (at most [`MAX_NAP`]).
    Patient,
}

/// How a log is set up.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// The length of a log file. The first file of a log is shorter, so that a node starts fast.
    pub file_bytes: u64,
    /// The most that all files together may take; at least four files.
    pub capacity_bytes: u64,
    /// The most that may wait in memory to be written (as much again may be on its way to the disk).
    pub pending_bytes: usize,
    /// How long after a failure the disk is tried again; it doubles with each try, up to [`MAX_RETRY_DELAY`].
    pub retry_delay: Duration,
}

/// The longest time between two tries of a broken or full disk.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            file_bytes: 64 << 20,
            capacity_bytes: 1 << 30,
            pending_bytes: 64 << 20,
            retry_delay: Duration::from_millis(50),
        }
    }
}

impl LogOptions {
    /// The same, with what would not work made to work.
    fn sound(mut self) -> Self {
        self.file_bytes = self.file_bytes.clamp(state::MIN_FILE_BYTES, 1 << 30);
        self.capacity_bytes = self.capacity_bytes.max(4 * self.file_bytes);
        self.pending_bytes = self.pending_bytes.min(1 << 30);
        self.retry_delay = self.retry_delay.clamp(Duration::from_millis(1), MAX_RETRY_DELAY);
        self
    }
}

/// Called when records are lost: with the durable position, which is kept, and the appended one, which is not.
pub type OnDiscard = Box<dyn Fn(Lsn, Lsn) + Send + Sync>;

/// A node's commit log.
pub struct CommitLog {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl CommitLog {
    /// Reads the log in `files` as an opening would, and writes nothing. Blocks on the disk.
    pub fn verify(
        files: &dyn LogFiles,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        recover::verify(files, replay)
    }

    /// Opens the log in `files`: gives every record that counts to `replay`, in order, with the position that its
    /// append had; then begins a new log. The log's own records (cut, seal) are not replayed. Blocks on the disk.
    pub fn open(
        options: LogOptions,
        files: Arc<dyn LogFiles>,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<Arc<CommitLog>, LogError> {
        let options = options.sound();
        let recovered = recover::recover(&*files, replay)?;
        let (core, writer, supplier) = writer::begin_first(options, files, recovered)?;
        let mut threads = vec![core.spawn("fulmar-log", move || writer.run())?];
        core.set_writer(threads[0].thread().clone());
        match core.spawn("fulmar-log-files", move || supplier.run()) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                core.stop(Stop::Abandon);
                return Err(error);
            }
        }
        Ok(Arc::new(CommitLog { core, threads: Mutex::new(threads) }))
    }

    /// Registers what is called when records are lost, once for each failure, by the log's thread, before anybody
    /// is told. It must discard every version whose record ends above the first position, and must not wait for
    /// the log. A commit that has just been appended may not have installed its version yet; the callback finds it
    /// if it takes the lock under which both happen.
    pub fn on_discard(&self, callback: OnDiscard) {
        *self.core.on_discard.lock() = Some(callback);
    }

    /// Appends a record and answers the position of its end. Never waits for the disk. After an error nothing has
    /// been appended: [`LogError::Full`], [`LogError::Busy`], [`LogError::Failed`], [`LogError::TooLong`],
    /// [`LogError::Closed`].
    pub fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let core = &self.core;
        let mut state = core.state.lock();
        let outcome = state.append(core, body, urgency);
        let wake = outcome.is_ok() && state.wakes_writer();
        drop(state);
        match &outcome {
            Err(LogError::Full(_)) => drop(core.statistics.refused_full.fetch_add(1, Relaxed)),
            Err(LogError::Busy) => drop(core.statistics.refused_busy.fetch_add(1, Relaxed)),
            _ if wake => core.wake_writer(),
            _ => {}
        }
        outcome
    }

    /// Waits until a record of so many bytes would have room; then [`CommitLog::append`] may still be refused if
    /// others were faster. An error if the log is full, failed or closed, so that the client can be told.
    pub fn wait_room(&self, body_bytes: usize) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        WaitRoom { core: &self.core, body_bytes, ticket: None }
    }

    /// Whether records are refused with [`LogError::Full`], and why: from the first one until a further file is ready. Short
    /// ones may fit meanwhile.
    pub fn full(&self) -> Option<FullCause> {
        let state = self.core.state.lock();
        state.trouble.clone().filter(|_| state.full)
    }

    /// Up to where the log is durable. A position that is not above this one may still have been discarded: ask
    /// [`CommitLog::is_durable`] unless the version at hand is known to have survived [`CommitLog::on_discard`].
    pub fn durable(&self) -> Lsn {
        Lsn(self.core.durable.load(Acquire))
    }

    /// Whether a record is durable. One or two atomic loads.
    pub fn is_durable(&self, lsn: Lsn) -> bool {
        matches!(self.core.fate(lsn.0), Some(Ok(())))
    }

    /// Waits until everything up to a position is durable, or known to be lost ([`LogError::Discarded`]).
    /// [`LogError::Closed`]: it is not known. May be dropped at any time.
    pub fn wait_durable(&self, lsn: Lsn) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        WaitDurable { core: &self.core, position: lsn.0, ticket: None }
    }

    /// Where the next record will begin.
    pub fn appended(&self) -> Lsn {
        Lsn(self.core.appended.load(Acquire))
    }

    /// The position of the oldest record that is kept.
    pub fn oldest(&self) -> Lsn {
        Lsn(self.core.state.lock().oldest())
    }

    /// Says that manifests cover everything before a position (of which only what is durable counts). Gives back
    /// the space of whole files, in the background.
    pub fn truncate(&self, upto: Lsn) {
        self.core.truncate(upto.0);
    }

    /// Bytes of all the log's files, those included that are made ahead.
    pub fn size_bytes(&self) -> u64 {
        self.core.state.lock().size_bytes()
    }

    /// Counters for the metrics.
    pub fn statistics(&self) -> &LogStatistics {
        &self.core.statistics
    }

    /// Refuses new records, makes all others durable, seals the log and ends its threads. Blocks on the disk. An
    /// error if the log could not be sealed (or is failing); what was acknowledged is kept all the same. When it is
    /// called again it does nothing.
    pub fn close(&self) -> Result<(), LogError> {
        let threads = std::mem::take(&mut *self.threads.lock());
        if threads.is_empty() {
            return Ok(());
        }
        self.core.stop(Stop::Drain);
        for thread in threads {
            // A thread of the log that panicked has not closed it, which the phase below tells.
            let _ = thread.join();
        }
        self.core.stopped()
    }
}

impl Drop for CommitLog {
    /// Without [`CommitLog::close`] this is a crash on a small scale: the threads end by themselves, what is pending
    /// is not written, and nobody waits.
    fn drop(&mut self) {
        self.core.stop(Stop::Abandon);
    }
}

struct WaitDurable<'a> {
    core: &'a Core,
    position: u64,
    ticket: Option<Ticket>,
}

impl Future for WaitDurable<'_> {
    type Output = Result<(), LogError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (core, position) = (this.core, this.position);
        poll_waiting(&core.waiters, position, &mut this.ticket, context, || core.fate(position))
    }
}

impl Drop for WaitDurable<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.core.waiters.forget(ticket);
        }
    }
}

struct WaitRoom<'a> {
    core: &'a Core,
    body_bytes: usize,
    ticket: Option<Ticket>,
}

impl Future for WaitRoom<'_> {
    type Output = Result<(), LogError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (core, bytes) = (this.core, this.body_bytes);
        let verdict = || match core.state.lock().admit(core, bytes) {
            Ok(Admission::Fits | Admission::Switch) => Some(Ok(())),
            Err(LogError::Busy) => None,
            Err(error) => Some(Err(error)),
        };
        poll_waiting(&core.room, 0, &mut this.ticket, context, verdict)
    }
}

impl Drop for WaitRoom<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.core.room.forget(ticket);
        }
    }
}

/// Asks for a verdict; if there is none registers, and asks once more under the lock of those who wait, which whoever
/// changes the verdict takes afterwards: so no change is missed.
fn poll_waiting(
    waiters: &Waiters,
    position: u64,
    ticket: &mut Option<Ticket>,
    context: &Context<'_>,
    mut verdict: impl FnMut() -> Option<Result<(), LogError>>,
) -> Poll<Result<(), LogError>> {
    if let Some(known) = verdict() {
        return Poll::Ready(known);
    }
    let mut late = None;
    waiters.register(position, context.waker(), ticket, || {
        late = verdict();
        late.is_some()
    });
    late.map_or(Poll::Pending, Poll::Ready)
}

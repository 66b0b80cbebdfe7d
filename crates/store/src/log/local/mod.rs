//! A log in files of the node's own disk.
//!
//! ```text
//!   commits --append--> pending --write, sync--> file ...............  file  (ready)   made ahead, full of zeros
//!   (any thread)        (memory)  "fulmar-log"   ^                      ^        by "fulmar-log-files"
//!                                                oldest                 durable
//! ```
//!
//! A *log* (with an id) begins when the directory is opened, and after a failed write; it goes on through as many files
//! as it needs. Positions count the bytes of frames in all that was ever logged in the data directory.
//!
//! # Appending
//!
//! A record is copied into memory under a short lock, and refused if there is no room. Room means: the active file, or
//! the next one, which is always made ahead, has space for the record. So the log can only fail by a broken disk, never
//! by a full one.
//!
//! One thread writes: it takes all that is pending, writes it with one write, syncs once, publishes the new durable
//! position and wakes whom it concerns. While it is at the disk the next batch gathers by itself. Where syncs are slow
//! (over a millisecond), and the batches before were larger than what is pending, it waits a fraction of a sync's time
//! for the rest: clients that were answered together come back together, and would else alternate between a batch
//! of one and a batch of all others. Appending wakes the thread only if it sleeps, so a busy log costs no system calls.
//!
//! A sync costs as much processor time as dozens of reads, whether it is for one record or a hundred. Many tenants that each commit
//! now and then would get one sync each. So records come with an [`Urgency`]: if all are patient and more of them than one
//! come within [`batching::MAX_NAP`], the thread takes a *nap* before it looks again, for about the time in which three come, and is
//! woken for a prompt one only. Who appends more often than every ten naps, or every 20 ms, is not patient.
//!
//! And where a disk syncs fast, many clients of a busy node would get a sync for every second commit, each at the cost of half a
//! transaction. A thread that serves many sessions therefore says when it has nothing more to do
//! ([`this_thread_rests`]), and until then its records *gather*, for at most [`batching::MAX_GATHERING`]: as long as it is
//! busy with others, a sync would only take their processor. Few clients would wait for nothing, and the disk with them; so
//! the log tries both, eight batches each, and goes on for a while with what is better: gathering if it makes batches twice as large.
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
//! A log that lacks the file that was begun last, or has it shorter than it was made, is refused, too ([`newest`]).
//!
//! Then a new log begins, with a *cut* as its first record: "log X ends at p". From then on what stands behind p in X
//! is never looked at, whatever another crash or a reused file makes of it. Before the cut is written, the part of X
//! that no frame vouches for is written again and synced: it may have been read from the page cache only, and a
//! sync alone says nothing about pages whose write-back has failed before.
//!
//! # A failed write or sync
//!
//! The file is not touched again. New records are refused, the engine is told to discard every version above the
//! durable position (`CommitLog::on_discard`), a new log is begun in a new file (tried for as long as it takes), and
//! only when its cut is durable those who wait for the lost records get [`LogError::Discarded`]. An answer "it did not
//! happen" therefore stays true after a crash.
//!
//! # Space
//!
//! A truncation says what manifests cover. Files that lie wholly before are renamed and used again; their
//! old frames are invalid at their new positions. Files go oldest first, so that what is left is always a contiguous
//! piece of the log. The next process takes over what this one kept and made ahead: making a file writes all of it, and the first
//! statements after a start would wait behind that at the disk.

mod batching;
mod frame;
mod haste;
mod newest;
mod recover;
mod slice;
mod state;
mod supply;
mod writer;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fulmar_pages::Record;
use parking_lot::Mutex;

use super::progress::Progress;
use super::{FullCause, LogError, LogOptions, Lsn, MAX_RETRY_DELAY, RESERVE_PART, Stop, Urgency, own_record};
use crate::files::LogFiles;

use frame::{FRAME_HEAD_BYTES, MAX_BODY_BYTES};
use haste::Haste;
use state::Core;

pub use haste::{say_when_this_thread_rests, this_thread_rests};

/// A log in files.
pub(super) struct LocalLog {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl LocalLog {
    pub(super) fn verify(
        files: &dyn LogFiles,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        recover::verify(files, replay)
    }

    pub(super) fn open(
        options: LogOptions,
        files: Arc<dyn LogFiles>,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<Self, LogError> {
        let options = sound(options);
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
        Ok(LocalLog { core, threads: Mutex::new(threads) })
    }

    pub(super) fn progress(&self) -> Arc<Progress> {
        self.core.progress.clone()
    }

    pub(super) fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let core = &self.core;
        let may_gather = haste::thread_says_when_it_rests();
        let mut state = core.state.lock();
        let outcome = state.append(core, body, urgency, may_gather);
        let gathers = state.pending.haste == Haste::Gathers;
        let wake = outcome.is_ok() && state.wakes_writer();
        drop(state);
        if may_gather && gathers {
            haste::remember(core);
        }
        if wake {
            core.wake_writer();
        }
        outcome
    }

    pub(super) fn admit(&self, body_bytes: usize, urgency: Urgency) -> Result<(), LogError> {
        self.core.state.lock().admit(&self.core, body_bytes, urgency).map(drop)
    }

    pub(super) fn full(&self) -> Option<FullCause> {
        self.core.state.lock().full(&self.core.options)
    }

    pub(super) fn oldest(&self) -> Lsn {
        Lsn(self.core.state.lock().oldest())
    }

    pub(super) fn truncate(&self, upto: Lsn) {
        self.core.truncate(upto.0);
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.core.state.lock().size_bytes()
    }

    pub(super) fn capacity_bytes(&self) -> u64 {
        self.core.options.capacity_bytes
    }

    pub(super) fn close(&self) -> Result<(), LogError> {
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

impl Drop for LocalLog {
    fn drop(&mut self) {
        self.core.stop(Stop::Abandon);
    }
}

/// The same, with what would not work made to work.
fn sound(mut options: LogOptions) -> LogOptions {
    options.file_bytes = options.file_bytes.clamp(state::MIN_FILE_BYTES, 1 << 30);
    options.capacity_bytes = options.capacity_bytes.max(4 * options.file_bytes);
    options.pending_bytes = options.pending_bytes.min(1 << 30);
    options.retry_delay = options.retry_delay.clamp(Duration::from_millis(1), MAX_RETRY_DELAY);
    options
}

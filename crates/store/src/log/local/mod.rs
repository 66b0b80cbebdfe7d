//! A commit log in files on the node's local disk.
//!
//! ```text
//!   commits --append--> pending --write, sync--> file .......  file  (ready)  preallocated, zeros
//!   (any thread)        (memory)  "fulmar-log"   ^              ^       by "fulmar-log-files"
//!                                                oldest         durable
//! ```
//!
//! A *log*, identified by a log id, starts when the directory is opened and after each failed
//! write. It spans as many files as it needs. Positions count the bytes of all frames that were
//! ever logged in the data directory.
//!
//! # Appending
//!
//! A record is copied into memory under a short lock, and rejected if there is no space. There is
//! space if the record fits into the active file or into the next file, which is always
//! preallocated. The log can therefore fail because of a broken disk, but not because of a full
//! one.
//!
//! One thread writes. It takes all pending records, writes them with one write, syncs once,
//! publishes the new durable position and wakes the waiters (group commit). The next batch
//! accumulates while the disk is busy. If syncs are slow (over 1 ms) and previous batches were
//! larger than the pending one, the writer *lingers* for a fraction of a sync's duration: clients
//! that were answered together send their next commits together, and would otherwise alternate
//! between a batch of one record and a batch of all others. An append wakes the writer only if it
//! sleeps, so a busy log costs no system calls.
//!
//! A sync costs as much CPU time as dozens of reads, for one record as for a hundred. Many tenants
//! that each commit occasionally would cause one sync each. Records therefore have an [`Urgency`].
//! If all pending records are deferrable, and more than one is expected within
//! [`batching::MAX_COMMIT_DELAY`], the writer waits for a *commit delay*, about the time in which
//! three records arrive. Only a more urgent record ends the delay early. A record is deferrable
//! only if its appender's last commit was at least ten commit delays, and at least 20 ms, ago.
//!
//! On a disk with fast syncs, a busy node with many clients would sync for every second commit, at
//! half the CPU cost of a transaction. A thread that serves many sessions therefore announces when
//! it becomes idle ([`announce_idle`]). Until then its records are *held*, for at most
//! [`batching::MAX_HOLD`]: while the thread is busy with other sessions, a sync would only take CPU
//! time from them. With few clients, holding would only add latency and leave the disk idle. The
//! log therefore tries both variants for eight batches each, and uses the better one for a while:
//! holding, if it at least doubles the batch size.
//!
//! # Recovery: torn tails and corruption
//!
//! A crash may leave the last batch partially written. This *torn tail* is normal and is cut off. A
//! damaged place in data that had been durable means lost commits, and such a log is refused. To
//! distinguish the two, each frame records how far the log was durable when the frame was written:
//!
//! ```text
//!   ... | frame | frame | BAD | garbage | frame, "durable up to there" | ...
//!                        ^ p                                       |
//!                          <----------- beyond p: corrupt ----------+
//! ```
//!
//! If a place at position p is damaged, the rest of the log is searched for a valid frame that
//! records durability beyond p. If there is one, p had been durable: the log is corrupt. If there
//! is none, all data after p was written by batches that started before p was durable, so nothing
//! from p on was known to be durable. There is one exception: the last batch may have been synced
//! without anything being written after it. That case cannot be decided from the file alone. It
//! does not occur in a log that was closed: its last record, the *seal*, proves the durability of
//! everything before it. A file's header is written only when everything before its start is
//! durable, so it is proof in the same way as a frame. It lies in one sector, which a disk writes
//! completely or not at all, so a damaged header is never the result of a crash.
//!
//! A log is also refused if its newest file is missing or shorter than it was when created
//! ([`newest`]).
//!
//! After recovery, a new log starts with a *cut* as its first record: "log X ends at p". From then
//! on, data after p in X is never read again, whatever a later crash or a reused file makes of it.
//! Before the cut is written, the part of X whose durability no frame proves is written again and
//! synced: it may have been read only from the page cache, and a sync alone does not cover pages
//! whose earlier write-back failed.
//!
//! # Failed writes and syncs
//!
//! After a failure, the file is not used again. New records are rejected and the engine is notified
//! to discard every version above the durable position (`CommitLog::on_discard`). Then a new log is
//! started in a new file, with retries until that succeeds. The waiters of the lost records get
//! [`LogError::Discarded`] only when the cut of the new log is durable. The answer that a
//! transaction did not commit therefore remains true after a crash.
//!
//! # Space
//!
//! A truncation states which part of the log is covered by manifests. Files that lie completely in
//! that part are renamed and reused; their old frames are invalid at their new positions. Files are
//! released oldest first, so that the remaining ones are always a contiguous part of the log. The
//! next process takes over spare and preallocated files: creating a file writes all of it, and the
//! first statements after a start would wait for that disk I/O.

mod batching;
mod frame;
mod newest;
mod preallocation;
mod recover;
mod state;
mod sync_policy;
mod time_slice;
mod writer;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use fulmar_pages::Record;
use parking_lot::Mutex;

use super::options::{LogOptions, MAX_RETRY_DELAY, Stop};
use super::progress::Progress;
use super::{FullCause, LogError, Lsn, Urgency};
use crate::files::LogFiles;

use state::Core;
use sync_policy::SyncPolicy;

pub use sync_policy::{announce_idle, flush_on_idle};

/// A log in local files.
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
        let options = sanitized(options);
        let recovered = recover::recover(&*files, replay)?;
        let (core, writer, supplier) = writer::start_first_log(options, files, recovered)?;
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
        let may_hold = sync_policy::thread_announces_idle();
        let mut state = core.state.lock();
        let outcome = state.append(core, body, urgency, may_hold);
        let hold_until_idle = state.pending.sync_policy == SyncPolicy::OnIdle;
        let wake = outcome.is_ok() && state.wakes_writer();
        drop(state);
        if may_hold && hold_until_idle {
            sync_policy::remember_held_log(core);
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
            // If a thread of the log has panicked, `stopped` below returns the error.
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

/// Returns the options with unusable values adjusted.
fn sanitized(mut options: LogOptions) -> LogOptions {
    options.file_bytes = options.file_bytes.clamp(state::MIN_FILE_BYTES, 1 << 30);
    options.capacity_bytes = options.capacity_bytes.max(4 * options.file_bytes);
    options.pending_bytes = options.pending_bytes.min(1 << 30);
    options.retry_delay = options.retry_delay.clamp(Duration::from_millis(1), MAX_RETRY_DELAY);
    options
}

//! State shared by the log's callers and its two threads.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::batching::is_infrequent;
use super::frame::{FRAME_HEAD_BYTES, Frames, HEADER_BYTES, MAX_BODY_BYTES};
use super::newest::NewestFile;
use super::sync_policy::SyncPolicy;
use crate::files::{LogFile, LogFiles};
use crate::log::options::{LogOptions, Stop};
use crate::log::progress::Progress;
use crate::log::{FullCause, LogError, Lsn, Urgency};

/// Reserved at the end of each file for the seal.
const SEAL_RESERVE_BYTES: u64 = 64;

/// Minimum length of a log file: its header, a cut, the seal and some records.
pub(super) const MIN_FILE_BYTES: u64 = 4096;

/// Everything that is used by more than one thread of a log.
pub(super) struct Core {
    pub(super) options: LogOptions,
    pub(super) files: Arc<dyn LogFiles>,
    /// Records the newest log file.
    pub(super) newest: NewestFile,
    pub(super) state: Mutex<State>,
    /// Signalled when the supplier may have work. Used with `state`.
    pub(super) supply: Condvar,
    writer: OnceLock<Thread>,
    pub(super) progress: Arc<Progress>,
}

/// Whether the log accepts records.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// The log accepts records.
    Running,
    /// A write has failed and no new log has started yet.
    Failed(Arc<str>),
    /// The writer has stopped. Contains the error if it could not seal the log.
    Closed(Option<LogError>),
}

/// A file that contains a part of the log.
#[derive(Clone, Debug)]
pub(super) struct LiveFile {
    pub(super) name: String,
    /// Position of its first frame. The file ends where the next one begins.
    pub(super) start: u64,
    /// Length of the file.
    pub(super) bytes: u64,
    /// A write or sync of the file has failed: it must not be reused.
    pub(super) failed: bool,
}

/// A preallocated file: named as a log file, without any data of this log.
pub(super) struct ReadyFile {
    pub(super) sequence: u64,
    pub(super) name: String,
    pub(super) file: Box<dyn LogFile>,
    /// Length of the file.
    pub(super) bytes: u64,
}

impl ReadyFile {
    /// Bytes of frames that fit into the file.
    fn room(&self) -> u64 {
        self.bytes.saturating_sub(HEADER_BYTES as u64 + SEAL_RESERVE_BYTES)
    }
}

/// Records that are waiting to be written.
#[derive(Default)]
pub(super) struct Batch {
    /// Frames whose heads are not filled in yet.
    pub(super) bytes: Vec<u8>,
    pub(super) records: u64,
    /// The most urgent sync policy of the records.
    pub(super) sync_policy: SyncPolicy,
    /// Offsets in `bytes` at which the next file starts.
    pub(super) switches: Vec<(usize, ReadyFile)>,
}

/// How a record can be accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Admission {
    /// In the active file.
    Fits,
    /// As the first record of the ready file.
    Switch,
}

/// State protected by the lock.
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) stop: Stop,
    pub(super) appended: u64,
    pub(super) pending: Batch,
    /// Bytes of frames that still fit into the active file.
    room: u64,
    pub(super) ready: Option<ReadyFile>,
    /// Minimum length that the ready file must have.
    pub(super) wanted: u64,
    /// Why no file is ready, if known.
    pub(super) unavailable_cause: Option<FullCause>,
    /// A record has been rejected for that reason since a file was last ready.
    pub(super) full: bool,
    /// The reserve is in use. Only [`Urgency::FreesSpace`] may use it.
    pub(super) reserve: bool,
    /// The writer's commit delay; zero if it uses none.
    pub(super) commit_delay: Duration,
    /// Records of threads that announce when they are idle are currently held.
    pub(super) hold_until_idle: bool,
    /// The writer sleeps, or is about to, until pending records are at least this urgent. An
    /// appender of such a record must wake it.
    pub(super) writer_awaits: Option<SyncPolicy>,
    /// The files of the log, oldest first. The last one is active.
    pub(super) live: VecDeque<LiveFile>,
    /// Files to be reused or removed, oldest first.
    pub(super) retired: VecDeque<LiveFile>,
    /// Total length of the spare files.
    pub(super) spare_bytes: u64,
    pub(super) next_sequence: u64,
}

impl Core {
    pub(super) fn new(
        options: LogOptions,
        files: Arc<dyn LogFiles>,
        newest: NewestFile,
        state: State,
    ) -> Self {
        let appended = state.appended;
        Core {
            options,
            files,
            newest,
            state: Mutex::new(state),
            supply: Condvar::new(),
            writer: OnceLock::new(),
            progress: Arc::new(Progress::new(appended)),
        }
    }

    pub(super) fn spawn(
        self: &Arc<Self>,
        name: &'static str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<JoinHandle<()>, LogError> {
        thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|cause| LogError::Io {
            operation: "start the thread",
            file: name.to_owned(),
            cause: Arc::new(cause),
        })
    }

    pub(super) fn set_writer(&self, thread: Thread) {
        // Set once, directly after the thread has started.
        let _ = self.writer.set(thread);
        self.wake_writer();
    }

    pub(super) fn wake_writer(&self) {
        if let Some(thread) = self.writer.get() {
            thread.unpark();
        }
    }

    /// Called when a new log has started after a failure. The old one ends at `after`. The new one
    /// has a durable cut, and continues at `position` in a file with the space `file`.
    pub(super) fn resume(&self, after: u64, position: u64, live: LiveFile, file: FileRoom) {
        let mut state = self.state.lock();
        let upto = state.appended;
        self.progress.discard(after, upto);
        state.live.push_back(live);
        state.room = file.0.saturating_sub(position - upto);
        state.set_appended(self, position);
        state.phase = Phase::Running;
        drop(state);
        self.progress.publish(position);
        self.progress.wake_room();
    }

    pub(super) fn truncate(&self, upto: u64) {
        let durable = self.progress.durable();
        let mut state = self.state.lock();
        // The next file must have started durably. Otherwise a crash would find no trace of the
        // log.
        while state.live.get(1).is_some_and(|next| next.start <= upto && next.start < durable) {
            if let Some(file) = state.live.pop_front() {
                state.retired.push_back(file);
            }
        }
        if !state.retired.is_empty() {
            self.supply.notify_one();
        }
    }

    /// Makes held records due.
    pub(super) fn write_held(&self) {
        let mut state = self.state.lock();
        if state.pending.sync_policy == SyncPolicy::OnIdle {
            state.pending.sync_policy = SyncPolicy::Immediate;
        }
        let wakes = state.wakes_writer();
        drop(state);
        if wakes {
            self.wake_writer();
        }
    }

    pub(super) fn stop(&self, stop: Stop) {
        let mut state = self.state.lock();
        if state.stop == Stop::No {
            state.stop = stop;
        }
        drop(state);
        self.supply.notify_one();
        self.wake_writer();
    }

    /// Called when the writer stops: nothing that is not yet durable will become durable.
    pub(super) fn closed(&self, error: Option<LogError>) {
        self.state.lock().phase = Phase::Closed(error);
        self.progress.end();
    }

    /// Returns how the writer has stopped.
    pub(super) fn stopped(&self) -> Result<(), LogError> {
        match &self.state.lock().phase {
            Phase::Closed(None) => Ok(()),
            Phase::Closed(Some(error)) => Err(error.clone()),
            Phase::Failed(cause) => Err(LogError::Failed { cause: cause.clone() }),
            Phase::Running => Err(LogError::Failed { cause: "the log writer has not stopped".into() }),
        }
    }
}

/// Bytes of frames that fit into a new file.
pub(super) struct FileRoom(u64);

impl FileRoom {
    pub(super) fn of(file: &ReadyFile) -> Self {
        FileRoom(file.room())
    }
}

impl State {
    /// The state of a log that starts at `position` and has no file yet.
    pub(super) fn new(position: u64, live: VecDeque<LiveFile>, next_sequence: u64) -> Self {
        State {
            phase: Phase::Running,
            stop: Stop::No,
            appended: position,
            pending: Batch::default(),
            room: 0,
            ready: None,
            wanted: 0,
            unavailable_cause: None,
            full: false,
            reserve: false,
            commit_delay: Duration::ZERO,
            hold_until_idle: false,
            writer_awaits: None,
            live,
            retired: VecDeque::new(),
            spare_bytes: 0,
            next_sequence,
        }
    }

    /// Appends a record. If `may_hold` is true, the record may be held until its thread is idle.
    pub(super) fn append(
        &mut self,
        core: &Core,
        body: &[u8],
        urgency: Urgency,
        may_hold: bool,
    ) -> Result<Lsn, LogError> {
        let admission = self.admit(core, body.len(), urgency)?;
        let bytes = (FRAME_HEAD_BYTES + body.len()) as u64;
        if admission == Admission::Switch
            && let Some(file) = self.ready.take()
        {
            self.live.push_back(LiveFile {
                name: file.name.clone(),
                start: self.appended,
                bytes: file.bytes,
                failed: false,
            });
            self.room = file.room();
            self.wanted = 0;
            self.pending.switches.push((self.pending.bytes.len(), file));
            core.supply.notify_one();
        }
        self.room -= bytes;
        self.pending.records += 1;
        self.pending.sync_policy = self.pending.sync_policy.max(match urgency {
            Urgency::Deferred(since) if is_infrequent(since, self.commit_delay) => SyncPolicy::Deferred,
            Urgency::FreesSpace => SyncPolicy::Immediate,
            Urgency::Immediate | Urgency::Deferred(_) if may_hold && self.hold_until_idle => {
                SyncPolicy::OnIdle
            }
            Urgency::Immediate | Urgency::Deferred(_) => SyncPolicy::Immediate,
        });
        Frames::push(&mut self.pending.bytes, body);
        self.set_appended(core, self.appended + bytes);
        Ok(Lsn(self.appended))
    }

    /// Checks whether a record of `body_bytes` can be appended now. Requests a longer file if
    /// needed.
    pub(super) fn admit(
        &mut self,
        core: &Core,
        body_bytes: usize,
        urgency: Urgency,
    ) -> Result<Admission, LogError> {
        match (&self.phase, self.stop) {
            (Phase::Closed(_), _) | (_, Stop::Drain | Stop::Abandon) => return Err(LogError::Closed),
            (Phase::Failed(cause), _) => return Err(LogError::Failed { cause: cause.clone() }),
            (Phase::Running, Stop::No) => {}
        }
        let bytes = FRAME_HEAD_BYTES as u64 + body_bytes as u64;
        let file_bytes = HEADER_BYTES as u64 + SEAL_RESERVE_BYTES + bytes;
        let most = (core.options.capacity_bytes / 2).min(MAX_BODY_BYTES as u64);
        if file_bytes > most {
            return Err(LogError::TooLong {
                bytes: body_bytes as u64,
                most: most - (file_bytes - body_bytes as u64),
            });
        }
        let makes_room = urgency == Urgency::FreesSpace;
        if !makes_room && let Some(cause) = self.beyond_capacity(&core.options) {
            self.full = true;
            return Err(LogError::Full(cause));
        }
        let pending = self.pending.bytes.len();
        if pending > 0 && pending as u64 + bytes > core.options.pending_bytes as u64 {
            return Err(LogError::Busy);
        }
        if bytes <= self.room {
            return Ok(Admission::Fits);
        }
        if self.ready.as_ref().is_some_and(|file| bytes <= file.room()) {
            return Ok(Admission::Switch);
        }
        if self.wanted < file_bytes {
            // A multiple of the block size, so that the file can be written with direct I/O.
            self.wanted = file_bytes.next_multiple_of(MIN_FILE_BYTES);
            core.supply.notify_one();
        }
        if makes_room && !self.reserve && matches!(self.unavailable_cause, Some(FullCause::Capacity { .. })) {
            (self.reserve, self.unavailable_cause) = (true, None);
            core.supply.notify_one();
        }
        self.full |= self.unavailable_cause.is_some() && !makes_room;
        Err(self.unavailable_cause.clone().map_or(LogError::Busy, LogError::Full))
    }

    /// Returns the reason to reject commits even if a file is ready: space beyond the capacity is
    /// reserved for other records.
    fn beyond_capacity(&self, options: &LogOptions) -> Option<FullCause> {
        let capacity_bytes = options.capacity_bytes;
        let is_beyond = self.reserve && self.size_bytes() > capacity_bytes;
        is_beyond.then_some(FullCause::Capacity { capacity_bytes })
    }

    /// Returns the reason why records are rejected, if one has been.
    pub(super) fn full(&self, options: &LogOptions) -> Option<FullCause> {
        self.beyond_capacity(options).or_else(|| self.unavailable_cause.clone()).filter(|_| self.full)
    }

    /// Returns true if the caller must wake the writer. Returns true only once per sleep.
    pub(super) fn wakes_writer(&mut self) -> bool {
        self.writer_awaits.take_if(|policy| self.pending.sync_policy >= *policy).is_some()
    }

    fn set_appended(&mut self, core: &Core, position: u64) {
        self.appended = position;
        core.progress.set_appended(position);
    }

    /// Handles a failed write or sync: rejects further records and drops the pending ones. Returns
    /// the position up to which positions were assigned.
    pub(super) fn fail(&mut self, core: &Core, durable: u64, cause: Arc<str>) -> u64 {
        self.phase = Phase::Failed(cause);
        self.pending = Batch::default();
        self.room = 0;
        let mut end = u64::MAX;
        for file in self.live.iter_mut().rev() {
            file.failed |= end > durable;
            end = file.start;
        }
        core.progress.statistics.failures.fetch_add(1, Relaxed);
        self.appended
    }

    pub(super) fn oldest(&self) -> u64 {
        self.live.front().map_or(self.appended, |file| file.start)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        let files = self.live.iter().chain(&self.retired).map(|file| file.bytes);
        files.sum::<u64>() + self.ready.as_ref().map_or(0, |file| file.bytes) + self.spare_bytes
    }
}

//! What the log's callers and its two threads share.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::batching::is_seldom;
use super::frame::{Frames, HEADER_BYTES};
use super::haste::Haste;
use super::newest::NewestFile;
use super::{
    FRAME_HEAD_BYTES, FullCause, LogError, LogOptions, Lsn, MAX_BODY_BYTES, Progress, Stop, Urgency,
};
use crate::files::{LogFile, LogFiles};

/// Kept free at the end of each file, for the seal.
const SEAL_RESERVE_BYTES: u64 = 64;

/// The shortest log file: its header, a cut, the seal and some records.
pub(super) const MIN_FILE_BYTES: u64 = 4096;

/// Everything that more than one thread of a log uses.
pub(super) struct Core {
    pub(super) options: LogOptions,
    pub(super) files: Arc<dyn LogFiles>,
    /// Names the file that was begun last.
    pub(super) newest: NewestFile,
    pub(super) state: Mutex<State>,
    /// Signalled when there may be work for the supplier, together with `state`.
    pub(super) supply: Condvar,
    writer: OnceLock<Thread>,
    pub(super) progress: Arc<Progress>,
}

/// Whether the log takes records.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    /// It does.
    Running,
    /// A write has failed; no new log has begun yet.
    Failing(Arc<str>),
    /// The writer has ended. With the reason, if it could not seal the log.
    Closed(Option<LogError>),
}

/// A file that holds a part of the log.
#[derive(Clone, Debug)]
pub(super) struct LiveFile {
    pub(super) name: String,
    /// The position of its first frame; it ends where the next begins.
    pub(super) start: u64,
    /// Bytes of the file.
    pub(super) bytes: u64,
    /// A write or sync of it has failed: not to be used again.
    pub(super) failed: bool,
}

/// A file made ahead: named as a log file, with nothing of this log in it.
pub(super) struct ReadyFile {
    pub(super) sequence: u64,
    pub(super) name: String,
    pub(super) file: Box<dyn LogFile>,
    /// Bytes of the file.
    pub(super) bytes: u64,
}

impl ReadyFile {
    /// Bytes of frames that the file takes.
    fn room(&self) -> u64 {
        self.bytes.saturating_sub(HEADER_BYTES as u64 + SEAL_RESERVE_BYTES)
    }
}

/// Records that wait to be written.
#[derive(Default)]
pub(super) struct Batch {
    /// Frames, their heads not filled in.
    pub(super) bytes: Vec<u8>,
    pub(super) records: u64,
    /// How soon the most urgent of them must be written.
    pub(super) haste: Haste,
    /// Where in `bytes` another file begins.
    pub(super) switches: Vec<(usize, ReadyFile)>,
}

/// How a record would be taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Admission {
    /// Into the active file.
    Fits,
    /// As the first of the file that is ready.
    Switch,
}

/// What the state's lock protects.
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) stop: Stop,
    pub(super) appended: u64,
    pub(super) pending: Batch,
    /// Bytes of frames that the active file still takes.
    room: u64,
    pub(super) ready: Option<ReadyFile>,
    /// Bytes that the ready file must have at least.
    pub(super) wanted: u64,
    /// Why no file is ready, if that is known.
    pub(super) trouble: Option<FullCause>,
    /// A record has been refused for that since a file was ready.
    pub(super) full: bool,
    /// The reserve is in use: only [`Urgency::MakesRoom`] takes from it.
    pub(super) reserve: bool,
    /// How long the writer's naps are; zero if it takes none.
    pub(super) nap: Duration,
    /// Threads that say when they rest need no sync before, for now.
    pub(super) gathers: bool,
    /// The writer sleeps, or is about to, until something so hasty is pending: who appends that must wake it.
    pub(super) writer_awaits: Option<Haste>,
    /// The files that hold the log, oldest first; the last one is active.
    pub(super) live: VecDeque<LiveFile>,
    /// Files to be used again or removed, oldest first.
    pub(super) retired: VecDeque<LiveFile>,
    /// Bytes of the files that wait to be used again.
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
        // It is set once, right after the thread was started.
        let _ = self.writer.set(thread);
        self.wake_writer();
    }

    pub(super) fn wake_writer(&self) {
        if let Some(thread) = self.writer.get() {
            thread.unpark();
        }
    }

    /// A new log has begun after a failure: `after` is where the old one ends; it has a cut that is durable, and goes on
    /// at `position` in a file with `room`.
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
        // The next file must have begun durably: else a crash would find no trace of the log at all.
        while state.live.get(1).is_some_and(|next| next.start <= upto && next.start < durable) {
            if let Some(file) = state.live.pop_front() {
                state.retired.push_back(file);
            }
        }
        if !state.retired.is_empty() {
            self.supply.notify_one();
        }
    }

    /// What gathers has gathered.
    pub(super) fn hurry(&self) {
        let mut state = self.state.lock();
        if state.pending.haste == Haste::Gathers {
            state.pending.haste = Haste::Prompt;
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

    /// The writer ends: nothing that is not yet durable will be.
    pub(super) fn closed(&self, error: Option<LogError>) {
        self.state.lock().phase = Phase::Closed(error);
        self.progress.end();
    }

    /// How the writer has ended.
    pub(super) fn stopped(&self) -> Result<(), LogError> {
        match &self.state.lock().phase {
            Phase::Closed(None) => Ok(()),
            Phase::Closed(Some(error)) => Err(error.clone()),
            Phase::Failing(cause) => Err(LogError::Failed { cause: cause.clone() }),
            Phase::Running => Err(LogError::Failed { cause: "the log has not ended".into() }),
        }
    }
}

/// Bytes of frames that a fresh file takes.
pub(super) struct FileRoom(u64);

impl FileRoom {
    pub(super) fn of(file: &ReadyFile) -> Self {
        FileRoom(file.room())
    }
}

impl State {
    /// The state of a log that begins at `position`; it has no file yet.
    pub(super) fn new(position: u64, live: VecDeque<LiveFile>, next_sequence: u64) -> Self {
        State {
            phase: Phase::Running,
            stop: Stop::No,
            appended: position,
            pending: Batch::default(),
            room: 0,
            ready: None,
            wanted: 0,
            trouble: None,
            full: false,
            reserve: false,
            nap: Duration::ZERO,
            gathers: false,
            writer_awaits: None,
            live,
            retired: VecDeque::new(),
            spare_bytes: 0,
            next_sequence,
        }
    }

    /// Appends a record. It may gather with others if `may_gather`: its thread will say when it rests.
    pub(super) fn append(
        &mut self,
        core: &Core,
        body: &[u8],
        urgency: Urgency,
        may_gather: bool,
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
        self.pending.haste = self.pending.haste.max(match urgency {
            Urgency::Patient(since) if is_seldom(since, self.nap) => Haste::Patient,
            Urgency::MakesRoom => Haste::Prompt,
            Urgency::Prompt | Urgency::Patient(_) if may_gather && self.gathers => Haste::Gathers,
            Urgency::Prompt | Urgency::Patient(_) => Haste::Prompt,
        });
        Frames::push(&mut self.pending.bytes, body);
        self.set_appended(core, self.appended + bytes);
        Ok(Lsn(self.appended))
    }

    /// Whether a record of so many bytes could be appended now; if it needs a longer file asks for one.
    pub(super) fn admit(
        &mut self,
        core: &Core,
        body_bytes: usize,
        urgency: Urgency,
    ) -> Result<Admission, LogError> {
        match (&self.phase, self.stop) {
            (Phase::Closed(_), _) | (_, Stop::Drain | Stop::Abandon) => return Err(LogError::Closed),
            (Phase::Failing(cause), _) => return Err(LogError::Failed { cause: cause.clone() }),
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
        let makes_room = urgency == Urgency::MakesRoom;
        if !makes_room && let Some(cause) = self.beyond(&core.options) {
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
            // In whole blocks, so that it can be written past the page cache.
            self.wanted = file_bytes.next_multiple_of(MIN_FILE_BYTES);
            core.supply.notify_one();
        }
        if makes_room && !self.reserve && matches!(self.trouble, Some(FullCause::Capacity { .. })) {
            (self.reserve, self.trouble) = (true, None);
            core.supply.notify_one();
        }
        self.full |= self.trouble.is_some() && !makes_room;
        Err(self.trouble.clone().map_or(LogError::Busy, LogError::Full))
    }

    /// Why commits are refused though a file may be ready: what there is beyond the capacity is not for them.
    fn beyond(&self, options: &LogOptions) -> Option<FullCause> {
        let capacity_bytes = options.capacity_bytes;
        let is_beyond = self.reserve && self.size_bytes() > capacity_bytes;
        is_beyond.then_some(FullCause::Capacity { capacity_bytes })
    }

    /// Why records are refused, if some have been.
    pub(super) fn full(&self, options: &LogOptions) -> Option<FullCause> {
        self.beyond(options).or_else(|| self.trouble.clone()).filter(|_| self.full)
    }

    /// Whether the writer must be woken, who is not woken twice.
    pub(super) fn wakes_writer(&mut self) -> bool {
        self.writer_awaits.take_if(|haste| self.pending.haste >= *haste).is_some()
    }

    fn set_appended(&mut self, core: &Core, position: u64) {
        self.appended = position;
        core.progress.set_appended(position);
    }

    /// A write or sync has failed: takes no more records, drops what is pending. Answers up to where positions had been
    /// handed out.
    pub(super) fn fail(&mut self, core: &Core, durable: u64, cause: Arc<str>) -> u64 {
        self.phase = Phase::Failing(cause);
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

//! The writer thread "fulmar-log": writes and syncs pending records, starts a new log after a
//! failure, and seals the log when it is closed.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fulmar_pages::record::CutPoint;
use fulmar_pages::{LogId, RecordKind};

use super::batching::{Batching, MAX_HOLD};
use super::frame::{Frames, HEADER_BYTES, Header};
use super::newest::{NEWEST, Newest, NewestFile};
use super::preallocation::{self, Supplier};
use super::recover::Recovered;
use super::state::{Batch, Core, FileRoom, LiveFile, ReadyFile, State};
use super::sync_policy::SyncPolicy;
use super::time_slice;
use crate::failpoint;
use crate::files::{LogFile, LogFiles};
use crate::log::LogError;
use crate::log::options::{LogOptions, MAX_RETRY_DELAY, Stop};
use crate::log::own_record::own_record;

/// Length of the first file of a log. It is short because a start waits for its creation.
const FIRST_FILE_BYTES: u64 = 4 << 20;

/// How often a lingering batch checks whether it has grown.
const LINGER_STEP: Duration = Duration::from_micros(100);

/// The buffer of a batch is reused if it is not larger than this.
const MAX_REUSED_BUFFER_BYTES: usize = 8 << 20;

/// State of the writer: its log, file and offset.
pub(super) struct Writer {
    core: Arc<Core>,
    log: LogId,
    frames: Frames,
    file: Box<dyn LogFile>,
    name: String,
    /// Offset in the file at which the next frame is written.
    offset: u64,
    /// Position of the next frame.
    position: u64,
    /// Position up to which this log is durable.
    synced: u64,
    batching: Batching,
    buffer: Vec<u8>,
}

/// A failed operation on the log's disk.
struct Failure {
    operation: &'static str,
    file: String,
    cause: std::io::Error,
}

impl Failure {
    fn into_error(self) -> LogError {
        LogError::Io { operation: self.operation, file: self.file, cause: Arc::new(self.cause) }
    }
}

/// Starts a log in a directory that was just recovered. Returns its writer and supplier, whose
/// threads are not yet running.
pub(super) fn start_first_log(
    options: LogOptions,
    files: Arc<dyn LogFiles>,
    recovered: Recovered,
) -> Result<(Arc<Core>, Writer, Supplier), LogError> {
    let Recovered { live, spares, useless_files, cut, next_sequence: sequence } = recovered;
    let name = preallocation::log_name(sequence);
    let io = |operation, name: &str, cause| LogError::Io {
        operation,
        file: files.describe(name),
        cause: Arc::new(cause),
    };
    let bytes = options.file_bytes.min(FIRST_FILE_BYTES);
    // A crash here leaves a file without a header, or a log with only a cut. Neither affects
    // recovery.
    let file = files.create(&name, bytes).map_err(|cause| io("create log file", &name, cause))?;
    files.sync_dir().map_err(|cause| io("sync the directory of log file", &name, cause))?;
    let newest = NewestFile::open(&*files).map_err(|cause| io("open", NEWEST, cause))?;
    let state = State::new(cut.position, live, sequence + 1);
    let core = Arc::new(Core::new(options, files.clone(), newest, state));
    let ready = ReadyFile { sequence, name, file, bytes };
    let writer = start_log(&core, ready, cut.position, cut).map_err(|(failure, _)| failure.into_error())?;
    // Only now: until the new log is durable, files that appear useless may be evidence.
    let mut supplier = Supplier::new(core.clone());
    supplier
        .take_over(spares, useless_files)
        .map_err(|cause| io("take over old files next to", &writer.name, cause))?;
    {
        let mut state = core.state.lock();
        state.reserve = state.size_bytes() > core.options.capacity_bytes;
    }
    Ok((core, writer, supplier))
}

/// Starts a new log at `start` in an empty file: writes and syncs its header and cut, then records
/// the file as the newest one. Only after that the log accepts records. An error contains the file,
/// unless it may already be recorded as the newest one.
fn start_log(
    core: &Arc<Core>,
    ready: ReadyFile,
    start: u64,
    cut: CutPoint,
) -> Result<Writer, (Failure, Option<LiveFile>)> {
    let log = LogId(rand::random());
    let frames = Frames::of(log);
    let room = FileRoom::of(&ready);
    let header = Header { log, sequence: ready.sequence, start };
    let mut bytes = header.encode().to_vec();
    Frames::push(&mut bytes, &own_record(RecordKind::Cut, Some(cut)));
    frames.fill(&mut bytes[HEADER_BYTES..], start, start);
    let live = LiveFile { name: ready.name.clone(), start, bytes: ready.bytes, failed: false };
    let written = ready
        .file
        .write_at(0, &bytes)
        .map_err(|cause| ("write", cause))
        .and_then(|()| ready.file.sync_data().map_err(|cause| ("sync", cause)));
    if let Err((operation, cause)) = written {
        let file = core.files.describe(&ready.name);
        return Err((Failure { operation, file, cause }, Some(LiveFile { failed: true, ..live })));
    }
    let newest = Newest { log, sequence: ready.sequence, bytes: ready.bytes };
    if let Err(cause) = core.newest.write(newest) {
        return Err((Failure { operation: "write", file: core.files.describe(NEWEST), cause }, None));
    }
    let offset = bytes.len() as u64;
    let position = start + offset - HEADER_BYTES as u64;
    core.resume(cut.position, position, live, room);
    Ok(Writer {
        core: core.clone(),
        log,
        frames,
        file: ready.file,
        name: ready.name,
        offset,
        position,
        synced: position,
        batching: Batching::default(),
        buffer: Vec::new(),
    })
}

enum Next {
    Batch(Batch),
    Drained,
    Abandoned,
}

impl Writer {
    /// Runs until the log is stopped.
    pub(super) fn run(mut self) {
        let core = self.core.clone();
        let _guard = EndGuard(core.clone());
        time_slice::request_short_slice();
        let end = loop {
            let outcome = match self.next() {
                Next::Batch(batch) => self.write(batch),
                Next::Abandoned => break Some(LogError::Closed),
                Next::Drained => match self.seal() {
                    Ok(()) => break None,
                    Err(failure) => break Some(failure.into_error()),
                },
            };
            if let Err(failure) = outcome
                && let Err(error) = self.restart_log(failure)
            {
                break Some(error);
            }
        };
        core.closed(end);
    }

    /// Sleeps until there is work.
    fn next(&mut self) -> Next {
        let core = self.core.clone();
        let mut commit_delay = self.batching.commit_delay();
        loop {
            let mut state = core.state.lock();
            if state.stop == Stop::Abandon {
                return Next::Abandoned;
            }
            if state.stop == Stop::No
                && state.pending.sync_policy <= SyncPolicy::Deferred
                && let Some(commit_delay) = commit_delay.take()
            {
                state.writer_awaits = Some(SyncPolicy::OnIdle);
                drop(state);
                thread::park_timeout(commit_delay);
                continue;
            }
            if state.pending.records > 0 {
                drop(state);
                self.linger();
                return Next::Batch(self.take());
            }
            if state.stop == Stop::Drain {
                return Next::Drained;
            }
            state.writer_awaits = Some(SyncPolicy::Deferred);
            drop(state);
            thread::park();
        }
    }

    /// Waits for more records of a batch, if that is likely to pay off.
    fn linger(&self) {
        let sync = self.core.progress.statistics.smoothed_sync();
        let began = Instant::now();
        loop {
            let mut state = self.core.state.lock();
            let (awaits, step, linger_time) = match (state.stop, state.pending.sync_policy) {
                (Stop::Drain | Stop::Abandon, _) => return,
                (Stop::No, SyncPolicy::OnIdle) => (Some(SyncPolicy::Immediate), MAX_HOLD, MAX_HOLD),
                (Stop::No, _) => (None, LINGER_STEP, self.batching.linger_time(state.pending.records, sync)),
            };
            let left = linger_time.saturating_sub(began.elapsed());
            if left.is_zero() {
                return;
            }
            state.writer_awaits = awaits;
            drop(state);
            thread::park_timeout(left.min(step));
        }
    }

    fn take(&mut self) -> Batch {
        let empty = Batch { bytes: std::mem::take(&mut self.buffer), ..Batch::default() };
        let sync = self.core.progress.statistics.smoothed_sync();
        let mut state = self.core.state.lock();
        state.writer_awaits = None;
        let batch = std::mem::replace(&mut state.pending, empty);
        self.batching.record_batch(batch.records, Instant::now());
        state.hold_until_idle = self.batching.hold_until_idle(sync);
        state.commit_delay = self.batching.commit_delay().unwrap_or_default();
        drop(state);
        self.core.progress.wake_room();
        batch
    }

    fn write(&mut self, mut batch: Batch) -> Result<(), Failure> {
        let mut from = 0;
        for (at, file) in std::mem::take(&mut batch.switches) {
            self.write_frames(&mut batch.bytes[from..at])?;
            self.switch(file)?;
            from = at;
        }
        self.write_frames(&mut batch.bytes[from..])?;
        self.core.files.hit_failpoint(failpoint::LOG_AFTER_WRITE);
        self.sync()?;
        self.core.progress.statistics.batch(batch.records, batch.bytes.len() as u64);
        self.core.progress.publish(self.synced);
        if batch.bytes.capacity() <= MAX_REUSED_BUFFER_BYTES {
            self.buffer = batch.bytes;
            self.buffer.clear();
        }
        Ok(())
    }

    fn write_frames(&mut self, frames: &mut [u8]) -> Result<(), Failure> {
        if frames.is_empty() {
            return Ok(());
        }
        self.frames.fill(frames, self.position, self.synced);
        let files = &self.core.files;
        let half = match files.is_failpoint_armed(failpoint::LOG_MID_RECORD) {
            true => frames.len() / 2,
            false => 0,
        };
        let (first, second) = frames.split_at(half);
        if half > 0 {
            self.file.write_at(self.offset, first).map_err(|cause| self.failure("write", cause))?;
            files.hit_failpoint(failpoint::LOG_MID_RECORD);
        }
        let rest_at = self.offset + half as u64;
        self.file.write_at(rest_at, second).map_err(|cause| self.failure("write", cause))?;
        self.offset += frames.len() as u64;
        self.position += frames.len() as u64;
        Ok(())
    }

    /// Continues in another file. Its header proves the durability of everything before it, so that
    /// must be synced first. Then the header is written and synced, and the file is recorded as the
    /// newest one.
    fn switch(&mut self, next: ReadyFile) -> Result<(), Failure> {
        self.sync()?;
        self.core.progress.publish(self.synced);
        let header = Header { log: self.log, sequence: next.sequence, start: self.position };
        self.file = next.file;
        self.name = next.name;
        self.file.write_at(0, &header.encode()).map_err(|cause| self.failure("write", cause))?;
        self.file.sync_data().map_err(|cause| self.failure("sync", cause))?;
        let newest = Newest { log: self.log, sequence: next.sequence, bytes: next.bytes };
        self.core.newest.write(newest).map_err(|cause| Failure {
            operation: "write",
            file: self.core.files.describe(NEWEST),
            cause,
        })?;
        self.offset = HEADER_BYTES as u64;
        Ok(())
    }

    /// Makes all written data durable. The caller publishes the new position.
    fn sync(&mut self) -> Result<(), Failure> {
        if self.synced == self.position {
            return Ok(());
        }
        let began = Instant::now();
        self.file.sync_data().map_err(|cause| self.failure("sync", cause))?;
        self.core.progress.statistics.sync(began.elapsed());
        self.synced = self.position;
        Ok(())
    }

    fn seal(&mut self) -> Result<(), Failure> {
        let mut frame = Vec::new();
        Frames::push(&mut frame, &own_record(RecordKind::Seal, None));
        self.write_frames(&mut frame)?;
        self.sync()?;
        self.core.progress.publish(self.synced);
        Ok(())
    }

    fn failure(&self, operation: &'static str, cause: std::io::Error) -> Failure {
        Failure { operation, file: self.core.files.describe(&self.name), cause }
    }

    /// Handles a failure: everything that is not durable is lost, and a new log is started whose
    /// cut records this. Returns an error if the log is stopped before that has succeeded.
    fn restart_log(&mut self, failure: Failure) -> Result<(), LogError> {
        let core = self.core.clone();
        let cut = CutPoint { log: self.log, position: self.synced };
        let error = failure.into_error();
        let cause: Arc<str> = error.to_string().into();
        tracing::error!(%cause, durable = cut.position, "could not write commit log; starting a new log");
        let upto = core.state.lock().fail(&core, cut.position, cause);
        core.progress.wake_room();
        core.progress.announce_loss(cut.position, upto);
        let mut delay = core.options.retry_delay;
        loop {
            let ready = wait_ready(&core, delay).ok_or_else(|| error.clone())?;
            match start_log(&core, ready, upto, cut) {
                Ok(writer) => {
                    tracing::info!(file = writer.name, "new log started");
                    *self = writer;
                    return Ok(());
                }
                Err((failure, file)) => {
                    tracing::warn!(
                        cause = %failure.cause,
                        file = failure.file,
                        "could not start a new log yet"
                    );
                    core.state.lock().retired.extend(file);
                    core.supply.notify_one();
                    delay = (delay * 2).min(MAX_RETRY_DELAY);
                }
            }
        }
    }
}

/// Releases all waiters if the writer panics, for example in the callback for lost records.
struct EndGuard(Arc<Core>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if !self.0.progress.has_ended() {
            self.0.closed(Some(LogError::Failed {
                cause: "the log's writer thread stopped unexpectedly".into(),
            }));
        }
    }
}

/// Waits for `delay`, then for a ready file. Returns None if the log is stopped.
fn wait_ready(core: &Core, delay: Duration) -> Option<ReadyFile> {
    let end = Instant::now() + delay;
    loop {
        let mut state = core.state.lock();
        if state.stop != Stop::No {
            return None;
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero()
            && let Some(file) = state.ready.take()
        {
            core.supply.notify_one();
            return Some(file);
        }
        drop(state);
        match left.is_zero() {
            true => thread::park_timeout(MAX_RETRY_DELAY),
            false => thread::park_timeout(left),
        }
    }
}

//! Recovery: reads the existing log files when a log is opened.
//!
//! 1. Reads the header and the first record of every file. They determine which files make up which
//!    log, and where each log except the last was cut.
//! 2. Reads the logs in order, each from its oldest file to its cut, and the last one to its end,
//!    as described in the parent module.
//!
//! Preallocated files that were never started belong to no log. The new log reuses them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use fulmar_pages::record::{self, CutPoint};
use fulmar_pages::{LogId, Record, RecordKind};

use super::frame::{FRAME_HEAD_BYTES, Frame, Frames, HEADER_BYTES, Header, HeaderState, MAX_BODY_BYTES};
use super::newest::{NEWEST, NEWEST_BYTES, NEWEST_NEW, Newest};
use super::preallocation::{Spare, is_spare, log_name, log_sequence, spare_sequence};
use super::state::LiveFile;
use crate::files::{LogFile, LogFiles};
use crate::log::{LogError, Lsn};

/// Result of recovery.
pub(super) struct Recovered {
    /// The files that contain the logs, oldest first.
    pub(super) live: VecDeque<LiveFile>,
    /// Files that were never started, or that no log needs. Their names and headers have lower
    /// numbers than the next file.
    pub(super) spares: Vec<Spare>,
    /// Files without useful contents.
    pub(super) useless_files: Vec<String>,
    /// End of the last log, to be recorded in the cut of the next one.
    pub(super) cut: CutPoint,
    /// Sequence number of the next file.
    pub(super) next_sequence: u64,
}

/// The cut of the first log: there was no log before it.
pub(super) const NO_LOG: CutPoint = CutPoint { log: LogId(0), position: 0 };

/// Upper bound of positions and of sequence numbers. No log reaches it; above it, arithmetic could
/// overflow, and files that follow such a number would no longer be read.
const MAX_POSITION: u64 = 1 << 62;

type Replay<'a> = dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError> + 'a;

/// An existing log file.
struct OldFile {
    name: String,
    file: Box<dyn LogFile>,
    bytes: u64,
    /// None if the file was never started.
    header: Option<Header>,
}

impl OldFile {
    fn into_spare(self) -> Spare {
        Spare { name: self.name, bytes: self.bytes }
    }
}

/// Contents of the directory.
struct Found {
    /// Ordered by sequence number.
    files: Vec<OldFile>,
    spares: Vec<Spare>,
    useless_files: Vec<String>,
    next_sequence: u64,
}

/// The files of one log.
struct OldLog {
    id: LogId,
    files: Vec<OldFile>,
}

/// Reads the logs in `files`, passes their records to `replay`, and makes their contents durable.
pub(super) fn recover(files: &dyn LogFiles, replay: &mut Replay<'_>) -> Result<Recovered, LogError> {
    read_all(files, replay, true)
}

/// As [`recover`], but writes nothing.
pub(super) fn verify(files: &dyn LogFiles, replay: &mut Replay<'_>) -> Result<(), LogError> {
    read_all(files, replay, false).map(drop)
}

fn read_all(
    files: &dyn LogFiles,
    replay: &mut Replay<'_>,
    make_durable: bool,
) -> Result<Recovered, LogError> {
    let reader = Reader { files, make_durable };
    let Found { files: old, mut spares, mut useless_files, next_sequence } = reader.open_all()?;
    let (logs, unstarted) = group(old);
    spares.extend(unstarted);
    let cuts = reader.cuts(&logs)?;
    let mut cut = NO_LOG;
    let mut live = VecDeque::new();
    let last = logs.len().saturating_sub(1);
    for (i, log) in logs.into_iter().enumerate() {
        let known = cuts.iter().find(|(_, cut)| cut.log == log.id);
        let position = match known {
            Some((_, cut)) => reader.read_to_cut(&log, cut.position, replay)?,
            None if i == last => reader.read_to_end(&log, replay)?,
            None => {
                let position = reader.expect_only_a_cut(&log)?;
                if !is_sole_evidence(&cuts, log.id) {
                    useless_files.extend(log.files.into_iter().map(|file| file.name));
                    continue;
                }
                position
            }
        };
        cut = CutPoint { log: log.id, position };
        for file in log.files {
            match file.header {
                Some(header) => {
                    live.push_back(LiveFile {
                        name: file.name,
                        start: header.start,
                        bytes: file.bytes,
                        failed: false,
                    });
                }
                None => spares.push(file.into_spare()),
            }
        }
    }
    Ok(Recovered { live, spares, useless_files, cut, next_sequence })
}

/// Returns true if only this log records the end of an older one. It must then be kept as long as
/// the older log is.
fn is_sole_evidence(cuts: &[(LogId, CutPoint)], by: LogId) -> bool {
    let own = cuts.iter().find(|(log, _)| *log == by);
    own.is_some_and(|(_, own)| cuts.iter().filter(|(_, cut)| cut.log == own.log).count() == 1)
}

/// Groups files by log. Files before the first header belong to none.
fn group(old: Vec<OldFile>) -> (Vec<OldLog>, Vec<Spare>) {
    let mut logs: Vec<OldLog> = Vec::new();
    let mut unstarted = Vec::new();
    for file in old {
        match (file.header, logs.last_mut()) {
            (Some(header), Some(log)) if header.log == log.id => log.files.push(file),
            (Some(header), _) => logs.push(OldLog { id: header.log, files: vec![file] }),
            (None, Some(log)) => log.files.push(file),
            (None, None) => unstarted.push(file.into_spare()),
        }
    }
    (logs, unstarted)
}

impl OldLog {
    /// Returns the next started file after `file`. Files whose creation failed may lie in between.
    fn next_started(&self, file: usize) -> Option<(usize, Header)> {
        let later = self.files.iter().enumerate().skip(file + 1);
        later.filter_map(|(at, file)| Some((at, file.header?))).next()
    }
}

struct Reader<'a> {
    files: &'a dyn LogFiles,
    /// Whether the data that was read last is made durable before a new log relies on it.
    make_durable: bool,
}

/// The place where reading a log's frames has stopped.
struct Reached {
    /// Index of the file.
    file: usize,
    /// Offset in the file.
    offset: usize,
    /// End of the last valid frame.
    position: u64,
    /// Position up to which a frame or header proves durability.
    proved: u64,
    sealed: bool,
}

impl Reader<'_> {
    /// Opens all log files in order, and inspects spare files. The next sequence number is higher
    /// than that of every file name and header.
    fn open_all(&self) -> Result<Found, LogError> {
        let names =
            self.files.list().map_err(|cause| self.io("list the directory of", "the commit log", cause))?;
        let mut logs: Vec<_> = names.iter().filter_map(|name| Some((log_sequence(name)?, name))).collect();
        logs.sort_unstable();
        let files =
            logs.iter().map(|(sequence, name)| self.open(*sequence, name)).collect::<Result<_, _>>()?;
        let mut found = Found { files, spares: Vec::new(), useless_files: Vec::new(), next_sequence: 0 };
        let mut last_sequence = logs.last().map_or(0, |(sequence, _)| *sequence);
        for name in names.iter().filter(|name| is_spare(name)) {
            // Read errors of a file that is not needed are no reason to refuse the log.
            match spare_sequence(name).and_then(|sequence| Some((sequence, self.open(sequence, name).ok()?)))
            {
                Some((sequence, file)) => {
                    last_sequence = last_sequence.max(sequence);
                    found.spares.push(file.into_spare());
                }
                None => found.useless_files.push(name.clone()),
            }
        }
        if names.iter().any(|name| name == NEWEST) {
            self.check_newest(&found.files)?;
            // It is created again under its temporary name if `newest` is missing.
            found.useless_files.extend(names.iter().filter(|name| *name == NEWEST_NEW).cloned());
        }
        Ok(Found { next_sequence: last_sequence + 1, ..found })
    }

    /// Refuses a log whose newest file is missing or truncated.
    fn check_newest(&self, files: &[OldFile]) -> Result<(), LogError> {
        let damaged = |name: &str, problem: String| LogError::Corrupt {
            file: self.files.describe(name),
            offset: 0,
            problem,
        };
        let read = || -> io::Result<Option<[u8; NEWEST_BYTES]>> {
            let file = self.files.open(NEWEST)?;
            let mut bytes = [0; NEWEST_BYTES];
            let is_whole = file.length_bytes()? >= NEWEST_BYTES as u64;
            is_whole.then(|| file.read_at(0, &mut bytes)).transpose()?;
            Ok(is_whole.then_some(bytes))
        };
        let Some(bytes) = read().map_err(|cause| self.io("read", NEWEST, cause))? else {
            return Err(damaged(NEWEST, "the file is truncated".to_owned()));
        };
        let newest = Newest::decode(&bytes).map_err(|problem| damaged(NEWEST, problem))?;
        let Some(newest) = newest else { return Ok(()) };
        let name = log_name(newest.sequence);
        let begun = files
            .iter()
            .find(|file| file.name == name && file.header.is_some_and(|header| header.log == newest.log));
        match begun {
            Some(file) if file.bytes >= newest.bytes => Ok(()),
            Some(file) => {
                let problem =
                    format!("the file is truncated: it has {} of {} bytes", file.bytes, newest.bytes);
                Err(damaged(&name, problem))
            }
            None => {
                let witness = self.files.describe(NEWEST);
                let problem =
                    format!("the file is missing or empty, but {witness} names it as the newest log file");
                Err(damaged(&name, problem))
            }
        }
    }

    fn open(&self, sequence: u64, name: &str) -> Result<OldFile, LogError> {
        let file = self.files.open(name).map_err(|cause| self.io("open", name, cause))?;
        let bytes = file.length_bytes().map_err(|cause| self.io("get the length of", name, cause))?;
        let mut old = OldFile { name: name.to_owned(), file, bytes, header: None };
        if sequence >= MAX_POSITION {
            return Err(self.corrupt(&old, 0, "the file's sequence number is out of range"));
        }
        if bytes < HEADER_BYTES as u64 {
            // Its creation was interrupted.
            return Ok(old);
        }
        let mut header = [0; HEADER_BYTES];
        old.file.read_at(0, &mut header).map_err(|cause| self.io("read", name, cause))?;
        match Header::decode(&header) {
            HeaderState::Present(header) if header.start > MAX_POSITION => {
                return Err(self.corrupt(
                    &old,
                    36,
                    "the start position in the file's header is out of range",
                ));
            }
            HeaderState::Present(header) if header.sequence == sequence => old.header = Some(header),
            HeaderState::Present(header) if header.sequence > sequence => {
                let problem = format!("the file has the header of {}", log_name(header.sequence));
                return Err(self.corrupt(&old, 28, &problem));
            }
            // A spare file keeps its old header until it is reused.
            HeaderState::Present(_) | HeaderState::Blank => {}
            // A header lies in one sector, so a crash leaves either the old or the new one.
            HeaderState::Damaged => return Err(self.corrupt(&old, 0, "the file's header is damaged")),
            HeaderState::Unknown(version) => {
                let problem = format!(
                    "format version {version} is not supported; the file was written by a newer \
                     Fulmar"
                );
                return Err(self.corrupt(&old, 8, &problem));
            }
        }
        Ok(old)
    }

    /// Returns the cuts of all logs: the log that contains the cut, and the cut.
    fn cuts(&self, logs: &[OldLog]) -> Result<Vec<(LogId, CutPoint)>, LogError> {
        let mut cuts = Vec::new();
        for log in logs {
            let file = &log.files[0];
            let start = file.header.map_or(0, |header| header.start);
            // A cut is much shorter than this.
            let bytes = self.read(file, 0, file.bytes.min(512))?;
            if let Some(frame) = Frames::of(log.id).at(&bytes, HEADER_BYTES, start)
                && let Ok(record) = record::decode(frame.body)
                && let Some(cut) = record.cut()
            {
                cuts.push((log.id, cut));
            }
        }
        Ok(cuts)
    }

    fn read_to_cut(&self, log: &OldLog, cut: u64, replay: &mut Replay<'_>) -> Result<u64, LogError> {
        if log.files[0].header.is_some_and(|header| header.start >= cut) {
            // The remaining files are after the cut: they belong to a batch that failed.
            return Ok(cut);
        }
        let stop = self.read_frames(log, cut, replay)?;
        match stop.position == cut {
            true => Ok(cut),
            false => {
                let problem = format!(
                    "no valid record at this place, but a later log records that this one ends at \
                     {cut}"
                );
                Err(self.corrupt(&log.files[stop.file], stop.offset as u64, &problem))
            }
        }
    }

    fn read_to_end(&self, log: &OldLog, replay: &mut Replay<'_>) -> Result<u64, LogError> {
        let stop = self.read_frames(log, u64::MAX, replay)?;
        if !stop.sealed {
            self.refuse_if_proved_durable(log, &stop)?;
        }
        if self.make_durable {
            self.make_durable(log, &stop)?;
        }
        Ok(stop.position)
    }

    /// Reads a log that no later one has cut. It contains no commits: its start had failed, and
    /// another one was started. Returns its end.
    fn expect_only_a_cut(&self, log: &OldLog) -> Result<u64, LogError> {
        let mut only_own = |position, _: &Record<'_>| {
            let problem = format!(
                "the log contains commits (up to {position}), but no later log records where it \
                 ends: a file is missing"
            );
            Err(self.corrupt(&log.files[0], 0, &problem))
        };
        Ok(self.read_frames(log, u64::MAX, &mut only_own)?.position)
    }

    /// Replays the log's frames from its oldest file on, up to `limit` or the first invalid place.
    fn read_frames(&self, log: &OldLog, limit: u64, replay: &mut Replay<'_>) -> Result<Reached, LogError> {
        let frames = Frames::of(log.id);
        let start = log.files[0].header.map_or(0, |header| header.start);
        let mut stop =
            Reached { file: 0, offset: HEADER_BYTES, position: start, proved: start, sealed: false };
        loop {
            let file = &log.files[stop.file];
            let bytes = self.read(file, 0, file.bytes)?;
            while stop.position < limit
                && !stop.sealed
                && let Some(frame) = frames.at(&bytes, stop.offset, stop.position)
            {
                self.replay(file, &frame, &mut stop, replay)?;
            }
            match log.next_started(stop.file) {
                Some((file, header))
                    if header.start == stop.position && stop.position < limit && !stop.sealed =>
                {
                    stop = Reached { file, offset: HEADER_BYTES, proved: header.start, ..stop };
                }
                _ => return Ok(stop),
            }
        }
    }

    fn replay(
        &self,
        file: &OldFile,
        frame: &Frame<'_>,
        stop: &mut Reached,
        replay: &mut Replay<'_>,
    ) -> Result<(), LogError> {
        let record = record::decode(frame.body).map_err(|error| {
            let at = (stop.offset + FRAME_HEAD_BYTES + error.at) as u64;
            self.corrupt(file, at, &error.to_string())
        })?;
        stop.proved = stop.proved.max(frame.synced);
        stop.position += frame.bytes() as u64;
        stop.offset += frame.bytes();
        stop.sealed = record.header.kind == RecordKind::Seal;
        match record.header.kind {
            RecordKind::Cut | RecordKind::Seal => Ok(()),
            _ => replay(Lsn(stop.position), &record),
        }
    }

    /// Refuses a log if a valid frame or header after the invalid place proves that the place had
    /// been durable.
    fn refuse_if_proved_durable(&self, log: &OldLog, stop: &Reached) -> Result<(), LogError> {
        let file = &log.files[stop.file];
        let start = file.header.map_or(stop.position, |header| header.start);
        let bytes = self.read(file, 0, file.bytes)?;
        let position_of = |at: usize| start + (at - HEADER_BYTES) as u64;
        let frame = Frames::of(log.id).find_proof(&bytes, stop.offset + 1, stop.position, position_of);
        let header = || log.next_started(stop.file).map(|(file, _)| (&log.files[file], 0));
        let Some((witness, at)) = frame.map(|at| (file, at)).or_else(header) else {
            return Ok(());
        };
        let witness = self.files.describe(&witness.name);
        let problem = format!(
            "no valid record at this place, but it had been synced when byte {at} of {witness} \
             was written"
        );
        Err(self.corrupt(file, stop.offset as u64, &problem))
    }

    /// Writes everything whose durability is not proved once more, and syncs it. It may be in the
    /// page cache only, and a sync alone does not write pages that the kernel considers clean since
    /// an earlier sync failed.
    fn make_durable(&self, log: &OldLog, stop: &Reached) -> Result<(), LogError> {
        for (at, file) in log.files[..=stop.file].iter().enumerate() {
            let Some(header) = file.header else { continue };
            let offset_of = |position: u64| HEADER_BYTES as u64 + (position - header.start);
            // End of the file's valid frames.
            let next = log.next_started(at).filter(|(next, _)| *next <= stop.file);
            let used = next.map_or(stop.position, |(_, header)| header.start);
            if used <= stop.proved && header.start < stop.proved {
                continue;
            }
            // Include the header if nothing in this file is proved durable.
            let from = if stop.proved > header.start { offset_of(stop.proved) } else { 0 };
            let bytes = self.read(file, from, offset_of(used) - from)?;
            file.file.write_at(from, &bytes).map_err(|cause| self.io("write", &file.name, cause))?;
            file.file.sync_data().map_err(|cause| self.io("sync", &file.name, cause))?;
        }
        Ok(())
    }

    fn read(&self, file: &OldFile, offset: u64, length: u64) -> Result<Vec<u8>, LogError> {
        if length > (HEADER_BYTES + MAX_BODY_BYTES) as u64 * 2 {
            return Err(self.corrupt(file, 0, "the file exceeds the maximum length of a log file"));
        }
        let mut bytes = vec![0; length as usize];
        file.file.read_at(offset, &mut bytes).map_err(|cause| self.io("read", &file.name, cause))?;
        Ok(bytes)
    }

    fn io(&self, operation: &'static str, name: &str, cause: io::Error) -> LogError {
        LogError::Io { operation, file: self.files.describe(name), cause: Arc::new(cause) }
    }

    fn corrupt(&self, file: &OldFile, offset: u64, problem: &str) -> LogError {
        LogError::Corrupt { file: self.files.describe(&file.name), offset, problem: problem.to_owned() }
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

//! Preallocates log files and recycles those that are no longer needed. Thread "fulmar-log-files".
//!
//! ```text
//!   live ---truncate---> retired ---> spare (N.spare) ---> ready (N.log) ---append---> live
//!                           \-> removed       new file of zeros --^
//! ```
//!
//! One file is always ready, if the disk and the log's capacity allow it. Otherwise the state
//! contains the reason, and preparation is retried after a delay and whenever something has
//! changed.
//!
//! Names change in order, also on disk. Files therefore disappear oldest first, and files that a
//! crash brings back are an older but contiguous part of the log. A new name is synced before
//! anything is written to the file.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::state::{Core, LiveFile, MIN_FILE_BYTES, Phase, ReadyFile, State};
use crate::log::FullCause;
use crate::log::options::{LogOptions, MAX_RETRY_DELAY, RESERVE_DIVISOR, Stop};

/// Spare files are kept while the log's size is at most its capacity divided by this, which is
/// about the number of files that it fills between two flushes. Creating a new file means writing
/// all of it once more.
const SPARE_SIZE_DIVISOR: u64 = 2;

const LOG_SUFFIX: &str = ".log";
const SPARE_SUFFIX: &str = ".spare";

/// Returns the name of the log file with this sequence number.
pub(super) fn log_name(sequence: u64) -> String {
    format!("{sequence:016x}{LOG_SUFFIX}")
}

/// Returns the sequence number of a log file.
pub(super) fn log_sequence(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(LOG_SUFFIX)?;
    u64::from_str_radix(digits, 16).ok().filter(|sequence| log_name(*sequence) == name)
}

/// Returns the sequence number that a spare file had as a log file.
pub(super) fn spare_sequence(name: &str) -> Option<u64> {
    log_sequence(&name.replace(SPARE_SUFFIX, LOG_SUFFIX)).filter(|_| is_spare(name))
}

/// Returns true if this is the name of a spare file.
pub(super) fn is_spare(name: &str) -> bool {
    name.ends_with(SPARE_SUFFIX)
}

/// State of the supplier thread.
pub(super) struct Supplier {
    core: Arc<Core>,
    spares: Vec<Spare>,
    retry_delay: Duration,
}

/// A file to be reused.
pub(super) struct Spare {
    pub(super) name: String,
    pub(super) bytes: u64,
}

enum Job {
    Retire(LiveFile),
    /// Prepare a file of at least this many bytes.
    Prepare(u64),
}

impl Supplier {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let retry_delay = core.options.retry_delay;
        Supplier { core, spares: Vec::new(), retry_delay }
    }

    /// Takes over the files that an earlier process has preallocated or kept, and removes files
    /// that are not part of the log.
    ///
    /// A spare keeps its name until it is used, even if that is a log file's name: no file of a
    /// started log has a number in between, so the next recovery reads the same.
    /// [`Supplier::reuse`] renames it later, as any other spare.
    pub(super) fn take_over(&mut self, spares: Vec<Spare>, mut useless_files: Vec<String>) -> io::Result<()> {
        let files = self.core.files.clone();
        for spare in spares {
            let size_bytes = self.core.state.lock().size_bytes() + spare.bytes;
            match self.is_worth_keeping(spare.bytes, size_bytes) {
                true => self.spares.push(spare),
                false => useless_files.push(spare.name),
            }
            self.count_spares(&mut self.core.state.lock());
        }
        if useless_files.is_empty() {
            return Ok(());
        }
        useless_files.iter().try_for_each(|name| files.remove(name))?;
        files.sync_dir()
    }

    /// Returns true if a spare of `bytes` is kept, given the log's size including it.
    fn is_worth_keeping(&self, bytes: u64, size_bytes: u64) -> bool {
        let LogOptions { capacity_bytes, file_bytes, .. } = self.core.options;
        bytes == file_bytes && size_bytes <= capacity_bytes / SPARE_SIZE_DIVISOR
    }

    /// Runs until the log is stopped.
    pub(super) fn run(mut self) {
        let core = self.core.clone();
        let mut failed = false;
        while let Some(job) = next_job(&core, failed.then_some(self.retry_delay)) {
            let in_reserve = core.state.lock().reserve;
            let outcome = match job {
                Job::Retire(file) => self.retire(&file).map_err(|error| self.disk_full_cause(&error)),
                Job::Prepare(bytes) => self.prepare(bytes),
            };
            failed = self.record_failure(outcome.err(), in_reserve);
            self.retry_delay = match failed {
                true => (self.retry_delay * 2).min(MAX_RETRY_DELAY),
                false => core.options.retry_delay,
            };
            core.progress.wake_room();
        }
    }

    /// Records why a job failed. Returns false if there was no failure, or if it is outdated: the
    /// log lacked capacity, and the reserve was opened while the job ran (`in_reserve`: whether it
    /// was open before).
    fn record_failure(&self, failure: Option<FullCause>, in_reserve: bool) -> bool {
        let Some(cause) = failure else { return false };
        let mut state = self.core.state.lock();
        if state.reserve && !in_reserve && matches!(cause, FullCause::Capacity { .. }) {
            return false;
        }
        if state.unavailable_cause.as_ref() != Some(&cause) {
            tracing::warn!(
                %cause,
                "could not prepare a log file; commits are rejected when the active one is full"
            );
        }
        state.unavailable_cause = Some(cause);
        true
    }

    /// Keeps a file as a spare, or removes it.
    fn retire(&mut self, file: &LiveFile) -> io::Result<()> {
        let files = self.core.files.clone();
        let size_bytes = self.core.state.lock().size_bytes();
        let keep = !file.failed && self.is_worth_keeping(file.bytes, size_bytes);
        let spare = file.name.replace(LOG_SUFFIX, SPARE_SUFFIX);
        let outcome = match keep {
            true => files.rename(&file.name, &spare),
            false => files.remove(&file.name),
        };
        let keep = match outcome {
            Ok(()) => keep,
            // The file was removed by something else; there is nothing to retry.
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        if keep {
            self.spares.push(Spare { name: spare, bytes: file.bytes });
        }
        let mut state = self.core.state.lock();
        state.retired.pop_front();
        self.count_spares(&mut state);
        state.reserve &= state.size_bytes() > self.core.options.capacity_bytes;
        state.full &= state.reserve || state.unavailable_cause.is_some();
        Ok(())
    }

    fn prepare(&mut self, bytes: u64) -> Result<(), FullCause> {
        let replaced = self.core.state.lock().ready.take();
        if let Some(short) = replaced {
            self.core.files.remove(&short.name).map_err(|error| self.disk_full_cause(&error))?;
        }
        let sequence = {
            let mut state = self.core.state.lock();
            state.next_sequence += 1;
            state.next_sequence - 1
        };
        let name = log_name(sequence);
        let spare = self.spares.iter().position(|spare| spare.bytes >= bytes);
        // If the spare cannot be used, create a new file instead.
        let reused = spare.and_then(|at| self.reuse(at, &name).ok());
        let made = match reused {
            Some(reused) => Ok(reused),
            None => self.make(&name, bytes),
        };
        if made.is_err() {
            // The file may not exist, or the removal may fail: a start skips files that were not
            // started.
            let _ = self.core.files.remove(&name);
        }
        let (file, bytes) = made?;
        let mut state = self.core.state.lock();
        state.ready = Some(ReadyFile { sequence, name, file, bytes });
        (state.unavailable_cause, state.full) = (None, false);
        // A new log that starts after a failed one may have exceeded the capacity. That space is
        // not available to commits.
        state.reserve |= state.size_bytes() > self.core.options.capacity_bytes;
        self.count_spares(&mut state);
        drop(state);
        self.core.wake_writer();
        Ok(())
    }

    /// Renames a spare file to a log file's name.
    fn reuse(&mut self, at: usize, name: &str) -> io::Result<(Box<dyn crate::LogFile>, u64)> {
        let spare = self.spares.swap_remove(at);
        // If this fails, the file stays under its old or new name until the next start.
        self.count_spares(&mut self.core.state.lock());
        let files = &self.core.files;
        files.rename(&spare.name, name)?;
        files.sync_dir()?;
        let file = files.open(name)?;
        // Data written by an earlier process may only be in the page cache.
        file.sync_data()?;
        Ok((file, spare.bytes))
    }

    /// Creates a file of `bytes`. In the reserve, creates a file of the remaining bytes if that is
    /// enough for the waiting record.
    fn make(&mut self, name: &str, bytes: u64) -> Result<(Box<dyn crate::LogFile>, u64), FullCause> {
        let LogOptions { capacity_bytes, file_bytes, .. } = self.core.options;
        let (beyond, left, wanted) = {
            let state = self.core.state.lock();
            // Without a file, no new log could start after a failed one, and nothing could be
            // truncated any more.
            let beyond = state.reserve || matches!(state.phase, Phase::Failed(_));
            let reserve_bytes = if beyond { (capacity_bytes / RESERVE_DIVISOR).max(file_bytes) } else { 0 };
            (beyond, (capacity_bytes + reserve_bytes).saturating_sub(state.size_bytes()), state.wanted)
        };
        // A longer record may have arrived since this job was taken.
        let bytes = bytes.max(wanted);
        if bytes > left
            && let Some(spare) = self.spares.pop()
        {
            // Spares that are too short are the first to be given up.
            self.core.files.remove(&spare.name).map_err(|error| self.disk_full_cause(&error))?;
            self.count_spares(&mut self.core.state.lock());
            return self.make(name, bytes);
        }
        let bytes = if beyond { bytes.min(left - left % MIN_FILE_BYTES) } else { bytes };
        if bytes > left || bytes < wanted.max(MIN_FILE_BYTES) {
            return Err(FullCause::Capacity { capacity_bytes });
        }
        let made = self.core.files.create(name, bytes).and_then(|file| {
            self.core.files.sync_dir()?;
            Ok((file, bytes))
        });
        made.map_err(|error| self.disk_full_cause(&error))
    }

    fn count_spares(&self, state: &mut MutexGuard<'_, State>) {
        state.spare_bytes = self.spares.iter().map(|spare| spare.bytes).sum();
    }

    fn disk_full_cause(&self, error: &io::Error) -> FullCause {
        FullCause::Disk { cause: error.to_string().into() }
    }
}

/// Waits for work, after a failure for at least `delay`. Returns None if the log has been stopped.
fn next_job(core: &Core, delay: Option<Duration>) -> Option<Job> {
    let mut state = core.state.lock();
    if let Some(delay) = delay
        && state.stop == Stop::No
    {
        core.supply.wait_for(&mut state, delay);
    }
    loop {
        // A clean stop still releases what the last flush has freed, unless the disk fails.
        let disk_failed = delay.is_some() && state.stop != Stop::No;
        if state.stop == Stop::Abandon || disk_failed {
            return None;
        }
        if let Some(file) = state.retired.front() {
            return Some(Job::Retire(file.clone()));
        }
        if state.stop != Stop::No {
            return None;
        }
        let needed = state.wanted.max(core.options.file_bytes);
        if state.ready.as_ref().is_none_or(|file| file.bytes < state.wanted) {
            return Some(Job::Prepare(needed));
        }
        core.supply.wait(&mut state);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recover::{NO_LOG, Recovered};
    use super::super::writer::start_first_log;
    use super::*;
    use crate::files::FaultyFiles;

    fn supplier() -> (Arc<Core>, Supplier) {
        let options = LogOptions { capacity_bytes: 1 << 20, file_bytes: 16 << 10, ..LogOptions::default() };
        let recovered = Recovered {
            live: Default::default(),
            spares: Vec::new(),
            useless_files: Vec::new(),
            cut: NO_LOG,
            next_sequence: 1,
        };
        let (core, _writer, supplier) =
            start_first_log(options, Arc::new(FaultyFiles::new()), recovered).unwrap();
        (core, supplier)
    }

    #[test]
    fn file_fits_a_record_that_arrives_while_it_is_prepared() {
        let (core, mut supplier) = supplier();
        let longer = 64 << 10;
        core.state.lock().wanted = longer;
        supplier.prepare(16 << 10).unwrap();
        let ready = core.state.lock().ready.as_ref().map(|file| file.bytes);
        assert!(ready.is_some_and(|bytes| bytes >= longer), "{ready:?}");
    }

    #[test]
    fn lack_of_capacity_is_outdated_once_the_reserve_is_open() {
        let (core, supplier) = supplier();
        let full = || Some(FullCause::Capacity { capacity_bytes: 1 << 20 });
        core.state.lock().reserve = true;
        assert!(!supplier.record_failure(full(), false));
        assert!(core.state.lock().unavailable_cause.is_none());
        assert!(supplier.record_failure(full(), true), "the reserve is used up too");
        assert!(core.state.lock().unavailable_cause.is_some());
    }
}

//! Makes log files ahead, and takes back those that are no longer needed. The thread "fulmar-log-files".
//!
//! ```text
//!   live ---truncate---> retired ---> spare (N.spare) ---> ready (N.log) ---append---> live
//!                           \-> removed       new file of zeros --^
//! ```
//!
//! One file is always ready, if the disk and the log's bound allow; else the state says what the trouble is, and it is
//! tried again after a while and whenever something has changed. Names change in order, also on the disk; so files
//! vanish oldest first, and those that a crash brings back are a piece of the log that is older but contiguous. A new
//! name is synced before anything is written under it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::state::{Core, LiveFile, MIN_FILE_BYTES, Phase, ReadyFile, State};
use super::{FullCause, LogOptions, MAX_RETRY_DELAY, RESERVE_PART, Stop};

/// Files are kept to be used again while the log takes no more than such a part of its bound: about as many as it fills
/// between two flushes. Making one anew writes all of it once more.
const KEPT_PART: u64 = 2;

const LOG_SUFFIX: &str = ".log";
const SPARE_SUFFIX: &str = ".spare";

/// The name of the log file with this number.
pub(super) fn log_name(sequence: u64) -> String {
    format!("{sequence:016x}{LOG_SUFFIX}")
}

/// The number of a log file.
pub(super) fn log_sequence(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(LOG_SUFFIX)?;
    u64::from_str_radix(digits, 16).ok().filter(|sequence| log_name(*sequence) == name)
}

/// The number that a file to be used again had as a log file.
pub(super) fn spare_sequence(name: &str) -> Option<u64> {
    log_sequence(&name.replace(SPARE_SUFFIX, LOG_SUFFIX)).filter(|_| is_spare(name))
}

/// Whether this is a file to be used again.
pub(super) fn is_spare(name: &str) -> bool {
    name.ends_with(SPARE_SUFFIX)
}

/// The supplier's own state.
pub(super) struct Supplier {
    core: Arc<Core>,
    spares: Vec<Spare>,
    retry_delay: Duration,
}

/// A file to be used again.
pub(super) struct Spare {
    pub(super) name: String,
    pub(super) bytes: u64,
}

enum Job {
    Retire(LiveFile),
    /// Make a file of so many bytes ready.
    Prepare(u64),
}

impl Supplier {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let retry_delay = core.options.retry_delay;
        Supplier { core, spares: Vec::new(), retry_delay }
    }

    /// Takes over what an earlier process made ahead or kept, and removes what is no part of the log.
    ///
    /// A spare keeps its name until it is used, be it a log file's: none of a begun log is named in between, so that what is read next
    /// time is the same. Renaming it later is what [`Supplier::reuse`] does with any.
    pub(super) fn take_over(&mut self, spares: Vec<Spare>, mut rubbish: Vec<String>) -> io::Result<()> {
        let files = self.core.files.clone();
        for spare in spares {
            let size_bytes = self.core.state.lock().size_bytes() + spare.bytes;
            match self.keeps(spare.bytes, size_bytes) {
                true => self.spares.push(spare),
                false => rubbish.push(spare.name),
            }
            self.count_spares(&mut self.core.state.lock());
        }
        if rubbish.is_empty() {
            return Ok(());
        }
        rubbish.iter().try_for_each(|name| files.remove(name))?;
        files.sync_dir()
    }

    /// Whether a file of so many bytes is kept, where the log has `size_bytes` with it.
    fn keeps(&self, bytes: u64, size_bytes: u64) -> bool {
        let LogOptions { capacity_bytes, file_bytes, .. } = self.core.options;
        bytes == file_bytes && size_bytes <= capacity_bytes / KEPT_PART
    }

    /// Works until the log is stopped.
    pub(super) fn run(mut self) {
        let core = self.core.clone();
        let mut failed = false;
        while let Some(job) = next_job(&core, failed.then_some(self.retry_delay)) {
            let outcome = match job {
                Job::Retire(file) => self.retire(&file).map_err(|error| self.trouble(&error)),
                Job::Prepare(bytes) => self.prepare(bytes),
            };
            failed = outcome.is_err();
            self.retry_delay = match failed {
                true => (self.retry_delay * 2).min(MAX_RETRY_DELAY),
                false => core.options.retry_delay,
            };
            if let Err(cause) = outcome {
                let mut state = core.state.lock();
                if state.trouble.as_ref() != Some(&cause) {
                    tracing::warn!(%cause, "no log file can be made ready; commits are refused when the active one is full");
                }
                state.trouble = Some(cause);
            }
            core.progress.wake_room();
        }
    }

    /// Keeps a file for later, or removes it.
    fn retire(&mut self, file: &LiveFile) -> io::Result<()> {
        let files = self.core.files.clone();
        let size_bytes = self.core.state.lock().size_bytes();
        let keep = !file.failed && self.keeps(file.bytes, size_bytes);
        let spare = file.name.replace(LOG_SUFFIX, SPARE_SUFFIX);
        let outcome = match keep {
            true => files.rename(&file.name, &spare),
            false => files.remove(&file.name),
        };
        let keep = match outcome {
            Ok(()) => keep,
            // Somebody has removed it; there is nothing to try again.
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
        state.full &= state.reserve || state.trouble.is_some();
        Ok(())
    }

    fn prepare(&mut self, bytes: u64) -> Result<(), FullCause> {
        let replaced = self.core.state.lock().ready.take();
        if let Some(short) = replaced {
            self.core.files.remove(&short.name).map_err(|error| self.trouble(&error))?;
        }
        let sequence = {
            let mut state = self.core.state.lock();
            state.next_sequence += 1;
            state.next_sequence - 1
        };
        let name = log_name(sequence);
        let spare = self.spares.iter().position(|spare| spare.bytes >= bytes);
        // One that cannot be used is no reason to have none.
        let reused = spare.and_then(|at| self.reuse(at, &name).ok());
        let made = match reused {
            Some(reused) => Ok(reused),
            None => self.make(&name, bytes),
        };
        if made.is_err() {
            // There may be nothing, or it may be refused: a start passes over what was not begun.
            let _ = self.core.files.remove(&name);
        }
        let (file, bytes) = made?;
        let mut state = self.core.state.lock();
        state.ready = Some(ReadyFile { sequence, name, file, bytes });
        (state.trouble, state.full) = (None, false);
        // A new log that begins behind a failed one may have had to go beyond: that is not for commits.
        state.reserve |= state.size_bytes() > self.core.options.capacity_bytes;
        self.count_spares(&mut state);
        drop(state);
        self.core.wake_writer();
        Ok(())
    }

    /// Gives a spare file a log file's name.
    fn reuse(&mut self, at: usize, name: &str) -> io::Result<(Box<dyn crate::LogFile>, u64)> {
        let spare = self.spares.swap_remove(at);
        // If this fails the file stays where it is, whatever it is called, until the next start.
        self.count_spares(&mut self.core.state.lock());
        let files = &self.core.files;
        files.rename(&spare.name, name)?;
        files.sync_dir()?;
        let file = files.open(name)?;
        // What an earlier process made may be in the page cache only.
        file.sync_data()?;
        Ok((file, spare.bytes))
    }

    /// Makes a file of so many bytes, or in the reserve of as many as are left, if they are enough for the record that waits.
    fn make(&mut self, name: &str, bytes: u64) -> Result<(Box<dyn crate::LogFile>, u64), FullCause> {
        let LogOptions { capacity_bytes, file_bytes, .. } = self.core.options;
        let (beyond, left, wanted) = {
            let state = self.core.state.lock();
            // Without a file no new log begins behind a failed one, and nothing would be cut any more.
            let beyond = state.reserve || matches!(state.phase, Phase::Failing(_));
            let reserve_bytes = if beyond { (capacity_bytes / RESERVE_PART).max(file_bytes) } else { 0 };
            (beyond, (capacity_bytes + reserve_bytes).saturating_sub(state.size_bytes()), state.wanted)
        };
        if bytes > left
            && let Some(spare) = self.spares.pop()
        {
            // Spares that are too short are what can be spared.
            self.core.files.remove(&spare.name).map_err(|error| self.trouble(&error))?;
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
        made.map_err(|error| self.trouble(&error))
    }

    fn count_spares(&self, state: &mut MutexGuard<'_, State>) {
        state.spare_bytes = self.spares.iter().map(|spare| spare.bytes).sum();
    }

    fn trouble(&self, error: &io::Error) -> FullCause {
        FullCause::Disk { cause: error.to_string().into() }
    }
}

/// Waits for something to do; after a failure at least for `delay`. None when the log has been stopped.
fn next_job(core: &Core, delay: Option<Duration>) -> Option<Job> {
    let mut state = core.state.lock();
    if let Some(delay) = delay
        && state.stop == Stop::No
    {
        core.supply.wait_for(&mut state, delay);
    }
    loop {
        // A clean stop still gives back what the last flush has freed, unless the disk refuses.
        let refused = delay.is_some() && state.stop != Stop::No;
        if state.stop == Stop::Abandon || refused {
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

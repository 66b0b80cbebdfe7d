//! Resource usage of the node's process: resident memory and temporary files.
//!
//! Temporary files are the files in `tmp` of the data directory and in TMPDIR, including open files
//! of these directories that have been unlinked. Their allocated blocks are counted, not their
//! lengths.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// The node is killed above this resident memory, to protect the test machine from a successful
/// attack.
const KILL_RESIDENT_BYTES: u64 = 1536 << 20;
/// The node is killed above this size of temporary files.
const KILL_TEMPORARY_BYTES: u64 = 1536 << 20;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the CPU time that the running threads of a process with this name have used, in steps of a
/// clock tick.
pub fn cpu_of_threads(process: u32, name: &str) -> Duration {
    let ticks = |thread: PathBuf| {
        let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
        // The name is in parentheses. Fields are counted from 1 (`man 5 proc`): the next one is the
        // third, user time the 14th, system time the 15th.
        let (before, after) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = after.split(' ').collect();
        let ticks = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
        before.ends_with(&format!("({name}")).then_some(ticks)
    };
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let ticks: u64 = threads.filter_map(|thread| ticks(thread.path())).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Samples a process until it is dropped.
pub struct Monitor {
    shared: Arc<Shared>,
    sampler: Option<JoinHandle<()>>,
}

struct Shared {
    process: u32,
    temporary: Vec<PathBuf>,
    stop: AtomicBool,
    peak_temporary_bytes: AtomicU64,
    /// Resident and temporary bytes for which the node was killed.
    excess: parking_lot::Mutex<Option<(u64, u64)>>,
}

impl Monitor {
    /// Starts to sample a node with this data directory and this TMPDIR.
    pub fn start(process: u32, data: &Path, tmpdir: &Path) -> Monitor {
        let shared = Arc::new(Shared {
            process,
            temporary: vec![data.join("tmp"), tmpdir.to_owned()],
            stop: AtomicBool::new(false),
            peak_temporary_bytes: AtomicU64::new(0),
            excess: parking_lot::Mutex::new(None),
        });
        let sampled = shared.clone();
        let sampler = std::thread::spawn(move || {
            while !sampled.stop.load(Ordering::Relaxed) {
                sampled.sample();
                std::thread::sleep(SAMPLE_INTERVAL);
            }
        });
        Monitor { shared, sampler: Some(sampler) }
    }

    /// Resets the peaks.
    pub fn reset(&self) {
        self.shared.peak_temporary_bytes.store(0, Ordering::Relaxed);
        // Resets VmHWM (`man 5 proc`). Without the privilege, VmHWM remains the peak since the
        // node's start.
        let _ = std::fs::write(format!("/proc/{}/clear_refs", self.shared.process), "5");
    }

    /// Returns VmHWM, or `None` if the process has exited.
    pub fn peak_resident_bytes(&self) -> Option<u64> {
        self.shared.status_bytes("VmHWM:")
    }

    pub fn peak_temporary_bytes(&self) -> u64 {
        self.shared.peak_temporary_bytes.load(Ordering::Relaxed)
    }

    /// Returns the reason if the monitor has killed the node.
    pub fn excess(&self) -> Option<String> {
        let (resident, temporary) = (*self.shared.excess.lock())?;
        Some(format!(
            "killed by the test with {} MiB of memory and {} MiB of temporary files",
            resident >> 20,
            temporary >> 20
        ))
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.sampler.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn sample(&self) {
        let resident = self.status_bytes("VmRSS:").unwrap_or(0);
        let temporary = self.temporary_bytes();
        self.peak_temporary_bytes.fetch_max(temporary, Ordering::Relaxed);
        if resident > KILL_RESIDENT_BYTES || temporary > KILL_TEMPORARY_BYTES {
            self.excess.lock().get_or_insert((resident, temporary));
            if let Some(process) = Pid::from_raw(self.process as i32) {
                // Fails if the process has exited.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }

    /// Reads a value in kB from /proc/PID/status, and returns bytes.
    fn status_bytes(&self, name: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
    }

    fn temporary_bytes(&self) -> u64 {
        let named = self.temporary.iter().map(|directory| bytes_below(directory)).sum::<u64>();
        let Ok(open) = std::fs::read_dir(format!("/proc/{}/fd", self.process)) else { return named };
        let unnamed = open.filter_map(|entry| {
            let path = entry.ok()?.path();
            let target = std::fs::read_link(&path).ok()?;
            let is_temporary = target.to_str()?.ends_with(" (deleted)")
                && self.temporary.iter().any(|directory| target.starts_with(directory));
            is_temporary.then(|| Some(allocated(&std::fs::metadata(&path).ok()?)))?
        });
        named + unnamed.sum::<u64>()
    }
}

fn bytes_below(directory: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let sizes = entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let metadata = entry.metadata().ok()?;
        Some(if metadata.is_dir() { bytes_below(&entry.path()) } else { allocated(&metadata) })
    });
    sizes.sum()
}

fn allocated(metadata: &Metadata) -> u64 {
    metadata.blocks() * 512
}

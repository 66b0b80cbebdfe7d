//! What the node's process takes from the machine: resident memory, and bytes of temporary files.
//!
//! Temporary files are those below `tmp` of the data directory and below TMPDIR, and files of these directories that have no name
//! (any more) but are open. Their allocated blocks count, not their lengths.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Above these the node is killed: an attack that succeeds must not take the test machine with it.
const KILLED_ABOVE_RESIDENT_BYTES: u64 = 1536 << 20;
const KILLED_ABOVE_TEMPORARY_BYTES: u64 = 1536 << 20;

const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);

/// Samples a process until it is dropped.
pub struct Monitor {
    shared: Arc<Shared>,
    sampler: Option<JoinHandle<()>>,
}

struct Shared {
    process: u32,
    temporary: Vec<PathBuf>,
    stop: AtomicBool,
    most_temporary_bytes: AtomicU64,
    /// The node was killed for it: resident and temporary bytes.
    excess: parking_lot::Mutex<Option<(u64, u64)>>,
}

impl Monitor {
    /// Watches a node on this data directory whose TMPDIR is this one.
    pub fn start(process: u32, data: &Path, tmpdir: &Path) -> Monitor {
        let shared = Arc::new(Shared {
            process,
            temporary: vec![data.join("tmp"), tmpdir.to_owned()],
            stop: AtomicBool::new(false),
            most_temporary_bytes: AtomicU64::new(0),
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

    /// Forgets the peaks.
    pub fn reset(&self) {
        self.shared.most_temporary_bytes.store(0, Ordering::Relaxed);
        // Resets VmHWM (`man 5 proc`). Without the right to do so it stays the peak since the node's start.
        let _ = std::fs::write(format!("/proc/{}/clear_refs", self.shared.process), "5");
    }

    /// VmHWM; `None` if the process has ended.
    pub fn peak_resident_bytes(&self) -> Option<u64> {
        self.shared.status_bytes("VmHWM:")
    }

    pub fn peak_temporary_bytes(&self) -> u64 {
        self.shared.most_temporary_bytes.load(Ordering::Relaxed)
    }

    /// Why the node was killed by the monitor, if it was.
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
        self.most_temporary_bytes.fetch_max(temporary, Ordering::Relaxed);
        if resident > KILLED_ABOVE_RESIDENT_BYTES || temporary > KILLED_ABOVE_TEMPORARY_BYTES {
            self.excess.lock().get_or_insert((resident, temporary));
            if let Some(process) = Pid::from_raw(self.process as i32) {
                // It may have ended.
                let _ = kill_process(process, Signal::KILL);
            }
        }
    }

    /// A line of /proc/PID/status, which is in kB.
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

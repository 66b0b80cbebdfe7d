//! The nodes that the controller of a cluster adds with the provisioner `processes`.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long killed processes may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The directory of the nodes that are added. Dropping it kills those that are left, by their ids.
pub struct AddedNodes(TempDir);

impl AddedNodes {
    /// Creates the directory.
    pub fn new() -> anyhow::Result<AddedNodes> {
        let directory = tempfile::Builder::new().prefix("fulmar-added-").tempdir();
        Ok(AddedNodes(directory.context("could not create a temporary directory")?))
    }

    /// The arguments of the nodes that add others.
    pub fn arguments(&self) -> [String; 2] {
        // Clusters of other processes use other ports.
        let first = 20_000 + std::process::id() % 100 * 100;
        let provisioner = format!("processes:{}:{first}-{}", self.0.path().display(), first + 99);
        ["--provisioner".to_owned(), provisioner]
    }

    /// The processes whose command line names a file below the directory.
    pub fn pids(&self) -> anyhow::Result<Vec<i32>> {
        let directory = format!("{}/", self.0.path().canonicalize()?.display());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // The process may have ended.
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut arguments = line.split(|byte| *byte == 0);
            if arguments.any(|argument| argument.starts_with(directory.as_bytes())) {
                found.push(pid);
            }
        }
        Ok(found)
    }
}

impl Drop for AddedNodes {
    fn drop(&mut self) {
        let begun = Instant::now();
        loop {
            let left = self.pids().unwrap_or_default();
            if left.is_empty() || begun.elapsed() > END_TIMEOUT {
                break;
            }
            for pid in left.into_iter().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

//! Control groups that bound the memory of a server, including the kernel's page cache of its
//! files, or its CPU time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;

use super::Server;

/// The period in which a group may use its CPU time. With a long one, a server that has used its time
/// would stand still for long.
const PERIOD_US: u64 = 10_000;

/// A control group, of cgroup version 2 or 1, below that of this process. Dropping it removes it, so
/// its processes must have ended before.
pub struct ControlGroup {
    path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl ControlGroup {
    /// Creates a group in which all processes together may use `bytes` of memory.
    pub fn with_memory(name: &str, bytes: u64) -> anyhow::Result<ControlGroup> {
        let (group, version) = ControlGroup::new(name, "memory")?;
        match version {
            Version::One => group.set("memory.limit_in_bytes", &bytes.to_string())?,
            Version::Two => group.set("memory.max", &bytes.to_string())?,
        }
        Ok(group)
    }

    /// Creates a group in which all processes together may use `cpus` CPUs, in every 10 ms.
    pub fn with_cpus(name: &str, cpus: f64) -> anyhow::Result<ControlGroup> {
        let (group, version) = ControlGroup::new(name, "cpu")?;
        let quota_us = (PERIOD_US as f64 * cpus).round() as u64;
        match version {
            Version::One => {
                group.set("cpu.cfs_period_us", &PERIOD_US.to_string())?;
                group.set("cpu.cfs_quota_us", &quota_us.to_string())?;
            }
            Version::Two => group.set("cpu.max", &format!("{quota_us} {PERIOD_US}"))?,
        }
        Ok(group)
    }

    fn new(name: &str, controller: &str) -> anyhow::Result<(ControlGroup, Version)> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let own = fs::read_to_string("/proc/self/cgroup");
        let own = own.context("control groups are not available")?;
        let parent = own_group(&own, controller);
        let (parent, version) =
            parent.with_context(|| format!("the {controller} controller is not available"))?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("fulmar-bench-{}-{number}-{name}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("could not create {}", path.display()))?;
        Ok((ControlGroup { path }, version))
    }

    fn set(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.path.join(file);
        fs::write(&path, value).with_context(|| format!("could not write {value} to {}", path.display()))
    }

    /// Moves a server that has just started into the group. Processes that it starts later are
    /// created in the group.
    pub fn add_server(&self, server: &Server) -> anyhow::Result<()> {
        // Twice, because the server may have started a process between the listing and the move.
        for _ in 0..2 {
            for pid in server.processes()?.pids()? {
                // The process may have ended.
                let _ = self.add_process(pid);
            }
        }
        let members = fs::read_to_string(self.path.join("cgroup.procs"))?;
        anyhow::ensure!(!members.is_empty(), "could not move {} into a control group", server.name());
        Ok(())
    }

    /// Moves a process into the group.
    pub fn add_process(&self, pid: i32) -> anyhow::Result<()> {
        self.set("cgroup.procs", &pid.to_string())
    }
}

/// The directory of this process's group, below which a group with a controller can be created.
fn own_group(own: &str, controller: &str) -> Option<(PathBuf, Version)> {
    let below = |root: &Path, path: &str| root.join(path.trim_start_matches('/'));
    let root = Path::new("/sys/fs/cgroup");
    // The line is "4:memory:/a/b" for version 1 and "0::/a/b" for version 2.
    let of = |controller: &str| {
        own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controller)?.strip_prefix(':'))
    };
    match (of(controller), of("")) {
        (Some(path), _) => Some((below(&root.join(controller), path), Version::One)),
        (None, Some(path)) => Some((below(root, path), Version::Two)),
        (None, None) => None,
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_group_of_both_versions() {
        let first = own_group("5:devices:/\n4:memory:/a/b\n0::/\n", "memory").unwrap();
        assert_eq!(first, (PathBuf::from("/sys/fs/cgroup/memory/a/b"), Version::One));
        let second = own_group("0::/user.slice/x\n", "cpu").unwrap();
        assert_eq!(second, (PathBuf::from("/sys/fs/cgroup/user.slice/x"), Version::Two));
        assert_eq!(own_group("", "cpu"), None);
    }
}

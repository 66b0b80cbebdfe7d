//! A control group that bounds the memory of a server, including the kernel's page cache of its
//! files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::Server;

/// A control group below that of this process. Dropping it removes it, so its processes must have
/// ended before.
pub struct MemoryGroup {
    path: PathBuf,
}

impl MemoryGroup {
    /// Creates a group, of cgroup version 2 or 1, in which all processes together may use `bytes`
    /// of memory.
    pub fn new(name: &str, bytes: u64) -> anyhow::Result<MemoryGroup> {
        let own = fs::read_to_string("/proc/self/cgroup");
        let own = own.context("control groups are not available")?;
        let (parent, file) = memory_limit(&own).context("the memory controller is not available")?;
        let group = MemoryGroup { path: parent.join(format!("fulmar-bench-{}-{name}", std::process::id())) };
        fs::create_dir(&group.path).with_context(|| format!("could not create {}", group.path.display()))?;
        fs::write(group.path.join(file), bytes.to_string())
            .context("could not set the memory limit of a control group")?;
        Ok(group)
    }

    /// Moves a server that has just started into the group. Processes that it starts later are
    /// created in the group.
    pub fn add_server(&self, server: &Server) -> anyhow::Result<()> {
        // Twice, because the server may have started a process between the listing and the move.
        for _ in 0..2 {
            for pid in server.processes()?.pids()? {
                // The process may have ended.
                let _ = fs::write(self.path.join("cgroup.procs"), pid.to_string());
            }
        }
        let members = fs::read_to_string(self.path.join("cgroup.procs"))?;
        anyhow::ensure!(!members.is_empty(), "could not move {} into a control group", server.name());
        Ok(())
    }
}

/// The directory of this process's group, and the name of the file with the memory limit of a group
/// below it.
fn memory_limit(own: &str) -> Option<(PathBuf, &'static str)> {
    let below = |root: &str, path: &str| Path::new(root).join(path.trim_start_matches('/'));
    // The line is "4:memory:/a/b" for version 1 and "0::/a/b" for version 2.
    let of = |controller: &str| {
        own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controller)?.strip_prefix(':'))
    };
    match (of("memory"), of("")) {
        (Some(path), _) => Some((below("/sys/fs/cgroup/memory", path), "memory.limit_in_bytes")),
        (None, Some(path)) => Some((below("/sys/fs/cgroup", path), "memory.max")),
        (None, None) => None,
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_group_of_both_versions() {
        let first = memory_limit("5:devices:/\n4:memory:/a/b\n0::/\n").unwrap();
        assert_eq!(first, (PathBuf::from("/sys/fs/cgroup/memory/a/b"), "memory.limit_in_bytes"));
        let second = memory_limit("0::/user.slice/x\n").unwrap();
        assert_eq!(second, (PathBuf::from("/sys/fs/cgroup/user.slice/x"), "memory.max"));
        assert_eq!(memory_limit(""), None);
    }
}

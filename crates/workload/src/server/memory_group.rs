//! A control group that bounds what a server, and the kernel's page cache of its files, may take of memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::Server;

/// A group below the bench's own. Removed when it is dropped; its processes have ended by then.
pub struct MemoryGroup {
    path: PathBuf,
}

impl MemoryGroup {
    /// Makes a group, version 2 or 1, in which all processes together take so many bytes.
    pub fn new(name: &str, bytes: u64) -> anyhow::Result<MemoryGroup> {
        let own = fs::read_to_string("/proc/self/cgroup").context("no control groups")?;
        let (parent, file) = place(&own).context("control groups do not bound memory here")?;
        let group = MemoryGroup { path: parent.join(format!("fulmar-bench-{}-{name}", std::process::id())) };
        fs::create_dir(&group.path).with_context(|| format!("cannot make {}", group.path.display()))?;
        fs::write(group.path.join(file), bytes.to_string())
            .context("cannot bound a control group's memory")?;
        Ok(group)
    }

    /// Moves a server that has just started into the group; what it starts from then on is born there.
    pub fn hold(&self, server: &Server) -> anyhow::Result<()> {
        // Twice: it may have started one between the look and the move.
        for _ in 0..2 {
            for pid in server.processes()?.pids()? {
                // A process may be gone by now.
                let _ = fs::write(self.path.join("cgroup.procs"), pid.to_string());
            }
        }
        let held = fs::read_to_string(self.path.join("cgroup.procs"))?;
        anyhow::ensure!(!held.is_empty(), "{} cannot be moved into a control group", server.name());
        Ok(())
    }
}

/// The directory of this process's group, and the file that bounds the memory of one below it.
fn place(own: &str) -> Option<(PathBuf, &'static str)> {
    let below = |root: &str, path: &str| Path::new(root).join(path.trim_start_matches('/'));
    // "4:memory:/a/b" for version 1, "0::/a/b" for version 2.
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
    fn finds_its_own_group() {
        let first = place("5:devices:/\n4:memory:/a/b\n0::/\n").unwrap();
        assert_eq!(first, (PathBuf::from("/sys/fs/cgroup/memory/a/b"), "memory.limit_in_bytes"));
        let second = place("0::/user.slice/x\n").unwrap();
        assert_eq!(second, (PathBuf::from("/sys/fs/cgroup/user.slice/x"), "memory.max"));
        assert_eq!(place(""), None);
    }
}

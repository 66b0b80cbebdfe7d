//! The memory budget of a node: `--memory`, or half of the available memory.

use std::path::Path;

use anyhow::{Context, ensure};

use crate::size::Bytes;

/// With a smaller budget, even a few connections would be rejected.
const MIN_BUDGET: Bytes = Bytes(16 << 20);

/// Returns the requested budget, or half of the memory of this machine or container.
pub fn budget(requested: Option<Bytes>) -> anyhow::Result<Bytes> {
    let budget = match requested {
        Some(requested) => requested,
        None => Bytes(available(Path::new("/"))? / 2),
    };
    ensure!(budget >= MIN_BUDGET, "--memory {budget} is too small; use at least {MIN_BUDGET}");
    Ok(budget)
}

/// Returns the minimum of the machine's memory and the limits of control groups, version 1 and 2.
fn available(root: &Path) -> anyhow::Result<u64> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo"))
        .ok()
        .and_then(|text| total(&text))
        .context("cannot read the memory size of this machine from /proc/meminfo; set --memory")?;
    let limits = ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = limits.iter().filter_map(|file| std::fs::read_to_string(root.join(file)).ok());
    // Without a limit, version 2 has "max", which does not parse, and version 1 a huge number.
    Ok(limits.filter_map(|limit| limit.trim().parse().ok()).fold(meminfo, u64::min))
}

/// Parses `MemTotal:       24576000 kB` and returns bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_the_smallest_limit() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert!(available(root.path()).is_err());
        write("proc/meminfo", "MemTotal:       2048 kB\nMemFree:  1 kB\n");
        assert_eq!(available(root.path()).unwrap(), 2 << 20);
        write("sys/fs/cgroup/memory.max", "max\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(available(root.path()).unwrap(), 2 << 20);
        write("sys/fs/cgroup/memory.max", "1048576\n");
        assert_eq!(available(root.path()).unwrap(), 1 << 20);
    }

    #[test]
    fn budget_below_the_minimum_is_rejected() {
        assert!(budget(Some(Bytes(1 << 20))).unwrap_err().to_string().contains("16.0 MiB"));
        assert_eq!(budget(Some(MIN_BUDGET)).unwrap(), MIN_BUDGET);
        assert!(budget(None).unwrap() >= MIN_BUDGET);
    }
}

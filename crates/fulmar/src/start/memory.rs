//! How much memory a node may use for data.

use std::path::Path;

use anyhow::{Context, ensure};

use crate::size::Bytes;

/// With less, a handful of connections would already be refused.
const LEAST: Bytes = Bytes(16 << 20);

/// What was asked for, or half of what this machine (or this container) has.
pub fn budget(asked: Option<Bytes>) -> anyhow::Result<Bytes> {
    let budget = match asked {
        Some(asked) => asked,
        None => Bytes(available(Path::new("/"))? / 2),
    };
    ensure!(budget >= LEAST, "--memory {budget} is too little; give at least {LEAST}");
    Ok(budget)
}

/// The smallest of the machine's memory and the limits of control groups, version 1 and 2.
fn available(root: &Path) -> anyhow::Result<u64> {
    let meminfo = std::fs::read_to_string(root.join("proc/meminfo"))
        .ok()
        .and_then(|text| total(&text))
        .context("cannot read the size of this machine's memory from /proc/meminfo; say it with --memory")?;
    let limits = ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limits = limits.iter().filter_map(|file| std::fs::read_to_string(root.join(file)).ok());
    // "max", and the huge number that version 1 says instead, are no limits.
    Ok(limits.filter_map(|limit| limit.trim().parse().ok()).fold(meminfo, u64::min))
}

/// `MemTotal:       24576000 kB`, in bytes.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_counts() {
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
    fn too_little_is_refused() {
        assert!(budget(Some(Bytes(1 << 20))).unwrap_err().to_string().contains("16.0 MiB"));
        assert_eq!(budget(Some(LEAST)).unwrap(), LEAST);
        assert!(budget(None).unwrap() >= LEAST);
    }
}

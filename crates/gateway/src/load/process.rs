//! The resources of this process: its CPUs, CPU time and disk I/O.

use std::path::Path;
use std::time::Duration;

/// Totals since the start of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ProcessTotals {
    pub(super) cpu: Duration,
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
}

impl ProcessTotals {
    /// The current values. Bytes are 0 if the kernel does not provide them.
    pub(super) fn read() -> ProcessTotals {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
        ProcessTotals {
            cpu: Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
            read_bytes: field(&io, "read_bytes: "),
            written_bytes: field(&io, "write_bytes: "),
        }
    }
}

fn field(text: &str, name: &str) -> u64 {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0)
}

/// The CPUs that this process can use: those of its affinity mask, or fewer if a control group
/// (version 1 or 2) or one of its parents has a quota.
pub(super) fn available_cpus() -> f64 {
    available_cpus_below(Path::new("/"))
}

fn available_cpus_below(root: &Path) -> f64 {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let allowed = read("proc/self/status").and_then(|status| allowed_cpus(&status));
    let mut cpus =
        allowed.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from) as f64);
    for line in read("proc/self/cgroup").unwrap_or_default().lines() {
        // ID:CONTROLLERS:PATH; version 2 has no controllers.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let mount = match controllers {
            "" => "sys/fs/cgroup",
            controllers if controllers.split(',').any(|controller| controller == "cpu") => {
                "sys/fs/cgroup/cpu"
            }
            _ => continue,
        };
        // In a container the path may not exist below the mount point, but the root does.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let group = Path::new(mount).join(group);
            let read = |file: &str| read(group.join(file).to_str()?);
            let quota = match controllers {
                "" => read("cpu.max").and_then(|limit| {
                    let (quota, period) = limit.trim().split_once(' ')?;
                    Some((quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?))
                }),
                _ => read("cpu.cfs_quota_us").zip(read("cpu.cfs_period_us")).and_then(|(quota, period)| {
                    Some((quota.trim().parse::<f64>().ok()?, period.trim().parse::<f64>().ok()?))
                }),
            };
            // Version 1 has -1 without a quota, version 2 "max", which does not parse.
            if let Some((quota, period)) = quota.filter(|(quota, period)| *quota > 0.0 && *period > 0.0) {
                cpus = cpus.min(quota / period);
            }
        }
    }
    cpus
}

/// The number of CPUs in the affinity mask: `Cpus_allowed_list: 0-3,8`.
fn allowed_cpus(status: &str) -> Option<f64> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim();
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((last.parse::<u32>().ok()?.checked_sub(first.parse().ok()?)? + 1) as f64)
    };
    list.split(',').map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_grows_while_the_process_computes() {
        let before = ProcessTotals::read();
        while ProcessTotals::read().cpu <= before.cpu {}
        assert_eq!(field("rchar: 1\nread_bytes: 4096\n", "read_bytes: "), 4096);
        assert_eq!(field("rchar: 1", "read_bytes: "), 0);
    }

    #[test]
    fn available_cpus_are_the_lowest_limit() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let cpus = || available_cpus_below(root.path());
        write("proc/self/status", "Name: x\nCpus_allowed_list:\t0-3,8\n");
        assert_eq!(cpus(), 5.0);
        // Version 2.
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        assert_eq!(cpus(), 5.0);
        write("sys/fs/cgroup/a/cpu.max", "250000 100000\n");
        assert_eq!(cpus(), 2.5);
        // Version 1.
        write("proc/self/cgroup", "3:memory:/\n2:cpu,cpuacct:/c\n");
        write("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
        write("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
        assert_eq!(cpus(), 5.0);
        write("sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "3333\n");
        write("sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "10000\n");
        assert_eq!(cpus(), 0.3333);
    }

    #[test]
    fn this_process_can_use_a_cpu() {
        let cpus = available_cpus();
        assert!(cpus > 0.0 && cpus <= 4096.0, "{cpus}");
    }
}

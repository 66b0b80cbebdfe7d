//! CPU statistics of the kernel: idle time of the machine, and run time and run-queue time of this
//! thread.
//!
//! They are read from two small files in `/proc`, which each thread keeps open. A worker reads them
//! once per measuring window, so the cost per statement is negligible.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Seconds since boot, and idle seconds summed over all CPUs.
const UPTIME_FILE: &str = "/proc/uptime";
/// Nanoseconds on a CPU, nanoseconds in the run queue, and number of time slices.
const SCHEDSTAT_FILE: &str = "/proc/thread-self/schedstat";

thread_local! {
    static SOURCES: Option<(File, File)> = File::open(UPTIME_FILE).ok().zip(File::open(SCHEDSTAT_FILE).ok());
}

/// Counters. Only their differences are meaningful.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CpuTimes {
    /// Idle time, summed over all CPUs of the machine.
    pub(crate) idle: Duration,
    /// Time that this thread ran.
    pub(crate) used: Duration,
    /// Time that this thread was runnable and did not run.
    pub(crate) waited: Duration,
}

/// The current counters. `None` if the kernel does not provide them.
pub(crate) fn read() -> Option<CpuTimes> {
    SOURCES.with(|sources| {
        let (machine, thread) = sources.as_ref()?;
        let [_, idle] = numbers(machine)?;
        let [used_ns, waited_ns, timeslices]: [f64; 3] = numbers(thread)?;
        // A kernel without scheduler statistics reports zeros.
        if timeslices == 0.0 {
            return None;
        }
        Some(CpuTimes {
            idle: Duration::try_from_secs_f64(idle).ok()?,
            used: Duration::from_nanos(used_ns as u64),
            waited: Duration::from_nanos(waited_ns as u64),
        })
    })
}

/// The first numbers of a file.
fn numbers<const N: usize>(file: &File) -> Option<[f64; N]> {
    let mut line = [0; 128];
    let length = file.read_at(&mut line, 0).ok()?;
    let mut words = std::str::from_utf8(&line[..length]).ok()?.split_ascii_whitespace();
    let mut numbers = [0.0; N];
    for number in &mut numbers {
        *number = words.next()?.parse().ok()?;
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_time_grows_while_a_thread_computes() {
        let before = read().unwrap();
        let after = loop {
            let now = read().unwrap();
            if now.used > before.used {
                break now;
            }
        };
        assert!(after.waited >= before.waited && after.idle > Duration::ZERO, "{before:?} {after:?}");
    }
}

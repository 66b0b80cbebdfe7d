//! What the kernel says of the processors: how long some were idle, how long this thread was on one, and has waited for one.
//!
//! Two small files of `/proc`, kept open by each thread that asks. Asked once in a worker's window, which is too seldom to be
//! seen in what a statement costs.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Seconds since the machine has started, and seconds in which its processors were idle, all together.
const MACHINE: &str = "/proc/uptime";
/// Nanoseconds on a processor, nanoseconds in line for one, and how often it has come to one.
const THREAD: &str = "/proc/thread-self/schedstat";

thread_local! {
    static SOURCES: Option<(File, File)> = File::open(MACHINE).ok().zip(File::open(THREAD).ok());
}

/// Since a time in the past; only differences mean something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Processors {
    /// For how long those of the machine were idle, all together.
    pub(crate) idle: Duration,
    /// For how long this thread was on one.
    pub(crate) used: Duration,
    /// For how long this thread was ready to run while others ran.
    pub(crate) waited: Duration,
}

/// As of now. `None` where the kernel does not tell.
pub(crate) fn look() -> Option<Processors> {
    SOURCES.with(|sources| {
        let (machine, thread) = sources.as_ref()?;
        let [_, idle] = numbers(machine)?;
        let [used_ns, waited_ns, times]: [f64; 3] = numbers(thread)?;
        // A kernel that does not count has nothing but zeros.
        if times == 0.0 {
            return None;
        }
        Some(Processors {
            idle: Duration::try_from_secs_f64(idle).ok()?,
            used: Duration::from_nanos(used_ns as u64),
            waited: Duration::from_nanos(waited_ns as u64),
        })
    })
}

/// The numbers that a file begins with.
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
    fn used_time_grows_while_a_thread_computes() {
        let before = look().unwrap();
        let after = loop {
            let now = look().unwrap();
            if now.used > before.used {
                break now;
            }
        };
        assert!(after.waited >= before.waited && after.idle > Duration::ZERO, "{before:?} {after:?}");
    }
}

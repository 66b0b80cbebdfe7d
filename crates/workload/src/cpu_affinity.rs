//! Assigns separate CPUs to a server and to the drivers that load it.
//!
//! Used by cases that measure the effect of tenants on each other: without it, server and drivers
//! on the same machine would delay each other, because a thread that wakes up may wait some
//! milliseconds for the end of another thread's time slice.

use anyhow::Context;
use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// One half of the CPUs that this process may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CpuHalf {
    /// The CPUs with the lower numbers.
    Server,
    /// The other CPUs.
    Drivers,
}

/// Restricts the calling thread, and the threads and processes that it starts, to one half. On a
/// single CPU both halves are the same.
pub(crate) fn restrict_to(half: CpuHalf) -> anyhow::Result<()> {
    // The affinity of the process is that of its main thread, which is never restricted.
    let all = sched_getaffinity(Some(getpid())).context("could not get CPU affinity")?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    if usable.len() < 2 {
        return Ok(());
    }
    let (server, drivers) = usable.split_at(usable.len() / 2);
    let mut set = CpuSet::new();
    for cpu in if half == CpuHalf::Server { server } else { drivers } {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set).context("could not set CPU affinity")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus_of(half: CpuHalf) -> Vec<usize> {
        let own = move || {
            restrict_to(half).unwrap();
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
        };
        std::thread::spawn(own).join().unwrap()
    }

    #[test]
    fn halves_are_disjoint_and_cover_all_cpus() {
        let (server, drivers) = (cpus_of(CpuHalf::Server), cpus_of(CpuHalf::Drivers));
        let usable = std::thread::available_parallelism().unwrap().get();
        match usable {
            1 => assert_eq!(server, drivers),
            _ => assert_eq!(server.len() + drivers.len(), usable),
        }
        assert!(usable == 1 || server.iter().all(|cpu| !drivers.contains(cpu)));
    }
}

//! Processors of their own for a server and for the drivers that ask it, where it is to be seen what tenants do to each other, and not
//! what drivers do to the server on the same machine, and it to them: a thread that wakes up may wait for the end of another one's time
//! slice, some milliseconds.

use anyhow::Context;
use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A half of the processors that this process may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Half {
    /// The lower ones.
    Server,
    /// The others.
    Drivers,
}

/// From now on the calling thread, and what it starts, keep to a half. Where there is one processor only they share it.
pub(crate) fn keep_to(half: Half) -> anyhow::Result<()> {
    // The main thread keeps to none.
    let all = sched_getaffinity(Some(getpid())).context("cannot ask for the processors")?;
    let usable: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|processor| all.is_set(*processor)).collect();
    if usable.len() < 2 {
        return Ok(());
    }
    let (server, drivers) = usable.split_at(usable.len() / 2);
    let mut kept = CpuSet::new();
    for processor in if half == Half::Server { server } else { drivers } {
        kept.set(*processor);
    }
    sched_setaffinity(None, &kept).context("cannot choose processors")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(half: Half) -> Vec<usize> {
        let own = move || {
            keep_to(half).unwrap();
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect()
        };
        std::thread::spawn(own).join().unwrap()
    }

    #[test]
    fn the_halves_are_all_and_share_nothing() {
        let (server, drivers) = (kept(Half::Server), kept(Half::Drivers));
        let usable = std::thread::available_parallelism().unwrap().get();
        match usable {
            1 => assert_eq!(server, drivers),
            _ => assert_eq!(server.len() + drivers.len(), usable),
        }
        assert!(usable == 1 || server.iter().all(|processor| !drivers.contains(processor)));
    }
}

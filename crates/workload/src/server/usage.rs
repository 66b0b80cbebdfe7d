//! Measures the resource usage of a server's process tree from `/proc`.
//!
//! PostgreSQL is a tree of mostly short-lived processes, and Fulmar is one process. Both are
//! measured in the same way:
//!
//! - **CPU**: user and system time of the root, of the children that it has waited for, and of all
//!   living descendants. `/proc/PID/stat` counts in ticks of 10 ms, which is too coarse for the sum
//!   of 500 backends with little work each. If the scheduler's nanoseconds
//!   (`/proc/PID/task/*/schedstat`) are larger, they are used instead. They exclude threads that
//!   have ended, which `stat` includes. Both are lower bounds, so the larger value is closer.
//! - **Memory**: PSS. A page that n processes share counts 1/n for each, so shared buffers count
//!   once.
//! - **Disk**: bytes that the living processes read from and wrote to disks (`/proc/PID/io`).
//! - **Network**: all interfaces of the machine, including loopback (`/proc/net/dev`), because the
//!   kernel does not count by process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::time::Duration;

use rustix::process::Pid;

/// All processes of a server.
#[derive(Clone, Copy, Debug)]
pub struct ProcessTree {
    root: Pid,
}

/// The used fields of `/proc/PID/stat`. Times are in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stat {
    /// A zombie or a dying process.
    ended: bool,
    parent: i32,
    own_ticks: u64,
    children_ticks: u64,
}

impl ProcessTree {
    /// The tree with this process as its root.
    pub fn of(root: Pid) -> ProcessTree {
        ProcessTree { root }
    }

    /// The root process.
    pub fn root(&self) -> Pid {
        self.root
    }

    /// The root and its living descendants.
    pub fn pids(&self) -> io::Result<BTreeSet<i32>> {
        let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // The process may have ended since the listing.
            if let Ok(stat) = stat(pid) {
                children.entry(stat.parent).or_default().push(pid);
            }
        }
        let mut tree = BTreeSet::new();
        let mut open = vec![self.root.as_raw_nonzero().get()];
        while let Some(pid) = open.pop() {
            if tree.insert(pid) {
                open.extend(children.remove(&pid).unwrap_or_default());
            }
        }
        Ok(tree)
    }

    /// CPU time that the tree has used since its start. For a period, subtract two values.
    pub fn cpu(&self) -> io::Result<Duration> {
        let root = self.root.as_raw_nonzero().get();
        let mut total = Duration::ZERO;
        for pid in self.pids()? {
            match stat(pid) {
                Ok(stat) => total += ticks(stat.own_ticks).max(scheduled(pid)) + ticks(stat.children_ticks),
                Err(error) if pid == root => return Err(error),
                Err(_) => {}
            }
        }
        Ok(total)
    }

    /// Proportional set size of the tree, in bytes.
    pub fn pss_bytes(&self) -> io::Result<u64> {
        let root = self.root.as_raw_nonzero().get();
        let mut total = 0;
        for pid in self.pids()? {
            match fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) {
                Ok(text) => total += parse_pss(&text).unwrap_or(0),
                Err(error) if pid == root => return Err(error),
                Err(_) => {}
            }
        }
        Ok(total)
    }
}

/// The resource usage of servers since their start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system CPU time.
    pub cpu: Duration,
    /// Current memory (PSS).
    pub pss_bytes: u64,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to disks, including those not yet written back.
    pub written_bytes: u64,
    /// Bytes received by all network interfaces of the machine.
    pub received_bytes: u64,
    /// Bytes sent by all network interfaces.
    pub sent_bytes: u64,
}

impl Usage {
    /// The total usage of all these process trees.
    pub fn of(trees: &[ProcessTree]) -> io::Result<Usage> {
        let mut usage = Usage::default();
        for tree in trees {
            usage.cpu += tree.cpu()?;
            usage.pss_bytes += tree.pss_bytes()?;
            for pid in tree.pids()? {
                // The process may have ended, or may not be readable for this user.
                let Ok(text) = fs::read_to_string(format!("/proc/{pid}/io")) else { continue };
                usage.read_bytes += parse_io(&text, "read_bytes:");
                usage.written_bytes += parse_io(&text, "write_bytes:");
            }
        }
        (usage.received_bytes, usage.sent_bytes) = parse_network(&fs::read_to_string("/proc/net/dev")?);
        Ok(usage)
    }
}

fn parse_io(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}

/// Bytes received and sent by all interfaces.
fn parse_network(text: &str) -> (u64, u64) {
    let interfaces = text.lines().filter_map(|line| line.split_once(':'));
    interfaces.fold((0, 0), |(received, sent), (_, counters)| {
        let counter = |place| counters.split_whitespace().nth(place).and_then(|text| text.parse().ok());
        (received + counter(0).unwrap_or(0), sent + counter(8).unwrap_or(0))
    })
}

/// Returns true if the process exists and has not ended.
pub(super) fn is_running(pid: i32) -> bool {
    stat(pid).is_ok_and(|stat| !stat.ended)
}

fn ticks(count: u64) -> Duration {
    Duration::from_secs_f64(count as f64 / rustix::param::clock_ticks_per_second() as f64)
}

fn stat(pid: i32) -> io::Result<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let invalid = || format!("invalid /proc/{pid}/stat");
    parse_stat(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, invalid()))
}

/// The process name in parentheses may contain any byte, so fields are counted from its last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
    Some(Stat {
        ended: ["Z", "X", "x"].contains(fields.first()?),
        parent: fields.get(1)?.parse().ok()?,
        own_ticks: number(11)? + number(12)?,
        children_ticks: number(13)? + number(14)?,
    })
}

/// CPU time of the living threads of a process, from the scheduler.
fn scheduled(pid: i32) -> Duration {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Duration::ZERO };
    let nanoseconds = threads.flatten().filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

fn parse_pss(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    #[test]
    fn process_names_do_not_shift_fields() {
        let text = "42 (a) b (c) S 7 42 42 0 -1 0 1 2 3 4 100 20 30 4 20 0 1 0";
        assert_eq!(
            parse_stat(text),
            Some(Stat { ended: false, parent: 7, own_ticks: 120, children_ticks: 34 })
        );
        assert_eq!(parse_stat("42 (a) S 7"), None);
    }

    #[test]
    fn pss_is_parsed_in_bytes() {
        assert_eq!(
            parse_pss("x [rollup]\nRss:  1760 kB\nPss:     340 kB\nPss_Dirty: 1 kB\n"),
            Some(340 * 1024)
        );
        assert_eq!(parse_pss("nothing"), None);
    }

    #[test]
    fn disk_and_network_counters_are_summed() {
        let io = "rchar: 5\nwchar: 6\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 7\n";
        assert_eq!((parse_io(io, "read_bytes:"), parse_io(io, "write_bytes:")), (4096, 8192));
        let network = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed \
            multicast|bytes packets\n    lo: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n  eth0:10 1 0 0 0 0 0 0 20 2\n";
        assert_eq!(parse_network(network), (110, 220));
    }

    /// A shell whose child is busy until it reads a line. Then the child ends, and another one
    /// sleeps.
    #[test]
    fn tree_includes_its_children() {
        let script = "(while :; do :; done) & busy=$!; read x; kill $busy; wait $busy; \
                      sleep 600 & echo done; read x; kill $!";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh runs");
        let tree = ProcessTree::of(Pid::from_child(&shell));
        let mut stdin = shell.stdin.take().expect("piped");
        let began = Instant::now();
        let used = loop {
            let used = tree.cpu().unwrap();
            if used > Duration::from_millis(300) {
                break used;
            }
            assert!(
                began.elapsed() < Duration::from_secs(120),
                "the CPU time of the busy child must be counted"
            );
        };
        io::Write::write_all(&mut stdin, b"\n").unwrap();
        let mut line = String::new();
        let mut output = io::BufReader::new(shell.stdout.take().expect("piped"));
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let (pids, cpu, pss) = (tree.pids().unwrap(), tree.cpu().unwrap(), tree.pss_bytes().unwrap());
        drop(stdin);
        shell.wait().unwrap();
        assert_eq!(pids.len(), 2, "the tree must contain the shell and its sleep");
        // The kernel samples the time of children that have ended, so it is less precise.
        assert!(cpu * 2 >= used, "time of an ended child must be counted: {cpu:?}, not {used:?}");
        assert!(pss > 10_000, "{pss}");
    }
}

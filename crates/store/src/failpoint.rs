//! Failpoints: named points at which a server can be killed, for crash tests.
//!
//! ```text
//!   FULMAR_FAILPOINTS="log-after-write=exit:3,flush-after-manifest=exit:1"
//! ```
//!
//! This kills the process with SIGKILL (no destructor runs, nothing is flushed) the third time it
//! reaches the first point, or the first time it reaches the second. `statement=abort:7` instead
//! aborts the process (SIGABRT) at a statement of partition 7. The variable is read only by
//! [`arm_from_environment`], which a server calls when it starts. While no failpoint is armed,
//! passing one costs a relaxed atomic load.
//!
//! | failpoint | state when it is reached |
//! | --- | --- |
//! | `log-mid-record` | half of a batch of records is written to the log |
//! | `log-after-write` | a batch is written but not yet synced |
//! | `flush-after-segment` | a flush's segment is stored, its manifest is not |
//! | `flush-after-manifest` | the manifest is stored too, the log is not yet truncated |
//! | `commit-after-segment` | a large commit's segment is stored, its record is not in the log |
//! | `flush-before-truncate` | the log is about to be truncated |
//! | `compact-after-segment` | a merged segment is stored, its manifest is not |
//! | `compact-after-manifest` | the manifest is stored too, the merged segments are history |
//! | `branch-after-manifest` | a branch's manifest is stored, its tenant is not yet ready |
//! | `restore-after-manifest` | a restore's manifest is stored, the catalog is not yet updated |
//! | `restore-after-catalog` | the catalog is updated, no other component has been notified |
//! | `durability-after-flush` | all commits are flushed, the partition's record has the old log |
//! | `durability-after-record` | the record has the new log, the partition is not served yet |
//! | `statement` | a statement begins to read its database |
//! | `convert-after-flush` | a single node that becomes a cluster's is flushed and its term ended |
//! | `convert-after-mark` | its data directory and store are marked, nothing is copied |
//! | `convert-mid-copy` | a batch of its catalog is copied to the cluster's metadata store |
//! | `convert-after-copy` | the cluster exists, its first node has not joined it |

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// The environment variable that [`arm_from_environment`] reads.
pub const VARIABLE: &str = "FULMAR_FAILPOINTS";

/// Half of a batch of records is written to the log.
pub const LOG_MID_RECORD: &str = "log-mid-record";
/// A batch is written to the log but not yet synced.
pub const LOG_AFTER_WRITE: &str = "log-after-write";
/// A flush's segment is stored, its manifest is not.
pub const FLUSH_AFTER_SEGMENT: &str = "flush-after-segment";
/// A flush's manifest is stored, the log is not yet truncated.
pub const FLUSH_AFTER_MANIFEST: &str = "flush-after-manifest";
/// A large commit's segment is stored, its record is not in the log.
pub const COMMIT_AFTER_SEGMENT: &str = "commit-after-segment";
/// The log is about to be truncated.
pub const FLUSH_BEFORE_TRUNCATE: &str = "flush-before-truncate";

/// A merged segment is stored, its manifest is not.
pub const COMPACT_AFTER_SEGMENT: &str = "compact-after-segment";
/// The manifest of a compaction is stored too, the merged segments are history.
pub const COMPACT_AFTER_MANIFEST: &str = "compact-after-manifest";
/// A branch's manifest is stored, its tenant is not yet ready.
pub const BRANCH_AFTER_MANIFEST: &str = "branch-after-manifest";
/// The manifest of a restore is stored, the catalog is not yet updated.
pub const RESTORE_AFTER_MANIFEST: &str = "restore-after-manifest";
/// The catalog is updated after a restore, no other component has been notified.
pub const RESTORE_AFTER_CATALOG: &str = "restore-after-catalog";

/// All commits are flushed before a change of durability, the partition's record has the old log.
pub const DURABILITY_AFTER_FLUSH: &str = "durability-after-flush";
/// The partition's record has the new log, the partition is not served yet.
pub const DURABILITY_AFTER_RECORD: &str = "durability-after-record";
/// A statement begins to read its database.
pub const STATEMENT: &str = "statement";

/// A single node that becomes a node of a cluster is flushed, and has ended its term.
pub const CONVERT_AFTER_FLUSH: &str = "convert-after-flush";
/// Its data directory and store are marked, nothing is copied.
pub const CONVERT_AFTER_MARK: &str = "convert-after-mark";
/// A batch of its catalog is copied to the metadata store of the cluster.
pub const CONVERT_MID_COPY: &str = "convert-mid-copy";
/// The cluster exists, its first node has not joined it.
pub const CONVERT_AFTER_COPY: &str = "convert-after-copy";

const NAMES: [&str; 18] = [
    LOG_MID_RECORD,
    LOG_AFTER_WRITE,
    COMMIT_AFTER_SEGMENT,
    FLUSH_AFTER_SEGMENT,
    FLUSH_AFTER_MANIFEST,
    FLUSH_BEFORE_TRUNCATE,
    COMPACT_AFTER_SEGMENT,
    COMPACT_AFTER_MANIFEST,
    BRANCH_AFTER_MANIFEST,
    RESTORE_AFTER_MANIFEST,
    RESTORE_AFTER_CATALOG,
    DURABILITY_AFTER_FLUSH,
    DURABILITY_AFTER_RECORD,
    STATEMENT,
    CONVERT_AFTER_FLUSH,
    CONVERT_AFTER_MARK,
    CONVERT_MID_COPY,
    CONVERT_AFTER_COPY,
];

static ARMED: AtomicBool = AtomicBool::new(false);
static POINTS: Mutex<Vec<Point>> = Mutex::new(Vec::new());

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Point {
    name: &'static str,
    action: Action,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    /// The process is killed after this number of passages.
    Exit(u64),
    /// The process aborts when it passes with this partition.
    Abort(u64),
}

/// An invalid failpoint specification.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{item}` is not a valid failpoint: {reason}; expected {VARIABLE}=NAME=exit:N[,...] or \
     statement=abort:N with N >= 1 and NAME one of {NAMES:?}"
)]
pub struct FailpointError {
    item: String,
    reason: &'static str,
}

/// Arms the failpoints named by the environment variable, if it is set.
pub fn arm_from_environment() -> Result<(), FailpointError> {
    match std::env::var(VARIABLE) {
        Ok(specification) => arm(&specification),
        Err(_) => Ok(()),
    }
}

/// Arms the failpoints of a specification, replacing those armed before.
pub fn arm(specification: &str) -> Result<(), FailpointError> {
    let points = parse(specification)?;
    let mut armed = POINTS.lock();
    ARMED.store(!points.is_empty(), Ordering::Relaxed);
    *armed = points;
    Ok(())
}

fn parse(specification: &str) -> Result<Vec<Point>, FailpointError> {
    let items = specification.split(',').map(str::trim).filter(|item| !item.is_empty());
    items
        .map(|item| parse_item(item).map_err(|reason| FailpointError { item: item.to_owned(), reason }))
        .collect()
}

fn parse_item(item: &str) -> Result<Point, &'static str> {
    let (name, action) = item.split_once('=').ok_or("it has no `=`")?;
    let name = *NAMES.iter().find(|known| **known == name).ok_or("unknown failpoint name")?;
    let (kind, number) = action.split_once(':').ok_or("the action is not `exit:N` or `abort:N`")?;
    let number = number.parse().ok().filter(|number| *number >= 1).ok_or("N is not a positive integer")?;
    match kind {
        "exit" if name != STATEMENT => Ok(Point { name, action: Action::Exit(number) }),
        "abort" if name == STATEMENT => Ok(Point { name, action: Action::Abort(number) }),
        _ => Err("the failpoint does not support the action"),
    }
}

/// Returns true if this failpoint is armed, for this passage or a later one.
pub fn is_armed(name: &str) -> bool {
    ARMED.load(Ordering::Relaxed) && POINTS.lock().iter().any(|point| point.name == name)
}

/// Passes a failpoint. Kills the process if the failpoint is armed and its count is used up.
pub fn hit(name: &str) {
    if ARMED.load(Ordering::Relaxed) && count_down(&mut POINTS.lock(), name) {
        kill();
    }
}

/// Passes a failpoint in a partition. Aborts the process if that is armed for it.
pub fn hit_in(name: &str, partition: u64) {
    let is_it = |point: &Point| point.name == name && point.action == Action::Abort(partition);
    if ARMED.load(Ordering::Relaxed) && POINTS.lock().iter().any(is_it) {
        std::process::abort();
    }
}

fn count_down(points: &mut [Point], name: &str) -> bool {
    let mut is_due = false;
    for point in points.iter_mut().filter(|point| point.name == name) {
        if let Action::Exit(left) = &mut point.action {
            *left = left.saturating_sub(1);
            is_due |= *left == 0;
        }
    }
    is_due
}

fn kill() -> ! {
    // SAFETY: getpid and kill take no pointers and do not access this process's memory.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    // The signal is delivered at the latest when this thread next returns from the kernel.
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_failpoint_names_and_counts() {
        let points = parse("log-after-write=exit:3, flush-after-manifest=exit:1,").unwrap();
        assert_eq!(points[0], Point { name: LOG_AFTER_WRITE, action: Action::Exit(3) });
        assert_eq!(points[1], Point { name: FLUSH_AFTER_MANIFEST, action: Action::Exit(1) });
        let aborting = parse("statement=abort:7").unwrap();
        assert_eq!(aborting, [Point { name: STATEMENT, action: Action::Abort(7) }]);
        for bad in [
            "log-after-write",
            "nowhere=exit:1",
            "log-after-write=exit:0",
            "log-after-write=panic:1",
            "log-after-write=abort:1",
            "statement=exit:1",
        ] {
            assert!(parse(bad).unwrap_err().to_string().contains(bad), "{bad}");
        }
    }

    #[test]
    fn kills_at_the_nth_passage() {
        let mut points = parse("log-after-write=exit:3").unwrap();
        assert!(!count_down(&mut points, LOG_AFTER_WRITE));
        assert!(!count_down(&mut points, LOG_MID_RECORD));
        assert!(!count_down(&mut points, LOG_AFTER_WRITE));
        assert!(count_down(&mut points, LOG_AFTER_WRITE));
    }
}

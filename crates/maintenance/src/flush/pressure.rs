//! Which records of a log must be flushed, and which ones keep it from being truncated.

use std::collections::HashSet;
use std::sync::Arc;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, Lsn};

use crate::maintenance::Maintenance;

/// All dirty partitions are flushed once the log files exceed 1/2 of their capacity.
const LOG_FILES_DIVISOR: u64 = 2;

/// Which records of a log must be flushed because the log has grown too long.
pub(super) enum Pressure {
    No,
    /// Records before this position.
    Before(Lsn),
    /// All records.
    All,
}

impl Pressure {
    pub(super) fn of(log: &CommitLog, most_bytes: u64) -> Pressure {
        let oldest = log.oldest().0;
        if log.size_bytes() > log.capacity_bytes() / LOG_FILES_DIVISOR {
            Pressure::All
        } else if let Some(position) = log.flush_before() {
            Pressure::Before(position)
        } else if log.appended().0.saturating_sub(oldest) > most_bytes {
            Pressure::Before(Lsn(oldest + most_bytes / 2))
        } else {
            Pressure::No
        }
    }

    /// Whether the pressure applies to a partition whose oldest unflushed record is at `since`.
    pub(super) fn is_on(&self, since: Lsn) -> bool {
        match self {
            Pressure::No => false,
            Pressure::Before(position) => since < *position,
            Pressure::All => true,
        }
    }
}

/// Position of the first record in a log that no manifest covers. Partitions in `except` are
/// ignored.
pub(super) fn first_uncovered(
    maintenance: &Maintenance,
    log: &Arc<CommitLog>,
    except: &HashSet<PartitionId>,
) -> Lsn {
    // Read before the partitions are examined: any later commit is at a higher position.
    let durable = log.durable();
    let unopened =
        maintenance.partitions.unopened().into_iter().map(|one| (one.id, one.log, one.replay.since()));
    let dirty = maintenance.partitions.open_partitions().into_iter();
    let dirty = dirty.filter_map(|p| p.oldest_dirty().map(|(since, _)| (p.id, p.log.clone(), since)));
    let needed = unopened.chain(dirty).filter(|(id, of, _)| Arc::ptr_eq(of, log) && !except.contains(id));
    needed.map(|(_, _, since)| since).fold(durable, Lsn::min)
}

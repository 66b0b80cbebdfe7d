//! The state of a member of a cluster, and the opening of the partitions that it owns.
//!
//! ```text
//!   assignment ---> records of its ranges, from sealed logs ---> newest manifest ---> open
//! ```
//!
//! The newest manifest is listed after the assignment was read. A previous owner stores none that is
//! newer: it has released the partition after its last manifest, or its log is sealed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use fulmar_mvcc::{
    CarriedSnapshots, Contents, Node, Partition, Partitions, Replay, log_error, moved_error, store_error,
    term_of, with_partition_context,
};
use fulmar_pages::{Durability, PartitionId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{CommitLog, HotPagesName, SealedLogs, VERSION_BITS};
use parking_lot::Mutex;

use super::arrivals::Arrivals;
use super::carried::ExpectedSnapshots;
use super::moves::Released;
use super::{Assignment, Membership};

/// Version numbers that are left out when an incarnation first opens a partition that it already
/// owned. The log holds at most 64 MiB of records that are not durable, so at most 2^21 of them.
pub(super) const INCARNATION_NUMBERS: u64 = 1 << 24;

/// The state of a member.
pub(crate) struct Member {
    pub(super) membership: Membership,
    pub(super) sealed: SealedLogs,
    /// The newest epoch in which this incarnation has opened each partition, and the first number
    /// of its versions in that epoch.
    epochs: Mutex<HashMap<PartitionId, (u32, u64)>>,
    /// Partitions that are being handed over, or have been released for that.
    pub(super) moves: Mutex<HashMap<PartitionId, Arc<Move>>>,
    /// Partitions that wait for the next flush of moving partitions.
    pub(super) to_flush: Mutex<Vec<Arc<Partition>>>,
    /// Held while they are flushed.
    pub(super) flushing: tokio::sync::Mutex<()>,
    /// Partitions that cannot be opened, and whose records were copied to this incarnation's log.
    copied: Mutex<HashSet<PartitionId>>,
    /// Partitions that are about to be moved to this node.
    pub(crate) arrivals: Arrivals,
    /// The snapshots of their transactions.
    pub(crate) snapshots: ExpectedSnapshots,
    /// Partitions whose ranges were tried to be dropped in this round.
    pub(super) skipped: Mutex<HashSet<PartitionId>>,
}

/// The handover of a partition.
#[derive(Default)]
pub(super) struct Move {
    /// The partition is not opened.
    is_refused: AtomicBool,
    /// The release, once that is durable and the partition is flushed.
    pub(super) released: tokio::sync::Mutex<Option<Released>>,
    /// The snapshots of its transactions, after the release.
    pub(super) snapshots: Mutex<CarriedSnapshots>,
}

impl Move {
    pub(super) fn accept(&self) {
        self.is_refused.store(false, Release);
    }

    pub(super) fn refuse(&self) {
        self.is_refused.store(true, Release);
    }
}

impl Member {
    pub(crate) fn new(membership: Membership, sealed: SealedLogs) -> Self {
        Member {
            membership,
            sealed,
            epochs: Mutex::default(),
            moves: Mutex::default(),
            to_flush: Mutex::default(),
            flushing: tokio::sync::Mutex::default(),
            copied: Mutex::default(),
            arrivals: Arrivals::default(),
            snapshots: ExpectedSnapshots::default(),
            skipped: Mutex::default(),
        }
    }

    /// Whether the other nodes of the cluster write to the same store.
    pub(crate) fn has_common_store(&self) -> bool {
        self.membership.has_common_store
    }

    /// Fails if the partition has been released.
    fn check_not_released(&self, id: PartitionId) -> Result<()> {
        let is_refused = self.moves.lock().get(&id).is_some_and(|moving| moving.is_refused.load(Acquire));
        if is_refused { Err(moved_error()) } else { Ok(()) }
    }

    /// The current timeline of a partition that this node owns.
    pub(crate) async fn timeline(&self, id: PartitionId) -> Result<Timeline> {
        Ok(self.membership.assignments.assignment(id).await?.timeline)
    }

    /// Opens a partition that this node owns. Also returns its list of hot pages.
    pub(crate) async fn open(
        &self,
        partitions: &Partitions,
        id: PartitionId,
    ) -> Result<(Arc<Partition>, Option<HotPagesName>)> {
        self.check_not_released(id)?;
        let assignment = self.membership.assignments.assignment(id).await?;
        let (node, timeline) = (partitions.node().clone(), assignment.timeline);
        partitions.set_timeline(id, timeline);
        let (log, replay) = match assignment.durability {
            Durability::Local => (node.log.clone(), partitions.replay(id)),
            Durability::Shared => {
                let log = shared_log(&node)?;
                let replay = self.read_ranges(&node, &log, id, &assignment).await.map(Arc::new);
                (log, Some(replay?))
            }
        };
        let (manifest, hot_pages) = node.store.latest(id, timeline.epoch, None).await.map_err(store_error)?;
        let stats = partitions.counted(id);
        let is_first = self.epoch_of(id).is_none_or(|(opened, _)| opened != assignment.epoch);
        let snapshots = self.snapshots.take(id, assignment.epoch).filter(|_| is_first);
        let contents = Contents {
            manifest: manifest.as_ref(),
            replay: replay.as_deref(),
            snapshots: snapshots.as_ref(),
        };
        let open = Partition::open(node, log, stats, id, timeline, contents);
        let opened = with_partition_context(id, open).await?;
        let newest = opened.current().number.max(manifest.map_or(0, |manifest| manifest.version.number));
        opened.start_numbers_at(self.first_number(id, assignment.epoch, newest)?);
        if let Some(arrival) = self.arrivals.take(id) {
            opened.adopt_pages(&arrival);
        }
        Ok((opened, hot_pages))
    }

    /// Whether the unapplied records of a partition are in this incarnation's shared log.
    pub(crate) fn has_copied(&self, id: PartitionId) -> bool {
        self.copied.lock().contains(&id)
    }

    /// Records that they are, or will be.
    pub(super) fn set_copied(&self, id: PartitionId) {
        self.copied.lock().insert(id);
    }

    /// Reads a partition's records from the ranges of its assignment.
    pub(super) async fn read_ranges(
        &self,
        node: &Node,
        log: &CommitLog,
        id: PartitionId,
        assignment: &Assignment,
    ) -> Result<Replay> {
        // The records are in other logs. This node's log is needed from the first commit on.
        let since = log.appended().0;
        let mut replay = Replay::default();
        for range in &assignment.ranges {
            let objects = self.sealed.objects_of(id, range.log_node, range.from, range.to).await;
            for object in objects.map_err(log_error)? {
                for record in object.records(id) {
                    node.clock.observe(record.header.timestamp);
                    replay.push_at(since, &record);
                }
            }
        }
        Ok(replay)
    }

    /// The first number of a new version after `newest`.
    fn first_number(&self, id: PartitionId, epoch: u32, newest: u64) -> Result<u64> {
        if term_of(newest) > epoch {
            return Err(Error::new(
                sqlstate::DATA_CORRUPTED,
                format!(
                    "partition {id} has versions of a later epoch than {epoch}, its epoch in the cluster"
                ),
            )
            .detail(format!("Its newest version is {newest:#x}."))
            .hint("The metadata store may have been restored from an old backup. Restore a newer one."));
        }
        let mut epochs = self.epochs.lock();
        let (first, number) = numbers(epochs.get(&id).copied(), epoch, newest);
        epochs.insert(id, (epoch, first));
        Ok(number)
    }

    /// The newest epoch in which this incarnation has opened a partition, and the first number of
    /// its versions in that epoch.
    pub(super) fn epoch_of(&self, id: PartitionId) -> Option<(u32, u64)> {
        self.epochs.lock().get(&id).copied()
    }

    /// Forgets a partition that was handed over.
    pub(super) fn forget(&self, id: PartitionId) {
        self.epochs.lock().remove(&id);
        self.copied.lock().remove(&id);
        self.moves.lock().remove(&id);
    }
}

/// The first number that an incarnation uses in an epoch, and that of its next version after `newest`.
/// `opened` is the epoch that it has opened before, and the first number then.
fn numbers(opened: Option<(u32, u64)>, epoch: u32, newest: u64) -> (u64, u64) {
    let begin = u64::from(epoch) << VERSION_BITS;
    match opened.filter(|(before, _)| *before == epoch) {
        // Also after a close without a commit, the gap stays.
        Some((_, first)) => (first, first.max(newest + 1)),
        None if newest < begin => (begin, begin),
        None => (newest + INCARNATION_NUMBERS, newest + INCARNATION_NUMBERS),
    }
}

/// The shared log, which a member always has.
pub(crate) fn shared_log(node: &Node) -> Result<Arc<CommitLog>> {
    let log = node.shared_log.get().cloned();
    log.ok_or_else(|| Error::new(sqlstate::INTERNAL, "member of a cluster has no shared log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: u64 = 2 << VERSION_BITS;

    #[test]
    fn numbers_begin_with_the_epoch() {
        assert_eq!(numbers(None, 2, BEGIN - 9), (BEGIN, BEGIN));
        assert_eq!(numbers(Some((1, 7)), 2, BEGIN - 9), (BEGIN, BEGIN), "of another epoch");
        assert_eq!(numbers(Some((2, BEGIN)), 2, BEGIN + 5), (BEGIN, BEGIN + 6), "opened again");
    }

    /// A manifest of the previous incarnation may be stored late, under the number after its newest one.
    #[test]
    fn numbers_of_an_incarnation_keep_their_distance_after_a_close_without_commits() {
        let newest = BEGIN + 5;
        let (first, number) = numbers(None, 2, newest);
        assert_eq!(number, newest + INCARNATION_NUMBERS);
        assert_eq!(numbers(Some((2, first)), 2, newest), (first, number), "closed, and opened again");
        assert_eq!(
            numbers(Some((2, first)), 2, newest + 1),
            (first, number),
            "the late manifest has arrived"
        );
        assert_eq!(numbers(Some((2, first)), 2, number), (first, number + 1), "a commit");
    }
}

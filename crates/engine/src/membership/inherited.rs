//! Covering the records of earlier incarnations and owners by manifests, so that logs can be deleted.
//!
//! 1. **Inherited records.** A restarted node still owns its partitions, unless it was failed over.
//!    Their unflushed records are in the logs of earlier incarnations. A task finds the partitions
//!    that have some, opens and flushes them, and then lets the log state that its own objects are
//!    all that is needed ([`CommitLog::settle_inherited`](fulmar_store::CommitLog::settle_inherited)).
//!    Until then a failover reads the earlier logs too. The logs are read from the first range of a
//!    partition that this node owns: earlier ones may have been deleted.
//!    A partition that cannot be opened, because a manifest is damaged for example, is not waited
//!    for: its records are copied to the end of this incarnation's log. A failover then finds the
//!    copies. Recovery applies each record once, so the originals may be read as well.
//! 2. **Ranges.** Afterwards the task stores a manifest of each partition whose record names ranges
//!    before this incarnation, and has these ranges dropped ([`Assignments::drop_ranges`]). It does
//!    so slowly, because thousands of idle partitions are opened for that.
//!
//! A manifest is stored even if nothing has changed: `fulmar_cluster::truncation` explains why. A
//! crash in between leaves ranges, and the next incarnation or owner repeats the work. A partition
//! that moves meanwhile is in another epoch, in which its ranges are not dropped.
//!
//! [`Assignments::drop_ranges`]: super::Assignments::drop_ranges

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_mvcc::{Partition, log_error};
use fulmar_pages::{Durability, PartitionId};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::LogPosition;
use futures::stream::{self, StreamExt};

use super::member::{Member, shared_log};
use crate::engine::Engine;

/// Delay after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// A sealed log is kept in memory for one to two of these intervals after its last use.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);
/// Number of partitions that are opened and flushed together.
const BATCH: usize = 64;
/// How many of these are opened concurrently.
const CONCURRENT_OPENINGS: usize = 8;
/// Number of partitions whose ranges are dropped together.
const COVER_BATCH: usize = 16;
/// Pause after each of these batches.
const COVER_PAUSE: Duration = Duration::from_millis(500);

/// Starts the task. It also frees the memory of sealed logs that are not read any more, and
/// of arrivals whose migration has ended without a word.
pub(crate) fn spawn_settling(engine: &Arc<Engine>, member: Arc<Member>) {
    let engine = Arc::downgrade(engine);
    tokio::spawn(async move {
        let (mut left, mut is_settled) = (None, false);
        let mut forget_at = Instant::now() + FORGET_INTERVAL;
        // The engine is held only during a round, so that it can be dropped.
        while let Some(engine) = engine.upgrade() {
            let mut pause = RETRY_DELAY;
            if !is_settled {
                match engine.settle_inherited(&member, &mut left).await {
                    Ok(is_complete) => is_settled = is_complete,
                    Err(error) => {
                        tracing::warn!(%error, "could not flush records of earlier runs; will retry");
                    }
                }
            }
            if is_settled {
                match engine.cover_next(&member).await {
                    Ok(true) => pause = COVER_PAUSE,
                    Ok(false) => {}
                    Err(error) => tracing::warn!(
                        %error,
                        "could not cover old log records by manifests; will retry"
                    ),
                }
            }
            if Instant::now() > forget_at {
                member.sealed.forget_unused();
                member.arrivals.drop_old();
                member.snapshots.drop_old();
                forget_at = Instant::now() + FORGET_INTERVAL;
            }
            drop(engine);
            tokio::time::sleep(pause).await;
        }
    });
}

impl Engine {
    /// Stores a manifest of a partition since it was opened, unless it has no contents. Ranges
    /// before this incarnation can then be dropped.
    pub async fn cover(&self, id: PartitionId) -> Result<()> {
        let partition = self.partitions().partition(id).await?;
        let Some((_, first)) = self.require_member()?.epoch_of(id) else { return Ok(()) };
        self.maintenance().store_manifests(vec![(partition, first)]).await
    }

    /// Flushes all inherited records. `left` are the partitions that have some, once known. Returns
    /// false if some are left, without an error.
    async fn settle_inherited(
        &self,
        member: &Member,
        left: &mut Option<HashSet<PartitionId>>,
    ) -> Result<bool> {
        let left = match left {
            Some(left) => left,
            None => {
                let membership = &member.membership;
                let to = LogPosition::new(membership.incarnation, 0);
                let from = membership.assignments.inherited_from().await?.unwrap_or(to);
                let found = member.sealed.partitions_in(membership.log_node, from, to).await;
                left.insert(found.map_err(log_error)?.into_iter().filter(|id| id.0 != 0).collect())
            }
        };
        let all: Vec<PartitionId> = left.iter().copied().collect();
        let mut result = Ok(());
        for batch in all.chunks(BATCH) {
            let opening = batch.iter().map(|id| async move { (*id, self.partitions().partition(*id).await) });
            let mut opening = stream::iter(opening.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_OPENINGS);
            let mut opened = Vec::new();
            while let Some((id, partition)) = opening.next().await {
                match partition {
                    Ok(partition) => opened.push(partition),
                    // The new owner reads the log of this range, if the partition still exists.
                    Err(error) if is_given_up(&error) => drop(left.remove(&id)),
                    Err(error) => match self.copy_inherited(member, id).await {
                        Ok(true) => {
                            left.remove(&id);
                            tracing::warn!(
                                partition = %id,
                                %error,
                                "database cannot be opened; its log records were copied to this node's log"
                            );
                        }
                        Ok(false) => result = Err(error),
                        Err(error) => result = Err(error),
                    },
                }
            }
            drop(opening);
            let flushed = self.maintenance().flush(opened.clone()).await;
            // A partition with a new manifest may have later changes, which are in this log.
            let is_flushed =
                |partition: &&Arc<Partition>| partition.is_settled() || partition.new_manifest().is_some();
            for partition in opened.iter().filter(is_flushed) {
                left.remove(&partition.id);
            }
            result = result.and(flushed);
        }
        if left.is_empty() {
            shared_log(self.node())?.settle_inherited();
        }
        result.map(|()| left.is_empty())
    }

    /// Copies the inherited records of a partition that cannot be opened to this incarnation's log, so
    /// that it does not keep the log from being truncated. Returns false if that is not possible.
    async fn copy_inherited(&self, member: &Member, id: PartitionId) -> Result<bool> {
        let log = shared_log(self.node())?;
        let replay = match self.partitions().replay(id) {
            // An earlier attempt has failed.
            Some(replay) => replay,
            None => {
                let assignment = member.membership.assignments.assignment(id).await?;
                if assignment.durability == Durability::Local {
                    // No range names them.
                    return Ok(true);
                }
                let replay = Arc::new(member.read_ranges(self.node(), &log, id, &assignment).await?);
                member.set_copied(id);
                if !replay.may_move() || !self.partitions().keep_replay(id, replay.clone()) {
                    return Ok(false);
                }
                replay
            }
        };
        self.maintenance().copy_to_log(&log, &replay).await.map(|()| true)
    }

    /// Covers the next partitions whose records name ranges before this incarnation. Returns false
    /// if there are none.
    async fn cover_next(&self, member: &Member) -> Result<bool> {
        let mut uncovered = member.membership.assignments.uncovered().await;
        // Open partitions cost least. Partitions that could not be covered are tried again later.
        let skip = |id: &PartitionId| member.skipped.lock().contains(id);
        uncovered.retain(|id| !skip(id));
        if uncovered.is_empty() {
            member.skipped.lock().clear();
            return Ok(false);
        }
        uncovered.sort_by_key(|id| (self.partitions().open_one(*id).is_none(), *id));
        uncovered.truncate(COVER_BATCH);
        let (mut opened, mut unused, mut result) = (Vec::new(), Vec::new(), Ok(()));
        for id in uncovered {
            if self.partitions().open_one(id).is_none() {
                unused.push(id);
            }
            member.skipped.lock().insert(id);
            match self.partitions().partition(id).await {
                Ok(partition) => opened.extend(member.epoch_of(id).map(|epoch| (partition, epoch))),
                Err(error) if is_given_up(&error) => {}
                Err(error) => result = Err(error),
            }
        }
        let partitions: Vec<_> =
            opened.iter().map(|(partition, (_, first))| (partition.clone(), *first)).collect();
        let stored = self.maintenance().store_manifests(partitions).await;
        // A partition that was given away and taken back meanwhile is another object, in another
        // epoch.
        let is_covered = |(partition, epoch): &&(Arc<Partition>, (u32, u64))| {
            let is_same =
                self.partitions().open_one(partition.id).is_some_and(|open| Arc::ptr_eq(&open, partition));
            is_same && member.epoch_of(partition.id) == Some(*epoch) && has_manifest(partition, epoch.1)
        };
        let covered: Vec<_> =
            opened.iter().filter(is_covered).map(|(partition, (epoch, _))| (partition.id, *epoch)).collect();
        drop(opened);
        for id in unused {
            self.partitions().close_if_unused(id);
        }
        if !covered.is_empty() {
            member.membership.assignments.drop_ranges(covered).await?;
        }
        stored.and(result).map(|()| true)
    }
}

/// Returns true if the partition has moved to another node, or was dropped.
fn is_given_up(error: &Error) -> bool {
    [sqlstate::PARTITION_MOVED, sqlstate::INVALID_CATALOG_NAME, sqlstate::DATABASE_DROPPED]
        .contains(&error.state())
}

/// Returns true if a manifest with a number of this incarnation is stored, from `first` on: it is
/// newer than those that earlier owners may still store. A partition without contents needs none.
fn has_manifest(partition: &Partition, first: u64) -> bool {
    partition.named_number() >= first || partition.is_blank()
}

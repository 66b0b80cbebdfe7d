//! Flushing: writes changed pages to segments, references the segments in manifests, and truncates
//! the log.
//!
//! ```text
//!  changed pages at a pinned, durable version
//!     -> segment   (synced; not referenced yet: garbage if the process dies here)
//!     -> manifest  (synced, created only if absent: from here on the partition opens without the
//!                   log's older records)
//!     -> log truncation (whole files without unflushed records; [`log_relocation`] handles
//!                   records that cannot be flushed)
//! ```
//!
//! A crash between two of these steps leaves the previous step complete, and at most garbage: an
//! unreferenced segment, an older manifest, or a longer log than necessary. When the log is read,
//! records that a manifest covers are skipped by their version.
//!
//! Flushes block no transaction: a flush reads a pinned snapshot, and pages changed meanwhile
//! belong to the next one. A flush contains only durable versions: it waits for the log first.
//!
//! # The backlog of the shared log
//!
//! A start reads all unflushed records. In the shared log they should stay below 64 MiB and 4,000
//! objects ([`fulmar_store`]'s `log/shared/state`). Two rules keep these limits as long as flushes
//! keep up with commits:
//!
//! 1. Once the backlog exceeds half of a limit, the partitions with the older records are
//!    flushed. The log wakes the flusher at that point.
//! 2. Records of an earlier process are flushed as soon as the node has started, oldest first. The
//!    log is truncated after every [`MAX_UNOPENED_BATCH`] partitions. A process that is killed
//!    every few seconds, before any other flush is due, therefore leaves the records that it added
//!    and none that it found.
//!
//! Why no crash point loses a record: these rules only choose *when* a partition is flushed. The
//! log is still truncated only before the first record that no durable manifest covers
//! ([`pressure`]). That position is determined after the flush, from two sets. A partition
//! with such a record is always in one of them:
//!
//! ```text
//!   found by the start --> unopened --> opened, and dirty --> manifest is durable --> not dirty
//!                                       from its first record
//!                          (in both for a moment: it enters the second set first)
//! ```
//!
//! A crash between the manifest and the truncation leaves records that the manifest covers. The
//! next start finds them, opens the partition, applies none of them, and truncates the log then. A
//! crash between the truncation and the object that states it leaves the records readable, which is
//! the same case. A partition that cannot be opened stays in the first set.
//!
//! A flush writes only what has changed; [`crate::compact`] keeps the number of segments small.
//! Earlier manifests are restore points ([`crate::restore_points`]) until they expire. The
//! collector ([`crate::collect`]) deletes them, and the segments that are no longer referenced.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_mvcc::{Unopened, store_error};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{Result, sqlstate};
use fulmar_store::{CommitLog, Lsn, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use tokio::time::Instant;

use self::batch::LOG_TIMEOUT;
pub(crate) use self::batch::{
    flush, flush_settled, settle_uncertain_manifests, write_manifest, write_missing_manifests,
};
pub(crate) use self::log_relocation::copy_to;
use self::pressure::{Pressure, first_uncovered};
use crate::maintenance::Maintenance;

mod batch;
mod log_relocation;
mod pressure;

/// Number of partitions with records of an earlier process that are opened and flushed before the
/// log is truncated.
const MAX_UNOPENED_BATCH: usize = 64;
/// How many of these partitions are opened concurrently.
const CONCURRENT_OPENINGS: usize = 8;

/// One round of the background task.
pub(crate) async fn round(maintenance: Arc<Maintenance>) {
    if let Err(error) = flush_due(&maintenance).await {
        tracing::warn!(%error, "flush failed; will retry");
    }
    maintenance.node().memory.flush_ended();
}

/// Sweeps partitions, enforces snapshot bounds, flushes due partitions and closes idle ones.
async fn flush_due(maintenance: &Maintenance) -> Result<()> {
    let node = maintenance.node();
    let now = node.clock.monotonic_ms();
    let interval = maintenance.flusher.manifest_interval.as_millis() as u64;
    let idle = maintenance.flusher.idle_after_ms();
    let is_due = |log: &CommitLog, pressure: &Pressure, since| {
        let is_due = pressure.is_on(since) || now > interval || is_left_behind(log, since);
        is_due && !maintenance.flusher.task.is_stopping()
    };
    let (unopenable, opened) = flush_unopened(maintenance, is_due).await;
    let pressures = LogPressures::of(maintenance);
    let mut due = Vec::new();
    let filled = node
        .memory
        .must_flush(maintenance.partitions.open_partitions().iter().map(|p| p.changed_bytes()).sum());
    for partition in maintenance.partitions.open_partitions() {
        partition.sweep();
        partition.bound_snapshots(now, &maintenance.flusher.snapshots);
        // Two references: the slot and this one.
        let unused =
            partition.is_unused(2) && now.saturating_sub(partition.used_ms.load(Ordering::Relaxed)) > idle;
        if unused {
            // The connections are most of an unused partition's memory; the rest is freed after its
            // flush.
            partition.close_idle();
        }
        if partition.has_uncertain_manifest() {
            due.push(partition);
            continue;
        }
        let Some((since, dirty_ms)) = partition.oldest_dirty() else { continue };
        let pressed = pressures.on(&partition.log).is_on(since) || is_left_behind(&partition.log, since);
        if pressed || filled || now.saturating_sub(dirty_ms) > interval || unused {
            due.push(partition);
        }
    }
    let flushed = flush(maintenance, due).await;
    for partition in maintenance.partitions.open_partitions() {
        let id = partition.id;
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        drop(partition);
        if now.saturating_sub(used_ms) > idle
            && let Some(closed) = maintenance.partitions.close_if_unused(id)
        {
            maintenance.hot.store_on_close(&closed);
        }
    }
    maintenance.historical_versions.close_unused(|used_ms| now.saturating_sub(used_ms) > idle);
    opened.and(flushed).and(shorten(maintenance, &unopenable).await)
}

/// Opens and flushes the due partitions that have unapplied records in a log, oldest records first,
/// and truncates the logs after every [`MAX_UNOPENED_BATCH`] partitions. Returns the partitions
/// that cannot be opened, and the first error.
async fn flush_unopened(
    maintenance: &Maintenance,
    is_due: impl Fn(&CommitLog, &Pressure, Lsn) -> bool,
) -> (HashSet<PartitionId>, Result<()>) {
    let (mut unopenable, mut result) = (HashSet::new(), Ok(()));
    loop {
        let pressures = LogPressures::of(maintenance);
        let mut due = maintenance.partitions.unopened();
        due.retain(|one| {
            !unopenable.contains(&one.id) && is_due(&one.log, pressures.on(&one.log), one.replay.since())
        });
        due.sort_by_key(|one| one.replay.since());
        due.truncate(MAX_UNOPENED_BATCH);
        if due.is_empty() {
            return (unopenable, result);
        }
        let opening = due
            .into_iter()
            .map(|Unopened { id, .. }| async move { (id, maintenance.partitions.partition(id).await) });
        let mut opening = stream::iter(opening.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_OPENINGS);
        let mut opened = Vec::new();
        while let Some((id, partition)) = opening.next().await {
            match partition {
                Ok(partition) => opened.push(partition),
                // Another node has flushed the records.
                Err(error) if error.state() == sqlstate::PARTITION_MOVED => {
                    maintenance.partitions.forget_replay(id);
                }
                // The remaining partitions are still flushed.
                Err(error) => {
                    unopenable.insert(id);
                    result = result.and(Err(error));
                }
            }
        }
        opened.retain(|partition| !partition.is_settled());
        let flushed = flush(maintenance, opened).await;
        truncate(maintenance);
        let has_failed = flushed.is_err();
        result = result.and(flushed);
        if has_failed {
            return (unopenable, result);
        }
    }
}

/// Returns true if an earlier process left a record at this position in the shared log. Every
/// object that stays in the shared log slows down each further start.
fn is_left_behind(log: &CommitLog, since: Lsn) -> bool {
    log.is_shared() && since < log.start_position()
}

/// The pressure of each of the node's logs.
struct LogPressures<'a>(Vec<(&'a Arc<CommitLog>, Pressure)>);

impl<'a> LogPressures<'a> {
    fn of(maintenance: &'a Maintenance) -> Self {
        let logs = maintenance.node().logs();
        LogPressures(logs.map(|log| (log, Pressure::of(log, maintenance.flusher.log_bytes))).collect())
    }

    fn on(&self, log: &Arc<CommitLog>) -> &Pressure {
        self.0.iter().find(|(of, _)| Arc::ptr_eq(of, log)).map_or(&Pressure::No, |(_, pressure)| pressure)
    }
}

/// Flushes all changed partitions.
pub(crate) async fn flush_all(maintenance: &Maintenance) -> Result<()> {
    let (unopenable, opened) = flush_unopened(maintenance, |_, _, _| true).await;
    let dirty = maintenance.partitions.open_partitions().into_iter().filter(|p| !p.is_settled()).collect();
    let flushed = flush(maintenance, dirty).await;
    opened.and(flushed).and(shorten(maintenance, &unopenable).await)
}

/// Truncates each log before its first uncovered record. If a log is too long, first relocates the
/// records of partitions that could not be opened.
async fn shorten(maintenance: &Maintenance, unopenable: &HashSet<PartitionId>) -> Result<()> {
    let deadline = Instant::now() + LOG_TIMEOUT;
    loop {
        let relocated = log_relocation::relocate(maintenance, unopenable, deadline).await;
        truncate(maintenance);
        if !relocated? || Instant::now() >= deadline {
            return Ok(());
        }
    }
}

fn truncate(maintenance: &Maintenance) {
    for log in maintenance.node().logs() {
        let upto = first_uncovered(maintenance, log, &HashSet::new());
        if upto > log.oldest() {
            failpoint::hit(failpoint::FLUSH_BEFORE_TRUNCATE);
            log.truncate(upto);
        } else if log.is_shared() {
            // Claims of earlier processes that committed nothing occupy an object each, but no
            // positions.
            log.truncate(upto);
        }
    }
}

/// Deletes a dropped partition's manifests, anchors, holds and its list of hot pages.
pub(crate) fn delete(maintenance: &Maintenance, id: PartitionId) -> BoxFuture<'_, Result<()>> {
    async move {
        let past_guard = maintenance.node().old_manifests.write().await;
        let flush_guard = maintenance.flusher.lock_flushes().await;
        let store = &maintenance.node().store;
        let listed = store.list_partitions(Some(id)).await.map_err(store_error)?;
        maintenance.node().check_term().await?;
        // Anchors go before manifests, so that no manifest is reported missing.
        for anchor in listed.anchors {
            store.delete_anchor(anchor).await.map_err(store_error)?;
        }
        for manifest in listed.manifests {
            store.delete_manifest(manifest).await.map_err(store_error)?;
        }
        drop((flush_guard, past_guard));
        // Holds go after manifests: the collector deletes what is left of a partition without a
        // manifest.
        for hold in listed.holds.into_iter().rev() {
            store.delete_hold(hold).await.map_err(store_error)?;
        }
        for list in listed.hot_pages {
            store.delete_hot_pages(list).await.map_err(store_error)?;
        }
        maintenance.scheduler.count_dropped();
        Ok(())
    }
    .boxed()
}

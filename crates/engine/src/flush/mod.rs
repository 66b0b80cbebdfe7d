//! Flushes: changed pages become segments, segments become manifests, and the log gets shorter.
//!
//! ```text
//!  changed pages at a pinned, durable version
//!     -> segment   (synced; named by nobody yet: garbage if we die now)
//!     -> manifest  (synced, created only if absent: from here on the partition opens without the log's older records)
//!     -> log truncation (whole files that hold nothing unflushed; [`forward`] says what becomes of what cannot be flushed)
//! ```
//!
//! Whoever dies between two of these steps leaves the step before it complete and garbage at most: an unnamed segment,
//! an older manifest, a log that is longer than it need be. Records that a manifest covers are passed over by their
//! version when the log is read.
//!
//! A flush holds up nobody: it reads a pinned snapshot, and the pages changed meanwhile belong to the next one. It
//! contains only durable versions: it waits for the log first.
//!
//! # The backlog of the shared log
//!
//! A start reads all unflushed records. In the shared log they are bounded to 64 MiB or 4,000 objects, whichever comes first
//! ([`fulmar_store`]'s `log/shared/state`). Two rules keep the bound:
//!
//! 1. Once the backlog exceeds half of the bound, the partitions with the older records are flushed. The log wakes the
//!    flusher when the backlog crosses that point.
//! 2. Records of an earlier process are flushed as soon as the node has started, the oldest first. The log is truncated after
//!    every [`UNOPENED_TOGETHER`] partitions. A process that is killed every few seconds, before any other flush is due,
//!    therefore leaves the records that it added and none that it found.
//!
//! Why no crash point loses a record: these rules only choose *when* a partition is flushed. The log is still truncated
//! only before the first record that no durable manifest covers ([`first_uncovered`]), which is determined after the flush
//! from two sets that a partition is always in while it has such a record:
//!
//! ```text
//!   found by the start --> unopened --> opened, and dirty from its first record --> manifest is durable --> not dirty
//!                          (in both for a moment: it leaves the first set after it has entered the second)
//! ```
//!
//! A crash between the manifest and the truncation leaves records that the manifest covers. The next start finds them, opens
//! the partition, applies none of them, and truncates the log then. A crash between the truncation and the object that
//! states it leaves the records readable, which is the same case. A partition that cannot be opened stays in the first set.
//!
//! A flush writes what has changed and nothing else; that segments stay few is for [`crate::compact`]. Manifests of before are
//! history ([`crate::history`]) until they have had their time; they and the segments that nothing names are deleted by the
//! collector ([`crate::collect`]).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, Lsn, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use tokio::sync::{MutexGuard, Notify};
use tokio::time::Instant;

use self::batch::LOG_PATIENCE;
pub(crate) use self::batch::{flush, flush_settled, name_anew, settle_unsure};
use crate::background::Background;
use crate::engine::Unopened;
use crate::partition::{SnapshotBounds, store_error};
use crate::{Engine, Result};

mod batch;
mod forward;

/// Beyond this much log, or a quarter of the memory budget, what holds its oldest records is flushed at once: a start holds
/// all of them in memory. The more log there is, the fewer times a page that changes all the time is flushed.
const LOG_BYTES: u64 = 384 << 20;
/// With how little memory ever.
const LEAST_LOG_BYTES: u64 = 32 << 20;
/// Partitions with records of an earlier process that are opened and flushed together, before the log is truncated.
const UNOPENED_TOGETHER: usize = 64;
/// Partitions of these that are opened at the same time.
const CONCURRENT_OPENINGS: usize = 8;
/// Beyond such a part of what all log files may take, everything that is dirty is flushed.
const LOG_FILES_PART: u64 = 2;

/// When flushes happen, and how many did.
pub(crate) struct Flusher {
    manifest_interval: Duration,
    idle_after: Duration,
    snapshots: SnapshotBounds,
    /// How much log there may be before something is flushed because of it.
    log_bytes: u64,
    pub(crate) task: Arc<Background>,
    flushes: AtomicU64,
    /// One flush at a time.
    flushing: tokio::sync::Mutex<()>,
}

impl Flusher {
    /// For a node with a budget of `memory_bytes`. `due` wakes it.
    pub(crate) fn new(
        manifest_interval: Duration,
        idle_after: Duration,
        snapshots: SnapshotBounds,
        memory_bytes: u64,
        due: Arc<Notify>,
    ) -> Self {
        Flusher {
            manifest_interval,
            idle_after,
            snapshots,
            log_bytes: (memory_bytes / 4).clamp(LEAST_LOG_BYTES, LOG_BYTES),
            task: Background::new(due),
            flushes: AtomicU64::new(0),
            flushing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn idle_after_ms(&self) -> u64 {
        self.idle_after.as_millis() as u64
    }

    pub(crate) fn snapshot_bounds(&self) -> &SnapshotBounds {
        &self.snapshots
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    fn count(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }
}

/// One look around.
pub(crate) async fn round(engine: Arc<Engine>) {
    if let Err(error) = flush_due(&engine).await {
        tracing::warn!(%error, "a flush failed; it is tried again");
    }
    engine.node().memory.flush_ended();
}

/// Sweeps, bounds snapshots, flushes what is due and closes what is idle.
async fn flush_due(engine: &Engine) -> Result<()> {
    let node = engine.node();
    let now = node.clock.monotonic_ms();
    let interval = engine.flusher.manifest_interval.as_millis() as u64;
    let idle = engine.flusher.idle_after_ms();
    let is_due = |log: &CommitLog, pressure: &Pressure, since| {
        let is_due = pressure.is_on(since) || now > interval || is_left_behind(log, since);
        is_due && !engine.flusher.task.is_stopping()
    };
    let (unopenable, opened) = flush_unopened(engine, is_due).await;
    let pressures = Pressures::of(engine);
    let mut due = Vec::new();
    let filled = node.memory.must_flush(engine.open_partitions().iter().map(|p| p.changed_bytes()).sum());
    for partition in engine.open_partitions() {
        partition.sweep();
        partition.bound_snapshots(now, &engine.flusher.snapshots);
        // The slot and we.
        let unused =
            partition.is_unused(2) && now.saturating_sub(partition.used_ms.load(Ordering::Relaxed)) > idle;
        if unused {
            // Most of what an unused partition holds; the rest waits for its flush.
            partition.pool.clear();
        }
        if partition.is_unsure() {
            due.push(partition);
            continue;
        }
        let Some((since, dirty_ms)) = partition.oldest_dirty() else { continue };
        let pressed = pressures.on(&partition.log).is_on(since) || is_left_behind(&partition.log, since);
        if pressed || filled || now.saturating_sub(dirty_ms) > interval || unused {
            due.push(partition);
        }
    }
    let flushed = flush(engine, due).await;
    for partition in engine.open_partitions() {
        let id = partition.id;
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        drop(partition);
        if now.saturating_sub(used_ms) > idle
            && let Some(closed) = engine.close_if_unused(id)
        {
            engine.hot.closed(&closed);
        }
    }
    engine.past.close_unused(|used_ms| now.saturating_sub(used_ms) > idle);
    opened.and(flushed).and(shorten(engine, &unopenable).await)
}

/// Opens and flushes the due partitions that have unapplied records in a log, the oldest records first, and truncates the
/// logs after every [`UNOPENED_TOGETHER`] partitions. Returns the partitions that cannot be opened, and the first error.
async fn flush_unopened(
    engine: &Engine,
    is_due: impl Fn(&CommitLog, &Pressure, Lsn) -> bool,
) -> (HashSet<PartitionId>, Result<()>) {
    let (mut unopenable, mut result) = (HashSet::new(), Ok(()));
    loop {
        let pressures = Pressures::of(engine);
        let mut due = engine.unopened();
        due.retain(|one| {
            !unopenable.contains(&one.id) && is_due(&one.log, pressures.on(&one.log), one.replay.since())
        });
        due.sort_by_key(|one| one.replay.since());
        due.truncate(UNOPENED_TOGETHER);
        if due.is_empty() {
            return (unopenable, result);
        }
        let opening =
            due.into_iter().map(|Unopened { id, .. }| async move { (id, engine.partition(id).await) });
        let mut opening = stream::iter(opening.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_OPENINGS);
        let mut opened = Vec::new();
        while let Some((id, partition)) = opening.next().await {
            match partition {
                Ok(partition) => opened.push(partition),
                // The others are flushed all the same.
                Err(error) => {
                    unopenable.insert(id);
                    result = result.and(Err(error));
                }
            }
        }
        opened.retain(|partition| !partition.is_settled());
        let flushed = flush(engine, opened).await;
        truncate(engine);
        let has_failed = flushed.is_err();
        result = result.and(flushed);
        if has_failed {
            return (unopenable, result);
        }
    }
}

/// Returns true if a record at this position was left in the shared log by an earlier process. Every object that stays in
/// the shared log slows down each further start.
fn is_left_behind(log: &CommitLog, since: Lsn) -> bool {
    log.is_shared() && since < log.began()
}

/// The pressure of each of the node's logs.
struct Pressures<'a>(Vec<(&'a Arc<CommitLog>, Pressure)>);

impl<'a> Pressures<'a> {
    fn of(engine: &'a Engine) -> Self {
        let logs = engine.node().logs();
        Pressures(logs.map(|log| (log, Pressure::of(log, engine.flusher.log_bytes))).collect())
    }

    fn on(&self, log: &Arc<CommitLog>) -> &Pressure {
        self.0.iter().find(|(of, _)| Arc::ptr_eq(of, log)).map_or(&Pressure::No, |(_, pressure)| pressure)
    }
}

/// Whether a log has become long.
enum Pressure {
    No,
    /// On whoever still needs what stands before this position.
    Before(Lsn),
    /// On everybody.
    All,
}

impl Pressure {
    fn of(log: &CommitLog, most_bytes: u64) -> Pressure {
        let oldest = log.oldest().0;
        if log.size_bytes() > log.capacity_bytes() / LOG_FILES_PART {
            Pressure::All
        } else if let Some(position) = log.flush_before() {
            Pressure::Before(position)
        } else if log.appended().0.saturating_sub(oldest) > most_bytes {
            Pressure::Before(Lsn(oldest + most_bytes / 2))
        } else {
            Pressure::No
        }
    }

    /// Whether it is on a partition that needs the log from here on.
    fn is_on(&self, since: Lsn) -> bool {
        match self {
            Pressure::No => false,
            Pressure::Before(position) => since < *position,
            Pressure::All => true,
        }
    }
}

/// Flushes everything that has changed.
pub(crate) async fn flush_all(engine: &Engine) -> Result<()> {
    let (unopenable, opened) = flush_unopened(engine, |_, _, _| true).await;
    let dirty = engine.open_partitions().into_iter().filter(|p| !p.is_settled()).collect();
    let flushed = flush(engine, dirty).await;
    opened.and(flushed).and(shorten(engine, &unopenable).await)
}

/// Cuts each log before the first record that no manifest covers; if it is long, records of partitions that could not be opened are
/// carried out of the way.
async fn shorten(engine: &Engine, unopenable: &HashSet<PartitionId>) -> Result<()> {
    let deadline = Instant::now() + LOG_PATIENCE;
    loop {
        let carried = forward::carry(engine, unopenable, deadline).await;
        truncate(engine);
        if !carried? || Instant::now() >= deadline {
            return Ok(());
        }
    }
}

fn truncate(engine: &Engine) {
    for log in engine.node().logs() {
        let upto = first_uncovered(engine, log, &HashSet::new());
        if upto > log.oldest() {
            failpoint::hit(failpoint::FLUSH_BEFORE_TRUNCATE);
            log.truncate(upto);
        } else if log.is_shared() {
            // Claims of earlier processes that committed nothing take an object each, and no positions.
            log.truncate(upto);
        }
    }
}

/// Where the first record stands in a log that no manifest covers; those of the partitions `but` do not count.
fn first_uncovered(engine: &Engine, log: &Arc<CommitLog>, but: &HashSet<PartitionId>) -> Lsn {
    // Read before the partitions are asked: a commit after it lies above it.
    let durable = log.durable();
    let unopened = engine.unopened().into_iter().map(|one| (one.id, one.log, one.replay.since()));
    let dirty = engine.open_partitions().into_iter();
    let dirty = dirty.filter_map(|p| p.oldest_dirty().map(|(since, _)| (p.id, p.log.clone(), since)));
    let needed = unopened.chain(dirty).filter(|(id, of, _)| Arc::ptr_eq(of, log) && !but.contains(id));
    needed.map(|(_, _, since)| since).fold(durable, Lsn::min)
}

/// While this is held no manifest is replaced by a newer one.
pub(crate) async fn settled(engine: &Engine) -> MutexGuard<'_, ()> {
    engine.flusher.flushing.lock().await
}

/// Deletes a dropped partition's manifests, what was decided of them, and its list of hot pages.
pub(crate) fn delete(engine: &Engine, id: PartitionId) -> BoxFuture<'_, Result<()>> {
    async move {
        let alone = engine.node().past.write().await;
        let one = settled(engine).await;
        let store = &engine.node().store;
        let listed = store.list_partitions(Some(id)).await.map_err(store_error)?;
        engine.check_term().await?;
        // Before those: nobody misses a dropped partition's.
        for anchor in listed.anchors {
            store.delete_anchor(anchor).await.map_err(store_error)?;
        }
        for manifest in listed.manifests {
            store.delete_manifest(manifest).await.map_err(store_error)?;
        }
        drop((one, alone));
        // After those: what is left of a partition without a manifest the collector deletes.
        for fate in listed.fates.into_iter().rev() {
            store.delete_fate(fate).await.map_err(store_error)?;
        }
        for list in listed.hot_pages {
            store.delete_hot_pages(list).await.map_err(store_error)?;
        }
        engine.maintenance.count_dropped();
        Ok(())
    }
    .boxed()
}

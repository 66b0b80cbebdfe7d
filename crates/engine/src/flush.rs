//! Flushes: changed pages become segments, segments become manifests, and the log gets shorter.
//!
//! ```text
//!  changed pages at a pinned, durable version
//!     -> segment   (synced; named by nobody yet: garbage if we die now)
//!     -> manifest  (synced, created only if absent: from here on the partition opens without the log's older records)
//!     -> log truncation (whole files that hold nothing unflushed)
//! ```
//!
//! Whoever dies between two of these steps leaves the step before it complete and garbage at most: an unnamed segment,
//! an older manifest, a log that is longer than it need be. Records that a manifest covers are passed over by their
//! version when the log is read.
//!
//! A flush holds up nobody: it reads a pinned snapshot, and the pages changed meanwhile belong to the next one. It
//! contains only durable versions: it waits for the log first.
//!
//! A flush writes what has changed and nothing else; that segments stay few is for [`crate::compact`]. Manifests of before are
//! history ([`crate::history`]) until they have had their time; they and the segments that nothing names are deleted by the
//! collector ([`crate::collect`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, PartitionId, SegmentId, Version, ZERO_PAGE};
use fulmar_store::{CommitLog, Lsn, ManifestName, StoreError, failpoint};
use futures::stream::{self, StreamExt};
use tokio::sync::{MutexGuard, Notify};

use crate::background::Background;
use crate::partition::{Flush, NamedSegment, Partition, SnapshotBounds, read_frames, store_error};
use crate::store::Segments;
use crate::{Engine, Result};

/// Beyond this much log, what holds its oldest records is flushed at once.
const LOG_BYTES: u64 = 128 << 20;
/// Beyond this much space of all log files (half of what they may take), everything that is dirty is flushed.
const LOG_FILES_BYTES: u64 = 512 << 20;
/// Pages that are flushed together into one segment, at most (about: a partition is not cut).
const BATCH_PAGES: usize = 8192;
/// Manifests that are written at the same time.
const MANIFESTS_AT_ONCE: usize = 16;

/// When flushes happen, and how many did.
pub(crate) struct Flusher {
    manifest_interval: Duration,
    idle_after: Duration,
    snapshots: SnapshotBounds,
    pub(crate) task: Arc<Background>,
    flushes: AtomicU64,
    /// One flush at a time.
    flushing: tokio::sync::Mutex<()>,
}

impl Flusher {
    /// `due` wakes it.
    pub(crate) fn new(
        manifest_interval: Duration,
        idle_after: Duration,
        snapshots: SnapshotBounds,
        due: Arc<Notify>,
    ) -> Self {
        Flusher {
            manifest_interval,
            idle_after,
            snapshots,
            task: Background::new(due),
            flushes: AtomicU64::new(0),
            flushing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
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
    let idle = engine.flusher.idle_after.as_millis() as u64;
    for (id, log, since) in engine.unopened() {
        if Pressure::of(&log).is_on(since) || now > interval {
            engine.partition(id).await?;
        }
    }
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
        let Some((since, dirty_ms)) = partition.oldest_dirty() else { continue };
        let pressed = Pressure::of(&partition.log).is_on(since);
        if pressed || filled || now.saturating_sub(dirty_ms) > interval || unused {
            due.push(partition);
        }
    }
    flush(engine, due).await?;
    for partition in engine.open_partitions() {
        let id = partition.id;
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        drop(partition);
        if now.saturating_sub(used_ms) > idle {
            engine.close_if_unused(id);
        }
    }
    truncate(engine);
    Ok(())
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
    fn of(log: &CommitLog) -> Pressure {
        let oldest = log.oldest().0;
        if log.size_bytes() > LOG_FILES_BYTES {
            Pressure::All
        } else if log.appended().0.saturating_sub(oldest) > LOG_BYTES {
            Pressure::Before(Lsn(oldest + LOG_BYTES / 2))
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
    for (id, _, _) in engine.unopened() {
        engine.partition(id).await?;
    }
    let dirty = engine.open_partitions().into_iter().filter(|p| p.oldest_dirty().is_some()).collect();
    flush(engine, dirty).await?;
    truncate(engine);
    Ok(())
}

/// Cuts each log before the first record that no manifest covers.
fn truncate(engine: &Engine) {
    for log in engine.node().logs() {
        // Read before the partitions are asked: a commit after it lies above it.
        let mut upto = log.durable();
        let unopened = engine.unopened().into_iter().map(|(_, log, since)| (log, since));
        let dirty = engine.open_partitions().into_iter();
        let dirty = dirty.filter_map(|p| p.oldest_dirty().map(|(since, _)| (p.log.clone(), since)));
        for (_, since) in unopened.chain(dirty).filter(|(needed, _)| Arc::ptr_eq(needed, log)) {
            upto = upto.min(since);
        }
        if upto > log.oldest() {
            failpoint::hit(failpoint::FLUSH_BEFORE_TRUNCATE);
            log.truncate(upto);
        }
    }
}

/// Flushes partitions, some together in one segment.
pub(crate) async fn flush(engine: &Engine, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let _one = settled(engine).await;
    flush_settled(engine, partitions).await
}

/// The same, for who keeps others from flushing.
pub(crate) async fn flush_settled(engine: &Engine, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let mut batch = Vec::new();
    let mut pages = 0;
    for partition in partitions {
        if let Some(flush) = partition.begin_flush() {
            pages += flush.pages.len();
            batch.push((partition, flush));
        }
        if pages >= BATCH_PAGES {
            flush_batch(engine, std::mem::take(&mut batch)).await?;
            pages = 0;
        }
    }
    if !batch.is_empty() {
        flush_batch(engine, batch).await?;
    }
    Ok(())
}

async fn flush_batch(engine: &Engine, batch: Vec<(Arc<Partition>, Flush)>) -> Result<()> {
    let _unnamed = engine.node().naming.enter();
    let written = write_segment(engine, &batch).await;
    // Each manifest is a few syncs of small files: the disk takes many at once.
    let naming = batch.into_iter().map(|(partition, flush)| {
        let segment = written.clone();
        async move {
            let result = match segment {
                Ok(segment) => name_segment(engine, &partition, &flush, segment).await,
                Err(error) => Err(error),
            };
            // What was not flushed stays due.
            partition.end_flush(flush, result.is_ok());
            if result.is_ok() {
                engine.maintenance.flushed(&partition);
            }
            result
        }
    });
    let results: Vec<Result<()>> = stream::iter(naming).buffer_unordered(MANIFESTS_AT_ONCE).collect().await;
    engine.flusher.flushes.fetch_add(1, Ordering::Relaxed);
    results.into_iter().find(Result::is_err).unwrap_or(Ok(()))
}

/// Writes the changed pages of all partitions of a batch into one segment.
async fn write_segment(engine: &Engine, batch: &[(Arc<Partition>, Flush)]) -> Result<Option<SegmentId>> {
    let node = engine.node();
    for (partition, flush) in batch {
        partition.log.wait_durable(flush.snapshot.lsn).await.map_err(crate::partition::log_error)?;
    }
    let large_pages: u64 = batch.iter().flat_map(|(_, flush)| &flush.large).map(|large| large.pages).sum();
    engine.maintenance.count_written(large_pages * PAGE_SIZE as u64);
    if batch.iter().all(|(_, flush)| flush.pages.is_empty()) {
        return Ok(None);
    }
    let mut writer = node.store.segment_writer().await.map_err(store_error)?;
    let mut builder = SegmentBuilder::new(writer.buffer());
    let mut page = Box::new(ZERO_PAGE);
    for (partition, flush) in batch {
        for no in &flush.pages {
            if partition.copy_page(*no, &flush.snapshot, &mut page).await? {
                builder.push(partition.id, *no, &page, writer.buffer());
            }
            if writer.buffer().len() > 1 << 20 {
                writer.flush().await.map_err(store_error)?;
            }
        }
    }
    engine.maintenance.count_written(builder.bytes());
    builder.finish(writer.buffer());
    let id = writer.finish().await.map_err(store_error)?;
    failpoint::hit(failpoint::FLUSH_AFTER_SEGMENT);
    Ok(Some(id))
}

/// Makes the manifest that names the segment. Those before it are history.
async fn name_segment(
    engine: &Engine,
    partition: &Partition,
    flush: &Flush,
    segment: Option<SegmentId>,
) -> Result<()> {
    if partition.is_dropped() {
        return Ok(());
    }
    // What the flush before has left. Its pages are in this one too.
    if let Some((manifest, pages)) = partition.unsure_manifest() {
        let adopted = put_or_adopt(engine, &manifest).await?;
        set_named(engine, partition, &manifest, &pages, adopted).await?;
    }
    let mut named = partition.named_segments();
    named.extend(flush.large.iter().map(|large| NamedSegment { segment: large.segment, pages: large.pages }));
    if let Some(id) = segment.filter(|_| !flush.pages.is_empty()) {
        let segment = SegmentRef { id, partition: partition.id };
        named.push(NamedSegment { segment, pages: flush.pages.len() as u64 });
    }
    let (outcomes_horizon, outcomes) = partition.durable_outcomes();
    let manifest = Manifest {
        partition: partition.id,
        version: Version { lineage: partition.lineage, epoch: partition.epoch, number: flush.number },
        page_count: flush.snapshot.page_count,
        timestamp: flush.timestamp,
        segments: named.iter().map(|named| named.segment).collect(),
        outcomes,
        outcomes_horizon,
    };
    let pages: Vec<u64> = named.iter().map(|named| named.pages).collect();
    partition.begin_to_name(&manifest, &pages);
    let adopted = put_or_adopt(engine, &manifest).await?;
    failpoint::hit(failpoint::FLUSH_AFTER_MANIFEST);
    // Before it counts as named: if this fails the flush has failed, and is done again as if the manifest were not there.
    partition.learn_frames(flush, adopted.as_ref().unwrap_or(&manifest)).await?;
    set_named(engine, partition, &manifest, &pages, adopted).await
}

/// From now on `manifest` is the partition's newest one, or else the one that was adopted in its place.
async fn set_named(
    engine: &Engine,
    partition: &Partition,
    manifest: &Manifest,
    pages: &[u64],
    adopted: Option<Manifest>,
) -> Result<()> {
    match adopted {
        None => partition.set_named(manifest, pages),
        Some(adopted) => {
            let (_, pages) = read_frames(engine.node(), &Segments::default(), &adopted).await?;
            partition.set_named(&adopted, &pages);
        }
    }
    Ok(())
}

/// Stores a manifest. If an earlier flush has stored one of the same version, and did not get to know it or stumbled
/// later, that one is as good: the same pages, in segments of its own. It is answered.
async fn put_or_adopt(engine: &Engine, manifest: &Manifest) -> Result<Option<Manifest>> {
    let store = &engine.node().store;
    match store.put_manifest(manifest).await {
        Ok(()) => Ok(None),
        Err(exists @ StoreError::Exists { .. }) => {
            let other = store.read_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
            if other.version == manifest.version { Ok(Some(other)) } else { Err(store_error(exists)) }
        }
        Err(error) => Err(store_error(error)),
    }
}

/// Writes a manifest of a partition whose segments have been merged, with what has changed meanwhile. For who keeps others
/// from flushing.
pub(crate) async fn name_anew(engine: &Engine, partition: Arc<Partition>) -> Result<()> {
    let flush = partition.begin_any_flush();
    flush_batch(engine, vec![(partition, flush)]).await
}

/// While this is held no manifest is replaced by a newer one.
pub(crate) async fn settled(engine: &Engine) -> MutexGuard<'_, ()> {
    engine.flusher.flushing.lock().await
}

/// Deletes a dropped partition's manifests.
pub(crate) async fn delete(engine: &Engine, id: PartitionId) -> Result<()> {
    let _alone = engine.node().past.write().await;
    let _one = settled(engine).await;
    let store = &engine.node().store;
    for manifest in store.list_manifests(Some(id)).await.map_err(store_error)? {
        store.delete_manifest(manifest).await.map_err(store_error)?;
    }
    engine.maintenance.count_dropped();
    Ok(())
}

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
//! A partition's manifest names few segments: when they hold twice as many pages as the partition has (or are many),
//! the flush writes all pages anew. Segments that no manifest names are deleted by [`collect`], which marks and sweeps.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PartitionId, SegmentId, Version};
use fulmar_store::{CommitLog, Lsn, ManifestName, StoreError, failpoint};
use futures::stream::{self, StreamExt};
use tokio::sync::{MutexGuard, Notify};

use crate::partition::{Flush, Partition, SnapshotBounds, store_error};
use crate::{Engine, Result};

/// How often the flusher looks around.
const PERIOD: Duration = Duration::from_millis(500);
/// Beyond this much log, what holds its oldest records is flushed at once.
const LOG_BYTES: u64 = 128 << 20;
/// Beyond this much space of all log files (half of what they may take), everything that is dirty is flushed.
const LOG_FILES_BYTES: u64 = 512 << 20;
/// Pages that are flushed together into one segment, at most (about: a partition is not cut).
const BATCH_PAGES: usize = 8192;
/// Manifests that are written at the same time.
const MANIFESTS_AT_ONCE: usize = 16;
/// Bytes of segments written between two collections; where space is short they come at once.
const COLLECT_AFTER_BYTES: u64 = 256 << 20;
/// Segments that a manifest may name.
const MOST_SEGMENTS: usize = 12;

/// When flushes happen, and how many did.
pub(crate) struct Flusher {
    manifest_interval: Duration,
    idle_after: Duration,
    snapshots: SnapshotBounds,
    stopping: AtomicBool,
    stop: Notify,
    stopped: Notify,
    flushes: AtomicU64,
    written_bytes: AtomicU64,
    /// A partition was dropped since the last collection.
    dropped: AtomicBool,
    /// One flush at a time.
    flushing: tokio::sync::Mutex<()>,
}

impl Flusher {
    pub(crate) fn new(manifest_interval: Duration, idle_after: Duration, snapshots: SnapshotBounds) -> Self {
        Flusher {
            manifest_interval,
            idle_after,
            snapshots,
            stopping: AtomicBool::new(false),
            stop: Notify::new(),
            stopped: Notify::new(),
            flushes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            dropped: AtomicBool::new(false),
            flushing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Relaxed)
    }

    /// Ends the background task; waits for it.
    pub(crate) async fn stop(&self) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            self.stop.notify_one();
            self.stopped.notified().await;
        }
    }
}

/// Starts the background task. It ends when the engine is stopped or gone.
pub(crate) fn spawn(engine: &Arc<Engine>) {
    let weak = Arc::downgrade(engine);
    tokio::spawn(async move {
        loop {
            let Some(engine) = weak.upgrade() else { return };
            if engine.flusher.stopping.load(Ordering::Acquire) {
                engine.flusher.stopped.notify_one();
                return;
            }
            if let Err(error) = round(&engine).await {
                tracing::warn!(%error, "a flush failed; it is tried again");
            }
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = engine.flusher.stop.notified() => {}
            }
        }
    });
}

/// One look around: sweep, bound snapshots, flush what is due, close what is idle, collect.
async fn round(engine: &Engine) -> Result<()> {
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
        if pressed || now.saturating_sub(dirty_ms) > interval || unused {
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
    let written = engine.flusher.written_bytes.load(Ordering::Relaxed);
    let dropped = engine.flusher.dropped.load(Ordering::Relaxed);
    if written > COLLECT_AFTER_BYTES || (node.disk.is_low() && (written > 0 || dropped)) {
        engine.flusher.written_bytes.store(0, Ordering::Relaxed);
        engine.flusher.dropped.store(false, Ordering::Relaxed);
        collect(engine).await?;
    }
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
            failpoint::hit("flush-before-truncate");
            log.truncate(upto);
        }
    }
}

/// Flushes partitions, some together in one segment.
pub(crate) async fn flush(engine: &Engine, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let _one = engine.flusher.flushing.lock().await;
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
    if batch.iter().all(|(_, flush)| flush.pages.is_empty()) {
        return Ok(None);
    }
    let mut writer = node.store.segment_writer().await.map_err(store_error)?;
    let mut builder = SegmentBuilder::new(writer.buffer());
    for (partition, flush) in batch {
        for no in &flush.pages {
            // SAFETY: the flush has pinned the snapshot.
            let Some(version) = (unsafe { partition.find(*no, &flush.snapshot) }) else { continue };
            partition.load(version).await?;
            if let Some(page) = version.data() {
                builder.push(partition.id, *no, page, writer.buffer());
            }
            if writer.buffer().len() > 1 << 20 {
                writer.flush().await.map_err(store_error)?;
            }
        }
    }
    engine.flusher.written_bytes.fetch_add(builder.bytes(), Ordering::Relaxed);
    builder.finish(writer.buffer());
    let id = writer.finish().await.map_err(store_error)?;
    failpoint::hit("flush-after-segment");
    Ok(Some(id))
}

/// Makes the manifest that names the segment, then deletes the ones before it.
async fn name_segment(
    engine: &Engine,
    partition: &Partition,
    flush: &Flush,
    segment: Option<SegmentId>,
) -> Result<()> {
    let node = engine.node();
    if partition.is_closed() {
        return Ok(());
    }
    let _naming = engine.node().naming.read().await;
    let mut segments = if flush.whole { Vec::new() } else { partition.named_segments() };
    let new =
        segment.filter(|_| !flush.pages.is_empty()).map(|id| SegmentRef { id, partition: partition.id });
    segments.extend(flush.large.iter().map(|large| large.segment).filter(|_| !flush.whole));
    segments.extend(new);
    let (outcomes_horizon, outcomes) = partition.durable_outcomes();
    let manifest = Manifest {
        partition: partition.id,
        version: Version {
            lineage: partition.lineage,
            epoch: partition.epoch,
            number: flush.snapshot.number,
        },
        page_count: flush.snapshot.page_count,
        timestamp: node.clock.tick(),
        segments,
        outcomes,
        outcomes_horizon,
    };
    let before = node.store.list_manifests(Some(partition.id)).await.map_err(store_error)?;
    let named = put_or_adopt(engine, manifest).await?;
    failpoint::hit("flush-after-manifest");
    let name = ManifestName::of(&named);
    partition.set_named_segments(named.segments, flush);
    for old in before.into_iter().filter(|old| *old != name) {
        node.store.delete_manifest(old).await.map_err(store_error)?;
    }
    Ok(())
}

/// Stores a manifest. If an earlier flush has stored one of the same version, and did not get to know it or stumbled
/// later, that one is as good: the same pages, in segments of its own.
async fn put_or_adopt(engine: &Engine, manifest: Manifest) -> Result<Manifest> {
    let store = &engine.node().store;
    match store.put_manifest(&manifest).await {
        Ok(()) => Ok(manifest),
        Err(exists @ StoreError::Exists { .. }) => {
            let other = store.read_manifest(ManifestName::of(&manifest)).await.map_err(store_error)?;
            if other.version == manifest.version { Ok(other) } else { Err(store_error(exists)) }
        }
        Err(error) => Err(store_error(error)),
    }
}

/// Makes partition `id` a copy of `source`, by reference.
pub(crate) async fn copy(engine: &Engine, source: &Arc<Partition>, id: PartitionId) -> Result<()> {
    let (_settled, manifest) = newest_manifest(engine, source).await?;
    let Some(manifest) = manifest else { return Ok(()) };
    let manifest = Manifest {
        partition: id,
        version: Version { lineage: id.0, epoch: 1, number: manifest.version.number },
        timestamp: engine.node().clock.tick(),
        outcomes: Vec::new(),
        // Nothing that was ever decided of the source is known here.
        outcomes_horizon: engine.node().clock.newest_id(),
        ..manifest
    };
    engine.node().store.put_manifest(&manifest).await.map_err(store_error)
}

/// The manifest of a partition with all that has been committed; `None` if that is nothing. While the guard is held no
/// newer one replaces it, and nothing that it names is collected.
pub(crate) async fn newest_manifest<'a>(
    engine: &'a Engine,
    partition: &Arc<Partition>,
) -> Result<(MutexGuard<'a, ()>, Option<Manifest>)> {
    flush(engine, vec![partition.clone()]).await?;
    let settled = settled(engine).await;
    let manifest = engine.node().store.latest_manifest(partition.id).await.map_err(store_error)?;
    Ok((settled, manifest))
}

/// While this is held no manifest is replaced by a newer one, and nothing is collected.
pub(crate) async fn settled(engine: &Engine) -> MutexGuard<'_, ()> {
    engine.flusher.flushing.lock().await
}

/// So many bytes of a segment were written besides flushes.
pub(crate) fn count_written(engine: &Engine, bytes: u64) {
    engine.flusher.written_bytes.fetch_add(bytes, Ordering::Relaxed);
}

/// Deletes a dropped partition's manifests.
pub(crate) async fn delete(engine: &Engine, id: PartitionId) -> Result<()> {
    let _one = engine.flusher.flushing.lock().await;
    let store = &engine.node().store;
    for manifest in store.list_manifests(Some(id)).await.map_err(store_error)? {
        store.delete_manifest(manifest).await.map_err(store_error)?;
    }
    engine.flusher.dropped.store(true, Ordering::Relaxed);
    Ok(())
}

/// Deletes segments that no manifest names. Flushes that have written a segment but not yet its manifests are kept out
/// by the flush lock.
pub(crate) async fn collect(engine: &Engine) -> Result<()> {
    let _one = engine.flusher.flushing.lock().await;
    let _naming = engine.node().naming.write().await;
    let store = &engine.node().store;
    let mut named: HashSet<SegmentId> = engine.unopened_segments().into_iter().collect();
    named.extend(engine.node().exported_segments());
    for name in store.list_manifests(None).await.map_err(store_error)? {
        let manifest = store.read_manifest(name).await.map_err(store_error)?;
        named.extend(manifest.segments.iter().map(|segment| segment.id));
    }
    for partition in engine.open_partitions() {
        // An open partition reads its old frames until it is closed.
        named.extend(partition.frame_segments());
    }
    for segment in store.list_segments().await.map_err(store_error)? {
        if !named.contains(&segment) {
            store.delete_segment(segment).await.map_err(store_error)?;
        }
    }
    Ok(())
}

/// Whether a flush of so many changed pages had better write the whole partition.
pub(crate) fn write_whole(named: usize, named_pages: u64, changed: u64, page_count: u32) -> bool {
    named >= MOST_SEGMENTS || named_pages + changed > 2 * u64::from(page_count) + 16
}

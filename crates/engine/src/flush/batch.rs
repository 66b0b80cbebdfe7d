//! Flushing some partitions together: one segment for all of them, then a manifest for each.
//!
//! What is wrong with one partition (its log is silent, a page of it cannot be read, its manifest cannot be stored) is that
//! one's trouble: it stays dirty, and the others are flushed.
//!
//! # A manifest that nobody answers for
//! When a put fails nobody can tell whether the manifest is there, or will appear. So it is remembered
//! ([`Partition::begin_to_name`]), with what it names, and is put again before the partition's next one: then it is there.
//! Whatever else stands in its place is not ours, and is left alone; the next manifest has a higher number.

use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, SegmentId, Version, ZERO_PAGE};
use fulmar_store::{ManifestName, SegmentWriter, StoreError, failpoint};
use futures::stream::{self, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::settled;
use crate::partition::{Flush, NamedSegment, Partition, log_error, store_error};
use crate::{Engine, Error, Result, sqlstate};

/// Pages that are flushed together into one segment, at most (about: a partition is not cut).
const BATCH_PAGES: usize = 8192;
/// Manifests that are written at the same time.
const MANIFESTS_AT_ONCE: usize = 16;
/// How long a batch waits for the logs to make what it flushes durable. In a flush all others of the node wait with it.
const LOG_PATIENCE: Duration = Duration::from_secs(3);

/// A partition of a batch.
struct Flushing {
    partition: Arc<Partition>,
    flush: Flush,
    /// An error: it is not flushed this time.
    outcome: Result<()>,
}

/// Flushes partitions, some together in one segment. Answers the first error of any.
pub(crate) async fn flush(engine: &Engine, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let _one = settled(engine).await;
    flush_settled(engine, partitions).await
}

/// The same, for who keeps others from flushing.
pub(crate) async fn flush_settled(engine: &Engine, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let mut result = Ok(());
    let mut batch = Vec::new();
    let mut pages = 0;
    for partition in partitions {
        if let Err(error) = settle_unsure(engine, &partition).await {
            result = result.and(Err(error));
            continue;
        }
        if let Some(flush) = partition.begin_flush() {
            pages += flush.pages.len();
            batch.push(Flushing { partition, flush, outcome: Ok(()) });
        }
        if pages >= BATCH_PAGES {
            result = result.and(flush_batch(engine, std::mem::take(&mut batch)).await);
            pages = 0;
        }
    }
    if !batch.is_empty() {
        result = result.and(flush_batch(engine, batch).await);
    }
    result
}

/// Writes a manifest of a partition whose segments have been merged, with what has changed meanwhile. For who keeps others
/// from flushing, and has called [`settle_unsure`].
pub(crate) async fn name_anew(engine: &Engine, partition: Arc<Partition>) -> Result<()> {
    let flush = partition.begin_any_flush();
    flush_batch(engine, vec![Flushing { partition, flush, outcome: Ok(()) }]).await
}

/// Stores the manifest that an earlier flush may or may not have stored. For who keeps others from flushing.
pub(crate) async fn settle_unsure(engine: &Engine, partition: &Partition) -> Result<()> {
    if let Some((manifest, pages)) = partition.unsure_manifest().filter(|_| !partition.is_dropped()) {
        put(engine, partition, &manifest).await?;
        partition.set_named(&manifest, &pages);
    }
    Ok(())
}

async fn flush_batch(engine: &Engine, mut batch: Vec<Flushing>) -> Result<()> {
    let _unnamed = engine.node().naming.enter();
    let deadline = Instant::now() + LOG_PATIENCE;
    for one in &mut batch {
        one.outcome = wait_durable(one, deadline).await;
    }
    let segment = write_segment(engine, &mut batch).await;
    // Each manifest is a few syncs of small files: the disk takes many at once.
    let naming = batch.into_iter().map(|Flushing { partition, flush, outcome }| {
        let written = outcome.and(segment.clone());
        async move {
            let result = match written {
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
    engine.flusher.count();
    results.into_iter().find(Result::is_err).unwrap_or(Ok(()))
}

/// Waits until what is flushed is durable in the log.
async fn wait_durable(one: &Flushing, deadline: Instant) -> Result<()> {
    let log = &one.partition.log;
    // Somebody else commits to the partition now, and goes on with its manifests.
    if let Some(fenced) = log.fenced() {
        return Err(log_error(fenced));
    }
    timeout_at(deadline, log.wait_durable(one.flush.snapshot.lsn))
        .await
        .map_err(|_| silent_log())?
        .map_err(log_error)
}

fn silent_log() -> Error {
    Error::new(sqlstate::IO_ERROR, "the last commits of the database are not durable yet, and cannot be flushed")
        .hint("see to what its log is kept on: the disk, or the store for `durability = 'shared'`; it is tried again")
}

/// Writes the changed pages of all partitions of a batch into one segment.
async fn write_segment(engine: &Engine, batch: &mut [Flushing]) -> Result<Option<SegmentId>> {
    let large_pages: u64 = batch.iter().flat_map(|one| &one.flush.large).map(|large| large.pages).sum();
    engine.maintenance.count_written(large_pages * PAGE_SIZE as u64);
    if batch.iter().all(|one| one.outcome.is_err() || one.flush.pages.is_empty()) {
        return Ok(None);
    }
    let mut writer = engine.node().store.segment_writer().await.map_err(store_error)?;
    let mut builder = SegmentBuilder::new(writer.buffer());
    for one in batch.iter_mut().filter(|one| one.outcome.is_ok()) {
        one.outcome = push_pages(one, &mut builder, &mut writer).await?;
    }
    engine.maintenance.count_written(builder.bytes());
    builder.finish(writer.buffer());
    let id = writer.finish().await.map_err(store_error)?;
    failpoint::hit(failpoint::FLUSH_AFTER_SEGMENT);
    Ok(Some(id))
}

/// Writes a partition's changed pages. The outer error is the segment's, the inner one the partition's: then there may be some
/// of its pages in the segment, which nobody names.
async fn push_pages(
    one: &Flushing,
    builder: &mut SegmentBuilder,
    writer: &mut SegmentWriter,
) -> Result<Result<()>> {
    let mut page = Box::new(ZERO_PAGE);
    for no in &one.flush.pages {
        match one.partition.copy_page(*no, &one.flush.snapshot, &mut page).await {
            Ok(true) => builder.push(one.partition.id, *no, &page, writer.buffer()),
            Ok(false) => {}
            Err(error) => return Ok(Err(error)),
        }
        if writer.buffer().len() > 1 << 20 {
            writer.flush().await.map_err(store_error)?;
        }
    }
    Ok(Ok(()))
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
    let segment = segment.filter(|_| !flush.pages.is_empty());
    let mut named = partition.named_segments();
    let large = flush.large.iter().map(|large| NamedSegment { segment: large.segment, pages: large.pages });
    // A manifest that was unsure may have named them.
    named.extend(large.filter(|large| !named.contains(large)).collect::<Vec<_>>());
    named.extend(segment.map(|id| NamedSegment {
        segment: SegmentRef { id, partition: partition.id },
        pages: flush.pages.len() as u64,
    }));
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
    put(engine, partition, &manifest).await?;
    failpoint::hit(failpoint::FLUSH_AFTER_MANIFEST);
    // Before it counts as named: if this fails the flush has failed, and the pages are written again.
    if let Some(segment) = segment {
        partition.learn_frames(flush, segment).await?;
    }
    partition.set_named(&manifest, &pages);
    Ok(())
}

/// Stores a manifest, or finds it stored.
async fn put(engine: &Engine, partition: &Partition, manifest: &Manifest) -> Result<()> {
    let store = &engine.node().store;
    match store.put_manifest(manifest).await {
        Err(exists @ StoreError::Exists { .. }) => {
            let other = store.read_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
            if other != *manifest {
                partition.number_is_taken(manifest);
                return Err(store_error(exists));
            }
            Ok(())
        }
        put => put.map_err(store_error),
    }
}

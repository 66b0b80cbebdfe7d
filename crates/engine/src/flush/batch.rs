//! Flushing some partitions together: one segment for all of them, then a manifest for each.
//!
//! A failure that concerns one partition does not keep the others from being flushed: its log does not answer, a page of it
//! cannot be read, or the store answers and refuses its manifest. That partition stays dirty. If the store itself does not
//! answer, the flush ends, and the next one tries again. Results are nested accordingly: the outer error is the store's, the
//! inner one a partition's.
//!
//! # A manifest that nobody answers for
//! When a put fails nobody can tell whether the manifest is there, or will appear. So it is remembered
//! ([`Partition::begin_to_name`]), with what it names, and is put again before the partition's next one, and before the partition
//! is closed: then it is there.
//! Whatever else stands in its place is not ours, and is left alone; the next manifest has a higher number.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, SegmentId, Version, ZERO_PAGE};
use fulmar_store::{ManifestName, SegmentWriter, StoreError, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::settled;
use crate::partition::{Flush, NamedSegment, Partition, log_error, store_error};
use crate::{Engine, Error, Result, sqlstate};

/// Pages that are flushed together into one segment, at most (about: a partition is not cut).
const BATCH_PAGES: usize = 8192;
/// Manifests that are written at the same time.
const MANIFESTS_AT_ONCE: usize = 16;
/// How long a flush waits for the logs to make durable what a batch writes. All others of the node wait with it.
pub(super) const LOG_PATIENCE: Duration = Duration::from_secs(3);
/// How long a flush waits for that in all its batches together.
const TOTAL_LOG_PATIENCE: Duration = Duration::from_secs(12);

/// How long a flush may still wait for the logs. Only the wait counts: writing the pages of earlier batches
/// does not shorten the wait of later ones.
struct LogPatience {
    left: Duration,
}

impl LogPatience {
    fn new() -> Self {
        LogPatience { left: TOTAL_LOG_PATIENCE }
    }

    /// The deadline of a batch that begins to wait now. Commits that are durable already pass any deadline.
    fn deadline(&self) -> Instant {
        Instant::now() + LOG_PATIENCE.min(self.left)
    }

    /// A batch has waited since then.
    fn spend(&mut self, begun: Instant) {
        self.left = self.left.saturating_sub(begun.elapsed());
    }
}

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

/// The same, for who keeps others from flushing. When the store has failed nothing more is asked of it this time.
pub(crate) fn flush_settled(
    engine: &Engine,
    mut partitions: Vec<Arc<Partition>>,
) -> BoxFuture<'_, Result<()>> {
    async move {
        let mut patience = LogPatience::new();
        let unsure: Vec<_> = partitions.iter().filter(|partition| partition.is_unsure()).cloned().collect();
        if !unsure.is_empty() {
            engine.check_term().await?;
        }
        let settling = unsure
            .iter()
            .map(|partition| async move { (partition.id, settle_unsure(engine, partition).await) });
        let mut settling = stream::iter(settling.collect::<Vec<_>>()).buffer_unordered(MANIFESTS_AT_ONCE);
        let (mut result, mut failed) = (Ok(()), HashSet::new());
        while let Some((id, settled)) = settling.next().await {
            if let Err(error) = settled? {
                failed.insert(id);
                result = result.and(Err(error));
            }
        }
        partitions.retain(|partition| !failed.contains(&partition.id));
        let mut batch = Vec::new();
        let mut pages = 0;
        while let Some(partition) = partitions.pop() {
            if let Some(flush) = partition.begin_flush() {
                pages += flush.pages.len();
                batch.push(Flushing { partition, flush, outcome: Ok(()) });
            }
            if !batch.is_empty() && (pages >= BATCH_PAGES || partitions.is_empty()) {
                result = result.and(flush_batch(engine, std::mem::take(&mut batch), &mut patience).await?);
                pages = 0;
            }
        }
        result
    }
    .boxed()
}

/// Writes a manifest of a partition whose segments have been merged, with what has changed meanwhile. For who keeps others
/// from flushing, and has called [`settle_unsure`].
pub(crate) async fn name_anew(engine: &Engine, partition: Arc<Partition>) -> Result<()> {
    let flush = partition.begin_any_flush();
    let batch = vec![Flushing { partition, flush, outcome: Ok(()) }];
    flush_batch(engine, batch, &mut LogPatience::new()).await?
}

/// Stores the manifest that an earlier flush may or may not have stored. For who keeps others from flushing.
pub(crate) async fn settle_unsure(engine: &Engine, partition: &Partition) -> Result<Result<()>> {
    let unsure = partition.unsure_manifest().filter(|_| !partition.is_dropped());
    let Some((manifest, pages)) = unsure else { return Ok(Ok(())) };
    if let Err(fenced) = check_fence(partition) {
        return Ok(Err(fenced));
    }
    let stored = put(engine, partition, &manifest).await?;
    if stored.is_ok() {
        partition.set_named(&manifest, &pages);
        delete_if_taken_over(engine, &[manifest]).await?;
    }
    Ok(stored)
}

/// The inner error is the first of any partition.
async fn flush_batch(
    engine: &Engine,
    mut batch: Vec<Flushing>,
    patience: &mut LogPatience,
) -> Result<Result<()>> {
    let _unnamed = engine.node().naming.enter();
    let (begun, deadline) = (Instant::now(), patience.deadline());
    for one in &mut batch {
        one.outcome = wait_durable(one, deadline).await;
    }
    patience.spend(begun);
    let segment = match write_segment(engine, &mut batch).await {
        // Behind the segment: until it is named only minutes go by.
        Ok(segment) => engine.check_term().await.map(|()| segment),
        failed => failed,
    };
    let failed = OnceLock::new();
    // Each manifest is a few syncs of small files: the disk takes many at once.
    let naming = batch.into_iter().map(|Flushing { partition, flush, outcome }| {
        let (segment, failed) = (segment.clone(), &failed);
        async move {
            let segment = failed.get().map_or(segment, |error: &Error| Err(error.clone()));
            let named = match (outcome, segment) {
                (Ok(()), Ok(segment)) => name_segment(engine, &partition, &flush, segment).await,
                (Ok(()), Err(error)) => Err(error),
                (Err(error), _) => Ok(Err(error)),
            };
            let named = named.unwrap_or_else(|error| {
                let _ = failed.set(error.clone());
                Err(error)
            });
            let done = named.is_ok();
            // What was not flushed stays due.
            partition.end_flush(flush, done);
            if done {
                engine.maintenance.flushed(&partition);
            }
            named
        }
    });
    let outcomes: Vec<Result<Option<Manifest>>> =
        stream::iter(naming).buffer_unordered(MANIFESTS_AT_ONCE).collect().await;
    engine.flusher.count();
    let (mut stored, mut result) = (Vec::new(), Ok(()));
    for outcome in outcomes {
        match outcome {
            Ok(manifest) => stored.extend(manifest),
            Err(error) => result = result.and(Err(error)),
        }
    }
    delete_if_taken_over(engine, &stored).await?;
    failed.into_inner().map_or(Ok(result), Err)
}

/// Checks once more, after manifests were stored, that the store was still this process's. If it was not, a manifest that names
/// a segment which the new owner has deleted is deleted: as the newest one it would keep its partition from being opened.
///
/// Only such a manifest: from one whose segments are all there the new owner may have opened the partition already, and the
/// records of its log then continue from that version.
async fn delete_if_taken_over(engine: &Engine, stored: &[Manifest]) -> Result<()> {
    if stored.is_empty() {
        return Ok(());
    }
    // Without an answer of the store nothing is deleted.
    let checked = engine.check_term().await;
    if !engine.is_taken_over() {
        return Ok(());
    }
    let store = &engine.node().store;
    let segments: HashSet<SegmentId> =
        store.list_segments().await.map_err(store_error)?.into_iter().collect();
    let cannot_be_read =
        |manifest: &&Manifest| manifest.segments.iter().any(|part| !segments.contains(&part.id));
    let unreadable: Vec<&Manifest> = stored.iter().filter(cannot_be_read).collect();
    for manifest in unreadable {
        tracing::warn!(partition = %manifest.partition, "deleting a manifest that was stored after the store was taken over");
        store.delete_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
    }
    checked
}

/// Somebody else may commit to the partition by now, and go on with its manifests.
fn check_fence(partition: &Partition) -> Result<()> {
    partition.log.fenced().map_or(Ok(()), |fenced| Err(log_error(fenced)))
}

/// Waits until what is flushed is durable in the log.
async fn wait_durable(one: &Flushing, deadline: Instant) -> Result<()> {
    check_fence(&one.partition)?;
    let log = &one.partition.log;
    timeout_at(deadline, log.wait_durable(one.flush.snapshot.lsn))
        .await
        .map_err(|_| silent_log())?
        .map_err(log_error)
}

pub(super) fn silent_log() -> Error {
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
            // What was changed a moment ago is likely to be used again.
            Ok(true) => {
                let frame = builder.push(one.partition.id, *no, &page, writer.buffer());
                writer.keep(frame);
            }
            Ok(false) => {}
            Err(error) => return Ok(Err(error)),
        }
        if writer.buffer().len() > 1 << 20 {
            writer.flush().await.map_err(store_error)?;
        }
    }
    Ok(Ok(()))
}

/// Makes the manifest that names the segment, and answers it. Those before it are history.
async fn name_segment(
    engine: &Engine,
    partition: &Partition,
    flush: &Flush,
    segment: Option<SegmentId>,
) -> Result<Result<Option<Manifest>>> {
    if partition.is_dropped() {
        return Ok(Ok(None));
    }
    let segment = segment.filter(|_| !flush.pages.is_empty());
    let mut named = partition.named_segments();
    named.extend(flush.large.iter().map(|large| NamedSegment { segment: large.segment, pages: large.pages }));
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
    if let Err(error) = put(engine, partition, &manifest).await? {
        return Ok(Err(error));
    }
    failpoint::hit(failpoint::FLUSH_AFTER_MANIFEST);
    // Before it counts as named: if this fails the flush has failed, and the pages are written again.
    if let Some(segment) = segment {
        partition.learn_frames(flush, segment).await?;
    }
    partition.set_named(&manifest, &pages);
    Ok(Ok(Some(manifest)))
}

/// Stores a manifest, or finds it stored. An object that has its name and is not it, or cannot be read, keeps the name: then the
/// partition's next manifest gets the next number, and whatever the object is, a start opens from that one.
async fn put(engine: &Engine, partition: &Partition, manifest: &Manifest) -> Result<Result<()>> {
    engine.check_term_confirmed().await?;
    let store = &engine.node().store;
    let stored = match store.put_manifest(manifest).await {
        Err(exists @ StoreError::Exists { .. }) => {
            match store.read_manifest(ManifestName::of(manifest)).await {
                Ok(other) if other == *manifest => Ok(()),
                Ok(_) | Err(StoreError::Damaged { .. } | StoreError::Misnamed { .. }) => {
                    partition.number_is_taken(manifest);
                    Err(exists)
                }
                Err(error) => Err(error),
            }
        }
        put => put,
    };
    match stored {
        Err(error) if error.is_transient() => Err(store_error(error)),
        stored => Ok(stored.map_err(store_error)),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicU64, Ordering};

    use fulmar_pages::PartitionId;
    use fulmar_store::{Backend, PageStore};
    use tokio::time::advance;

    use super::*;
    use crate::{Config, TimeSource};

    const ID: PartitionId = PartitionId(7);

    /// A clock that the test advances.
    #[derive(Default)]
    struct Manual(AtomicU64);

    impl TimeSource for Manual {
        fn unix_ms(&self) -> u64 {
            1_790_000_000_000 + self.monotonic_ms()
        }

        fn monotonic_ms(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }

    /// A process on a store, and its open partition.
    async fn owner(store: &Backend, time: &Arc<Manual>) -> (tempfile::TempDir, Arc<Engine>, Arc<Partition>) {
        let directory = tempfile::tempdir().unwrap();
        let (store, time) = (Some(Arc::new(store.clone()) as Arc<dyn fulmar_store::Store>), time.clone());
        let config = Config { store, time, ..Config::new(directory.path(), 64 << 20) };
        let engine = Engine::start(config).await.unwrap();
        let partition = engine.partition(ID).await.unwrap();
        (directory, engine, partition)
    }

    fn manifest(partition: &Partition, segments: &[SegmentId]) -> Manifest {
        Manifest {
            partition: ID,
            version: Version { lineage: partition.lineage, epoch: 1, number: partition.take_number() },
            page_count: 1,
            timestamp: 1,
            segments: segments.iter().map(|id| SegmentRef { id: *id, partition: ID }).collect(),
            outcomes: Vec::new(),
            outcomes_horizon: 0,
        }
    }

    /// Its last check was before it was stopped.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_process_that_was_stopped_asks_again_before_it_stores_a_manifest() {
        let (store, time) = (Backend::memory(), Arc::new(Manual::default()));
        let (_first, zombie, partition) = owner(&store, &time).await;
        zombie.check_term().await.unwrap();
        let _second = owner(&store, &time).await;
        time.0.fetch_add(3_600_000, Ordering::Relaxed);
        let manifest = manifest(&partition, &[]);
        let error = put(&zombie, &partition, &manifest).await.unwrap_err();
        assert!(error.message().contains("another process has taken over"), "{error:?}");
        assert_eq!(zombie.node().store.list_manifests(None).await.unwrap(), []);
    }

    /// It was stopped between its check and the put.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_manifest_of_a_deleted_segment_goes_when_the_store_was_taken_over() {
        let (store, time) = (Backend::memory(), Arc::new(Manual::default()));
        let (_first, zombie, partition) = owner(&store, &time).await;
        let pages = zombie.node().store.clone();
        let segment = pages.put_segment((&b"a segment"[..]).into()).await.unwrap();
        let (readable, broken) =
            (manifest(&partition, &[segment]), manifest(&partition, &[segment, SegmentId(9)]));
        for manifest in [&readable, &broken] {
            put(&zombie, &partition, manifest).await.unwrap().unwrap();
        }
        delete_if_taken_over(&zombie, &[readable.clone(), broken.clone()]).await.unwrap();
        assert_eq!(pages.list_manifests(None).await.unwrap().len(), 2, "it owns the store");
        let _term = PageStore::open(Arc::new(store.clone())).begin_term().await.unwrap();
        delete_if_taken_over(&zombie, &[readable.clone(), broken]).await.unwrap_err();
        assert_eq!(pages.list_manifests(None).await.unwrap(), [ManifestName::of(&readable)]);
    }

    #[tokio::test(start_paused = true)]
    async fn only_waiting_for_the_log_uses_up_patience() {
        let mut patience = LogPatience::new();
        for _ in 0..4 {
            // Earlier batches are written meanwhile.
            advance(Duration::from_secs(60)).await;
            let begun = Instant::now();
            assert_eq!(patience.deadline() - begun, LOG_PATIENCE, "each batch gets its full time");
            timeout_at(patience.deadline(), pending::<()>()).await.unwrap_err();
            patience.spend(begun);
        }
        assert!(patience.deadline() <= Instant::now(), "all batches together have a bound");
        let durable = timeout_at(patience.deadline(), std::future::ready(()));
        assert!(durable.await.is_ok(), "a durable commit passes any deadline");
    }
}

//! Flushes several partitions together: one segment for all, then one manifest per partition.
//!
//! A failure of one partition does not keep the others from being flushed: its log does not
//! respond, one of its pages cannot be read, or the store rejects its manifest. That partition
//! stays dirty. If the store itself does not respond, the flush ends, and the next one retries.
//! Results are nested accordingly: the outer error is the store's, the inner one a partition's.
//!
//! # Manifests of uncertain outcome
//! After a failed put it is unknown whether the manifest exists, or will appear later. It is
//! therefore recorded together with its references ([`Partition::begin_manifest_put`]), and is put
//! again before the partition's next manifest and before the partition is closed. After that it
//! exists. If a different object has its name, that object is left alone, and the next manifest
//! gets a higher number.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, SegmentId, Version, ZERO_PAGE};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{ManifestName, SegmentWriter, StoreError, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use tokio::time::{Instant, timeout_at};

use crate::maintenance::Maintenance;
use fulmar_mvcc::{Flush, NamedSegment, Partition, log_error, store_error};

/// Approximate maximum number of pages flushed into one segment. A partition is not split.
const BATCH_PAGES: usize = 8192;
/// Maximum number of manifests written concurrently.
const MAX_CONCURRENT_MANIFESTS: usize = 16;
/// How long a flush waits until the commits of one batch are durable in the logs. All later flushes
/// of the node wait meanwhile.
pub(super) const LOG_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a flush waits for that over all its batches.
const TOTAL_LOG_TIMEOUT: Duration = Duration::from_secs(12);

/// The remaining time that a flush can wait for the logs. Only the wait counts: writing the pages
/// of earlier batches does not shorten the wait of later ones.
struct LogWaitBudget {
    left: Duration,
}

impl LogWaitBudget {
    fn new() -> Self {
        LogWaitBudget { left: TOTAL_LOG_TIMEOUT }
    }

    /// The deadline of a batch that begins to wait now. Commits that are already durable pass any
    /// deadline.
    fn deadline(&self) -> Instant {
        Instant::now() + LOG_TIMEOUT.min(self.left)
    }

    /// Deducts the time that a batch has waited since `begun`.
    fn spend(&mut self, begun: Instant) {
        self.left = self.left.saturating_sub(begun.elapsed());
    }
}

/// A partition in a batch. Its flush ends when it is dropped, also if the caller was cancelled: the
/// changes are written by the next flush then.
struct Flushing {
    partition: Arc<Partition>,
    flush: Flush,
    /// An error excludes the partition from this flush.
    outcome: Result<()>,
    /// Its manifest was stored.
    is_done: bool,
}

impl Flushing {
    fn new(partition: Arc<Partition>, flush: Flush) -> Flushing {
        Flushing { partition, flush, outcome: Ok(()), is_done: false }
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        self.partition.end_flush(&mut self.flush, self.is_done);
    }
}

/// Flushes partitions, in batches that share a segment. Returns the first error of any partition.
pub(crate) async fn flush(maintenance: &Maintenance, partitions: Vec<Arc<Partition>>) -> Result<()> {
    let _one = maintenance.flusher.lock_flushes().await;
    flush_settled(maintenance, partitions).await
}

/// Like [`flush`], for callers that hold the flush lock. Once the store has failed, no more
/// requests are sent to it by this flush.
pub(crate) fn flush_settled(
    maintenance: &Maintenance,
    mut partitions: Vec<Arc<Partition>>,
) -> BoxFuture<'_, Result<()>> {
    async move {
        let mut wait_budget = LogWaitBudget::new();
        let uncertain: Vec<_> =
            partitions.iter().filter(|partition| partition.has_uncertain_manifest()).cloned().collect();
        if !uncertain.is_empty() {
            maintenance.node().check_term().await?;
        }
        let settling = uncertain.iter().map(|partition| async move {
            (partition.id, settle_uncertain_manifests(maintenance, partition).await)
        });
        let mut settling =
            stream::iter(settling.collect::<Vec<_>>()).buffer_unordered(MAX_CONCURRENT_MANIFESTS);
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
                batch.push(Flushing::new(partition, flush));
            }
            if !batch.is_empty() && (pages >= BATCH_PAGES || partitions.is_empty()) {
                result =
                    result.and(flush_batch(maintenance, std::mem::take(&mut batch), &mut wait_budget).await?);
                pages = 0;
            }
        }
        result
    }
    .boxed()
}

/// Writes a manifest for a partition whose segments have been merged, together with its changes
/// since. The caller holds the flush lock and has called [`settle_uncertain_manifests`].
pub(crate) async fn write_manifest(maintenance: &Maintenance, partition: Arc<Partition>) -> Result<()> {
    let flush = partition.begin_forced_flush();
    let batch = vec![Flushing::new(partition, flush)];
    flush_batch(maintenance, batch, &mut LogWaitBudget::new()).await?
}

/// Writes a manifest for each of these partitions that is settled and whose newest manifest has a
/// number below the given one. The caller holds the flush lock.
pub(crate) async fn write_missing_manifests(
    maintenance: &Maintenance,
    mut partitions: Vec<(Arc<Partition>, u64)>,
) -> Result<()> {
    let is_missing = |(partition, first): &(Arc<Partition>, u64)| {
        let has_none = partition.named_number() < *first && !partition.is_blank();
        has_none && partition.is_settled() && !partition.is_closed()
    };
    partitions.retain(is_missing);
    if partitions.is_empty() {
        return Ok(());
    }
    let batch = partitions.into_iter().map(|(partition, _)| {
        let flush = partition.begin_forced_flush();
        Flushing::new(partition, flush)
    });
    flush_batch(maintenance, batch.collect(), &mut LogWaitBudget::new()).await?
}

/// Stores the manifest of an earlier flush whose outcome is unknown. The caller holds the flush
/// lock.
pub(crate) async fn settle_uncertain_manifests(
    maintenance: &Maintenance,
    partition: &Partition,
) -> Result<Result<()>> {
    let uncertain = partition.uncertain_manifest().filter(|_| !partition.is_gone());
    let Some((manifest, pages)) = uncertain else { return Ok(Ok(())) };
    if let Err(fenced) = check_fence(partition) {
        return Ok(Err(fenced));
    }
    let stored = put(maintenance, partition, &manifest).await?;
    if stored.is_ok() {
        partition.set_named(&manifest, &pages);
        delete_if_taken_over(maintenance, &[manifest]).await?;
    }
    Ok(stored)
}

/// Flushes a batch. The inner error is the first of any partition.
async fn flush_batch(
    maintenance: &Maintenance,
    mut batch: Vec<Flushing>,
    wait_budget: &mut LogWaitBudget,
) -> Result<Result<()>> {
    let _unnamed = maintenance.node().publication.enter();
    let (begun, deadline) = (Instant::now(), wait_budget.deadline());
    for one in &mut batch {
        one.outcome = wait_durable(one, deadline).await;
    }
    wait_budget.spend(begun);
    let segment = match write_segment(maintenance, &mut batch).await {
        // Checked after the segment was written: it will be referenced within minutes.
        Ok(segment) => maintenance.node().check_term().await.map(|()| segment),
        failed => failed,
    };
    let failed = OnceLock::new();
    // Written concurrently: each manifest is a few syncs of small files, and the disk handles many
    // in parallel.
    let publication = batch.into_iter().map(|mut one| {
        let (segment, failed) = (segment.clone(), &failed);
        async move {
            let segment = failed.get().map_or(segment, |error: &Error| Err(error.clone()));
            let (partition, outcome) = (one.partition.clone(), std::mem::replace(&mut one.outcome, Ok(())));
            let named = match (outcome, segment) {
                (Ok(()), Ok(segment)) => name_segment(maintenance, &partition, &one.flush, segment).await,
                (Ok(()), Err(error)) => Err(error),
                (Err(error), _) => Ok(Err(error)),
            };
            let named = named.unwrap_or_else(|error| {
                let _ = failed.set(error.clone());
                Err(error)
            });
            // After an error the partition stays dirty.
            one.is_done = named.is_ok();
            drop(one);
            if named.is_ok() {
                maintenance.scheduler.flushed(&partition);
            }
            named
        }
    });
    let outcomes: Vec<Result<Option<Manifest>>> =
        stream::iter(publication).buffer_unordered(MAX_CONCURRENT_MANIFESTS).collect().await;
    maintenance.flusher.count();
    let (mut stored, mut result) = (Vec::new(), Ok(()));
    for outcome in outcomes {
        match outcome {
            Ok(manifest) => stored.extend(manifest),
            Err(error) => result = result.and(Err(error)),
        }
    }
    delete_if_taken_over(maintenance, &stored).await?;
    failed.into_inner().map_or(Ok(result), Err)
}

/// Checks after manifests were stored that this process still owned the store. If it did not, a
/// manifest that references a segment deleted by the new owner is deleted again: as the newest one
/// it would keep its partition from being opened.
///
/// Other manifests are kept: the new owner may have opened the partition from one whose segments
/// all exist, and the records of its log then continue from that version.
async fn delete_if_taken_over(maintenance: &Maintenance, stored: &[Manifest]) -> Result<()> {
    if stored.is_empty() {
        return Ok(());
    }
    // If the store does not answer, nothing is deleted.
    let checked = maintenance.node().check_term().await;
    if !maintenance.node().is_taken_over() {
        return Ok(());
    }
    let store = &maintenance.node().store;
    let segments: HashSet<SegmentId> =
        store.list_segments().await.map_err(store_error)?.into_iter().collect();
    let is_unreadable =
        |manifest: &&Manifest| manifest.segments.iter().any(|part| !segments.contains(&part.id));
    let unreadable: Vec<&Manifest> = stored.iter().filter(is_unreadable).collect();
    for manifest in unreadable {
        tracing::warn!(
            partition = %manifest.partition,
            "deleting a manifest that was stored after another process took over the store"
        );
        store.delete_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
    }
    checked
}

/// Fails if the partition's log was fenced: another process may commit to the partition and store
/// its manifests.
fn check_fence(partition: &Partition) -> Result<()> {
    partition.log.fenced().map_or(Ok(()), |fenced| Err(log_error(fenced)))
}

/// Waits until the log has made the flushed version durable.
async fn wait_durable(one: &Flushing, deadline: Instant) -> Result<()> {
    check_fence(&one.partition)?;
    let log = &one.partition.log;
    timeout_at(deadline, log.wait_durable(one.flush.snapshot.lsn))
        .await
        .map_err(|_| log_timeout())?
        .map_err(log_error)
}

pub(super) fn log_timeout() -> Error {
    Error::new(sqlstate::IO_ERROR, "cannot flush the database: its latest commits are not durable yet").hint(
        "Check the log's storage: the disk, or the object store for durability = 'shared'. \
         The flush is retried.",
    )
}

/// Writes the changed pages of all partitions of a batch into one segment.
async fn write_segment(maintenance: &Maintenance, batch: &mut [Flushing]) -> Result<Option<SegmentId>> {
    let large_pages: u64 = batch.iter().flat_map(|one| &one.flush.large).map(|large| large.pages).sum();
    maintenance.scheduler.count_written(large_pages * PAGE_SIZE as u64);
    if batch.iter().all(|one| one.outcome.is_err() || one.flush.pages.is_empty()) {
        return Ok(None);
    }
    let mut writer = maintenance.node().store.segment_writer().await.map_err(store_error)?;
    let mut builder = SegmentBuilder::new(writer.buffer());
    for one in batch.iter_mut().filter(|one| one.outcome.is_ok()) {
        one.outcome = push_pages(one, &mut builder, &mut writer).await?;
    }
    maintenance.scheduler.count_written(builder.bytes());
    builder.finish(writer.buffer());
    let id = writer.finish().await.map_err(store_error)?;
    failpoint::hit(failpoint::FLUSH_AFTER_SEGMENT);
    Ok(Some(id))
}

/// Writes a partition's changed pages. The outer error is the segment's, the inner one the
/// partition's. After an inner error the segment may contain some of its pages, which are not
/// referenced.
async fn push_pages(
    one: &Flushing,
    builder: &mut SegmentBuilder,
    writer: &mut SegmentWriter,
) -> Result<Result<()>> {
    let mut page = Box::new(ZERO_PAGE);
    for no in &one.flush.pages {
        match one.partition.copy_page(*no, &one.flush.snapshot, &mut page).await {
            // Recently changed pages are likely to be read again, so they are cached.
            Ok(true) => {
                let frame = builder.push(one.partition.id, *no, &page, writer.buffer());
                writer.cache_last_frame(frame);
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

/// Stores the manifest that references the segment, and returns it. Earlier manifests become
/// history.
async fn name_segment(
    maintenance: &Maintenance,
    partition: &Partition,
    flush: &Flush,
    segment: Option<SegmentId>,
) -> Result<Result<Option<Manifest>>> {
    if partition.is_gone() {
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
    partition.begin_manifest_put(&manifest, &pages);
    if let Err(error) = put(maintenance, partition, &manifest).await? {
        return Ok(Err(error));
    }
    failpoint::hit(failpoint::FLUSH_AFTER_MANIFEST);
    // Done before the manifest is recorded as named: if this fails the flush has failed, and the
    // pages are written again.
    if let Some(segment) = segment {
        partition.set_flushed_frames(flush, segment).await?;
    }
    partition.set_named(&manifest, &pages);
    Ok(Ok(Some(manifest)))
}

/// Stores a manifest, or finds it stored. If its name is taken by a different or unreadable object,
/// the partition's next manifest uses the next number; a start opens from that one, whatever the
/// object is.
async fn put(maintenance: &Maintenance, partition: &Partition, manifest: &Manifest) -> Result<Result<()>> {
    maintenance.node().check_term_confirmed().await?;
    let store = &maintenance.node().store;
    let stored = match store.put_manifest(manifest).await {
        Err(exists @ StoreError::Exists { .. }) => {
            match store.read_manifest(ManifestName::of(manifest)).await {
                Ok(other) if other == *manifest => Ok(()),
                Ok(_) | Err(StoreError::Damaged { .. } | StoreError::WrongIdentity { .. }) => {
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

    use fulmar_mvcc::TimeSource;
    use fulmar_pages::PartitionId;
    use fulmar_store::{Backend, PageStore};
    use tokio::time::advance;

    use super::*;
    use crate::tests::start;

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

    /// Starts a process on a store, and opens its partition.
    async fn owner(
        store: &Backend,
        time: &Arc<Manual>,
    ) -> (tempfile::TempDir, Arc<Maintenance>, Arc<Partition>) {
        let (directory, maintenance) = start(Arc::new(store.clone()), time.clone()).await;
        let partition = maintenance.partitions.partition(ID).await.unwrap();
        (directory, maintenance, partition)
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

    /// The process is suspended after its last check.
    #[tokio::test(flavor = "multi_thread")]
    async fn suspended_process_rechecks_its_term_before_it_stores_a_manifest() {
        let (store, time) = (Backend::memory(), Arc::new(Manual::default()));
        let (_first, zombie, partition) = owner(&store, &time).await;
        zombie.node().check_term().await.unwrap();
        let _second = owner(&store, &time).await;
        time.0.fetch_add(3_600_000, Ordering::Relaxed);
        let manifest = manifest(&partition, &[]);
        let error = put(&zombie, &partition, &manifest).await.unwrap_err();
        assert!(error.message().contains("another process has taken over"), "{error:?}");
        assert_eq!(zombie.node().store.list_manifests(None).await.unwrap(), []);
    }

    /// The process is suspended between its check and the put.
    #[tokio::test(flavor = "multi_thread")]
    async fn manifest_of_a_deleted_segment_is_deleted_after_a_takeover() {
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
        assert_eq!(
            pages.list_manifests(None).await.unwrap().len(),
            2,
            "no manifest is deleted while the process owns the store"
        );
        let _term = PageStore::open(Arc::new(store.clone())).start_term().await.unwrap();
        delete_if_taken_over(&zombie, &[readable.clone(), broken]).await.unwrap_err();
        assert_eq!(pages.list_manifests(None).await.unwrap(), [ManifestName::of(&readable)]);
    }

    #[tokio::test(start_paused = true)]
    async fn only_waiting_for_the_log_consumes_the_wait_budget() {
        let mut wait_budget = LogWaitBudget::new();
        for _ in 0..4 {
            // Writing earlier batches takes time.
            advance(Duration::from_secs(60)).await;
            let begun = Instant::now();
            assert_eq!(wait_budget.deadline() - begun, LOG_TIMEOUT, "each batch must get its full timeout");
            timeout_at(wait_budget.deadline(), pending::<()>()).await.unwrap_err();
            wait_budget.spend(begun);
        }
        assert!(wait_budget.deadline() <= Instant::now(), "the wait of all batches together must be bounded");
        let durable = timeout_at(wait_budget.deadline(), std::future::ready(()));
        assert!(durable.await.is_ok(), "a durable commit must pass any deadline");
    }
}

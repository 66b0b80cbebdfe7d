//! Branches and restores: a new partition from an old version, or a partition's return to one. Both
//! store one manifest and copy no pages.
//!
//! ```text
//!   shop    m1 --- m2 --- m3 --- m4            restore: m4 is m1, renumbered, in a new lineage
//!            |      \             ^
//!            |       `- copy      |             branch: copy references the segments of m2
//!            '--------------------'
//! ```
//!
//! # Crashes
//! A branch is one object that is created only if absent, so it exists completely or not at all.
//! The flush before it has no effect that would not have come anyway. A branch of which only the
//! manifest exists belongs to a tenant that is still being created; the next start drops it.
//!
//! A restore has two steps. Its manifest belongs to the partition's next epoch, and has no effect
//! until the catalog contains that epoch:
//!
//! ```text
//!   commits stop -> flush -> manifest of epoch + 1 -> catalog: lineage, epoch + 1 -> reopen
//! ```
//!
//! Until then the partition opens from its newest manifest of the previous epoch, and the collector
//! deletes the other. Afterwards it opens from the new manifest, and log records of older epochs
//! are skipped. If it is unknown whether the catalog has changed (its file failed and the node must
//! restart), the partition stays closed: a commit in either epoch could be lost to the other.
//!
//! In a cluster the step in the catalog is a step of the ownership protocol (`cluster::restore`): the
//! same transaction begins a new ownership, and is applied only if this node still owns the
//! partition. An owner repeats it until its outcome is known. A restore that was overtaken by a
//! failover leaves a manifest that no later owner reads: if a later restore reaches the same epoch,
//! its version number is greater, because it has the epoch of a later ownership.
//!
//! Earlier manifests are kept for the retention period, so a restore can be undone by another one.
//!
//! # Protection from garbage collection
//! Between the choice of a version and the storing of the manifest that references its segments
//! again, these must not be collected:
//! - by this process: [`fulmar_mvcc::Node::old_manifests`] is held;
//! - by an earlier owner of the store that is still carrying out earlier decisions: the version's
//!   manifest is pinned, and must still exist after the new one is stored ([`crate::pins`]).

use std::sync::Arc;

use fulmar_mvcc::{Contents, Partition, store_error, term_of, with_partition_context};
use fulmar_pages::{Manifest, PartitionId, Timeline, Version};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{CommitLog, ManifestName, StoreError, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::RwLockReadGuard;

use crate::flush;
use crate::maintenance::Maintenance;
use crate::pins::PinnedManifest;

/// Why the catalog did not record a restore.
#[derive(Debug)]
pub enum DecisionError {
    /// It is known that it has not, and will not.
    Refused(Error),
    /// It may have, or may still.
    InDoubt(Error),
}

impl Maintenance {
    /// Creates a partition: empty, or as a branch of another one, as that is now or was at a time
    /// (milliseconds since 1970). A branch shares the segments of its source.
    pub fn create_partition(
        &self,
        id: PartitionId,
        source: Option<(PartitionId, Option<u64>)>,
    ) -> BoxFuture<'_, Result<()>> {
        async move {
            self.node().check_owner()?;
            self.node().disk.admit(true)?;
            match source {
                Some(_) if self.node().is_member => {
                    if self.is_created(id).await? {
                        return Ok(());
                    }
                }
                _ => self.check_new(id).await?,
            }
            let Some((source, at_unix_ms)) = source else { return Ok(()) };
            let (_past, manifest) = self.manifest_of(source, at_unix_ms).await?;
            let Some(manifest) = manifest else { return Ok(()) };
            let pinned = PinnedManifest::pin(self.node(), ManifestName::of(&manifest)).await?;
            let (clock, Timeline { lineage, epoch }) = (&self.node().clock, Timeline::first(id));
            // In a cluster the ownership of the branch begins with its first epoch, whose numbers are
            // above this one.
            let number = if self.node().is_member { 1 } else { manifest.version.number };
            let branch = Manifest {
                partition: id,
                version: Version { lineage, epoch, number },
                timestamp: clock.tick(),
                outcomes: Vec::new(),
                // Outcomes of the source's transactions are unknown here.
                outcomes_horizon: clock.newest_id(),
                ..manifest
            };
            match self.put_first_manifest(&branch).await {
                // An earlier request was slower than its repetition.
                Err(_) if self.node().is_member && self.is_created(id).await? => {
                    // It is this creation's own, which can be undone.
                    self.foreign.lock().remove(&id);
                    return Ok(());
                }
                put => put?,
            }
            failpoint::hit(failpoint::BRANCH_AFTER_MANIFEST);
            pinned.check(self.node()).await
        }
        .boxed()
    }

    /// Returns true if the branch exists already. In a cluster ids are assigned once, so it was made
    /// by an earlier request of the same creation, whose answer was lost. Fails if the source's data
    /// was deleted before the branch protected it.
    async fn is_created(&self, id: PartitionId) -> Result<bool> {
        let epoch = Timeline::first(id).epoch;
        let found = self.node().store.latest_manifest(id, epoch, None).await.map_err(store_error)?;
        match found {
            Some(manifest) => self.check_opens(&manifest).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Fails if a partition with this id has a manifest: an earlier owner of the store has used the
    /// id.
    pub(crate) async fn check_new(&self, id: PartitionId) -> Result<()> {
        let listed = async { self.node().store.list_manifests(Some(id)).await.map_err(store_error) };
        let (listed, ()) = tokio::try_join!(listed, self.node().check_term())?;
        match listed.is_empty() {
            true => Ok(()),
            false => {
                self.foreign.lock().insert(id);
                Err(Error::new(sqlstate::OBJECT_IN_USE, format!("partition {id} already exists"))
                    .hint("Retry the command; it will use another id."))
            }
        }
    }

    /// Stores the first manifest of a partition that is being created.
    ///
    /// The catalogs of two processes that both believe to own the store assign the same ids. So the
    /// id and the term are checked just before the put, however long the creation took, and the
    /// term once more after it: if the process was fenced in between, its manifest is deleted,
    /// because the owner would open its own partition of that id from it.
    pub(crate) async fn put_first_manifest(&self, manifest: &Manifest) -> Result<()> {
        self.check_new(manifest.partition).await?;
        let store = &self.node().store;
        match store.put_manifest(manifest).await {
            Err(exists @ StoreError::Exists { .. }) => {
                self.foreign.lock().insert(manifest.partition);
                return Err(store_error(exists));
            }
            put => put.map_err(store_error)?,
        }
        let checked = self.node().check_term().await;
        if self.node().is_taken_over() {
            store.delete_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
        }
        checked
    }

    /// Deletes the remains of a failed creation. A partition that another process created under the
    /// same id is left alone, and so is everything in a store that was taken over. Afterwards the
    /// catalog record can be deleted: it must not make the next start drop that partition.
    pub async fn undo_creation(&self, id: PartitionId) -> Result<()> {
        let is_foreign = self.foreign.lock().contains(&id) || self.node().is_taken_over();
        if is_foreign { Ok(()) } else { self.drop_partition(id).await }
    }

    /// Returns a partition's manifest as of now or of a time; None if the partition is empty. While
    /// the guard is held the segments that it references are not collected.
    pub(crate) async fn manifest_of(
        &self,
        id: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<(RwLockReadGuard<'_, ()>, Option<Manifest>)> {
        let Some(at_unix_ms) = at_unix_ms else { return self.newest_manifest(id).await };
        let past = self.node().old_manifests.read().await;
        // A dropped partition's manifests are gone, so it would look like an empty one.
        self.partitions.check_not_dropped(id)?;
        let manifest = self.manifest_at(id, at_unix_ms).await?;
        Ok((past, Some(Manifest::clone(&manifest))))
    }

    /// Returns a manifest with all commits of a partition; None if there are none. While the guard
    /// is held the segments that it references are not collected.
    async fn newest_manifest(&self, id: PartitionId) -> Result<(RwLockReadGuard<'_, ()>, Option<Manifest>)> {
        // Fails if the partition's log was rejected: its records are unknown then, and it may have
        // unflushed commits.
        self.partitions.opener().log_settled(id).await;
        self.partitions.opener().log_of(self.node(), id)?;
        // If a partition is closed and the log has no records of it, its manifest is complete. In a
        // cluster other logs may have records of it.
        if self.node().is_member || self.partitions.may_be_dirty(id) {
            let partition = self.partitions.partition(id).await?;
            flush::flush(self, vec![partition]).await?;
        }
        let past = self.node().old_manifests.read().await;
        // A dropped partition's manifests are gone, so it would look like an empty one.
        self.partitions.check_not_dropped(id)?;
        let epoch = self.partitions.timeline(id).epoch;
        let manifest = self.node().store.latest_manifest(id, epoch, None).await.map_err(store_error)?;
        Ok((past, manifest))
    }

    /// Restores a partition to a time (milliseconds since 1970). `decide` records the restore in
    /// the catalog, with the lineage `lineage` if it is given. If it is unknown whether it has, the
    /// partition stays closed until the next start. Open transactions cannot commit any more.
    pub async fn restore_partition(
        &self,
        id: PartitionId,
        at_unix_ms: u64,
        lineage: Option<u64>,
        decide: impl AsyncFnOnce(Timeline) -> std::result::Result<(), DecisionError>,
    ) -> Result<()> {
        self.node().check_owner()?;
        let _past = self.node().old_manifests.read().await;
        let target = self.manifest_at(id, at_unix_ms).await?;
        self.check_opens(&target).await?;
        let partition = self.partitions.partition(id).await?;
        // Writes most of the changes before commits are stopped.
        flush::flush(self, vec![partition.clone()]).await?;
        if !partition.close_to_restore() {
            return Err(partition.closed_error());
        }
        let flushing = self.flusher.lock_flushes().await;
        let timeline = match self.prepare_restore(&partition, &target, lineage).await {
            Ok(timeline) => timeline,
            Err(error) => {
                partition.reopen();
                return Err(error);
            }
        };
        self.partitions.set_undecided(id, true);
        match decide(timeline).await {
            Ok(()) => {}
            Err(DecisionError::Refused(error)) => {
                self.partitions.set_undecided(id, false);
                partition.reopen();
                return Err(error);
            }
            Err(DecisionError::InDoubt(error)) => return Err(error),
        }
        failpoint::hit(failpoint::RESTORE_AFTER_CATALOG);
        self.partitions.set_timeline(id, timeline);
        self.partitions.forget_open(&partition);
        self.partitions.set_undecided(id, false);
        drop(flushing);
        Ok(())
    }

    /// Checks that a version can be opened as after a restore. A restore to a version that does not
    /// open could not be undone: the next restore opens the partition first.
    fn check_opens<'a>(&'a self, target: &'a Manifest) -> BoxFuture<'a, Result<()>> {
        async move {
            let (id, node) = (target.partition, self.node().clone());
            let timeline = Timeline { lineage: target.version.lineage, epoch: target.version.epoch };
            let (log, stats) = (CommitLog::read_only(), Arc::default());
            let open = Partition::open(node, log, stats, id, timeline, Contents::of(Some(target)));
            with_partition_context(id, open).await.map(drop)
        }
        .boxed()
    }

    /// Flushes a partition whose commits are stopped, and stores the manifest of its next epoch.
    fn prepare_restore<'a>(
        &'a self,
        partition: &'a Arc<Partition>,
        target: &'a Manifest,
        lineage: Option<u64>,
    ) -> BoxFuture<'a, Result<Timeline>> {
        async move {
            flush::flush_settled(self, vec![partition.clone()]).await?;
            let pinned = PinnedManifest::pin(self.node(), ManifestName::of(target)).await?;
            let (node, store) = (self.node(), &self.node().store);
            // Manifests of an incomplete restore. In a cluster, those of later owners are not: this node
            // may have been failed over. No restore of this or an earlier ownership can have been
            // completed, because that begins a new ownership.
            let number = partition.take_number();
            let is_own = |name: &ManifestName| !node.is_member || term_of(name.number) <= term_of(number);
            let listed = store.list_manifests(Some(partition.id)).await.map_err(store_error)?;
            self.node().check_term().await?;
            for name in listed.into_iter().filter(|name| name.epoch > partition.epoch && is_own(name)) {
                store.delete_manifest(name).await.map_err(store_error)?;
            }
            let Some(epoch) = partition.epoch.checked_add(1) else {
                return Err(Error::new(
                    sqlstate::PROGRAM_LIMIT,
                    "database has reached the maximum number of restores",
                )
                .hint("Create a branch and rename it instead."));
            };
            let now = node.clock.tick();
            let timeline = Timeline { lineage: lineage.unwrap_or(now), epoch };
            // The new version gets a new millisecond: restore points are addressed in
            // milliseconds, and the previous version has one too.
            node.clock.observe(((now >> 16) + 1) << 16);
            let (outcomes_horizon, outcomes) = partition.durable_outcomes();
            let manifest = Manifest {
                partition: partition.id,
                version: Version { lineage: timeline.lineage, epoch, number },
                timestamp: node.clock.tick(),
                outcomes,
                outcomes_horizon,
                ..target.clone()
            };
            self.node().check_term_confirmed().await?;
            store.put_manifest(&manifest).await.map_err(store_error)?;
            failpoint::hit(failpoint::RESTORE_AFTER_MANIFEST);
            pinned.check(node).await?;
            Ok(timeline)
        }
        .boxed()
    }
}

//! New partitions out of old versions, and partitions that go back to one: a manifest, and no page is copied.
//!
//! ```text
//!   shop    m1 --- m2 --- m3 --- m4            m4 is m1 under another number and with another lineage:
//!            |      \             ^             shop was restored to what it was at m1
//!            |       `- copy      |
//!            '--------------------'            copy names the segments of m2, as those of shop
//! ```
//!
//! # Crashes
//! A branch is one object that is created only if absent, so it is there or not. What came before (a flush of what had
//! changed) is nothing that would not have come anyway. A branch of which only the manifest exists belongs to a tenant that
//! is still being created: the next start drops it.
//!
//! A restore has two steps. Its manifest belongs to the partition's next epoch, which means nothing yet:
//!
//! ```text
//!   nobody commits any more -> flush -> manifest of epoch + 1 -> catalog: lineage, epoch + 1 -> opens anew
//! ```
//!
//! Until the catalog says that epoch the partition opens from its newest manifest of the one before, and the collector
//! deletes the other. From then on it opens from that manifest; records of older epochs are passed over. If the catalog does
//! not say whether it has changed (its file has failed, the node must start again) the partition stays closed: a commit
//! on either side could be lost to the other.
//!
//! Manifests of before stay for as long as the retention says: a restore can be undone by another one.
//!
//! What is read between the choice of a version and the manifest that names its segments anew must not be collected
//! meanwhile: by this process, so [`crate::node::Node::past`] is held; by another one that has had the store before and has not come to
//! the end of what it has decided then, so the version's manifest is pinned, and must still be there behind the new one ([`crate::pins`]).

use std::sync::Arc;

use fulmar_pages::{Manifest, PartitionId, Version};
use fulmar_store::{CommitLog, ManifestName, StoreError, failpoint};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::RwLockReadGuard;

use crate::flush;
use crate::partition::{Partition, opening, store_error};
use crate::pins::Held;
use crate::{Engine, Error, Result, sqlstate};

/// Under which names a partition's versions stand: as the catalog has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Era {
    /// Another one after each restore.
    pub lineage: u64,
    /// Grows with every restore and every change of owner.
    pub epoch: u32,
}

impl Era {
    /// That of a partition as it is made.
    pub(crate) fn first(id: PartitionId) -> Self {
        Era { lineage: id.0, epoch: 1 }
    }
}

impl Engine {
    /// Makes a partition, empty or as a copy of another, as that one is now or was at a time (milliseconds since 1970). The
    /// copy is by reference: both share segments.
    pub fn create_partition(
        &self,
        id: PartitionId,
        source: Option<(PartitionId, Option<u64>)>,
    ) -> BoxFuture<'_, Result<()>> {
        async move {
            self.check_owner()?;
            self.node().disk.admit(true)?;
            self.check_new(id).await?;
            let Some((source, at_unix_ms)) = source else { return Ok(()) };
            let (_past, manifest) = self.manifest_of(source, at_unix_ms).await?;
            let Some(manifest) = manifest else { return Ok(()) };
            let held = Held::pin(self.node(), ManifestName::of(&manifest)).await?;
            let (clock, Era { lineage, epoch }) = (&self.node().clock, Era::first(id));
            let branch = Manifest {
                partition: id,
                version: Version { lineage, epoch, number: manifest.version.number },
                timestamp: clock.tick(),
                outcomes: Vec::new(),
                // Nothing that was ever decided of the source is known here.
                outcomes_horizon: clock.newest_id(),
                ..manifest
            };
            self.put_first_manifest(&branch).await?;
            failpoint::hit(failpoint::BRANCH_AFTER_MANIFEST);
            held.check(self.node()).await
        }
        .boxed()
    }

    /// Refuses the id of a partition that has a manifest: another process, which has owned the store before, has given it away.
    pub(crate) async fn check_new(&self, id: PartitionId) -> Result<()> {
        let listed = async { self.node().store.list_manifests(Some(id)).await.map_err(store_error) };
        let (listed, ()) = tokio::try_join!(listed, self.check_term())?;
        match listed.is_empty() {
            true => Ok(()),
            false => {
                self.foreign.lock().insert(id);
                Err(Error::new(sqlstate::OBJECT_IN_USE, format!("partition {id} is there already"))
                    .hint("Try again: another one is chosen then."))
            }
        }
    }

    /// Stores the first manifest of a partition that is being created.
    ///
    /// The catalogs of two processes that both believe to own the store give out the same ids. So the id and the term are
    /// checked just before the put, however long the creation took, and the term once more after it: a manifest of a process
    /// that was taken over in between is deleted, because the owner would open its own partition of that id from it.
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
        let checked = self.check_term().await;
        if self.is_taken_over() {
            store.delete_manifest(ManifestName::of(manifest)).await.map_err(store_error)?;
        }
        checked
    }

    /// Deletes what a failed creation left. A partition that another process created under the same id is left alone, and so is
    /// everything in a store that was taken over. The record in the catalog can go then: it must not make the next start drop
    /// that partition.
    pub async fn undo_creation(&self, id: PartitionId) -> Result<()> {
        let is_foreign = self.foreign.lock().contains(&id) || self.is_taken_over();
        if is_foreign { Ok(()) } else { self.drop_partition(id).await }
    }

    /// The manifest of a partition as it is now or was at a time; `None` if there is nothing in it. While the guard is
    /// held nothing that it names is collected.
    pub(crate) async fn manifest_of(
        &self,
        id: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<(RwLockReadGuard<'_, ()>, Option<Manifest>)> {
        let Some(at_unix_ms) = at_unix_ms else { return self.newest_manifest(id).await };
        let past = self.node().past.read().await;
        // Whose manifests are gone would look like one that never had any.
        self.check_not_dropped(id)?;
        let manifest = self.manifest_at(id, at_unix_ms).await?;
        Ok((past, Some(Manifest::clone(&manifest))))
    }

    /// The manifest of a partition with all that has been committed; `None` if that is nothing. While the guard is held
    /// nothing that it names is collected.
    async fn newest_manifest(&self, id: PartitionId) -> Result<(RwLockReadGuard<'_, ()>, Option<Manifest>)> {
        // Fails if the partition's log was refused: nothing is known of its records then, and it may have unflushed commits.
        self.places.settled(id).await;
        self.log_of(id)?;
        // One that is not open, and of which the log has nothing, has all in its manifest.
        if self.may_be_dirty(id) {
            let partition = self.partition(id).await?;
            flush::flush(self, vec![partition]).await?;
        }
        let past = self.node().past.read().await;
        // Whose manifests are gone would look like one that never had any.
        self.check_not_dropped(id)?;
        let epoch = self.era(id).epoch;
        let manifest = self.node().store.latest_manifest(id, epoch, None).await.map_err(store_error)?;
        Ok((past, manifest))
    }

    /// Makes a partition what it was at a time (milliseconds since 1970). `decide` tells the catalog; when it answers an
    /// error nobody knows whether it has, and the partition is closed until the next start. Transactions that are open
    /// cannot commit any more.
    pub async fn restore_partition(
        &self,
        id: PartitionId,
        at_unix_ms: u64,
        decide: impl AsyncFnOnce(Era) -> Result<()>,
    ) -> Result<()> {
        self.check_owner()?;
        let _past = self.node().past.read().await;
        let target = self.manifest_at(id, at_unix_ms).await?;
        self.check_opens(&target).await?;
        let partition = self.partition(id).await?;
        // Most of what has changed: nobody waits for that.
        flush::flush(self, vec![partition.clone()]).await?;
        if !partition.close_to_restore() {
            return Err(partition.closed_error());
        }
        let flushing = flush::settled(self).await;
        let era = match self.prepare_restore(&partition, &target).await {
            Ok(era) => era,
            Err(error) => {
                partition.reopen();
                return Err(error);
            }
        };
        self.undecided.lock().insert(id);
        decide(era).await?;
        failpoint::hit(failpoint::RESTORE_AFTER_CATALOG);
        self.enter(id, era);
        self.forget_open(&partition);
        self.undecided.lock().remove(&id);
        drop(flushing);
        Ok(())
    }

    /// Opens a version as a restored partition would open from it, and drops it. A restore to a version that does
    /// not open could not be undone: the next restore opens the partition first.
    fn check_opens<'a>(&'a self, target: &'a Manifest) -> BoxFuture<'a, Result<()>> {
        async move {
            let (id, node) = (target.partition, self.node().clone());
            let era = Era { lineage: target.version.lineage, epoch: target.version.epoch };
            let (log, stats) = (CommitLog::read_only(), Arc::default());
            opening(id, Partition::open(node, log, stats, id, era, Some(target), None)).await.map(drop)
        }
        .boxed()
    }

    /// Flushes a partition that is closed, and stores the manifest from which it may open next.
    fn prepare_restore<'a>(
        &'a self,
        partition: &'a Arc<Partition>,
        target: &'a Manifest,
    ) -> BoxFuture<'a, Result<Era>> {
        async move {
            flush::flush_settled(self, vec![partition.clone()]).await?;
            let held = Held::pin(self.node(), ManifestName::of(target)).await?;
            let (node, store) = (self.node(), &self.node().store);
            // Of a restore that did not come to its end.
            let listed = store.list_manifests(Some(partition.id)).await.map_err(store_error)?;
            self.check_term().await?;
            for name in listed.into_iter().filter(|name| name.epoch > partition.epoch) {
                store.delete_manifest(name).await.map_err(store_error)?;
            }
            let Some(epoch) = partition.epoch.checked_add(1) else {
                return Err(Error::new(sqlstate::PROGRAM_LIMIT, "the database was restored too often")
                    .hint("make a branch of it instead, and rename that"));
            };
            let era = Era { lineage: node.clock.tick(), epoch };
            // In a millisecond of its own: times are told in milliseconds, and what was there before has one too.
            node.clock.observe(((era.lineage >> 16) + 1) << 16);
            let (outcomes_horizon, outcomes) = partition.durable_outcomes();
            let manifest = Manifest {
                partition: partition.id,
                version: Version { lineage: era.lineage, epoch, number: partition.take_number() },
                timestamp: node.clock.tick(),
                outcomes,
                outcomes_horizon,
                ..target.clone()
            };
            self.check_term_confirmed().await?;
            store.put_manifest(&manifest).await.map_err(store_error)?;
            failpoint::hit(failpoint::RESTORE_AFTER_MANIFEST);
            held.check(node).await?;
            Ok(era)
        }
        .boxed()
    }
}

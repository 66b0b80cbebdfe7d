//! Reads of a replica: partitions within a session's staleness, and the background task.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_mvcc::{ApplyResult, Node, Partition, dropped_error, replica_is_read_only, store_error};
use fulmar_pages::{Durability, PartitionId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{ManifestName, StoreError};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::timeout;

use super::{
    CatalogState, LogFollower, LogPoll, MAX_OPENINGS, POLL_TIMEOUT, Replica, ReplicaSnapshot,
    ReplicaStatistics, deleted_too_fast,
};
use crate::engine::Engine;

/// How often the catalog is checked during that wait.
const CATALOG_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often a newer manifest is looked up: for a partition with local durability, and for one in
/// use.
const LOCAL_MANIFEST_INTERVAL_MS: u64 = 1000;
const ADOPT_INTERVAL_MS: u64 = 30_000;
/// The same for a partition in use while changed pages take much of the memory.
const ADOPT_INTERVAL_IF_FULL_MS: u64 = 2000;

impl Engine {
    /// Whether this node is a read replica.
    pub fn is_replica(&self) -> bool {
        self.replica().is_some()
    }

    /// Statistics of a replica; None on a primary.
    pub fn replica_statistics(&self) -> Option<ReplicaStatistics> {
        self.replica().map(|replica| replica.statistics(self.node()))
    }

    /// Fails on a replica: the operation needs the primary.
    pub fn check_primary(&self) -> Result<()> {
        match self.is_replica() {
            true => Err(replica_is_read_only()),
            false => Ok(()),
        }
    }

    /// Returns a partition whose snapshot is at most `staleness` old; any age if None.
    pub(crate) fn replica_partition<'a>(
        &'a self,
        replica: &'a Arc<Replica>,
        id: PartitionId,
        staleness: Option<Duration>,
    ) -> BoxFuture<'a, Result<ReplicaSnapshot>> {
        async move {
            for _ in 0..MAX_OPENINGS {
                let durability = replica.catalog_state(id).map(|state| state.durability);
                let poll = match durability {
                    Some(Durability::Shared) => Some(replica.poll_owner(self.node(), id, staleness).await?),
                    _ => None,
                };
                // After the poll, which brings the catalog of a cluster up to date.
                if replica.catalog_state(id).is_none() {
                    return Err(self.forget_dropped(id));
                }
                self.forget_left_behind(replica, id);
                let partition = match self.partitions().partition(id).await {
                    Err(_) if self.is_left_behind(id) => continue,
                    opened => opened?,
                };
                let seen = match poll {
                    Some((follower, poll)) => {
                        self.caught_up(replica, partition.clone(), &follower, poll).await
                    }
                    None => self.at_manifest(partition.clone(), staleness).await,
                };
                match seen {
                    Ok(Some(seen)) => return Ok(seen),
                    Ok(None) => {}
                    Err(_) if partition.is_stale() => {}
                    Err(error) => return Err(error),
                }
            }
            Err(deleted_too_fast())
        }
        .boxed()
    }

    /// Applies the log up to a poll's end. Returns None if the partition must be reopened.
    async fn caught_up(
        &self,
        replica: &Arc<Replica>,
        partition: Arc<Partition>,
        follower: &Arc<LogFollower>,
        poll: LogPoll,
    ) -> Result<Option<ReplicaSnapshot>> {
        let source = partition.replica_state.get().map(|following| following.source);
        if source.is_none_or(|source| source.log_node != follower.log_node) {
            // It has another owner since the poll.
            return Ok(None);
        }
        match partition.catch_up(&follower.tail, poll.end.end).await? {
            ApplyResult::UpToDate => {
                return Ok(Some(ReplicaSnapshot { partition, unix_ms: Some(poll.unix_ms) }));
            }
            // The records that the poll found are already deleted, so the next opening needs a
            // later poll.
            ApplyResult::Stale => {
                partition.mark_stale();
                follower.end(self.node(), Some(Duration::ZERO)).await?;
            }
            ApplyResult::Restored => self.restored(replica, &partition).await?,
        }
        Ok(None)
    }

    /// Handles a restore found in the log: waits until the catalog shows the new epoch.
    async fn restored(&self, replica: &Replica, partition: &Partition) -> Result<()> {
        let catalog_updated = async {
            while replica
                .catalog_state(partition.id)
                .is_some_and(|standing| standing.timeline.epoch <= partition.epoch)
            {
                tokio::time::sleep(CATALOG_POLL_INTERVAL).await;
            }
        };
        timeout(POLL_TIMEOUT, catalog_updated).await.map_err(|_| {
            Error::new(
                sqlstate::IO_ERROR,
                "the primary restored the database, but its published catalog does not show it",
            )
            .hint("Check that the primary can write its catalog to the store; see the primary's log.")
        })
    }

    /// Returns the partition at its newest manifest, if that is recent enough; None if it must be
    /// reopened.
    async fn at_manifest(
        &self,
        partition: Arc<Partition>,
        staleness: Option<Duration>,
    ) -> Result<Option<ReplicaSnapshot>> {
        let clock = &self.node().clock;
        let Some(following) = partition.replica_state.get() else { return Ok(None) };
        let unix_ms = following.manifest_unix_ms;
        let age_ms = unix_ms.map(|unix_ms| clock.unix_ms().saturating_sub(unix_ms));
        let is_recent =
            |staleness: Duration| age_ms.is_some_and(|age_ms| u128::from(age_ms) <= staleness.as_millis());
        if staleness.is_none_or(is_recent) {
            return Ok(Some(ReplicaSnapshot { partition, unix_ms }));
        }
        if following.is_due(clock.monotonic_ms(), LOCAL_MANIFEST_INTERVAL_MS) {
            let (store, known) = (&self.node().store, partition.manifest_name());
            let newest =
                store.latest_name(partition.id, partition.epoch, known).await.map_err(store_error)?;
            if newest.is_some_and(|newest| newest.number > partition.manifest_number()) {
                partition.mark_stale();
                return Ok(None);
            }
        }
        Err(staleness_exceeded(unix_ms))
    }

    /// Closes a partition that the primary has dropped, and returns the error for it.
    fn forget_dropped(&self, id: PartitionId) -> Error {
        if let Some(partition) = self.partitions().take_open(id, |_| true) {
            partition.close();
            partition.release_resources();
        }
        self.maintenance().historical_versions().drop_partition(id);
        dropped_error()
    }

    fn is_left_behind(&self, id: PartitionId) -> bool {
        self.partitions().open_one(id).is_some_and(|partition| partition.is_stale())
    }

    /// Closes an open partition that was left behind or has changed in the catalog. The next access
    /// reopens it.
    fn forget_left_behind(&self, replica: &Replica, id: PartitionId) {
        let standing = replica.catalog_state(id);
        let source = replica.ownership(id).map(|ownership| ownership.source);
        let is_over = |partition: &Partition| {
            let known = partition.replica_state.get().map(|following| CatalogState {
                timeline: Timeline { lineage: partition.lineage, epoch: partition.epoch },
                durability: following.durability,
            });
            let known_source = partition.replica_state.get().map(|following| following.source);
            partition.is_stale() || known != standing || known_source != source
        };
        if let Some(partition) = self.partitions().take_open(id, is_over) {
            partition.mark_stale();
            partition.release_resources();
            replica.resyncs.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One round of the background task: enforces snapshot bounds, releases pages that manifests
/// contain by now, closes idle partitions.
pub(crate) async fn round(engine: Arc<Engine>) {
    let node = engine.node();
    let Some(replica) = engine.replica() else { return };
    let now_ms = node.clock.monotonic_ms();
    let changed_bytes =
        engine.partitions().open_partitions().iter().map(|partition| partition.changed_bytes()).sum();
    let period_ms =
        if node.memory.must_flush(changed_bytes) { ADOPT_INTERVAL_IF_FULL_MS } else { ADOPT_INTERVAL_MS };
    let idle_ms = engine.maintenance().idle_after_ms();
    for partition in engine.partitions().open_partitions() {
        partition.sweep();
        partition.bound_snapshots(now_ms, engine.maintenance().snapshot_bounds());
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        let is_idle = now_ms.saturating_sub(used_ms) > idle_ms;
        // Two references: the slot and this one.
        if is_idle && partition.is_unused(2) {
            partition.close_idle();
        }
        let is_due = partition.replica_state.get().is_some_and(|following| {
            following.durability == Durability::Shared && !is_idle && following.is_due(now_ms, period_ms)
        });
        if is_due && let Err(error) = adopt_newest(node, replica, &partition).await {
            tracing::warn!(
                %error,
                partition = %partition.id,
                "could not read the newest manifest; will retry"
            );
        }
        let id = partition.id;
        drop(partition);
        if is_idle {
            engine.partitions().close_if_unused(id);
        }
        engine.forget_left_behind(replica, id);
    }
    replica.forget_unused_logs(now_ms);
    engine
        .maintenance()
        .historical_versions()
        .close_unused(|used_ms| now_ms.saturating_sub(used_ms) > idle_ms);
    let used = engine
        .partitions()
        .open_partitions()
        .into_iter()
        .chain(engine.maintenance().historical_versions().open());
    let used = used.filter_map(|partition| partition.manifest_name()).collect();
    replica.pins.renew(node, used).await;
    node.memory.flush_ended();
}

async fn adopt_newest(node: &Node, replica: &Replica, partition: &Partition) -> Result<()> {
    match node.store.latest_manifest(partition.id, partition.epoch, partition.manifest_name()).await {
        Ok(Some(manifest)) => match replica.pins.pin(node, ManifestName::of(&manifest)).await {
            true => partition.adopt_manifest(&manifest).await,
            false => Ok(()),
        },
        // No manifest, or a newer one exists by now.
        Ok(None) | Err(StoreError::Missing { .. }) => Ok(()),
        Err(error) => Err(store_error(error)),
    }
}

fn staleness_exceeded(unix_ms: Option<u64>) -> Error {
    let error = Error::new(
        sqlstate::NOT_IN_PREREQUISITE_STATE,
        "the newest version of the database in the store is older than fulmar.staleness allows",
    );
    let detail = "The database has durability 'local': its commits are on the primary's disk, and \
                  reach the store within a minute.";
    let error = error.detail(match unix_ms {
        Some(unix_ms) => {
            format!(
                "{detail} The newest version in the store is from {}.",
                fulmar_sqlite::calendar::timestamp(unix_ms)
            )
        }
        None => format!("{detail} The store has no version yet."),
    });
    error.hint(
        "Increase fulmar.staleness, or run ALTER DATABASE ... SET durability = 'shared' on the primary.",
    )
}

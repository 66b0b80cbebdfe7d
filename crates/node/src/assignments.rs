//! What this node owns, for its engine.
//!
//! The engine asks when it opens a partition. The answer is withheld until no earlier owner can
//! still answer (`wait_out_lease`): until the lease of this node's previous incarnation has run
//! out, and that of the dead owner if the epoch began by a failover. Nothing of a partition is
//! answered, committed or released before it is open, so the wait covers all three.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::environment::Environment;
use fulmar_cluster::incarnation::lease_wait;
use fulmar_cluster::truncation::{self, Covered};
use fulmar_cluster::{LogKind, PartitionRecord, Position, Range, generation, metadata};
use fulmar_engine::{Assignment, Assignments, Error, ReplayRange, Result, Timeline, sqlstate};
use fulmar_meta::Revision;
use fulmar_pages::{Durability, PartitionId};
use fulmar_store::LogPosition;
use tokio::time::timeout;

use crate::Node;
use crate::environment::boot_time;
use crate::logs::{log_node, log_position};

/// How long the metadata store may take to answer.
pub(crate) const METADATA_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before the generation is raised again.
const COVER_RETRY_DELAY: Duration = Duration::from_millis(100);

#[async_trait]
impl Assignments for Node {
    async fn assignment(&self, partition: PartitionId) -> Result<Assignment> {
        let (read, ()) =
            futures::future::try_join(self.own_record(partition), self.check_quarantine(partition)).await?;
        // Nothing is committed before the partition is open.
        self.cover(read.revision).await?;
        let record = read.record;
        self.page_servers.set(partition, &record);
        let serve_from = self.serve_from(&record);
        let now = boot_time();
        if now < serve_from {
            self.environment().sleep(serve_from - now).await;
        }
        let log = record.log();
        let durability = match log {
            LogKind::Shared => Durability::Shared,
            LogKind::Local => Durability::Local,
        };
        let start = Position { incarnation: self.incarnation(), slot: 0 };
        // Without a common store only the system partition commits to a shared log. It contains nothing,
        // and the logs of other nodes are not in this node's store.
        let has_records = |range: &&Range| range.log == LogKind::Shared && !self.is_private();
        let ranges = record.ranges.iter().filter(has_records).map(|range| ReplayRange {
            log_node: log_node(self.cluster_id(), range.node),
            from: log_position(range.from),
            // The open range covers this node's earlier incarnations, up to their seals.
            to: log_position(range.to.unwrap_or(start)),
        });
        let ranges = ranges.filter(|range| range.from < range.to).collect();
        Ok(Assignment { epoch: record.epoch, timeline: self.timeline(partition).await?, durability, ranges })
    }

    async fn inherited_from(&self) -> Result<Option<LogPosition>> {
        if self.is_private() {
            return Ok(None);
        }
        let read = timeout(METADATA_TIMEOUT, metadata::partitions(self.environment())).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        let own = read.iter().filter(|(_, read)| read.record.owner == self.id());
        let open = own.filter_map(|(_, read)| read.record.ranges.last());
        let shared = open.filter(|range| range.log == LogKind::Shared);
        Ok(shared.map(|range| range.from).min().map(log_position))
    }

    async fn uncovered(&self) -> Vec<PartitionId> {
        let mut uncovered = self.owners().uncovered(self.id(), self.incarnation());
        uncovered.retain(|id| !self.moving.lock().contains(id));
        uncovered
    }

    async fn drop_ranges(&self, covered: Vec<(PartitionId, u32)>) -> Result<()> {
        let dropping = DroppingRanges::begin(self, covered.iter().map(|(id, _)| *id));
        let from = Position { incarnation: self.incarnation(), slot: 0 };
        let of = |(partition, epoch)| Covered { partition, epoch, base: None, from };
        let covered = covered.into_iter().filter(|(id, _)| dropping.partitions.contains(id)).map(of);
        let covered: Vec<Covered> = covered.collect();
        let node = (self.id(), &self.begun().read);
        let dropped = truncation::drop_ranges(self.environment(), node, &covered);
        let dropped = timeout(METADATA_TIMEOUT, dropped).await.map_err(|_| metadata_unavailable())?;
        let dropped = dropped.map_err(|error| protocol_error(&error))?;
        if !dropped.is_empty() {
            // Their records have changed. They can be opened again while the metadata store is full.
            self.cover(Revision(u64::MAX)).await?;
        }
        tracing::debug!(
            databases = dropped.len(),
            "dropped the log ranges of earlier owners and incarnations"
        );
        Ok(())
    }
}

/// Partitions whose ranges are being dropped. Moves wait for them: a handover compares the record.
struct DroppingRanges<'a> {
    node: &'a Node,
    partitions: Vec<PartitionId>,
}

impl<'a> DroppingRanges<'a> {
    /// Begins with those of these partitions that are not being moved.
    fn begin(node: &'a Node, partitions: impl Iterator<Item = PartitionId>) -> Self {
        let mut dropping = node.dropping_ranges.lock();
        let moving = node.moving.lock();
        let partitions: Vec<_> = partitions.filter(|id| !moving.contains(id)).collect();
        dropping.extend(partitions.iter().copied());
        DroppingRanges { node, partitions }
    }
}

impl Drop for DroppingRanges<'_> {
    fn drop(&mut self) {
        let mut dropping = self.node.dropping_ranges.lock();
        for id in &self.partitions {
            dropping.remove(id);
        }
    }
}

impl Node {
    /// The record of a partition that this node owns, read linearizably.
    pub(crate) async fn own_record(
        &self,
        partition: PartitionId,
    ) -> Result<fulmar_cluster::Read<PartitionRecord>> {
        let read = timeout(METADATA_TIMEOUT, metadata::partition(self.environment(), partition)).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        let Some(read) = read else { return Err(missing(partition)) };
        match read.record.owner == self.id() {
            true => Ok(read),
            false => Err(moved(partition)),
        }
    }

    /// Raises the node's generation unless it covers this revision of a record, so that the node does
    /// not start with a metadata store that lacks it ([`generation`]).
    pub(crate) async fn cover(&self, revision: Revision) -> Result<()> {
        let is_covered = || revision.0 <= self.covered.load(Ordering::Acquire);
        // Without the lock: while the metadata store is full, another caller holds it.
        if is_covered() {
            return Ok(());
        }
        let covering = async {
            let lock = self.raising.clone().lock_owned().await;
            if is_covered() {
                return Ok(());
            }
            let (environment, id, begun) = (self.environment().clone(), self.id(), self.begun().clone());
            let covered = self.covered.clone();
            // A caller that is dropped must not leave a write of the stamp behind.
            let raising = self.runtime.spawn(async move {
                let raised = generation::raise(&environment, id, &begun).await;
                let raised = raised.map(|revision| covered.store(revision.0, Ordering::Release));
                drop(lock);
                raised
            });
            raising.await.unwrap_or_else(|error| Err(fulmar_cluster::Error::Directory(error.to_string())))
        };
        let covered = timeout(METADATA_TIMEOUT, covering).await.map_err(|_| metadata_unavailable())?;
        covered.map_err(|error| protocol_error(&error))
    }

    /// Like [`Node::cover`], but waits for a metadata store that is full or does not answer, for as long
    /// as this node has its lease.
    pub(crate) async fn cover_or_end(&self, revision: Revision) -> Result<()> {
        loop {
            match self.cover(revision).await {
                Err(_) if self.has_lease() => tokio::time::sleep(COVER_RETRY_DELAY).await,
                covered => return covered,
            }
        }
    }

    /// The partition's timeline in the catalog, which a restore by an earlier owner has changed.
    pub(crate) async fn timeline(&self, partition: PartitionId) -> Result<Timeline> {
        let caught_up = timeout(METADATA_TIMEOUT, self.catalog().catch_up()).await;
        caught_up.map_err(|_| metadata_unavailable())?.map_err(|error| {
            Error::new(sqlstate::CANNOT_CONNECT_NOW, error.to_string()).hint(error.remedy())
        })?;
        let record = self.catalog().partition(partition).ok_or_else(|| missing(partition))?;
        Ok(Timeline { lineage: record.lineage, epoch: record.epoch })
    }

    /// When the leases of earlier owners have run out.
    fn serve_from(&self, record: &PartitionRecord) -> Duration {
        let serve_from = self.begun().serve_from;
        if !record.by_failover {
            return serve_from;
        }
        let previous = record.ranges.len().checked_sub(2).and_then(|index| record.ranges.get(index));
        let observed = previous.and_then(|previous| {
            let incarnation = previous.to?.incarnation;
            self.owners().observed_ended(previous.node, incarnation)
        });
        let observed = observed.unwrap_or_else(boot_time);
        serve_from.max(observed + lease_wait(self.environment().rules()))
    }
}

/// The error of a request for a partition that another node owns.
pub(crate) fn moved(partition: PartitionId) -> Error {
    Error::new(sqlstate::PARTITION_MOVED, format!("partition {partition} has moved to another node"))
}

/// The error of a request for a partition that does not exist.
pub(crate) fn missing(partition: PartitionId) -> Error {
    Error::new(sqlstate::INVALID_CATALOG_NAME, format!("partition {partition} does not exist"))
}

pub(crate) fn metadata_unavailable() -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, "the metadata store does not answer").hint(
        "Check that etcd has a majority, or that the node with the embedded metadata store runs, and retry.",
    )
}

pub(crate) fn protocol_error(error: &fulmar_cluster::Error) -> Error {
    match error {
        fulmar_cluster::Error::Fenced { .. } => {
            Error::new(sqlstate::CANNOT_CONNECT_NOW, error.to_string()).hint("Retry: the node is restarting.")
        }
        fulmar_cluster::Error::OutOfSpace { cause, remedy } => {
            Error::new(sqlstate::DISK_FULL, cause.clone()).hint(*remedy)
        }
        error => Error::new(sqlstate::INTERNAL, error.to_string()),
    }
}

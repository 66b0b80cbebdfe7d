//! Administration of partitions, which their owners carry out: branches, restores, and changes of
//! durability. See [`fulmar_cluster::restore`] and [`fulmar_cluster::durability`] for what happens in
//! a crash.
//!
//! A request is repeated if its answer is lost, possibly to another owner. So each says what it has
//! to find: a branch is made once per id, a restore begins at the timeline that the caller has seen,
//! and a durability is set, not toggled.

use std::time::Duration;

use fulmar_cluster::{LogKind, ManifestName, NodeId, PartitionRecord, Position, Read, durability, restore};
use fulmar_engine::{DecisionError, Error, Result, Timeline, sqlstate};
use fulmar_meta::MetaError;
use fulmar_pages::{Durability, PartitionId};
use fulmar_store::failpoint;
use tokio::time::{Instant, sleep};

use crate::Node;
use crate::assignments::{metadata_unavailable, moved, protocol_error};
use crate::logs::position;
use crate::messages::{Answer, Request};
use crate::migrations::check_pulled;
use crate::moves::Moving;
use crate::partitions::Decide;

/// How long a branch, a restore or a change of durability may take.
pub(crate) const ADMINISTRATION_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a request waits for another one on the same partition.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a node may take to count its sessions.
const SESSIONS_TIMEOUT: Duration = Duration::from_secs(5);

/// The log of a durability.
pub(crate) fn log_kind(durability: Durability) -> LogKind {
    match durability {
        Durability::Shared => LogKind::Shared,
        Durability::Local => LogKind::Local,
    }
}

impl Node {
    /// Begins a change of a partition, when no other one is in progress: an earlier attempt of the
    /// same request may be.
    pub(crate) async fn begin_change(&self, partition: PartitionId) -> Result<Moving<'_>> {
        let deadline = Instant::now() + BUSY_TIMEOUT;
        loop {
            match self.begin_move(partition) {
                Err(_) if Instant::now() < deadline => sleep(BUSY_POLL_INTERVAL).await,
                begun => return begun,
            }
        }
    }

    /// Stores a partition of this node as the first manifest of another one.
    pub(crate) async fn branch_own(
        &self,
        source: PartitionId,
        branch: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<()> {
        if !self.is_private() {
            self.own_record(source).await?;
            return self.partitions()?.branch(source, branch, at_unix_ms).await;
        }
        // The branch is in this node's store, so the source must not move before the branch has an owner.
        let _moving = self.begin_change(source).await?;
        check_pulled(&self.own_record(source).await?.record)?;
        self.partitions()?.branch(source, branch, at_unix_ms).await?;
        self.record_owner(branch, Durability::Local, true).await
    }

    /// Restores a partition of this node that is at the timeline of the epoch `from`. The restored
    /// one has the lineage `lineage`.
    pub(crate) async fn restore_own(
        &self,
        partition: PartitionId,
        at_unix_ms: u64,
        from: u32,
        lineage: u64,
    ) -> Result<()> {
        let _moving = self.begin_change(partition).await?;
        let read = self.own_record(partition).await?;
        check_pulled(&read.record)?;
        let timeline = self.timeline(partition).await?;
        if timeline.epoch != from {
            // An earlier attempt of this request, or another restore.
            return if timeline.lineage == lineage { Ok(()) } else { Err(restored_concurrently()) };
        }
        let partitions = self.partitions()?.clone();
        let decide: Decide<'_> =
            Box::new(|timeline| Box::pin(self.decide_restore(partition, &read, timeline)));
        partitions.restore(partition, at_unix_ms, lineage, decide).await?;
        partitions.end_sessions(partition);
        Ok(())
    }

    /// Makes the stored version of a new timeline the contents of a partition.
    async fn decide_restore(
        &self,
        partition: PartitionId,
        read: &Read<PartitionRecord>,
        timeline: Timeline,
    ) -> std::result::Result<(), DecisionError> {
        let log = read.record.log();
        let shared = self.partitions().map_err(DecisionError::Refused)?.log_position();
        let start = self.change_position(log, position(shared));
        let draft = self.manifest(read.record.epoch + 1, start, true);
        let catalog = |transaction| {
            let Timeline { lineage, epoch } = timeline;
            let planned = self.catalog().plan_timeline(transaction, partition, lineage, epoch);
            planned.map_err(|error| rejected(&error))
        };
        let node = (self.id(), &self.begun().read);
        match restore::change(self.environment(), partition, read, node, draft, (log, start), catalog).await {
            // The partition stays open, so its next commits are of the new epoch.
            Ok(read) => self.cover_or_end(read.revision).await.map_err(|error| {
                self.fence(error.message());
                DecisionError::InDoubt(moved(partition))
            }),
            Err(fulmar_cluster::Error::Rejected(_)) => Err(DecisionError::Refused(restored_concurrently())),
            Err(error) => {
                self.fence(&error.to_string());
                // The caller asks the next owner, which finds the lineage, or restores.
                Err(DecisionError::InDoubt(moved(partition)))
            }
        }
    }

    /// Changes the log of a partition of this node. Its sessions wait meanwhile.
    pub(crate) async fn set_own_durability(
        &self,
        partition: PartitionId,
        durability: Durability,
    ) -> Result<()> {
        let _moving = self.begin_change(partition).await?;
        let read = self.own_record(partition).await?;
        let log = log_kind(durability);
        if read.record.log() == log {
            return Ok(());
        }
        if self.is_private() {
            return Err(Error::new(
                sqlstate::FEATURE_NOT_SUPPORTED,
                "durability cannot be changed in a cluster whose nodes have stores of their own",
            )
            .hint("Start the nodes of a cluster with --store, a store that all of them reach."));
        }
        let partitions = self.partitions()?.clone();
        if !read.record.is_covered(self.incarnation()) {
            // The new record drops earlier ranges.
            partitions.cover(partition).await?;
        }
        let released = match partitions.release_to_change(partition).await {
            Ok(released) => position(released),
            Err(error) => {
                self.take_back(partition).await?;
                return Err(error);
            }
        };
        failpoint::hit(failpoint::DURABILITY_AFTER_FLUSH);
        let start = self.change_position(log, released);
        let manifest = self.manifest(read.record.epoch, released, false);
        let catalog = |transaction| {
            let planned = self.catalog().plan_durability(transaction, partition, durability);
            planned.map_err(|error| rejected(&error))
        };
        let node = (self.id(), &self.begun().read);
        let changed =
            durability::change(self.environment(), partition, &read, node, manifest, (log, start), catalog);
        match changed.await {
            Ok(_) => {
                failpoint::hit(failpoint::DURABILITY_AFTER_RECORD);
                self.take_back(partition).await
            }
            Err(fulmar_cluster::Error::Rejected(cause)) => {
                self.take_back(partition).await?;
                Err(Error::new(sqlstate::OBJECT_IN_USE, cause).hint("Check that the database still exists."))
            }
            Err(error) => {
                self.fence(&error.to_string());
                Err(moved(partition))
            }
        }
    }

    /// Where the range of a new epoch begins in this node's log. Nothing reads positions of local
    /// logs: only their own node reads them, and knows by the version what it needs.
    fn change_position(&self, log: LogKind, shared: Position) -> Position {
        match log {
            LogKind::Shared => shared,
            LogKind::Local => Position { incarnation: self.incarnation(), slot: 0 },
        }
    }

    fn manifest(&self, epoch: u32, covered: Position, is_draft: bool) -> ManifestName {
        let (incarnation, covered) = (self.incarnation(), covered.slot);
        ManifestName { epoch, incarnation, covered, node: self.id(), is_draft }
    }

    /// Requests a restore from the owner.
    pub(crate) async fn request_restore(&self, partition: PartitionId, at_unix_ms: u64) -> Result<()> {
        let from = self.timeline(partition).await?.epoch;
        let lineage = self.partitions()?.new_lineage();
        let request = || Request::Restore { partition: partition.0, at_unix_ms, from, lineage };
        self.ask_owner(partition, ADMINISTRATION_TIMEOUT, request).await.map(drop)
    }

    /// Counts the clients of a partition, at all nodes that may have some.
    pub(crate) async fn count_sessions(&self, partition: PartitionId) -> Result<u64> {
        let mut total = 0;
        for known in self.owners().nodes() {
            if known.id == self.id() {
                total += self.partitions()?.sessions(partition);
            } else if known.alive().is_some() {
                let request = Request::Sessions { partition: partition.0 };
                let answer = tokio::time::timeout(SESSIONS_TIMEOUT, self.call(known.id, request)).await;
                match answer {
                    Ok(Ok(Ok(Answer::Sessions { count }))) => total += count,
                    _ => return Err(uncounted(&known.name)),
                }
            }
        }
        Ok(total)
    }

    /// The error for a partition that no other node can take over from its node, if that is down.
    pub(crate) fn unavailable(&self, owner: NodeId, log: LogKind) -> Option<Error> {
        if log == LogKind::Shared || owner == self.id() {
            return None;
        }
        let known = self.owners().node(owner)?;
        if known.alive().is_some() {
            return None;
        }
        let message = format!("the database is not available while node \"{}\" is down", known.name);
        Some(
            Error::new(sqlstate::CANNOT_CONNECT_NOW, message)
                .detail(match self.is_private() {
                    true => "The database is in the store of that node.",
                    false => "The database has durability = 'local': its last commits are only on that node.",
                })
                .hint(format!("Start node \"{}\" with its own data directory.", known.name)),
        )
    }

    /// Like [`Node::unavailable`], for the owner of a record.
    pub(crate) fn unavailable_owner(&self, record: &PartitionRecord) -> Option<Error> {
        self.unavailable(record.owner, record.log())
    }

    /// The partitions that commit to the local log of this node, read linearizably: the only ones
    /// that need its records.
    pub async fn local_partitions(&self) -> Result<Vec<PartitionId>> {
        let all = fulmar_cluster::metadata::partitions(self.environment());
        let all = tokio::time::timeout(ADMINISTRATION_TIMEOUT, all).await;
        let all = all.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        let own = all
            .into_iter()
            .filter(|(_, read)| read.record.owner == self.id() && read.record.log() == LogKind::Local);
        Ok(own.map(|(id, _)| id).collect())
    }
}

fn rejected(error: &MetaError) -> fulmar_cluster::Error {
    fulmar_cluster::Error::Rejected(error.to_string())
}

fn restored_concurrently() -> Error {
    Error::new(sqlstate::OBJECT_IN_USE, "the database was restored concurrently")
        .hint("Check its contents, and repeat the restore if needed.")
}

fn uncounted(node: &str) -> Error {
    let message = format!("cannot find out whether node \"{node}\" has sessions of the database");
    Error::new(sqlstate::OBJECT_IN_USE, message)
        .detail("The node does not answer.")
        .hint("Retry, or use DROP DATABASE ... WITH (FORCE).")
}

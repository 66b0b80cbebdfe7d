//! Handing partitions over to other nodes.
//!
//! ```text
//!   release:   open, flush                      the partition is served
//!              close                            commits, statements and waits end with FM001
//!              release record durable, flush    everything is in a manifest, the log's range is empty
//!   then:      give_up                          the destination owns it
//!              take_back                        this node still owns it: the next access opens it
//! ```
//!
//! A change of durability, and a quarantine, release a partition too, and take it back. They need no
//! release record, because the owner stays.
//!
//! A released partition object is closed for good. If this node takes the partition back, it is
//! opened from its manifest like any other. If a release fails after the close, the object and its
//! unflushed changes stay, the partition is refused, and the background flush continues. Another
//! release, or taking it back, completes the flush first.
//!
//! No commit follows the release record: commits are appended under the commit lock, under which the
//! partition was closed before. No manifest follows: the move ends under the flush lock, in a state
//! in which no put is uncertain, and flushes and compactions check that under the flush lock.
//! Answers of statements that began before the close may be sent later. They are of commits before
//! the release, or of reads at snapshots before it, and overlap with the handover.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{CachedPage, CarriedSnapshots, Partition, PendingMove, log_error};
use fulmar_pages::record::RecordHeader;
use fulmar_pages::{PageNo, PartitionId, RecordBuilder, RecordKind, Timeline, Version};
use fulmar_sqlite::{Error, Result, TransactionOutcome, sqlstate};
use fulmar_store::{LogError, LogPosition, Lsn, Urgency};
use tokio::time::{Instant, timeout};

use super::carried;
use super::member::{Member, Move, shared_log};
use crate::engine::Engine;

/// Why a partition is released.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Another node will own it.
    HandOver(Closing),
    /// This node changes its record.
    Change,
}

/// How a partition is closed for a handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// Its changes are flushed first.
    Prepared,
    /// Nothing is flushed first.
    Immediate,
    /// Its changes are flushed first. No transaction is open, so no snapshots are carried over.
    Exclusive,
}

/// A partition that was released.
#[derive(Clone, Copy, Debug)]
pub struct Released {
    /// The shared log's position after the release. All records before it are in manifests. 0 if the
    /// partition commits to the local log.
    pub end: LogPosition,
    /// When the partition stopped accepting statements.
    pub closed: Instant,
}

/// The pages that a partition has in memory.
#[derive(Clone, Debug)]
pub struct CachedPages {
    /// The number of the newest version in the store.
    pub stored: u64,
    /// The pages whose current version is in memory and in the store, hottest first.
    pub pages: Vec<CachedPage>,
    /// The size of the database in pages.
    pub page_count: u32,
}

/// How long a release waits until its record is durable.
const DURABLE_TIMEOUT: Duration = Duration::from_secs(10);

impl Engine {
    pub(super) fn require_member(&self) -> Result<&Arc<Member>> {
        let not_member = || {
            Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "node is not part of a cluster")
                .hint("Start the node with --node, --rpc and --meta.")
        };
        self.member().ok_or_else(not_member)
    }

    /// Releases a partition for a handover: makes all its commits part of a manifest, and writes a
    /// durable release record. Returns the log position after the record; all records before that
    /// position are in manifests. From then on this node neither serves nor changes the partition,
    /// until [`Engine::take_back`] or [`Engine::give_up`]. Statements and transactions get
    /// [`sqlstate::PARTITION_MOVED`].
    ///
    /// A repeated call returns the same result. After an error the partition is either still
    /// served, or refused until one of the three functions succeeds. The work continues if the
    /// future is dropped.
    pub async fn release(self: &Arc<Self>, id: PartitionId, closing: Closing) -> Result<Released> {
        self.release_for(id, Purpose::HandOver(closing)).await
    }

    /// Like [`Engine::release`], for a change that this node makes itself, of the partition's log for
    /// example: without a release record, and also for partitions with local durability. Returns the
    /// position of the shared log, before which everything is durable. [`Engine::take_back`] follows.
    pub async fn release_to_change(self: &Arc<Self>, id: PartitionId) -> Result<LogPosition> {
        Ok(self.release_for(id, Purpose::Change).await?.end)
    }

    async fn release_for(self: &Arc<Self>, id: PartitionId, purpose: Purpose) -> Result<Released> {
        let member = self.require_member()?.clone();
        let moving = member.moves.lock().entry(id).or_default().clone();
        let engine = self.clone();
        self.run_to_completion(async move {
            let mut released = moving.released.lock().await;
            if let Some(known) = *released {
                return Ok(known);
            }
            let result = engine.release_partition(&member, &moving, (id, purpose)).await;
            match &result {
                Ok(first) => *released = Some(*first),
                // The partition is still served.
                Err(_) if engine.partitions().open_one(id).is_none_or(|open| !open.has_moved()) => {
                    member.moves.lock().remove(&id);
                }
                Err(_) => {}
            }
            result
        })
        .await
    }

    async fn release_partition(
        &self,
        member: &Member,
        moving: &Move,
        (id, purpose): (PartitionId, Purpose),
    ) -> Result<Released> {
        let partition = match self.partitions().open_one(id).filter(|open| open.has_moved()) {
            // An earlier release has failed.
            Some(partition) => partition,
            None => {
                // It may be refused since an earlier release. This node still owns it.
                moving.accept();
                self.partitions().partition(id).await?
            }
        };
        let log = partition.log.clone();
        if !log.is_shared() && member.has_common_store() && purpose != Purpose::Change {
            return Err(Error::new(
                sqlstate::FEATURE_NOT_SUPPORTED,
                "cannot move a database with durability = 'local' to another node",
            )
            .hint("Set its durability to 'shared' first."));
        }
        if !partition.has_moved() {
            if purpose != Purpose::HandOver(Closing::Immediate) {
                // Most changes are flushed while the partition is still served.
                self.maintenance().flush(vec![partition.clone()]).await?;
            }
            if member.has_common_store() {
                self.maintenance().store_hot_pages_of(&partition);
            }
            moving.refuse();
            if !partition.close_to_move() {
                return Err(partition.closed_error());
            }
        }
        let closed = Instant::now();
        self.maintenance().forget_compaction(id);
        partition.close_idle();
        if purpose == Purpose::Change {
            // The flush has made every version durable and part of a manifest.
            self.flush_moving(member, &partition).await?;
            let position = shared_log(self.node())?.position();
            self.partitions().forget_open(&partition);
            // The local log need not keep its records any more.
            self.partitions().forget_replay(id);
            return Ok(Released { end: position, closed });
        }
        let end = append_release(&partition).await?;
        let durable = async {
            let waited = timeout(DURABLE_TIMEOUT, log.wait_durable(end)).await;
            waited
                .unwrap_or_else(|_| Err(LogError::Unreachable { cause: "timed out".into() }))
                .map_err(log_error)
        };
        let flush = self.flush_moving(member, &partition);
        let collect = async {
            match purpose {
                Purpose::HandOver(Closing::Exclusive) => CarriedSnapshots::default(),
                _ => carried::collect(&partition).await,
            }
        };
        let (durable, flushed, mut snapshots) = tokio::join!(durable, flush, collect);
        durable.and(flushed)?;
        snapshots.remove_ended(&partition);
        *moving.snapshots.lock() = snapshots;
        let position = log.position();
        self.partitions().forget_open(&partition);
        self.partitions().forget_replay(id);
        Ok(Released { end: position, closed })
    }

    /// Announces that a partition is about to move: no COPY begins until the result is dropped, and no
    /// transaction if the move is exclusive.
    pub fn announce_move(&self, id: PartitionId, is_exclusive: bool) -> PendingMove {
        PendingMove::new(self.partitions().counted(id), is_exclusive)
    }

    /// Flushes a partition of this node, and lists the pages that it has in memory: the source's part
    /// of Albatross.
    pub async fn flush_and_list(&self, id: PartitionId) -> Result<CachedPages> {
        let partition = self.partitions().partition(id).await?;
        partition.check_not_moved()?;
        self.maintenance().flush(vec![partition.clone()]).await?;
        Ok(CachedPages {
            stored: partition.manifest_number(),
            pages: partition.cached_pages(),
            page_count: partition.current().page_count,
        })
    }

    /// Reads pages of a partition that is about to be moved to this node, as of its newest version in
    /// the store: the destination's part of Albatross. Returns how many it has read.
    pub async fn warm(&self, id: PartitionId, timeline: Timeline, pages: &[PageNo]) -> Result<u64> {
        let member = self.require_member()?;
        let stats = self.partitions().counted(id);
        match member.arrivals.prepare(self.node(), stats, id, timeline).await? {
            Some(arrival) => self.maintenance().warm(&arrival, pages).await,
            None => Ok(0),
        }
    }

    /// Drops the pages of a partition that is not moved to this node after all.
    pub fn forget_arrival(&self, id: PartitionId) {
        if let Some(member) = self.member() {
            drop(member.arrivals.take(id));
            member.snapshots.forget(id);
        }
    }

    /// Opens a partition that was moved to this node, before the first statement needs it.
    pub async fn open_arrived(&self, id: PartitionId) -> Result<()> {
        self.partitions().partition(id).await?;
        match self.require_member()?.has_common_store() {
            true => Ok(()),
            // The restore points of an earlier stay lack what was committed since.
            false => self.maintenance().delete_older_manifests(id).await,
        }
    }

    /// Flushes a closed partition, together with others that move at the same time.
    async fn flush_moving(&self, member: &Member, partition: &Arc<Partition>) -> Result<()> {
        member.to_flush.lock().push(partition.clone());
        let _one = member.flushing.lock().await;
        let all = std::mem::take(&mut *member.to_flush.lock());
        // If an earlier caller has flushed this partition, there may be others.
        let flushed = if all.is_empty() { Ok(()) } else { self.maintenance().flush_to_move(&all).await };
        match (partition.is_gone(), flushed) {
            (true, _) => Ok(()),
            (false, Err(error)) => Err(error),
            (false, Ok(())) => self.maintenance().flush_to_move(std::slice::from_ref(partition)).await.and(
                partition.is_gone().then_some(()).ok_or_else(|| {
                    Error::new(sqlstate::IO_ERROR, "could not flush the database before moving it")
                        .hint("Retry. If the error persists, check the object store.")
                }),
            ),
        }
    }

    /// Serves a released partition again, after a handover that did not take place. Does nothing if
    /// it is not released. After an error it is still refused.
    pub async fn take_back(self: &Arc<Self>, id: PartitionId) -> Result<()> {
        let member = self.require_member()?.clone();
        let Some(moving) = member.moves.lock().get(&id).cloned() else { return Ok(()) };
        let engine = self.clone();
        self.run_to_completion(async move {
            let _release = moving.released.lock().await;
            // The next access opens the partition from its manifest, which must contain everything.
            if let Some(open) = engine.partitions().open_one(id).filter(|open| open.has_moved()) {
                engine.flush_moving(&member, &open).await?;
                engine.partitions().forget_open(&open);
            }
            member.moves.lock().remove(&id);
            Ok(())
        })
        .await
    }

    /// Forgets a partition that another node owns now. Its sessions get
    /// [`sqlstate::PARTITION_MOVED`] until it is assigned to this node again.
    pub fn give_up(&self, id: PartitionId) {
        let timeline = self.partitions().timeline(id);
        self.partitions().give_up(id);
        if self.member().is_some_and(|member| !member.has_common_store()) {
            // The collector must not take what is left of it for a restore that has failed.
            self.partitions().learn_timeline(id, timeline);
        }
        self.maintenance().forget_compaction(id);
        if let Some(member) = self.member() {
            member.forget(id);
        }
    }

    /// The position of a member's shared log, before which everything is durable.
    pub fn log_position(&self) -> LogPosition {
        shared_log(self.node()).map(|log| log.position()).unwrap_or_default()
    }

    /// Completes when another node has closed this node's shared log: the incarnation has ended, and
    /// none of its commits succeeds any more.
    pub async fn fenced(&self) {
        match shared_log(self.node()) {
            Ok(log) => drop(log.wait_fenced().await),
            Err(_) => std::future::pending().await,
        }
    }

    /// The outcome of a transaction that may have committed to a partition of this node. If it has
    /// not, it never will: that is durable when this returns.
    pub async fn outcome(&self, id: PartitionId, transaction: u64) -> Result<TransactionOutcome> {
        let partition = self.partitions().partition(id).await?;
        partition.check_not_taken_over()?;
        partition.decide_outcome(transaction).await
    }

    /// Returns a new transaction id, for [`Session::set_transaction_id`](crate::Session::set_transaction_id).
    /// It is unique in the cluster.
    pub fn new_transaction_id(&self) -> u64 {
        self.node().clock.transaction_id()
    }

    /// Runs a future as a task, so that it completes even if the caller is dropped: an interrupted
    /// flush would lose track of changed pages.
    async fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let task = self.node().spill.runtime().spawn(work);
        task.await.unwrap_or_else(|cause| {
            Err(Error::new(sqlstate::INTERNAL, format!("panic while moving a partition: {cause}")))
        })
    }
}

/// Appends a release record, and returns its end. The partition is closed.
async fn append_release(partition: &Partition) -> Result<Lsn> {
    let current = partition.current();
    let mut record = RecordBuilder::default();
    record.begin(&RecordHeader {
        kind: RecordKind::Release,
        partition: partition.id,
        version: Version { lineage: partition.lineage, epoch: partition.epoch, number: current.number },
        transaction: 0,
        timestamp: partition.node.clock.tick(),
        page_count: current.page_count,
        previous: Some(current.number),
    });
    let body = record.finish();
    loop {
        match partition.log.append(body, Urgency::Immediate) {
            Err(LogError::Busy) => {
                let space = partition.log.wait_for_space(body.len(), Urgency::Immediate).await;
                space.map_err(log_error)?;
            }
            appended => return appended.map_err(log_error),
        }
    }
}

//! Read replica: reads the partitions of another process, the primary, from its newest manifests
//! and its log.
//!
//! ```text
//!   a transaction begins --> age of the last log poll?
//!                              | within its staleness bound        | older
//!                              |   (beyond 200 ms the next poll    v
//!                              |    starts meanwhile)             wait for a newer poll
//!                              v                                   |
//!   the partition: open at its newest manifest <-------------------'
//!     --> apply the log's records up to the end found by the poll
//!     --> pin that version: the snapshot is as old as the poll
//! ```
//!
//! Polls happen only on demand: no task polls the log while no session reads. The background task
//! only keeps open partitions bounded ([`round`]).
//!
//! # Age of a snapshot
//! A log poll finds every commit acknowledged before it began, either in the log or in the newest
//! manifests ([`LogTail`]). A partition is opened from a manifest that is listed *after* the poll,
//! so no commit is between the two; it then continues without a gap, or is reopened. Its snapshot
//! therefore contains every commit acknowledged before the poll began. That time is the snapshot's
//! age, even if nothing has been committed for hours. (The snapshot may contain more, if the
//! manifest is newer.)
//!
//! The set of partitions, their durability and their epochs come from the catalog that the primary
//! publishes, which is one or two seconds old ([`CatalogStateSource`]). A restore is also visible
//! in the log, with the first commit after it; the replica then answers nothing until the catalog
//! shows it too.
//!
//! # In a cluster
//! Each partition has an owner, and each node a log. A replica follows the metadata store, from
//! which it knows the owners, and polls the logs of those nodes that own what its sessions read
//! ([`LogFollower`]). Every poll first waits until the copy of the metadata is up to date
//! ([`Ownerships::catch_up`]). A commit that was acknowledged before the poll began is therefore in
//! the log of the owner that the copy shows afterwards, or in an earlier range of the partition's
//! record, or in a manifest.
//!
//! A partition is opened for one epoch of its ownership ([`LogSource`]): at the newest manifest, with
//! the records of its ranges in sealed logs, and then along the owner's current log. When the record
//! shows another epoch (a move, a failover, a restore), the partition is opened again, after the
//! change. Nothing older is shown then: everything durable of earlier epochs is in the manifests and
//! in the ranges, and an epoch is followed in the order of its log. Commits of a fenced owner are
//! behind the seal of its log, or behind the end of its range, and are never read.
//!
//! # Partitions with local durability
//! The log of a partition with `local` durability is on the primary's disk. The replica reads such
//! a partition at its newest manifest, and its age is the manifest's.
//!
//! # Deletions by the primary
//! The primary deletes log objects that manifests cover, and segments that no manifest of the
//! history references. If a replica still needs one, its partition is *stale*: it is
//! reopened, and a running transaction fails with 40001.

mod follower;
mod opening;
mod reading;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_maintenance::Pins;
use fulmar_mvcc::{LogSource, Node, Partition, dropped_error};
use fulmar_pages::{Durability, PartitionId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{LogPosition, LogTail, Reliable, SealedLogs};
use parking_lot::Mutex;

use crate::membership::ReplayRange;
use follower::{LogFollower, LogPoll};
pub(crate) use reading::round;

/// How long a session waits for a log poll, or for the catalog to show a restore.
pub(super) const POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a partition is reopened for one transaction.
pub(super) const MAX_OPENINGS: u32 = 10;

/// How often unused sealed logs are forgotten.
const FORGET_INTERVAL_MS: u64 = 60_000;

/// The state of a partition in the primary's catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogState {
    /// Its lineage and epoch.
    pub timeline: Timeline,
    /// The durability of its commits.
    pub durability: Durability,
}

/// Returns the state of a partition; None if it does not exist.
pub type CatalogStateSource = Arc<dyn Fn(PartitionId) -> Option<CatalogState> + Send + Sync>;

/// The primary of a replica.
#[derive(Clone)]
pub struct Primary {
    /// Identifies its log in the store, without a cluster.
    pub node_id: u128,
    /// Reads its catalog.
    pub catalog_state: CatalogStateSource,
    /// In a cluster, the owners of partitions.
    pub ownerships: Option<Arc<dyn Ownerships>>,
}

/// The owners of a cluster's partitions: a copy in memory that follows the metadata store.
#[async_trait]
pub trait Ownerships: Send + Sync + 'static {
    /// Waits until this copy and the catalog include every change that was committed before the
    /// call.
    async fn catch_up(&self) -> Result<()>;

    /// The ownership of a partition, if it has an owner.
    fn ownership(&self, id: PartitionId) -> Option<Ownership>;
}

/// Where the records of a partition are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The owner's logs, and the epoch.
    pub source: LogSource,
    /// An incarnation of the owner. Its logs of earlier ones are sealed.
    pub incarnation: u64,
    /// Where the records of the epoch begin.
    pub from: LogPosition,
    /// The ranges of earlier epochs that may contain records since the newest manifest, oldest
    /// first.
    pub earlier: Vec<ReplayRange>,
}

/// A replica's state.
pub(crate) struct Replica {
    node_id: u128,
    catalog_state: CatalogStateSource,
    ownerships: Option<Arc<dyn Ownerships>>,
    store: Reliable,
    /// Memory for the objects of each log.
    log_bytes: u64,
    /// The logs that were read, by their node.
    followers: Mutex<BTreeMap<u128, Arc<LogFollower>>>,
    sealed: SealedLogs,
    /// When unused sealed logs were last forgotten (monotonic milliseconds).
    forgot_ms: AtomicU64,
    /// Number of partitions reopened because they were stale or changed in the catalog.
    pub(super) resyncs: AtomicU64,
    pub(crate) pins: Arc<Pins>,
}

/// A partition to be read, and its age.
pub(crate) struct ReplicaSnapshot {
    pub partition: Arc<Partition>,
    /// The snapshot contains every commit acknowledged before this time (milliseconds since 1970).
    /// None if the partition has no manifest.
    pub unix_ms: Option<u64>,
}

/// Statistics of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStatistics {
    /// Polls of the primary's log.
    pub log_polls: u64,
    /// Age of the last successful poll in milliseconds; None if there was none. Grows while no
    /// session reads.
    pub age_ms: Option<u64>,
    /// Whether the last poll failed.
    pub is_failing: bool,
    /// Partitions reopened because they were stale or changed in the catalog.
    pub resyncs: u64,
}

impl Replica {
    pub(crate) fn new(primary: Primary, node: &Node) -> Arc<Self> {
        // The same share as for a primary's unwritten log; for each node of a cluster, half of it.
        let divisor = if primary.ownerships.is_some() { 32 } else { 16 };
        let log_bytes = (node.memory.limit_bytes() / divisor).clamp(8 << 20, 64 << 20);
        let store = node.store.store().clone();
        Arc::new(Replica {
            node_id: primary.node_id,
            catalog_state: primary.catalog_state,
            ownerships: primary.ownerships,
            sealed: SealedLogs::new(store.clone(), log_bytes),
            store,
            log_bytes,
            followers: Mutex::default(),
            forgot_ms: AtomicU64::new(0),
            resyncs: AtomicU64::new(0),
            pins: Arc::default(),
        })
    }

    pub(crate) fn catalog_state(&self, id: PartitionId) -> Option<CatalogState> {
        (self.catalog_state)(id)
    }

    /// Where the records of a partition are, if it has an owner.
    pub(super) fn ownership(&self, id: PartitionId) -> Option<Ownership> {
        match &self.ownerships {
            Some(ownerships) => ownerships.ownership(id),
            None => Some(Ownership {
                source: LogSource { log_node: self.node_id, epoch: 0 },
                incarnation: 0,
                from: LogPosition::default(),
                earlier: Vec::new(),
            }),
        }
    }

    /// The follower of the logs of an owner.
    fn follower(&self, ownership: &Ownership) -> Arc<LogFollower> {
        let (node, since) = (ownership.source.log_node, ownership.incarnation);
        let new = || {
            let tail = match &self.ownerships {
                Some(_) => LogTail::since(self.store.clone(), node, since, self.log_bytes),
                None => LogTail::new(self.store.clone(), node, self.log_bytes),
            };
            Arc::new(LogFollower::new(node, since, tail, self.ownerships.clone()))
        };
        self.followers.lock().entry(node).or_insert_with(new).clone()
    }

    /// Polls the log of a partition's owner. The poll began at most `staleness` ago (None: at any
    /// time), and the owner is that of a later time.
    async fn poll_owner(
        &self,
        node: &Arc<Node>,
        id: PartitionId,
        staleness: Option<Duration>,
    ) -> Result<(Arc<LogFollower>, LogPoll)> {
        for _ in 0..MAX_OPENINGS {
            let Some(ownership) = self.ownership(id) else {
                self.catch_up().await?;
                match self.catalog_state(id) {
                    Some(_) if self.ownership(id).is_none() => return Err(no_owner()),
                    Some(_) => continue,
                    None => return Err(dropped_error()),
                }
            };
            let follower = self.follower(&ownership);
            let poll = follower.end(node, staleness).await?;
            if self.ownership(id).is_some_and(|now| now.source.log_node == follower.log_node) {
                return Ok((follower, poll));
            }
        }
        Err(deleted_too_fast())
    }

    /// Waits until the ownerships are up to date.
    pub(super) async fn catch_up(&self) -> Result<()> {
        match &self.ownerships {
            Some(ownerships) => ownerships.catch_up().await,
            None => Ok(()),
        }
    }

    /// Frees the memory of sealed logs that were not read for a minute.
    pub(super) fn forget_unused_logs(&self, now_ms: u64) {
        let forgot_ms = self.forgot_ms.load(Ordering::Relaxed);
        if now_ms.saturating_sub(forgot_ms) >= FORGET_INTERVAL_MS {
            self.forgot_ms.store(now_ms, Ordering::Relaxed);
            self.sealed.forget_unused();
        }
    }

    /// Whether the logs were readable at the last poll of each.
    pub(crate) fn is_healthy(&self) -> bool {
        !self.followers.lock().values().any(|follower| follower.is_failing())
    }

    pub(super) fn statistics(&self, node: &Node) -> ReplicaStatistics {
        let followers = self.followers.lock();
        let all: Vec<_> = followers.values().map(|follower| follower.statistics()).collect();
        drop(followers);
        let polled_ms = all.iter().filter_map(|of| of.polled_ms).max();
        ReplicaStatistics {
            log_polls: all.iter().map(|of| of.polls).sum(),
            age_ms: polled_ms.map(|at_ms| node.clock.monotonic_ms().saturating_sub(at_ms)),
            is_failing: all.iter().any(|of| of.is_failing),
            resyncs: self.resyncs.load(Ordering::Relaxed),
        }
    }
}

fn no_owner() -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database has no owner in the cluster yet")
        .hint("Retry: its creation may be in progress.")
}

fn deleted_too_fast() -> Error {
    let message = "log and manifests of the database are deleted faster than the replica can read them";
    Error::new(sqlstate::IO_ERROR, message)
        .hint("Retry the transaction. If the error persists, check the latency of the object store.")
}

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
//! # Partitions with local durability
//! The log of a partition with `local` durability is on the primary's disk. The replica reads such
//! a partition at its newest manifest, and its age is the manifest's.
//!
//! # Deletions by the primary
//! The primary deletes log objects that manifests cover, and segments that no manifest of the
//! history references. If a replica still needs one, its partition is *stale*: it is
//! reopened, and a running transaction fails with 40001.

mod opening;
mod reading;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_maintenance::Pins;
use fulmar_mvcc::{Node, Partition, log_unreadable};
use fulmar_pages::{Durability, PartitionId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{LogEnd, LogTail};
use tokio::sync::watch;
use tokio::time::timeout;

pub(crate) use reading::round;

/// Age of the last log poll beyond which a read starts another one.
const POLL_INTERVAL_MS: u64 = 200;
/// How long a session waits for a log poll, or for the catalog to show a restore.
pub(super) const POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a partition is reopened for one transaction.
pub(super) const MAX_OPENINGS: u32 = 10;

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
    /// Identifies its log in the store.
    pub node_id: u128,
    /// Reads its catalog.
    pub catalog_state: CatalogStateSource,
}

/// A replica's state.
pub(crate) struct Replica {
    tail: LogTail,
    catalog_state: CatalogStateSource,
    /// Number of log polls begun.
    begun: AtomicU64,
    polling: AtomicBool,
    last: watch::Sender<LastPoll>,
    /// Number of partitions reopened because they were stale or changed in the catalog.
    pub(super) resyncs: AtomicU64,
    pub(crate) pins: Arc<Pins>,
}

/// Result of the last log poll.
#[derive(Clone, Default)]
struct LastPoll {
    /// Number of the poll, from 1.
    number: u64,
    /// The last successful poll.
    poll: Option<LogPoll>,
    /// The error of the last poll, if it failed.
    error: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LogPoll {
    number: u64,
    pub(super) end: LogEnd,
    /// When the poll began.
    monotonic_ms: u64,
    pub(super) unix_ms: u64,
}

/// A partition to be read, and its age.
pub(crate) struct ReplicaSnapshot {
    pub partition: Arc<Partition>,
    /// The snapshot contains every commit acknowledged before this time (milliseconds since 1970).
    /// None if the partition has no manifest.
    pub unix_ms: Option<u64>,
}

/// Guard of a running poll. Clears the flag however the poll ends.
struct PollGuard<'a>(&'a AtomicBool);

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
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
        // The same share as for a primary's unwritten log.
        let memory_bytes = (node.memory.limit_bytes() / 16).clamp(8 << 20, 64 << 20);
        Arc::new(Replica {
            tail: LogTail::new(node.store.store().clone(), primary.node_id, memory_bytes),
            catalog_state: primary.catalog_state,
            begun: AtomicU64::new(0),
            polling: AtomicBool::new(false),
            last: watch::Sender::new(LastPoll::default()),
            resyncs: AtomicU64::new(0),
            pins: Arc::default(),
        })
    }

    pub(crate) fn catalog_state(&self, id: PartitionId) -> Option<CatalogState> {
        (self.catalog_state)(id)
    }

    /// Whether the primary's log was readable at the last poll.
    pub(crate) fn is_healthy(&self) -> bool {
        self.last.borrow().error.is_none()
    }

    /// Returns a log poll that began at most `staleness` ago; any poll if None.
    pub(super) async fn end(
        self: &Arc<Self>,
        node: &Arc<Node>,
        staleness: Option<Duration>,
    ) -> Result<LogPoll> {
        let now_ms = node.clock.monotonic_ms();
        let begun = self.begun.load(Ordering::Acquire);
        let is_recent = |poll: &LogPoll, staleness: Duration| {
            // The clock has millisecond resolution, so a staleness of zero always waits for a poll
            // that begins later.
            staleness > Duration::ZERO
                && u128::from(now_ms.saturating_sub(poll.monotonic_ms)) <= staleness.as_millis()
        };
        let is_sufficient = |poll: &LogPoll| {
            poll.number > begun || staleness.is_none_or(|staleness| is_recent(poll, staleness))
        };
        let known = self.last.borrow().poll.filter(is_sufficient);
        let poll = match known {
            Some(poll) => poll,
            None => timeout(POLL_TIMEOUT, self.next_poll(node, begun, is_sufficient))
                .await
                .unwrap_or_else(|_| Err(no_answer()))?,
        };
        if now_ms.saturating_sub(poll.monotonic_ms) > POLL_INTERVAL_MS {
            self.poll(node);
        }
        Ok(poll)
    }

    /// Waits for a sufficient poll. Fails if a poll fails that began after the first `begun` ones.
    async fn next_poll(
        self: &Arc<Self>,
        node: &Arc<Node>,
        begun: u64,
        is_sufficient: impl Fn(&LogPoll) -> bool,
    ) -> Result<LogPoll> {
        let mut last = self.last.subscribe();
        loop {
            {
                let last = last.borrow_and_update();
                if let Some(poll) = last.poll.filter(&is_sufficient) {
                    return Ok(poll);
                }
                if let Some(error) = last.error.clone().filter(|_| last.number > begun) {
                    return Err(error);
                }
            }
            self.poll(node);
            // Cannot fail: `self` owns the sender.
            let _ = last.changed().await;
        }
    }

    /// Starts a poll unless one is running. It continues if the caller is dropped.
    fn poll(self: &Arc<Self>, node: &Arc<Node>) {
        if self.polling.swap(true, Ordering::AcqRel) {
            return;
        }
        let (replica, node) = (self.clone(), node.clone());
        let runtime = node.spill.runtime().clone();
        runtime.spawn(async move {
            let polling = PollGuard(&replica.polling);
            let number = replica.begun.fetch_add(1, Ordering::AcqRel) + 1;
            let (monotonic_ms, unix_ms) = (node.clock.monotonic_ms(), node.clock.unix_ms());
            let found = replica.tail.poll().await;
            // Before the result is published: a session that receives it may start the next poll.
            drop(polling);
            replica.last.send_modify(|last| {
                last.number = number;
                match found {
                    Ok(end) => {
                        last.poll = Some(LogPoll { number, end, monotonic_ms, unix_ms });
                        last.error = None;
                    }
                    Err(error) => last.error = Some(log_unreadable(error)),
                }
            });
        });
    }

    pub(super) fn statistics(&self, node: &Node) -> ReplicaStatistics {
        let last = self.last.borrow();
        ReplicaStatistics {
            log_polls: self.begun.load(Ordering::Relaxed),
            age_ms: last.poll.map(|poll| node.clock.monotonic_ms().saturating_sub(poll.monotonic_ms)),
            is_failing: last.error.is_some(),
            resyncs: self.resyncs.load(Ordering::Relaxed),
        }
    }
}

fn no_answer() -> Error {
    let message = format!("could not read the primary's log within {} s", POLL_TIMEOUT.as_secs());
    Error::new(sqlstate::IO_ERROR, message).hint(
        "Retry the transaction, check the latency of the object store, or allow an older \
         snapshot with SET fulmar.staleness.",
    )
}

fn deleted_too_fast() -> Error {
    let message = "log and manifests of the database are deleted faster than the replica can read them";
    Error::new(sqlstate::IO_ERROR, message)
        .hint("Retry the transaction. If the error persists, check the latency of the object store.")
}

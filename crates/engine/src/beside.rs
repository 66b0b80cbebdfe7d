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
//! publishes, which is one or two seconds old ([`StandingSource`]). A restore is also visible in
//! the log, with the first commit after it; the replica then answers nothing until the catalog
//! shows it too.
//!
//! # Partitions with local durability
//! The log of a partition with `local` durability is on the primary's disk. The replica reads such
//! a partition at its newest manifest, and its age is the manifest's.
//!
//! # Deletions by the primary
//! The primary deletes log objects that manifests cover, and segments that no manifest of the
//! history references. If a replica still needs one, its partition is *left behind*: it is
//! reopened, and a running transaction fails with 40001.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_pages::{Durability, Manifest, PartitionId};
use fulmar_store::{CommitLog, HotPagesName, LogEnd, LogTail, ManifestName, StoreError};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::branch::Era;
use crate::history::RestorePoint;
use crate::node::Node;
use crate::partition::{
    Followed, Following, Partition, dropped_error, log_unreadable, opening, owner_writes, store_error,
};
use crate::pins::Pins;
use crate::{Engine, Error, Result, calendar, sqlstate};

/// Age of the last log poll beyond which a read starts another one.
const POLL_INTERVAL_MS: u64 = 200;
/// How long a session waits for a log poll, or for the catalog to show a restore.
const POLL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the catalog is checked during that wait.
const CATALOG_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How often a partition is reopened for one transaction.
const MAX_OPENINGS: u32 = 10;
/// How often a newer manifest is looked up: for a partition with local durability, and for one in
/// use.
const LOCAL_MANIFEST_INTERVAL_MS: u64 = 1000;
const ADOPT_INTERVAL_MS: u64 = 30_000;
/// The same for a partition in use while changed pages take much of the memory.
const ADOPT_INTERVAL_IF_FULL_MS: u64 = 2000;

/// The state of a partition in the primary's catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its lineage and epoch.
    pub era: Era,
    /// The durability of its commits.
    pub durability: Durability,
}

/// Returns the state of a partition; None if it does not exist.
pub type StandingSource = Arc<dyn Fn(PartitionId) -> Option<Standing> + Send + Sync>;

/// The primary of a replica.
#[derive(Clone)]
pub struct Owner {
    /// Identifies its log in the store.
    pub node_id: u128,
    /// Reads its catalog.
    pub standing: StandingSource,
}

/// A replica's state.
pub(crate) struct Beside {
    tail: LogTail,
    standing: StandingSource,
    /// Number of log polls begun.
    begun: AtomicU64,
    polling: AtomicBool,
    last: watch::Sender<LastPoll>,
    /// Number of partitions reopened because they were left behind or changed in the catalog.
    reopened: AtomicU64,
    pub(crate) pins: Pins,
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
struct LogPoll {
    number: u64,
    end: LogEnd,
    /// When the poll began.
    monotonic_ms: u64,
    unix_ms: u64,
}

/// A partition to be read, and its age.
pub(crate) struct Seen {
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
pub struct BesideStatistics {
    /// Polls of the primary's log.
    pub looks: u64,
    /// Age of the last successful poll in milliseconds; None if there was none. Grows while no
    /// session reads.
    pub age_ms: Option<u64>,
    /// Whether the last poll failed.
    pub fails: bool,
    /// Partitions reopened because they were left behind or changed in the catalog.
    pub reopened: u64,
}

impl Beside {
    pub(crate) fn new(owner: Owner, node: &Node) -> Arc<Self> {
        // The same share as for a primary's unwritten log.
        let memory_bytes = (node.memory.limit_bytes() / 16).clamp(8 << 20, 64 << 20);
        Arc::new(Beside {
            tail: LogTail::new(node.store.store().clone(), owner.node_id, memory_bytes),
            standing: owner.standing,
            begun: AtomicU64::new(0),
            polling: AtomicBool::new(false),
            last: watch::Sender::new(LastPoll::default()),
            reopened: AtomicU64::new(0),
            pins: Pins::default(),
        })
    }

    pub(crate) fn standing(&self, id: PartitionId) -> Option<Standing> {
        (self.standing)(id)
    }

    /// Whether the primary's log was readable at the last poll.
    pub(crate) fn is_well(&self) -> bool {
        self.last.borrow().error.is_none()
    }

    /// Returns a log poll that began at most `staleness` ago; any poll if None.
    async fn end(self: &Arc<Self>, node: &Arc<Node>, staleness: Option<Duration>) -> Result<LogPoll> {
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
        let (beside, node) = (self.clone(), node.clone());
        let runtime = node.spill.runtime().clone();
        runtime.spawn(async move {
            let polling = PollGuard(&beside.polling);
            let number = beside.begun.fetch_add(1, Ordering::AcqRel) + 1;
            let (monotonic_ms, unix_ms) = (node.clock.monotonic_ms(), node.clock.unix_ms());
            let found = beside.tail.poll().await;
            // Before the result is published: a session that receives it may start the next poll.
            drop(polling);
            beside.last.send_modify(|last| {
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

    fn statistics(&self, node: &Node) -> BesideStatistics {
        let last = self.last.borrow();
        BesideStatistics {
            looks: self.begun.load(Ordering::Relaxed),
            age_ms: last.poll.map(|poll| node.clock.monotonic_ms().saturating_sub(poll.monotonic_ms)),
            fails: last.error.is_some(),
            reopened: self.reopened.load(Ordering::Relaxed),
        }
    }
}

impl Engine {
    /// Whether this node is a read replica.
    pub fn reads_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Statistics of a replica; None on a primary.
    pub fn beside_statistics(&self) -> Option<BesideStatistics> {
        self.beside.as_ref().map(|beside| beside.statistics(self.node()))
    }

    /// Fails on a replica: the operation needs the primary.
    pub fn check_owner(&self) -> Result<()> {
        match self.reads_beside() {
            true => Err(owner_writes()),
            false => Ok(()),
        }
    }

    /// Returns a partition whose snapshot is at most `staleness` old; any age if None.
    pub(crate) fn partition_beside<'a>(
        &'a self,
        beside: &'a Arc<Beside>,
        id: PartitionId,
        staleness: Option<Duration>,
    ) -> BoxFuture<'a, Result<Seen>> {
        async move {
            for _ in 0..MAX_OPENINGS {
                let Some(standing) = beside.standing(id) else { return Err(self.forget_dropped(id)) };
                let poll = match standing.durability {
                    Durability::Shared => Some(beside.end(self.node(), staleness).await?),
                    Durability::Local => None,
                };
                self.forget_left_behind(beside, id, Some(standing));
                let partition = match self.partition(id).await {
                    Err(_) if self.is_left_behind(id) => continue,
                    opened => opened?,
                };
                let seen = match poll {
                    Some(poll) => self.caught_up(beside, partition.clone(), poll).await,
                    None => self.at_manifest(partition.clone(), staleness).await,
                };
                match seen {
                    Ok(Some(seen)) => return Ok(seen),
                    Ok(None) => {}
                    Err(_) if partition.is_left_behind() => {}
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
        beside: &Arc<Beside>,
        partition: Arc<Partition>,
        poll: LogPoll,
    ) -> Result<Option<Seen>> {
        match partition.catch_up(&beside.tail, poll.end.end).await? {
            Followed::Here => return Ok(Some(Seen { partition, unix_ms: Some(poll.unix_ms) })),
            // The records that the poll found are already deleted, so the next opening needs a
            // later poll.
            Followed::LeftBehind => {
                partition.leave();
                beside.end(self.node(), Some(Duration::ZERO)).await?;
            }
            Followed::Restored => self.restored(beside, &partition).await?,
        }
        Ok(None)
    }

    /// Handles a restore found in the log: waits until the catalog shows the new epoch.
    async fn restored(&self, beside: &Beside, partition: &Partition) -> Result<()> {
        let catalog_updated = async {
            while beside.standing(partition.id).is_some_and(|standing| standing.era.epoch <= partition.epoch)
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
    ) -> Result<Option<Seen>> {
        let clock = &self.node().clock;
        let Some(following) = partition.following.get() else { return Ok(None) };
        let unix_ms = following.manifest_unix_ms;
        let age_ms = unix_ms.map(|unix_ms| clock.unix_ms().saturating_sub(unix_ms));
        let is_recent =
            |staleness: Duration| age_ms.is_some_and(|age_ms| u128::from(age_ms) <= staleness.as_millis());
        if staleness.is_none_or(is_recent) {
            return Ok(Some(Seen { partition, unix_ms }));
        }
        if following.is_due(clock.monotonic_ms(), LOCAL_MANIFEST_INTERVAL_MS) {
            let (store, known) = (&self.node().store, partition.manifest_name());
            let newest =
                store.latest_name(partition.id, partition.epoch, known).await.map_err(store_error)?;
            if newest.is_some_and(|newest| newest.number > partition.manifest_number()) {
                partition.leave();
                return Ok(None);
            }
        }
        Err(staleness_exceeded(unix_ms))
    }

    /// Opens a partition at its newest manifest. Following begins at the first position that the
    /// log is needed from: earlier records are in the manifest, which is listed later.
    pub(crate) async fn open_beside(&self, beside: &Arc<Beside>, id: PartitionId) -> Result<Arc<Partition>> {
        let Some(Standing { era, durability }) = beside.standing(id) else { return Err(dropped_error()) };
        let node = self.node();
        let place = match durability {
            Durability::Shared => beside.end(node, None).await?.end.needed,
            Durability::Local => Default::default(),
        };
        let (opened, manifest, hot_pages) = self.open_newest(beside, id, era).await?;
        let manifest_unix_ms = manifest.as_ref().map(|manifest| RestorePoint::of(manifest).time_unix_ms);
        let following = Following::new(durability, place, manifest_unix_ms, node.clock.monotonic_ms());
        // Not shared with other tasks yet.
        let _is_first = opened.following.set(following);
        if let Some(list) = hot_pages {
            self.hot.warm(&opened, list);
        }
        Ok(opened)
    }

    /// Opens a partition at its newest manifest. If that manifest or one of its segments was
    /// deleted, there is a newer one.
    async fn open_newest(
        &self,
        beside: &Beside,
        id: PartitionId,
        era: Era,
    ) -> Result<(Arc<Partition>, Option<Manifest>, Option<HotPagesName>)> {
        let node = self.node();
        for _ in 0..MAX_OPENINGS {
            let (manifest, hot_pages) = match node.store.latest(id, era.epoch, None).await {
                Err(StoreError::Missing { .. }) => continue,
                latest => latest.map_err(store_error)?,
            };
            if let Some(manifest) = &manifest
                && !beside.pins.pin(node, ManifestName::of(manifest)).await
            {
                continue;
            }
            let (log, stats) = (CommitLog::read_only(), self.counted(id));
            let open = Partition::open(node.clone(), log, stats, id, era, manifest.as_ref(), None);
            match opening(id, open).await {
                Ok(opened) => return Ok((opened, manifest, hot_pages)),
                Err(error) => {
                    let known = manifest.as_ref().map(ManifestName::of);
                    let newest = node.store.latest_name(id, era.epoch, known).await.map_err(store_error)?;
                    if newest == known {
                        return Err(error);
                    }
                }
            }
        }
        Err(deleted_too_fast())
    }

    /// Closes a partition that the primary has dropped, and returns the error for it.
    fn forget_dropped(&self, id: PartitionId) -> Error {
        if let Some(partition) = self.take_open(id, |_| true) {
            partition.close();
            partition.let_go();
        }
        self.past.drop_partition(id);
        dropped_error()
    }

    fn is_left_behind(&self, id: PartitionId) -> bool {
        self.open_one(id).is_some_and(|partition| partition.is_left_behind())
    }

    /// Closes an open partition that was left behind or has changed in the catalog. The next access
    /// reopens it.
    fn forget_left_behind(&self, beside: &Beside, id: PartitionId, standing: Option<Standing>) {
        let is_over = |partition: &Partition| {
            let known = partition.following.get().map(|following| Standing {
                era: Era { lineage: partition.lineage, epoch: partition.epoch },
                durability: following.durability,
            });
            partition.is_left_behind() || known != standing
        };
        if let Some(partition) = self.take_open(id, is_over) {
            partition.leave();
            partition.let_go();
            beside.reopened.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// One round of the background task: enforces snapshot bounds, releases pages that manifests
/// contain by now, closes idle partitions.
pub(crate) async fn round(engine: Arc<Engine>) {
    let node = engine.node();
    let Some(beside) = &engine.beside else { return };
    let now_ms = node.clock.monotonic_ms();
    let changed_bytes = engine.open_partitions().iter().map(|partition| partition.changed_bytes()).sum();
    let period_ms =
        if node.memory.must_flush(changed_bytes) { ADOPT_INTERVAL_IF_FULL_MS } else { ADOPT_INTERVAL_MS };
    let idle_ms = engine.flusher.idle_after_ms();
    for partition in engine.open_partitions() {
        partition.sweep();
        partition.bound_snapshots(now_ms, engine.flusher.snapshot_bounds());
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        let is_idle = now_ms.saturating_sub(used_ms) > idle_ms;
        // Two references: the slot and this one.
        if is_idle && partition.is_unused(2) {
            partition.pool.clear();
        }
        let is_due = partition.following.get().is_some_and(|following| {
            following.durability == Durability::Shared && !is_idle && following.is_due(now_ms, period_ms)
        });
        if is_due && let Err(error) = adopt_newest(node, beside, &partition).await {
            tracing::warn!(
                %error,
                partition = %partition.id,
                "could not read the newest manifest; will retry"
            );
        }
        let id = partition.id;
        drop(partition);
        if is_idle {
            engine.close_if_unused(id);
        }
        engine.forget_left_behind(beside, id, beside.standing(id));
    }
    engine.past.close_unused(|used_ms| now_ms.saturating_sub(used_ms) > idle_ms);
    let used = engine.open_partitions().into_iter().chain(engine.past.open());
    let used = used.filter_map(|partition| partition.manifest_name()).collect();
    beside.pins.renew(node, used).await;
    node.memory.flush_ended();
}

async fn adopt_newest(node: &Node, beside: &Beside, partition: &Partition) -> Result<()> {
    match node.store.latest_manifest(partition.id, partition.epoch, partition.manifest_name()).await {
        Ok(Some(manifest)) => match beside.pins.pin(node, ManifestName::of(&manifest)).await {
            true => partition.adopt(&manifest).await,
            false => Ok(()),
        },
        // No manifest, or a newer one exists by now.
        Ok(None) | Err(StoreError::Missing { .. }) => Ok(()),
        Err(error) => Err(store_error(error)),
    }
}

fn deleted_too_fast() -> Error {
    let message = "log and manifests of the database are deleted faster than the replica can read them";
    Error::new(sqlstate::IO_ERROR, message)
        .hint("Retry the transaction. If the error persists, check the latency of the object store.")
}

fn no_answer() -> Error {
    let message = format!("could not read the primary's log within {} s", POLL_TIMEOUT.as_secs());
    Error::new(sqlstate::IO_ERROR, message).hint(
        "Retry the transaction, check the latency of the object store, or allow an older \
         snapshot with SET fulmar.staleness.",
    )
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
            format!("{detail} The newest version in the store is from {}.", calendar::timestamp(unix_ms))
        }
        None => format!("{detail} The store has no version yet."),
    });
    error.hint(
        "Increase fulmar.staleness, or run ALTER DATABASE ... SET durability = 'shared' on the primary.",
    )
}

//! Reading beside the owner: the partitions of another process, at a manifest and the owner's log so far.
//!
//! ```text
//!   a transaction begins --> how old is the last look at the log?
//!                              | not older than it may be          | older
//!                              |   (older than 200 ms: another     v
//!                              |    one begins, nobody waits)    waits for a look that began late enough
//!                              v                                   |
//!   the partition: open at its newest manifest <-------------------'
//!     --> applies the log's records up to the end that the look has found ([`crate::partition::Followed`])
//!     --> pins that version: so old is its snapshot
//! ```
//!
//! Nothing happens unless somebody reads: there is no task that looks at the log. What is there besides statements keeps open
//! partitions bounded ([`round`]).
//!
//! # How old a snapshot is
//! A look at the log proves that all that had been acknowledged when it began is among what it has found, or in the newest manifests
//! ([`LogTail`]). A partition is opened at a manifest that is listed *after* the look, so nothing lies between the two; and it goes on
//! from there without a gap, or is opened anew. So its snapshot has all that was acknowledged before the look began, and that is its
//! age, though nothing may have been committed for hours. (It may have more: a manifest may be ahead.)
//!
//! Which partitions there are, where they commit to and in which epoch they are the catalog says. What it says here is what the
//! owner has published, a second or two ago ([`StandingSource`]); that is the age of *this* knowledge. A restore is seen in the log too, as
//! soon as something is committed after it: then nobody is answered before the catalog has told of it.
//!
//! # Partitions that commit elsewhere
//! The log of a partition whose durability is `local` is on its owner's disk. It can be read as its newest manifest has it, and is as old as
//! that.
//!
//! # What the owner deletes meanwhile
//! Objects of its log that manifests cover, and segments that no manifest of its history names any more. Who had wanted to read
//! them is *left behind*: the partition is opened anew, and a transaction that had begun gets 40001.

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

/// A look that is older is not the last one, where somebody reads.
const LOOK_EVERY_MS: u64 = 200;
/// How long anybody waits for a look, or for the catalog to tell what the log has told.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often is looked whether the catalog has told.
const CATALOG_LOOK: Duration = Duration::from_millis(50);
/// How often a partition is opened anew for one transaction.
const MOST_OPENINGS: u32 = 10;
/// How often a newer manifest is looked for: of a partition whose commits are elsewhere, and of one that is read ...
const MANIFEST_EVERY_MS: u64 = 1000;
const ADOPT_EVERY_MS: u64 = 30_000;
/// ... while changed pages take much of the memory.
const ADOPT_EVERY_MS_IF_FULL: u64 = 2000;

/// How a partition stands, as its owner has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its lineage and epoch.
    pub era: Era,
    /// Where its commits are made durable.
    pub durability: Durability,
}

/// Tells how a partition stands; nothing if there is none.
pub type StandingSource = Arc<dyn Fn(PartitionId) -> Option<Standing> + Send + Sync>;

/// Whose partitions are read.
#[derive(Clone)]
pub struct Owner {
    /// Names its log in the store.
    pub node_id: u128,
    /// What its catalog says.
    pub standing: StandingSource,
}

/// What a node that reads beside another one knows of it.
pub(crate) struct Beside {
    tail: LogTail,
    standing: StandingSource,
    /// Looks that have begun.
    begun: AtomicU64,
    looking: AtomicBool,
    last: watch::Sender<Last>,
    /// Partitions that were opened anew, since their owner had gone on.
    reopened: AtomicU64,
    pub(crate) pins: Pins,
}

/// What the last look has found.
#[derive(Clone, Default)]
struct Last {
    /// Looks are numbered from 1 on.
    number: u64,
    /// Of the last one that went well.
    look: Option<Look>,
    /// Of the last one, if it did not.
    error: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    number: u64,
    end: LogEnd,
    /// When it began.
    monotonic_ms: u64,
    unix_ms: u64,
}

/// A partition to be read, and how old it is.
pub(crate) struct Seen {
    pub partition: Arc<Partition>,
    /// All that was acknowledged before is in it (milliseconds since 1970); not known if it has no manifest.
    pub unix_ms: Option<u64>,
}

/// Nobody looks any more, however that has ended.
struct Looking<'a>(&'a AtomicBool);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Counters of a node that reads beside another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BesideStatistics {
    /// Looks at the owner's log.
    pub looks: u64,
    /// How old the last one is that went well, milliseconds; `None` if there was none. While nobody reads it grows.
    pub age_ms: Option<u64>,
    /// Whether the last one failed.
    pub fails: bool,
    /// Partitions that were opened anew, since their owner had gone on.
    pub reopened: u64,
}

impl Beside {
    pub(crate) fn new(owner: Owner, node: &Node) -> Arc<Self> {
        // As an owner takes for what waits for its log.
        let memory_bytes = (node.memory.limit_bytes() / 16).clamp(8 << 20, 64 << 20);
        Arc::new(Beside {
            tail: LogTail::new(node.store.store().clone(), owner.node_id, memory_bytes),
            standing: owner.standing,
            begun: AtomicU64::new(0),
            looking: AtomicBool::new(false),
            last: watch::Sender::new(Last::default()),
            reopened: AtomicU64::new(0),
            pins: Pins::default(),
        })
    }

    pub(crate) fn standing(&self, id: PartitionId) -> Option<Standing> {
        (self.standing)(id)
    }

    /// Whether the owner's log can be read, as far as is known.
    pub(crate) fn is_well(&self) -> bool {
        self.last.borrow().error.is_none()
    }

    /// Where the log has ended at most `staleness` ago (or ever).
    async fn end(self: &Arc<Self>, node: &Arc<Node>, staleness: Option<Duration>) -> Result<Look> {
        let now_ms = node.clock.monotonic_ms();
        let begun = self.begun.load(Ordering::Acquire);
        let is_young = |look: &Look, staleness: Duration| {
            // So that who wants a look of now gets one that has begun later: the clock counts in milliseconds.
            staleness > Duration::ZERO
                && u128::from(now_ms.saturating_sub(look.monotonic_ms)) <= staleness.as_millis()
        };
        let will_do =
            |look: &Look| look.number > begun || staleness.is_none_or(|staleness| is_young(look, staleness));
        let known = self.last.borrow().look.filter(will_do);
        let look = match known {
            Some(look) => look,
            None => timeout(PATIENCE, self.next_look(node, begun, will_do))
                .await
                .unwrap_or_else(|_| Err(no_answer()))?,
        };
        if now_ms.saturating_sub(look.monotonic_ms) > LOOK_EVERY_MS {
            self.look(node);
        }
        Ok(look)
    }

    /// Waits for a look that will do; an error if one fails that began after so many others.
    async fn next_look(
        self: &Arc<Self>,
        node: &Arc<Node>,
        begun: u64,
        will_do: impl Fn(&Look) -> bool,
    ) -> Result<Look> {
        let mut last = self.last.subscribe();
        loop {
            {
                let last = last.borrow_and_update();
                if let Some(look) = last.look.filter(&will_do) {
                    return Ok(look);
                }
                if let Some(error) = last.error.clone().filter(|_| last.number > begun) {
                    return Err(error);
                }
            }
            self.look(node);
            // Its sender is ours.
            let _ = last.changed().await;
        }
    }

    /// Begins a look, if none is under way. It goes on when who asked for it has gone.
    fn look(self: &Arc<Self>, node: &Arc<Node>) {
        if self.looking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (beside, node) = (self.clone(), node.clone());
        let runtime = node.spill.runtime().clone();
        runtime.spawn(async move {
            let looking = Looking(&beside.looking);
            let number = beside.begun.fetch_add(1, Ordering::AcqRel) + 1;
            let (monotonic_ms, unix_ms) = (node.clock.monotonic_ms(), node.clock.unix_ms());
            let found = beside.tail.look().await;
            // First: who hears of this one may want another.
            drop(looking);
            beside.last.send_modify(|last| {
                last.number = number;
                match found {
                    Ok(end) => {
                        last.look = Some(Look { number, end, monotonic_ms, unix_ms });
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
            age_ms: last.look.map(|look| node.clock.monotonic_ms().saturating_sub(look.monotonic_ms)),
            fails: last.error.is_some(),
            reopened: self.reopened.load(Ordering::Relaxed),
        }
    }
}

impl Engine {
    /// Whether this node reads the partitions of another one.
    pub fn reads_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// Counters of a node that reads beside another one.
    pub fn beside_statistics(&self) -> Option<BesideStatistics> {
        self.beside.as_ref().map(|beside| beside.statistics(self.node()))
    }

    /// Refuses what only the owner can do.
    pub fn check_owner(&self) -> Result<()> {
        match self.reads_beside() {
            true => Err(owner_writes()),
            false => Ok(()),
        }
    }

    /// A partition of the owner's, not older than `staleness`, whatever that is.
    pub(crate) fn partition_beside<'a>(
        &'a self,
        beside: &'a Arc<Beside>,
        id: PartitionId,
        staleness: Option<Duration>,
    ) -> BoxFuture<'a, Result<Seen>> {
        async move {
            for _ in 0..MOST_OPENINGS {
                let Some(standing) = beside.standing(id) else { return Err(self.forget_dropped(id)) };
                let look = match standing.durability {
                    Durability::Shared => Some(beside.end(self.node(), staleness).await?),
                    Durability::Local => None,
                };
                self.forget_left_behind(beside, id, Some(standing));
                let partition = match self.partition(id).await {
                    Err(_) if self.is_left_behind(id) => continue,
                    opened => opened?,
                };
                let seen = match look {
                    Some(look) => self.caught_up(beside, partition.clone(), look).await,
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

    /// The partition with all that a look has found; `None` if it is to be opened anew.
    async fn caught_up(
        &self,
        beside: &Arc<Beside>,
        partition: Arc<Partition>,
        look: Look,
    ) -> Result<Option<Seen>> {
        match partition.catch_up(&beside.tail, look.end.end).await? {
            Followed::Here => return Ok(Some(Seen { partition, unix_ms: Some(look.unix_ms) })),
            // What the look had found is gone by now: the next opening wants a later one.
            Followed::LeftBehind => {
                partition.leave();
                beside.end(self.node(), Some(Duration::ZERO)).await?;
            }
            Followed::Restored => self.restored(beside, &partition).await?,
        }
        Ok(None)
    }

    /// The log has told that a partition was restored: waits until the catalog has told where it stands.
    async fn restored(&self, beside: &Beside, partition: &Partition) -> Result<()> {
        let told = async {
            while beside.standing(partition.id).is_some_and(|standing| standing.era.epoch <= partition.epoch)
            {
                tokio::time::sleep(CATALOG_LOOK).await;
            }
        };
        timeout(PATIENCE, told).await.map_err(|_| {
            Error::new(sqlstate::IO_ERROR, "the database was restored by its owner, whose catalog in the store does not say so")
                .hint("See whether the node that owns the store can write its catalog there (its log says why not).")
        })
    }

    /// The partition as its newest manifest has it, if that is not too old; `None` if it is to be opened anew.
    async fn at_manifest(
        &self,
        partition: Arc<Partition>,
        staleness: Option<Duration>,
    ) -> Result<Option<Seen>> {
        let clock = &self.node().clock;
        let Some(following) = partition.following.get() else { return Ok(None) };
        let unix_ms = following.manifest_unix_ms;
        let age_ms = unix_ms.map(|unix_ms| clock.unix_ms().saturating_sub(unix_ms));
        let is_young =
            |staleness: Duration| age_ms.is_some_and(|age_ms| u128::from(age_ms) <= staleness.as_millis());
        if staleness.is_none_or(is_young) {
            return Ok(Some(Seen { partition, unix_ms }));
        }
        if following.is_due(clock.monotonic_ms(), MANIFEST_EVERY_MS) {
            let (store, known) = (&self.node().store, partition.manifest_name());
            let newest =
                store.latest_name(partition.id, partition.epoch, known).await.map_err(store_error)?;
            if newest.is_some_and(|newest| newest.number > partition.manifest_number()) {
                partition.leave();
                return Ok(None);
            }
        }
        Err(too_old(unix_ms))
    }

    /// Opens a partition at its newest manifest. Its place in the log is where that is needed from on: what stands before is in the
    /// manifest, which is listed later.
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
        // Nobody else has it yet.
        let _is_first = opened.following.set(following);
        if let Some(list) = hot_pages {
            self.hot.warm(&opened, list);
        }
        Ok(opened)
    }

    /// Opens a partition at its newest manifest. When that is gone, or a segment of it, there is a newer one.
    async fn open_newest(
        &self,
        beside: &Beside,
        id: PartitionId,
        era: Era,
    ) -> Result<(Arc<Partition>, Option<Manifest>, Option<HotPagesName>)> {
        let node = self.node();
        for _ in 0..MOST_OPENINGS {
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

    /// The owner has dropped it.
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

    /// Forgets a partition that is not to be read any more as it is, if it is open: who asks for it opens it anew.
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

/// Looks around: bounds snapshots, lets pages go that manifests have by now, closes what is idle.
pub(crate) async fn round(engine: Arc<Engine>) {
    let node = engine.node();
    let Some(beside) = &engine.beside else { return };
    let now_ms = node.clock.monotonic_ms();
    let changed_bytes = engine.open_partitions().iter().map(|partition| partition.changed_bytes()).sum();
    let period_ms =
        if node.memory.must_flush(changed_bytes) { ADOPT_EVERY_MS_IF_FULL } else { ADOPT_EVERY_MS };
    let idle_ms = engine.flusher.idle_after_ms();
    for partition in engine.open_partitions() {
        partition.sweep();
        partition.bound_snapshots(now_ms, engine.flusher.snapshot_bounds());
        let used_ms = partition.used_ms.load(Ordering::Relaxed);
        let is_idle = now_ms.saturating_sub(used_ms) > idle_ms;
        // The slot and we.
        if is_idle && partition.is_unused(2) {
            partition.pool.clear();
        }
        let is_due = partition.following.get().is_some_and(|following| {
            following.durability == Durability::Shared && !is_idle && following.is_due(now_ms, period_ms)
        });
        if is_due && let Err(error) = adopt_newest(node, beside, &partition).await {
            tracing::warn!(%error, partition = %partition.id, "the newest manifest cannot be read; it is tried again");
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
        // Or it was one, and there is a newer one by now.
        Ok(None) | Err(StoreError::Missing { .. }) => Ok(()),
        Err(error) => Err(store_error(error)),
    }
}

fn deleted_too_fast() -> Error {
    let message = "the database's log and manifests are deleted faster than they can be read";
    Error::new(sqlstate::IO_ERROR, message)
        .hint("Run the transaction again; if it persists, see whether the store is slow.")
}

fn no_answer() -> Error {
    let message = format!("the log in the store could not be read within {} s", PATIENCE.as_secs());
    Error::new(sqlstate::IO_ERROR, message)
        .hint("Run the transaction again; see whether the store is slow, or allow an older snapshot (SET fulmar.staleness).")
}

fn too_old(unix_ms: Option<u64>) -> Error {
    let error = Error::new(
        sqlstate::NOT_IN_PREREQUISITE_STATE,
        "what the store has of the database is older than fulmar.staleness allows",
    );
    let detail = "Its durability is 'local': its commits are on the disk of its owner, and come to the store a minute later at most.";
    let error = error.detail(match unix_ms {
        Some(unix_ms) => format!("{detail} The newest version there is of {}.", calendar::timestamp(unix_ms)),
        None => format!("{detail} Nothing of it is there yet."),
    });
    error.hint("SET fulmar.staleness to a longer time; or, at its owner, ALTER DATABASE ... SET durability = 'shared'.")
}

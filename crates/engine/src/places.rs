//! Log routing: which commit log makes a partition's commits durable, the node's local log or its
//! shared log in the store.
//!
//! The catalog records the choice. The engine learns it at startup and with every change
//! ([`Engine::set_durability`]):
//!
//! ```text
//!   flush ---> close, if unused ---> catalog ---> the next open uses the other log
//!              (opens wait from now on) ---------------------^
//! ```
//!
//! The flush leaves a manifest that covers everything the partition has written to its previous
//! log. Recovery therefore reads from each log only the records of the partitions that commit to
//! it, and is complete after a crash at any step.
//!
//! If the catalog does not answer, it is unknown which log a restart would read. The partition then
//! stays closed until the change is requested again, or the node is restarted.
//!
//! The shared log is opened when the first partition needs it, so a node without such partitions
//! sends no requests for it. If it is found damaged at startup, the lost commits may belong to any
//! of its partitions: none of them is opened, and all others work normally ([`Places::refuse`]).

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fulmar_pages::{Durability, PartitionId, Record};
use fulmar_store::{CommitLog, LogError, Lsn, PageStore, SharedLogOptions};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::clock::Clock;
use crate::engine::CatalogPartitions;
use crate::partition::{Replay, log_error};
use crate::{Engine, Error, Result, flush, sqlstate};

/// How long a durability change waits until the partition is unused. The flusher, the cache and
/// short compactions use each partition briefly now and then.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(2);

/// How often that wait checks.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The log targets of all partitions that do not commit to the local log.
pub(crate) struct Places {
    node_id: u128,
    /// Options of the shared log.
    options: SharedLogOptions,
    /// The partitions that the shared log may hold records of.
    known: Option<CatalogPartitions>,
    targets: watch::Sender<HashMap<PartitionId, LogTarget>>,
    /// Why the shared log cannot be used until the next start.
    refused: OnceLock<Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LogTarget {
    Shared,
    /// The partition is closed, and the catalog has been asked for the change.
    Changing,
    /// The catalog was asked and has not answered.
    Unknown,
}

/// Why a durability change failed.
#[derive(Debug)]
pub enum NotChanged {
    /// The catalog rejected it.
    Refused(Error),
    /// The catalog did not answer, so the outcome is unknown.
    InDoubt(Error),
}

/// Replayed records of a log, by partition.
pub(crate) type Replays = HashMap<PartitionId, Arc<Replay>>;

impl Places {
    pub(crate) fn new(
        node_id: u128,
        shared: &HashSet<PartitionId>,
        options: SharedLogOptions,
        known: Option<CatalogPartitions>,
    ) -> Self {
        let targets = shared.iter().map(|id| (*id, LogTarget::Shared)).collect();
        Places { node_id, options, known, targets: watch::Sender::new(targets), refused: OnceLock::new() }
    }

    /// Whether all partitions commit to the local log.
    pub(crate) fn all_local(&self) -> bool {
        self.targets.borrow().is_empty()
    }

    /// Marks the shared log as damaged. It is not opened again until the node restarts, since its
    /// lost records would be treated as absent.
    pub(crate) fn refuse(&self, damage: &LogError) {
        tracing::error!(error = %damage, "the shared log is damaged; shared databases cannot be used");
        let error = Error::new(
            sqlstate::DATA_CORRUPTED,
            "shared log is damaged: recent commits of this database may be lost",
        );
        let _ = self.refused.set(error.hint(
            "Restore the object that the node's log names, and restart the node. No commits are lost then.",
        ));
    }

    /// Returns an error if the shared log was found damaged.
    pub(crate) fn check(&self) -> Result<()> {
        self.refused.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Forgets a dropped partition.
    pub(crate) fn forget(&self, id: PartitionId) {
        self.targets.send_if_modified(|targets| targets.remove(&id).is_some());
    }

    fn of(&self, id: PartitionId) -> Option<LogTarget> {
        self.targets.borrow().get(&id).copied()
    }

    /// Waits until no change of the partition's log is in progress.
    pub(crate) async fn settled(&self, id: PartitionId) {
        let mut targets = self.targets.subscribe();
        // Cannot fail: `self` owns the sender.
        let _ = targets.wait_for(|targets| targets.get(&id) != Some(&LogTarget::Changing)).await;
    }

    /// Begins a change; from now on opens of the partition wait. Returns None if another change is
    /// in progress.
    fn begin_change(&self, id: PartitionId) -> Option<PendingChange<'_>> {
        let mut before = None;
        self.targets.send_modify(|targets| before = targets.insert(id, LogTarget::Changing));
        let is_ours = before != Some(LogTarget::Changing);
        is_ours.then(|| PendingChange { places: self, id, before, outcome: Some(LogTarget::Unknown) })
    }

    /// Opens the shared log. Also returns its records of partitions that commit to it.
    pub(crate) async fn open_log(
        &self,
        store: &PageStore,
        clock: &Clock,
    ) -> std::result::Result<(Arc<CommitLog>, Replays), LogError> {
        let mut replays: HashMap<PartitionId, Replay> = HashMap::new();
        let mut replay = |end, record: &Record<'_>| {
            let header = &record.header;
            clock.observe(header.timestamp);
            clock.observe_id(header.transaction);
            refuse_unknown(self.known.as_ref(), header.partition, end)?;
            if self.of(header.partition) == Some(LogTarget::Shared) {
                replays.entry(header.partition).or_default().push(end, record);
            }
            Ok(())
        };
        let (options, store) = (self.options.clone(), store.store().clone());
        let log = CommitLog::open_shared(options, store, self.node_id, &mut replay).await?;
        Ok((log, replays.into_iter().map(|(id, replay)| (id, Arc::new(replay))).collect()))
    }
}

/// Part of the error of a startup that finds records of an unknown partition.
/// [`Error::is_of_unknown_partition`] recognises the error by it.
pub(crate) const UNKNOWN: &str = "which the catalog does not contain, even as a dropped partition";

/// Fails if a log contains a record of a partition that the catalog does not know. Nothing in the
/// log has been changed at that point.
pub(crate) fn refuse_unknown(
    known: Option<&CatalogPartitions>,
    id: PartitionId,
    position: Lsn,
) -> std::result::Result<(), LogError> {
    match known {
        Some(known) if !known.admits(id) => Err(LogError::Replay {
            position,
            cause: format!("the record belongs to partition {id}, {UNKNOWN}"),
        }),
        _ => Ok(()),
    }
}

/// A change in progress. Dropping it releases the waiting opens.
struct PendingChange<'a> {
    places: &'a Places,
    id: PartitionId,
    before: Option<LogTarget>,
    /// The target after the change. Unknown unless the catalog answers.
    outcome: Option<LogTarget>,
}

impl PendingChange<'_> {
    fn end(mut self, answer: std::result::Result<(), NotChanged>, durability: Durability) -> Result<()> {
        match answer {
            Ok(()) => {
                self.outcome = (durability == Durability::Shared).then_some(LogTarget::Shared);
                Ok(())
            }
            Err(NotChanged::Refused(error)) => {
                self.outcome = self.before;
                Err(error)
            }
            Err(NotChanged::InDoubt(error)) => Err(error),
        }
    }
}

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        self.places.targets.send_modify(|targets| {
            // A partition dropped meanwhile has no entry, and gets none.
            if targets.remove(&self.id).is_some()
                && let Some(place) = self.outcome
            {
                targets.insert(self.id, place);
            }
        });
    }
}

impl Engine {
    /// Opens the shared log if it is not open.
    async fn open_shared_log(self: &Arc<Self>) -> Result<()> {
        let engine = self.clone();
        // Runs in the engine's runtime, since the caller's may end before the log does. The opening
        // is a task of its own, so that it completes if the caller is dropped and later callers
        // wait for it: a second opening would seal the log.
        let opening = self.node().spill.runtime().spawn(async move {
            let node = engine.node();
            engine.places.check()?;
            let open = async || {
                // No partition commits to the log yet, so its records are irrelevant.
                let (log, _) = engine.places.open_log(&node.store, &node.clock).await.map_err(log_error)?;
                engine.register_callbacks(&log);
                Ok(log)
            };
            node.shared_log.get_or_try_init(open).await.map(drop)
        });
        opening.await.map_err(|cause| {
            Error::new(sqlstate::INTERNAL, format!("panic while opening the shared log: {cause}"))
        })?
    }

    /// Registers a log's callbacks: discarded records discard the versions of its partitions, and a
    /// long backlog wakes the flusher.
    pub(crate) fn register_callbacks(self: &Arc<Self>, log: &Arc<CommitLog>) {
        let flusher = self.flusher.task.clone();
        log.on_flush_due(Box::new(move || flusher.wake()));
        let (engine, of) = (Arc::downgrade(self), Arc::downgrade(log));
        log.on_discard(Box::new(move |durable, _appended| {
            let Some(engine) = engine.upgrade() else { return };
            for partition in engine.open_partitions() {
                if std::ptr::eq(Arc::as_ptr(&partition.log), of.as_ptr()) {
                    partition.discard(durable);
                }
            }
        }));
    }

    /// Returns the log that a partition commits to.
    pub(crate) fn log_of(&self, id: PartitionId) -> Result<Arc<CommitLog>> {
        let node = self.node();
        match (self.places.of(id), node.shared_log.get()) {
            (None, _) => Ok(node.log.clone()),
            (Some(LogTarget::Shared), Some(log)) => Ok(log.clone()),
            (Some(LogTarget::Shared), None) => self.places.check().and_then(|()| Err(change_in_progress())),
            _ => Err(change_in_progress()),
        }
    }

    /// Changes a partition's durability. The partition must be unused; `change` records it in the
    /// catalog.
    pub async fn set_durability(
        self: &Arc<Self>,
        id: PartitionId,
        durability: Durability,
        change: impl Future<Output = std::result::Result<(), NotChanged>>,
    ) -> Result<()> {
        self.check_owner()?;
        if durability == Durability::Shared {
            self.open_shared_log().await?;
        }
        let begun = self.begin_change(id).await?;
        begun.end(change.await, durability)
    }

    /// Flushes and closes a partition, and keeps it closed until the change ends.
    fn begin_change(&self, id: PartitionId) -> BoxFuture<'_, Result<PendingChange<'_>>> {
        async move {
            let deadline = Instant::now() + UNUSED_TIMEOUT;
            loop {
                // A partition whose log is unknown has already been flushed and closed.
                if self.places.of(id) != Some(LogTarget::Unknown) {
                    let partition = self.partition(id).await?;
                    flush::flush(self, vec![partition]).await?;
                    self.maintenance.forget(id);
                }
                let mut begun = None;
                self.close_if_unused_and(id, || begun = self.places.begin_change(id));
                if let Some(begun) = begun {
                    return Ok(begun);
                }
                if Instant::now() >= deadline {
                    return Err(Error::new(
                        sqlstate::OBJECT_IN_USE,
                        "the database is being accessed by other sessions",
                    )
                    .hint("Terminate its sessions first. A transaction may still be finishing."));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        .boxed()
    }
}

fn change_in_progress() -> Error {
    Error::new(sqlstate::IO_ERROR, "a durability change for this database is still in progress")
        .hint("Repeat ALTER DATABASE ... SET durability, or restart the node.")
}

//! Where the commits of each partition are made durable: in the node's own log, or in the one that it keeps in the store.
//!
//! The catalog says where; the engine is told when it starts, and when that changes ([`Engine::set_durability`]):
//!
//! ```text
//!   flush ---> close, if nobody uses it ---> catalog ---> whoever opens it next does so with the other log
//!              (who wants it now waits) --------------------^
//! ```
//!
//! So a manifest covers all that a partition has ever written elsewhere. A start therefore reads of each log only the
//! records of the partitions that commit to it, and whatever step a crash comes after, that is all there is.
//!
//! Should the catalog fail to answer, nobody knows which log a start would read: then the partition stays closed until
//! the change is made again, or the node is started again.
//!
//! The log in the store is opened when the first partition needs it: a node without such partitions asks the store
//! nothing. If it turns out to be damaged when the node starts, nobody can tell whose commits it has lost: no partition that
//! commits to it is opened, and the others go on ([`Places::refuse`]).

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

/// How long a partition may be used yet whose durability is to be changed: the flusher, the cache and short compactions have
/// every one for a moment now and then.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often who waits for that looks.
const LOOK: Duration = Duration::from_millis(10);

/// What is known of the partitions that do not commit to the node's own log.
pub(crate) struct Places {
    node_id: u128,
    /// Of the log in the store.
    options: SharedLogOptions,
    /// The partitions of which the log in the store may hold records.
    known: Option<CatalogPartitions>,
    elsewhere: watch::Sender<HashMap<PartitionId, Place>>,
    /// Why the log in the store is not to be used until the next start.
    refused: OnceLock<Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Shared,
    /// It is closed, and the catalog is being asked to change it.
    Changing,
    /// The catalog was asked, and has not answered.
    Unknown,
}

/// Why a change of durability was not made, as far as is known.
#[derive(Debug)]
pub enum NotChanged {
    /// The catalog has refused it.
    Refused(Error),
    /// It has not answered.
    InDoubt(Error),
}

/// What a log held, by partition.
pub(crate) type Replays = HashMap<PartitionId, Arc<Replay>>;

impl Places {
    pub(crate) fn new(
        node_id: u128,
        shared: &HashSet<PartitionId>,
        options: SharedLogOptions,
        known: Option<CatalogPartitions>,
    ) -> Self {
        let elsewhere = shared.iter().map(|id| (*id, Place::Shared)).collect();
        Places { node_id, options, known, elsewhere: watch::Sender::new(elsewhere), refused: OnceLock::new() }
    }

    /// Whether all partitions commit to the node's own log.
    pub(crate) fn all_local(&self) -> bool {
        self.elsewhere.borrow().is_empty()
    }

    /// The log in the store is damaged. It is not opened again in this life of the node: what it held would be taken for nothing.
    pub(crate) fn refuse(&self, damage: &LogError) {
        tracing::error!(error = %damage, "the log in the store is damaged; what is shared cannot be used");
        let error = Error::new(
            sqlstate::DATA_CORRUPTED,
            "the log in the store is damaged, and with it what this database has committed last",
        );
        let _ = self.refused.set(error.hint(
            "the node's log names the object; when that is restored and the node started again the database is as it was",
        ));
    }

    /// Returns the error of an operation that needs the log in the store, if that log was refused.
    pub(crate) fn check(&self) -> Result<()> {
        self.refused.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// A partition was dropped.
    pub(crate) fn forget(&self, id: PartitionId) {
        self.elsewhere.send_if_modified(|elsewhere| elsewhere.remove(&id).is_some());
    }

    fn of(&self, id: PartitionId) -> Option<Place> {
        self.elsewhere.borrow().get(&id).copied()
    }

    /// Waits while a partition's place is being changed.
    pub(crate) async fn settled(&self, id: PartitionId) {
        let mut elsewhere = self.elsewhere.subscribe();
        // Its sender is ours.
        let _ = elsewhere.wait_for(|elsewhere| elsewhere.get(&id) != Some(&Place::Changing)).await;
    }

    /// Who wants to open the partition waits from now on. `None`: somebody else changes its place already.
    fn begin_change(&self, id: PartitionId) -> Option<Change<'_>> {
        let mut before = None;
        self.elsewhere.send_modify(|elsewhere| before = elsewhere.insert(id, Place::Changing));
        let is_ours = before != Some(Place::Changing);
        is_ours.then(|| Change { places: self, id, before, outcome: Some(Place::Unknown) })
    }

    /// Opens the log in the store. Answers also what it held of partitions that commit to it.
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
            if self.of(header.partition) == Some(Place::Shared) {
                replays.entry(header.partition).or_default().push(end, record);
            }
            Ok(())
        };
        let (options, store) = (self.options.clone(), store.store().clone());
        let log = CommitLog::open_shared(options, store, self.node_id, &mut replay).await?;
        Ok((log, replays.into_iter().map(|(id, replay)| (id, Arc::new(replay))).collect()))
    }
}

/// What is said of a partition that the catalog does not know, by which
/// [`Error::is_of_unknown_partition`] tells the error of a start.
pub(crate) const UNKNOWN: &str = "which the catalog neither has nor has dropped";

/// Refuses a log that holds a record of a partition that the catalog does not know. Nothing of the log was changed so far.
pub(crate) fn refuse_unknown(
    known: Option<&CatalogPartitions>,
    id: PartitionId,
    position: Lsn,
) -> std::result::Result<(), LogError> {
    match known {
        Some(known) if !known.admits(id) => {
            Err(LogError::Replay { position, cause: format!("it belongs to partition {id}, {UNKNOWN}") })
        }
        _ => Ok(()),
    }
}

/// A change that the catalog is asked for. When it is over who waits goes on.
struct Change<'a> {
    places: &'a Places,
    id: PartitionId,
    before: Option<Place>,
    /// What is known when it is over: nothing, unless the catalog answers.
    outcome: Option<Place>,
}

impl Change<'_> {
    fn end(mut self, answer: std::result::Result<(), NotChanged>, durability: Durability) -> Result<()> {
        match answer {
            Ok(()) => {
                self.outcome = (durability == Durability::Shared).then_some(Place::Shared);
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

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.places.elsewhere.send_modify(|elsewhere| {
            // One that was dropped meanwhile is nowhere.
            if elsewhere.remove(&self.id).is_some()
                && let Some(place) = self.outcome
            {
                elsewhere.insert(self.id, place);
            }
        });
    }
}

impl Engine {
    /// Opens the log in the store, if it is not open.
    async fn open_shared_log(self: &Arc<Self>) -> Result<()> {
        let engine = self.clone();
        // In the engine's runtime: that of whoever asks may end before the log. And all of it: should who asks go away, the
        // next one waits for the same opening, which another one would seal.
        let opening = self.node().spill.runtime().spawn(async move {
            let node = engine.node();
            engine.places.check()?;
            let open = async || {
                // No partition commits to it yet, so it holds nothing that counts.
                let (log, _) = engine.places.open_log(&node.store, &node.clock).await.map_err(log_error)?;
                engine.register_callbacks(&log);
                Ok(log)
            };
            node.shared_log.get_or_try_init(open).await.map(drop)
        });
        opening.await.map_err(|cause| {
            Error::new(sqlstate::INTERNAL, format!("opening the log in the store panicked: {cause}"))
        })?
    }

    /// Registers the callbacks of a log: lost records discard the versions of its partitions, and a long backlog wakes the
    /// flusher.
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

    /// The log that a partition commits to.
    pub(crate) fn log_of(&self, id: PartitionId) -> Result<Arc<CommitLog>> {
        let node = self.node();
        match (self.places.of(id), node.shared_log.get()) {
            (None, _) => Ok(node.log.clone()),
            (Some(Place::Shared), Some(log)) => Ok(log.clone()),
            (Some(Place::Shared), None) => self.places.check().and_then(|()| Err(changing())),
            _ => Err(changing()),
        }
    }

    /// Makes a partition's commits durable in this place from now on. Nobody may be using it; `change` is to say it to
    /// the catalog.
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

    /// Flushes and closes a partition, which nobody opens until the change is over.
    fn begin_change(&self, id: PartitionId) -> BoxFuture<'_, Result<Change<'_>>> {
        async move {
            let patience_ends = Instant::now() + PATIENCE;
            loop {
                // One whose place is not known was flushed and closed before.
                if self.places.of(id) != Some(Place::Unknown) {
                    let partition = self.partition(id).await?;
                    flush::flush(self, vec![partition]).await?;
                    self.maintenance.forget(id);
                }
                let mut begun = None;
                self.close_if_unused_and(id, || begun = self.places.begin_change(id));
                if let Some(begun) = begun {
                    return Ok(begun);
                }
                if Instant::now() >= patience_ends {
                    return Err(Error::new(sqlstate::OBJECT_IN_USE, "the database is being used")
                        .hint("End its sessions first; a transaction may still be coming to its end."));
                }
                tokio::time::sleep(LOOK).await;
            }
        }
        .boxed()
    }
}

fn changing() -> Error {
    Error::new(sqlstate::IO_ERROR, "changing the durability of this database has not come to its end")
        .hint("Change it again (ALTER DATABASE ... SET durability), or start the node again.")
}

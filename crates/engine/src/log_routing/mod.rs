//! Log routing: which commit log makes a partition's commits durable, the node's local log or its
//! shared log in the store.
//!
//! The catalog records the choice. The engine learns it at startup and with every change
//! ([`Engine::set_durability`](crate::Engine::set_durability)):
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
//! of its partitions: none of them is opened, and all others work normally
//! ([`LogRouter::mark_damaged`]).

mod change;

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use fulmar_mvcc::{Clock, Node, Replay};
use fulmar_pages::{PartitionId, Record};
use fulmar_sqlite::{Error, Result, UNKNOWN_PARTITION, sqlstate};
use fulmar_store::{CommitLog, LogError, Lsn, PageStore, SharedLogOptions};
use hashbrown::HashMap;
use tokio::sync::watch;

use crate::engine::CatalogPartitions;

/// The log targets of all partitions that do not commit to the local log.
pub(crate) struct LogRouter {
    node_id: u128,
    /// Options of the shared log.
    options: SharedLogOptions,
    /// The partitions that the shared log may hold records of.
    known: Option<CatalogPartitions>,
    pub(super) targets: watch::Sender<HashMap<PartitionId, LogTarget>>,
    /// Why the shared log cannot be used until the next start.
    refused: OnceLock<Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LogTarget {
    Shared,
    /// The partition is closed, and the catalog has been asked for the change.
    Changing,
    /// The catalog was asked and has not answered.
    Unknown,
}

/// Why a durability change failed.
#[derive(Debug)]
pub enum DurabilityChangeError {
    /// The catalog rejected it.
    Refused(Error),
    /// The catalog did not answer, so the outcome is unknown.
    InDoubt(Error),
}

/// Replayed records of a log, by partition.
pub(crate) type Replays = HashMap<PartitionId, Arc<Replay>>;

impl LogRouter {
    pub(crate) fn new(
        node_id: u128,
        shared: &HashSet<PartitionId>,
        options: SharedLogOptions,
        known: Option<CatalogPartitions>,
    ) -> Self {
        let targets = shared.iter().map(|id| (*id, LogTarget::Shared)).collect();
        LogRouter { node_id, options, known, targets: watch::Sender::new(targets), refused: OnceLock::new() }
    }

    /// Whether all partitions commit to the local log.
    pub(crate) fn all_local(&self) -> bool {
        self.targets.borrow().is_empty()
    }

    /// Marks the shared log as damaged. It is not opened again until the node restarts, since its
    /// lost records would be treated as absent.
    pub(crate) fn mark_damaged(&self, damage: &LogError) {
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

    pub(super) fn of(&self, id: PartitionId) -> Option<LogTarget> {
        self.targets.borrow().get(&id).copied()
    }

    /// Waits until no change of the partition's log is in progress.
    pub(crate) async fn wait_for_change(&self, id: PartitionId) {
        let mut targets = self.targets.subscribe();
        // Cannot fail: `self` owns the sender.
        let _ = targets.wait_for(|targets| targets.get(&id) != Some(&LogTarget::Changing)).await;
    }

    /// Returns the log that a partition commits to.
    pub(crate) fn log_of(&self, node: &Node, id: PartitionId) -> Result<Arc<CommitLog>> {
        match (self.of(id), node.shared_log.get()) {
            (None, _) => Ok(node.log.clone()),
            (Some(LogTarget::Shared), Some(log)) => Ok(log.clone()),
            (Some(LogTarget::Shared), None) => self.check().and_then(|()| Err(change_in_progress())),
            _ => Err(change_in_progress()),
        }
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
            cause: format!("the record belongs to partition {id}, {UNKNOWN_PARTITION}"),
        }),
        _ => Ok(()),
    }
}

pub(super) fn change_in_progress() -> Error {
    Error::new(sqlstate::IO_ERROR, "a durability change for this database is still in progress")
        .hint("Repeat ALTER DATABASE ... SET durability, or restart the node.")
}

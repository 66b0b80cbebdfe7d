//! Changes the durability of a partition.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::log_error;
use fulmar_pages::{Durability, PartitionId};
use fulmar_sqlite::{Error, Result, sqlstate};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::Instant;

use super::{DurabilityChangeError, LogRouter, LogTarget};
use crate::engine::Engine;

/// How long a durability change waits until the partition is unused. The flusher, the cache and
/// short compactions use each partition briefly now and then.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(2);

/// How often that wait checks.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl LogRouter {
    /// Begins a change; from now on opens of the partition wait. Returns None if another change is
    /// in progress.
    fn begin_change(&self, id: PartitionId) -> Option<PendingChange<'_>> {
        let mut before = None;
        self.targets.send_modify(|targets| before = targets.insert(id, LogTarget::Changing));
        let is_ours = before != Some(LogTarget::Changing);
        is_ours.then(|| PendingChange { router: self, id, before, outcome: Some(LogTarget::Unknown) })
    }
}

/// A change in progress. Dropping it releases the waiting opens.
struct PendingChange<'a> {
    router: &'a LogRouter,
    id: PartitionId,
    before: Option<LogTarget>,
    /// The target after the change. Unknown unless the catalog answers.
    outcome: Option<LogTarget>,
}

impl PendingChange<'_> {
    fn end(
        mut self,
        answer: std::result::Result<(), DurabilityChangeError>,
        durability: Durability,
    ) -> Result<()> {
        match answer {
            Ok(()) => {
                self.outcome = (durability == Durability::Shared).then_some(LogTarget::Shared);
                Ok(())
            }
            Err(DurabilityChangeError::Refused(error)) => {
                self.outcome = self.before;
                Err(error)
            }
            Err(DurabilityChangeError::InDoubt(error)) => Err(error),
        }
    }
}

impl Drop for PendingChange<'_> {
    fn drop(&mut self) {
        self.router.targets.send_modify(|targets| {
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
        // is a separate task, so that it completes if the caller is dropped and later callers
        // wait for it: a second opening would seal the log.
        let opening = self.node().spill.runtime().spawn(async move {
            let node = engine.node();
            engine.log_router().check()?;
            let open = async || {
                // No partition commits to the log yet, so its records are irrelevant.
                let (log, _) =
                    engine.log_router().open_log(&node.store, &node.clock).await.map_err(log_error)?;
                engine.maintenance().register_callbacks(&log);
                Ok(log)
            };
            node.shared_log.get_or_try_init(open).await.map(drop)
        });
        opening.await.map_err(|cause| {
            Error::new(sqlstate::INTERNAL, format!("panic while opening the shared log: {cause}"))
        })?
    }

    /// Changes a partition's durability. The partition must be unused; `change` records it in the
    /// catalog.
    pub async fn set_durability(
        self: &Arc<Self>,
        id: PartitionId,
        durability: Durability,
        change: impl Future<Output = std::result::Result<(), DurabilityChangeError>>,
    ) -> Result<()> {
        self.check_primary()?;
        if self.member().is_some() {
            let message = "cannot change the durability of a database in a cluster";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                .hint("Create a database with that durability, and copy the data."));
        }
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
                if self.log_router().of(id) != Some(LogTarget::Unknown) {
                    let partition = self.partitions().partition(id).await?;
                    self.maintenance().flush(vec![partition]).await?;
                    self.maintenance().forget_compaction(id);
                }
                let mut begun = None;
                self.partitions().close_if_unused_and(id, || begun = self.log_router().begin_change(id));
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

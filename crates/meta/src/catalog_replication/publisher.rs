//! The primary's side of catalog replication: publishes the catalog in the object store after
//! changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_pages::{CatalogEntry, StoredCatalog};
use fulmar_store::{PageStore, StoreError};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::unavailable;
use crate::{Change, Entry, MetaError, MetadataStore, Observer};

/// Changes within this time after the first one are published together.
const BATCH_DELAY: Duration = Duration::from_millis(200);
/// The pause after a publication is at least this many times its duration, which limits the cost of
/// a large catalog.
const PAUSE_FACTOR: u32 = 10;
/// Delay after a failure. Doubled with each failure, up to [`MAX_RETRY_DELAY`].
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// Maximum attempts of a publication, if its number is taken each time.
const MAX_NUMBER_ATTEMPTS: u32 = 10;
/// Maximum time that the last publication may delay the shutdown of a node.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Publishes the catalog in the background. Its failures do not delay other tasks.
pub struct Publisher {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Receives change notifications. The task then reads the contents itself.
#[derive(Default)]
struct Changes {
    /// There are unpublished changes.
    is_pending: AtomicBool,
    notify: Notify,
}

impl Changes {
    fn mark_pending(&self) {
        self.is_pending.store(true, Ordering::Release);
        self.notify.notify_one();
    }
}

impl Observer for Changes {
    fn snapshot(&self, _: Vec<Entry>) -> Result<(), MetaError> {
        self.mark_pending();
        Ok(())
    }

    fn changed(&self, _: &[Change]) {
        self.mark_pending();
    }
}

/// The result of a publication.
enum Published {
    Yes,
    /// Another process has taken over the store.
    TakenOver,
}

struct Task {
    metadata: Arc<dyn MetadataStore>,
    store: PageStore,
    node: u128,
    /// Kept alive here, because the metadata store holds it weakly.
    changes: Arc<Changes>,
    /// `changes` is registered as an observer.
    is_following: bool,
    /// The greatest known catalog number in the store.
    newest: Option<u64>,
}

impl Publisher {
    /// Starts publishing the contents of `metadata` as the catalog of `node`. Returns before the
    /// first read.
    pub fn start(metadata: Arc<dyn MetadataStore>, store: PageStore, node: u128) -> Self {
        let changes = Arc::new(Changes::default());
        changes.mark_pending();
        let (stop, stopping) = watch::channel(false);
        let task = Task { metadata, store, node, changes, is_following: false, newest: None };
        Publisher { stop, task: tokio::spawn(task.run(stopping)) }
    }

    /// Publishes pending changes, for at most 3 s, and stops.
    pub async fn stop(self) {
        let _ = self.stop.send(true); // Fails only if the task has already ended.
        let mut task = self.task;
        if timeout(SHUTDOWN_TIMEOUT, &mut task).await.is_err() {
            tracing::warn!(
                "the last catalog changes are not published: the store is slow; the next start publishes them"
            );
            task.abort();
        }
    }
}

impl Task {
    async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        let (mut pause, mut retry_delay) = (BATCH_DELAY, MIN_RETRY_DELAY);
        loop {
            // A dropped sender also stops the task.
            let mut is_stopping = tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => true,
                () = self.changes.notify.notified() => false,
            };
            if !is_stopping {
                is_stopping = timeout(pause, stopping.wait_for(|stop| *stop)).await.is_ok();
            }
            // Reset before the contents are read, so that later changes are detected.
            if self.changes.is_pending.swap(false, Ordering::AcqRel) {
                let began = Instant::now();
                match self.publish().await {
                    Ok(Published::Yes) => {
                        pause = BATCH_DELAY.max(began.elapsed() * PAUSE_FACTOR);
                        retry_delay = MIN_RETRY_DELAY;
                    }
                    Ok(Published::TakenOver) => {
                        tracing::error!(
                            "another process has taken over the store; this node stops publishing its catalog"
                        );
                        return;
                    }
                    Err(error) => {
                        let remedy = error.remedy();
                        tracing::warn!(%error, remedy, "cannot publish the catalog; replicas use an old one");
                        self.changes.mark_pending();
                        pause = retry_delay;
                        retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
                    }
                }
            }
            if is_stopping {
                return;
            }
        }
    }

    /// Publishes the current contents, unless they are already published, and deletes older
    /// catalogs.
    async fn publish(&mut self) -> Result<Published, MetaError> {
        if !self.is_following {
            self.metadata.follow(self.changes.clone()).await?;
            self.is_following = true;
            // The scan below includes all changes notified so far.
            self.changes.is_pending.store(false, Ordering::Release);
        }
        let entries = self.metadata.scan("").await?;
        let entry =
            |entry: Entry| CatalogEntry { key: entry.key, value: entry.value, modified: entry.modified.0 };
        let entries = entries.into_iter().map(entry).collect();
        let mut catalog = StoredCatalog { number: 0, node: self.node, entries };
        for _ in 0..MAX_NUMBER_ATTEMPTS {
            let newest = match self.newest {
                Some(newest) => Some(newest),
                None => self.newest_if_different(&mut catalog).await?,
            };
            let Some(newest) = newest else { return self.delete_older(catalog.number).await };
            let Some(next) = self.store.next_catalog(newest) else { return Ok(Published::TakenOver) };
            catalog.number = next;
            match self.store.put_catalog(&catalog).await {
                Ok(()) => {
                    self.newest = Some(catalog.number);
                    return self.delete_older(catalog.number).await;
                }
                // Another process used the number. List the catalogs again.
                Err(StoreError::Exists { .. }) => self.newest = None,
                Err(error) => {
                    // The object may still appear.
                    self.newest = None;
                    return Err(unavailable(&error));
                }
            }
        }
        Err(MetaError::Unavailable {
            cause: "cannot publish the catalog: another process keeps publishing to this store".to_owned(),
            remedy: "Make sure that only one node is started with this store.",
        })
    }

    /// Returns the greatest catalog number in the store, or 0. Returns `None` if that catalog
    /// already has the same contents, and sets `catalog.number` to its number.
    async fn newest_if_different(&mut self, catalog: &mut StoredCatalog) -> Result<Option<u64>, MetaError> {
        let numbers = self.store.list_catalogs().await.map_err(|error| unavailable(&error))?;
        let Some(newest) = numbers.last().copied() else { return Ok(Some(0)) };
        match self.store.read_catalog(newest).await {
            // A catalog of an earlier term is not accepted: its process may still publish another
            // one.
            Ok(stored)
                if self.store.is_catalog_of_this_term(newest)
                    && (stored.node, &stored.entries) == (catalog.node, &catalog.entries) =>
            {
                (self.newest, catalog.number) = (Some(newest), newest);
                Ok(None)
            }
            // Deleted meanwhile, damaged, or different. The new catalog gets the next number.
            Ok(_)
            | Err(
                StoreError::Missing { .. } | StoreError::Damaged { .. } | StoreError::WrongIdentity { .. },
            ) => Ok(Some(newest)),
            Err(error) => Err(unavailable(&error)),
        }
    }

    /// Deletes catalogs older than the published one. Detects whether a later term has published.
    async fn delete_older(&self, published: u64) -> Result<Published, MetaError> {
        let numbers = self.store.list_catalogs().await.map_err(|error| unavailable(&error))?;
        if numbers.last().is_some_and(|newest| self.store.next_catalog(*newest).is_none()) {
            return Ok(Published::TakenOver);
        }
        for number in numbers.into_iter().filter(|number| *number < published) {
            self.store.delete_catalog(number).await.map_err(|error| unavailable(&error))?;
        }
        Ok(Published::Yes)
    }
}

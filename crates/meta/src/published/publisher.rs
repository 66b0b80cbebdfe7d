//! The owner's side: puts the catalog into the store when it has changed.

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

/// What comes within this time after a change goes with it.
const GATHER: Duration = Duration::from_millis(200);
/// A large catalog takes longer: this many times as long as the last publication has taken nothing is published.
const REST: u32 = 10;
/// How long to wait after a failure; doubled after each, up to the second.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);
/// Numbers that are tried because others are taken.
const MOST_NUMBERS: u32 = 10;
/// How long the end of a node may take because of this.
const PATIENCE_AT_THE_END: Duration = Duration::from_secs(3);

/// Publishes the catalog in the background. Whatever goes wrong with it holds nobody up.
pub struct Publisher {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Is told of changes; what they are the task reads.
#[derive(Default)]
struct Changes {
    /// There is something that has not been published.
    any: AtomicBool,
    noted: Notify,
}

impl Changes {
    fn note(&self) {
        self.any.store(true, Ordering::Release);
        self.noted.notify_one();
    }
}

impl Observer for Changes {
    fn snapshot(&self, _: Vec<Entry>) -> Result<(), MetaError> {
        self.note();
        Ok(())
    }

    fn changed(&self, _: &[Change]) {
        self.note();
    }
}

/// What came of a publication.
enum Published {
    Yes,
    /// The store is another process's now.
    TakenOver,
}

struct Task {
    metadata: Arc<dyn MetadataStore>,
    store: PageStore,
    node: u128,
    /// The metadata store holds it weakly.
    changes: Arc<Changes>,
    /// It is told of what changes.
    follows: bool,
    /// What is known to be the newest in the store.
    newest: Option<u64>,
}

impl Publisher {
    /// Begins to publish what `metadata` holds, as the catalog of `node`. Nobody waits until that has been read.
    pub fn start(metadata: Arc<dyn MetadataStore>, store: PageStore, node: u128) -> Self {
        let changes = Arc::new(Changes::default());
        changes.note();
        let (stop, stopping) = watch::channel(false);
        let task = Task { metadata, store, node, changes, follows: false, newest: None };
        Publisher { stop, task: tokio::spawn(task.run(stopping)) }
    }

    /// Publishes what has not been yet, if that is soon done, and ends.
    pub async fn stop(self) {
        let _ = self.stop.send(true); // the task may have ended: it is asked next
        let mut task = self.task;
        if timeout(PATIENCE_AT_THE_END, &mut task).await.is_err() {
            tracing::warn!(
                "the last changes of the catalog are not in the store: it is slow; the next start puts them there"
            );
            task.abort();
        }
    }
}

impl Task {
    async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        let (mut rest, mut delay) = (GATHER, FIRST_DELAY);
        loop {
            // A sender that is gone says the same as one that stops.
            let mut stops = tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => true,
                () = self.changes.noted.notified() => false,
            };
            if !stops {
                stops = timeout(rest, stopping.wait_for(|stop| *stop)).await.is_ok();
            }
            // Before what there is is read: what changes from here on is noted anew.
            if self.changes.any.swap(false, Ordering::AcqRel) {
                let began = Instant::now();
                match self.publish().await {
                    Ok(Published::Yes) => {
                        (rest, delay) = (GATHER.max(began.elapsed() * REST), FIRST_DELAY);
                    }
                    Ok(Published::TakenOver) => {
                        tracing::error!(
                            "another process has taken over the store; this node's catalog is published no more"
                        );
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, remedy = error.remedy(), "the catalog is not in the store as it is now; who reads the store beside this node sees the one before");
                        self.changes.note();
                        (rest, delay) = (delay, (delay * 2).min(LONGEST_DELAY));
                    }
                }
            }
            if stops {
                return;
            }
        }
    }

    /// Puts what there is into the store, if it is not there; deletes what is older.
    async fn publish(&mut self) -> Result<Published, MetaError> {
        if !self.follows {
            self.metadata.follow(self.changes.clone()).await?;
            self.follows = true;
            // All that it was told of so far is read now.
            self.changes.any.store(false, Ordering::Release);
        }
        let entries = self.metadata.scan("").await?;
        let entry =
            |entry: Entry| CatalogEntry { key: entry.key, value: entry.value, modified: entry.modified.0 };
        let entries = entries.into_iter().map(entry).collect();
        let mut catalog = StoredCatalog { number: 0, node: self.node, entries };
        for _ in 0..MOST_NUMBERS {
            let newest = match self.newest {
                Some(newest) => Some(newest),
                None => self.newest_unless(&mut catalog).await?,
            };
            let Some(newest) = newest else { return self.delete_older(catalog.number).await };
            let Some(next) = self.store.next_catalog(newest) else { return Ok(Published::TakenOver) };
            catalog.number = next;
            match self.store.put_catalog(&catalog).await {
                Ok(()) => {
                    self.newest = Some(catalog.number);
                    return self.delete_older(catalog.number).await;
                }
                // Somebody was faster: all is looked at anew.
                Err(StoreError::Exists { .. }) => self.newest = None,
                Err(error) => {
                    // It may yet appear.
                    self.newest = None;
                    return Err(unavailable(&error));
                }
            }
        }
        Err(MetaError::Unavailable {
            cause: "cannot be published: another process publishes one all the time".to_owned(),
            remedy: "see that one node only is started with this store",
        })
    }

    /// The greatest number that there is (0 if there is none), unless that says the same already: then it is given its number.
    async fn newest_unless(&mut self, catalog: &mut StoredCatalog) -> Result<Option<u64>, MetaError> {
        let numbers = self.store.list_catalogs().await.map_err(|error| unavailable(&error))?;
        let Some(newest) = numbers.last().copied() else { return Ok(Some(0)) };
        match self.store.read_catalog(newest).await {
            // One of an earlier term may yet be followed by what its process says.
            Ok(stored)
                if self.store.is_catalog_of_this_term(newest)
                    && (stored.node, &stored.entries) == (catalog.node, &catalog.entries) =>
            {
                (self.newest, catalog.number) = (Some(newest), newest);
                Ok(None)
            }
            // Gone since, or damaged, or of before: what is put in its place has the next number.
            Ok(_)
            | Err(StoreError::Missing { .. } | StoreError::Damaged { .. } | StoreError::Misnamed { .. }) => {
                Ok(Some(newest))
            }
            Err(error) => Err(unavailable(&error)),
        }
    }

    /// Deletes what is older than what this process has said last; looks whether another one has said something since.
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

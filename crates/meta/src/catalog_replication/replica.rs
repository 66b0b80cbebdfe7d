//! The replica's side of catalog replication: another node's catalog as a read-only metadata store.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_pages::{CatalogEntry, StoredCatalog};
use fulmar_store::{PageStore, StoreError};
use parking_lot::Mutex;

use super::unavailable;
use crate::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};

/// Interval of polling for a newer catalog.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum attempts to read a catalog, if each one is deleted for a newer one before it is read.
const MAX_READ_ATTEMPTS: u32 = 20;

/// The newest known catalog of an object store.
pub struct CatalogReplica {
    store: PageStore,
    node: u128,
    /// The number of the current catalog. Locked during a poll.
    current: tokio::sync::Mutex<u64>,
    entries: Mutex<BTreeMap<String, Entry>>,
    observers: Mutex<Vec<Weak<dyn Observer>>>,
}

impl CatalogReplica {
    /// Reads the newest catalog.
    ///
    /// Errors: [`MetaError::Unavailable`] if there is none or the store cannot be read,
    /// [`MetaError::Corrupt`] if it is invalid.
    pub async fn open(store: PageStore) -> Result<Arc<Self>, MetaError> {
        let Some(newest) = newest(&store, 0).await? else {
            return Err(MetaError::Unavailable {
                cause: format!("found no catalog in {}", store.store()),
                remedy: "Check that this is the store of a Fulmar node, and start that node once with this \
                         version: it then publishes its catalog.",
            });
        };
        Ok(Arc::new(CatalogReplica {
            node: newest.node,
            current: tokio::sync::Mutex::new(newest.number),
            entries: Mutex::new(sorted(newest.entries)),
            observers: Mutex::default(),
            store,
        }))
    }

    /// The id of the node that published the catalog.
    pub fn node(&self) -> u128 {
        self.node
    }

    /// Polls for newer catalogs. Does not return.
    pub async fn run(self: Arc<Self>) {
        let mut last_error = None;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            match self.poll().await {
                Ok(()) => {
                    if last_error.take().is_some() {
                        tracing::info!("the catalog in the store can be read again");
                    }
                }
                // Logged once, not with every poll.
                Err(error) => {
                    let text = error.to_string();
                    if last_error.as_ref() != Some(&text) {
                        let remedy = error.remedy();
                        tracing::error!(%error, remedy, "cannot read the catalog; using the last known one");
                        last_error = Some(text);
                    }
                }
            }
        }
    }

    /// Polls once, and passes a newer catalog to the observers.
    pub async fn poll(&self) -> Result<(), MetaError> {
        let mut current = self.current.lock().await;
        let Some(newest) = newest(&self.store, *current).await? else { return Ok(()) };
        if newest.node != self.node {
            return Err(MetaError::Unavailable {
                cause: "now has the catalog of another node".to_owned(),
                remedy: "Check which node uses this store, and restart this process.",
            });
        }
        let entries = sorted(newest.entries);
        let all: Vec<Entry> = entries.values().cloned().collect();
        let observers: Vec<_> = self.observers.lock().iter().filter_map(Weak::upgrade).collect();
        for observer in observers {
            observer.snapshot(all.clone())?;
        }
        *self.entries.lock() = entries;
        *current = newest.number;
        Ok(())
    }
}

fn sorted(entries: Vec<CatalogEntry>) -> BTreeMap<String, Entry> {
    let entry = |CatalogEntry { key, value, modified }: CatalogEntry| {
        (key.clone(), Entry { key, value, modified: Revision(modified) })
    };
    entries.into_iter().map(entry).collect()
}

/// The newest catalog, if its number is greater than `current`.
async fn newest(store: &PageStore, current: u64) -> Result<Option<StoredCatalog>, MetaError> {
    for _ in 0..MAX_READ_ATTEMPTS {
        let numbers = store.list_catalogs().await.map_err(|error| unavailable(&error))?;
        let Some(number) = numbers.last().copied().filter(|number| *number > current) else {
            return Ok(None);
        };
        match store.read_catalog(number).await {
            Ok(catalog) => return Ok(Some(catalog)),
            Err(StoreError::Missing { .. }) => {}
            Err(error @ (StoreError::Damaged { .. } | StoreError::WrongIdentity { .. })) => {
                return Err(MetaError::Corrupt {
                    place: "in the store".to_owned(),
                    cause: error.to_string(),
                });
            }
            Err(error) => return Err(unavailable(&error)),
        }
    }
    Err(MetaError::Unavailable {
        cause: "changes faster than it can be read".to_owned(),
        remedy: "No action is needed: the read is retried.",
    })
}

#[async_trait]
impl MetadataStore for CatalogReplica {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        Ok(self.entries.lock().get(key).cloned())
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let entries = self.entries.lock();
        let found = entries.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix));
        Ok(found.map(|(_, entry)| entry.clone()).collect())
    }

    async fn transact(&self, _: Transaction) -> Result<Outcome, MetaError> {
        Err(MetaError::ReadOnly)
    }

    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        // Prevents a concurrent poll.
        let _current = self.current.lock().await;
        observer.snapshot(self.scan("").await?)?;
        let mut observers = self.observers.lock();
        observers.retain(|observer| observer.strong_count() > 0);
        observers.push(Arc::downgrade(&observer));
        Ok(())
    }
}

//! The reader's side: the catalog of somebody else's node, as a metadata store that takes no changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_pages::{CatalogEntry, StoredCatalog};
use fulmar_store::{PageStore, StoreError};
use parking_lot::Mutex;

use super::unavailable;
use crate::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};

/// How often is looked for a newer catalog.
const PERIOD: Duration = Duration::from_secs(1);
/// Catalogs that are tried because each is gone when it is to be read: a newer one has come.
const MOST_TRIES: u32 = 20;

/// The newest catalog of a store, as far as it is known.
pub struct Followed {
    store: PageStore,
    node: u128,
    /// One looks at a time; what is known of the catalog that is shown.
    shown: tokio::sync::Mutex<u64>,
    entries: Mutex<BTreeMap<String, Entry>>,
    observers: Mutex<Vec<Weak<dyn Observer>>>,
}

impl Followed {
    /// Reads the newest catalog.
    ///
    /// Errors: [`MetaError::Unavailable`] if there is none, or the store cannot be read; [`MetaError::Corrupt`] if it cannot be
    /// understood.
    pub async fn open(store: PageStore) -> Result<Arc<Self>, MetaError> {
        let Some(newest) = newest(&store, 0).await? else {
            return Err(MetaError::Unavailable {
                cause: format!("finds no catalog in {}", store.store()),
                remedy: "see that it is the store of a Fulmar node, and start that node once with this version: it puts its catalog there",
            });
        };
        Ok(Arc::new(Followed {
            node: newest.node,
            shown: tokio::sync::Mutex::new(newest.number),
            entries: Mutex::new(sorted(newest.entries)),
            observers: Mutex::default(),
            store,
        }))
    }

    /// Whose catalog it is.
    pub fn node(&self) -> u128 {
        self.node
    }

    /// Follows the catalog, for ever.
    pub async fn go_on(self: Arc<Self>) {
        let mut told = None;
        loop {
            tokio::time::sleep(PERIOD).await;
            match self.look().await {
                Ok(()) => {
                    if told.take().is_some() {
                        tracing::info!("the catalog in the store can be read again");
                    }
                }
                // Not each second anew.
                Err(error) => {
                    let text = error.to_string();
                    if told.as_ref() != Some(&text) {
                        tracing::error!(%error, remedy = error.remedy(), "the catalog in the store cannot be followed; the last one is shown");
                        told = Some(text);
                    }
                }
            }
        }
    }

    /// Looks once whether there is a newer one, and shows it.
    pub async fn look(&self) -> Result<(), MetaError> {
        let mut shown = self.shown.lock().await;
        let Some(newest) = newest(&self.store, *shown).await? else { return Ok(()) };
        if newest.node != self.node {
            return Err(MetaError::Unavailable {
                cause: "holds the catalog of another node now".to_owned(),
                remedy: "see whose store it is, and start this process again",
            });
        }
        let entries = sorted(newest.entries);
        let all: Vec<Entry> = entries.values().cloned().collect();
        let observers: Vec<_> = self.observers.lock().iter().filter_map(Weak::upgrade).collect();
        for observer in observers {
            observer.snapshot(all.clone())?;
        }
        *self.entries.lock() = entries;
        *shown = newest.number;
        Ok(())
    }
}

fn sorted(entries: Vec<CatalogEntry>) -> BTreeMap<String, Entry> {
    let entry = |CatalogEntry { key, value, modified }: CatalogEntry| {
        (key.clone(), Entry { key, value, modified: Revision(modified) })
    };
    entries.into_iter().map(entry).collect()
}

/// The newest catalog, if it is newer than that of number `shown`.
async fn newest(store: &PageStore, shown: u64) -> Result<Option<StoredCatalog>, MetaError> {
    for _ in 0..MOST_TRIES {
        let numbers = store.list_catalogs().await.map_err(|error| unavailable(&error))?;
        let Some(number) = numbers.last().copied().filter(|number| *number > shown) else { return Ok(None) };
        match store.read_catalog(number).await {
            Ok(catalog) => return Ok(Some(catalog)),
            Err(StoreError::Missing { .. }) => {}
            Err(error @ (StoreError::Damaged { .. } | StoreError::Misnamed { .. })) => {
                return Err(MetaError::Corrupt {
                    place: "in the store".to_owned(),
                    cause: error.to_string(),
                });
            }
            Err(error) => return Err(unavailable(&error)),
        }
    }
    Err(MetaError::Unavailable {
        cause: "is changed faster than it can be read".to_owned(),
        remedy: "it is tried again",
    })
}

#[async_trait]
impl MetadataStore for Followed {
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
        // Nothing newer is shown meanwhile.
        let _shown = self.shown.lock().await;
        observer.snapshot(self.scan("").await?)?;
        let mut observers = self.observers.lock();
        observers.retain(|observer| observer.strong_count() > 0);
        observers.push(Arc::downgrade(&observer));
        Ok(())
    }
}

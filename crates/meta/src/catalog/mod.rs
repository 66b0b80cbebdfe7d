//! The catalog: tenants, users, privileges and partitions. Typed, fully cached in memory, changed
//! by optimistic transactions.
//!
//! The crate documentation describes the keys, the values, and the two steps of creating and
//! dropping a tenant.
//!
//! A change is a *plan*: a function from the cached state to a [`Transaction`] that compares the
//! revision of every record that it read. If the transaction conflicts, the cache already contains
//! the conflicting change (guaranteed by [`MetadataStore`]), and the plan is computed again. All
//! checks are therefore made in the plan only, and a concurrent change cannot invalidate them. The
//! cache is updated by the store, so it stays correct if the future of a change is dropped.

mod cache;
mod names;
mod partitions;
mod records;
mod tenants;
mod tokens;
mod types;
mod users;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_pages::{Durability, PartitionId};

use crate::{Entry, Limits, MetaError, MetadataStore, Outcome, Revision, Transaction};
use cache::{Cache, State};
use partitions::IdBlock;
use records::Key;
pub use types::{
    Access, PartitionRecord, SaltKey, ScramVerifier, SecretHash, Tenant, TenantState, Token, User,
};

/// The tenant for administrative connections. It always exists.
pub const SYSTEM_TENANT: &str = "fulmar";
/// The partition of the system tenant.
pub const SYSTEM_PARTITION: PartitionId = PartitionId(1);
/// The superuser that always exists, initially without a password. It owns the system tenant.
pub const SYSTEM_USER: &str = "fulmar";

/// Maximum attempts of a change. A conflict requires that another change of the same record has
/// just committed, so more than a few in a row indicate a fault.
const MAX_ATTEMPTS: u32 = 64;

/// The catalog of a node or a cluster. Lookups use memory, changes go through the metadata store.
pub struct Catalog {
    store: Arc<dyn MetadataStore>,
    cache: Arc<Cache>,
    ids: tokio::sync::Mutex<IdBlock>,
    now_unix_ms: fn() -> u64,
}

impl Catalog {
    /// Reads the whole catalog into memory. Creates the system tenant and the system user if they
    /// do not exist.
    ///
    /// Errors: those of the store, and [`MetaError::Corrupt`] for an invalid record.
    pub async fn open(store: Arc<dyn MetadataStore>) -> Result<Arc<Catalog>, MetaError> {
        Self::open_with_clock(store, system_time_ms).await
    }

    /// Like [`Catalog::open`], with the caller's clock (milliseconds since 1970).
    pub async fn open_with_clock(
        store: Arc<dyn MetadataStore>,
        now_unix_ms: fn() -> u64,
    ) -> Result<Arc<Catalog>, MetaError> {
        let catalog = Self::follow(store, now_unix_ms).await?;
        catalog.create_system_tenant().await?;
        catalog.add_missing_records().await?;
        catalog.undo_interrupted_drops().await?;
        Ok(Arc::new(catalog))
    }

    /// Opens another node's catalog read-only. Creates no records.
    pub async fn read_only(store: Arc<dyn MetadataStore>) -> Result<Arc<Catalog>, MetaError> {
        Self::follow(store, system_time_ms).await.map(Arc::new)
    }

    async fn follow(store: Arc<dyn MetadataStore>, now_unix_ms: fn() -> u64) -> Result<Catalog, MetaError> {
        crate::copy::reject_unfinished(&*store).await?;
        let cache = Arc::new(Cache::default());
        store.follow(cache.clone()).await?;
        Ok(Catalog { store, cache, ids: tokio::sync::Mutex::default(), now_unix_ms })
    }

    /// Creates the initial records of a new store, in one transaction.
    async fn create_system_tenant(&self) -> Result<(), MetaError> {
        let (created_unix_ms, salt_key) = ((self.now_unix_ms)(), SaltKey::random());
        self.change(|state| {
            if state.tenants.contains_key(SYSTEM_TENANT) {
                return Ok((Transaction::new(), ()));
            }
            let tenant = Tenant {
                name: SYSTEM_TENANT.to_owned(),
                partition: SYSTEM_PARTITION,
                owner: SYSTEM_USER.to_owned(),
                created_unix_ms,
                state: TenantState::Ready,
                limits: Limits::default(),
                durability: Durability::default(),
                revision: Revision(0),
            };
            let user = User {
                name: SYSTEM_USER.to_owned(),
                superuser: true,
                verifier: None,
                leaving: false,
                revision: Revision(0),
            };
            let records = [
                (Key::Tenant(SYSTEM_TENANT), records::tenant_value(&tenant)),
                (Key::User(SYSTEM_USER), records::user_value(&user)),
                (
                    Key::Partition(SYSTEM_PARTITION),
                    records::partition_value(&PartitionRecord::first(SYSTEM_PARTITION)),
                ),
                (Key::PartitionCounter, records::counter_value(SYSTEM_PARTITION.0 + 1)),
                (Key::DroppedCounter, records::dropped_counter_value(SYSTEM_PARTITION.0 + 1)),
                (Key::Salt, records::salt_key_value(&salt_key)),
            ];
            let transaction = records.into_iter().fold(Transaction::new(), |transaction, (key, value)| {
                transaction.absent(key.to_string()).put(key.to_string(), value)
            });
            Ok((transaction, ()))
        })
        .await?;
        Ok(())
    }

    /// Waits until lookups include every change that was committed before the call, by any node.
    ///
    /// Errors: those of the store.
    pub async fn catch_up(&self) -> Result<(), MetaError> {
        // The record exists, so this changes nothing. It conflicts at the newest revision, which the
        // cache has reached when the store returns.
        let conflicting = Transaction::new().absent(Key::Tenant(SYSTEM_TENANT).to_string());
        self.store.transact(conflicting).await.map(drop)
    }

    /// Plans and commits a change. Retries after conflicts, at most [`MAX_ATTEMPTS`] times. Returns
    /// the plan's result and the revision of the change. An empty transaction is not run.
    async fn change<T>(
        &self,
        plan: impl Fn(&State) -> Result<(Transaction, T), MetaError>,
    ) -> Result<(T, Revision), MetaError> {
        for _ in 0..MAX_ATTEMPTS {
            let (transaction, answer) = plan(&self.cache.state())?;
            if transaction == Transaction::default() {
                return Ok((answer, Revision::default()));
            }
            if let Outcome::Committed(revision) = self.store.transact(transaction).await? {
                return Ok((answer, revision));
            }
        }
        Err(MetaError::Unavailable {
            cause: format!("rejected a change {MAX_ATTEMPTS} times because of concurrent changes"),
            remedy: "Retry the change.",
        })
    }
}

/// The partition of a key `partition/ID`. `None` for other keys.
pub fn partition_of_key(key: &str) -> Result<Option<PartitionId>, MetaError> {
    Ok(match Key::parse(key)? {
        Some(Key::Partition(id)) => Some(id),
        _ => None,
    })
}

/// The value that an entry of a single node's catalog has in the catalog of a cluster, where every
/// tenant is `shared`.
pub fn value_in_cluster(entry: &Entry) -> Result<Vec<u8>, MetaError> {
    match Key::parse(&entry.key)? {
        Some(Key::Tenant(name)) => {
            let tenant = records::tenant(name, entry)?;
            Ok(records::tenant_value(&Tenant { durability: Durability::Shared, ..tenant }))
        }
        _ => Ok(entry.value.clone()),
    }
}

fn system_time_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX)
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.cache.state();
        f.debug_struct("Catalog")
            .field("tenants", &state.tenants.len())
            .field("users", &state.users.len())
            .finish_non_exhaustive()
    }
}

//! The interface of a metadata store: a transactional key-value store with revisions. It is limited
//! to features that both etcd and a local file can provide.
//!
//! Keys are text, values are bytes. Every transaction that changes something creates the next
//! [`Revision`]. Each key has the revision that last put it. A [`Transaction`] is a list of
//! compares and a list of operations. If all compares hold, all operations are applied at one
//! revision; otherwise none is.
//!
//! ```text
//!   Transaction::new().absent("tenant/ada").unchanged("counter/partition", r7)   if
//!       .put("tenant/ada", ...).put("counter/partition", ...)                    then
//! ```
//!
//! A store notifies [`Observer`]s: first of a snapshot, then of each change in order of revision. A
//! cache on top of it is exact because of this rule: **when `transact` returns, every observer in
//! this process has been notified of all changes up to the revision in the outcome**. A caller
//! whose transaction commits therefore sees it in the cache, and a caller whose transaction
//! conflicts sees the change that it conflicts with. The rule does not apply to a transaction
//! without operations whose compares hold: it renews leases, which must not wait for a cache.

use std::sync::Arc;

use async_trait::async_trait;

use crate::MetaError;

/// Maximum length of a key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;
/// Maximum length of a value, in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// Maximum number of compares, and of operations, in one transaction. etcd's default is 128, and
/// the etcd store adds one of each.
pub const MAX_TRANSACTION_STEPS: usize = 127;
/// Maximum length of all keys and values in one transaction, in bytes: one value and all keys of
/// maximum length. etcd's default limit of a request is 1.5 MiB.
pub const MAX_TRANSACTION_BYTES: usize = MAX_VALUE_BYTES + 2 * MAX_TRANSACTION_STEPS * MAX_KEY_BYTES;

/// Identifies a change of the store. Grows with every transaction that has operations; not every
/// number is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision that put this value.
    pub modified: Revision,
}

/// A condition of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The key has no value.
    Absent(String),
    /// The key has a value that was put by this revision.
    Unchanged(String, Revision),
}

/// A change made by a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sets a key's value.
    Put(String, Vec<u8>),
    /// Deletes a key. Does nothing if it has no value.
    Delete(String),
}

/// Compares and operations that are applied atomically. No key may occur in two operations.
///
/// A transaction without operations is a linearizable check of its compares. It writes nothing, so
/// it also succeeds on a store that is out of space, and creates no revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// Conditions that must all hold.
    pub compares: Vec<Compare>,
    /// Changes that are applied if the compares hold.
    pub operations: Vec<Operation>,
}

/// The outcome of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The compares held. The operations are durable, at this revision. Without operations it is
    /// the revision of the last change.
    Committed(Revision),
    /// A compare did not hold at this revision. Nothing was changed.
    Conflict(Revision),
}

/// A change of one key, as passed to observers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// Its new value. `None` if it was deleted.
    pub value: Option<Vec<u8>>,
    /// The revision that changed it.
    pub revision: Revision,
}

/// Receives all contents and changes of a store in order. Called on the store's thread: must return
/// quickly and not block.
pub trait Observer: Send + Sync {
    /// All entries. Called first, and again whenever changes may have been missed. An error of a
    /// later snapshot leaves the observer outdated: transactions fail with
    /// [`MetaError::CacheStale`] until it has accepted a snapshot.
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError>;
    /// The revision of the snapshot that was accepted before. Called by the embedded store only.
    fn positioned(&self, _revision: Revision) {}
    /// The changes of one transaction.
    fn changed(&self, changes: &[Change]);
}

/// A metadata store. It is linearizable: an answer reflects every transaction that completed before
/// the request.
#[async_trait]
pub trait MetadataStore: Send + Sync {
    /// The value of a key, if it has one.
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError>;

    /// All keys that begin with `prefix`, in order of their bytes.
    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError>;

    /// Runs a transaction. It is durable when this returns. If the future is dropped, it may or may
    /// not be applied.
    ///
    /// An error means that nothing was changed, with two exceptions: [`MetaError::OutcomeUnknown`],
    /// and [`MetaError::CacheStale`], which contains the outcome.
    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError>;

    /// Registers an observer, which receives a snapshot and then all changes. The store holds it
    /// weakly: it is notified until the caller drops it. An error of the first
    /// [`Observer::snapshot`] is returned here, and the observer is not registered.
    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError>;
}

impl Outcome {
    /// The revision at which the outcome was decided.
    pub fn revision(self) -> Revision {
        match self {
            Outcome::Committed(revision) | Outcome::Conflict(revision) => revision,
        }
    }
}

impl Transaction {
    /// An empty transaction.
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires that `key` has no value.
    pub fn absent(mut self, key: impl Into<String>) -> Self {
        self.compares.push(Compare::Absent(key.into()));
        self
    }

    /// Requires that `key` still has the value that was put by `revision`.
    pub fn unchanged(mut self, key: impl Into<String>, revision: Revision) -> Self {
        self.compares.push(Compare::Unchanged(key.into(), revision));
        self
    }

    /// Sets the value of `key`.
    pub fn put(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.operations.push(Operation::Put(key.into(), value.into()));
        self
    }

    /// Deletes `key`.
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.operations.push(Operation::Delete(key.into()));
        self
    }

    /// Rejects a transaction with too many steps or bytes, too long keys or values, or a key that
    /// is changed twice.
    pub fn check(&self) -> Result<(), MetaError> {
        if self.compares.len().max(self.operations.len()) > MAX_TRANSACTION_STEPS {
            return Err(refused(format!("accepts at most {MAX_TRANSACTION_STEPS} steps per transaction")));
        }
        let compared = self.compares.iter().map(|compare| match compare {
            Compare::Absent(key) | Compare::Unchanged(key, _) => (key, 0),
        });
        let changed = self.operations.iter().map(|operation| match operation {
            Operation::Put(key, value) => (key, value.len()),
            Operation::Delete(key) => (key, 0),
        });
        let mut total_bytes = 0;
        for (key, value_bytes) in compared.chain(changed.clone()) {
            total_bytes += key.len() + value_bytes;
            if key.len() > MAX_KEY_BYTES || value_bytes > MAX_VALUE_BYTES {
                return Err(refused(format!(
                    "accepts keys of up to {MAX_KEY_BYTES} bytes and values of up to {MAX_VALUE_BYTES} bytes"
                )));
            }
        }
        if total_bytes > MAX_TRANSACTION_BYTES {
            return Err(refused(format!("accepts at most {MAX_TRANSACTION_BYTES} bytes per transaction")));
        }
        let mut keys: Vec<&String> = changed.map(|(key, _)| key).collect();
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(refused("accepts only one change of a key per transaction".to_owned()));
        }
        Ok(())
    }
}

fn refused(cause: String) -> MetaError {
    MetaError::Unavailable { cause, remedy: "Split the change into several transactions." }
}

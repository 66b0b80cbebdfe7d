//! What Fulmar asks of a metadata store, and nothing more, so that etcd and a local file both can be one.
//!
//! Keys are text, values are bytes. Every transaction that changes something makes the next [`Revision`]; a
//! key remembers the revision that last put it. A [`Transaction`] is a list of compares and a list of
//! operations: if all compares hold, all operations happen, at one revision; else none does.
//!
//! ```text
//!   Transaction::new().absent("tenant/ada").unchanged("counter/partition", r7)   if
//!       .put("tenant/ada", ...).put("counter/partition", ...)                    then
//! ```
//!
//! A store also tells [`Observer`]s of everything: once what there is, then each change in order of revision.
//! The order of things is what makes a cache above it exact: **when `transact` returns, every observer of this
//! process has been told of everything up to the revision in the outcome**, so a caller that sees its own
//! transaction committed sees it in the cache, and one that is refused sees what it lost to.

use std::sync::Arc;

use async_trait::async_trait;

use crate::MetaError;

/// The longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 1024;
/// The longest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 1 << 20;
/// The most compares and the most operations of one transaction (etcd's own default).
pub const MAX_TRANSACTION_STEPS: usize = 128;

/// Counts the transactions of a store that changed something. Never goes back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

/// A key with its value.
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
    /// The key has a value, put by this very revision.
    Unchanged(String, Revision),
}

/// A change that a transaction makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Gives a key a value.
    Put(String, Vec<u8>),
    /// Takes a key's value away; nothing happens if it has none.
    Delete(String),
}

/// Compares and operations that happen as one. No key may occur in two operations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    /// All must hold.
    pub compares: Vec<Compare>,
    /// All happen, if the compares hold.
    pub operations: Vec<Operation>,
}

/// How a transaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The compares held; the operations are durable, made at this revision.
    Committed(Revision),
    /// A compare did not hold at this revision; nothing happened.
    Conflict(Revision),
}

/// A change of one key, as an observer is told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// Its new value, or nothing if it was deleted.
    pub value: Option<Vec<u8>>,
    /// The revision that changed it.
    pub revision: Revision,
}

/// Is told everything that a store holds, in order. Called on the store's own thread: be quick, do not block.
pub trait Observer: Send + Sync {
    /// What there is. Comes first, and again whenever changes in between may have been missed.
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError>;
    /// What has changed since, by one transaction.
    fn changed(&self, changes: &[Change]);
}

/// A metadata store. What it says is linearizable: an answer reflects every transaction that ended before the
/// question was asked.
#[async_trait]
pub trait MetadataStore: Send + Sync {
    /// The value of a key, if it has one.
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError>;

    /// All keys that begin with `prefix`, in order of their bytes.
    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError>;

    /// Runs a transaction; it is durable when this returns. If the future is dropped it may happen or not.
    /// An error means that nothing happened, unless its text says that the outcome is not known.
    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError>;

    /// Begins to tell `observer` of everything, from what there is now. The store holds it weakly: it is told
    /// until the caller drops it. An error of [`Observer::snapshot`] is answered here, and ends the observation.
    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError>;
}

impl Transaction {
    /// One that does nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Only if `key` has no value.
    pub fn absent(mut self, key: impl Into<String>) -> Self {
        self.compares.push(Compare::Absent(key.into()));
        self
    }

    /// Only if `key` still has the value that `revision` put.
    pub fn unchanged(mut self, key: impl Into<String>, revision: Revision) -> Self {
        self.compares.push(Compare::Unchanged(key.into(), revision));
        self
    }

    /// Give `key` this value.
    pub fn put(mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.operations.push(Operation::Put(key.into(), value.into()));
        self
    }

    /// Take `key`'s value away.
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.operations.push(Operation::Delete(key.into()));
        self
    }

    /// Refuses what no store has to accept: too many steps, too long keys or values, a key changed twice.
    pub fn check(&self) -> Result<(), MetaError> {
        if self.compares.len().max(self.operations.len()) > MAX_TRANSACTION_STEPS {
            return Err(refused(format!("takes at most {MAX_TRANSACTION_STEPS} steps in a transaction")));
        }
        let compared = self.compares.iter().map(|compare| match compare {
            Compare::Absent(key) | Compare::Unchanged(key, _) => (key, 0),
        });
        let changed = self.operations.iter().map(|operation| match operation {
            Operation::Put(key, value) => (key, value.len()),
            Operation::Delete(key) => (key, 0),
        });
        for (key, value_bytes) in compared.chain(changed.clone()) {
            if key.len() > MAX_KEY_BYTES || value_bytes > MAX_VALUE_BYTES {
                return Err(refused(format!(
                    "takes keys of {MAX_KEY_BYTES} bytes and values of {MAX_VALUE_BYTES} bytes at most"
                )));
            }
        }
        let mut keys: Vec<&String> = changed.map(|(key, _)| key).collect();
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(refused("takes one change of a key in a transaction".to_owned()));
        }
        Ok(())
    }
}

fn refused(cause: String) -> MetaError {
    MetaError::Unavailable { cause, remedy: "split the change" }
}

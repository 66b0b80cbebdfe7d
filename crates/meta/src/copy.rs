//! Copies a metadata store, for the conversion of an embedded store to etcd.
//!
//! ```text
//!   destination empty ─► put copy/unfinished ─► batches of puts and deletes ─► compare all entries
//!                                                        ▲                            │ equal
//!   interrupted: run again ──────────────────────────────┘            delete copy/unfinished
//! ```
//!
//! The key `copy/unfinished` marks a destination that is being written. While it exists, no catalog
//! opens the destination, and another run of the copy continues: it changes only the entries that
//! differ. The last step deletes the key, after all entries of the destination have been read back
//! and compared with those of the source.
//!
//! [`reserve`] puts the key before the source is prepared for the copy. It replaces the key of an
//! interrupted run, so a late transaction of that run, its last one included, is not applied any more.
//!
//! The source must not change in the meantime, so no node may use it. A change is detected: the
//! source is read again at the end.

use std::collections::BTreeMap;

use crate::{Entry, MAX_TRANSACTION_STEPS, MAX_VALUE_BYTES, MetaError, MetadataStore, Outcome, Transaction};

const UNFINISHED: &str = "copy/unfinished";
const UNFINISHED_VALUE: &str = r#"{"v":1}"#;
/// A batch is committed when it has this many bytes of keys and values. With one more entry it is
/// below the maximum of a transaction.
const BATCH_BYTES: usize = 64 * 1024;

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// Entries that were put or deleted so far.
    pub changed: usize,
    /// Entries that this run must put or delete.
    pub to_change: usize,
}

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Entries of the source, all of which the destination has.
    pub entries: usize,
    /// Entries that this run put or deleted. 0 if the destination was complete.
    pub changed: usize,
}

/// Copies all entries of `from` to `to`, and verifies them. Calls `progress` after each batch.
///
/// The destination must be empty, or have been written by a copy that was interrupted, or have the
/// same entries as the source. After an error the copy can be run again.
pub async fn copy(
    from: &dyn MetadataStore,
    to: &dyn MetadataStore,
    mut progress: impl FnMut(CopyProgress),
) -> Result<Copied, MetaError> {
    reject_unfinished(from).await?;
    let source = contents(from).await?;
    let mut destination = entries(to).await?;
    let marker = match destination.remove(UNFINISHED) {
        Some(marker) => marker.modified,
        None if equals(&source, &destination) => return Ok(Copied { entries: source.len(), changed: 0 }),
        None if destination.is_empty() => {
            let marked = Transaction::new().absent(UNFINISHED).put(UNFINISHED, UNFINISHED_VALUE);
            committed(to.transact(marked).await?)?
        }
        None => return Err(not_empty(destination.len())),
    };
    let differences: Vec<Difference> = differences(&source, &destination).collect();
    let mut done = CopyProgress { changed: 0, to_change: differences.len() };
    let mut rest = differences.iter().peekable();
    while rest.peek().is_some() {
        let mut batch = Transaction::new().unchanged(UNFINISHED, marker);
        let mut bytes = 0;
        // One compare is that of the marker.
        while bytes < BATCH_BYTES && batch.operations.len() < MAX_TRANSACTION_STEPS - 1 {
            let Some(difference) = rest.next() else { break };
            bytes += difference.key.len() + difference.value.map_or(0, <[u8]>::len);
            batch = difference.add_to(batch);
        }
        let changed = batch.operations.len();
        committed(to.transact(batch).await?)?;
        done.changed += changed;
        progress(done);
    }
    verify(from, to, &source).await?;
    let finished = Transaction::new().unchanged(UNFINISHED, marker).delete(UNFINISHED);
    committed(to.transact(finished).await?)?;
    Ok(Copied { entries: source.len(), changed: done.changed })
}

/// Reserves the destination for a copy of the source with this id, and invalidates all requests of
/// earlier runs that have not been applied yet: they compare the previous reservation.
///
/// The destination must be empty or reserved for the same source. After an error the call can be
/// repeated.
pub async fn reserve(to: &dyn MetadataStore, source: u128) -> Result<(), MetaError> {
    let value = format!(r#"{{"v":1,"source":"{source:032x}"}}"#);
    let reserved = match to.get(UNFINISHED).await? {
        Some(marker) if marker.value != value.as_bytes() => {
            return Err(MetaError::Unavailable {
                cause: "is reserved for a copy of another metadata store".to_owned(),
                remedy: "Complete that copy first, or choose another cluster name.",
            });
        }
        Some(marker) => Transaction::new().unchanged(UNFINISHED, marker.modified),
        None => {
            let found = to.scan("").await?;
            if !found.is_empty() {
                return Err(not_empty(found.len()));
            }
            Transaction::new().absent(UNFINISHED)
        }
    };
    committed(to.transact(reserved.put(UNFINISHED, value)).await?).map(drop)
}

/// Rejects a store that is the destination of an unfinished copy.
pub async fn reject_unfinished(store: &dyn MetadataStore) -> Result<(), MetaError> {
    match store.get(UNFINISHED).await? {
        None => Ok(()),
        Some(_) => Err(MetaError::Unavailable {
            cause: "contains an unfinished copy of another metadata store".to_owned(),
            remedy: "Run the copy again: it continues where it was interrupted.",
        }),
    }
}

/// An entry that the destination lacks, has with another value, or has in excess.
struct Difference<'a> {
    key: &'a str,
    value: Option<&'a [u8]>,
    /// The entry of the destination.
    existing: Option<&'a Entry>,
}

impl Difference<'_> {
    fn add_to(&self, transaction: Transaction) -> Transaction {
        let compared = match self.existing {
            Some(entry) => transaction.unchanged(self.key, entry.modified),
            None => transaction.absent(self.key),
        };
        match self.value {
            Some(value) => compared.put(self.key, value),
            None => compared.delete(self.key),
        }
    }
}

type Entries = BTreeMap<String, Entry>;

fn differences<'a>(
    source: &'a BTreeMap<String, Vec<u8>>,
    destination: &'a Entries,
) -> impl Iterator<Item = Difference<'a>> {
    let puts = source.iter().filter_map(|(key, value)| {
        let existing = destination.get(key);
        let is_equal = existing.is_some_and(|entry| entry.value == *value);
        (!is_equal).then_some(Difference { key, value: Some(value), existing })
    });
    let deletions = destination.iter().filter(|(key, _)| !source.contains_key(*key));
    puts.chain(deletions.map(|(key, entry)| Difference { key, value: None, existing: Some(entry) }))
}

fn equals(source: &BTreeMap<String, Vec<u8>>, destination: &Entries) -> bool {
    differences(source, destination).next().is_none()
}

async fn entries(store: &dyn MetadataStore) -> Result<Entries, MetaError> {
    Ok(store.scan("").await?.into_iter().map(|entry| (entry.key.clone(), entry)).collect())
}

async fn contents(store: &dyn MetadataStore) -> Result<BTreeMap<String, Vec<u8>>, MetaError> {
    Ok(store.scan("").await?.into_iter().map(|entry| (entry.key, entry.value)).collect())
}

/// Compares all entries of both stores with those that were copied.
async fn verify(
    from: &dyn MetadataStore,
    to: &dyn MetadataStore,
    source: &BTreeMap<String, Vec<u8>>,
) -> Result<(), MetaError> {
    if contents(from).await? != *source {
        return Err(changed("the source changed while it was copied"));
    }
    let mut destination = entries(to).await?;
    destination.remove(UNFINISHED);
    if !equals(source, &destination) {
        return Err(changed("the destination has other entries than the source"));
    }
    Ok(())
}

fn committed(outcome: Outcome) -> Result<crate::Revision, MetaError> {
    match outcome {
        Outcome::Committed(revision) => Ok(revision),
        Outcome::Conflict(_) => Err(changed("the destination was changed by another process")),
    }
}

fn changed(cause: &str) -> MetaError {
    MetaError::Unavailable {
        cause: format!("was not copied: {cause}"),
        remedy: "Stop all nodes that use the source or the destination, and run the copy again.",
    }
}

fn not_empty(entries: usize) -> MetaError {
    MetaError::Unavailable {
        cause: format!("was not copied: the destination is not empty; it has {entries} entries"),
        remedy: "Choose another cluster name. If the existing entries are not needed, delete them first.",
    }
}

// A batch has at most `BATCH_BYTES` and one more entry, and every key occurs twice.
const _: () = assert!(2 * BATCH_BYTES + MAX_VALUE_BYTES < crate::MAX_TRANSACTION_BYTES);

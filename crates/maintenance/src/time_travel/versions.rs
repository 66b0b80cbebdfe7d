//! The list of open historical versions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_mvcc::{Partition, Slot};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::ManifestName;
use hashbrown::HashMap;
use parking_lot::Mutex;

/// Maximum number of open historical versions per partition.
pub(super) const MAX_OPEN_VERSIONS: usize = 8;

/// The open historical versions.
#[derive(Default)]
pub struct Past(Mutex<Versions>);

type Versions = HashMap<ManifestName, Slot>;

/// A historical version of a partition.
#[derive(Clone)]
pub struct PastVersion {
    /// The version, open.
    pub partition: Arc<Partition>,
    /// When this version was current, in milliseconds since 1970.
    pub time_unix_ms: u64,
}

impl Past {
    /// The open versions.
    pub fn open(&self) -> Vec<Arc<Partition>> {
        self.0.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// Returns the slot of a version, and creates it within the limit of open versions.
    pub(super) fn slot(&self, name: ManifestName) -> Result<Slot> {
        let (slot, closed) = {
            let mut versions = self.0.lock();
            let count = |versions: &Versions| {
                versions.keys().filter(|other| other.partition == name.partition).count()
            };
            let is_full =
                |versions: &Versions| !versions.contains_key(&name) && count(versions) >= MAX_OPEN_VERSIONS;
            let mut closed = Vec::new();
            if is_full(&versions) {
                let unused =
                    |other: &ManifestName, slot: &Slot| other.partition == name.partition && is_unused(slot);
                closed = remove(&mut versions, unused);
            }
            ((!is_full(&versions)).then(|| versions.entry(name).or_default().clone()), closed)
        };
        let_go(closed);
        slot.ok_or_else(|| {
            let message = format!(
                "too many historical versions of the database are in use (limit \
                 {MAX_OPEN_VERSIONS})"
            );
            Error::new(sqlstate::CONFIGURATION_LIMIT, message).hint(
                "Run RESET fulmar.as_of in sessions that no longer need it, or use the same \
                 times in several sessions.",
            )
        })
    }

    /// Closes unused versions whose time of last use (milliseconds on the node's clock) satisfies
    /// `is_long_ago`.
    pub fn close_unused(&self, is_long_ago: impl Fn(u64) -> bool) {
        let idle = |slot: &Slot| {
            slot.get().is_none_or(|partition| is_long_ago(partition.used_ms.load(Ordering::Relaxed)))
        };
        let closed = remove(&mut self.0.lock(), |_, slot| is_unused(slot) && idle(slot));
        let_go(closed);
    }

    /// Closes all versions of a dropped partition.
    pub fn drop_partition(&self, id: PartitionId) {
        let closed = remove(&mut self.0.lock(), |name, _| name.partition == id);
        let_go(closed);
    }
}

/// Whether no session has the version and none is opening it.
fn is_unused(slot: &Slot) -> bool {
    Arc::strong_count(slot) == 1 && slot.get().is_none_or(|partition| partition.is_unused(1))
}

fn remove(versions: &mut Versions, which: impl Fn(&ManifestName, &Slot) -> bool) -> Vec<Slot> {
    versions.extract_if(|name, slot| which(name, slot)).map(|(_, slot)| slot).collect()
}

/// Closes versions that are not in the list any more. Sessions that still use them get errors.
fn let_go(versions: Vec<Slot>) {
    for partition in versions.iter().filter_map(|slot| slot.get()) {
        partition.close();
        partition.release_resources();
    }
}

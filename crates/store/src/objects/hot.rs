//! Lists of hot pages as objects, next to the manifests of their partitions, so that one listing
//! finds both.
//!
//! The lists are hints. Like all objects they are immutable: a newer list is stored under its own
//! name, and the older one is deleted. If there are several, the newest counts, and the others are
//! garbage.

use fulmar_pages::{HotPages, PartitionId};

use super::{PageStore, StoreError, directory};
use crate::store::Span;

const HOT: &str = "hot-";

/// Name of a list of hot pages. Names of one partition sort by age.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct HotPagesName {
    /// The list's partition.
    pub partition: PartitionId,
    /// Epoch in which the list was created.
    pub epoch: u32,
    /// Time at which the list was created.
    pub timestamp: u64,
}

impl HotPagesName {
    /// Returns the name of a list.
    pub fn of(list: &HotPages) -> Self {
        HotPagesName { partition: list.partition, epoch: list.epoch, timestamp: list.timestamp }
    }

    fn object(&self) -> String {
        format!("{}/{HOT}{:08x}-{:016x}", directory(self.partition), self.epoch, self.timestamp)
    }

    pub(super) fn parse(object: &str) -> Option<Self> {
        let (directory, list) = object.rsplit_once('/')?;
        let (epoch, timestamp) = list.strip_prefix(HOT)?.split_once('-')?;
        let (_, partition) = directory.rsplit_once('/')?;
        let name = HotPagesName {
            partition: PartitionId(u64::from_str_radix(partition, 16).ok()?),
            epoch: u32::from_str_radix(epoch, 16).ok()?,
            timestamp: u64::from_str_radix(timestamp, 16).ok()?,
        };
        (name.object() == object).then_some(name)
    }
}

impl PageStore {
    /// Stores a list under its name.
    pub async fn put_hot_pages(&self, list: &HotPages) -> Result<(), StoreError> {
        self.put(&HotPagesName::of(list).object(), list.encode().into()).await
    }

    /// Reads a list.
    pub async fn read_hot_pages(&self, name: HotPagesName) -> Result<HotPages, StoreError> {
        let object = name.object();
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        let list = HotPages::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match HotPagesName::of(&list) == name {
            true => Ok(list),
            false => Err(StoreError::WrongIdentity { object, store: self.store.to_string() }),
        }
    }

    /// Deletes a list. Succeeds if it does not exist.
    pub async fn delete_hot_pages(&self, name: HotPagesName) -> Result<(), StoreError> {
        self.delete(&name.object()).await
    }
}

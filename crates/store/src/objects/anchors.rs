//! Which manifest was the newest of a partition at rest: anchors as objects, `manifests/PARTITION/anchor-EPOCH-NUMBER`, without contents.
//!
//! A manifest that is gone as a whole leaves no trace in a listing: the one before it looks like the newest. While a log has records that go on
//! from it they miss it; when a partition has come to rest there are none. So the owner names its newest manifest once more, and the
//! listing that finds manifests finds that too: nobody opens the partition at one that is older.
//!
//! Manifests only come, in their order, and the newest one is never deleted while its partition lives; so an anchor stays true for
//! ever, whoever has put it, and however late it arrives. One that is older than the newest tells nothing any more, and is garbage.

use bytes::Bytes;
use fulmar_pages::PartitionId;

use super::{Listed, ManifestName, PageStore, StoreError, directory};

const ANCHOR: &str = "anchor-";

fn anchor_object(manifest: ManifestName) -> String {
    let ManifestName { partition, epoch, number } = manifest;
    format!("{}/{ANCHOR}{epoch:08x}-{number:016x}", directory(partition))
}

pub(super) fn parse(object: &str) -> Option<ManifestName> {
    let (directory, anchor) = object.rsplit_once('/')?;
    let (_, partition) = directory.rsplit_once('/')?;
    let (epoch, number) = anchor.strip_prefix(ANCHOR)?.split_once('-')?;
    let manifest = ManifestName {
        partition: PartitionId(u64::from_str_radix(partition, 16).ok()?),
        epoch: u32::from_str_radix(epoch, 16).ok()?,
        number: u64::from_str_radix(number, 16).ok()?,
    };
    (anchor_object(manifest) == object).then_some(manifest)
}

impl Listed {
    /// A partition's anchors, the oldest first.
    pub fn anchors_of(&self, partition: PartitionId) -> &[ManifestName] {
        let begin = self.anchors.partition_point(|anchor| anchor.partition < partition);
        let end = self.anchors.partition_point(|anchor| anchor.partition <= partition);
        &self.anchors[begin..end]
    }
}

impl PageStore {
    /// Notes that this is the newest manifest of its partition. Nothing happens if that is noted already.
    pub async fn put_anchor(&self, manifest: ManifestName) -> Result<(), StoreError> {
        match self.put(&anchor_object(manifest), Bytes::new()).await {
            Ok(()) | Err(StoreError::Exists { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes an anchor; no error if there is none.
    pub async fn delete_anchor(&self, manifest: ManifestName) -> Result<(), StoreError> {
        self.delete(&anchor_object(manifest)).await
    }

    /// Whether a partition's newest manifest up to an epoch is there, as far as anchors know: [`StoreError::Missing`] if not.
    pub fn check_anchors(
        &self,
        listed: &Listed,
        partition: PartitionId,
        epoch: u32,
    ) -> Result<(), StoreError> {
        let up_to_it = |names: &[ManifestName]| names.iter().rfind(|name| name.epoch <= epoch).copied();
        let newest = listed.manifests.iter().rfind(|name| name.partition == partition && name.epoch <= epoch);
        match up_to_it(listed.anchors_of(partition)) {
            Some(anchor) if newest.is_none_or(|newest| *newest < anchor) => {
                Err(StoreError::Missing { object: anchor.object(), store: self.store.to_string() })
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::testing::empty_manifest;
    use super::*;
    use crate::store::Backend;

    fn name(epoch: u32, number: u64) -> ManifestName {
        ManifestName { partition: PartitionId(7), epoch, number }
    }

    #[test]
    fn names_are_those_of_manifests() {
        let manifest = name(3, 0xabc);
        assert_eq!(parse(&anchor_object(manifest)), Some(manifest));
        for other in ["anchor-3-abc", "anchor-00000003-0000000000000ABC", "hot-00000003-0000000000000abc"] {
            assert_eq!(parse(&format!("{}/{other}", directory(manifest.partition))), None, "{other}");
        }
    }

    #[tokio::test]
    async fn a_manifest_that_was_the_newest_is_missed() {
        let store = PageStore::open(Arc::new(Backend::memory()));
        for name in [name(1, 5), name(1, 9), name(2, 10)] {
            store.put_manifest(&empty_manifest(name)).await.unwrap();
        }
        let newest = async |epoch| {
            let latest = store.latest_manifest(PartitionId(7), epoch, None).await;
            latest.map(|manifest| manifest.map(|manifest| manifest.version.number))
        };
        for _ in 0..2 {
            store.put_anchor(name(1, 9)).await.unwrap();
        }
        assert_eq!((newest(1).await.unwrap(), newest(2).await.unwrap()), (Some(9), Some(10)));
        store.delete_manifest(name(1, 9)).await.unwrap();
        let missed = newest(1).await;
        assert!(
            matches!(&missed, Err(StoreError::Missing { object, .. }) if *object == name(1, 9).object()),
            "{missed:?}"
        );
        assert_eq!(newest(2).await.unwrap(), Some(10), "there is a newer one");
        store.put_anchor(name(2, 10)).await.unwrap();
        store.delete_manifest(name(2, 10)).await.unwrap();
        store.delete_manifest(name(1, 5)).await.unwrap();
        assert!(newest(2).await.is_err(), "nothing is left");
        for anchor in [name(1, 9), name(2, 10)] {
            store.delete_anchor(anchor).await.unwrap();
        }
        assert_eq!(newest(2).await.unwrap(), None);
    }
}

//! Anchors: objects without contents that record the newest manifest of an idle partition, named
//! `manifests/PARTITION/anchor-EPOCH-NUMBER`.
//!
//! If a manifest is lost completely, a listing does not show it: the one before it appears to be
//! the newest. As long as a log has records that follow the lost manifest, recovery detects the
//! loss; an idle partition has no such records. The owner therefore records the name of the newest
//! manifest in an anchor. The listing that finds manifests also finds the anchor, so the partition
//! is never opened at an older manifest.
//!
//! Manifests are only added, in order, and the newest one is never deleted while its partition
//! exists. An anchor is therefore true forever, whichever process has put it and however late it
//! arrives. An anchor that is older than the newest manifest is garbage.

use bytes::Bytes;
use fulmar_pages::PartitionId;

use super::{ManifestName, PageStore, PartitionObjects, StoreError, directory};

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

impl PartitionObjects {
    /// Returns a partition's anchors, oldest first.
    pub fn anchors_of(&self, partition: PartitionId) -> &[ManifestName] {
        let begin = self.anchors.partition_point(|anchor| anchor.partition < partition);
        let end = self.anchors.partition_point(|anchor| anchor.partition <= partition);
        &self.anchors[begin..end]
    }
}

impl PageStore {
    /// Records that this is the newest manifest of its partition. Has no effect if that is already
    /// recorded.
    pub async fn put_anchor(&self, manifest: ManifestName) -> Result<(), StoreError> {
        match self.put(&anchor_object(manifest), Bytes::new()).await {
            Ok(()) | Err(StoreError::Exists { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes an anchor. Succeeds if it does not exist.
    pub async fn delete_anchor(&self, manifest: ManifestName) -> Result<(), StoreError> {
        self.delete(&anchor_object(manifest)).await
    }

    /// Checks that a partition's newest manifest up to an epoch exists, according to the anchors.
    /// [`StoreError::Missing`] if it does not.
    pub fn check_anchors(
        &self,
        listed: &PartitionObjects,
        partition: PartitionId,
        epoch: u32,
    ) -> Result<(), StoreError> {
        let up_to_epoch = |names: &[ManifestName]| names.iter().rfind(|name| name.epoch <= epoch).copied();
        let newest = listed.manifests.iter().rfind(|name| name.partition == partition && name.epoch <= epoch);
        match up_to_epoch(listed.anchors_of(partition)) {
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
    fn only_canonical_names_are_parsed() {
        let manifest = name(3, 0xabc);
        assert_eq!(parse(&anchor_object(manifest)), Some(manifest));
        for other in ["anchor-3-abc", "anchor-00000003-0000000000000ABC", "hot-00000003-0000000000000abc"] {
            assert_eq!(parse(&format!("{}/{other}", directory(manifest.partition))), None, "{other}");
        }
    }

    #[tokio::test]
    async fn missing_newest_manifest_is_detected() {
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
        assert_eq!(newest(2).await.unwrap(), Some(10), "a newer manifest must be found");
        store.put_anchor(name(2, 10)).await.unwrap();
        store.delete_manifest(name(2, 10)).await.unwrap();
        store.delete_manifest(name(1, 5)).await.unwrap();
        assert!(newest(2).await.is_err(), "the loss of all manifests must be detected");
        for anchor in [name(1, 9), name(2, 10)] {
            store.delete_anchor(anchor).await.unwrap();
        }
        assert_eq!(newest(2).await.unwrap(), None);
    }
}

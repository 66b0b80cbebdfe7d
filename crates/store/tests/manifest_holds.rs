//! Holds of manifests: under concurrent pins and deletions, a pinned manifest is never deleted.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::{Manifest, PartitionId, Version};
use fulmar_store::{
    Backend, FaultyStore, HoldName, ManifestName, PageStore, PinOutcome, ReadOnlyStore, Store, StoreError,
    StoreFault, StoreOperation,
};

const HOUR_MS: u64 = 3_600_000;

fn manifest(number: u64) -> Manifest {
    Manifest {
        partition: PartitionId(7),
        version: Version { lineage: 1, epoch: 1, number },
        page_count: 1,
        timestamp: number,
        segments: Vec::new(),
        outcomes: Vec::new(),
        outcomes_horizon: 0,
    }
}

async fn store_with(numbers: &[u64]) -> (Backend, PageStore) {
    let objects = Backend::memory();
    let store = PageStore::open(Arc::new(objects.clone()));
    for number in numbers {
        store.put_manifest(&manifest(*number)).await.unwrap();
    }
    (objects, store)
}

fn name(number: u64) -> ManifestName {
    ManifestName::of(&manifest(number))
}

async fn holds(store: &PageStore) -> Vec<HoldName> {
    store.list_partitions(None).await.unwrap().holds
}

async fn is_there(store: &PageStore, number: u64) -> bool {
    store.list_manifests(None).await.unwrap().contains(&name(number))
}

#[tokio::test]
async fn pinned_manifest_is_kept_until_the_pin_expires() {
    let (_, store) = store_with(&[1, 2]).await;
    assert_eq!(store.pin(name(1), HOUR_MS).await.unwrap(), PinOutcome::Pinned);
    assert_eq!(store.pin(name(1), HOUR_MS).await.unwrap(), PinOutcome::Pinned);
    assert_eq!(holds(&store).await.len(), 1, "an existing pin must be reused");
    let known = holds(&store).await;
    assert!(!store.condemn(name(1), &known, HOUR_MS + 1000).await.unwrap() && is_there(&store, 1).await);
    // A caller with an outdated listing reads the holds again.
    assert!(!store.condemn(name(1), &[], HOUR_MS + 1000).await.unwrap());
    let later_ms = 4 * HOUR_MS;
    assert_eq!(store.pin(name(1), later_ms).await.unwrap(), PinOutcome::Pinned);
    assert_eq!(holds(&store).await.len(), 2, "a pin that expires too early must be renewed");
    assert!(!store.condemn(name(1), &known, 5 * HOUR_MS + 1).await.unwrap());
    assert!(store.condemn(name(1), &known, 9 * HOUR_MS).await.unwrap());
    assert!(!is_there(&store, 1).await && is_there(&store, 2).await);
    assert_eq!(holds(&store).await, []);
    assert!(store.condemn(name(1), &[], HOUR_MS).await.unwrap(), "a repeated deletion must succeed");
}

#[tokio::test]
async fn condemned_manifest_cannot_be_pinned() {
    let (objects, store) = store_with(&[1]).await;
    let faulty = FaultyStore::new(Arc::new(objects));
    let collector = PageStore::open(Arc::new(faulty.clone()));
    // The collector fails before the manifest is deleted.
    faulty.next(StoreOperation::Delete, StoreFault::Fail(fulmar_store::FailureKind::Refused));
    collector.condemn(name(1), &[], 0).await.unwrap_err();
    assert!(is_there(&store, 1).await);
    assert_eq!(store.pin(name(1), 0).await.unwrap(), PinOutcome::Deleted);
    assert!(store.condemn(name(1), &[], 0).await.unwrap(), "another collector must complete the deletion");
    assert_eq!(
        store.pin(name(1), 0).await.unwrap(),
        PinOutcome::Deleted,
        "a deleted manifest must not be pinned"
    );
    // The pin of a deleted manifest is garbage, but is kept until it expires.
    let left = holds(&store).await;
    assert_eq!(left.len(), 1);
    store.delete_orphaned_holds(&left, 0).await.unwrap();
    assert_eq!(holds(&store).await, left);
    store.delete_orphaned_holds(&left, 4 * HOUR_MS).await.unwrap();
    assert_eq!(holds(&store).await, []);
}

#[tokio::test]
async fn pin_reports_missing_write_permission() {
    let (objects, _) = store_with(&[1]).await;
    let reader = |may_add| PageStore::open(Arc::new(ReadOnlyStore::new(Arc::new(objects.clone()), may_add)));
    assert_eq!(reader(|_| false).pin(name(1), 0).await.unwrap(), PinOutcome::NotPermitted);
    assert_eq!(reader(HoldName::is_valid).pin(name(1), 0).await.unwrap(), PinOutcome::Pinned);
}

#[tokio::test]
async fn damaged_fate_prevents_deletion() {
    let (objects, store) = store_with(&[1]).await;
    let hold = "manifests/0000000000000007/fate-00000001-0000000000000001-00000000";
    objects.put(hold, Bytes::from_static(b"FULMFATE and more")).await.unwrap();
    for error in [
        store.condemn(name(1), &[], u64::MAX).await.unwrap_err(),
        store.pin(name(1), 0).await.unwrap_err(),
        store.verify_hold(holds(&store).await[0]).await.unwrap_err(),
    ] {
        assert!(matches!(&error, StoreError::Damaged { object, .. } if object == hold), "{error}");
    }
    assert!(is_there(&store, 1).await);
}

/// Concurrent tasks pin and condemn: every pinned manifest exists, and all others are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_pins_and_deletions_are_consistent() {
    const MANIFESTS: u64 = 300;
    let numbers: Vec<u64> = (1..=MANIFESTS).collect();
    let (_, store) = store_with(&numbers).await;
    let mut tasks = Vec::new();
    for task_number in 0..6u64 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move {
            let mut pinned = Vec::new();
            for step in 0..MANIFESTS {
                // Each task uses a different order, so that every task meets every other one.
                let number = 1 + (step * [1, 7, 11, 13, 17, 299][task_number as usize]) % MANIFESTS;
                if task_number % 2 == 0 {
                    store.condemn(name(number), &[], 0).await.unwrap();
                } else if store.pin(name(number), 0).await.unwrap() == PinOutcome::Pinned {
                    pinned.push(number);
                }
                tokio::task::yield_now().await;
            }
            pinned
        }));
    }
    let mut pinned = BTreeSet::new();
    for task in tasks {
        pinned.extend(task.await.unwrap());
    }
    let there: BTreeSet<u64> =
        store.list_manifests(None).await.unwrap().into_iter().map(|name| name.number).collect();
    assert_eq!(there, pinned);
}

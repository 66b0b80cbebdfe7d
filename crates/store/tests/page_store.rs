//! Tests of segments and manifests on every kind of store: in memory, and in a directory.

use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::{
    HotPages, Manifest, Outcome, PAGE_SIZE, Page, PartitionId, SegmentBuilder, SegmentId, SegmentRef,
    Version, ZERO_PAGE, segment,
};
use fulmar_store::{
    Backend, FailureKind, FaultyStore, HotPagesName, ManifestName, PageStore, Store, StoreError, StoreFault,
    StoreOperation, UploadCounts,
};
use futures::future::join_all;

fn page(seed: u32) -> Page {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    })
}

fn manifest(partition: u64, epoch: u32, number: u64) -> Manifest {
    Manifest {
        partition: PartitionId(partition),
        version: Version { lineage: 1, epoch, number },
        page_count: 3,
        timestamp: number,
        segments: vec![SegmentRef { id: SegmentId(number.into()), partition: PartitionId(partition) }],
        outcomes: vec![Outcome { transaction: number, committed: true }],
        outcomes_horizon: 0,
    }
}

/// Runs the same checks on each kind of store.
async fn on_each<F: Future<Output = ()>>(check: impl Fn(PageStore) -> F) {
    check(PageStore::open(Arc::new(FaultyStore::new(Arc::new(Backend::memory()))))).await;
    let directory = tempfile::tempdir().unwrap();
    check(PageStore::open_directory(directory.path()).unwrap()).await;
}

#[tokio::test]
async fn segments_are_stored_and_their_pages_read() {
    on_each(|store| async move {
        let mut bytes = Vec::new();
        let mut builder = SegmentBuilder::new(&mut bytes);
        for no in 1..=50 {
            builder.push(PartitionId(u64::from(no % 3)), no, &page(no), &mut bytes);
        }
        builder.finish(&mut bytes);
        let id = store.put_segment(Bytes::from(bytes)).await.unwrap();
        let index = store.segment_index(id).await.unwrap();
        assert_eq!(index.pages(), 50);
        let mut read = ZERO_PAGE;
        for no in 1..=50 {
            let location = index.frame(PartitionId(u64::from(no % 3)), no).unwrap();
            store.read_page(id, location, &mut read).await.unwrap();
            assert!(read == page(no), "page {no}");
        }
        assert_eq!(store.list_segments().await.unwrap(), [id]);
        store.delete_segment(id).await.unwrap();
        store.delete_segment(id).await.unwrap();
        assert_eq!(store.list_segments().await.unwrap(), []);
        assert!(matches!(store.segment_index(id).await, Err(StoreError::Missing { .. })));
    })
    .await;
}

/// Large enough for several parts, and for an index that does not fit into the first read.
#[tokio::test]
async fn large_segment_is_stored_in_parts() {
    for bypasses_page_cache in [false, true] {
        on_each(|store| stores_a_large_segment(store, bypasses_page_cache)).await;
    }
}

async fn stores_a_large_segment(store: PageStore, bypasses_page_cache: bool) {
    let mut writer = store.segment_writer().await.unwrap();
    if bypasses_page_cache {
        writer.bypass_page_cache();
    }
    let mut builder = SegmentBuilder::new(writer.buffer());
    let mut small = [0; PAGE_SIZE];
    for no in 1..=20_000u32 {
        small[..4].copy_from_slice(&no.to_le_bytes());
        let page = if no % 5 == 0 { &page(no) } else { &small };
        builder.push(PartitionId(1), no, page, writer.buffer());
        writer.flush().await.unwrap();
    }
    assert!(
        store.list_segments().await.unwrap().is_empty(),
        "a segment must not exist before it is finished"
    );
    builder.finish(writer.buffer());
    let id = writer.finish().await.unwrap();
    let index = store.segment_index(id).await.unwrap();
    assert_eq!(index.pages(), 20_000);
    let mut read = ZERO_PAGE;
    for no in (5..=20_000).step_by(5) {
        let location = index.frame(PartitionId(1), no).unwrap();
        store.read_page(id, location, &mut read).await.unwrap();
        assert!(read == page(no), "page {no}");
    }
}

#[tokio::test]
async fn file_is_adopted_as_a_segment_in_a_directory_store() {
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = Vec::new();
    let mut builder = SegmentBuilder::new(&mut bytes);
    builder.push(PartitionId(1), 5, &page(5), &mut bytes);
    builder.finish(&mut bytes);
    let file = || {
        use std::io::Write;
        let mut file = tempfile::tempfile_in(directory.path()).unwrap();
        file.write_all(&bytes).unwrap();
        file
    };
    let store = PageStore::open_directory(directory.path()).unwrap();
    // The first adoption creates the directory of segments.
    for count in 1..=2 {
        let id = store.adopt_segment(&file()).unwrap().unwrap();
        assert_eq!(store.verify_segment(id).await.unwrap(), 1);
        assert_eq!(store.list_segments().await.unwrap().len(), count);
    }
    let elsewhere = PageStore::open(Arc::new(Backend::memory()));
    assert_eq!(elsewhere.adopt_segment(&file()).unwrap(), None);
    let directory = directory.path().join("gone");
    std::fs::create_dir(&directory).unwrap();
    let store = PageStore::open_directory(&directory).unwrap();
    std::fs::remove_dir(&directory).unwrap();
    assert!(store.adopt_segment(&file()).is_err());
}

/// Concurrent callers share the failure of one read and do not retry it.
#[tokio::test]
async fn concurrent_index_reads_share_a_failure() {
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let store = PageStore::open(Arc::new(faulty.clone()));
    faulty.always(StoreOperation::Get, Some(StoreFault::Fail(FailureKind::Refused)));
    faulty.hold(StoreOperation::Get, true);
    let release = async {
        faulty.is_holding().await;
        faulty.hold(StoreOperation::Get, false);
    };
    let all = join_all((0..10).map(|_| store.segment_index(SegmentId(7))));
    let (outcomes, ()) = tokio::join!(all, release);
    assert!(outcomes.iter().all(Result::is_err));
    let gets = store.statistics().into_iter().find(|of| of.operation == StoreOperation::Get).unwrap();
    assert_eq!(gets.attempts, 1);
}

#[tokio::test]
async fn aborted_segment_does_not_exist() {
    on_each(|store| async move {
        let mut writer = store.segment_writer().await.unwrap();
        SegmentBuilder::new(writer.buffer()).finish(writer.buffer());
        drop(writer);
        assert!(store.list_segments().await.unwrap().is_empty());
    })
    .await;
}

/// At whatever step the writer or the store fails, no parts remain in the store.
#[tokio::test]
async fn parts_of_an_aborted_segment_are_removed() {
    const REFUSED: StoreFault = StoreFault::Fail(FailureKind::Refused);
    const DONE: StoreFault = StoreFault::Delay(std::time::Duration::ZERO);
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let store = PageStore::open(Arc::new(faulty.clone()));
    // Five operations: the start of the upload, two full parts, the rest, and the completion.
    let write = async || {
        let mut writer = store.segment_writer().await?;
        writer.buffer().resize(17 << 20, 7);
        writer.flush().await?;
        writer.finish().await
    };
    for place in 0..5 {
        (0..place).for_each(|_| faulty.next(StoreOperation::Upload, DONE));
        faulty.next(StoreOperation::Upload, REFUSED);
        let refused = write().await.unwrap_err();
        assert!(matches!(refused, StoreError::Failed { .. }), "{refused}");
        faulty.uploads_have_ended().await;
    }
    // The writer is cancelled.
    let mut writer = store.segment_writer().await.unwrap();
    writer.buffer().resize(17 << 20, 7);
    writer.flush().await.unwrap();
    faulty.hold(StoreOperation::Upload, true);
    {
        let finishing = std::pin::pin!(writer.finish());
        tokio::select! {
            finished = finishing => panic!("{finished:?}"),
            () = faulty.is_holding() => {}
        }
    }
    faulty.hold(StoreOperation::Upload, false);
    faulty.uploads_have_ended().await;
    assert_eq!(faulty.uploads(), UploadCounts { started: 5, completed: 0, aborted: 5 });
    assert!(store.list_segments().await.unwrap().is_empty());
    let id = write().await.unwrap();
    assert_eq!(store.list_segments().await.unwrap(), [id]);
    assert_eq!(faulty.uploads(), UploadCounts { started: 6, completed: 1, aborted: 5 });
}

#[tokio::test]
async fn latest_manifest_is_the_last_of_the_last_epoch() {
    on_each(|store| async move {
        let partition = PartitionId(7);
        assert_eq!(store.latest_manifest(partition, u32::MAX, None).await.unwrap(), None);
        for (epoch, number) in [(1, 5), (9, 3), (10, 16), (10, 15), (10, 255), (2, 1 << 40)] {
            store.put_manifest(&manifest(7, epoch, number)).await.unwrap();
        }
        store.put_manifest(&manifest(8, 99, 1)).await.unwrap();
        let latest = || async {
            store
                .latest_manifest(partition, u32::MAX, None)
                .await
                .unwrap()
                .map(|m| (m.version.epoch, m.version.number))
        };
        assert_eq!(latest().await, Some((10, 255)));
        assert_eq!(store.list_manifests(Some(partition)).await.unwrap().len(), 6);
        let all = store.list_manifests(None).await.unwrap();
        assert!(all.is_sorted() && all.len() == 7);
        for number in [15, 16, 255] {
            let name = ManifestName { partition, epoch: 10, number };
            store.delete_manifest(name).await.unwrap();
            store.delete_manifest(name).await.unwrap();
        }
        assert_eq!(latest().await, Some((9, 3)), "an epoch without manifests must not count");
    })
    .await;
}

/// Lists of hot pages are stored next to manifests, and are not mistaken for each other.
#[tokio::test]
async fn latest_hot_pages_are_those_of_the_epoch() {
    on_each(|store| async move {
        let partition = PartitionId(7);
        let list = |partition, epoch, timestamp| HotPages {
            partition: PartitionId(partition),
            epoch,
            timestamp,
            pages: vec![9, 10, 2],
        };
        store.put_hot_pages(&list(7, 2, 5)).await.unwrap();
        let latest = |epoch| {
            let store = &store;
            async move { store.latest(partition, epoch, None).await.unwrap() }
        };
        assert_eq!(latest(2).await, (None, None), "hot pages without a manifest must be ignored");
        for epoch in [1, 2] {
            store.put_manifest(&manifest(7, epoch, 3)).await.unwrap();
        }
        for (of, epoch, timestamp) in [(7, 2, 1 << 40), (7, 2, 255), (7, 1, 1 << 50), (8, 2, 1 << 60)] {
            store.put_hot_pages(&list(of, epoch, timestamp)).await.unwrap();
        }
        let name = HotPagesName { partition, epoch: 2, timestamp: 1 << 40 };
        assert_eq!(latest(2).await, (Some(manifest(7, 2, 3)), Some(name)));
        assert_eq!(store.read_hot_pages(name).await.unwrap(), list(7, 2, 1 << 40));
        assert_eq!(
            latest(3).await,
            (Some(manifest(7, 2, 3)), None),
            "an epoch without a list must have no hot pages"
        );
        let all = store.list_partitions(None).await.unwrap();
        assert!(all.manifests.len() == 2 && all.hot_pages.len() == 5 && all.hot_pages.is_sorted());
        assert_eq!(store.list_manifests(Some(partition)).await.unwrap(), all.manifests);
        for _ in 0..2 {
            store.delete_hot_pages(name).await.unwrap();
        }
        assert_eq!(latest(2).await.1, Some(HotPagesName { timestamp: 255, ..name }));
    })
    .await;
}

#[tokio::test]
async fn manifest_is_immutable() {
    on_each(|store| async move {
        let first = manifest(7, 1, 5);
        store.put_manifest(&first).await.unwrap();
        store.put_manifest(&first).await.unwrap();
        let mut other = first.clone();
        other.timestamp += 1;
        assert!(matches!(store.put_manifest(&other).await, Err(StoreError::Exists { .. })));
        assert_eq!(store.read_manifest(ManifestName::of(&first)).await.unwrap(), first);
        let missing = ManifestName { number: 6, ..ManifestName::of(&first) };
        assert!(matches!(store.read_manifest(missing).await, Err(StoreError::Missing { .. })));
    })
    .await;
}

#[tokio::test]
async fn damage_is_reported_with_object_and_offset() {
    let objects = Backend::memory();
    let store = PageStore::open(Arc::new(objects.clone()));
    let mut bytes = Vec::new();
    let mut builder = SegmentBuilder::new(&mut bytes);
    builder.push(PartitionId(1), 1, &page(1), &mut bytes);
    builder.push(PartitionId(1), 2, &page(2), &mut bytes);
    builder.finish(&mut bytes);
    bytes[segment::HEADER_BYTES + segment::MAX_FRAME_BYTES + 500] ^= 1;
    let id = store.put_segment(Bytes::from(bytes)).await.unwrap();
    let index = store.segment_index(id).await.unwrap();
    let mut read = ZERO_PAGE;
    store.read_page(id, index.frame(PartitionId(1), 1).unwrap(), &mut read).await.unwrap();
    let location = index.frame(PartitionId(1), 2).unwrap();
    match store.read_page(id, location, &mut read).await {
        Err(StoreError::Damaged { object, cause, .. }) => {
            assert_eq!(object, format!("segments/{id}"));
            assert_eq!(cause.at as u64, location.offset + 1);
        }
        other => panic!("{other:?}"),
    }
    let name = format!("manifests/{}/00000001/{:016x}", PartitionId(7), 5);
    objects.put(&name, manifest(7, 1, 6).encode().into()).await.unwrap();
    let outcome = store.latest_manifest(PartitionId(7), 1, None).await;
    assert!(matches!(outcome, Err(StoreError::WrongIdentity { .. })), "{outcome:?}");
    objects.delete(&name).await.unwrap();
    objects.put(&name, Bytes::from_static(b"no manifest")).await.unwrap();
    assert!(matches!(store.latest_manifest(PartitionId(7), 1, None).await, Err(StoreError::Damaged { .. })));
    assert_eq!(store.list_manifests(None).await.unwrap().len(), 1);
    let list = HotPages { partition: PartitionId(7), epoch: 1, timestamp: 5, pages: vec![2] };
    let name = HotPagesName { timestamp: 6, ..HotPagesName::of(&list) };
    let object = format!("manifests/{}/hot-00000001-{:016x}", PartitionId(7), 6);
    objects.put(&object, list.encode().into()).await.unwrap();
    let outcome = store.read_hot_pages(name).await;
    assert!(matches!(outcome, Err(StoreError::WrongIdentity { .. })), "{outcome:?}");
    // A read beyond the end of a truncated segment reports damage, too.
    let cut = store.put_segment(Bytes::from_static(b"short")).await.unwrap();
    let outcome = store.read_page(cut, location, &mut read).await;
    assert!(matches!(outcome, Err(StoreError::Damaged { .. })), "{outcome:?}");
}

/// Concurrent requests for an index cause one read, and later ones none.
#[tokio::test]
async fn index_is_read_once() {
    let store = PageStore::open(Arc::new(Backend::memory()));
    let mut bytes = Vec::new();
    let mut builder = SegmentBuilder::new(&mut bytes);
    builder.push(PartitionId(1), 1, &page(1), &mut bytes);
    builder.finish(&mut bytes);
    let id = store.put_segment(Bytes::from(bytes)).await.unwrap();
    let reads = || {
        let of = |one: &fulmar_store::OperationStatistics| one.operation == StoreOperation::Get;
        store.statistics().into_iter().find(of).unwrap().attempts
    };
    futures::future::join_all((0..16).map(|_| store.segment_index(id))).await;
    store.segment_index(id).await.unwrap();
    assert_eq!(reads(), 1);
    store.delete_segment(id).await.unwrap();
    assert!(matches!(store.segment_index(id).await, Err(StoreError::Missing { .. })));
}

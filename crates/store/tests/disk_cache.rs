//! Reads of segments through a disk cache. The store counts requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fulmar_pages::segment::FrameLocation;
use fulmar_pages::{PAGE_SIZE, Page, PartitionId, SegmentBuilder, SegmentId, ZERO_PAGE};
use fulmar_store::{
    Backend, DiskCache, DiskCacheOptions, FailureKind, FaultyStore, MAX_READ_COST, PageStore, ReadHint,
    Store, StoreError, StoreFault, StoreOperation,
};
use tempfile::TempDir;

const PARTITION: PartitionId = PartitionId(7);
const PAGES: u32 = 100;

fn page(no: u32) -> Page {
    let mut state = no.wrapping_mul(0x9e37_79b9) | 1;
    std::array::from_fn(|at| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        if at < 2000 { (state >> 11) as u8 } else { no as u8 }
    })
}

fn segment() -> Bytes {
    let mut bytes = Vec::new();
    let mut builder = SegmentBuilder::new(&mut bytes);
    for no in 1..=PAGES {
        builder.push(PARTITION, no, &page(no), &mut bytes);
    }
    builder.finish(&mut bytes);
    bytes.into()
}

fn open(objects: &Arc<dyn Store>, directory: &TempDir) -> PageStore {
    let options = DiskCacheOptions { bytes: 64 << 20, memory_bytes: 64 << 20 };
    PageStore::open(objects.clone()).with_disk_cache(DiskCache::open(directory.path(), options).unwrap())
}

fn gets(store: &PageStore) -> u64 {
    let of = store.statistics().into_iter().find(|one| one.operation == StoreOperation::Get);
    of.map_or(0, |one| one.attempts)
}

/// Waits until the cache has this number of entries.
fn until_cached(store: &PageStore, entries: u64) {
    let begun = Instant::now();
    let cache = store.disk_cache().unwrap();
    while cache.statistics().entries != entries {
        assert!(begun.elapsed() < Duration::from_secs(120), "timed out: {:?}", cache.statistics());
        std::thread::sleep(Duration::from_millis(1));
    }
}

async fn locations(store: &PageStore, id: SegmentId) -> Vec<FrameLocation> {
    let index = store.segment_index(id).await.unwrap();
    index.frames(PARTITION).map(|(_, location)| location).collect()
}

async fn check_pages(store: &PageStore, id: SegmentId, locations: &[FrameLocation], first: u32) {
    let mut read = Vec::new();
    store.read_pages(id, locations, ReadHint::WillReuse, &mut read).await.unwrap();
    assert_eq!(read.len(), locations.len() * PAGE_SIZE);
    for (no, found) in (first..).zip(read.as_chunks::<PAGE_SIZE>().0) {
        assert!(*found == page(no), "page {no}");
    }
}

#[tokio::test]
async fn repeated_reads_are_served_from_the_disk_cache() {
    let (objects, directory): (Arc<dyn Store>, _) =
        (Arc::new(Backend::memory()), tempfile::tempdir().unwrap());
    let store = open(&objects, &directory);
    let id = store.put_segment(segment()).await.unwrap();
    let at = locations(&store, id).await;
    let mut read = ZERO_PAGE;
    store.read_page(id, at[9], &mut read).await.unwrap();
    assert!(read == page(10) && gets(&store) == 2, "only the index and the page may be read");
    until_cached(&store, 2);
    store.read_page(id, at[9], &mut read).await.unwrap();
    assert!(read == page(10) && gets(&store) == 2);
    // Page 10 is cached. The range of the others is one read.
    check_pages(&store, id, &at[5..20], 6).await;
    assert_eq!(gets(&store), 3);
    until_cached(&store, 16);
    check_pages(&store, id, &at[5..20], 6).await;
    assert_eq!(gets(&store), 3);
    // Cached frames at the ends of a range are not read again; those in between are.
    check_pages(&store, id, &at[..25], 1).await;
    until_cached(&store, 26);
    let moved = store.statistics().into_iter().find(|one| one.operation == StoreOperation::Get).unwrap();
    check_pages(&store, id, &at[5..30], 6).await;
    let now = store.statistics().into_iter().find(|one| one.operation == StoreOperation::Get).unwrap();
    let expected: u64 = at[25..30].iter().map(|location| u64::from(location.length)).sum();
    assert_eq!((now.attempts - moved.attempts, now.bytes - moved.bytes), (1, expected));
    until_cached(&store, 31);
    // A full scan adds nothing to the cache.
    let mut all = Vec::new();
    store.read_pages(id, &at, ReadHint::Scan, &mut all).await.unwrap();
    assert_eq!(gets(&store), now.attempts + 1);
    let frames = store.read_frames(id, &at).await.unwrap();
    assert!((0..).zip(&frames).all(|(at, frame)| frame.is_cached == (at < 30)));
    assert_eq!(store.disk_cache().unwrap().statistics().entries, 31);
    drop(store);

    // After a restart, cached data is available even if the store is not.
    let faulty = FaultyStore::new(objects.clone());
    faulty.always(StoreOperation::Get, Some(StoreFault::Fail(FailureKind::Refused)));
    let far: Arc<dyn Store> = Arc::new(faulty);
    let store = open(&far, &directory);
    until_cached(&store, 31);
    assert_eq!(locations(&store, id).await, at);
    check_pages(&store, id, &at[..30], 1).await;
    assert_eq!(gets(&store), 0);
    assert!(store.read_page(id, at[30], &mut read).await.is_err());
}

/// The paused clock measures no delay, so the store appears to be as fast as the disk.
#[tokio::test(start_paused = true)]
async fn cost_of_uncached_pages_follows_the_latency_of_the_store() {
    let (objects, directory): (Arc<dyn Store>, _) =
        (Arc::new(Backend::memory()), tempfile::tempdir().unwrap());
    let store = open(&objects, &directory);
    let id = store.put_segment(segment()).await.unwrap();
    let at = locations(&store, id).await;
    let costs = || [0, 99].map(|page| store.disk_cache().unwrap().cost(id, at[page]));
    let mut read = ZERO_PAGE;
    store.read_page(id, at[0], &mut read).await.unwrap();
    until_cached(&store, 2);
    assert_eq!(costs(), [1, MAX_READ_COST], "a single short read must not lower the cost");
    for location in &at[1..99] {
        store.read_page(id, *location, &mut read).await.unwrap();
    }
    until_cached(&store, 100);
    assert_eq!(costs(), [1, 1]);
}

/// Verification reads the store, all other reads use the cache.
#[tokio::test]
async fn verification_detects_damage_in_the_store_despite_the_cache() {
    let (objects, directory): (Arc<dyn Store>, _) =
        (Arc::new(Backend::memory()), tempfile::tempdir().unwrap());
    let store = open(&objects, &directory);
    let id = store.put_segment(segment()).await.unwrap();
    let at = locations(&store, id).await;
    check_pages(&store, id, &at, 1).await;
    until_cached(&store, 101);
    let object = format!("segments/{id}");
    let mut damaged = segment().to_vec();
    damaged[at[49].offset as usize + 100] ^= 1;
    objects.delete(&object).await.unwrap();
    objects.put(&object, damaged.into()).await.unwrap();
    let verified = store.verify_segment(id).await;
    assert!(matches!(verified, Err(StoreError::Damaged { .. })), "{verified:?}");
    check_pages(&store, id, &at, 1).await;
    // The deleted segment's index is not found any more.
    store.delete_segment(id).await.unwrap();
    assert!(matches!(store.verify_segment(id).await, Err(StoreError::Missing { .. })));
}

/// The writer of a segment selects the frames to cache, whether or not they have been uploaded.
#[tokio::test]
async fn written_frames_can_be_cached() {
    let (objects, directory): (Arc<dyn Store>, _) =
        (Arc::new(Backend::memory()), tempfile::tempdir().unwrap());
    let store = open(&objects, &directory);
    let mut writer = store.segment_writer().await.unwrap();
    let mut builder = SegmentBuilder::new(writer.buffer());
    for no in 1..=10_000 {
        let frame = builder.push(PARTITION, no, &page(no), writer.buffer());
        if no % 100 == 0 {
            writer.cache_last_frame(frame);
        }
        writer.flush().await.unwrap();
    }
    builder.finish(writer.buffer());
    let id = writer.finish().await.unwrap();
    until_cached(&store, 101);
    let at = locations(&store, id).await;
    let mut read = ZERO_PAGE;
    for no in (100..=10_000).step_by(100) {
        store.read_page(id, at[no - 1], &mut read).await.unwrap();
        assert!(read == page(no as u32), "page {no}");
    }
    assert_eq!(gets(&store), 0);
    store.read_page(id, at[0], &mut read).await.unwrap();
    assert!(read == page(1) && gets(&store) == 1);
}

/// Every file of the cache is damaged or truncated: all pages read correctly, also after a restart.
#[tokio::test]
async fn damage_of_the_cache_does_not_affect_reads() {
    let (objects, directory): (Arc<dyn Store>, _) =
        (Arc::new(Backend::memory()), tempfile::tempdir().unwrap());
    let store = open(&objects, &directory);
    let id = store.put_segment(segment()).await.unwrap();
    let at = locations(&store, id).await;
    check_pages(&store, id, &at, 1).await;
    until_cached(&store, 101);
    for round in 0..20_usize {
        // Both while the cache is open and before it is opened.
        let files = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        for path in files.collect::<Vec<_>>() {
            let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            let bytes = file.metadata().unwrap().len();
            let place = bytes * (round as u64 + 1) / 21;
            match round % 2 {
                0 => file.set_len(place).unwrap(),
                _ => std::os::unix::fs::FileExt::write_all_at(&file, b"damage", place).unwrap(),
            }
        }
        check_pages(&store, id, &at, 1).await;
        let store = open(&objects, &tempfile::tempdir().unwrap());
        check_pages(&store, id, &at, 1).await;
    }
    assert!(store.disk_cache().unwrap().statistics().failures > 0);
}

use std::path::Path;
use std::time::{Duration, Instant};

use fulmar_pages::SegmentId;
use tempfile::TempDir;

use super::*;

const SMALL: DiskCacheOptions = DiskCacheOptions { bytes: 8 << 20, memory_bytes: 64 << 20 };

fn key(number: u64) -> Key {
    Key::frame(SegmentId(u128::from(number / 100) << 64 | 0xabcd), 16 + number % 100 * 4000)
}

/// Test data in place of a frame. It starts with its number, and every piece is different.
fn piece(number: u64, bytes: usize) -> Bytes {
    let mut state = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut piece = Vec::with_capacity(bytes + 8);
    piece.extend_from_slice(&number.to_le_bytes());
    while piece.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.extend_from_slice(&state.to_le_bytes());
    }
    piece.truncate(bytes);
    piece.into()
}

fn open(directory: &TempDir, options: DiskCacheOptions) -> DiskCache {
    DiskCache::open(directory.path(), options).unwrap()
}

/// Waits for an effect of the cache's thread.
fn wait_until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(120), "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until_entries(cache: &DiskCache, entries: u64) {
    wait_until("the expected number of entries", || cache.statistics().entries == entries);
}

async fn get(cache: &DiskCache, number: u64, bytes: usize, reading: ReadHint) -> Option<Bytes> {
    let wanted = CacheRequest { key: key(number), bytes: Some(bytes) };
    cache.get(&[wanted], reading).await.pop().flatten()
}

/// Puts pieces, retrying while the queue is full.
fn put_all(cache: &DiskCache, numbers: impl IntoIterator<Item = u64>, bytes: usize) {
    for number in numbers {
        wait_until("space in the queue", || {
            let before = cache.statistics().dropped;
            cache.put(key(number), piece(number, bytes));
            cache.statistics().dropped == before
        });
    }
}

fn files(directory: &Path) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // Ignores a file that is removed in the meantime.
    let mut files: Vec<_> =
        entries.filter_map(|path| Some((path.clone(), std::fs::metadata(path).ok()?.len()))).collect();
    files.sort_unstable();
    files
}

fn bytes_of(directory: &Path) -> u64 {
    files(directory).iter().map(|(_, bytes)| bytes).sum()
}

/// A disk that does not respond does not prevent reads from the kernel's page cache.
#[tokio::test]
async fn entries_in_the_page_cache_are_read_while_the_disk_is_stuck() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, [1], 3000);
    until_entries(&cache, 1);
    let waiting = cache.shared.reads.acquire_many(reader::MAX_CONCURRENT_READS as u32).await.unwrap();
    assert!(get(&cache, 1, 3000, ReadHint::WillReuse).await.is_some_and(|found| found == piece(1, 3000)));
    let unknown = CacheRequest { key: key(1), bytes: None };
    assert_eq!(
        cache.get(&[unknown], ReadHint::WillReuse).await,
        [None],
        "an entry of unknown length must not be read"
    );
    drop(waiting);
    assert!(cache.get(&[unknown], ReadHint::WillReuse).await[0].is_some());
    assert_eq!(cache.statistics().failures, 0);
}

#[tokio::test]
async fn entries_are_found_before_and_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let length = |number: u64| 1 + (number as usize * 37) % 4101;
    let check = async |cache: &DiskCache| {
        for number in 0..300 {
            let found = get(cache, number, length(number), ReadHint::WillReuse).await;
            assert!(found.is_some_and(|found| found == piece(number, length(number))), "{number}");
        }
        assert_eq!(get(cache, 300, 100, ReadHint::WillReuse).await, None);
    };
    let cache = open(&directory, SMALL);
    for number in 0..300 {
        put_all(&cache, [number], length(number));
    }
    until_entries(&cache, 300);
    check(&cache).await;
    let statistics = cache.statistics();
    assert_eq!((statistics.hits, statistics.misses, statistics.failures), (300, 1, 0));
    assert_eq!(statistics.bytes, bytes_of(directory.path()));
    // As after a crash: the file has no directory.
    drop(cache);
    let cache = open(&directory, SMALL);
    until_entries(&cache, 300);
    check(&cache).await;
    let end = CacheRequest { key: Key::end(SegmentId(7)), bytes: None };
    assert_eq!(cache.get(&[end], ReadHint::WillReuse).await, [None]);
    cache.put(end.key, piece(7, 100_000));
    cache.close();
    cache.close();
    assert_eq!(cache.statistics().bytes, bytes_of(directory.path()));
    cache.put(key(301), piece(301, 10));
    assert_eq!(files(directory.path()).len(), 2, "each process must write to new files");
    let cache = open(&directory, SMALL);
    until_entries(&cache, 301);
    check(&cache).await;
    let mut wanted = vec![end];
    wanted.extend((0..300).map(|number| CacheRequest { key: key(number), bytes: Some(length(number)) }));
    let found = cache.get(&wanted, ReadHint::Scan).await;
    assert!(found[0].as_ref().is_some_and(|found| *found == piece(7, 100_000)));
    assert!(
        (1..).zip(&found[1..]).all(|(number, found)| *found == Some(piece(number - 1, length(number - 1))))
    );
    let no_more = DiskCacheOptions { bytes: 1 << 20, ..SMALL };
    drop(cache);
    let cache = open(&directory, no_more);
    wait_until("files are removed if the limit is lower", || cache.statistics().bytes == 0);
    assert_eq!((bytes_of(directory.path()), cache.statistics().entries), (0, 0));
}

/// With each byte damaged, and each length that a crash may leave, the cache returns no wrong data,
/// and finds every entry that is complete and before the damage.
#[tokio::test]
async fn damaged_files_never_return_wrong_data() {
    const PIECES: u64 = 6;
    const LAST: u64 = 77;
    const VALUE_BYTES: usize = 30;
    for ended in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(&directory, SMALL);
        put_all(&cache, 0..PIECES, VALUE_BYTES);
        until_entries(&cache, PIECES);
        if ended {
            cache.close();
        }
        drop(cache);
        let (path, _) = files(directory.path()).pop().unwrap();
        let whole = std::fs::read(&path).unwrap();
        let damaged = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            (at, bytes)
        });
        let cut = (0..whole.len()).map(|at| (at, whole[..at].to_vec()));
        // Blocks that were never written.
        let zeroed = (0..whole.len()).map(|at| {
            let mut bytes = whole.clone();
            bytes[at..].fill(0);
            (at, bytes)
        });
        for (at, bytes) in damaged.chain(cut).chain(zeroed) {
            for (old, _) in files(directory.path()) {
                std::fs::remove_file(old).unwrap();
            }
            std::fs::write(&path, bytes).unwrap();
            let cache = open(&directory, SMALL);
            // New entries are written after the takeover is complete.
            put_all(&cache, [LAST], 10);
            wait_until("the entry is written", || cache.shared.index.contains(key(LAST).hash()));
            let before = (at.saturating_sub(16) / format::entry_bytes(VALUE_BYTES)) as u64;
            for number in 0..PIECES {
                match get(&cache, number, VALUE_BYTES, ReadHint::WillReuse).await {
                    Some(found) => assert!(found == piece(number, VALUE_BYTES), "{number}, damage at {at}"),
                    None => assert!(at < 16 || number >= before, "{number}, damage at {at}"),
                }
            }
        }
    }
}

#[test]
fn size_limit_holds_at_all_times() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskCacheOptions { bytes: 4 << 20, ..SMALL };
    let cache = open(&directory, options);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let random = |number: u64| (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let length = |number: u64| 1 + random(number) as usize % 4101;
    let mut number = 0;
    while cache.statistics().written_bytes < 16 << 20 {
        put_all(&cache, [number], length(number));
        // Many entries are used again, so that many are copied.
        let again = number.saturating_sub(random(number) % 1000);
        let found = runtime.block_on(get(&cache, again, length(again), ReadHint::WillReuse));
        assert!(found.is_none_or(|found| found == piece(again, length(again))));
        let used = bytes_of(directory.path());
        assert!(used <= options.bytes && cache.statistics().bytes <= options.bytes, "{used}");
        number += 1;
    }
    let statistics = cache.statistics();
    assert!(statistics.failures == 0 && statistics.entries > 500, "{statistics:?}");
    cache.close();
    assert_eq!(cache.statistics().bytes, bytes_of(directory.path()));
}

#[tokio::test]
async fn used_entries_survive_a_scan() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, 0..200, 4000);
    let mut next = 1000;
    while cache.statistics().written_bytes < 30 << 20 {
        put_all(&cache, next..next + 50, 4000);
        next += 50;
        for number in 0..100 {
            get(&cache, number, 4000, ReadHint::WillReuse).await;
        }
        for number in 100..200 {
            get(&cache, number, 4000, ReadHint::Scan).await;
        }
    }
    for number in 0..200 {
        let found = get(&cache, number, 4000, ReadHint::Scan).await;
        assert!(found == (number < 100).then(|| piece(number, 4000)), "{number}");
    }
    assert_eq!(cache.statistics().failures, 0);
}

#[tokio::test]
async fn cache_releases_space_when_the_disk_runs_full() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, DiskCacheOptions { bytes: 64 << 20, ..SMALL });
    put_all(&cache, 0..3000, 4000);
    until_entries(&cache, 3000);
    let before = cache.statistics().bytes;
    // 4 MiB must remain free, plus 1 MiB: exactly the free space.
    cache.limit_to_free_space(5 << 20, 4 << 20);
    assert_eq!(cache.statistics().limit_bytes, before);
    cache.limit_to_free_space(3 << 20, 4 << 20);
    wait_until("the cache shrinks", || cache.statistics().bytes + (2 << 20) <= before);
    let shrunk = cache.statistics();
    assert!(shrunk.bytes + (4 << 20) > before && shrunk.bytes == bytes_of(directory.path()), "{shrunk:?}");
    assert!(get(&cache, 2999, 4000, ReadHint::WillReuse).await.is_some(), "the newest entry must survive");
    cache.limit_to_free_space(0, 64 << 20);
    wait_until("the cache is empty", || cache.statistics().bytes == 0);
    assert_eq!(bytes_of(directory.path()), 0);
    let dropped = cache.statistics().dropped;
    cache.put(key(1), piece(1, 4000));
    wait_until("the entry is dropped", || cache.statistics().dropped > dropped);
    cache.limit_to_free_space(1 << 30, 4 << 20);
    put_all(&cache, 0..10, 4000);
    until_entries(&cache, 10);
}

/// Opens a directory in place of a file: reading it fails as on a broken disk.
#[tokio::test]
async fn unreadable_file_is_abandoned() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, 0..10, 100);
    until_entries(&cache, 10);
    let broken = Arc::new(File::open(directory.path()).unwrap());
    cache.shared.files.write().values_mut().for_each(|file| file.file = broken.clone());
    for number in 0..10 {
        assert_eq!(get(&cache, number, 100, ReadHint::WillReuse).await, None);
    }
    wait_until("the file is removed", || bytes_of(directory.path()) == 0 && cache.statistics().bytes == 0);
    let statistics = cache.statistics();
    assert_eq!((statistics.entries, statistics.failures), (0, 1), "only the first read must reach the disk");
    put_all(&cache, 0..10, 100);
    until_entries(&cache, 10);
    assert_eq!(get(&cache, 3, 100, ReadHint::WillReuse).await, Some(piece(3, 100)));
}

/// The directory does not exist: nothing is stored until it does again.
#[tokio::test]
async fn write_errors_do_not_affect_reads() {
    let above = tempfile::tempdir().unwrap();
    let directory = above.path().join("cache");
    let cache = DiskCache::open(&directory, SMALL).unwrap();
    std::fs::remove_dir(&directory).unwrap();
    cache.put(key(1), piece(1, 100));
    wait_until("the write fails", || cache.statistics().failures == 1);
    assert_eq!(get(&cache, 1, 100, ReadHint::WillReuse).await, None);
    std::fs::create_dir(&directory).unwrap();
    wait_until("the entry is stored once the disk works again", || {
        cache.put(key(1), piece(1, 100));
        cache.statistics().entries == 1
    });
    assert_eq!(get(&cache, 1, 100, ReadHint::WillReuse).await, Some(piece(1, 100)));
}

#[tokio::test]
async fn hash_collision_is_a_miss() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, [1], 100);
    until_entries(&cache, 1);
    let location = cache.shared.index.find(key(1).hash(), false).unwrap();
    cache.shared.index.insert(key(2).hash(), location);
    assert_eq!(get(&cache, 2, 100, ReadHint::WillReuse).await, None);
    let statistics = cache.statistics();
    assert_eq!((statistics.misses, statistics.failures), (1, 0));
}

#[test]
fn index_size_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskCacheOptions { bytes: 64 << 20, memory_bytes: 320 << 10 };
    assert_eq!(options.entries(), 1024);
    let cache = open(&directory, options);
    put_all(&cache, 0..5000, 20);
    cache.close();
    let entries = cache.statistics().entries;
    assert!((850..=1024).contains(&entries), "{entries}");
    // A large entry for this file length is not stored.
    assert!(options.max_value_bytes() == 256 << 10);
}

#[test]
fn foreign_files_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
    let mut newer = format::header();
    newer[8] = 2;
    write("00000003", &newer);
    write("00000004", b"");
    write("notes", b"foreign");
    write("0000000A", b"foreign");
    let cache = open(&directory, SMALL);
    wait_until("files of other versions are removed", || files(directory.path()).len() == 2);
    put_all(&cache, [1], 10);
    until_entries(&cache, 1);
    assert!(directory.path().join("00000005").exists(), "file numbers must grow");
    drop(cache);
    DiskCache::remove(directory.path()).unwrap();
    assert_eq!(files(directory.path()).len(), 2);
    for name in ["notes", "0000000A"] {
        std::fs::remove_file(directory.path().join(name)).unwrap();
    }
    DiskCache::remove(directory.path()).unwrap();
    assert!(!directory.path().exists());
    DiskCache::remove(directory.path()).unwrap();
}

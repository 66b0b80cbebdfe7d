use std::path::Path;
use std::time::{Duration, Instant};

use fulmar_pages::SegmentId;
use tempfile::TempDir;

use super::*;

const SMALL: DiskCacheOptions = DiskCacheOptions { bytes: 8 << 20, memory_bytes: 64 << 20 };

fn key(number: u64) -> Key {
    Key::frame(SegmentId(u128::from(number / 100) << 64 | 0xabcd), 16 + number % 100 * 4000)
}

/// What stands for a frame: its first bytes say which, none are alike.
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

/// Waits for what the cache's thread does.
fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(120), "timed out: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until_entries(cache: &DiskCache, entries: u64) {
    until("entries are found", || cache.statistics().entries == entries);
}

async fn get(cache: &DiskCache, number: u64, bytes: usize, reading: Reading) -> Option<Bytes> {
    let wanted = Wanted { key: key(number), bytes: Some(bytes) };
    cache.get(&[wanted], reading).await.pop().flatten()
}

/// Puts pieces, each until there was time for it.
fn put_all(cache: &DiskCache, numbers: impl IntoIterator<Item = u64>, bytes: usize) {
    for number in numbers {
        until("it is put", || {
            let before = cache.statistics().dropped;
            cache.put(key(number), piece(number, bytes));
            cache.statistics().dropped == before
        });
    }
}

fn files(directory: &Path) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // One that is removed meanwhile takes no room.
    let mut files: Vec<_> =
        entries.filter_map(|path| Some((path.clone(), std::fs::metadata(path).ok()?.len()))).collect();
    files.sort_unstable();
    files
}

fn bytes_of(directory: &Path) -> u64 {
    files(directory).iter().map(|(_, bytes)| bytes).sum()
}

/// A disk that does not answer any more keeps nobody from what the system has of it in memory.
#[tokio::test]
async fn what_is_in_memory_is_found_while_the_disk_is_waited_for() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, [1], 3000);
    until_entries(&cache, 1);
    let waiting = cache.shared.reads.acquire_many(reader::READS_AT_ONCE as u32).await.unwrap();
    assert!(get(&cache, 1, 3000, Reading::Again).await.is_some_and(|found| found == piece(1, 3000)));
    let unknown = Wanted { key: key(1), bytes: None };
    assert_eq!(cache.get(&[unknown], Reading::Again).await, [None], "that may be large");
    drop(waiting);
    assert!(cache.get(&[unknown], Reading::Again).await[0].is_some());
    assert_eq!(cache.statistics().failures, 0);
}

#[tokio::test]
async fn what_is_put_is_found_by_this_life_and_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let length = |number: u64| 1 + (number as usize * 37) % 4101;
    let check = async |cache: &DiskCache| {
        for number in 0..300 {
            let found = get(cache, number, length(number), Reading::Again).await;
            assert!(found.is_some_and(|found| found == piece(number, length(number))), "{number}");
        }
        assert_eq!(get(cache, 300, 100, Reading::Again).await, None);
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
    // As a crash does: the file has no directory.
    drop(cache);
    let cache = open(&directory, SMALL);
    until_entries(&cache, 300);
    check(&cache).await;
    let end = Wanted { key: Key::end(SegmentId(7)), bytes: None };
    assert_eq!(cache.get(&[end], Reading::Again).await, [None]);
    cache.put(end.key, piece(7, 100_000));
    cache.close();
    cache.close();
    assert_eq!(cache.statistics().bytes, bytes_of(directory.path()));
    cache.put(key(301), piece(301, 10));
    assert_eq!(files(directory.path()).len(), 2, "each life writes to files of its own");
    let cache = open(&directory, SMALL);
    until_entries(&cache, 301);
    check(&cache).await;
    let mut wanted = vec![end];
    wanted.extend((0..300).map(|number| Wanted { key: key(number), bytes: Some(length(number)) }));
    let found = cache.get(&wanted, Reading::Once).await;
    assert!(found[0].as_ref().is_some_and(|found| *found == piece(7, 100_000)));
    assert!(
        (1..).zip(&found[1..]).all(|(number, found)| *found == Some(piece(number - 1, length(number - 1))))
    );
    let no_more = DiskCacheOptions { bytes: 1 << 20, ..SMALL };
    drop(cache);
    let cache = open(&directory, no_more);
    until("files go where the bound is smaller", || cache.statistics().bytes == 0);
    assert_eq!((bytes_of(directory.path()), cache.statistics().entries), (0, 0));
}

/// Each byte of a file damaged, each length that a crash may leave: what is found is right, and what was whole before the place
/// is found again.
#[tokio::test]
async fn no_damage_makes_wrong_data() {
    const PIECES: u64 = 6;
    const LAST: u64 = 77;
    const HELD: usize = 30;
    for ended in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(&directory, SMALL);
        put_all(&cache, 0..PIECES, HELD);
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
            // What is put is written when all has been looked at.
            put_all(&cache, [LAST], 10);
            until("it is written", || cache.shared.index.contains(key(LAST).hash()));
            let before = (at.saturating_sub(16) / format::entry_bytes(HELD)) as u64;
            for number in 0..PIECES {
                match get(&cache, number, HELD, Reading::Again).await {
                    Some(found) => assert!(found == piece(number, HELD), "{number}, damage at {at}"),
                    None => assert!(at < 16 || number >= before, "{number}, damage at {at}"),
                }
            }
        }
    }
}

#[test]
fn the_bound_holds_at_every_moment() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskCacheOptions { bytes: 4 << 20, ..SMALL };
    let cache = open(&directory, options);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let random = |number: u64| (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let length = |number: u64| 1 + random(number) as usize % 4101;
    let mut number = 0;
    while cache.statistics().written_bytes < 16 << 20 {
        put_all(&cache, [number], length(number));
        // Many are wanted again, so that much is saved.
        let again = number.saturating_sub(random(number) % 1000);
        let found = runtime.block_on(get(&cache, again, length(again), Reading::Again));
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
async fn what_is_used_stays_while_others_pass_through() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, 0..200, 4000);
    let mut next = 1000;
    while cache.statistics().written_bytes < 30 << 20 {
        put_all(&cache, next..next + 50, 4000);
        next += 50;
        for number in 0..100 {
            get(&cache, number, 4000, Reading::Again).await;
        }
        for number in 100..200 {
            get(&cache, number, 4000, Reading::Once).await;
        }
    }
    for number in 0..200 {
        let found = get(&cache, number, 4000, Reading::Once).await;
        assert!(found == (number < 100).then(|| piece(number, 4000)), "{number}");
    }
    assert_eq!(cache.statistics().failures, 0);
}

#[tokio::test]
async fn it_gives_back_what_the_disk_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, DiskCacheOptions { bytes: 64 << 20, ..SMALL });
    put_all(&cache, 0..3000, 4000);
    until_entries(&cache, 3000);
    let before = cache.statistics().bytes;
    // Four MiB are to be kept free, and one more: so much is there.
    cache.make_room(5 << 20, 4 << 20);
    assert_eq!(cache.statistics().limit_bytes, before);
    cache.make_room(3 << 20, 4 << 20);
    until("it shrinks", || cache.statistics().bytes + (2 << 20) <= before);
    let shrunk = cache.statistics();
    assert!(shrunk.bytes + (4 << 20) > before && shrunk.bytes == bytes_of(directory.path()), "{shrunk:?}");
    assert!(get(&cache, 2999, 4000, Reading::Again).await.is_some(), "the oldest went");
    cache.make_room(0, 64 << 20);
    until("it gives everything back", || cache.statistics().bytes == 0);
    assert_eq!(bytes_of(directory.path()), 0);
    let dropped = cache.statistics().dropped;
    cache.put(key(1), piece(1, 4000));
    until("there is no room for it", || cache.statistics().dropped > dropped);
    cache.make_room(1 << 30, 4 << 20);
    put_all(&cache, 0..10, 4000);
    until_entries(&cache, 10);
}

/// Reading a directory fails as a broken disk does.
#[tokio::test]
async fn a_file_that_cannot_be_read_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, 0..10, 100);
    until_entries(&cache, 10);
    let broken = Arc::new(File::open(directory.path()).unwrap());
    cache.shared.files.write().values_mut().for_each(|file| file.file = broken.clone());
    for number in 0..10 {
        assert_eq!(get(&cache, number, 100, Reading::Again).await, None);
    }
    until("it is removed", || bytes_of(directory.path()) == 0 && cache.statistics().bytes == 0);
    let statistics = cache.statistics();
    assert_eq!(
        (statistics.entries, statistics.failures),
        (0, 1),
        "those after the first did not ask the disk"
    );
    put_all(&cache, 0..10, 100);
    until_entries(&cache, 10);
    assert_eq!(get(&cache, 3, 100, Reading::Again).await, Some(piece(3, 100)));
}

/// No directory to make files in: nothing is kept until there is one again.
#[tokio::test]
async fn a_disk_that_cannot_be_written_costs_nothing_else() {
    let above = tempfile::tempdir().unwrap();
    let directory = above.path().join("cache");
    let cache = DiskCache::open(&directory, SMALL).unwrap();
    std::fs::remove_dir(&directory).unwrap();
    cache.put(key(1), piece(1, 100));
    until("it fails", || cache.statistics().failures == 1);
    assert_eq!(get(&cache, 1, 100, Reading::Again).await, None);
    std::fs::create_dir(&directory).unwrap();
    until("it is kept when the disk works again", || {
        cache.put(key(1), piece(1, 100));
        cache.statistics().entries == 1
    });
    assert_eq!(get(&cache, 1, 100, Reading::Again).await, Some(piece(1, 100)));
}

#[tokio::test]
async fn another_key_with_the_same_hash_is_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(&directory, SMALL);
    put_all(&cache, [1], 100);
    until_entries(&cache, 1);
    let place = cache.shared.index.find(key(1).hash(), false).unwrap();
    cache.shared.index.insert(key(2).hash(), place);
    assert_eq!(get(&cache, 2, 100, Reading::Again).await, None);
    let statistics = cache.statistics();
    assert_eq!((statistics.misses, statistics.failures), (1, 0));
}

#[test]
fn the_index_is_bounded() {
    let directory = tempfile::tempdir().unwrap();
    let options = DiskCacheOptions { bytes: 64 << 20, memory_bytes: 320 << 10 };
    assert_eq!(options.entries(), 1024);
    let cache = open(&directory, options);
    put_all(&cache, 0..5000, 20);
    cache.close();
    let entries = cache.statistics().entries;
    assert!((850..=1024).contains(&entries), "{entries}");
    // What is large for a file is not kept.
    assert!(options.held_bytes() == 256 << 10);
}

#[test]
fn what_is_not_ours_stays() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(directory.path().join(name), bytes).unwrap();
    let mut newer = format::header();
    newer[8] = 2;
    write("00000003", &newer);
    write("00000004", b"");
    write("notes", b"somebody's");
    write("0000000A", b"no name of ours");
    let cache = open(&directory, SMALL);
    until("files of another version go", || files(directory.path()).len() == 2);
    put_all(&cache, [1], 10);
    until_entries(&cache, 1);
    assert!(directory.path().join("00000005").exists(), "numbers grow");
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

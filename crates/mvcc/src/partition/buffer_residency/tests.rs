//! Readers, a writer, a flusher and an evictor on concurrent threads: each reader must see the
//! bytes of the version that it found.

use std::collections::VecDeque;

use fulmar_pages::{FrameLocation, SegmentId};
use fulmar_store::Lsn;

use super::*;
use crate::memory::{MemoryBudget, Reservation, Tally};
use crate::page_memory::PageBytes;
use crate::partition::Snapshot;
use crate::partition::snapshots::Snapshots;
use crate::partition::version::PageVersion;
use crate::store::Frame;

const PAGES: u32 = 40;
/// Pages that the writer changes; the others are only read.
const CHANGING: u64 = 10;
/// Rounds in which all threads run concurrently, and the work of each per round.
const ROUNDS: u64 = 50;
const ROUND_COMMITS: u64 = 100;
const ROUND_FLUSHES: u64 = 25;
const ROUND_EVICTIONS: u64 = 200;
const ROUND_SNAPSHOTS: u64 = 100;
const READERS: u64 = 3;
/// The number of the last version.
const COMMITS: u64 = PAGES as u64 + 1 + ROUNDS * ROUND_COMMITS;

/// The bytes of a version. They occur nowhere else, in particular not in freed memory.
fn bytes(page: PageNo, number: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (part, bytes) in (0..).zip(bytes.chunks_exact_mut(512)) {
        bytes.fill((u64::from(page) * 31 + number * 7 + part) as u8);
    }
    PageBytes::copy_of(&bytes)
}

struct Fixture {
    memory: Arc<MemoryBudget>,
    account: Arc<Account>,
    table: PageTable,
    residence: Arc<BufferResidency>,
    snapshots: Mutex<Snapshots>,
    /// The commit lock, and the commits whose replaced versions have not been freed.
    commits: Mutex<VecDeque<(u64, PageNo)>>,
    clock: AtomicU64,
    loads: AtomicU64,
    /// Pages that readers found in memory.
    found: AtomicU64,
    segment: u32,
}

/// Returns a pseudo-random number.
fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) % below
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::of(EVICTION_CLASSES)
    }

    fn of(classes: u64) -> Fixture {
        let memory = MemoryBudget::new(1 << 30);
        let account = Account::new(memory.clone());
        let table = PageTable::new(account.clone());
        let segment = table.segments().index_of(SegmentId(1));
        let at = Snapshot { number: 0, lsn: Lsn(0), page_count: PAGES };
        Fixture {
            residence: BufferResidency::new(account.clone(), classes),
            snapshots: Mutex::new(Snapshots::new(at)),
            commits: Mutex::default(),
            clock: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            found: AtomicU64::new(0),
            memory,
            account,
            table,
            segment,
        }
    }

    fn commit(&self, number: u64, page: PageNo) {
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        self.table.install(page, number, Some(bytes(page, number)), None, &mut tally);
        let lsn = Lsn(number);
        self.snapshots.lock().push(Snapshot { number, lsn, page_count: PAGES });
        commits.push_back((number, page));
        let oldest = self.snapshots.lock().oldest_from(lsn);
        while commits.front().is_some_and(|(number, _)| *number <= oldest) {
            if let Some((number, page)) = commits.pop_front() {
                self.table.prune(page, number, &mut tally);
            }
        }
        self.account.settle(tally);
    }

    fn write(&self, round: u64) {
        let mut state = round;
        let before = u64::from(PAGES) + 1 + round * ROUND_COMMITS;
        for number in before + 1..=before + ROUND_COMMITS {
            self.commit(number, random(&mut state, CHANGING) as PageNo + 2);
            std::thread::yield_now();
        }
    }

    fn flush(&self) {
        for _ in 0..ROUND_FLUSHES {
            self.flush_all();
            std::thread::yield_now();
        }
    }

    fn flush_all(&self) {
        let snapshot = self.snapshots.lock().pin();
        let mut tally = Tally::default();
        for page in 2..PAGES + 2 {
            // SAFETY: pinned.
            if let Some(version) = unsafe { self.table.find(page, snapshot.number) } {
                let location = FrameLocation { offset: version.number(), length: 1 };
                self.table.set_frame(version, Frame { segment: self.segment, location }, &mut tally);
            }
        }
        self.account.settle(tally);
        self.residence.queue(2..PAGES + 2, self.clock.load(Ordering::Relaxed));
        self.snapshots.lock().unpin(snapshot.number);
    }

    fn evict(&self) {
        for _ in 0..ROUND_EVICTIONS {
            self.evict_some();
            std::thread::yield_now();
        }
    }

    /// Flushes and evicts all pages that can be evicted.
    fn sweep(&self) {
        self.flush_all();
        // All of them may be in one class, and each round takes eight.
        for _ in 0..u64::from(PAGES) * EVICTION_CLASSES {
            while self.evict_some() > 0 {}
        }
    }

    fn evict_some(&self) -> usize {
        let clock = self.clock.fetch_add(1, Ordering::Relaxed);
        let _commits = self.commits.lock();
        self.residence.evict(clock, 8, &self.table, |_| 1).0
    }

    /// Reads like a connection: reads pages at one snapshot, keeps pointers to some of them, and
    /// sometimes steps aside.
    fn read(&self, mut state: u64) {
        let reader = Reader::new(self.residence.clone());
        for _ in 0..ROUND_SNAPSHOTS {
            let snapshot = self.snapshots.lock().pin();
            let mut kept: Vec<(*const Page, PageBytes)> = Vec::new();
            for _ in 0..random(&mut state, 12) {
                let page = random(&mut state, PAGES.into()) as PageNo + 2;
                // SAFETY: pinned.
                let Some(version) = (unsafe { self.table.find(page, snapshot.number) }) else { continue };
                reader.enter();
                // SAFETY: inside.
                match unsafe { version.data() } {
                    Some(data) => {
                        self.found.fetch_add(1, Ordering::Relaxed);
                        version.touch();
                        assert!(*data == *bytes(page, version.number()));
                        reader.fetched(data);
                        kept.push((data, bytes(page, version.number())));
                    }
                    None => {
                        reader.step_aside();
                        self.load(page, version);
                    }
                }
                if random(&mut state, 4) == 0 {
                    reader.step_aside();
                }
                // Fetched pages must not change, whatever has been evicted meanwhile.
                for (data, bytes) in &kept {
                    // SAFETY: fetched, and not released.
                    assert!(unsafe { **data == **bytes });
                }
                if kept.len() > 3 {
                    reader.released(kept.swap_remove(random(&mut state, 3) as usize).0);
                }
            }
            kept.iter().for_each(|(data, _)| reader.released(*data));
            reader.step_aside();
            self.snapshots.lock().unpin(snapshot.number);
        }
    }

    fn load(&self, page: PageNo, version: &PageVersion) {
        let (_, location) = self.table.frame(version).unwrap().unwrap();
        assert_eq!(location.offset, version.number());
        let room = Reservation::unconditional(self.memory.clone(), PAGE_SIZE as u64);
        if version.fill(bytes(page, version.number())) {
            self.account.keep(room);
            self.residence.queue([page], self.clock.load(Ordering::Relaxed));
            self.loads.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn readers_see_stable_bytes_during_eviction() {
    let fixture = Fixture::new();
    (2..PAGES + 2).for_each(|page| fixture.commit(page.into(), page));
    for round in 0..ROUNDS {
        // So that every thread finds absent pages, whichever runs first.
        fixture.sweep();
        std::thread::scope(|scope| {
            let fixture = &fixture;
            scope.spawn(|| fixture.flush());
            scope.spawn(|| fixture.evict());
            (1..=READERS)
                .for_each(|reader| drop(scope.spawn(move || fixture.read(round * READERS + reader))));
            scope.spawn(move || fixture.write(round));
        });
    }
    // In each round the pages that do not change are all read, by some of about 1,600 reads of 40
    // pages.
    let least = ROUNDS * (u64::from(PAGES) - CHANGING);
    let [found, loads] = [&fixture.found, &fixture.loads].map(|counter| counter.load(Ordering::Relaxed));
    assert!(loads >= least && found >= least, "{loads} {found}");

    // When all threads have ended and everything is flushed, every page can be evicted.
    fixture.commit(1 << 40, 2); // collects the garbage of the other commits
    fixture.sweep();
    let mut tally = Tally::default();
    (2..PAGES + 2).for_each(|page| fixture.table.remove(page, u64::MAX, &mut tally));
    assert!(tally.bytes.unsigned_abs() < PAGE_SIZE as u64, "{tally:?}");
    fixture.account.settle(tally);
    let buckets = 64 * size_of::<usize>() as u64;
    assert_eq!((fixture.account.resident_bytes(), fixture.memory.unwritten_bytes()), (buckets, 0));
}

#[test]
fn waiting_reader_retains_only_held_pages() {
    let fixture = Fixture::new();
    let reader = Reader::new(fixture.residence.clone());
    (2..12).for_each(|page| fixture.commit(u64::from(page), page));
    fixture.flush_all();
    let before = fixture.memory.used_bytes();
    let snapshot = fixture.snapshots.lock().pin();
    reader.enter();
    // SAFETY: pinned, and inside.
    let held = unsafe { fixture.table.find(7, snapshot.number).unwrap().data().unwrap() };
    reader.fetched(held);
    while fixture.evict_some() > 0 || fixture.clock.load(Ordering::Relaxed) < 20 {}
    assert_eq!(
        fixture.memory.used_bytes(),
        before,
        "evicted pages must not be freed while a reader is inside"
    );
    // Otherwise eviction would continue until nothing is left.
    assert_eq!(
        fixture.account.resident_bytes(),
        before - 10 * PAGE_SIZE as u64,
        "evicted pages must not count as cached"
    );
    reader.step_aside();
    assert_eq!(fixture.memory.used_bytes(), before - 9 * PAGE_SIZE as u64);
    assert!(*held == *bytes(7, 7));
    reader.released(held);
    assert_eq!(fixture.memory.used_bytes(), before - 10 * PAGE_SIZE as u64);
}

/// A check is needed per evicted page and per accessed page, not one of all pages per eviction.
#[test]
fn accessed_pages_stay_during_a_scan() {
    let fixture = Fixture::new();
    (2..12).for_each(|page| fixture.commit(u64::from(page), page));
    fixture.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let version = |page| unsafe { fixture.table.find(page, COMMITS) }.unwrap();
    for _ in 0..50 {
        (2..5).for_each(|page| version(page).touch());
        fixture.evict_some();
        // The others are read again, as in a scan.
        for page in 5..12 {
            if !version(page).is_resident() {
                fixture.load(page, version(page));
            }
        }
        assert!((2..5).all(|page| version(page).is_resident()));
    }
}

/// Pages that would be evicted last come first, neighbors in order. Prefetched pages without access
/// are not listed.
#[test]
fn hottest_pages_are_listed_first() {
    let fixture = Fixture::new();
    (2..12).for_each(|page| fixture.commit(u64::from(page), page));
    fixture.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let find = |page| unsafe { fixture.table.find(page, COMMITS) };
    let version = |page| find(page).unwrap();
    let hottest = |most| fixture.residence.hottest(0, most, |page| find(page)?.heat());
    assert_eq!(hottest(100), (2..12).collect::<Vec<_>>());
    for (page, touches) in [(9, 3), (11, 1), (5, 1), (8, 3), (6, 100)] {
        (0..touches).for_each(|_| version(page).touch());
    }
    version(2).mark_prefetched();
    drop(version(3).take());
    assert_eq!(hottest(100), [6, 8, 9, 5, 11, 4, 7, 10]);
    assert_eq!(hottest(4), [6, 8, 9, 5]);
    version(2).touch();
    assert_eq!(hottest(6), [6, 8, 9, 5, 11, 2]);
}

/// The clock rounds after which pages are evicted, two pages per number of accesses. Reading back
/// the second of each pair costs `high_cost`.
fn rounds(classes: u64, high_cost: u64) -> [[u64; 2]; 4] {
    let fixture = Fixture::of(classes);
    (2..10).for_each(|page| fixture.commit(u64::from(page), page));
    fixture.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let version = |page| unsafe { fixture.table.find(page, COMMITS) }.unwrap();
    let touches = [0, 1, 3, 100];
    for (pair, touches) in (0..).zip(touches) {
        (0..touches).for_each(|_| [2, 3].into_iter().for_each(|page| version(page + 2 * pair).touch()));
    }
    let cost = |version: &PageVersion| if version.number() % 2 == 1 { high_cost } else { 1 };
    let mut rounds = [[0; 2]; 4];
    for clock in 1..=2 * classes {
        while fixture.residence.evict(clock, 8, &fixture.table, cost).1 {}
        for (page, left) in (2..).zip(rounds.as_flattened_mut()) {
            if *left == 0 && !version(page).is_resident() {
                *left = clock;
            }
        }
    }
    rounds
}

/// Of two pages with the same accesses, the one that is cheaper to read back is evicted first, in
/// the same round as if all were cheap. A page without further accesses is evicted in its round,
/// whatever it costs.
#[test]
fn expensive_pages_stay_longer() {
    let alike = [[1, 1], [2, 2], [4, 4], [8, 8]];
    assert_eq!(rounds(EVICTION_CLASSES, 1), alike);
    assert_eq!(rounds(TIERED_EVICTION_CLASSES, 1), alike);
    assert_eq!(rounds(TIERED_EVICTION_CLASSES, 8), [[1, 1], [2, 9], [4, 25], [8, 32]]);
}
